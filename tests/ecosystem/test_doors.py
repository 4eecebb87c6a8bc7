"""Lists and attributes by which transformers, lm-eval, accelerate and trl find out what a model is."""

import copy
import json
import subprocess
import sys
import types

import pytest
import torch
import torch.nn.functional as F
import transformers
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments
from transformers.modelcard import TrainingSummary
from transformers.models.auto import modeling_auto

import tiny
from kimi_k3 import KimiK3Config, KimiK3ForCausalLM, KimiK3ForConditionalGeneration, KimiK3TextConfig


@pytest.fixture(scope="module")
def tokenizer():
    backend = Tokenizer(models.WordLevel({f"w{i}": i for i in range(tiny.VOCABULARY)}, "w0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="w2", pad_token="w0")


def of_class(kind):
    """A tiny model, as a loader, FSDP2, peft or a user hands it to a trainer."""
    text = tiny.model(**tiny.NO_SPECIAL)
    if kind == "multimodal":
        return KimiK3ForConditionalGeneration(KimiK3Config(text_config=text.config)).eval()
    if kind == "adapted":
        return get_peft_model(text, LoraConfig(r=2, target_modules=["o_proj"], task_type="CAUSAL_LM")).eval()
    if kind == "sharded":  # what `torch.distributed.fsdp.fully_shard` does to the class of a model
        text.__class__ = type("FSDPKimiK3ForCausalLM", (KimiK3ForCausalLM,), {})
    return text


def trainer(model, folder, **settings):
    return Trainer(model, TrainingArguments(str(folder), report_to=[], use_cpu=True, **settings))


@pytest.mark.parametrize("kind", ["text", "multimodal", "adapted", "sharded"])
@torch.no_grad()
def test_smoothed_labels_are_shifted(kind, tmp_path):
    """A token's loss is that of the next token; Trainer looks for the name of the class in transformers' list."""
    model = of_class(kind)
    ids = torch.randint(3, tiny.VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(0))
    labels = ids.masked_fill(torch.arange(16) < 4, -100)
    smoothed = trainer(model, tmp_path, label_smoothing_factor=0.1)
    loss = smoothed.compute_loss(model, {"input_ids": ids, "labels": labels.clone()})
    logits, targets = model(input_ids=ids).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    # torch spreads the same share over all words, the right one included
    torch.testing.assert_close(loss, F.cross_entropy(logits, targets, label_smoothing=0.1))
    assert smoothed._loss_shifts_labels


@pytest.mark.parametrize("kind", ["text", "multimodal"])
def test_pipelines_and_model_cards_know_the_class(kind, tokenizer, tmp_path, monkeypatch):
    model, errors = of_class(kind), []
    monkeypatch.setattr(transformers.pipelines.base.logger, "error", errors.append)
    pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    said = pipe("w5 w9", max_new_tokens=3, do_sample=False, return_full_text=False)[0]["generated_text"]
    expected = model.generate(torch.tensor([[5, 9]]), max_new_tokens=3, do_sample=False)[0, 2:]
    assert said.split() == [f"w{number}" for number in expected.tolist()] and not errors
    assert TrainingSummary.from_trainer(trainer(model, tmp_path), model_name="tiny").tasks == "text-generation"


def test_images_are_not_promised(tokenizer):
    """The multimodal class is found where models with images are, and by no list that would have them sent: it needs
    no tower, and pipelines of images want a processor of text too, which there is none of yet."""
    model = of_class("multimodal")
    for auto in (transformers.AutoModelForImageTextToText, transformers.AutoModelForMultimodalLM):
        assert type(auto.from_config(model.config)) is KimiK3ForConditionalGeneration
    for names in (
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    ):
        assert not {"kimi_k3", "KimiK3ForConditionalGeneration"} & {*names, *names.values()}
    with pytest.raises(ValueError, match="pixel_values: this model reads text only, its config has no vision_config"):
        model(input_ids=torch.tensor([[5, 9]]), pixel_values=torch.zeros(1, 3, 4, 4))


@pytest.mark.one_release
def test_without_our_import_packed_experts_are_not_read(tmp_path):
    """transformers takes its own class by the model type of the file; nothing is loaded wrong."""
    tiny.model(**tiny.PACKED).save_pretrained(tmp_path)
    code = f"import transformers; transformers.AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})"
    run = subprocess.run(
        [sys.executable, "-P", "-c", code], env=tiny.environment(HF_HUB_OFFLINE="1"), stderr=-1, text=True
    )
    assert run.returncode and "ImportError" in run.stderr and "compressed-tensors" in run.stderr


def test_lm_eval_takes_it_for_a_causal_model(monkeypatch):
    harness = pytest.importorskip("lm_eval.models.huggingface")
    warnings = []
    monkeypatch.setattr(harness.eval_logger, "warning", lambda *words: warnings.append(words))
    for config in (tiny.config(), KimiK3Config(text_config=tiny.config())):
        told = types.SimpleNamespace(AUTO_MODEL_CLASS=None)
        harness.HFLM._get_backend(told, config)
        assert told.backend == "causal" and told.AUTO_MODEL_CLASS is transformers.AutoModelForCausalLM
    assert not warnings


def test_a_tokenizer_without_a_class_is_loaded(tokenizer, tmp_path):
    """As beside transformers' own models: the file `tokenizer.json` is enough."""
    tiny.config().save_pretrained(tmp_path)
    tokenizer.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    for auto in (transformers.AutoTokenizer, transformers.AutoProcessor):
        assert auto.from_pretrained(tmp_path)("w5 w9").input_ids == [5, 9]


def test_accelerate_refuses_to_cut_rows():
    """It knows layers with a recurrent state by their type; `kimi_k3.parallel.context_parallel` cuts rows."""
    big_modeling = pytest.importorskip("accelerate.big_modeling")
    for name in ("_attach_context_parallel_hooks", "_refuse_recurrent_layers_under_sequence_parallelism"):
        with pytest.raises(ValueError, match="linear_attention"):
            getattr(big_modeling, name)(of_class("multimodal"))


def test_attributes_that_others_read_without_asking():
    """trl reads `auto_map` of whatever it loads, and counts FLOPs by names of its own."""
    utils = pytest.importorskip("trl.trainer.utils")
    for config in (tiny.config(), KimiK3Config(text_config=tiny.config())):
        assert config.auto_map == {} and "auto_map" not in config.to_dict() | config.to_diff_dict()
        other = type(config).from_dict(config.to_dict())
        other.auto_map["AutoModel"] = "modeling.Model"  # `register_for_auto_class` writes into it
        assert config.auto_map == {} and other.to_dict()["auto_map"] == other.auto_map
    assert utils.compute_flops_per_token(tiny.config(), 64) > utils.compute_flops_per_token(tiny.config(), 32) > 0


def test_a_config_keeps_the_name_of_its_file_until_a_model_is_saved(tmp_path):
    read = KimiK3TextConfig.from_dict(tiny.config().to_dict() | {"architectures": ["KimiLinearForCausalLM"]})
    assert not hasattr(transformers, read.architectures[0]), "a class by that name would be taken for ours"
    assert read.to_dict()["architectures"] == ["KimiLinearForCausalLM"], "as it was read, until a model is saved"
    model = KimiK3ForCausalLM(copy.deepcopy(read))
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["KimiK3ForCausalLM"]
