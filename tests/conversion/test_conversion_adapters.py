"""Adapters on routed experts, out in the form of other engines and back."""

import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from kimi_k3.conversion import ConversionError
from kimi_k3.conversion.adapters import import_expert_loras
from kimi_k3.training import export_expert_loras, lora_targets

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_ONE = torch.ones(2, 32)
W1 = "layers.2.block_sparse_moe.experts.3.w1.lora_{}.weight"


@pytest.fixture
def base(data_dir):
    return data_dir / "k3_tiny_mxfp4"


def load(base):
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)


@torch.no_grad()
def logits(model):
    return model(input_ids=torch.arange(10, 40)[None], use_cache=False).logits


@pytest.fixture
def exported(base, tmp_path):
    """An adapter with other ranks and scales in some layers, and its folder in the form of other engines."""
    torch.manual_seed(0)
    model = load(base)
    patterns = {"rank_pattern": {r"layers\.2\..*experts": 2}, "alpha_pattern": {r"layers\.[34]\..*experts": 20}}
    config = LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, **lora_targets(model, router=True), **patterns)
    adapter = get_peft_model(model, config).eval()
    adapter.save_pretrained(tmp_path / "ours")
    export_expert_loras(adapter, tmp_path / "exported")
    return adapter, tmp_path / "exported"


def edit(folder, change):
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def name_of(tensors, end):
    return next(name for name in tensors if name.endswith(end))


def test_out_and_back_is_the_same_adapter(exported, base, tmp_path):
    """Faults 91, 92, 95: every factor to the bit, and the same logits from the imported folder."""
    adapter, folder = exported
    import_expert_loras(folder, tmp_path / "back", base)
    before, after = (load_file(tmp_path / name / WEIGHTS) for name in ("ours", "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    again = PeftModel.from_pretrained(load(base), tmp_path / "back").eval()
    assert torch.equal(logits(again), logits(adapter))
    assert not torch.equal(logits(again), logits(load(base)))


def test_two_factors_of_gate_and_up_and_experts_that_are_not_adapted(exported, base, tmp_path):
    """The update of every expert, against the factors of the file multiplied out."""
    _, folder = exported

    def change(tensors):
        generator = torch.Generator().manual_seed(1)
        for name in [name for name in tensors if "layers.2." in name and ".experts." in name]:
            if ".w3.lora_A" in name:
                tensors[name] = torch.randn(tensors[name].shape, generator=generator)
            if ".experts.5." in name:
                del tensors[name]

    edit(folder, change)
    import_expert_loras(folder, tmp_path / "back", base)
    tensors = load_file(folder / WEIGHTS)
    model = PeftModel.from_pretrained(load(base), tmp_path / "back")
    layer = next(m for name, m in model.named_modules() if name.endswith("layers.2.block_sparse_moe.experts"))
    assert layer.r["default"] == 4 and layer.scaling["default"] == 8 / 2
    prefix = name_of(tensors, W1.format("A")).partition("layers.2.")[0] + "layers.2.block_sparse_moe.experts"
    for weight, expert, update in layer._updates(["default"]):
        matrices = ("w1", "w3") if weight == "gate_up" else ("w2",)
        for matrix, part in zip(matrices, update.chunk(len(matrices)), strict=True):
            factors = [tensors.get(f"{prefix}.{expert}.{matrix}.lora_{factor}.weight") for factor in "BA"]
            expected = torch.zeros_like(part) if factors[0] is None else factors[0] @ factors[1] * 4.0
            torch.testing.assert_close(part, expected)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t.pop(name_of(t, W1.format("B"))), r"experts\.3\.w1 has lora_A without its partner"),
        (lambda t: t.update({name_of(t, W1.format("A")): torch.ones(2, 5)}), r"experts\.3\.w1 has lora_A \[2, 5\]"),
        (
            lambda t: t.update(
                {name_of(t, W1.format("A")): torch.ones(3, 32), name_of(t, W1.format("B")): torch.ones(32, 3)}
            ),
            r"different ranks or scales",
        ),
        (
            lambda t: t.update({name_of(t, W1.format("A")).replace("experts.3", "experts.9"): torch.ones(2, 32)}),
            r"experts\.9\.w1\.lora_A\.weight: the model in .* has 8 routed experts",
        ),
        (
            lambda t: t.update({name_of(t, W1.format("A")).replace("lora_A.weight", "lora_magnitude_vector"): _ONE}),
            r"experts\.3\.w1\.lora_magnitude_vector is not lora_A\.weight",
        ),
        (
            lambda t: t.update({name_of(t, W1.format("A")).replace(".w1.", ".gate_proj."): _ONE}),
            r"experts\.3\.gate_proj\.lora_A\.weight is not .* of w1, w2 or w3",
        ),
        (lambda t: [t.pop(name) for name in list(t) if ".experts." in name], "adapts no routed expert"),
    ],
    ids=["half", "shape", "rank", "expert", "dora", "names", "none"],
)
def test_adapters_that_do_not_fit_are_refused(change, message, exported, base, tmp_path):
    _, folder = exported
    edit(folder, change)
    with pytest.raises(ConversionError, match=message):
        import_expert_loras(folder, tmp_path / "back", base)
    assert not (tmp_path / "back").exists()


def test_what_is_no_adapter_is_refused(base, tmp_path):
    with pytest.raises(ConversionError, match=r"is not an adapter: it has no adapter_config\.json"):
        import_expert_loras(base, tmp_path / "back", base)
    (tmp_path / CONFIG).write_text(json.dumps({}))
    with pytest.raises(ConversionError, match=r"it has no adapter_model\.safetensors"):
        import_expert_loras(tmp_path, tmp_path / "back", base)
