"""Folders that other tools write, with the names of a model in memory, and models changed after they were loaded."""

import accelerate
import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

import tiny
from kimi_k3 import KimiK3ForCausalLM
from kimi_k3.checkpoint_kimi_k3 import read_headers

IDS = torch.arange(3, 30)[None] % tiny.VOCABULARY
FAMILIES = {"experts": {}, "packed": tiny.PACKED, "dense": tiny.DENSE, "kimi-linear": tiny.KIMI_LINEAR}


def logits(model, ids=IDS):
    with torch.no_grad():
        return model.eval()(ids).logits


def write_in_memory_names(model, folder):
    """What `Accelerator.save_model` and `accelerate merge-weights` leave: the state dict, and a configuration."""
    Accelerator(cpu=True).save_model(model, folder)
    model.config.save_pretrained(folder)


# --- names of a model in memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_names_in_memory_load(family, tmp_path):
    """And what is saved then has the released names and shapes again."""
    model = tiny.model("kmk", **FAMILIES[family])
    write_in_memory_names(model, tmp_path)
    names = read_headers([tmp_path / "model.safetensors"])
    assert names.keys() == model.state_dict().keys(), "otherwise this test says nothing"
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()) and torch.equal(logits(again), logits(model))
    again.save_pretrained(tmp_path / "again")
    model.save_pretrained(tmp_path / "released")
    if family != "dense":  # whose names are the released ones, so its `A_log` returns in the shape it came
        saved, released = (read_headers([tmp_path / name / "model.safetensors"]) for name in ("again", "released"))
        assert saved == released


def test_transformers_own_switch_loads_again(tmp_path):
    """`save_original_format=False` writes the names in memory, here in shards."""
    model = tiny.model("kmk")
    model.save_pretrained(tmp_path, save_original_format=False, max_shard_size="50KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2 and any(name.endswith("experts.gate_up_proj") for name in read_headers(shards))
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model))


def test_packed_experts_in_memory_are_dequantized(data_dir, tmp_path):
    """And a text-only class reads them out of a multimodal folder."""
    whole = AutoModelForCausalLM.from_pretrained(data_dir / "k3_tiny_mxfp4", dtype=torch.float32)
    write_in_memory_names(whole, tmp_path)
    for model_class in (AutoModelForCausalLM, KimiK3ForCausalLM):
        expected = model_class.from_pretrained(data_dir / "k3_tiny_mxfp4", dtype=torch.float32, dequantize=True)
        got = model_class.from_pretrained(tmp_path, dtype=torch.float32, dequantize=True)
        assert all(torch.equal(tensor, expected.state_dict()[name]) for name, tensor in got.state_dict().items())


def test_what_fits_no_expert_is_refused(tmp_path):
    model = tiny.model("kmk")
    write_in_memory_names(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.block_sparse_moe.experts.gate_up_proj"
    for change, sentence in (
        (lambda t: t[:-1].clone(), rf"{name} has shape \[8, 48, 32\], not \[9, rows, columns\] of all experts"),
        (lambda t: t[:, :-2].clone(), r"has shape \[23, 32\], the config asks for \[24, 32\]"),
        (None, r"lacks model\.layers\.1\.block_sparse_moe\.experts\.0\.w1\.weight and 17 more"),
    ):
        changed = dict(tensors)
        tensor = changed.pop(name)
        if change is not None:
            changed[name] = change(tensor)
        save_file(changed, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=sentence):
            AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("load", [accelerate.load_checkpoint_and_dispatch, accelerate.load_checkpoint_in_model])
def test_loaders_that_know_names_in_memory_alone(load, tmp_path):
    """accelerate reads what accelerate wrote; of a released folder it refuses the first tensor that does not fit."""
    model = tiny.model("kmk")
    for write, reads in ((lambda folder: write_in_memory_names(model, folder), True), (model.save_pretrained, False)):
        write(tmp_path / str(reads))
        with accelerate.init_empty_weights():
            empty = KimiK3ForCausalLM(tiny.config("kmk"))
        if reads:
            load(empty, str(tmp_path / str(reads)), device_map={"": "cpu"})
            assert torch.equal(logits(empty), logits(model))
            continue
        with pytest.raises((ValueError, RuntimeError), match=r"A_log|experts|does not have|shape"):
            load(empty, str(tmp_path / str(reads)), device_map={"": "cpu"})


# --- models changed after loading ------------------------------------------------------------------------------------


def fewer_layers(model, keep, **changes):
    model.model.layers = nn.ModuleList(layer for i, layer in enumerate(model.model.layers) if i in keep)
    model.config.num_hidden_layers = len(keep)
    model.config.linear_attn_config = {**model.config.linear_attn_config, **changes}


def test_fewer_layers_save_to_a_folder_that_loads(tmp_path):
    model = tiny.model("kmkm")
    fewer_layers(model, (0, 1), kda_layers=[1], full_attn_layers=[2])
    model.save_pretrained(tmp_path)
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()) and torch.equal(logits(again), logits(model))


class Quantised(torch.Tensor):
    """As some tool leaves it in the place of a weight."""


def other_head(model):
    model.lm_head = nn.Linear(56, 71, bias=True)


def quantise(model):
    weight = torch.Tensor._make_subclass(Quantised, model.lm_head.weight.detach())
    model.lm_head.weight = nn.Parameter(weight)


def shorter_bias(model):
    gate = model.model.layers[1].block_sparse_moe.gate
    gate.e_score_correction_bias = gate.e_score_correction_bias[:-1]


UNSAVABLE = {
    "lists": (lambda m: fewer_layers(m, (0, 1)), "would not load: kda_layers and full_attn_layers"),
    "kinds": (
        lambda m: fewer_layers(m, (0, 2), kda_layers=[1], full_attn_layers=[2]),
        r"layers\.1\.self_attn\.A_log, which its configuration",
    ),
    "number": (lambda m: fewer_layers(m, (0, 1, 2, 3)[:2], kda_layers=[1, 3], full_attn_layers=[2, 4]), "would not"),
    "a feature": (
        lambda m: setattr(m.config, "mla_use_output_gate", False),
        r"g_proj\.weight, which its configuration",
    ),
    "a size": (lambda m: setattr(m.config, "vocab_size", 80), r"has shape \[71, 56\], its configuration asks for \[80"),
    "experts": (lambda m: setattr(m.config, "num_experts", 8), r"asks for \[8, "),
    "a buffer": (shorter_bias, r"gate\.e_score_correction_bias has shape \[8\], its configuration asks for \[9\]"),
    "a bias": (other_head, r"the model has lm_head\.bias, which its configuration has no place for"),
    "another tensor": (quantise, r"lm_head\.weight is a Quantised, which cannot be written here"),
}


@pytest.mark.parametrize("change", UNSAVABLE)
def test_a_model_that_its_configuration_does_not_describe_is_not_saved(change, tmp_path):
    model = tiny.model("kmkm")
    apply, sentence = UNSAVABLE[change]
    apply(model)
    with pytest.raises(ValueError, match=sentence):
        model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_what_is_added_beside_the_layers_is_saved(tmp_path):
    """A value head, say; whoever loads it knows of it."""
    model = tiny.model("kmk")
    model.v_head = nn.Linear(3, 1)
    model.save_pretrained(tmp_path)
    assert "v_head.weight" in load_file(tmp_path / "model.safetensors")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model))


def test_saving_in_another_number_of_files_leaves_one_model(tmp_path):
    """transformers would read the former `model.safetensors` beside a new index."""
    models = [tiny.model("kmk", seed=seed) for seed in range(3)]
    for model, size in zip(models, ("50GB", "60KB", "50GB"), strict=True):
        model.save_pretrained(tmp_path, max_shard_size=size)
        assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model))
        assert (tmp_path / "model.safetensors").exists() != (tmp_path / "model.safetensors.index.json").exists()


def test_a_model_is_not_saved_beneath_an_adapter(tmp_path):
    """Merged into it, the adapter would act a second time on what is loaded."""
    model = tiny.model("kmk")
    adapter = get_peft_model(model, LoraConfig(r=2, target_modules=["o_proj"], init_lora_weights=False)).eval()
    adapter.save_pretrained(tmp_path)
    files = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"has an adapter \(adapter_config\.json\), which would act on this model"):
        adapter.merge_and_unload().save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == files


def test_a_class_that_takes_more_than_a_configuration_is_saved(tmp_path):
    class Wider(KimiK3ForCausalLM):
        def __init__(self, config, width):
            super().__init__(config)
            self.extra = torch.nn.Linear(width, width)

    Wider(tiny.config("k"), 3).save_pretrained(tmp_path)
    assert "extra.weight" in load_file(tmp_path / "model.safetensors")
