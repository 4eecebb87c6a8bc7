"""The Triton norms against the torch reference in float64, and against its roundings."""

import pytest
import torch

from kimi_k3.kernels import dispatch, norms

pytest.importorskip("triton")

pytestmark = pytest.mark.one_release

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
PRECISIONS = [
    pytest.param(torch.float32, 1e-5, id="float32"),
    pytest.param(torch.bfloat16, 5e-3, id="bfloat16", marks=pytest.mark.skipif(not ON_GPU, reason="needs a GPU")),
]
SHAPES = [(3, 5, 100), (2, 7, 4, 24), (1, 1, 3), (4, 2304 if ON_GPU else 300)]


def rms_ratio(got, expected):
    return ((got.double() - expected).norm() / expected.norm().clamp_min(1e-30)).item()


def run(x, gate, weight, seed):
    leaves = [t for t in (x, gate, weight) if t is not None]
    out = norms.rms_norm(x, weight, 1e-5) if gate is None else norms.gated_rms_norm(x, gate, weight, 1e-5)
    return [out, *torch.autograd.grad(out, leaves, seed.to(out.dtype))]


def test_a_backward_kernel_that_does_not_compile(monkeypatch):
    from kimi_k3.kernels import norms_triton

    torch.manual_seed(0)
    inputs = [torch.randn(3, 24, device=DEVICE, requires_grad=True) for _ in range(2)]
    weight, seed = torch.randn(24, device=DEVICE, requires_grad=True), torch.randn(3, 24, device=DEVICE)
    monkeypatch.setattr(dispatch, "triton_refusal", lambda *tensors, sizes=(): None)
    monkeypatch.setattr(dispatch, "_broken", {})
    expected = run(*inputs, weight, seed)

    def broken(*arguments):
        raise RuntimeError("PassManager::run failed")

    monkeypatch.setattr(norms_triton, "backward", broken)
    for got, wanted in zip(run(*inputs, weight, seed), expected, strict=True):
        assert rms_ratio(got, wanted.double()) < 2e-5  # either is within 1e-5 of float64


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("dtype", "bound"), PRECISIONS)
def test_forward_and_backward(shape, gated, dtype, bound, monkeypatch):
    torch.manual_seed(0)
    x, gate, seed = (torch.randn(shape).to(DEVICE, dtype) for _ in range(3))
    weight = torch.randn(shape[-1]).to(DEVICE, torch.float32 if gated else dtype)
    inputs = [x, gate if gated else None, weight]

    def leaves(convert):
        return [None if t is None else convert(t.detach().clone()).requires_grad_() for t in inputs]

    monkeypatch.setattr(dispatch, "triton_refusal", lambda *tensors, sizes=(): None)
    got = run(*leaves(lambda t: t), seed)
    monkeypatch.setattr(dispatch, "triton_refusal", lambda *tensors, sizes=(): "the oracle")
    expected = run(*leaves(torch.Tensor.double), seed)
    reference = run(*leaves(lambda t: t), seed)
    for place, (a, b, c) in enumerate(zip(got, expected, reference, strict=True)):
        assert a.dtype == c.dtype and a.shape == c.shape
        assert rms_ratio(a, b) < bound or torch.equal(a, c), place


@torch.no_grad()
def test_rows_with_gaps_and_two_types(monkeypatch):
    """Views with a stride between rows, and a float32 weight on half precision: the result has the wider type."""
    torch.manual_seed(0)
    wide, weight = torch.randn(2, 5, 96).to(DEVICE), torch.randn(64).to(DEVICE)
    views = wide[..., :64], wide.transpose(0, 1)[..., 16:80], wide[:, ::2, :64]
    expected = [norms.rms_norm(view.double(), weight.double(), 1e-6) for view in views]
    monkeypatch.setattr(dispatch, "triton_refusal", lambda *tensors, sizes=(): None)
    for view, right in zip(views, expected, strict=True):
        assert rms_ratio(norms.rms_norm(view, weight, 1e-6), right) < 1e-5
    assert norms.rms_norm(views[0].half(), weight, 1e-6).dtype == torch.float32
