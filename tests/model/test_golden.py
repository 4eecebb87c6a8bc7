"""The three text checkpoints against logits and greedy text of an independent float32 run (tests/data/README.md)."""

import copy

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.models.kimi_linear import KimiLinearForCausalLM

import kimi_k3
from rounding import EXACT, rms, rms_of_float32

FOLDERS = ["k3_tiny_mxfp4", "k3_dense_flat", "kimi_linear_flat"]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
CACHE = kimi_k3.CACHE_ARGUMENT

pytestmark = pytest.mark.portable


@pytest.fixture(scope="module", params=[(f, d) for f in FOLDERS for d in ["cpu", "cuda"]], ids=lambda p: "-".join(p))
def golden(request, data_dir):
    """(model, golden tensors) on one device, in float64 on a CPU: what is compared there with the golden run is the
    rounding of that run alone, the same on every processor. On a GPU in float32, which the kernels are for."""
    folder, device = request.param
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    model = AutoModelForCausalLM.from_pretrained(data_dir / folder, dtype=torch.float32).to(device)
    model = model if device == "cuda" else model.double()
    tensors = load_file(data_dir / folder / "golden.safetensors")
    return model, {name: tensor.to(device) for name, tensor in tensors.items()}


def assert_golden(got, expected):
    difference = (got - expected).double()
    assert difference.abs().max() < 1e-3
    assert difference.square().mean().sqrt() < 1e-4
    assert torch.equal(got.argmax(-1), expected.argmax(-1))


def close(model, on_gpu=5e-4):
    """How near two ways to run a model are to one another."""
    return EXACT if model.dtype == torch.float64 else {"atol": on_gpu, "rtol": 0}


@torch.no_grad()
def test_logits(golden):
    model, tensors = golden
    assert_golden(model(tensors["input_ids"]).logits, tensors["logits"])


@pytest.mark.parametrize("folder", FOLDERS)
@torch.no_grad()
def test_float32(data_dir, folder):
    """The dtype in which the golden run was made, on a CPU: its logits and text, and no error but roundings."""
    model = AutoModelForCausalLM.from_pretrained(data_dir / folder, dtype=torch.float32)
    tensors = load_file(data_dir / folder / "golden.safetensors")
    ids, steps = tensors["input_ids"], tensors["greedy_ids"].shape[1]
    logits, exact = model(ids).logits, copy.deepcopy(model).double()
    assert logits.dtype == torch.float32
    assert torch.equal(logits.argmax(-1), tensors["logits"].argmax(-1))
    assert rms(logits - tensors["logits"]) < 1e-4
    assert rms(logits - exact(ids).logits) < rms_of_float32(exact, lambda model: model(ids).logits)
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": steps, "min_new_tokens": steps}
    text = model.generate(ids, **settings, do_sample=False)
    assert torch.equal(text[:, ids.shape[1] :], tensors["greedy_ids"])


@torch.no_grad()
def test_logits_with_eager_attention(golden):
    """Fault 25: set_attn_implementation changes the called kernel, and the outputs agree."""
    model, tensors = golden
    sdpa = model(tensors["input_ids"]).logits
    beside_sdpa = model(tensors["input_ids"], output_attentions=True).attentions
    model.set_attn_implementation("eager")
    try:
        eager = model(tensors["input_ids"], output_attentions=True)
    finally:
        model.set_attn_implementation("sdpa")
    assert eager.attentions[0].shape[-2:] == tensors["input_ids"].shape[-1:] * 2
    torch.testing.assert_close(eager.attentions[0].sum(-1), torch.ones_like(eager.attentions[0][..., 0]))
    for with_sdpa, weights in zip(beside_sdpa, eager.attentions, strict=True):
        torch.testing.assert_close(with_sdpa, weights, **close(model, on_gpu=1e-3))
    assert_golden(eager.logits, tensors["logits"])
    torch.testing.assert_close(eager.logits, sdpa, **close(model))


@torch.no_grad()
def test_left_padded_row_equals_the_row_alone(golden):
    """Fault 30: the padding of a short row touches neither convolution nor state nor attention."""
    model, tensors = golden
    ids, expected = tensors["input_ids"].clone(), tensors["short_logits"]
    padding = ids.shape[1] - expected.shape[1]
    mask = torch.ones_like(ids)
    mask[1, :padding] = 0
    ids[1, :padding] = model.config.get_text_config().pad_token_id
    logits = model(ids, attention_mask=mask).logits
    assert_golden(logits[1:, padding:], expected)
    assert_golden(logits[:1], tensors["logits"][:1])


@pytest.mark.parametrize("chunk", [None, 16, 150], ids=["whole", "chunks-of-16", "chunks-of-150"])
@torch.no_grad()
def test_greedy_with_cache(golden, chunk):
    model, tensors = golden
    ids, expected = tensors["input_ids"], tensors["greedy_ids"]
    steps = expected.shape[1]
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": steps, "min_new_tokens": steps}
    text = model.generate(ids, **settings, do_sample=False, prefill_chunk_size=chunk)
    assert torch.equal(text[:, ids.shape[1] :], expected)


@torch.no_grad()
def test_greedy_without_cache(golden):
    model, tensors = golden
    ids, expected = tensors["input_ids"], tensors["greedy_ids"]
    for step in range(expected.shape[1]):  # every step is a whole forward
        output = model(ids, use_cache=False, logits_to_keep=1)
        assert getattr(output, CACHE) is None
        chosen = output.logits[:, -1].argmax(-1)
        assert torch.equal(chosen, expected[:, step])
        ids = torch.cat([ids, chosen[:, None]], dim=1)


@pytest.mark.one_release
@pytest.mark.parametrize("pieces", ["1", "3", "5-1-64-70", "149-1"])
@torch.no_grad()
def test_any_split_of_the_prompt(golden, pieces):
    """Pieces shorter than the convolution and the chunk included; also the cache the model makes by itself."""
    model, tensors = golden
    sizes = [int(size) for size in pieces.split("-")]
    ids = tensors["input_ids"][:, : 48 * sizes[0]]
    cache, start, logits = None, 0, []
    while start < ids.shape[1]:
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        output = model(ids[:, start : start + size], **{CACHE: cache}, use_cache=True)
        cache = output[CACHE]
        logits.append(output.logits)
        start += size
    assert cache.get_seq_length() == ids.shape[1]
    assert_golden(torch.cat(logits, dim=1), tensors["logits"][:, : ids.shape[1]])


@torch.no_grad()
def test_both_cache_names(golden):
    """Needs 4: `past_key_values` and `cache` are one argument, in and out, on every supported transformers."""
    model, tensors = golden
    ids = tensors["input_ids"][:, :40]
    expected = model(ids).logits[:, 30:]
    for name in ("past_key_values", "cache"):
        cache = kimi_k3.HybridCache(model.config)
        output = model(ids[:, :30], **{name: cache})
        assert output.past_key_values is cache and output.cache is cache
        again = model(ids[:, 30:], **{name: copy.deepcopy(cache)}).logits
        torch.testing.assert_close(again, expected, **close(model))
    with pytest.raises(ValueError, match="two names of one argument"):
        model(ids, cache=kimi_k3.HybridCache(model.config), past_key_values=kimi_k3.HybridCache(model.config))


@torch.no_grad()
def test_bfloat16_stays_close(golden):
    """Fault 117: drift of half precision against float32 is bounded, with the float32 parameters kept.

    The median, because in random weights some tokens sit on a near-tie of the router and change an expert.
    """
    model, tensors = golden
    half = copy.deepcopy(model).float()
    for name, parameter in half.named_parameters():
        if parameter.dtype == torch.float32 and not any(p in name for p in half._keep_in_fp32_modules_strict):
            parameter.data = parameter.data.bfloat16()
    logits = half(tensors["input_ids"]).logits
    assert logits.dtype == torch.bfloat16
    cosine = torch.nn.functional.cosine_similarity(logits.float(), tensors["logits"], dim=-1)
    assert cosine.median() > 0.99


@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_native_class_agrees_on_kimi_linear(data_dir, device):
    """Parity with transformers' own class, on the checkpoint that both can read."""
    native = KimiLinearForCausalLM.from_pretrained(data_dir / "kimi_linear_flat", dtype=torch.float32).to(device)
    ours = kimi_k3.KimiK3ForCausalLM.from_pretrained(data_dir / "kimi_linear_flat", dtype=torch.float32).to(device)
    ids = torch.randint(3, 160, (2, 70), generator=torch.Generator().manual_seed(0)).to(device)
    got, expected = ours(ids).logits, native(ids).logits
    if device == "cuda":
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    else:  # in float32, as parts of the native class are in any dtype
        assert rms(got - expected) < rms_of_float32(ours.double(), lambda model: model(ids).logits)
