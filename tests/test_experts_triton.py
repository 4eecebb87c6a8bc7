"""The Triton expert kernels against the torch reference in float64, float and packed weights."""

import pytest
import torch

from kimi_k3.kernels import dispatch, experts, mxfp4, situ

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
load_packed = pytest.importorskip("kimi_k3.kernels.experts_triton").load_packed

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
        gate, up = rows.chunk(2, dim=-1)
        return situ.swiglu(gate, up) if beta is None else situ.situ_glu(gate, up, beta, linear_beta)

    return experts.grouped_experts(
        x.double(), ids, weights.double(), len(wide[0]), lambda expert: (wide[0][expert], wide[1][expert]), activation
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
    [(1, 8, 4, None), (70, 4, 2, None), (40, 16, 2, [3, 9]), (17, 2, 2, None), (300, 3, 1, [1])],
    ids=["one-token", "many-a-expert", "two-experts-hit", "all-hit", "one-expert"],
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
def decode_all(packed, scale, out, DT: tl.constexpr):
    row, c = tl.program_id(0), tl.arange(0, 16)
    low, high = load_packed(packed, scale, row * 16 + c, row + c * 0, c < 16, DT)
    tl.store(out + row * 32 + 2 * c, low.to(tl.float32))
    tl.store(out + row * 32 + 2 * c + 1, high.to(tl.float32))


@pytest.mark.parametrize("dtype", ["float32", *(["bfloat16"] if ON_GPU else [])])
def test_every_code_and_every_scale_byte(dtype):
    """Fault 84: each of the 16 codes under each scale is the value of the specification, 255 is NaN."""
    scale = torch.arange(256, dtype=torch.uint8)
    codes = torch.arange(16, dtype=torch.uint8).repeat(2)
    packed = (codes[0::2] | (codes[1::2] << 4)).repeat(256, 1)
    expected = mxfp4.dequantize_mxfp4(packed, scale[:, None], getattr(torch, dtype)).float()
    got = torch.empty(256, 32, device=DEVICE)
    decode_all[(256,)](packed.to(DEVICE), scale.to(DEVICE), got, getattr(tl, dtype))
    assert torch.equal(got.cpu()[:255], expected[:255])
    assert got[255].isnan().all()


def test_gradients_take_the_reference():
    *arguments, _ = make(5, 4, 2, 32, 32, False, torch.float32)
    arguments[0].requires_grad_()
    assert experts.fused_experts(*arguments, None, None) is None
