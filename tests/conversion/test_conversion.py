"""Conversion: every form of a checkpoint into every other, byte for byte where the formats allow it."""

import argparse
import itertools
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from kimi_k3 import KimiK3ForCausalLM
from kimi_k3.checkpoint_kimi_k3 import read_header
from kimi_k3.conversion import ConversionError, Target, convert, open_checkpoint
from kimi_k3.conversion.inventory import Inventory, table, take_inventory
from kimi_k3.conversion.source import ITEM_BYTES, PIECE, FileBytes
from kimi_k3.conversion.verify import verify
from kimi_k3.kernels.mxfp4 import dequantize_mxfp4, quantize_mxfp4

FOLDERS = ["k3_tiny_mxfp4", "k3_dense_flat", "kimi_linear_flat", "k3_vision/small_signal"]
EXPERTS = "language_model.model.layers.2.block_sparse_moe.experts."
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"

# name: what to ask for; the first is the form of the released files
FORMS = {
    "released": Target(),
    "flat": Target(layout="flat", text_only=True),
    "native": Target(layout="native"),
    "bf16": Target(expert_dtype="bf16"),
    "fp32": Target(expert_dtype="fp32"),
    "flat-fp32": Target(layout="flat", text_only=True, expert_dtype="fp32"),
    "shards": Target(shard_size=60_000),
}
FORMS_OF = {
    "k3_tiny_mxfp4": ("released", "flat", "bf16", "fp32", "flat-fp32", "shards"),
    "k3_dense_flat": ("released", "flat", "shards"),
    "kimi_linear_flat": ("released", "flat", "native", "fp32", "flat-fp32", "shards"),
}
# what brings the experts back to how the golden checkpoint stores them
STORED_AS = {"k3_tiny_mxfp4": "mxfp4", "k3_dense_flat": None, "kimi_linear_flat": "bf16"}


@pytest.fixture
def variant(data_dir, tmp_path):
    """Function (folder, tensors=None, config=None) -> a copy of a golden checkpoint, edited by the two functions."""

    def make(folder, tensors=None, config=None):
        target = tmp_path / "source"
        target.mkdir()
        values = json.loads((data_dir / folder / "config.json").read_text())
        weights = load_file(data_dir / folder / WEIGHTS)
        if tensors is not None:
            tensors(weights)
        if config is not None:
            config(values)
        save_file(weights, target / WEIGHTS, metadata={"format": "pt"})
        (target / "config.json").write_text(json.dumps(values))
        return target

    return make


def content(folder):
    """File name -> bytes."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def convert_chain(source, tmp_path, *targets):
    for number, target in enumerate(targets):
        destination = tmp_path / f"step{number}"
        convert(source, destination, target)
        source = destination
    return source


# --- round trips -----------------------------------------------------------------------------------------------------


def round_trip(forms):
    """A walk from the first form back to it that takes every step from a form to another one once."""
    first, *others = forms
    walk = [first]
    for place, other in enumerate(others):
        walk += [*(round_trip(others) if place == 0 else [other]), first]
    return walk


@pytest.mark.one_release
@pytest.mark.parametrize("folder", FORMS_OF)
def test_every_form_into_every_other_and_back_byte_for_byte(folder, data_dir, tmp_path):
    """Faults 109, 115, 118: after every step there is, the weights file is the one that came in."""
    walk = round_trip(FORMS_OF[folder])
    assert sorted(itertools.pairwise(walk)) == sorted(itertools.permutations(FORMS_OF[folder], 2))
    back = Target(layout="flat" if folder == "k3_dense_flat" else "released", expert_dtype=STORED_AS[folder])
    end = convert_chain(data_dir / folder, tmp_path, *(FORMS[name] for name in walk), back)
    assert (end / WEIGHTS).read_bytes() == (data_dir / folder / WEIGHTS).read_bytes()
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.one_release
@pytest.mark.parametrize("folder", FOLDERS)
def test_the_same_form_is_the_same_folder(folder, data_dir, tmp_path):
    """The configuration's bytes too; only what lies beside a checkpoint and is no weight of it may differ."""
    target = Target(layout="flat" if folder == "k3_dense_flat" else "released")
    convert(data_dir / folder, tmp_path / "same", target)
    for name in ("config.json", WEIGHTS):
        assert (tmp_path / "same" / name).read_bytes() == (data_dir / folder / name).read_bytes(), name
    assert verify(data_dir / folder, tmp_path / "same").same


def test_the_type_of_a_multimodal_configuration_is_the_one_at_its_top(variant, tmp_path):
    """It is what such files are loaded in; its text part need not have one."""

    def config(values):
        values["dtype"] = "float32"
        del values["text_config"]["dtype"]

    convert(variant("k3_tiny_mxfp4", config=config), tmp_path / "flat", FORMS["flat"])
    assert json.loads((tmp_path / "flat" / "config.json").read_text())["dtype"] == "float32"


@pytest.mark.one_release
def test_files_too_large_for_a_tokenizer_stay_behind(variant, tmp_path):
    source = variant("kimi_linear_flat")
    for name, size in (("small.txt", 1), ("large.txt", 100 * 2**20 + 1)):
        with open(source / name, "wb") as file:
            file.truncate(size)
    convert(source, tmp_path / "new")
    assert (tmp_path / "new" / "small.txt").exists() and not (tmp_path / "new" / "large.txt").exists()


@pytest.mark.one_release
def test_files_beside_the_weights_go_along(data_dir, tmp_path):
    convert(data_dir.parent.parent / "checkpoints" / "small", tmp_path / "new")
    names = {path.name for path in (tmp_path / "new").iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json", WEIGHTS} <= names


@pytest.mark.one_release
def test_two_workers_and_eight_write_the_same(data_dir, tmp_path):
    for workers in (1, 2, 8):
        convert(data_dir / "k3_tiny_mxfp4", tmp_path / str(workers), Target(expert_dtype="bf16"), workers=workers)
    assert content(tmp_path / "1") == content(tmp_path / "2") == content(tmp_path / "8")


@pytest.mark.one_release
def test_no_tensor_is_read_whole(variant, tmp_path, monkeypatch):
    """Peak memory does not grow with the largest tensor: every read is a piece, and nothing is read twice."""

    def edit(weights):
        weights["model.embed_tokens.weight"] = torch.randn(100_000, 64).bfloat16()
        weights["lm_head.weight"] = torch.randn(100_000, 64).bfloat16()

    source = variant("kimi_linear_flat", edit, lambda values: values.update(vocab_size=100_000))
    reads = []
    original = FileBytes.read_into
    monkeypatch.setattr(
        FileBytes, "read_into", lambda self, view, at: (reads.append(len(view)), original(self, view, at))
    )
    convert(source, tmp_path / "new", Target(layout="native", expert_dtype="fp32"))
    assert max(reads) <= PIECE < 100_000 * 64 * 2
    stored = sum(part.nbytes for part in open_checkpoint(source).tensors.values())
    assert stored <= sum(reads) < stored + 10_000
    assert verify(source, tmp_path / "new", logits=False).same


@pytest.mark.one_release
def test_the_index_is_exact(data_dir, tmp_path):
    convert(data_dir / "k3_tiny_mxfp4", tmp_path / "shards", Target(shard_size=60_000))
    index = json.loads((tmp_path / "shards" / INDEX).read_text())
    assert len(set(index["weight_map"].values())) > 8
    size = 0
    for name in sorted(set(index["weight_map"].values())):
        tensors = load_file(tmp_path / "shards" / name)
        assert {key for key, file in index["weight_map"].items() if file == name} == set(tensors)
        size += sum(tensor.nbytes for tensor in tensors.values())
        assert sum(tensor.nbytes for tensor in tensors.values()) <= 60_000
    assert index["metadata"]["total_size"] == size == 715_392


# --- other programs --------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_native_class_gives_the_golden_logits(data_dir, tmp_path):
    """The converted folder in transformers' own class; its file is the one that this class saves itself."""
    from transformers.models.kimi_linear import KimiLinearForCausalLM

    convert(data_dir / "kimi_linear_flat", tmp_path / "native", Target(layout="native"))
    golden = load_file(data_dir / "kimi_linear_flat" / "golden.safetensors")
    model, info = KimiLinearForCausalLM.from_pretrained(
        tmp_path / "native", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values())
    torch.testing.assert_close(model(golden["input_ids"]).logits, golden["logits"], atol=1e-3, rtol=0)
    converted = load_file(tmp_path / "native" / WEIGHTS)
    state = model.state_dict()
    assert converted.keys() == state.keys()
    assert all(torch.equal(converted[name].float(), state[name]) for name in state)


def test_our_class_refuses_fused_tensors_and_names_the_way_out(data_dir, tmp_path):
    """Without this the convolutions would load as random weights and a warning."""
    convert(data_dir / "kimi_linear_flat", tmp_path / "native", Target(layout="native"))
    with pytest.raises(ValueError, match=r"self_attn\.conv1d\.weight.*kimi-k3 convert"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "native")


@pytest.mark.one_release
def test_both_keys_of_the_largest_length(variant, tmp_path):
    """Kimi-Linear-48B has `model_max_length`, other files `max_position_embeddings`, some have both."""
    from transformers.models.kimi_linear import KimiLinearConfig

    source = variant("kimi_linear_flat", config=lambda values: values.update(_LENGTHS))
    for layout in ("released", "native"):
        convert(source, tmp_path / layout, Target(layout=layout))
        assert open_checkpoint(tmp_path / layout).config.max_position_embeddings == 2048
    assert KimiLinearConfig.from_pretrained(tmp_path / "native").max_position_embeddings == 2048


_LENGTHS = {"model_max_length": 2048, "max_position_embeddings": 2048}


def test_code_goes_along_with_the_configuration_that_names_it(data_dir, tmp_path):
    """A folder that loads with trust_remote_code still does; another configuration leaves the code behind."""
    AutoModelForCausalLM.from_pretrained(data_dir / "k3_tiny_mxfp4").save_pretrained(tmp_path / "saved")
    convert(tmp_path / "saved", tmp_path / "same", Target(shard_size=100_000))
    assert (tmp_path / "same" / "modeling_kimi_k3.py").exists() and (tmp_path / "same" / "kernels" / "kda.py").exists()
    convert(tmp_path / "saved", tmp_path / "flat", Target(layout="flat"))
    assert not list((tmp_path / "flat").glob("*.py"))
    assert "auto_map" not in json.loads((tmp_path / "flat" / "config.json").read_text())


def test_a_tokenizer_keeps_its_code_whatever_becomes_of_the_model(data_dir, tmp_path):
    """As in the released folder: the tokenizer's configuration names a file, which imports another one."""
    source = tmp_path / "source"
    shutil.copytree(data_dir / "k3_tiny_mxfp4", source)
    names = {"tokenizer_config.json", "tokenization_kimi.py", "tool_declaration_ts.py", "tiktoken.model"}
    for name in names:
        (source / name).write_text('{"auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", null]}}')
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("{{ messages }}")
    convert(source, tmp_path / "cut", Target(layers=(0, 0)))
    assert names <= {path.name for path in (tmp_path / "cut").iterdir()}
    assert (tmp_path / "cut" / "additional_chat_templates" / "tool_use.jinja").exists()


@pytest.mark.parametrize("original", [True, False], ids=["released-names", "fused"])
def test_what_the_native_class_saved_comes_back(original, data_dir, tmp_path):
    from transformers.models.kimi_linear import KimiLinearForCausalLM

    model = KimiLinearForCausalLM.from_pretrained(data_dir / "kimi_linear_flat", dtype=torch.float32)
    model.save_pretrained(tmp_path / "saved", save_original_format=original)
    names = set(load_file(tmp_path / "saved" / WEIGHTS))
    assert ("model.layers.0.self_attn.conv1d.weight" in names) != original
    convert(tmp_path / "saved", tmp_path / "ours")
    result = verify(tmp_path / "ours", data_dir / "kimi_linear_flat")
    assert result.same and result.equal == 187, result.differences
    assert verify(tmp_path / "saved", data_dir / "kimi_linear_flat").same
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert type(again) is KimiK3ForCausalLM and not any(info.values())


@pytest.mark.parametrize("folder", FORMS_OF)
def test_what_our_class_saved_in_its_own_form_comes_back(folder, data_dir, tmp_path):
    """Stacked experts, packed ones too, and `A_log` without its zeros."""
    model = AutoModelForCausalLM.from_pretrained(data_dir / folder)
    model.save_pretrained(tmp_path / "saved", save_original_format=False)
    target = Target(layout="flat" if folder == "k3_dense_flat" else "released")
    convert(tmp_path / "saved", tmp_path / "ours", target)
    assert (tmp_path / "ours" / WEIGHTS).read_bytes() == (data_dir / folder / WEIGHTS).read_bytes()


@pytest.mark.parametrize("form", ["flat", "fp32", "flat-fp32", "shards"])
@torch.no_grad()
def test_converted_folders_give_the_golden_logits(form, data_dir, tmp_path):
    """Fault 112: experts as plain float32 parameters too."""
    convert(data_dir / "k3_tiny_mxfp4", tmp_path / "new", FORMS[form])
    golden = load_file(data_dir / "k3_tiny_mxfp4" / "golden.safetensors")
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "new", dtype=torch.float32, output_loading_info=True)
    assert not any(info.values())
    logits = model.double()(golden["input_ids"]).logits.float()  # what is left are the golden run's roundings
    torch.testing.assert_close(logits, golden["logits"], atol=1e-3, rtol=0)


def test_a_flat_dense_model_becomes_a_nested_one(data_dir, tmp_path):
    """Fault 118: both forms load, to the same logits."""
    convert(data_dir / "k3_dense_flat", tmp_path / "nested")
    config = json.loads((tmp_path / "nested" / "config.json").read_text())
    assert config["model_type"] == "kimi_k3" and config["text_config"]["model_type"] == "kimi_linear"
    assert config["architectures"] == ["KimiK3ForConditionalGeneration"]
    ids = torch.arange(10, 40)[None]
    one, other = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits
        for folder in (data_dir / "k3_dense_flat", tmp_path / "nested")
    )
    assert torch.equal(one, other)


# --- adversarial values ----------------------------------------------------------------------------------------------


def fill_adversarially(weights):
    """Every float tensor gets every bit pattern there is, packed ones every code under every scale byte."""
    generator = torch.Generator().manual_seed(0)
    for name, tensor in weights.items():
        raw = torch.randint(0, 256, (tensor.nbytes,), dtype=torch.uint8, generator=generator)
        if name.endswith("weight_scale"):
            raw[: min(4, len(raw))] = torch.tensor([0, 1, 254, 255], dtype=torch.uint8)[: len(raw)]
        if name.endswith("A_log"):  # its tail must stay zero
            heads = int(tensor.count_nonzero())
            tensor.flatten()[:heads] = torch.tensor([-0.0, float("nan"), 1e-45, float("inf")])[:heads]
            continue
        weights[name] = raw.view(tensor.dtype).view(tensor.shape)


@pytest.mark.one_release
@pytest.mark.parametrize(
    "folder, through",
    [
        ("k3_tiny_mxfp4", "flat"),
        ("k3_tiny_mxfp4", "shards"),
        ("kimi_linear_flat", "native"),
        ("k3_dense_flat", "shards"),
    ],
)
def test_any_bits_are_moved_unchanged(folder, through, variant, tmp_path):
    """Subnormal numbers, -0, infinities, NaN payloads, scale bytes 0, 1, 254 and 255."""
    source = variant(folder, fill_adversarially)
    back = Target(layout="flat" if folder == "k3_dense_flat" else "released")
    end = convert_chain(source, tmp_path, FORMS[through], back)
    assert (end / WEIGHTS).read_bytes() == (source / WEIGHTS).read_bytes()
    assert verify(source, tmp_path / "step0", logits=False).same


@pytest.mark.one_release
def test_every_type_has_its_size(tmp_path):
    """Those too that no checkpoint of the family has: a tensor of one is left out by its bytes."""
    types = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
    types += [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8]
    types += [torch.bool, torch.complex64]
    save_file({str(dtype): torch.zeros(3, 5, dtype=dtype) for dtype in types}, tmp_path / WEIGHTS)
    entries = read_header(tmp_path / WEIGHTS)[0].values()
    sizes = {entry["dtype"]: entry["data_offsets"][1] - entry["data_offsets"][0] for entry in entries}
    assert sizes == {name: 15 * size for name, size in ITEM_BYTES.items()}


@pytest.mark.one_release
def test_subnormal_numbers_and_minus_zero_survive_a_wider_format(variant, tmp_path):
    """Every finite bfloat16 in the experts, through float32 and back, byte for byte."""

    def edit(weights):
        bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
        values = bits.view(torch.bfloat16)
        values = values[torch.isfinite(values)]
        for name in weights:
            if ".experts." in name and ".shared_" not in name:
                values = values.roll(weights[name].numel())
                weights[name] = values[: weights[name].numel()].clone().view(weights[name].shape)

    source = variant("kimi_linear_flat", edit)
    end = convert_chain(source, tmp_path, FORMS["fp32"], FORMS["native"], Target(expert_dtype="bf16"))
    assert (end / WEIGHTS).read_bytes() == (source / WEIGHTS).read_bytes()
    assert verify(source, tmp_path / "step0", logits=False).same


@pytest.mark.one_release
def test_a_cast_rounds_once_or_not_at_all(variant, tmp_path):
    """Every finite float16 as float32 is itself; as bfloat16 it is the nearest one."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    values = values[torch.isfinite(values)]

    def edit(weights):
        nonlocal values
        for name in weights:
            if ".experts." in name:
                values = values.roll(weights[name].numel())
                weights[name] = values[: weights[name].numel()].clone().view(weights[name].shape)

    source = variant("kimi_linear_flat", edit)
    before = load_file(source / WEIGHTS)
    for form, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        convert(source, tmp_path / form, FORMS[form])
        after = load_file(tmp_path / form / WEIGHTS)
        for name in filter(lambda name: ".experts." in name, before):
            stored = after[f"model.{name}" if f"model.{name}" in after else name]
            assert stored.dtype == dtype and torch.equal(stored, before[name].to(dtype)), name
        assert (tmp_path / form / "rounding.json").exists() == (form == "bf16")


@pytest.mark.one_release
@pytest.mark.parametrize("form", ["bf16", "fp32"])
def test_every_scale_that_can_be_decoded_keeps_its_values(form, variant, tmp_path):
    """Scale bytes 0 to 252 with any codes: other bytes may come back (the largest code decides), never other values."""

    def edit(weights):
        generator = torch.Generator().manual_seed(0)
        for name, tensor in weights.items():
            if name.endswith("weight_packed"):
                tensor.random_(0, 256, generator=generator)
            elif name.endswith("weight_scale"):
                tensor.random_(0, 253, generator=generator)
                tensor[0, 0], tensor[1, 0], tensor[2, 0] = 0, 1, 252

    source = variant("k3_tiny_mxfp4", edit)
    convert_chain(source, tmp_path, FORMS[form], Target(expert_dtype="mxfp4"))
    for number in (0, 1):
        result = verify(source, tmp_path / f"step{number}", logits=False)
        assert result.same and result.equal == 328, result.differences[:3]
    assert {each["max"] for each in json.loads((tmp_path / "step1" / "rounding.json").read_text()).values()} == {0}


@pytest.mark.parametrize("folder", ["k3_tiny_mxfp4", "kimi_linear_flat"])
def test_tied_embeddings(folder, variant, tmp_path):
    """A tied head has no tensor; one that is there and equal is left out, one that differs is refused."""

    def tie(values):
        for section in (values, values.get("text_config", values)):
            section["tie_word_embeddings"] = True

    def head(weights, change=0.0):
        prefix = "language_model." if folder == "k3_tiny_mxfp4" else ""
        weights[f"{prefix}lm_head.weight"] = weights[f"{prefix}model.embed_tokens.weight"].clone() + change

    source = variant(folder, head, tie)
    end = convert_chain(source, tmp_path, FORMS["flat"], FORMS["released"])
    names = set(load_file(end / WEIGHTS))
    assert not any("lm_head" in name for name in names)
    model, info = AutoModelForCausalLM.from_pretrained(end, output_loading_info=True)
    assert not any(info.values())
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    shutil.rmtree(source)
    with pytest.raises(ConversionError, match=r"tie_word_embeddings is true, but .*lm_head\.weight differs"):
        convert(variant(folder, lambda weights: head(weights, 1.0), tie), tmp_path / "no")
    assert not (tmp_path / "no").exists() and not (tmp_path / "no.partial").exists()


# --- MXFP4 -----------------------------------------------------------------------------------------------------------


@pytest.mark.one_release
def test_packed_bytes_come_back_from_their_values():
    """Faults 84, 109: every scale byte that float32 can decode, every code beside a largest one of 4 or 6, -0 too."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(2)
    for largest in (6, 7):
        row = torch.where((codes & 7) > largest, codes & 8, codes)
        packed = (row[0::2] | (row[1::2] << 4)).repeat(253, 1)
        scale = torch.arange(253, dtype=torch.uint8)[:, None]
        again, scale_again = quantize_mxfp4(dequantize_mxfp4(packed, scale, torch.float32))
        assert torch.equal(scale_again, scale) and torch.equal(again, packed)


@pytest.mark.one_release
def test_every_golden_byte_comes_back(data_dir):
    weights = load_file(data_dir / "k3_tiny_mxfp4" / WEIGHTS)
    names = [name for name in weights if name.endswith("weight_packed")]
    assert len(names) == 144
    for name in names:
        packed, scale = weights[name], weights[name.replace("_packed", "_scale")]
        again, scale_again = quantize_mxfp4(dequantize_mxfp4(packed, scale, torch.bfloat16))
        assert torch.equal(again, packed) and torch.equal(scale_again, scale), name


@pytest.mark.one_release
def test_rounding_is_reported_for_each_tensor(data_dir, tmp_path):
    """RMS and largest error against float64, and none where nothing is rounded."""
    convert(data_dir / "kimi_linear_flat", tmp_path / "packed", Target(expert_dtype="mxfp4"))
    report = json.loads((tmp_path / "packed" / "rounding.json").read_text())
    assert len(report) == 4 * 8 * 3
    before, after = (load_file(folder / WEIGHTS) for folder in (data_dir / "kimi_linear_flat", tmp_path / "packed"))
    name = "layers.3.block_sparse_moe.experts.5.w2.weight"
    stored = dequantize_mxfp4(*(after[f"model.{name}_{kind}"] for kind in ("packed", "scale")), torch.float64)
    error = before[f"model.{name}"].double() - stored
    assert report[name]["rms"] == pytest.approx(error.square().mean().sqrt().item())
    assert report[name]["max"] == error.abs().max().item() > 0
    assert report[name]["relative"] == pytest.approx((error.norm() / before[f"model.{name}"].double().norm()).item())
    convert(tmp_path / "packed", tmp_path / "wide", Target(expert_dtype="bf16"))
    assert not (tmp_path / "wide" / "rounding.json").exists(), "decoding MXFP4 is exact"
    convert(tmp_path / "wide", tmp_path / "again", Target(expert_dtype="mxfp4"))
    assert (tmp_path / "again" / WEIGHTS).read_bytes() == (tmp_path / "packed" / WEIGHTS).read_bytes()
    assert {each["max"] for each in json.loads((tmp_path / "again" / "rounding.json").read_text()).values()} == {0}
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", output_loading_info=True)
    assert not any(info.values()) and model.config.expert_quantization is not None


@pytest.mark.one_release
@pytest.mark.parametrize("byte, code", [(255, 1), (254, 4), (253, 6)])
def test_scales_beyond_floating_point_are_refused_by_name(byte, code, variant, tmp_path):
    def edit(weights):
        weights[f"{EXPERTS}3.w1.weight_packed"][0, 0] = code
        weights[f"{EXPERTS}3.w1.weight_scale"][0, 0] = byte

    source = variant("k3_tiny_mxfp4", edit)
    with pytest.raises(ConversionError, match=r"layers\.2\.block_sparse_moe\.experts\.3\.w1\.weight has scale bytes"):
        convert(source, tmp_path / "new", Target(expert_dtype="bf16"))
    assert not (tmp_path / "new").exists()
    convert(source, tmp_path / "packed", Target(layout="flat"))


@pytest.mark.one_release
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_mxfp4_cannot_hold_is_refused_by_name(value, variant, tmp_path):
    def edit(weights):
        weights["model.layers.1.block_sparse_moe.experts.0.w2.weight"][3, 4] = value

    with pytest.raises(ConversionError, match=r"layers\.1\.block_sparse_moe\.experts\.0\.w2\.weight has values"):
        convert(variant("kimi_linear_flat", edit), tmp_path / "new", Target(expert_dtype="mxfp4"))
    assert not (tmp_path / "new").exists()


# --- parts of a model ------------------------------------------------------------------------------------------------


@pytest.mark.one_release
@torch.no_grad()
def test_fewer_layers_and_experts(data_dir, tmp_path):
    """The pattern and the blocks stay; the small model is the beginning of the large one."""
    convert(data_dir / "k3_tiny_mxfp4", tmp_path / "cut", Target(layers=(0, 3), experts=4))
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "cut", output_loading_info=True)
    text = model.config.text_config
    assert not any(info.values())
    assert text.linear_attn_config["kda_layers"] == [1, 2, 3] and text.linear_attn_config["full_attn_layers"] == [4]
    assert (text.num_experts, text.attn_res_block_size, text.first_k_dense_replace) == (4, 3, 1)
    before, after = (load_file(folder / WEIGHTS) for folder in (data_dir / "k3_tiny_mxfp4", tmp_path / "cut"))
    router = "language_model.model.layers.3.block_sparse_moe.gate.weight"
    assert torch.equal(after[router], before[router][:4])
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items() if ".gate." not in name)
    ids = torch.arange(10, 30)[None]
    convert(data_dir / "k3_tiny_mxfp4", tmp_path / "layers", Target(layers=(0, 3)))
    whole, cut = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for folder in (data_dir / "k3_tiny_mxfp4", tmp_path / "layers")
    )
    reads = [each(ids, output_hidden_states=True).hidden_states for each in (whole, cut)]
    assert all(torch.equal(a, b) for a, b in zip(reads[0][:4], reads[1][:4], strict=True))


def test_layers_from_the_middle(data_dir, tmp_path):
    convert(data_dir / "k3_tiny_mxfp4", tmp_path / "cut", Target(layers=(3, 5)))
    config = open_checkpoint(tmp_path / "cut").text_config
    assert config.layer_types == ["full_attention", "linear_attention", "linear_attention"]
    assert config.mlp_layer_types == ["sparse"] * 3
    before, after = (load_file(folder / WEIGHTS) for folder in (data_dir / "k3_tiny_mxfp4", tmp_path / "cut"))
    name = "language_model.model.layers.{}.self_attn.q_proj.weight"
    assert torch.equal(after[name.format(1)], before[name.format(4)])


@pytest.mark.one_release
@pytest.mark.parametrize(
    "folder, target, message",
    [
        ("k3_tiny_mxfp4", Target(layers=(2, 4)), "blocks of Attention Residuals are 3 layers"),
        ("k3_tiny_mxfp4", Target(layers=(0, 7)), "the model has layers 0 to 6"),
        ("k3_tiny_mxfp4", Target(experts=2), "a token uses 3 experts"),
        ("k3_tiny_mxfp4", Target(experts=9), "the model has 8 routed experts"),
        ("k3_dense_flat", Target(experts=1), "the model has 0 routed experts"),
        ("k3_dense_flat", Target(expert_dtype="mxfp4"), "has no routed experts"),
        ("k3_tiny_mxfp4", Target(layout="native"), "no place for Attention Residuals .*packed experts"),
        ("k3_vision/small_signal", Target(layout="flat"), "--text-only"),
        ("k3_tiny_mxfp4", Target(layout="gguf"), "not one of released, flat, native"),
        ("k3_tiny_mxfp4", Target(expert_dtype="int8"), "not one of bf16, fp32, mxfp4"),
        ("k3_tiny_mxfp4", Target(shard_size=0), "must be positive"),
    ],
)
def test_wishes_that_do_not_fit_are_refused_with_the_reason(folder, target, message, data_dir, tmp_path):
    with pytest.raises(ConversionError, match=message):
        convert(data_dir / folder, tmp_path / "new", target)
    assert not list(tmp_path.iterdir())


def test_a_softmax_router_becomes_no_native_folder(variant, tmp_path):
    """transformers' class knows the sigmoid alone, whatever the configuration says."""
    source = variant("kimi_linear_flat", config=lambda values: values.update(moe_router_activation_func="softmax"))
    with pytest.raises(ConversionError, match="no place for moe_router_activation_func 'softmax'"):
        convert(source, tmp_path / "new", Target(layout="native"))


# --- verify and inspect ----------------------------------------------------------------------------------------------


@pytest.mark.one_release
def test_verify_finds_every_kind_of_difference(data_dir, variant):
    golden = data_dir / "k3_tiny_mxfp4"

    def edit(weights):
        weights["language_model.model.norm.weight"][5] = 64
        weights["language_model.model.layers.1.self_attn.A_log"][2] = -0.0
        weights[f"{EXPERTS}0.w1.weight_packed"][0, 0] ^= 1

    def config(values):
        values["text_config"]["rms_norm_eps"] = 1e-6

    source = variant("k3_tiny_mxfp4", edit, config)
    zero = load_file(golden / WEIGHTS)["language_model.model.layers.1.self_attn.A_log"][2].item()
    result = verify(golden, source)
    assert not result.same and result.logits.startswith("not compared")
    found = "\n".join(result.differences)
    assert "rms_norm_eps is 1e-05" in found and "\nnorm.weight differs by up to 6" in found
    assert "layers.1.self_attn.A_log differs" in found or zero == 0
    assert "layers.2.block_sparse_moe.experts.0.w1.weight differs by up to" in found
    assert len(result.differences) == 4
    assert len(verify(golden, source, tolerance=100.0, logits=False).differences) == 1, "the configuration's"


def test_verify_compares_logits_of_packed_and_plain_experts(data_dir, tmp_path):
    convert(data_dir / "k3_tiny_mxfp4", tmp_path / "plain", Target(expert_dtype="bf16"))
    result = verify(data_dir / "k3_tiny_mxfp4", tmp_path / "plain")
    assert result.same and result.equal == 328 and "same argmax at 100.0%" in result.logits


def test_verify_compares_the_towers_configurations(data_dir, tmp_path):
    """The same tensors with other heads are another tower."""
    golden, other = data_dir / "k3_vision/small_signal", tmp_path / "other"
    shutil.copytree(golden, other)
    config = json.loads((golden / "config.json").read_text())
    config["vision_config"]["vt_num_attention_heads"] = 2
    (other / "config.json").write_text(json.dumps(config))
    (difference,) = verify(golden, other, logits=False).differences
    assert difference.startswith("vt_num_attention_heads is 4 in ")
    assert verify(golden, other, text_only=True, logits=False).same


@pytest.mark.one_release
def test_verify_of_weights_that_are_not_numbers(data_dir, variant):
    """A folder is the same model as itself, also where its logits are NaN; a NaN in one of two is a difference."""

    def edit(weights):
        weights["model.norm.weight"][3] = float("nan")

    source = variant("kimi_linear_flat", edit)
    assert verify(source, source).same
    assert verify(source, data_dir / "kimi_linear_flat").differences == ["norm.weight differs by up to inf"]


@pytest.mark.one_release
def test_verify_wants_both_parts_of_a_multimodal_model(data_dir, tmp_path):
    convert(data_dir / "k3_vision/small_signal", tmp_path / "text", FORMS["flat"])
    result = verify(data_dir / "k3_vision/small_signal", tmp_path / "text", logits=False)
    ((folder, names),) = result.lacking.items()
    assert folder == str(tmp_path / "text") and len(names) == 24 and not (result.differences or result.same)
    assert verify(data_dir / "k3_vision/small_signal", tmp_path / "text", text_only=True, logits=False).same


@pytest.mark.one_release
def test_inspect_counts_what_is_there(data_dir):
    inventory = take_inventory(data_dir / "k3_tiny_mxfp4")
    assert (inventory.tensors, inventory.nbytes) == (472, 715_392)
    assert not inventory.missing and not inventory.foreign and not inventory.misshapen
    counts = {name: (part.tensors, part.parameters) for name, part in inventory.parts.items() if part.tensors}
    assert counts == {  # five layers of KDA, two of MLA, one without experts
        "embedding": (1, 160 * 64),
        "KDA attention": (5 * 14, 118_320),
        "MLA attention": (2 * 8, 40_064),
        "attention residuals": (7 * 4 + 2, 30 * 64),
        "norms": (7 * 2 + 1, 15 * 64),
        "dense MLP": (3, 3 * 160 * 64),
        "router": (6 * 2, 6 * (8 * 64 + 8)),
        "routed experts": (6 * 8 * 3 * 2, 6 * 8 * 3 * 32 * 32),
        "shared experts": (6 * 3, 6 * 3 * 64 * 64),
        "latent projections": (6 * 3, 6 * (2 * 32 * 64 + 32)),
        "head": (1, 160 * 64),
    }


@pytest.mark.one_release
def test_inspect_names_what_is_missing_foreign_or_misshapen(variant):
    def edit(weights):
        del weights["model.norm.weight"]
        weights["model.layers.0.rotary_emb.inv_freq"] = torch.ones(4)
        weights["model.layers.1.input_layernorm.weight"] = torch.ones(64)
        weights["language_model.model.layers.1.input_layernorm.weight"] = torch.ones(64)
        weights["lm_head.weight"] = torch.ones(3, 64)

    inventory = take_inventory(variant("kimi_linear_flat", edit))
    assert inventory.missing == ["norm.weight"]
    norm, inverse = "model.layers.1.input_layernorm.weight", "model.layers.0.rotary_emb.inv_freq"
    twice = {f"{norm} (there already as language_model.{norm})", f"language_model.{norm} (there already as {norm})"}
    assert inverse in inventory.foreign and len(inventory.foreign) == 2 and twice & set(inventory.foreign)
    assert inventory.misshapen == ["lm_head.weight has shape [3, 64], the configuration asks for [160, 64]"]


TABLE = """\
two layers

part       tensors  parameters   bytes  dtypes
embedding        1      12,000  24,000  BF16 x 1
head             2          25      80  F32 x 1, U8 x 1
sum              3      12,025  24,080

the index says total_size 24,081, the tensors are 24,080 bytes
missing: 11
  n0
  n1
  n2
  n3
  n4
  n5
  n6
  n7
  n8
  n9
  ... 1 more
foreign: 0
s0"""


@pytest.mark.one_release
def test_an_inventory_as_text():
    inventory = Inventory(["two layers"], [], False, 24081)
    inventory.parts["embedding"].add("a", "BF16", (120, 100))
    inventory.parts["head"].add("b", "F32", (3, 5))
    inventory.parts["head"].add("c_packed", "U8", (5,))
    inventory.parts["head"].nbytes += 15  # a scale's, say
    inventory.missing = [f"n{i}" for i in range(11)]
    inventory.misshapen = ["s0"]
    assert table(inventory) == TABLE
    inventory.total_size, inventory.missing = 24080, inventory.missing[:10]
    assert "the index says" not in table(inventory) and "more" not in table(inventory)
    inventory.absent = ["a.safetensors", "b.safetensors"]
    assert "shards that are not here: a.safetensors, b.safetensors\n" in table(inventory)
    inventory.index_only = True
    assert "only the index is here" in table(inventory) and "shards that" not in table(inventory)


@pytest.mark.one_release
def test_inspect_of_the_released_model_from_its_index(released_table, data_dir, tmp_path):
    """497,220 names, no shard: 1,560,860,324,864 bytes and 2,779,931,837,184 parameters."""
    shutil.copyfile(data_dir / "config_kimi_k3.json", tmp_path / "config.json")
    index = {
        "metadata": {"total_size": 1_560_860_324_864},
        "weight_map": dict.fromkeys(released_table, "model-1.safetensors"),
    }
    (tmp_path / INDEX).write_text(json.dumps(index))
    inventory = take_inventory(tmp_path)
    assert inventory.index_only and inventory.tensors == 497_220
    assert inventory.nbytes == inventory.total_size
    assert sum(part.parameters for part in inventory.parts.values()) == 2_779_931_837_184
    assert not inventory.missing and not inventory.foreign
    counts = {name: part.tensors for name, part in inventory.parts.items()}
    (tmp_path / "config.json").unlink()  # the index and nothing else: the same parts, without sizes
    alone = take_inventory(tmp_path)
    assert {name: part.tensors for name, part in alone.parts.items()} == counts
    assert "93 layers: 69 KDA, 24 others" in table(alone) and "1,560,860,324,864  as the index says" in table(alone)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"layers.x": "a.safetensors", "head": "a.safetensors"}}))
    assert "?" in table(take_inventory(tmp_path))


@pytest.mark.one_release
def test_sizes_of_shards_as_people_write_them():
    from kimi_k3.conversion.commands import byte_size

    assert [byte_size(text) for text in ("1", "5GB", "1.5kb", " 2T ", "500m")] == [
        1,
        5 * 10**9,
        1500,
        2 * 10**12,
        5 * 10**8,
    ]
    for text in ("0", "", "-1", "5 GB", "5X", "0.5"):
        with pytest.raises(argparse.ArgumentTypeError, match="must be a size like 5GB"):
            byte_size(text)
