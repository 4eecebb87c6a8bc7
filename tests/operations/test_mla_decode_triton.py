"""The MLA decode kernels against eager attention over expanded keys and values, and the torch reference, in float64."""

import types

import pytest
import torch

import kimi_k3
from kimi_k3.kernels import dispatch, mla_decode
from kimi_k3.layers_kimi_k3 import KimiK3MLAttention, eager_attention_forward

triton = pytest.importorskip("triton")
tools = pytest.importorskip("kimi_k3.kernels.triton_tools")
kernels = pytest.importorskip("kimi_k3.kernels.mla_decode_triton")

pytestmark = pytest.mark.one_release

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
on_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
PRECISIONS = [
    pytest.param(torch.float32, 1e-5, id="float32"),
    pytest.param(torch.bfloat16, 5e-3, id="bfloat16", marks=on_gpu),
    pytest.param(torch.float16, 5e-3, id="float16", marks=on_gpu),
]
SCALE = 0.17
# Heads, latent size and rope size: odd, no powers of two, none at all; K3's own need half precision.
SIZES = [(3, 24, 5), (7, 33, 0), (20, 64, 16)]


@pytest.fixture(autouse=True)
def _triton_everywhere(monkeypatch):
    monkeypatch.setattr(dispatch, "triton_refusal", lambda *tensors, sizes=(): None)
    if not ON_GPU:  # which has one multiprocessor: nothing would be split
        monkeypatch.setattr(tools, "multiprocessors", lambda device: 6)


def make(batch, tokens, heads, keys, rank, rope, dtype=torch.float32):
    torch.manual_seed(tokens)
    shapes = (batch, tokens, heads, rank), (batch, tokens, heads, rope), (batch, keys, rank + rope)
    return [torch.randn(shape).to(DEVICE, dtype) for shape in shapes]


def reference(query, query_rope, latents, mask=None, lengths=None):
    if mask is not None and mask.is_floating_point():
        mask = mask.double().masked_fill(mask == torch.finfo(mask.dtype).min, torch.finfo(torch.float64).min)
    double = [x.double() for x in (query, query_rope, latents)]
    return mla_decode._composed(*double, SCALE, mask, lengths)


def rms_ratio(got, expected):
    return ((got.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("tokens", [1, 4])
def test_the_reference_is_eager_attention_over_expanded_keys(tokens):
    """Absorbing `kv_b_proj` changes the order of a sum and nothing else, the scale least of all."""
    heads, nope, rope, rank, size, keys = 5, 12, 6, 20, 10, 40
    torch.manual_seed(tokens)
    query = torch.randn(2, heads, tokens, nope + rope, dtype=torch.float64)
    latents = torch.randn(2, keys, rank + rope, dtype=torch.float64)
    w_uk, w_uv = torch.randn(heads, nope, rank, dtype=torch.float64), torch.randn(heads, size, rank).double()
    hidden = torch.rand(2, keys) < 0.3
    hidden[:, -tokens:] = False
    key = torch.einsum("bsr,hnr->bhsn", latents[..., :rank], w_uk)
    key = torch.cat([key, latents[:, None, :, rank:].expand(-1, heads, -1, -1)], dim=-1)
    value = torch.einsum("bsr,hvr->bhsv", latents[..., :rank], w_uv)
    later = torch.ones(tokens, keys, dtype=torch.bool).triu(keys - tokens + 1)
    mask = torch.zeros(2, 1, tokens, keys, dtype=torch.float64)
    mask = mask.masked_fill(hidden[:, None, None] | later, torch.finfo(torch.float64).min)
    module = torch.nn.Module().eval()
    expected, _ = eager_attention_forward(module, query, key, value, mask, SCALE)  # [B, T, H, V]
    query_nope, query_rope = query.transpose(1, 2).split([nope, rope], dim=-1)
    absorbed = torch.einsum("bthn,hnr->bthr", query_nope, w_uk)
    for form in (mask, mask == 0, ~hidden):
        out = mla_decode._composed(absorbed, query_rope, latents, SCALE, form, None)
        assert rms_ratio(torch.einsum("bthr,hvr->bthv", out, w_uv), expected) < 1e-12
    # The layer's form: the kernel between the two products that absorb, or nothing where it does not run.
    inputs = [x.float().to(DEVICE) for x in (query, latents, torch.cat([w_uk, w_uv], dim=1))]
    for form in (mask == 0, ~hidden):
        out = mla_decode.absorbed_attention(*inputs, SCALE, form.to(DEVICE))
        assert out.shape == expected.shape and rms_ratio(out, expected.to(DEVICE)) < 1e-5
    assert mla_decode.absorbed_attention(*inputs[:2], inputs[2].requires_grad_(), SCALE) is None
    assert mla_decode.absorbed_attention(inputs[0], inputs[1].double(), inputs[2].detach(), SCALE) is None


@pytest.mark.parametrize(("tokens", "sizes"), [(1, 0), (1, 1), (1, 2), (2, 1), (3, 2), (20, 0)])
@pytest.mark.parametrize(("dtype", "bound"), PRECISIONS)
def test_causal_over_every_key(tokens, sizes, dtype, bound):
    heads, rank, rope = SIZES[sizes]
    inputs = make(2, tokens, heads, 90, rank, rope, dtype)
    assert mla_decode.is_fused(inputs[0].transpose(1, 2), inputs[2], rope)
    got = mla_decode.mla_decode(*inputs, SCALE)
    assert got.dtype == dtype and got.shape == inputs[0].shape
    assert rms_ratio(got, reference(*inputs)) < bound
    assert torch.equal(got, mla_decode.mla_decode(*inputs, SCALE))


def masks(batch, tokens, keys):
    """Left padding, holes and an unused tail, in every form that the model's attention implementations hand over."""
    visible = torch.rand(batch, keys, generator=torch.Generator().manual_seed(1)) < 0.7
    visible[0, : keys // 2] = False
    visible[:, -tokens:] = True
    causal = torch.ones(tokens, keys, dtype=torch.bool).tril(keys - tokens)
    both = (visible[:, None] & causal)[:, None].to(DEVICE)
    additive = {dtype: torch.zeros(both.shape, dtype=dtype, device=DEVICE) for dtype in (torch.float32, torch.bfloat16)}
    yield from (visible.to(DEVICE), visible.long().to(DEVICE), both)
    yield from (mask.masked_fill_(~both, torch.finfo(mask.dtype).min) for mask in additive.values())
    yield torch.where(both, torch.randn(both.shape, device=DEVICE), torch.finfo(torch.float32).min)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize(("dtype", "bound"), PRECISIONS)
def test_masks_of_every_form(tokens, dtype, bound):
    inputs = make(2, tokens, 5, 75, 24, 8, dtype)
    for mask in masks(2, tokens, 75):
        assert rms_ratio(mla_decode.mla_decode(*inputs, SCALE, mask), reference(*inputs, mask)) < bound
    shared = next(masks(2, tokens, 75))[:1, None, None].expand(1, 1, tokens, 75)  # one mask for all rows
    assert rms_ratio(mla_decode.mla_decode(*inputs, SCALE, shared), reference(*inputs, shared)) < bound


@pytest.mark.parametrize("tokens", [1, 3])
def test_lengths_stay_on_the_device_and_bound_what_is_read(tokens):
    """Keys behind a row's length are poisoned: whatever a static cache holds there is never read."""
    for lengths in (torch.tensor([tokens, 61, 100]), torch.tensor(64)):
        inputs, lengths = make(3, tokens, 4, 100, 20, 4), lengths.to(DEVICE)
        for row, length in enumerate(lengths.expand(3).tolist()):
            inputs[2][row, length:] = float("nan")
        got = mla_decode.mla_decode(*inputs, SCALE, None, lengths)
        assert rms_ratio(got, reference(*inputs, None, lengths)) < 1e-5
        for row, length in enumerate(lengths.expand(3).tolist()):
            alone = [x[row : row + 1] for x in inputs]
            alone[2] = alone[2][:, :length]
            assert rms_ratio(got[row : row + 1], reference(*alone)) < 1e-5


def test_a_query_that_sees_no_key_gives_zeros():
    inputs = make(2, 2, 3, 70, 16, 4)
    mask = torch.ones(2, 1, 2, 70, dtype=torch.bool, device=DEVICE)
    mask[0, :, 1], mask[1, ..., :60] = False, False  # no key at all; splits without a key
    got = mla_decode.mla_decode(*inputs, SCALE, mask)
    assert (got[0, 1] == 0).all() and (got[0, 0] != 0).any()
    assert rms_ratio(got, reference(*inputs, mask)) < 1e-5


def test_strided_inputs_and_large_scores():
    """Queries that lie head after head, latents inside a longer buffer; scores of hundreds."""
    query, query_rope, latents = make(2, 3, 4, 80, 24, 8)
    apart = query.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    wide = torch.cat([query_rope, query_rope], dim=-1)[..., :8]
    buffer = torch.full((2, 130, 32), float("nan"), device=DEVICE)
    buffer[:, :80] = latents
    expected = mla_decode.mla_decode(query, query_rope, latents, SCALE)
    assert torch.equal(mla_decode.mla_decode(apart, wide, buffer[:, :80], SCALE), expected)
    inputs = [query * 100, query_rope * 100, latents]  # the rounding of such a score moves its weight
    assert rms_ratio(mla_decode.mla_decode(*inputs, SCALE), reference(*inputs)) < 1e-3


@pytest.mark.parametrize(("dtype", "bound"), PRECISIONS)
def test_latents_in_pages(dtype, bound):
    """Every sequence's keys in pages anywhere among others', of which nothing is read, nor what lies behind its end."""
    size, lengths = mla_decode.PAGE_TILE, torch.tensor([65, 200, 1])
    query, query_rope, latents = make(3, 1, 5, 200, 20, 6, dtype)
    table = torch.tensor([[7, 2, 0, 0], [1, 9, 4, 6], [3, 0, 0, 0]], dtype=torch.int32)
    buffer = torch.full((11 * size, 26), float("nan")).to(latents)
    for row, (pages, length) in enumerate(zip(table.tolist(), lengths.tolist(), strict=True)):
        for token in range(length):
            buffer[pages[token // size] * size + token % size] = latents[row, token]
    pages = mla_decode.Pages(table.to(DEVICE), size)
    assert mla_decode.is_fused(query.transpose(1, 2), buffer, 6, pages)
    got = mla_decode.mla_decode(query, query_rope, buffer, SCALE, None, lengths.to(DEVICE), pages)
    expected = reference(query, query_rope, latents, None, lengths.to(DEVICE))
    assert rms_ratio(got, expected) < bound
    composed = mla_decode._composed(query, query_rope, buffer, SCALE, None, lengths.to(DEVICE), pages)
    assert rms_ratio(composed, expected) < bound
    assert not mla_decode.is_fused(query.transpose(1, 2), buffer, 6, mla_decode.Pages(table, 8))


@pytest.mark.skipif(ON_GPU, reason="takes 8 GB there; a file with holes stands in for them here")
def test_heads_further_apart_than_32_bits_count(tmp_path):
    """44 thousand tokens of K3's heads and latents side by side, as a batch of 700 with 64 new tokens has."""
    query, query_rope, latents = make(1, 2, 3, 20, 16, 0)
    apart, strides = 2**30, (32, 16, 2**30, 1)

    def far(name):
        (tmp_path / name).touch()
        numbers = torch.from_file(str(tmp_path / name), shared=True, size=2 * apart + 32, dtype=torch.float32)
        (tmp_path / name).unlink()
        return numbers.as_strided(query.shape, strides)

    queries, out = far("query").copy_(query), far("out")
    expected = kernels.run(query, query_rope, latents, SCALE, None, None)
    assert torch.equal(kernels.run(queries, query_rope, latents, SCALE, None, None), expected)
    part, log2_sum = torch.randn(1, 6, 2, 16), torch.randn(1, 6, 2)
    kernels.merge_kernel[(6, 1, 1)](
        part=part, log2_sum=log2_sum, out=out, splits=2, rows=6, out_strides=strides[:3],
        H=3, R=16, BC=16, BS=2, PTX=tools.USE_PTX,
    )  # fmt: skip
    torch.testing.assert_close(out.contiguous(), kernels.merged(part, log2_sum, query))


def test_splits_are_a_function_of_shapes():
    """As many as fill the device once, at least one, never more than there are tiles."""
    assert kernels.count_splits(2, 4096, 132) == 66
    assert kernels.count_splits(1, 3, 132) <= 3
    assert kernels.count_splits(500, 100, 132) >= 1
    rounds = tools.cdiv(100 * kernels.count_splits(100, 1000, 132), 132)
    assert 100 * kernels.count_splits(100, 1000, 132) / (132 * rounds) > 0.9


def test_what_the_kernels_are_not_for():
    query, _, latents = make(1, 2, 3, 20, 16, 4)
    heads_first = query.transpose(1, 2)
    assert mla_decode.is_fused(heads_first, latents, 4)
    assert not mla_decode.is_fused(heads_first.detach().requires_grad_(), latents, 4)
    assert not mla_decode.is_fused(heads_first, latents.double(), 4)
    assert not mla_decode.is_fused(torch.randn(1, 3, mla_decode.MAX_TOKENS + 1, 16), latents, 4)
    assert not mla_decode.is_fused(heads_first, torch.randn(1, 20, 600), 4)
    assert not mla_decode.is_fused(heads_first, torch.randn(1, 20, 100), 70)
    # Autograd of any input takes the reference, which has a gradient.
    rope = torch.randn(1, 2, 3, 4, device=DEVICE, requires_grad=True)
    assert torch.autograd.grad(mla_decode.mla_decode(query, rope, latents, SCALE).sum(), rope)[0].abs().sum() > 0


def test_a_kernel_that_does_not_compile(monkeypatch):
    """Fault 82: the reference answers."""
    inputs = make(1, 2, 3, 20, 16, 4)
    monkeypatch.setattr(dispatch, "_broken", {})
    dispatch._tell.cache_clear()

    def broken(*arguments):
        raise RuntimeError("PassManager::run failed")

    monkeypatch.setattr(kernels, "run", broken)
    assert rms_ratio(mla_decode.mla_decode(*inputs, SCALE), reference(*inputs)) < 1e-5
    assert dispatch._broken


def test_the_model_decodes_with_it(data_dir, monkeypatch):
    """A prompt expands; steps and drafts, with a growing and with a static cache, ask for the kernel."""
    model = kimi_k3.KimiK3ForCausalLM.from_pretrained(data_dir / "k3_dense_flat", dtype=torch.float32).to(DEVICE).eval()
    ids = torch.randint(3, model.config.vocab_size, (2, 24), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    layers = sum(isinstance(module, KimiK3MLAttention) for module in model.modules())
    calls = []
    run = mla_decode.absorbed_attention

    def counted(*arguments):
        out = run(*arguments)
        calls.extend([] if out is None else [arguments[5]])
        return out

    # The other layers run torch, which the interpreter is slow for.
    real = types.SimpleNamespace(**vars(dispatch))
    monkeypatch.setattr(mla_decode, "dispatch", real)
    monkeypatch.setattr(dispatch, "triton_refusal", lambda *tensors, sizes=(): "switched off")
    monkeypatch.setattr(mla_decode, "absorbed_attention", counted)
    with torch.no_grad():
        whole = model(ids).logits
        assert not calls and layers
        for cache in (kimi_k3.HybridCache(model.config), kimi_k3.HybridCache(model.config, max_length=40)):
            model(ids[:, :20], **{kimi_k3.CACHE_ARGUMENT: cache})
            pieces = [model(ids[:, a:b], **{kimi_k3.CACHE_ARGUMENT: cache}).logits for a, b in ((20, 21), (21, 24))]
            assert rms_ratio(torch.cat(pieces, dim=1), whole[:, 20:].double()) < 1e-4
            assert len(calls) == 2 * layers
            assert all((held is not None) == cache.is_compileable for held in calls)
            calls.clear()


@on_gpu
@pytest.mark.parametrize("case", [(1, 1, 131072), (3, 1, 5000), (16, 1, 1024), (1, 16, 9000), (1, 64, 9000)], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_full_size(case, seed):
    """Kimi K3's heads and latents in bfloat16, lengths that differ from row to row."""
    batch, tokens, keys = case
    torch.manual_seed(seed)
    shapes = (batch, tokens, 96, 512), (batch, tokens, 96, 64), (batch, keys, 576)
    inputs = [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for shape in shapes]
    lengths = torch.randint(keys // 2, keys + 1, (batch,), device=DEVICE)
    mask = torch.rand(batch, keys, device=DEVICE) < 0.8
    for arguments in ((), (None, lengths), (mask,)):
        got = mla_decode.mla_decode(*inputs, 192**-0.5, *arguments)
        for row in range(batch):
            one = [x[row : row + 1].double() for x in inputs]
            rest = [None if x is None else x[row : row + 1] for x in arguments]
            expected = mla_decode._composed(*one, 192**-0.5, *rest, *[None] * (2 - len(rest)))
            assert rms_ratio(got[row : row + 1], expected) < 5e-3
        assert torch.equal(got, mla_decode.mla_decode(*inputs, 192**-0.5, *arguments))


@on_gpu
def test_a_captured_launch_follows_the_length():
    """A CUDA graph replayed with another length on the device gives that length's result."""
    inputs = make(1, 1, 32, 4096, 512, 64, torch.bfloat16)
    length = torch.tensor(700, device=DEVICE)
    mla_decode.mla_decode(*inputs, SCALE, None, length)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = mla_decode.mla_decode(*inputs, SCALE, None, length)
    for value in (1, 33, 4096):
        length.fill_(value)
        graph.replay()
        assert rms_ratio(out, reference(*inputs, None, length)) < 5e-3


@on_gpu
@pytest.mark.parametrize("heads", [96, 64, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_two_groups_of_warps_on_hopper(heads, dtype, monkeypatch):
    """Many keys: rows of every length, between and behind them latents that are no numbers; queries in any order."""
    if not tools.is_hopper(DEVICE):
        pytest.skip("needs compute capability 9")
    gluon = mla_decode._gluon() or pytest.skip("needs Gluon for Hopper")
    taken, real = [], gluon.run
    monkeypatch.setattr(gluon, "run", lambda *arguments: taken.append(1) or real(*arguments))
    counts = [0, 1, 31, 63, 64, 65, 127, 128, 129, 193, 1000, 1024]
    query, query_rope, latents = make(len(counts), 1, heads, 1024, 512, 64, dtype)
    query = query.transpose(1, 2).contiguous().transpose(1, 2)
    expected = reference(query, query_rope, latents)
    buffer = torch.full((len(counts), 1100, 600), float("nan"), device=DEVICE, dtype=dtype)
    buffer[:, :1024, :576] = latents
    apart = buffer[:, :1024, :576]
    got = mla_decode.mla_decode(query, query_rope, apart, SCALE)
    assert rms_ratio(got, expected) < 5e-3
    assert torch.equal(got, mla_decode.mla_decode(query, query_rope, latents, SCALE))
    lengths = torch.tensor(counts, device=DEVICE)
    for row, count in enumerate(counts):
        buffer[row, count:] = float("nan")
    got = mla_decode.mla_decode(query, query_rope, apart, SCALE, None, lengths)
    expected = reference(query, query_rope, apart, None, lengths)
    assert (got[0] == 0).all() and len(taken) == 3
    for row in range(1, len(counts)):
        assert rms_ratio(got[row], expected[row]) < 5e-3
    large = [query * 100, query_rope * 100, latents]  # scores of thousands: a weight of one, the others nothing
    assert rms_ratio(mla_decode.mla_decode(*large, SCALE), reference(*large)) < 5e-2


def test_few_keys_and_other_devices_take_the_portable_kernel():
    gluon = mla_decode._gluon() or pytest.skip("needs Gluon for Hopper")
    few = make(1, 1, 96, 64, 512, 64, torch.bfloat16)
    assert not gluon.fits(*few, SCALE, None)
    many = [few[0], few[1], few[2].expand(1, 64, 576).repeat(1, 200, 1)]
    assert gluon.fits(*many, SCALE, None)
    assert (gluon in mla_decode._kernels(*many, SCALE, None)) == tools.is_hopper(DEVICE)
    assert not gluon.fits(*many, SCALE, torch.ones(1, 12800, dtype=torch.bool, device=DEVICE))
    assert not gluon.fits(*many, -SCALE, None)


@pytest.mark.parametrize(("strides", "fits"), [
    ((0, 576, 1), True), ((12800 * 640, 640, 1), True), ((12800 * 576, 576, 1), True),
    ((12800 * 576 + 8, 576, 1), False), ((576, 0, 1), False), ((0, 0, 1), False),
    ((12800 * 568, 568, 1), False), ((12800 * 580, 580, 1), False), ((8, 16, 2), False),
], ids=str)  # fmt: skip
def test_latents_that_a_bulk_copy_takes(strides, fits):
    """Rows of one matrix, 16 bytes or a multiple apart, that do not overlap; sequences may share them."""
    gluon = mla_decode._gluon() or pytest.skip("needs Gluon for Hopper")
    query, query_rope, _ = make(2, 1, 96, 1, 512, 64, torch.bfloat16)
    latents = torch.empty(2 * 12800 * 640, dtype=torch.bfloat16).as_strided((2, 12800, 576), strides)
    assert gluon.fits(query, query_rope, latents, SCALE, None) == fits
