"""LoRA with peft: the targets, adapters on routed experts, packed ones included, merging, export."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import kimi_k3
from kimi_k3.kernels.mxfp4 import dequantize_mxfp4, quantize_mxfp4
from kimi_k3.training import export_expert_loras, lora_targets
from rounding import EXACT

SMALL = Path(kimi_k3.__file__).parent / "checkpoints" / "small"


def load(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, **{"dtype": torch.float32, **options})


@pytest.fixture(params=["packed", "float"])
def model(request, data_dir):
    return load(data_dir / "k3_tiny_mxfp4", dequantize=request.param == "float").double()


@pytest.fixture
def packed(data_dir):
    return load(data_dir / "k3_tiny_mxfp4").double()


def tokens(rows=2, length=20, seed=1):
    return torch.randint(3, 160, (rows, length), generator=torch.Generator().manual_seed(seed))


def logits(model, ids=None):
    with torch.no_grad():
        return model(input_ids=tokens() if ids is None else ids, use_cache=False).logits


def config_for(model, r=4, parts=None, **options):
    """Factors B are not zero, so that an adapter acts without training."""
    return LoraConfig(r=r, lora_alpha=8, init_lora_weights=False, **lora_targets(model, **(parts or {})), **options)


def adapted(model, seed=0, **options):
    torch.manual_seed(seed)
    adapter = get_peft_model(model, config_for(model, **options)).eval()
    return adapter.double() if model.dtype == torch.float64 else adapter  # factors beside packed weights are float32


EXPERTS_ONLY = {"attention": False, "dense": False, "experts": True, "shared": False, "latent": False}


# --- targets ---------------------------------------------------------------------------------------------------------


@pytest.mark.one_release
def test_each_part_names_its_modules(packed):
    """Faults 88, 89, 90, 93: the exact list of every part; 7 layers, the first dense, layers 3 and 6 MLA."""
    nothing = dict.fromkeys(("attention", "dense", "experts", "shared", "latent"), False)

    def names(part):
        found = lora_targets(packed, **{**nothing, part: True})["target_modules"]
        return sorted(name.partition("layers.")[2] for name in found)

    kda = ("q_proj", "k_proj", "v_proj", "f_a_proj", "f_b_proj", "b_proj", "g_proj", "o_proj")
    mla = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "g_proj", "o_proj")
    sparse = range(1, 7)
    assert names("attention") == sorted(
        f"{layer}.self_attn.{name}" for layer in range(7) for name in (mla if layer in (3, 6) else kda)
    )
    assert names("dense") == ["0.mlp.down_proj", "0.mlp.gate_proj", "0.mlp.up_proj"]
    assert names("experts") == [f"{layer}.block_sparse_moe.experts" for layer in sparse]
    assert names("shared") == sorted(
        f"{layer}.block_sparse_moe.shared_experts.{name}_proj" for layer in sparse for name in ("gate", "up", "down")
    )
    assert names("latent") == sorted(
        f"{layer}.block_sparse_moe.routed_expert_{name}_proj" for layer in sparse for name in ("down", "up")
    )
    everything = lora_targets(packed)
    assert len(everything["target_modules"]) == 5 * 8 + 2 * 6 + 3 + 6 + 18 + 12
    assert set(everything) == {"task_type", "target_modules"}


@pytest.mark.one_release
def test_the_router_is_a_parameter(packed):
    targets = lora_targets(packed, router=True)
    assert len(targets["target_parameters"]) == 6
    adapter = get_peft_model(packed, LoraConfig(r=2, **targets))
    trained = [name for name, parameter in adapter.named_parameters() if parameter.requires_grad and ".gate." in name]
    assert len(trained) == 12


@pytest.mark.one_release
def test_the_number_of_adapted_tensors(model):
    """Faults 88, 93: two factors a Linear, four for the experts of a layer, and they are what trains."""
    adapter = get_peft_model(model, LoraConfig(r=2, **lora_targets(model)))
    trained = [name for name, parameter in adapter.named_parameters() if parameter.requires_grad]
    assert len(trained) == 2 * (5 * 8 + 2 * 6 + 3 + 18 + 12) + 4 * 6
    assert all("lora_" in name for name in trained)


@pytest.mark.one_release
def test_what_is_not_there_is_refused(data_dir):
    """Fault 89: an adaptation that reaches nothing is an error."""
    dense = load(data_dir / "k3_dense_flat")
    with pytest.raises(ValueError, match="experts=True"):
        lora_targets(dense, experts=True)
    assert all("experts" not in name for name in lora_targets(dense)["target_modules"])
    with pytest.raises(ValueError, match="nothing of"):
        lora_targets(dense, attention=False, dense=False)


@pytest.mark.one_release
def test_an_expert_without_weights_changes_only_its_own_tokens(data_dir):
    """Fault 13: experts are plain slices of a parameter, and nothing else depends on one of them."""
    model = load(data_dir / "k3_tiny_mxfp4", dequantize=True)
    block = next(m for n, m in model.named_modules() if n.endswith("layers.3.block_sparse_moe"))
    x = torch.randn(1, 40, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        chosen = block.gate(x[0])[1]
        before = block(x)[0]
        block.experts.down_proj[7] = 0
        changed = (block(x)[0] != before).any(-1)[0]
    assert torch.equal(changed, (chosen == 7).any(-1)) and changed.any() and not changed.all()


@pytest.mark.one_release
def test_a_second_adapter_has_the_same_targets(packed):
    before = lora_targets(packed, router=True)
    adapter = get_peft_model(packed, LoraConfig(r=2, **before))
    assert lora_targets(adapter, router=True) == lora_targets(packed, router=True) == before


# --- the layer -------------------------------------------------------------------------------------------------------


def reference(model, adapter_name="default"):
    """The same model with floating-point experts and the update of every expert added to them in float64."""
    plain = load(model.get_base_model().config._name_or_path, dequantize=True).double()
    modules = dict(model.get_base_model().named_modules())
    with torch.no_grad():
        for name, module in plain.named_modules():
            if not name.endswith(".experts"):
                continue
            layer = modules[name]
            for weight in ("gate_up", "down"):
                a = getattr(layer, f"lora_{weight}_A")[adapter_name].double()
                b = getattr(layer, f"lora_{weight}_B")[adapter_name].double()
                update = torch.einsum("eor,eri->eoi", b, a) * layer.scaling[adapter_name]
                parameter = getattr(module, f"{weight}_proj")
                parameter.copy_(parameter.double() + update)
    return plain


@pytest.mark.one_release
@pytest.mark.portable
def test_the_update_is_that_of_the_factors(model):
    adapter = adapted(model, parts=EXPERTS_ONLY)
    expected = logits(reference(adapter))
    torch.testing.assert_close(logits(adapter), expected, **EXACT)
    assert (expected - logits(adapter.unload())).abs().max() > 1e-2


@pytest.mark.one_release
@pytest.mark.portable
def test_gradients_are_those_of_the_factors(model):
    """Through plain weights with the update built in full."""
    torch.manual_seed(0)
    layer = next(m for name, m in model.named_modules() if name.endswith("layers.2.block_sparse_moe.experts"))
    holder = nn.Module()
    holder.experts, holder.config = layer, model.config
    adapter = get_peft_model(holder, LoraConfig(r=3, target_modules=["experts"], init_lora_weights=False))
    lora = adapter.double().base_model.model.experts
    x = torch.randn(15, 32, dtype=torch.float64, requires_grad=True)
    ids = torch.stack([torch.randperm(8)[:3] for _ in range(15)])
    shares = torch.rand(15, 3, dtype=torch.float64)
    lora(x, ids, shares).square().sum().backward()

    factors = {
        name: getattr(lora, name)["default"].detach().clone().requires_grad_() for name in lora.adapter_layer_names
    }
    rows = x.detach().clone().requires_grad_()
    weights = {}
    for weight in ("gate_up", "down"):
        if lora.packed:
            parts = [getattr(layer, f"{weight}_proj_{kind}") for kind in ("packed", "scale")]
            dense = dequantize_mxfp4(*parts, torch.float64)
        else:
            dense = getattr(layer, f"{weight}_proj").detach()
        update = factors[f"lora_{weight}_B"] @ factors[f"lora_{weight}_A"] * lora.scaling["default"]
        weights[weight] = dense + update
    out = torch.zeros(15, 32, dtype=torch.float64)
    for token in range(15):
        for expert, share in zip(ids[token], shares[token], strict=True):
            hidden = layer._apply_gate(rows[token] @ weights["gate_up"][expert].T)
            out[token] = out[token] + share * (hidden @ weights["down"][expert].T)
    out.square().sum().backward()
    torch.testing.assert_close(x.grad, rows.grad, **EXACT)
    for name, factor in factors.items():
        torch.testing.assert_close(getattr(lora, name)["default"].grad, factor.grad, **EXACT)


@pytest.mark.one_release
@pytest.mark.parametrize("trained", ["experts", "attention", "all but the experts"])
def test_no_tensor_of_the_size_of_all_experts_is_made(model, trained):
    """Neither an update [E, out, in] nor decoded experts are alive between forward and backward."""
    if trained != "all but the experts":
        parts = {**EXPERTS_ONLY, "experts": trained == "experts", "attention": trained == "attention"}
        model = adapted(model, parts=parts)
    ids, kept, packed = tokens(rows=3), [], 0
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor):
        nonlocal packed
        if tensor.dtype == torch.uint8:
            packed += 1
        elif tensor.untyped_storage().data_ptr() not in parameters:
            kept.append(tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model.train()(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    assert kept and not {(8, 64, 32), (8, 32, 64), (8, 32, 32)} & {tuple(tensor.shape) for tensor in kept}
    held = dict(model.named_parameters())
    names = [name.removesuffix("_packed") for name in held if name.endswith("_proj_packed")]
    assert (packed > 6 * 8) == bool(names)
    for name in names:
        for weight in dequantize_mxfp4(held[f"{name}_packed"], held[f"{name}_scale"], torch.float32):
            alike = [tensor for tensor in kept if tensor.numel() == weight.numel()]
            assert not any(torch.equal(t, w) for t in alike for w in (weight, weight.T) if t.shape == w.shape)


@pytest.mark.one_release
def test_without_an_adapter_the_base_is_left_to_the_last_bit(model):
    """Fault 86: disabled, switched away from, and unloaded; parameters are the very same objects."""
    base, before = logits(model), {name: p.clone() for name, p in model.state_dict().items()}
    adapter = adapted(model)
    assert not torch.equal(logits(adapter), base)
    with adapter.disable_adapter():
        assert torch.equal(logits(adapter), base)
    plain = adapter.unload()
    assert torch.equal(logits(plain), base)
    assert all(torch.equal(value, before[name]) for name, value in plain.state_dict().items())


@pytest.mark.one_release
def test_a_new_adapter_changes_nothing_yet(model):
    base = logits(model)
    adapter = get_peft_model(model, LoraConfig(r=4, **lora_targets(model)))
    torch.testing.assert_close(logits(adapter.eval()), base, atol=1e-6, rtol=0)


@pytest.mark.one_release
@pytest.mark.portable
def test_two_adapters(model):
    """Fault 86: they coexist, switch, act together and are deleted."""
    first = adapted(model, parts=EXPERTS_ONLY)
    alone = logits(first)
    torch.manual_seed(7)
    first.add_adapter("second", config_for(model, r=2, parts=EXPERTS_ONLY))
    first.double().set_adapter("second")
    other = logits(first)
    assert not torch.allclose(other, alone, atol=1e-3)
    torch.testing.assert_close(other, logits(reference(first, "second")), **EXACT)
    first.base_model.set_adapter(["default", "second"])
    assert not torch.allclose(logits(first), other, atol=1e-3)
    first.set_adapter("default")
    assert torch.equal(logits(first), alone)
    first.delete_adapter("second")
    assert torch.equal(logits(first), alone)
    assert not [name for name in first.state_dict() if "second" in name]


@pytest.mark.one_release
@pytest.mark.portable
def test_a_combination_that_would_leave_the_experts_out_is_refused(packed):
    """peft looks for factors of other names and would give the experts a new adapter that does nothing."""
    adapter = adapted(packed, parts={"experts": False})
    adapter.add_adapter("second", config_for(packed, parts={"experts": False}))
    adapter.add_adapter("third", config_for(packed, parts=EXPERTS_ONLY))
    with pytest.raises(ValueError, match=r"routed experts \(third\)"):
        adapter.add_weighted_adapter(["default", "third"], [0.5, 0.5], "mixed", combination_type="cat")
    assert "mixed" not in adapter.peft_config
    adapter.add_weighted_adapter(["default", "second"], [0.5, 0.5], "mixed", combination_type="cat")
    adapter.set_adapter("mixed")
    mixed = logits(adapter)
    adapter.base_model.set_adapter(["default", "second"])
    for layer in (m for m in adapter.modules() if isinstance(m, LoraLayer)):
        layer.scale_layer(0.5)
    torch.testing.assert_close(mixed, logits(adapter), **EXACT)


@pytest.mark.one_release
def test_the_scale_of_a_layer_is_that_of_its_experts(packed):
    adapter = adapted(packed, parts=EXPERTS_ONLY)
    layers = [module for module in adapter.modules() if isinstance(module, LoraLayer)]
    acting = logits(adapter)
    for layer in layers:
        layer.scale_layer(0.5)
    scaled = logits(adapter)
    for layer in layers:
        layer.unscale_layer()
        layer.set_scale("default", 0.5)
    assert torch.equal(logits(adapter), scaled) and not torch.equal(scaled, acting)
    for layer in layers:
        layer.unscale_layer(0.5)
    assert torch.equal(logits(adapter), acting)


@pytest.mark.one_release
def test_the_scale_is_alpha_by_the_rank_or_by_its_root(packed):
    """rsLoRA: 8 / sqrt(4) acts as an alpha of 16 does without it."""
    targets = {**lora_targets(packed, **EXPERTS_ONLY), "r": 4, "init_lora_weights": False}
    found = []
    for options in ({"lora_alpha": 8, "use_rslora": True}, {"lora_alpha": 16}, {"lora_alpha": 8}):
        torch.manual_seed(0)
        adapter = get_peft_model(packed, LoraConfig(**targets, **options)).eval()
        found.append(logits(adapter))
        packed = adapter.unload()
    assert torch.equal(found[0], found[1]) and not torch.allclose(found[0], found[2], atol=1e-3)


@pytest.mark.one_release
def test_dropout_acts_in_training_only(model):
    ids = tokens()
    adapter = adapted(model, parts=EXPERTS_ONLY, lora_dropout=0.5)
    assert torch.equal(logits(adapter, ids), logits(adapter, ids))
    adapter.train()
    assert not torch.equal(logits(adapter, ids), logits(adapter, ids))


def test_mixed_precision(packed):
    adapter = adapted(packed.bfloat16())
    assert all(p.dtype == torch.float32 for name, p in adapter.named_parameters() if "lora_" in name)
    expected = logits(adapter).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = adapter(input_ids=tokens(), labels=tokens(), use_cache=False)
    out.loss.backward()
    assert torch.isfinite(expected).all() and torch.isfinite(out.loss)
    grads = [p.grad for name, p in adapter.named_parameters() if "lora_down_B" in name]
    assert len(grads) == 6 and all(torch.isfinite(grad).all() and grad.any() for grad in grads)


@pytest.mark.one_release
def test_options_that_do_nothing_here_are_refused(packed):
    for options, message in (
        ({"use_dora": True}, "use_dora"),
        ({"lora_bias": True}, "lora_bias"),
        ({"init_lora_weights": "pissa"}, "pissa"),
    ):
        with pytest.raises(ValueError, match=message):
            get_peft_model(packed, LoraConfig(r=2, **lora_targets(packed, **EXPERTS_ONLY), **options))


def test_an_adapter_for_each_row_is_refused(packed):
    adapter = adapted(packed, parts={"latent": False})
    with pytest.raises(ValueError, match="one choice of adapters for all rows"):
        adapter(input_ids=tokens(), adapter_names=["default", "__base__"])


# --- merging, saving, export -----------------------------------------------------------------------------------------


@pytest.mark.portable
def test_merging_into_float_weights(model, tmp_path, data_dir):
    """An adapter of packed experts merges into the dequantized model as well; the save reads as a plain model."""
    adapter = adapted(model)
    expected = logits(adapter)
    adapter.save_pretrained(tmp_path / "adapter")
    base = load(data_dir / "k3_tiny_mxfp4", dequantize=True).double()
    merged = PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload(safe_merge=True)
    torch.testing.assert_close(logits(merged), expected, **EXACT)
    merged.save_pretrained(tmp_path / "merged")
    again = load(tmp_path / "merged", dtype=torch.float64).double()
    assert not any("packed" in name for name in again.state_dict())
    assert torch.equal(logits(again), logits(merged))


@pytest.mark.one_release
@pytest.mark.portable
def test_merging_into_packed_experts_rounds_once(packed, tmp_path):
    adapter = adapted(packed, parts=EXPERTS_ONLY)
    whole = dict(reference(adapter).named_parameters())
    merged = adapter.merge_and_unload()
    merged.save_pretrained(tmp_path)
    again = load(tmp_path).double()
    parameters, checked = dict(again.named_parameters()), 0
    for name, weight in whole.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            codes, scale = parameters[f"{name}_packed"], parameters[f"{name}_scale"]
            exact = dequantize_mxfp4(*quantize_mxfp4(weight), torch.float32)
            assert torch.equal(dequantize_mxfp4(codes, scale, torch.float32), exact)
            checked += 1
    assert checked == 12
    assert torch.equal(logits(again), logits(merged))


@pytest.mark.one_release
@pytest.mark.portable
def test_merging_in_place_is_undone_to_the_last_bit(model):
    base = logits(model)
    adapter = adapted(model, parts=EXPERTS_ONLY)
    acting = logits(adapter)
    adapter.merge_adapter()
    if model.expert_storage != "packed":
        torch.testing.assert_close(logits(adapter), acting, **EXACT)
    assert not torch.allclose(logits(adapter), base, atol=1e-3)
    adapter.unmerge_adapter()
    assert torch.equal(logits(adapter), acting)
    adapter.merge_adapter()
    with adapter.disable_adapter():
        assert torch.equal(logits(adapter), base)


@pytest.mark.one_release
def test_an_update_that_is_not_finite_leaves_the_weights_alone(model):
    adapter = adapted(model, parts=EXPERTS_ONLY)
    layer = next(module for module in adapter.modules() if isinstance(module, LoraLayer))
    before = {name: value.clone() for name, value in layer.get_base_layer().state_dict().items()}
    with torch.no_grad():
        layer.lora_down_B["default"][7, 0] = float("inf")
    for merge in (layer.merge, adapter.merge_and_unload):
        with pytest.raises(ValueError, match="down of expert 7"):
            merge(safe_merge=True)
        assert all(torch.equal(value, before[name]) for name, value in layer.get_base_layer().state_dict().items())
        assert not layer.merged and layer._unmerged is None


FRESH = """
import sys, torch
sys.modules["peft"] = None
try:
    from kimi_k3.training import muon_groups, lora_targets
except ImportError as error:
    assert str(error) == "lora_targets needs peft: pip install 'kimi-k3[train]'", error
else:
    raise AssertionError("imported without peft")
del sys.modules["peft"]
from peft import PeftModel
from transformers import AutoModelForCausalLM

base, adapter, out = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
model = PeftModel.from_pretrained(model, adapter).eval()
ids = torch.randint(3, 160, (2, 20), generator=torch.Generator().manual_seed(1))
with torch.no_grad():
    torch.save(model(input_ids=ids, use_cache=False).logits, out)
"""


def test_a_fresh_process_reloads_and_without_peft_names_the_extra(packed, data_dir, tmp_path):
    """One process for both: it imports for seconds."""
    adapter = adapted(packed.float())
    adapter.save_pretrained(tmp_path)
    arguments = [str(data_dir / "k3_tiny_mxfp4"), str(tmp_path), str(tmp_path / "logits.pt")]
    subprocess.run([sys.executable, "-P", "-c", FRESH, *arguments], check=True)
    assert torch.equal(torch.load(tmp_path / "logits.pt"), logits(adapter))


class UnfusedExperts(nn.Module):
    """Experts as another engine has them: three Linear layers each, named as in the checkpoint."""

    def __init__(self, count, size, width):
        super().__init__()
        self.experts = nn.ModuleList(nn.Module() for _ in range(count))
        for expert in self.experts:
            expert.w1 = nn.Linear(size, width, bias=False)
            expert.w3 = nn.Linear(size, width, bias=False)
            expert.w2 = nn.Linear(width, size, bias=False)


def test_export_reads_as_ordinary_adapters_of_unfused_experts(model, tmp_path):
    """Faults 91, 92, 95: stock peft loads every factor onto the expert it belongs to, with the same update."""
    patterns = {"rank_pattern": {r"layers\.2\..*experts": 2}, "alpha_pattern": {r"layers\.[34]\..*experts": 20}}
    adapter = adapted(model.float(), parts={"router": True}, **patterns)
    export_expert_loras(adapter, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert any(name.endswith("experts.7.w2") for name in config["target_modules"])
    assert not any(name.endswith(("experts", ".gate")) for name in config["target_modules"])
    assert len(config["target_parameters"]) == 6
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert len(tensors) == 2 * (5 * 8 + 2 * 6 + 3 + 18 + 12 + 6) + 2 * 6 * 8 * 3

    plain = nn.Module()
    prefix = next(name for name in tensors if ".experts.0.w1" in name).partition("layers.1.")[0]
    parent = plain
    for part in prefix.removeprefix("base_model.model.").rstrip(".").split("."):
        parent.add_module(part, nn.Module())
        parent = getattr(parent, part)
    parent.layers = nn.ModuleList(nn.Module() for _ in range(7))
    for layer in list(parent.layers)[1:]:
        layer.block_sparse_moe = UnfusedExperts(8, 32, 32)
    mine = {name: tensor for name, tensor in tensors.items() if ".experts." in name}
    stock_config = LoraConfig.from_pretrained(tmp_path)
    stock_config.task_type = stock_config.target_parameters = None  # the toy model neither generates nor routes
    stock_config.target_modules = {name for name in stock_config.target_modules if ".experts." in name}
    stock = get_peft_model(plain, stock_config)
    report = set_peft_model_state_dict(stock, mine)
    assert not report.unexpected_keys and not [key for key in report.missing_keys if "lora_" in key]
    ours = {name: module for name, module in adapter.named_modules() if name.endswith(".experts")}
    settings = [(layer.r["default"], layer.lora_alpha["default"]) for layer in ours.values()]
    assert settings == [(4, 8), (2, 8), (4, 20), (4, 20), (4, 8), (4, 8)]
    for name, layer in ours.items():
        unfused = stock.get_submodule(name)
        gate_up = layer.lora_gate_up_B["default"] @ layer.lora_gate_up_A["default"] * layer.scaling["default"]
        down = layer.lora_down_B["default"] @ layer.lora_down_A["default"] * layer.scaling["default"]
        for expert in range(8):
            parts = [unfused[expert].get_submodule(w).get_delta_weight("default") for w in ("w1", "w3", "w2")]
            torch.testing.assert_close(torch.cat(parts[:2]), gate_up[expert])
            torch.testing.assert_close(parts[2], down[expert])


@pytest.mark.one_release
def test_adapters_of_packed_experts_learn(tmp_path):
    """The small checkpoint, experts only: held-out loss falls, and the merged save gives the adapter's logits."""
    tokenizer = AutoTokenizer.from_pretrained(SMALL)
    text = (SMALL / "sample.txt").read_text(encoding="utf-8").upper()  # unlike anything it was trained on
    ids = tokenizer(text, return_tensors="pt").input_ids[0]
    rows = ids[: len(ids) // 64 * 64].view(-1, 64)
    held_out, training = rows[:4], rows[4:]
    torch.manual_seed(0)
    model = load(SMALL)
    bytes_before = {name: p.clone() for name, p in model.named_parameters() if p.dtype == torch.uint8}
    adapter = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, **lora_targets(model, **EXPERTS_ONLY)))

    def loss(which):
        with torch.no_grad():
            return which.eval()(input_ids=held_out, labels=held_out, use_cache=False).loss.item()

    before = loss(adapter)
    optimizer = torch.optim.AdamW([p for p in adapter.parameters() if p.requires_grad], lr=5e-3)
    for batch in training.split(4)[:6]:
        adapter.train()(input_ids=batch, labels=batch, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    after = loss(adapter)
    assert after < before - 0.1
    assert all(torch.equal(p, bytes_before[n.removeprefix("base_model.model.").replace(".base_layer", "")])
               for n, p in adapter.named_parameters() if p.dtype == torch.uint8)  # fmt: skip

    adapter.save_pretrained(tmp_path / "adapter")
    merged = PeftModel.from_pretrained(load(SMALL, dequantize=True), tmp_path / "adapter").merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    torch.testing.assert_close(
        logits(load(tmp_path / "merged"), held_out), logits(adapter.eval(), held_out), atol=2e-3, rtol=0
    )
    adapter.merge_and_unload().save_pretrained(tmp_path / "packed")
    assert loss(load(tmp_path / "packed")) < before - 0.1, "rounding to MXFP4 again keeps what was learned"


def test_the_vision_tower_is_adapted_where_it_is_asked_for(data_dir, tmp_path):
    """Else none of its layers is, which text alone leaves without gradients; the adapter comes back from its file."""
    folder = data_dir / "k3_vision" / "small_signal"
    model = load(folder).double()
    assert not any(name.startswith(("vision_tower", "mm_projector")) for name in lora_targets(model)["target_modules"])
    parts = dict.fromkeys(("attention", "dense", "experts", "shared", "latent"), False)
    targets = lora_targets(model, **parts, vision=True)["target_modules"]
    blocks = len(model.vision_tower.encoder.blocks)
    assert len(targets) == 4 * blocks + 2 and {name.split(".")[0] for name in targets} == {
        "vision_tower",
        "mm_projector",
    }
    with pytest.raises(ValueError, match="has nothing to adapt for vision=True"):
        lora_targets(load(data_dir / "k3_dense_flat"), vision=True)

    golden = load_file(folder / "golden.safetensors")
    image = {"pixel_values": golden["pixel_values"][:24], "grid_thws": golden["grid_thws"][:1]}
    ids = golden["single.input_ids"]
    given = {"input_ids": ids, "attention_mask": golden["single.attention_mask"], **image}
    torch.manual_seed(0)
    options = {"r": 2, "init_lora_weights": False}
    adapter = get_peft_model(model, LoraConfig(**options, **lora_targets(model, **parts, vision=True))).double()
    adapter(**given, labels=ids).loss.backward()
    factors = {name: parameter for name, parameter in adapter.named_parameters() if parameter.requires_grad}
    assert len(factors) == 2 * len(targets) and all(factor.grad.abs().max() > 0 for factor in factors.values())
    adapter.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(load(folder).double(), tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(again(**given).logits, adapter(**given).logits, **EXACT)
