"""The Triton activations against the torch reference in float64, small arguments included."""

import pytest
import torch

from kimi_k3.kernels import dispatch, situ

pytest.importorskip("triton")

pytestmark = pytest.mark.one_release

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
PRECISIONS = [
    pytest.param(torch.float32, 1e-5, id="float32"),
    pytest.param(torch.bfloat16, 5e-3, id="bfloat16", marks=pytest.mark.skipif(not ON_GPU, reason="needs a GPU")),
]
BETAS = {"swiglu": (None, None), "situ": (4.0, 25.0), "situ-uncapped": (4.0, None)}


def rms_ratio(got, expected):
    return ((got.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("size", [1e-4, 0.3, 1.0, 60.0])
@pytest.mark.parametrize("activation", BETAS)
@pytest.mark.parametrize("together", [False, True], ids=["two", "one"])
@pytest.mark.parametrize(("dtype", "bound"), PRECISIONS)
def test_forward_and_backward(activation, size, dtype, bound, together, monkeypatch):
    """Gate and up as two tensors, rows with gaps here, and as the halves of one."""
    torch.manual_seed(0)
    both = (torch.randn(3, 5, 2 * 70) * size).to(DEVICE, dtype)
    seed = torch.randn(3, 5, 70).to(DEVICE, dtype)
    results = []
    for refusal, convert in ((None, lambda t: t), ("the oracle", torch.Tensor.double)):
        monkeypatch.setattr(dispatch, "triton_refusal", lambda *tensors, sizes=(), refusal=refusal: refusal)
        leaf = convert(both.clone()).requires_grad_()
        gate, up = (leaf, None) if together else leaf.chunk(2, dim=-1)
        betas = BETAS[activation]
        out = situ.swiglu(gate, up) if betas[0] is None else situ.situ_glu(gate, up, *betas)
        results.append([out, *torch.autograd.grad(out, leaf, seed.to(out.dtype))])
    for got, expected in zip(*results, strict=True):
        assert got.dtype == dtype and rms_ratio(got, expected) < bound


def test_halves_are_of_one_size():
    with pytest.raises(ValueError, match="there are 7 in all"):
        situ.swiglu(torch.randn(3, 7), None)
