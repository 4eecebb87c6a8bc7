"""Checkpoints that lack a tensor of the model: refused on every path, by the tensor's name, unless it is a new one."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, pipeline

import tiny
from kimi_k3 import KimiK3ForCausalLM, KimiK3Model, KimiK3TextConfig, checkpoint_kimi_k3
from kimi_k3.checkpoint_kimi_k3 import Lacking, check_headers, plain_name, plain_tensors, read_headers
from kimi_k3.cli.common import UsageError, load_model
from kimi_k3.modeling_kimi_k3 import KimiK3PreTrainedModel

FOLDERS = ["k3_tiny_mxfp4", "k3_dense_flat", "kimi_linear_flat", "k3_vision/small_signal"]
LOST = "model.layers.3.self_attn.kv_b_proj.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A tiny model's folder in shards, its tensors, and where each of them lies."""
    folder = tmp_path_factory.mktemp("saved")
    tiny.model("kmkm").save_pretrained(folder, max_shard_size="60KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    tensors = {}
    for file in set(index.values()):
        tensors |= load_file(folder / file)
    return folder, tensors, index


@pytest.fixture
def write(saved, tmp_path):
    """Function (tensors, **changes of the configuration) -> a folder with one file."""

    def make(tensors, **changes):
        values = json.loads((saved[0] / "config.json").read_text()) | changes
        (tmp_path / "config.json").write_text(json.dumps(values))
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        return tmp_path

    return make


def without(tensors, *names):
    return {name: tensor for name, tensor in tensors.items() if name not in names}


@pytest.mark.parametrize("dequantize", [False, True], ids=["as-stored", "dequantize"])
@pytest.mark.parametrize("folder", FOLDERS)
def test_every_tensor_is_missed(folder, dequantize, data_dir, monkeypatch):
    """Each tensor of each file, taken away in turn."""
    whole = AutoModelForCausalLM.from_pretrained(data_dir / folder, device_map="meta", dequantize=dequantize)
    headers = read_headers([data_dir / folder / "model.safetensors"])
    found = plain_tensors(whole, ((name, *entry) for name, entry in headers.items()), [])
    lacking, expected = Lacking(whole, (), "the folder", {}), checkpoint_kimi_k3._expected(whole)
    monkeypatch.setattr(checkpoint_kimi_k3, "_expected", lambda model: expected)  # listed once: it takes the time
    check_headers(whole, found, lacking)
    for name in headers:
        with pytest.raises(ValueError) as caught:
            check_headers(whole, {plain: entry for plain, entry in found.items() if entry[0] != name}, lacking)
        assert str(caught.value).startswith(f"the folder lacks {name}, and the configuration asks for it")


def test_every_path_of_loading_misses_it(saved, write):
    """One file, a state dict, the backbone, a pipeline and the commands; the way out stands in the sentence."""
    _, tensors, _ = saved
    folder = write(without(tensors, LOST))
    file = str(folder / "model.safetensors")
    config = KimiK3TextConfig.from_pretrained(folder)
    paths = {
        "file": lambda: AutoModelForCausalLM.from_pretrained(folder),
        "backbone": lambda: KimiK3Model.from_pretrained(folder),
        "on the meta device": lambda: KimiK3ForCausalLM.from_pretrained(folder, device_map="meta"),
        "state dict": lambda: KimiK3ForCausalLM.from_pretrained(
            None, config=config, state_dict=without(tensors, LOST)
        ),
        "pipeline": lambda: pipeline("text-generation", model=str(folder), tokenizer=str(folder)),
        "command": lambda: load_model(folder, torch.device("cpu")),
    }  # fmt: skip
    for name, load in paths.items():
        with pytest.raises(UsageError if name == "command" else ValueError) as caught:
            load()
        sentence = str(caught.value)
        place = "the state dict" if name == "state dict" else file
        assert f"{place} lacks " in sentence and plain_name(LOST) in sentence, name
        assert "get the file again" in sentence and "new_tensors=[" in sentence, name
        assert name == "pipeline" or "\n" not in sentence


def test_the_shard_that_should_hold_it_is_named(saved, tmp_path):
    folder, _, index = saved
    for path in folder.iterdir():
        if path.is_file():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    shard = tmp_path / index[LOST]
    save_file(without(load_file(shard), LOST), shard, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"{shard.name}, which its index names for it, lacks {LOST}, and"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"first_k_dense_replace": 3}, "lacks model.layers.1.mlp.down_proj.weight and 5 more"),
        ({"q_lora_rank": None}, "lacks model.layers.1.self_attn.q_proj.weight and 1 more"),
        ({"num_experts": 10}, "num_experts is 10 in the configuration, and the checkpoint lacks all but 9"),
    ],
    ids=["dense-layers", "query-rank", "more-experts"],
)
def test_a_changed_configuration_asks_for_other_tensors(changes, sentence, saved, write):
    with pytest.raises(ValueError) as caught:
        AutoModelForCausalLM.from_pretrained(write(saved[1], **changes))
    assert sentence in str(caught.value)


def test_new_tensors_are_named_by_the_caller(saved, write):
    """Names of modules or parameters, as the refusal spells them; True for any. Nothing else becomes new by that."""
    _, tensors, _ = saved
    folder = write(without(tensors, "lm_head.weight", LOST))
    for announced in ((), ["lm_head"], ["model.layers.3.self_attn.kv_b"], [LOST]):
        with pytest.raises(ValueError, match=r"lacks (lm_head.weight|model.layers.3.self_attn.kv_b_proj.weight)"):
            KimiK3ForCausalLM.from_pretrained(folder, new_tensors=announced)
    for announced in (["lm_head.weight", LOST], ["lm_head", "model.layers.3.self_attn"], True):
        model, info = AutoModelForCausalLM.from_pretrained(folder, new_tensors=announced, output_loading_info=True)
        assert info["missing_keys"] == {"lm_head.weight", LOST}
        assert torch.isfinite(model.lm_head.weight).all() and model.lm_head.weight.any()
    with pytest.raises(ValueError, match=r"lacks lm_head\.weight and 1 more"):  # said once, and only for that call
        AutoModelForCausalLM.from_pretrained(folder)


class WithScore(KimiK3PreTrainedModel):
    """A class for another task, as one adds it."""

    _new_tensors = ("score",)
    _keys_to_ignore_on_load_unexpected = (r"^lm_head\.",)

    def __init__(self, config):
        super().__init__(config)
        self.model = KimiK3Model(config)
        self.score = nn.Linear(config.hidden_size, 2, bias=False)
        self.post_init()


def test_a_class_declares_its_new_tensors(saved, write, tmp_path):
    _, tensors, _ = saved
    folder = write(tensors)
    model, info = WithScore.from_pretrained(folder, output_loading_info=True)
    assert info["missing_keys"] == {"score.weight"} and not info["unexpected_keys"]
    model.save_pretrained(tmp_path / "trained")
    again, info = WithScore.from_pretrained(tmp_path / "trained", output_loading_info=True)
    assert not info["missing_keys"] and torch.equal(again.score.weight, model.score.weight)
    with pytest.raises(ValueError, match=f"lacks {LOST}"):
        WithScore.from_pretrained(write(without(tensors, LOST)))


def test_of_tied_tensors_one_is_enough(saved, write):
    _, tensors, _ = saved
    embedding = tensors["model.embed_tokens.weight"]
    tied = {**tensors, "lm_head.weight": embedding}
    for lost in ("lm_head.weight", "model.embed_tokens.weight"):
        model = KimiK3ForCausalLM.from_pretrained(write(without(tied, lost), tie_word_embeddings=True))
        assert model.lm_head.weight is model.model.embed_tokens.weight and torch.equal(model.lm_head.weight, embedding)
    neither = without(tied, "lm_head.weight", "model.embed_tokens.weight")
    with pytest.raises(ValueError, match=r"lacks lm_head\.weight and 1 more"):
        KimiK3ForCausalLM.from_pretrained(write(neither, tie_word_embeddings=True))


def test_a_part_is_still_read_into_a_model_that_exists(saved):
    """`load_state_dict(strict=False)` is torch's, for whoever wants a part."""
    _, tensors, _ = saved
    model = tiny.model("kmkm", seed=1)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({"lm_head.weight": tensors["lm_head.weight"]})
    model.load_state_dict({"lm_head.weight": tensors["lm_head.weight"]}, strict=False)
    assert torch.equal(model.lm_head.weight, tensors["lm_head.weight"])
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items() if name != "lm_head.weight")
