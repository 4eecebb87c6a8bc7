"""The Triton kernels that move the rows of experts in training, against the torch reference in float64."""

import pytest
import torch

from kimi_k3.kernels import dispatch, experts, situ

triton = pytest.importorskip("triton")
expert_rows_triton = pytest.importorskip("kimi_k3.kernels.expert_rows_triton")

pytestmark = [
    pytest.mark.one_release,
    pytest.mark.skipif(
        not hasattr(torch.nn.functional, "grouped_mm"), reason="no grouped matrix product in this torch"
    ),
]

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
PRECISIONS = [
    pytest.param(torch.float32, 1e-6, id="float32"),
    # the activations and the rows are rounded to 2^-9 three times, and here are few of them
    pytest.param(torch.bfloat16, 1e-2, id="bfloat16", marks=pytest.mark.skipif(not ON_GPU, reason="needs a GPU")),
]


@pytest.fixture
def poisoned(monkeypatch):
    """What a kernel does not write is not a number."""
    empty = torch.empty

    def filled(*arguments, **options):
        out = empty(*arguments, **options)
        return out.fill_(float("nan")) if out.is_floating_point() else out

    monkeypatch.setattr(torch, "empty", filled)


@pytest.fixture
def launched(monkeypatch):
    """Triton everywhere; names of the functions that `run_kernels` was given."""
    names, run = [], dispatch.run_kernels
    monkeypatch.setattr(dispatch, "triton_refusal", lambda *tensors, sizes=(): None)
    monkeypatch.setattr(
        dispatch, "run_kernels", lambda function, *rest: names.append(function.__name__) or run(function, *rest)
    )
    return names


def activation(rows):
    return situ._composed(*rows.chunk(2, dim=-1), None, None)


def make(tokens, top_k, size, dtype, count=6, only=None, width=8):
    """Leaves x, weights, gate_up, down of `sorted_experts`, and the expert ids."""
    torch.manual_seed(tokens)
    choices = torch.arange(count - 1) if only is None else torch.tensor(only)  # the last expert is never hit
    ids = torch.stack([choices[torch.randperm(len(choices))[:top_k]] for _ in range(tokens)])
    x, gate_up, down = (
        (torch.randn(shape) * scale).to(DEVICE, dtype)
        for shape, scale in (((tokens, size), 1), ((count, 2 * width, size), size**-0.5), ((count, size, width), 0.3))
    )
    weights = torch.rand(tokens, top_k).to(DEVICE)
    return [leaf.requires_grad_() for leaf in (x, weights, gate_up, down)], ids.to(DEVICE)


def results(leaves, ids, seed):
    x, weights, gate_up, down = leaves
    out = experts.sorted_experts(x, ids, weights, gate_up, down, activation)
    return [out, *torch.autograd.grad(out, leaves, seed.to(out.dtype))]


def rms_ratio(got, expected):
    return ((got.double() - expected).norm() / expected.norm()).item()


@pytest.mark.one_release
@pytest.mark.parametrize(
    "case",
    [(1, 2, 16, None), (13, 3, 48, None), (7, 1, 32, [2]), (5, 2, 704, [0, 4]), (9, 5, 1032, None)],
    ids=["one-token", "ragged", "one-expert", "a-block-and-a-part", "all-hit-three-blocks"],
)
@pytest.mark.parametrize(("dtype", "bound"), PRECISIONS)
def test_forward_and_backward(case, dtype, bound, poisoned, launched):
    *sizes, only = case
    leaves, ids = make(*sizes, dtype, only=only)
    seed = torch.randn(leaves[0].shape, device=DEVICE).to(dtype)
    got, again = results(leaves, ids, seed), results(leaves, ids, seed)
    assert launched == ["combine", "combine_backward", "combine"] * 2
    x, weights, *matrices = leaves
    wide = experts.sorted_experts(x, ids, weights, *matrices, activation, torch.float32)
    assert wide.dtype == torch.float32 and torch.equal(wide.to(dtype), got[0])
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    halves = exact[2].unbind(0), exact[3].unbind(0)
    out = experts.grouped_experts(
        exact[0], ids, exact[1], len(halves[0]), lambda e: (halves[0][e], halves[1][e]), activation
    )
    expected = [out, *torch.autograd.grad(out, exact, seed.double())]
    assert [g.dtype for g in got] == [dtype, *(leaf.dtype for leaf in leaves)]
    for name, a, b, c in zip(("out", "x", "weights", "gate_up", "down"), got, again, expected, strict=True):
        assert torch.equal(a, b), name
        assert rms_ratio(a, c) < bound, name


def moves(tokens, top_k, size, dtype):
    """rows, inverse, weights and the gradient of the sums, with order."""
    torch.manual_seed(0)
    order = torch.randperm(tokens * top_k, device=DEVICE)
    rows = torch.randn(tokens * top_k, size, device=DEVICE).to(dtype)
    weights, grad = torch.rand(tokens, top_k, device=DEVICE), torch.randn(tokens, size, device=DEVICE)
    return rows, order, order.argsort().view(tokens, top_k), weights, grad


@pytest.mark.one_release
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, *([torch.bfloat16] if ON_GPU else [])], ids=str)
@pytest.mark.parametrize("sizes", [(4, 8, 448), (3, 6, 700), (2, 16, 520), (2, 1, 7)], ids=str)
def test_each_kernel_alone(sizes, dtype, poisoned):
    """Sums in float32, and rounded once: half precision agrees with float64 to the last bit but for ties."""
    rows, order, inverse, weights, grad = moves(*sizes, dtype)
    exact = rows.double().requires_grad_(), weights.double().requires_grad_()
    out = experts._Combine.apply(*exact, order, inverse, None)
    d_rows, d_weights = torch.autograd.grad(out, exact, grad.double())
    step = {torch.float32: 1e-6, torch.float16: 2**-11, torch.bfloat16: 2**-8}[dtype]
    got = expert_rows_triton.combine(rows, inverse, weights, torch.float32)
    torch.testing.assert_close(got.double(), out, rtol=1e-6, atol=1e-6)
    plain = expert_rows_triton.combine(rows, inverse, None, dtype)
    assert plain.dtype == dtype
    torch.testing.assert_close(plain.double(), rows.double()[inverse].sum(1), rtol=1.01 * step, atol=1e-6)
    got = expert_rows_triton.combine_backward(grad, rows, inverse, weights)
    assert got[0].dtype == dtype and got[1].dtype == torch.float32
    torch.testing.assert_close(got[0].double(), d_rows, rtol=1.01 * step, atol=1e-7)
    torch.testing.assert_close(got[1].double(), d_weights, rtol=1e-5, atol=1e-5)


@pytest.mark.one_release
def test_tensors_with_gaps_are_laid_out():
    rows, _, inverse, weights, grad = moves(5, 3, 24, torch.float32)
    gaps = [torch.stack((t, t), dim=-1)[..., 0] for t in (rows, weights, grad)]
    assert not any(t.is_contiguous() for t in gaps)
    for got, expected in (
        (expert_rows_triton.combine(gaps[0], inverse, gaps[1], torch.float32),
         expert_rows_triton.combine(rows, inverse, weights, torch.float32)),
        *zip(expert_rows_triton.combine_backward(gaps[2], gaps[0], inverse, gaps[1]),
             expert_rows_triton.combine_backward(grad, rows, inverse, weights), strict=True),
    ):  # fmt: skip
        assert torch.equal(got, expected)


@pytest.mark.one_release
def test_no_token_takes_the_reference(launched):
    gate_up, down = torch.randn(4, 16, 24).requires_grad_(), torch.randn(4, 24, 8).requires_grad_()
    x, weights, ids = torch.zeros(0, 24).requires_grad_(), torch.zeros(0, 2).requires_grad_(), torch.zeros(0, 2).long()
    out, *found = results([x, weights, gate_up, down], ids, torch.zeros(0, 24))
    assert not launched and out.dtype == torch.float32
    assert out.shape == found[0].shape == x.shape and found[1].shape == weights.shape
    assert not found[2].any() and not found[3].any()


@pytest.mark.one_release
def test_kernels_that_do_not_compile_leave_the_reference(monkeypatch, caplog):
    """Fault 82: both directions fall back, with the reason once; the experts' own kernels are not given up."""
    attempts = []
    leaves, ids = make(5, 2, 16, torch.float32)
    seed = torch.randn(leaves[0].shape, device=DEVICE)
    expected = results(leaves, ids, seed)

    def broken(*arguments):
        attempts.append(1)
        raise type("CompilationError", (Exception,), {"__module__": "triton.compiler.errors"})("no such operation")

    broken.__module__ = expert_rows_triton.__name__
    monkeypatch.setattr(dispatch, "triton_refusal", lambda *tensors, sizes=(): None)
    for first in ("combine", "combine_backward"):  # the second time the forward runs
        with monkeypatch.context() as patch:
            patch.setattr(expert_rows_triton, "combine_backward", broken)
            if first == "combine":
                patch.setattr(expert_rows_triton, "combine", broken)
            got = results(leaves, ids, seed)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        assert len(attempts) == 1 and dispatch._broken.keys() == {"expert_rows"}
        attempts.clear()
        dispatch._broken.clear()


@pytest.mark.one_release
def test_the_gradient_of_a_gradient_is_refused(launched):
    leaves, ids = make(3, 2, 16, torch.float32)
    out = experts.sorted_experts(leaves[0], ids, *leaves[1:], activation)
    (grad,) = torch.autograd.grad(out.square().sum(), leaves[1], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
