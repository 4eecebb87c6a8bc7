"""Quantizers of transformers beside our packed experts: each keeps its own section, and a saved folder loads again."""

import importlib.util
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Mxfp4Config

import tiny
from kimi_k3 import KimiK3Config, KimiK3ForCausalLM, KimiK3ForConditionalGeneration, KimiK3TextConfig

IDS = torch.arange(3, 25)[None]  # 22 tokens
BITS = {"quant_method": "bitsandbytes", "load_in_8bit": True}


def needs(package):
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed")


def logits(model):
    with torch.no_grad():
        return model.eval()(IDS).logits


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Name -> a folder with packed experts, with float ones, and with packed ones in a multimodal configuration."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("packed", "float", "nested")}
    tiny.model("kmk", **tiny.PACKED).save_pretrained(folders["packed"])
    tiny.model("kmk").save_pretrained(folders["float"])
    text = tiny.config("kmk", **tiny.PACKED)
    KimiK3ForConditionalGeneration(KimiK3Config(text_config=text, **tiny.SPECIAL)).save_pretrained(folders["nested"])
    return folders


# --- Mxfp4Config -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("section", [Mxfp4Config(dequantize=True), {"quant_method": "mxfp4", "dequantize": True}])
def test_mxfp4_config_dequantizes(section, saved, tmp_path):
    """As documented for other models: experts that train, and a folder that loads again."""
    model = AutoModelForCausalLM.from_pretrained(saved["packed"], quantization_config=section)
    ours = AutoModelForCausalLM.from_pretrained(saved["packed"], dequantize=True)
    assert torch.equal(logits(model), logits(ours))
    model(IDS, labels=IDS).loss.backward()
    assert sum(p.grad is not None for name, p in model.named_parameters() if ".experts." in name) == 4
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model))


def test_mxfp4_config_keeps_experts_packed(saved):
    for name in ("packed", "nested"):
        model = AutoModelForCausalLM.from_pretrained(saved[name], quantization_config=Mxfp4Config())
        assert any(parameter.endswith("_packed") for parameter in model.state_dict())
        assert not hasattr(model.config, "quantization_config")
    with pytest.raises(ValueError, match=r"stores them in floating point: pack them with `kimi-k3 convert"):
        AutoModelForCausalLM.from_pretrained(saved["float"], quantization_config=Mxfp4Config())
    with pytest.raises(ValueError, match="all of them or none"):
        AutoModelForCausalLM.from_pretrained(
            saved["packed"], quantization_config=Mxfp4Config(modules_to_not_convert=["lm_head"])
        )


# --- sections in a configuration -------------------------------------------------------------------------------------


@pytest.mark.one_release
@pytest.mark.parametrize("name", ["packed", "float", "nested"])
def test_both_sections_come_back(name, saved, tmp_path):
    """A quantizer writes its section where the released file has that of the experts."""
    config = (KimiK3Config if name == "nested" else KimiK3TextConfig).from_pretrained(saved[name])
    packed = config.get_text_config(decoder=True).expert_quantization
    assert (packed is None) == (name == "float") and not hasattr(config, "quantization_config")
    config.quantization_config = dict(BITS)
    config.save_pretrained(tmp_path)
    for config_class in (type(config), KimiK3TextConfig):
        again = config_class.from_pretrained(tmp_path)
        assert again.quantization_config == BITS
        assert again.get_text_config(decoder=True).expert_quantization == packed
    del config.quantization_config
    config.save_pretrained(tmp_path)
    assert config.to_dict() == type(config).from_pretrained(saved[name]).to_dict()


# --- the quantizers themselves ---------------------------------------------------------------------------------------


def bits8():
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_8bit=True)


def bits4():
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_4bit=True)


def int8_weights():
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    return TorchAoConfig(Int8WeightOnlyConfig(version=2))


def quanto():
    from transformers import QuantoConfig

    return QuantoConfig(weights="int8")


@pytest.mark.parametrize(
    "section, error, saves",
    [
        pytest.param(bits8, 0.1, True, marks=needs("bitsandbytes")),
        pytest.param(bits4, 0.6, True, marks=needs("bitsandbytes")),
        pytest.param(int8_weights, 0.1, True, marks=needs("torchao")),
        pytest.param(quanto, 0.1, False, marks=needs("optimum")),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["float", "packed", "nested"])
@torch.no_grad()
def test_a_quantised_model_runs_saves_and_loads(name, section, error, saves, saved, tmp_path):
    """Prefill, cached steps, saving and loading; experts that are packed stay so.

    Logits move by less than 10% with weights of 8 bits, and by 40% with the 15 values of FP4; those of another model
    would be off by 140%.
    """
    model = AutoModelForCausalLM.from_pretrained(saved[name], quantization_config=section(), dtype=torch.float32)
    exact = logits(AutoModelForCausalLM.from_pretrained(saved[name], dtype=torch.float32))
    expected = logits(model)
    spread = exact.square().mean().sqrt()
    assert 0 < (expected - exact).square().mean().sqrt() < error * spread
    begun = model(IDS[:, :-3], use_cache=True)
    cached = [begun.logits, *(model(IDS[:, i : i + 1], cache=begun.cache).logits for i in range(19, 22))]
    assert (torch.cat(cached, dim=1) - expected).square().mean().sqrt() < 0.02 * spread
    if not saves:
        return
    model.save_pretrained(tmp_path)
    for model_class in (AutoModelForCausalLM, KimiK3ForCausalLM):
        if name == "nested" and section is int8_weights and model_class is KimiK3ForCausalLM:
            with pytest.raises(ValueError, match="load it with the class that saved it"):  # torchao knows full names
                model_class.from_pretrained(tmp_path, dtype=torch.float32)
            continue
        again = model_class.from_pretrained(tmp_path, dtype=torch.float32)
        assert (logits(again) - expected).square().mean().sqrt() < 1e-3 * spread
    packed = [each for each in load_file(tmp_path / "model.safetensors") if each.endswith(".0.w1.weight_packed")]
    assert bool(packed) == (name != "float")


@pytest.mark.parametrize(
    "section", [pytest.param(bits8, marks=needs("bitsandbytes")), pytest.param(int8_weights, marks=needs("torchao"))]
)
@pytest.mark.parametrize("name", ["float", "packed"])
@pytest.mark.parametrize("lost", ["experts.3.w2.weight", "model.norm.weight"])
def test_a_missing_tensor_is_named_under_a_quantizer(lost, name, section, saved, tmp_path):
    """While a folder is quantised, and in one that was; the names of experts and norms are ours in both."""
    options = {"quantization_config": section(), "dtype": torch.float32}
    AutoModelForCausalLM.from_pretrained(saved[name], **options).save_pretrained(tmp_path / "quantised")
    for folder, load in ((saved[name], options), (tmp_path / "quantised", {"dtype": torch.float32})):
        shutil.copytree(folder, tmp_path / "damaged", dirs_exist_ok=True)
        file = tmp_path / "damaged" / "model.safetensors"
        tensors = load_file(file)
        del tensors[next(each for each in tensors if lost in each)]
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata()
        save_file(tensors, file, metadata)
        with pytest.raises(ValueError, match=rf"damaged/model\.safetensors lacks .*{lost}"):
            AutoModelForCausalLM.from_pretrained(tmp_path / "damaged", **load)
