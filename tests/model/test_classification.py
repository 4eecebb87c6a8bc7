"""The classes with a head for labels: loaded from a language model, trained, saved, read by the Auto classes."""

import json
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    pipeline,
)
from transformers.quantizers.base import get_keys_to_not_convert

import kimi_k3
import tiny
from kimi_k3 import (
    KimiK3Config,
    KimiK3ForSequenceClassification,
    KimiK3ForTokenClassification,
    KimiK3Model,
)

SMALL = Path(kimi_k3.__file__).parent / "checkpoints" / "small"
CLASSES = [
    (AutoModelForSequenceClassification, KimiK3ForSequenceClassification),
    (AutoModelForTokenClassification, KimiK3ForTokenClassification),
]


@pytest.fixture(scope="module")
def ids():
    return torch.randint(3, tiny.VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def causal(tmp_path_factory):
    """A folder of a language model, and the model."""
    folder, model = tmp_path_factory.mktemp("causal"), tiny.model("kmk")
    model.save_pretrained(folder)
    return folder, model


@pytest.mark.parametrize(("auto", "kind"), CLASSES, ids=["sequence", "token"])
def test_a_language_model_gets_a_head_for_labels(auto, kind, causal, ids, tmp_path):
    """The backbone is that of the checkpoint, the head is new, both train; what is saved is read again, and by the
    backbone's class."""
    folder, language_model = causal
    model, report = auto.from_pretrained(folder, num_labels=3, output_loading_info=True)
    assert type(model) is kind and model.config.num_labels == 3
    assert {name.split(".")[0] for name in report["missing_keys"]} == {"score"} and not report["unexpected_keys"]
    labels = torch.tensor([2, 0]) if auto is AutoModelForSequenceClassification else torch.arange(18).view(2, 9) % 3
    out = model.eval()(ids, labels=labels)
    hidden = language_model.model(ids).last_hidden_state
    every = hidden @ model.score.weight.T + (0 if model.score.bias is None else model.score.bias)
    expected = every[:, -1] if labels.dim() == 1 else every
    torch.testing.assert_close(out.logits, expected, rtol=1e-5, atol=1e-6)
    loss = torch.nn.functional.cross_entropy(expected.flatten(0, -2), labels.flatten())
    torch.testing.assert_close(out.loss, loss, rtol=1e-5, atol=1e-6)
    out.loss.backward()
    assert model.score.weight.grad.any() and model.model.embed_tokens.weight.grad.any()
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == [kind.__name__] and config["model_type"] == "kimi_linear"
    with torch.no_grad():
        assert torch.equal(auto.from_pretrained(tmp_path).eval()(ids).logits, model(ids).logits)
    report = KimiK3Model.from_pretrained(tmp_path, output_loading_info=True)[1]
    assert not report["missing_keys"] and not report["unexpected_keys"]


def test_pipelines_know_the_classes(causal, caplog):
    """They log an error about a class that is not in their list."""
    tokenizer = AutoTokenizer.from_pretrained(SMALL)
    for task, (_, kind) in zip(("text-classification", "token-classification"), CLASSES, strict=True):
        model = kind(tiny.config("km", vocab_size=2048))
        found = pipeline(task, model=model, tokenizer=tokenizer, device="cpu")("The house stood on a hill.")
        assert {entry.get("label", entry.get("entity")) for entry in found} <= {"LABEL_0", "LABEL_1"} and found
    assert "not supported" not in caplog.text


@torch.no_grad()
def test_a_text_is_read_at_its_last_token_wherever_padding_lies(causal, ids):
    model = KimiK3ForSequenceClassification.from_pretrained(causal[0], num_labels=1).double().eval()
    whole = torch.cat([model(ids[:1]).logits, model(ids[1:, :6]).logits])
    for left in (False, True):
        padded, mask = ids.clone(), torch.ones_like(ids)
        padding = slice(0, 3) if left else slice(6, 9)
        padded[1] = ids[1].roll(3) if left else ids[1]
        padded[1, padding], mask[1, padding] = model.config.pad_token_id, 0
        torch.testing.assert_close(model(padded, attention_mask=mask).logits, whole, rtol=1e-10, atol=1e-12)


def test_a_multimodal_checkpoint_with_packed_experts(data_dir, ids, tmp_path):
    """Its text part is read, with the labels that the whole configuration was given."""
    folder = data_dir / "k3_tiny_mxfp4"
    for auto, kind in CLASSES:
        model = auto.from_pretrained(folder, num_labels=4, dtype=torch.float32)
        assert isinstance(model, kind) and model.score.out_features == 4
        assert model.model.expert_storage == "packed" and model(ids).logits.shape[-1] == 4
    config = AutoConfig.from_pretrained(folder, id2label={0: "bad", 1: "fair", 2: "good"})
    assert isinstance(config, KimiK3Config)
    model = AutoModelForSequenceClassification.from_config(config)
    assert model.config.id2label[2] == "good" and model.score.out_features == 3
    assert not hasattr(model.model, "vision_tower")
    model.save_pretrained(tmp_path)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert type(again) is KimiK3ForSequenceClassification and again.config.id2label == model.config.id2label
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)


@pytest.mark.parametrize(("auto", "kind"), CLASSES, ids=["sequence", "token"])
def test_quantizers_leave_the_head_alone(auto, kind):
    """They would quantise random values, and keep the module whose weight is the last parameter."""
    assert "score" in get_keys_to_not_convert(kind(tiny.config("km")))
