"""The Triton router against the torch reference: which experts, and with what weights."""

import pytest
import torch

from kimi_k3.kernels import dispatch, router

pytestmark = pytest.mark.one_release

pytest.importorskip("triton")
router_triton = pytest.importorskip("kimi_k3.kernels.router_triton")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def both(logits, bias, *options, monkeypatch, **named):
    """(chosen, weights) of the kernel, then those of the reference in float64, in the order of the experts."""
    results = []
    for refusal, convert in ((None, lambda t: t), ("the oracle", torch.Tensor.double)):
        monkeypatch.setattr(dispatch, "triton_refusal", lambda *tensors, refusal=refusal: refusal)
        chosen, weights = router.choose_experts(convert(logits.to(DEVICE)), convert(bias.to(DEVICE)), *options, **named)
        order = chosen.argsort(dim=-1)
        results.append((chosen.gather(-1, order), weights.gather(-1, order), chosen.dtype))
    return results


@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 8, 2), (5, 24, 7), (2, 896, 16), (2, 20, 20)])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("activation", router.ACTIVATIONS)
def test_experts_and_weights(sizes, renormalize, activation, monkeypatch):
    tokens, experts, top_k = sizes
    torch.manual_seed(0)
    logits, bias = torch.randn(tokens, 2 * experts)[:, :experts] * 3, torch.randn(experts) * 0.3
    if activation == "softmax":  # of many experts they are near one another; a wide bias would choose alone
        bias = bias / experts
    options = top_k, renormalize, 2.5
    got, expected = both(logits, bias, *options, monkeypatch=monkeypatch, activation=activation)
    assert got[2] == torch.int64 and got[1].dtype == torch.float32
    assert torch.equal(got[0], expected[0])
    torch.testing.assert_close(got[1].double(), expected[1], rtol=2e-6, atol=0)


def test_the_first_of_equals_and_forbidden_experts_last(monkeypatch):
    """A bias of -inf forbids an expert while others are left; no expert is ever chosen twice."""
    logits, bias = torch.zeros(2, 6), torch.tensor([float("-inf"), 0.0, 0.0, float("-inf"), 0.0, float("-inf")])
    monkeypatch.setattr(dispatch, "triton_refusal", lambda *tensors: None)
    for top_k, chosen in ((2, [1, 2]), (3, [1, 2, 4]), (5, [0, 1, 2, 3, 4])):
        got, _ = router.choose_experts(logits.to(DEVICE), bias.to(DEVICE), top_k, True, 1.0)
        assert got.sort(dim=-1).values.tolist() == [chosen] * 2


@pytest.mark.parametrize("activation", router.ACTIVATIONS)
def test_not_a_number_stays_one_and_names_experts_that_exist(activation, monkeypatch):
    logits = torch.full((2, 5), float("nan"))
    monkeypatch.setattr(dispatch, "triton_refusal", lambda *tensors: None)
    bias = torch.zeros(5, device=DEVICE)
    chosen, weights = router.choose_experts(logits.to(DEVICE), bias, 3, True, 1.0, activation=activation)
    assert 0 <= chosen.min() and chosen.max() < 5 and weights.isnan().all()


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (5, 24, 7), (2, 896, 16)])
@pytest.mark.parametrize("activation", router.ACTIVATIONS)
def test_gradients(sizes, renormalize, activation, monkeypatch):
    """Logits of experts that were not chosen have a gradient of zero, unless the weights are shares of them all."""
    tokens, experts, top_k = sizes
    launched, run = [], dispatch.run_kernels
    monkeypatch.setattr(
        dispatch, "run_kernels", lambda function, *rest: launched.append(function) or run(function, *rest)
    )
    torch.manual_seed(1)
    logits, bias = torch.randn(tokens, 2 * experts, device=DEVICE)[:, :experts] * 3, torch.randn(experts, device=DEVICE)
    seed, found = torch.randn(tokens, experts, device=DEVICE), []
    for refusal, convert in ((None, lambda t: t), ("the oracle", torch.Tensor.double)):
        monkeypatch.setattr(dispatch, "triton_refusal", lambda *tensors, refusal=refusal: refusal)
        leaf = convert(logits).detach().requires_grad_()
        chosen, weights = router.choose_experts(leaf, convert(bias), top_k, renormalize, 2.5, activation=activation)
        assert not chosen.requires_grad and (weights.grad_fn.name() == "DifferentiableBackward") == (refusal is None)
        found.append(torch.autograd.grad((weights * seed.gather(-1, chosen)).sum(), leaf, retain_graph=True)[0])
        others = found[-1].scatter(-1, chosen, 0.0)
        if activation == "softmax":  # in the kernel a renormalised one is zero only up to rounding
            assert others.abs().max() < 1e-7 if renormalize or experts == top_k else others.any()
        else:
            assert not others.any()
        assert found[-1].dtype == leaf.dtype
        columns = seed.gather(-1, chosen).to(leaf.dtype).t().contiguous().t()
        found.append(torch.autograd.grad(weights, leaf, columns)[0])
    assert launched[1:] == [router_triton.backward] * 2
    torch.testing.assert_close(found[0].double(), found[2], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found[1].double(), found[3], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("activation", router.ACTIVATIONS)
def test_a_backward_kernel_that_does_not_compile_leaves_the_reference(activation, monkeypatch):
    """Fault 82: the weights were the kernel's, their gradient is torch's."""
    monkeypatch.setattr(dispatch, "triton_refusal", lambda *tensors: None)
    torch.manual_seed(1)
    leaf, found, run = torch.randn(5, 24, device=DEVICE).requires_grad_(), [], dispatch.run_kernels
    for broken in (False, True):
        bias = torch.zeros(24, device=DEVICE)
        _, weights = router.choose_experts(leaf, bias, 7, True, 2.5, activation=activation)
        monkeypatch.setattr(dispatch, "run_kernels", (lambda *arguments: None) if broken else run)
        found.append(torch.autograd.grad(weights.square().sum(), leaf)[0])
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-6)


def test_groups_take_the_reference(monkeypatch):
    calls = []
    monkeypatch.setattr(dispatch, "triton_refusal", lambda *tensors: None)
    monkeypatch.setattr(dispatch, "run_kernels", lambda *arguments: calls.append(1))
    logits, bias = torch.randn(4, 8), torch.zeros(8)
    router.choose_experts(logits, bias, 2, True, 1.0, groups=4, kept_groups=2)
    assert not calls
    router.choose_experts(logits, bias, 2, True, 1.0)
    assert calls
