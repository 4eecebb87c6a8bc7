"""The Triton kernels of the mix over depth against the torch reference in float64."""

import pytest
import torch

from kimi_k3.kernels import attn_res, dispatch, norms

pytest.importorskip("triton")

pytestmark = pytest.mark.one_release

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
PRECISIONS = [
    pytest.param(torch.float32, 1e-5, id="float32"),
    pytest.param(torch.bfloat16, 5e-3, id="bfloat16", marks=pytest.mark.skipif(not ON_GPU, reason="needs a GPU")),
]
WIDTH = 7168 if ON_GPU else 100


def rms_ratio(got, expected):
    return ((got.double() - expected).norm() / expected.norm().clamp_min(1e-30)).item()


def make(count, dtype, width=WIDTH):
    """(sources, norm weight, pseudo-query, weight of the norm after), sources of very different sizes."""
    torch.manual_seed(count)
    sources = [(torch.randn(2, 3, width) * 1.5 ** (i - 2)).to(DEVICE, dtype).requires_grad_() for i in range(count)]
    weights = torch.randn(width), torch.randn(1, width), torch.randn(width)
    return sources, *((x / width**0.25).to(DEVICE, dtype).requires_grad_() for x in weights)


def results(sources, norm, proj, weight, which):
    """Outputs named in `which`, and gradients of everything that they depend on."""
    mixed, out = attn_res.attn_res_mix_norm(sources, norm, proj, 1e-5, weight, 1e-6)
    outputs = {"mixed": mixed, "out": out}
    torch.manual_seed(5)
    seeds = {name: torch.randn(mixed.shape, device=DEVICE).to(torch.bfloat16) for name in outputs}
    leaves = [*sources, norm, proj, *([weight] if "out" in which else [])]
    grads = torch.autograd.grad([outputs[n] for n in which], leaves, [seeds[n].to(mixed.dtype) for n in which])
    return [mixed, out, *grads]


# Two programs take the rows in the interpreter, several each.
@pytest.mark.parametrize(("count", "which"), [(2, "mixed"), (2, "out"), (2, "mixed-out"), (9, "mixed-out")])
@pytest.mark.parametrize(("dtype", "bound"), PRECISIONS)
def test_forward_and_backward(count, which, dtype, bound, monkeypatch):
    inputs, which = make(count, dtype), which.split("-")
    monkeypatch.setattr(dispatch, "triton_refusal", lambda *tensors, sizes=(): "the oracle")
    double = [[s.detach().double().requires_grad_() for s in inputs[0]]]
    double += [x.detach().double().requires_grad_() for x in inputs[1:]]
    expected = results(*double, which)
    monkeypatch.setattr(dispatch, "triton_refusal", lambda *tensors, sizes=(): None)
    got = results(*inputs, which)
    for place, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert a.dtype == dtype and rms_ratio(a, b) < bound, place


@torch.no_grad()
def test_without_the_norm_and_strided_sources(monkeypatch):
    sources, norm, proj, weight = make(3, torch.float32)
    wide = torch.cat(sources, dim=-1).detach()
    views = list(wide.chunk(3, dim=-1))
    monkeypatch.setattr(dispatch, "triton_refusal", lambda *tensors, sizes=(): None)
    mixed, out = attn_res.attn_res_mix_norm(sources, norm, proj, 1e-5, weight, 1e-6)
    assert torch.equal(attn_res.attn_res_mix(views, norm, proj, 1e-5), mixed)
    torch.testing.assert_close(out, norms.rms_norm(mixed, weight, 1e-6), rtol=1e-5, atol=1e-6)


def test_a_backward_kernel_that_does_not_compile(monkeypatch):
    """Fault 82: the backward pass falls back to torch."""
    from kimi_k3.kernels import attn_res_triton

    inputs = make(3, torch.float32)
    monkeypatch.setattr(dispatch, "triton_refusal", lambda *tensors, sizes=(): None)
    monkeypatch.setattr(dispatch, "_broken", {})
    dispatch._tell.cache_clear()
    expected = results(*inputs, ("mixed", "out"))

    def broken(*arguments):
        raise RuntimeError("PassManager::run failed")

    monkeypatch.setattr(attn_res_triton, "backward", broken)
    for which in (("mixed",), ("out",), ("mixed", "out")):
        got = results(*inputs, which)
        assert len(got) == len(expected) - ("out" not in which)
        if which == ("mixed", "out"):
            for a, b in zip(got, expected, strict=True):
                assert rms_ratio(a, b.double()) < 2e-5  # either is within 1e-5 of float64
