"""The Triton expert kernels against the torch reference in float64, float and packed weights."""

import pytest
import torch

from kimi_k3.kernels import dispatch, experts, mxfp4, situ

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
experts_triton = pytest.importorskip("kimi_k3.kernels.experts_triton")

pytestmark = pytest.mark.one_release

tools = experts_triton.tools
decode_words, powers = experts_triton.decode_words, experts_triton.powers

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
PRECISIONS = [
    pytest.param(torch.float32, 1e-5, id="float32"),
    pytest.param(torch.bfloat16, 5e-3, id="bfloat16", marks=pytest.mark.skipif(not ON_GPU, reason="needs a GPU")),
]
ACTIVATIONS = {"swiglu": (None, None), "situ": (3.0, 2.0), "situ-uncapped": (3.0, None)}


@pytest.fixture(autouse=True)
def _triton_everywhere(monkeypatch):
    monkeypatch.setattr(dispatch, "triton_refusal", lambda *tensors, sizes=(): None)


def make(tokens, num_experts, top_k, size, width, packed, dtype, only=None):
    """Arguments of `fused_experts` up to the activation's, and the weights in float64."""
    torch.manual_seed(tokens)
    x = torch.randn(tokens, size)
    choices = range(num_experts) if only is None else only
    ids = torch.stack([torch.tensor(choices)[torch.randperm(len(choices))[:top_k]] for _ in range(tokens)])
    gate_up, down = torch.randn(num_experts, 2 * width, size) * 0.2, torch.randn(num_experts, size, width) * 0.2
    if packed:
        (gate_up, up_scale), (down, down_scale) = mxfp4.quantize_mxfp4(gate_up), mxfp4.quantize_mxfp4(down)
        wide = tuple(mxfp4.dequantize_mxfp4(*pair, torch.float64) for pair in ((gate_up, up_scale), (down, down_scale)))
        scales = up_scale.to(DEVICE), down_scale.to(DEVICE)
    else:
        gate_up, down, scales = gate_up.to(dtype), down.to(dtype), None
        wide = gate_up.double(), down.double()
    arguments = (x.to(dtype), ids, torch.rand(tokens, top_k), gate_up, down)
    return *(a.to(DEVICE) for a in arguments), scales, [w.to(DEVICE) for w in wide]


def oracle(x, ids, weights, wide, beta, linear_beta):
    def activation(rows):
        return situ.swiglu(rows, None) if beta is None else situ.situ_glu(rows, None, beta, linear_beta)

    with pytest.MonkeyPatch.context() as patched:  # its activation is no kernel either
        patched.setattr(dispatch, "triton_refusal", lambda *tensors, sizes=(): "the oracle")
        return experts.grouped_experts(
            x.double(), ids, weights.double(), len(wide[0]), lambda e: (wide[0][e], wide[1][e]), activation
        )


def rms_ratio(got, expected):
    return ((got.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("packed", [False, True], ids=["float", "mxfp4"])
@pytest.mark.parametrize(("dtype", "bound"), PRECISIONS)
@torch.no_grad()
def test_every_activation(activation, packed, dtype, bound):
    *arguments, wide = make(11, 8, 3, 64, 96, packed, dtype)
    got = experts.fused_experts(*arguments, *ACTIVATIONS[activation])
    assert got.dtype == torch.float32
    assert rms_ratio(got, oracle(*arguments[:3], wide, *ACTIVATIONS[activation])) < bound


@pytest.mark.parametrize("packed", [False, True], ids=["float", "mxfp4"])
@pytest.mark.parametrize(
    "case",
    [(1, 8, 4, None), (70, 4, 2, None), (40, 16, 2, [3, 9]), (17, 2, 2, None), (200, 3, 1, [1]), (90, 1, 1, None)],
    ids=["one-token", "many-a-expert", "two-experts-hit", "all-hit", "one-expert", "a-tile-of-three-parts"],
)
@torch.no_grad()
def test_ragged_groups(case, packed):
    """Experts without tokens, more tokens than a tile holds, all tokens on one expert."""
    tokens, num_experts, top_k, only = case
    *arguments, wide = make(tokens, num_experts, top_k, 32, 64, packed, torch.float32, only)
    got = experts.fused_experts(*arguments, 3.0, 2.0)
    assert rms_ratio(got, oracle(*arguments[:3], wide, 3.0, 2.0)) < 1e-5
    assert torch.equal(got, experts.fused_experts(*arguments, 3.0, 2.0))


@triton.jit
def decode_all(packed, scale, out, DT: tl.constexpr, PTX: tl.constexpr):
    row, w = tl.program_id(0) * 32 + tl.arange(0, 32)[:, None], tl.arange(0, 16)[None, :]
    word = tl.load(packed + row * 4 + w, mask=w < 4, other=0)
    n0, n4, n1, n5, n2, n6, n3, n7 = decode_words(word, powers(tl.load(scale + row + 0 * w), DT, PTX), DT, PTX)
    out += row * 32 + 8 * w
    tl.store(out, n0.to(tl.float32), mask=w < 4)
    tl.store(out + 1, n1.to(tl.float32), mask=w < 4)
    tl.store(out + 2, n2.to(tl.float32), mask=w < 4)
    tl.store(out + 3, n3.to(tl.float32), mask=w < 4)
    tl.store(out + 4, n4.to(tl.float32), mask=w < 4)
    tl.store(out + 5, n5.to(tl.float32), mask=w < 4)
    tl.store(out + 6, n6.to(tl.float32), mask=w < 4)
    tl.store(out + 7, n7.to(tl.float32), mask=w < 4)


@pytest.mark.parametrize("dtype", ["float32", *(["bfloat16"] if ON_GPU else [])])
def test_every_code_and_every_scale_byte(dtype):
    """Fault 84: each of the 16 codes under each scale is the value of the specification, 255 is NaN."""
    scale = torch.arange(256, dtype=torch.uint8)
    codes = torch.arange(16, dtype=torch.uint8).repeat(2)
    packed = (codes[0::2] | (codes[1::2] << 4)).repeat(256, 1)
    expected = mxfp4.dequantize_mxfp4(packed, scale[:, None], getattr(torch, dtype)).float()
    got = torch.empty(256, 32, device=DEVICE)
    decode_all[(8,)](packed.view(torch.int32).to(DEVICE), scale.to(DEVICE), got, getattr(tl, dtype), ON_GPU)
    assert torch.equal(got.cpu()[:255], expected[:255])
    assert got[255].isnan().all()


@pytest.mark.parametrize("few", [512, 0], ids=["one-program", "many"])
@pytest.mark.parametrize(("pairs", "num_experts"), [(1, 4), (16, 896), (37, 5), (130, 1), (300, 40)])
def test_the_plan_of_tiles(pairs, num_experts, few, monkeypatch):
    """Every pair lies in one tile of its expert; unused tiles say so."""
    monkeypatch.setattr(experts_triton, "FEW_PAIRS", few)
    torch.manual_seed(pairs)
    ids = torch.randint(0, num_experts, (pairs,), device=DEVICE)
    order, tiles = experts_triton.plan(ids, num_experts, 16)
    assert sorted(order[:pairs].tolist()) == list(range(pairs))
    seen = []
    for expert, first, end in tiles.t().tolist():
        if expert >= 0:
            assert 0 < end - first <= 16 and (ids[order[first:end].long()] == expert).all()
            seen += range(first, end)
    assert seen == list(range(pairs))


def test_gradients_take_the_reference():
    *arguments, _ = make(5, 4, 2, 32, 32, False, torch.float32)
    arguments[0].requires_grad_()
    assert experts.fused_experts(*arguments, None, None) is None


@torch.no_grad()
def test_many_tokens_go_in_parts(monkeypatch):
    *arguments, _ = make(11, 8, 3, 64, 32, False, torch.float32)
    expected = experts.fused_experts(*arguments, 3.0, 2.0)
    monkeypatch.setattr(experts, "MOST_PAIRS", 12)
    assert rms_ratio(experts.fused_experts(*arguments, 3.0, 2.0), expected.double()) < 1e-6


@torch.no_grad()
@pytest.mark.parametrize("few", [512, 0], ids=["one-program", "many"])
@pytest.mark.parametrize("packed", [False, True], ids=["float", "mxfp4"])
def test_experts_of_another_process_add_nothing(packed, few, monkeypatch):
    """Under expert parallelism ids past the last expert stand for tokens that another process computes."""
    monkeypatch.setattr(experts_triton, "FEW_PAIRS", few)
    x, ids, weights, *rest, wide = make(21, 6, 3, 64, 32, packed, torch.float32)
    own = [part[:4].contiguous() for part in rest[:2]]
    scales = None if rest[2] is None else tuple(scale[:4].contiguous() for scale in rest[2])
    assert (ids >= 4).any() and (ids < 4).any()
    got = experts.fused_experts(x, ids, weights, *own, scales, 3.0, 2.0, True)
    assert torch.equal(got, experts.fused_experts(x, ids.clamp_max(4), weights, *own, scales, 3.0, 2.0, True))
    expected = oracle(x, ids, weights.masked_fill(ids >= 4, 0.0), wide, 3.0, 2.0)
    assert rms_ratio(got, expected) < 1e-5
    of_torch = oracle(x, ids.clamp_max(4), weights, [part[:4] for part in wide], 3.0, 2.0)
    assert torch.equal(of_torch, expected)


def ragged(counts, size, width, dtype):
    """`make` for one expert a token, `counts[e]` tokens of expert e in any order."""
    *arguments, wide = make(sum(counts), len(counts), 1, size, width, True, dtype)
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))[torch.randperm(sum(counts))]
    arguments[1] = ids[:, None].to(DEVICE)
    return arguments, wide


# Modules of `_gluon`, pairs of 12 experts around the sizes of tiles, widths, and tokens that take four experts each.
HOPPER = {
    "few": (0, [0, 1, 2, 7, 8, 9, 3, 1, 4, 0, 5, 6], 1024, 512, 12),
    "many": (1, [0, 1, 63, 64, 65, 159, 160, 161, 191, 192, 193, 400], 640, 384, 1600),
}


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("case", HOPPER.values(), ids=HOPPER)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@torch.no_grad()
def test_groups_of_warps_on_hopper(activation, case, monkeypatch):
    """Experts of every number of pairs around the parts of a tile, blocks that the weights' rows do not fill."""
    if not tools.is_hopper(DEVICE):
        pytest.skip("needs compute capability 9")
    module, counts, size, width, tokens = case
    gluon = experts._gluon()[module] if experts._gluon() else pytest.skip("needs Gluon for Hopper")
    taken, real, empty = [], gluon.run, torch.empty
    monkeypatch.setattr(gluon, "run", lambda *arguments: taken.append(1) or real(*arguments))

    def poisoned(*arguments, **options):
        out = empty(*arguments, **options)
        return out.fill_(float("nan")) if out.is_floating_point() else out

    monkeypatch.setattr(torch, "empty", poisoned)
    arguments, wide = ragged(counts, size, width, torch.bfloat16)
    beta = ACTIVATIONS[activation]
    got = experts.fused_experts(*arguments, *beta)
    expected = oracle(*arguments[:3], wide, *beta)
    for expert in range(1, 12):
        rows = (arguments[1] == expert).flatten()
        assert rms_ratio(got[rows], expected[rows]) < 5e-3 or not rows.any()
    assert torch.equal(got, experts.fused_experts(*arguments, *beta))
    larger = (arguments[5][0], arguments[5][1].clone())
    larger[1][4] += 20  # beyond a scale of 1
    assert larger[1][4].max() > 127
    rows = (arguments[1] == 4).flatten()
    again = experts.fused_experts(*arguments[:5], larger, *beta)
    assert torch.equal(again[rows], got[rows] * 2**20) and torch.equal(again[~rows], got[~rows])
    several = [arguments[0][:tokens], *arguments[1:]]
    tokens = len(several[0])
    several[1] = torch.rand(tokens, 20, device=DEVICE).topk(4).indices  # of 20 experts, those from 12 on elsewhere
    several[2] = torch.rand(tokens, 4, device=DEVICE)
    got = experts.fused_experts(*several, *beta, True)
    expected = oracle(*several[:3], wide, *beta)
    assert rms_ratio(got, expected) < 5e-3 and len(taken) == 4
    several[5] = (several[5][0].clone(), several[5][1])
    several[5][0][2, 5, 3] = 255  # a scale that is no number
    hit = (several[1] == 2).any(1)
    got = experts.fused_experts(*several, *beta, True)
    assert got[hit].isnan().all() and torch.isfinite(got[~hit]).all()


def test_what_goes_to_the_groups_of_warps():
    """Few or many pairs of packed bfloat16 experts, columns in whole steps; the rest is the portable kernel's."""
    few, many = experts._gluon() or pytest.skip("needs Gluon for Hopper")
    arguments, _ = ragged([100, 60], 512, 512, torch.bfloat16)
    x, ids, weights, gate_up, down, scales = arguments
    rest = gate_up, down, *scales, 3.0, 2.0, False
    cut = x[:8], ids[:8], weights[:8]
    for gluon, other, own in ((many, few, (x, ids, weights)), (few, many, cut)):
        assert gluon.fits(*own, *rest) and not other.fits(*own, *rest)
        taken = (gluon,) if tools.is_hopper(DEVICE) else ()
        assert experts._kernels(*own, *rest) == (*taken, experts_triton)
        assert not gluon.fits(own[0].half(), *own[1:], *rest)
        assert not gluon.fits(*own, gate_up, down, None, None, 3.0, 2.0, False)
        assert not gluon.fits(own[0][:, :448], *own[1:], *rest)
        assert not gluon.fits(*own, gate_up, down[..., :32], *scales, 3.0, 2.0, False)
        assert not gluon.fits(*own, gate_up[:, ::2], down, *scales, 3.0, 2.0, False)
    assert all(gluon.fits(x[:9], ids[:9], weights[:9], *rest) is False for gluon in (few, many))
    assert not few.fits(x[:8, :384], *cut[1:], *rest)
