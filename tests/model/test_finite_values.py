"""Values that are no numbers are found at load when asked for."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import tiny

EXPERT = "model.layers.1.block_sparse_moe.experts.4.w2.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folders = {}
    for name, changes in (("packed", tiny.PACKED), ("float", {})):
        folders[name] = tmp_path_factory.mktemp(name)
        tiny.model("kmk", **changes).save_pretrained(folders[name])
    return folders


@pytest.mark.parametrize(
    "family, name, value, sentence",
    [
        ("float", "model.embed_tokens.weight", float("nan"), r"embed_tokens\.weight has 1 values that"),
        ("float", "model.layers.0.self_attn.A_log", float("inf"), r"layers\.0\.self_attn\.A_log has 1 values that"),
        ("float", EXPERT, float("-inf"), r"layers\.1\.block_sparse_moe\.experts\.down_proj has 1 values that"),
        ("packed", f"{EXPERT}_scale", 255, r"experts\.down_proj_scale has 1 scale bytes of 254 or 255"),
        ("packed", f"{EXPERT}_scale", 254, r"experts\.down_proj_scale has 1 scale bytes of 254 or 255"),
        ("packed", f"{EXPERT}_scale", 253, None),
        ("packed", f"{EXPERT}_packed", 255, None),
    ],
)  # fmt: skip
def test_values_that_are_not_finite(family, name, value, sentence, saved):
    path = saved[family] / "model.safetensors"
    tensors = load_file(path)
    whole = tensors[name].clone()
    tensors[name].flatten()[0] = value
    save_file(tensors, path, metadata={"format": "pt"})
    try:
        AutoModelForCausalLM.from_pretrained(saved[family])
        if sentence is None:
            AutoModelForCausalLM.from_pretrained(saved[family], check_finite=True)
            return
        with pytest.raises(ValueError, match=sentence):
            AutoModelForCausalLM.from_pretrained(saved[family], check_finite=True)
    finally:
        save_file({**tensors, name: whole}, path, metadata={"format": "pt"})


def test_finite_values_pass(saved):
    for folder in saved.values():
        for device_map in (None, "meta"):
            model, info = AutoModelForCausalLM.from_pretrained(
                folder, check_finite=True, output_loading_info=True, device_map=device_map
            )
            assert not any(info.values()) and isinstance(model, torch.nn.Module)
