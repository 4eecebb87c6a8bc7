"""Checkpoints: the released tensor layout in and out byte for byte, packed experts, and files that are refused."""

import copy
import json
import math
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from kimi_k3 import (
    KimiK3Config,
    KimiK3ForCausalLM,
    KimiK3ForConditionalGeneration,
    KimiK3Model,
    KimiK3TextConfig,
)
from kimi_k3.checkpoint_kimi_k3 import padded_heads, read_headers, released_tensors
from kimi_k3.kernels import mxfp4

FOLDERS = ["k3_tiny_mxfp4", "k3_dense_flat", "kimi_linear_flat", "k3_vision/small_signal"]
MODELS = [
    (KimiK3Model, "k3_tiny_mxfp4"),
    (KimiK3Model, "kimi_linear_flat"),
    (KimiK3ForCausalLM, "k3_tiny_mxfp4"),
    (KimiK3ForCausalLM, "k3_dense_flat"),
    (KimiK3ForCausalLM, "kimi_linear_flat"),
    (KimiK3ForConditionalGeneration, "k3_tiny_mxfp4"),
    (KimiK3ForConditionalGeneration, "k3_vision/small_signal"),
]
LAYERS = "language_model.model.layers."
EXPERTS = LAYERS + "2.block_sparse_moe.experts."


def model_ids(value):
    return value.__name__ if isinstance(value, type) else str(value)


def raw_tensors(folder):
    """Every tensor in the safetensors files of a folder: name -> (dtype, shape, bytes)."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        if path.name == "golden.safetensors":
            continue
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        for name, entry in json.loads(data[8 : 8 + length]).items():
            if name == "__metadata__":
                continue
            start, stop = entry["data_offsets"]
            assert name not in tensors
            tensors[name] = entry["dtype"], tuple(entry["shape"]), data[8 + length :][start:stop]
    return tensors


def assert_same_tensors(got, expected):
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name] == tensor, name


@pytest.fixture
def variant(data_dir, tmp_path):
    """Function (folder, tensors=None, config=None) -> a copy of a checkpoint, edited in place by the two functions."""

    def make(folder, tensors=None, config=None):
        target = tmp_path / "variant"
        target.mkdir()
        values = json.loads((data_dir / folder / "config.json").read_text())
        weights = load_file(data_dir / folder / "model.safetensors")
        if tensors is not None:
            tensors(weights)
        if config is not None:
            config(values)
        save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
        (target / "config.json").write_text(json.dumps(values))
        return target

    return make


@pytest.fixture
def sharded(data_dir, tmp_path):
    """The kimi_linear checkpoint in two shards: folder, first shard, second shard."""
    weights = load_file(data_dir / "kimi_linear_flat" / "model.safetensors")
    names = sorted(weights)
    parts = names[: len(names) // 2], names[len(names) // 2 :]
    paths = [tmp_path / f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for path, part in zip(paths, parts, strict=True):
        save_file({name: weights[name] for name in part}, path, metadata={"format": "pt"})
    index = {name: path.name for path, part in zip(paths, parts, strict=True) for name in part}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (tmp_path / "config.json").write_bytes((data_dir / "kimi_linear_flat" / "config.json").read_bytes())
    return tmp_path, *paths


# --- in and out, byte for byte


@pytest.mark.parametrize("dtype", ["auto", torch.bfloat16], ids=str)
@pytest.mark.parametrize("folder", FOLDERS)
def test_released_layout_in_and_out_byte_for_byte(folder, dtype, data_dir, tmp_path):
    """Faults 111, 118: every name, dtype, shape and byte returns; prefix, float32 and packed tensors too."""
    model = AutoModelForCausalLM.from_pretrained(data_dir / folder, dtype=dtype)
    model.save_pretrained(tmp_path)
    assert_same_tensors(raw_tensors(tmp_path), raw_tensors(data_dir / folder))


def test_text_class_reads_a_multimodal_checkpoint_and_saves_without_prefix(data_dir, tmp_path):
    for folder in ("k3_tiny_mxfp4", "k3_vision/small_signal"):
        model, info = KimiK3ForCausalLM.from_pretrained(data_dir / folder, output_loading_info=True)
        assert not any(info.values()), "nothing missing, and vision weights are no surprise"
        assert type(model.config) is KimiK3TextConfig
        model.save_pretrained(tmp_path / folder)
        prefix = "language_model."
        expected = {
            name.removeprefix(prefix): tensor
            for name, tensor in raw_tensors(data_dir / folder).items()
            if name.startswith(prefix)
        }
        assert_same_tensors(raw_tensors(tmp_path / folder), expected)
        again, info = AutoModelForCausalLM.from_pretrained(tmp_path / folder, output_loading_info=True)
        assert type(again) is KimiK3ForCausalLM and not any(info.values())


def test_vision_weights_survive(data_dir, tmp_path):
    """They are loaded, listed and saved although no image is read yet."""
    model, info = AutoModelForCausalLM.from_pretrained(data_dir / "k3_vision/small_signal", output_loading_info=True)
    assert not any(info.values())
    vision = {name for name in released_tensors(model) if name.startswith(("vision_tower.", "mm_projector."))}
    assert len(vision) == 24
    file = load_file(data_dir / "k3_vision/small_signal" / "model.safetensors")
    state = model.state_dict()
    for name in vision:
        assert torch.equal(state[name], file[name]), name


@pytest.mark.parametrize("folder", FOLDERS)
def test_listed_tensors_are_those_of_the_file(folder, data_dir):
    """`released_tensors` foretells what saving writes; without a checkpoint, from the config alone."""
    config = AutoModelForCausalLM.from_pretrained(data_dir / folder).config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    assert released_tensors(model) == read_headers([data_dir / folder / "model.safetensors"])


@pytest.mark.parametrize("shape", ["heads", "zero-padded", "one-by-one"])
def test_a_log_returns_in_the_shape_it_came(shape, variant, tmp_path):
    """Fault 115: [H], [P] with a zero tail and [1, 1, H, 1] all load into H heads, and are written as they were."""
    make = {
        "heads": lambda a: a[:4].clone(),
        "zero-padded": lambda a: a,
        "one-by-one": lambda a: a[:4].clone().view(1, 1, 4, 1),
    }[shape]

    def reshape(weights):
        for name in weights:
            if name.endswith("A_log"):
                weights[name] = make(weights[name])

    folder = variant("k3_tiny_mxfp4", reshape)
    model = AutoModelForCausalLM.from_pretrained(folder)
    layer = model.language_model.model.layers[0].self_attn
    assert layer.A_log.shape == (4,)
    assert torch.equal(layer.A_log, load_file(folder / "model.safetensors")[LAYERS + "0.self_attn.A_log"].flatten()[:4])
    model.save_pretrained(tmp_path / "saved")
    assert_same_tensors(raw_tensors(tmp_path / "saved"), raw_tensors(folder))


def test_new_models_write_the_a_log_of_their_family(data_dir):
    """96 heads are stored as 128; a new Kimi-Linear model writes [1, 1, H, 1], a new K3 model zeros after the heads."""
    assert [padded_heads(heads) for heads in (1, 4, 32, 33, 64, 96, 128)] == [32, 32, 32, 64, 64, 128, 128]
    for folder, shape in (("k3_dense_flat", (32,)), ("kimi_linear_flat", (1, 1, 4, 1))):
        model = KimiK3ForCausalLM(KimiK3TextConfig.from_pretrained(data_dir / folder))
        heads = model.model.layers[0].self_attn.A_log
        written = revert_weight_conversion(model, model.state_dict())["model.layers.0.self_attn.A_log"]
        assert written.shape == shape
        assert torch.equal(written.flatten()[: heads.numel()], heads)
        assert not written.flatten()[heads.numel() :].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_float32_tensors_stay_float32_in_a_half_precision_model(dtype, data_dir):
    """Fault 117, and a pitfall of ports: loading in half precision silently rounds the tensors that are float32."""
    for folder in ("k3_tiny_mxfp4", "k3_dense_flat", "kimi_linear_flat"):
        model = KimiK3ForCausalLM.from_pretrained(data_dir / folder, dtype=dtype)
        file = {n.removeprefix("language_model."): t for n, t in raw_tensors(data_dir / folder).items()}
        wide = {name for name, (stored, _, _) in file.items() if stored == "F32"}
        assert any(name.endswith("A_log") for name in wide)
        for name, tensor in model.state_dict().items():
            if tensor.dtype == torch.uint8:
                continue
            assert tensor.dtype == (torch.float32 if name in wide else dtype), name
            if name in wide and not name.endswith("A_log"):
                assert tensor.contiguous().numpy().tobytes() == file[name][2], name


# --- packed experts


def test_packed_experts_stay_packed(data_dir):
    """Fault 111: uint8 parameters keep dtype and values whatever dtype the model has, and are not trained."""
    file = load_file(data_dir / "k3_tiny_mxfp4" / "model.safetensors")
    for dtype in (torch.bfloat16, torch.float32):
        model = KimiK3ForConditionalGeneration.from_pretrained(data_dir / "k3_tiny_mxfp4", dtype=dtype)
        experts = model.language_model.model.layers[2].block_sparse_moe.experts
        for kind in ("packed", "scale"):
            gate_up, down = getattr(experts, f"gate_up_proj_{kind}"), getattr(experts, f"down_proj_{kind}")
            for tensor in (gate_up, down):
                assert tensor.dtype == torch.uint8 and not tensor.requires_grad
            for e in range(8):
                w1, w2, w3 = (file[f"{EXPERTS}{e}.{w}.weight_{kind}"] for w in ("w1", "w2", "w3"))
                assert torch.equal(gate_up[e], torch.cat([w1, w3])) and torch.equal(down[e], w2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_dequantized_experts_are_exact_and_trainable(dtype, data_dir):
    """Faults 83, 109, 112: plain parameters in the model's dtype, equal to the decoded values, that can train."""
    model = KimiK3ForConditionalGeneration.from_pretrained(data_dir / "k3_tiny_mxfp4", dtype=dtype, dequantize=True)
    file = load_file(data_dir / "k3_tiny_mxfp4" / "model.safetensors")
    experts = model.language_model.model.layers[2].block_sparse_moe.experts

    def decoded(e, w):
        pair = (file[f"{EXPERTS}{e}.{w}.weight_{kind}"] for kind in ("packed", "scale"))
        return mxfp4.dequantize_mxfp4(*pair, torch.float64)

    for parameter in (experts.gate_up_proj, experts.down_proj):
        assert isinstance(parameter, torch.nn.Parameter)
        assert parameter.dtype == dtype and parameter.requires_grad
    for e in range(8):
        assert torch.equal(experts.gate_up_proj[e].double(), torch.cat([decoded(e, "w1"), decoded(e, "w3")]))
        assert torch.equal(experts.down_proj[e].double(), decoded(e, "w2"))
    assert not any(p.dtype == torch.uint8 for p in model.parameters())
    ids = torch.arange(10, 30)[None]
    model(ids, labels=ids).loss.backward()
    for parameter in (experts.gate_up_proj, experts.down_proj):
        assert torch.isfinite(parameter.grad).all() and parameter.grad.abs().sum() > 0
    text = model.eval().generate(ids, max_new_tokens=3, do_sample=False)
    assert text.shape == (1, 23), "fault 83: an MXFP4 checkpoint generates on a CPU"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@torch.no_grad()
def test_packed_and_dequantized_models_agree(dtype, data_dir):
    """Fault 76: the decoded product is exact, so both run the same numbers."""
    golden = load_file(data_dir / "k3_tiny_mxfp4" / "golden.safetensors")
    packed, plain = (
        KimiK3ForCausalLM.from_pretrained(data_dir / "k3_tiny_mxfp4", dtype=dtype, dequantize=dequantize)
        for dequantize in (False, True)
    )
    a, b = (model(golden["input_ids"]).logits.float() for model in (packed, plain))
    assert torch.nn.functional.cosine_similarity(a, b, dim=-1).min() > 0.99999
    torch.testing.assert_close(a, b, atol=1e-4, rtol=0)


@torch.no_grad()
def test_dequantized_model_saves_plain_experts(data_dir, tmp_path):
    """Faults 109, 112: the folder has no quantization section any more and loads without an option, to the same."""
    model = KimiK3ForConditionalGeneration.from_pretrained(data_dir / "k3_tiny_mxfp4", dequantize=True)
    model.save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())["text_config"]
    tensors = raw_tensors(tmp_path)
    assert not any(name.endswith(("_packed", "_scale")) for name in tensors)
    original = raw_tensors(data_dir / "k3_tiny_mxfp4")
    untouched = {name: t for name, t in original.items() if ".experts." not in name}
    assert {name: t for name, t in tensors.items() if ".experts." not in name} == untouched
    assert tensors[f"{EXPERTS}7.w2.weight"][:2] == ("BF16", (32, 32))
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.arange(10, 40)[None]
    assert torch.equal(again(ids).logits, model(ids).logits)


def test_dequantize_changes_nothing_without_packed_experts(data_dir, tmp_path):
    AutoModelForCausalLM.from_pretrained(data_dir / "kimi_linear_flat", dequantize=True).save_pretrained(tmp_path)
    assert_same_tensors(raw_tensors(tmp_path), raw_tensors(data_dir / "kimi_linear_flat"))


def test_new_packed_model_saves_and_reloads(data_dir, tmp_path):
    """A model that was never a file: its random experts are packed, written for each expert, and read again."""
    torch.manual_seed(0)
    model = KimiK3ForConditionalGeneration._from_config(
        KimiK3Config.from_pretrained(data_dir / "k3_tiny_mxfp4"), dtype=torch.bfloat16
    )
    model.save_pretrained(tmp_path)
    headers = read_headers([tmp_path / "model.safetensors"])
    assert headers == read_headers([data_dir / "k3_tiny_mxfp4" / "model.safetensors"])
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


# --- refusals


def edit(name, change):
    """An edit of one tensor; None takes it out."""

    def apply(weights):
        tensor = weights.pop(name)
        if change is not None:
            weights[name] = change(tensor)

    return apply


def set_tail(tensor):
    tensor[5] = 1e-3
    return tensor


def truncate(tensor):
    return tensor[:, :-8].contiguous()


BROKEN_TENSORS = {
    "scale-missing": (f"{EXPERTS}3.w2.weight_scale", None, "lacks"),
    "packed-missing": (f"{EXPERTS}3.w1.weight_packed", None, "lacks"),
    "packed-shape": (f"{EXPERTS}0.w1.weight_packed", truncate, "has shape [32, 8], the config asks for [32, 16]"),
    "scale-shape": (f"{EXPERTS}7.w3.weight_scale", lambda t: t.repeat(1, 2), "has shape [32, 2]"),
    "packed-as-float": (f"{EXPERTS}0.w1.weight_packed", torch.Tensor.float, "is F32, expected U8"),
    "scale-as-float": (f"{EXPERTS}0.w1.weight_scale", torch.Tensor.bfloat16, "is BF16, expected U8"),
    "dense-shape": (f"{LAYERS}0.mlp.up_proj.weight", truncate, "has shape [160, 56], the config asks for [160, 64]"),
    "float32-shape": (f"{LAYERS}0.self_attn.dt_bias", lambda t: t[:32].clone(), "has shape [32]"),
    "embedding-shape": ("language_model.lm_head.weight", truncate, "has shape [160, 56]"),
    "a-log-tail": (f"{LAYERS}0.self_attn.A_log", set_tail, "those after the heads are not zero"),
    "a-log-too-short": (f"{LAYERS}0.self_attn.A_log", lambda t: t[:3].clone(), "has 3 entries for 4 heads"),
}


@pytest.mark.parametrize("model_class", [KimiK3ForCausalLM, KimiK3ForConditionalGeneration])
@pytest.mark.parametrize("case", BROKEN_TENSORS)
def test_broken_tensor_is_named(case, model_class, variant):
    """Fault 115: a non-zero tail of A_log raises; a missing scale or a wrong shape never becomes a random weight."""
    name, change, sentence = BROKEN_TENSORS[case]
    folder = variant("k3_tiny_mxfp4", edit(name, change))
    with pytest.raises(ValueError) as caught:
        model_class.from_pretrained(folder)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)
    plain = name if model_class is KimiK3ForConditionalGeneration else name.removeprefix("language_model.")
    assert plain in str(caught.value)


@pytest.mark.parametrize("case", ["scale-missing", "packed-missing", "packed-shape", "scale-shape", "packed-as-float"])
def test_broken_tensor_is_named_when_dequantizing(case, variant):
    name, change, sentence = BROKEN_TENSORS[case]
    folder = variant("k3_tiny_mxfp4", edit(name, change))
    with pytest.raises(ValueError) as caught:
        AutoModelForCausalLM.from_pretrained(folder, dequantize=True)
    assert sentence in str(caught.value) and name in str(caught.value)


def test_a_log_tail_in_a_state_dict_is_refused(data_dir):
    """Fault 115, where there is no file to check."""
    config = KimiK3Config.from_pretrained(data_dir / "k3_tiny_mxfp4")
    weights = load_file(data_dir / "k3_tiny_mxfp4" / "model.safetensors")
    model = KimiK3ForConditionalGeneration.from_pretrained(None, config=config, state_dict=dict(weights))
    assert model.language_model.model.layers[0].self_attn.A_log.shape == (4,)
    weights[f"{LAYERS}0.self_attn.A_log"][31] = 1
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.A_log"):
        KimiK3ForConditionalGeneration.from_pretrained(None, config=config, state_dict=weights)


@pytest.mark.parametrize("dequantize", [False, True], ids=["packed", "dequantize"])
def test_experts_stored_in_the_other_form_are_refused(dequantize, variant, data_dir, tmp_path):
    section = json.loads((data_dir / "k3_tiny_mxfp4" / "config.json").read_text())["text_config"]["quantization_config"]
    folder = variant("kimi_linear_flat", config=lambda values: values.update(quantization_config=section))
    with pytest.raises(ValueError, match=r"quantization_config.*layers\.1\.block_sparse_moe\.experts\.0\.w1\.weight\)"):
        AutoModelForCausalLM.from_pretrained(folder, dequantize=dequantize)


@pytest.mark.parametrize("dequantize", [False, True], ids=["packed", "dequantize"])
def test_packed_experts_without_their_section_are_refused(dequantize, variant):
    folder = variant("k3_tiny_mxfp4", config=lambda values: values["text_config"].pop("quantization_config"))
    with pytest.raises(ValueError, match=r"experts\.0\.w1\.weight_packed\), but the config has no quantization_config"):
        AutoModelForCausalLM.from_pretrained(folder, dequantize=dequantize)


@pytest.mark.parametrize("size", [0, 5, 500, -1], ids=["empty", "no-header", "cut-header", "cut-data"])
def test_cut_off_shard_is_named(size, sharded):
    folder, _, second = sharded
    data = second.read_bytes()
    second.write_bytes(data[:size])
    with pytest.raises(ValueError, match=r"model-00002-of-00002\.safetensors is cut off"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_file_that_is_only_a_pointer_is_named(sharded):
    folder, first, _ = sharded
    first.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(ValueError, match=r"model-00001-of-00002\.safetensors is cut off or is not a safetensors file"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_missing_shard_is_named(sharded):
    folder, _, second = sharded
    second.unlink()
    with pytest.raises(OSError, match=r"model-00002-of-00002\.safetensors"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_tensor_in_two_shards_is_named(sharded):
    folder, first, second = sharded
    both = load_file(second)
    both["lm_head.weight"] = load_file(first)["lm_head.weight"]
    save_file(both, second, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lm_head\.weight is in model-00001-of-00002.* and in model-00002-of-00002"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_whole_shards_load(sharded, data_dir):
    """The folder that the tests above damage is right before that."""
    model, info = AutoModelForCausalLM.from_pretrained(sharded[0], output_loading_info=True)
    assert not any(info.values())
    expected = AutoModelForCausalLM.from_pretrained(data_dir / "kimi_linear_flat").state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())


def test_pickled_weights_are_refused_unread(variant):
    """Only safetensors are read: unpickling runs whatever the file says."""
    folder = variant("kimi_linear_flat")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"not even a pickle")
    with pytest.raises(ValueError, match=r"only safetensors files are read, not .*pytorch_model\.bin"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_config_of_another_size_is_refused_unless_asked_for(variant):
    folder = variant("kimi_linear_flat", config=lambda values: values.update(vocab_size=200))
    with pytest.raises(ValueError, match=r"lm_head\.weight has shape \[160, 64\], the config asks for \[200, 64\]"):
        AutoModelForCausalLM.from_pretrained(folder)
    model, info = AutoModelForCausalLM.from_pretrained(folder, ignore_mismatched_sizes=True, output_loading_info=True)
    assert {name for name, *_ in info["mismatched_keys"]} == {"lm_head.weight", "model.embed_tokens.weight"}
    assert model.lm_head.weight.shape == (200, 64)


# --- tied embeddings


@pytest.mark.parametrize("model_class, folder", MODELS, ids=model_ids)
def test_every_class_has_its_tied_keys(model_class, folder, data_dir):
    """Fault 19: post_init ran in every model and submodel; faults 17, 18: tied keys are dicts, empty when untied."""
    model = model_class.from_pretrained(data_dir / folder)
    parts = [m for m in model.modules() if hasattr(m, "post_init")]
    count = {KimiK3Model: 1, KimiK3ForCausalLM: 2, KimiK3ForConditionalGeneration: 3}[model_class]
    assert len(parts) == count + hasattr(model, "vision_tower")
    for part in parts:
        assert part.all_tied_weights_keys == {}, type(part).__name__
        assert isinstance(type(part)._tied_weights_keys, dict | None), type(part).__name__


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("folder", ["k3_tiny_mxfp4", "k3_dense_flat", "kimi_linear_flat"])
def test_embeddings_are_tied_exactly_when_configured(folder, tied, data_dir, tmp_path):
    """Faults 17, 18: new, saved and reloaded; a tied head has no tensor of its own in the file."""
    values = json.loads((data_dir / folder / "config.json").read_text())
    for section in (values, values.get("text_config", values)):
        section["tie_word_embeddings"] = tied
    nested = "text_config" in values
    config = (KimiK3Config if nested else KimiK3TextConfig).from_dict(values)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    reloaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    prefix = "language_model." if nested else ""
    assert (f"{prefix}lm_head.weight" not in raw_tensors(tmp_path)) == tied
    for each in (model, reloaded):
        head, embedding = each.get_output_embeddings().weight, each.get_input_embeddings().weight
        assert (head is embedding) == tied and torch.equal(head, embedding) == tied
        assert bool(each.all_tied_weights_keys) == tied
    assert torch.equal(reloaded.get_output_embeddings().weight, model.get_output_embeddings().weight)


# --- folders in other forms


@pytest.mark.parametrize("folder", ["k3_tiny_mxfp4", "kimi_linear_flat"])
def test_save_in_many_shards(folder, data_dir, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(data_dir / folder)
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 5
    assert_same_tensors(raw_tensors(tmp_path), raw_tensors(data_dir / folder))
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    again.save_pretrained(tmp_path / "again")
    assert_same_tensors(raw_tensors(tmp_path / "again"), raw_tensors(data_dir / folder))


def test_backbone_reads_and_writes_alone(data_dir, tmp_path):
    """KimiK3Model takes the text backbone out of every kind of folder, its own included."""
    for folder in ("k3_tiny_mxfp4", "kimi_linear_flat"):
        backbone, info = KimiK3Model.from_pretrained(data_dir / folder, output_loading_info=True)
        assert not any(info.values())
        backbone.save_pretrained(tmp_path / folder)
        again, info = AutoModel.from_pretrained(tmp_path / folder, output_loading_info=True)
        assert type(again) is KimiK3Model and not any(info.values())
        whole = KimiK3ForCausalLM.from_pretrained(data_dir / folder).model.state_dict()
        assert all(torch.equal(tensor, whole[name]) for name, tensor in again.state_dict().items())
        with pytest.raises(ValueError, match=r"lacks lm_head\.weight"):
            KimiK3ForCausalLM.from_pretrained(tmp_path / folder)
        _, info = KimiK3ForCausalLM.from_pretrained(
            tmp_path / folder, new_tensors=["lm_head"], output_loading_info=True
        )
        assert info["missing_keys"] == {"lm_head.weight"} and not info["unexpected_keys"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_reads_what_transformers_own_kimi_linear_saved(dtype, data_dir, tmp_path):
    """Its files call the dense MLP of the first layer `block_sparse_moe`; ours are the released names again."""
    from transformers.models.kimi_linear import KimiLinearForCausalLM

    KimiLinearForCausalLM.from_pretrained(data_dir / "kimi_linear_flat", dtype=dtype).save_pretrained(
        tmp_path / "native"
    )
    names = raw_tensors(tmp_path / "native")
    assert "model.layers.0.block_sparse_moe.gate_proj.weight" in names, "otherwise this test says nothing"
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "native", output_loading_info=True)
    assert type(model) is KimiK3ForCausalLM and not any(info.values())
    expected = KimiK3ForCausalLM.from_pretrained(data_dir / "kimi_linear_flat", dtype=dtype).state_dict()
    for name, tensor in model.state_dict().items():
        rounded = expected[name].to(dtype).float()  # transformers stores A_log and dt_bias in the dtype of the model
        assert torch.equal(tensor.float(), expected[name].float()) or torch.equal(tensor.float(), rounded), name
    model.save_pretrained(tmp_path / "ours")
    assert raw_tensors(tmp_path / "ours").keys() == raw_tensors(data_dir / "kimi_linear_flat").keys()


@torch.no_grad()
def test_transformers_own_kimi_linear_reads_what_we_save(data_dir, tmp_path):
    from transformers.models.kimi_linear import KimiLinearForCausalLM

    ours = KimiK3ForCausalLM.from_pretrained(data_dir / "kimi_linear_flat", dtype=torch.float32)
    ours.save_pretrained(tmp_path)
    native, info = KimiLinearForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    ids = torch.arange(10, 50)[None]
    torch.testing.assert_close(ours(ids).logits, native(ids).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("folder", FOLDERS)
def test_device_maps(folder, data_dir):
    """Fault 81: the loader works for any device: `meta` (no data is read) and one or several named devices."""
    expected = AutoModelForCausalLM.from_pretrained(data_dir / folder).state_dict()
    for device_map in ("cpu", "auto", {"": "cpu"}):
        state = AutoModelForCausalLM.from_pretrained(data_dir / folder, device_map=device_map).state_dict()
        assert all(torch.equal(tensor.cpu(), expected[name]) for name, tensor in state.items())
    meta = AutoModelForCausalLM.from_pretrained(data_dir / folder, device_map="meta")
    assert {tensor.device.type for tensor in meta.state_dict().values()} == {"meta"}
    assert released_tensors(meta) == read_headers([data_dir / folder / "model.safetensors"])


def test_text_only_dense_config_builds_and_generates(data_dir):
    """Fault 1: no experts, no vision, no MTP, from the config alone, on a CPU; flat and wrapped."""
    flat = KimiK3TextConfig.from_pretrained(data_dir / "k3_dense_flat")
    wrapped = KimiK3Config(text_config=copy.deepcopy(flat), bos_token_id=1, eos_token_id=2, pad_token_id=0)
    for config, model_class in ((flat, KimiK3ForCausalLM), (wrapped, KimiK3ForConditionalGeneration)):
        model = AutoModelForCausalLM.from_config(config)
        assert type(model) is model_class
        assert not any("vision" in name or "expert" in name for name in model.state_dict())
        ids = torch.tensor([[5, 6, 7]])
        assert model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False).shape == (1, 7)


# --- the released model


def test_every_tensor_of_the_released_model_has_its_place(data_dir, released_table):
    """497,220 names with shape and dtype, 1,560,860,324,864 bytes, on the meta device; vision weights included."""
    config = KimiK3Config.from_pretrained(data_dir / "config_kimi_k3.json")
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model = KimiK3ForConditionalGeneration(config)
    finally:
        torch.set_default_dtype(torch.float32)
    ours, released = released_tensors(model), released_table
    assert ours.keys() == released.keys()
    assert ours == released
    assert len(ours) == 497_220
    size = {"BF16": 2, "F32": 4, "U8": 1}
    assert sum(size[dtype] * math.prod(shape) for dtype, shape in ours.values()) == 1_560_860_324_864


def test_released_kimi_linear_has_its_size(data_dir):
    """Kimi-Linear-48B: 20,493 tensors, 98,245,528,576 bytes; only A_log and dt_bias are float32."""
    config = KimiK3TextConfig.from_pretrained(data_dir / "config_kimi_linear_48b.json")
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            tensors = released_tensors(KimiK3ForCausalLM(config))
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(tensors) == 20_493
    size = {"BF16": 2, "F32": 4}
    assert sum(size[dtype] * math.prod(shape) for dtype, shape in tensors.values()) == 98_245_528_576
    assert tensors["model.layers.0.self_attn.A_log"] == ("F32", (1, 1, 32, 1))
    assert {n.rsplit(".", 1)[1] for n, (dtype, _) in tensors.items() if dtype == "F32"} == {"A_log", "dt_bias"}


def test_dequantize_leaves_the_callers_config_alone(data_dir):
    config = KimiK3TextConfig.from_pretrained(data_dir / "k3_tiny_mxfp4")
    model = KimiK3ForCausalLM(config, dequantize=True)
    assert config.expert_quantization is not None and model.config.expert_quantization is None
