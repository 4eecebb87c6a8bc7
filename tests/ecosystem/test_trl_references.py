"""trl's trainers where they build models themselves: from a path, or a reference beside the policy.

trl reads attributes of a configuration without asking whether they are there, and loads again from where the policy was
loaded. Before the first update policy and reference are one model, which the losses of that step show.
"""

import json
import math
import shutil

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl")

PROMPTS = ["w5 w9", "w7 w30 w8", "w11", "w40 w41"]
SETTINGS = {
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "max_steps": 1,
    "per_device_train_batch_size": 4,
    "gradient_checkpointing": False,
    "logging_steps": 1,
    "save_strategy": "no",
    "disable_tqdm": True,
}


@pytest.fixture(scope="module", params=["k3_dense_flat", "k3_tiny_mxfp4"])
def folder(request, data_dir, tmp_path_factory):
    """A flat and a multimodal checkpoint as others publish them, without our code, with a tokenizer.

    The flat one has no `auto_map`, and calls itself by the name of a class of transformers that is not its own.
    """
    folder = tmp_path_factory.mktemp(request.param)
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(data_dir / request.param / name, folder / name)
    config = json.loads((folder / "config.json").read_text())
    assert ("auto_map" in config) == (config["architectures"] != ["KimiLinearForCausalLM"])
    backend = Tokenizer(models.WordLevel({f"w{i}": i for i in range(160)}, "w0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="w2", pad_token="w0")
    tokenizer.save_pretrained(folder)
    return folder


def first_step(trainer):
    trainer.train()
    return trainer.state.log_history[0]


def test_fine_tuning_by_path(folder, tmp_path):
    data = datasets.Dataset.from_dict({"text": PROMPTS})
    options = {"max_length": 16, "model_init_kwargs": {"dequantize": True, "dtype": "float32"}}
    trainer = trl.SFTTrainer(str(folder), args=trl.SFTConfig(str(tmp_path), **options, **SETTINGS), train_dataset=data)
    assert first_step(trainer)["loss"] > 0 and type(trainer.model).__module__.startswith("kimi_k3.")
    trained = {name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    assert any(name.endswith("gate_up_proj") for name in trained) == ("mxfp4" in folder.name), "dequantize was dropped"


def policy(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32", dequantize=True)


def test_preferences_against_a_reference(folder, tmp_path):
    data = {"prompt": PROMPTS, "chosen": ["w20 w21", "w9"] * 2, "rejected": ["w30", "w31 w32"] * 2}
    settings = trl.DPOConfig(str(tmp_path), max_length=16, **SETTINGS)
    trainer = trl.DPOTrainer(policy(folder), args=settings, train_dataset=datasets.Dataset.from_dict(data))
    assert first_step(trainer)["loss"] == pytest.approx(math.log(2), abs=1e-4)  # the reference is the policy


def test_single_preferences_against_a_reference(folder, tmp_path):
    data = {"prompt": PROMPTS, "completion": ["w20 w21", "w9"] * 2, "label": [True, False] * 2}
    settings = trl.KTOConfig(str(tmp_path), max_length=16, **SETTINGS)
    trainer = trl.KTOTrainer(policy(folder), args=settings, train_dataset=datasets.Dataset.from_dict(data))
    assert first_step(trainer)["loss"] == pytest.approx(0.5, abs=1e-4)  # 1 - sigmoid(0)


@pytest.mark.parametrize("batches", [False, True], ids=["generate", "generate_batch"])
def test_rewards_beside_a_reference(folder, tmp_path, batches):
    """Rollouts by `generate`, and by continuous batching."""
    settings = {**SETTINGS, "use_transformers_continuous_batching": batches}
    settings = trl.GRPOConfig(str(tmp_path), beta=0.1, num_generations=2, max_completion_length=3, **settings)
    trainer = trl.GRPOTrainer(
        policy(folder),
        reward_funcs=lambda completions, **kwargs: [float(len(set(each.split()))) for each in completions],
        args=settings,
        train_dataset=datasets.Dataset.from_dict({"prompt": PROMPTS}),
    )
    assert abs(first_step(trainer)["kl"]) < 1e-4


@pytest.mark.one_release
@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_rewards_of_a_model_by_its_path(kind, folder, tmp_path):
    """trl loads it itself, as a classifier of one label."""
    settings = getattr(trl, f"{kind}Config")(
        str(tmp_path / "run"), num_generations=2, max_completion_length=3, beta=0.1, **SETTINGS
    )
    rewarding = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype="float32")
    rewarding.save_pretrained(tmp_path / "reward")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.save_pretrained(tmp_path / "reward")
    trainer = getattr(trl, f"{kind}Trainer")(
        policy(folder), str(tmp_path / "reward"), args=settings,
        train_dataset=datasets.Dataset.from_dict({"prompt": PROMPTS}),
    )  # fmt: skip
    said = first_step(trainer)
    texts = [p + c for p, c in zip(trainer._logs["prompt"], trainer._logs["completion"], strict=True)]
    with torch.no_grad():
        expected = [rewarding(**tokenizer(text, return_tensors="pt")).logits.item() for text in texts]
    assert said["reward"] == pytest.approx(sum(expected) / len(expected), abs=1e-4) and abs(said["kl"]) < 1e-4


def test_the_auxiliary_loss_that_trl_makes_of_router_logits(folder, tmp_path):
    """Mixtral's: E times the share of choices of an expert by its mean probability, summed, over all layers at once.

    Of a softmax of the logits, and of choices without the selection bias.
    """
    data = datasets.Dataset.from_dict({"text": PROMPTS})
    settings = trl.SFTConfig(str(tmp_path), max_length=16, router_aux_loss_coef=0.1, **SETTINGS)
    trainer = trl.SFTTrainer(policy(folder), args=settings, train_dataset=data)
    if "mxfp4" not in folder.name:
        with pytest.raises(ValueError, match=r"no routed experts: .* \(trl asks .* router_aux_loss_coef is set\)"):
            trainer.train()
        return
    (batch,) = trainer.get_train_dataloader()
    with torch.no_grad():
        logits = trainer.model(**batch, output_router_logits=True).router_logits
    config, real = trainer.model.config.get_text_config(), batch["attention_mask"].flatten().bool()
    assert len(logits) == 6 and not real.all()
    scores = torch.cat([layer[real] for layer in logits]).double()
    chosen = F.one_hot(scores.topk(config.num_experts_per_token).indices, config.num_experts).double()
    expected = config.num_experts * (chosen.sum(1).mean(0) * scores.softmax(-1).mean(0)).sum()
    assert first_step(trainer)["aux_loss"] == pytest.approx(expected.item(), rel=1e-5)
