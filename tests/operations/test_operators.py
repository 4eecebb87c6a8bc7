"""Operations in compiled graphs: an operator forward and one backward, as eager computes them.

On a processor the operators compute the torch reference. Which device gets operators is pretended.
"""

import pytest
import torch
import torch._dynamo.testing

import tiny
from kimi_k3.kernels import attn_res, dispatch, experts, kda, operators, router, short_conv

pytestmark = pytest.mark.one_release

if torch.cuda.is_available():
    DEVICE, DTYPE = "cuda", torch.float32
else:
    DEVICE, DTYPE = "cpu", torch.float64


HAS_KERNELS = dispatch.has_kernels


@pytest.fixture(autouse=True)
def _operators_here(monkeypatch):
    """Graphs of this device's tensors get operators; float64 lets every order of sums agree."""
    monkeypatch.setattr(dispatch, "without_kernels", ("meta",))
    monkeypatch.setattr(dispatch, "_TYPES", {torch.float64, *dispatch._TYPES})
    monkeypatch.setattr(
        dispatch, "_device_refusal", lambda device: "no kernels in this test" if DEVICE == "cpu" else None
    )
    monkeypatch.setattr(dispatch, "has_kernels", lambda device: True)
    monkeypatch.setattr(dispatch, "_tell", lambda *_: None)


def draw(*shape):
    return torch.randn(*shape, device=DEVICE, dtype=DTYPE, requires_grad=True)


def cases():
    """name -> (function of tensors, the tensors)."""
    torch.manual_seed(0)
    batch, tokens, heads, size, value, width = 2, 21, 3, 8, 10, 12
    q, k = draw(batch, tokens, heads, size), draw(batch, tokens, heads, size)
    v, g, beta = draw(batch, tokens, heads, value), draw(batch, tokens, heads, size), draw(batch, tokens, heads)
    A_log, dt_bias, state = draw(heads), draw(heads * size), draw(batch, heads, size, value)
    xs, weights = [draw(batch, tokens, width) for _ in range(3)], [draw(width, 1, 4) for _ in range(3)]
    tails = tuple(torch.randn(batch, 3, width, device=DEVICE, dtype=DTYPE) for _ in range(3))
    logits, bias = torch.randn(tokens, 9, device=DEVICE, requires_grad=True), torch.randn(9, device=DEVICE)
    sources = [draw(batch, tokens, width) for _ in range(3)]

    def recurrence(bound):
        return lambda *x: kda.fused_kda(*x[:5], kda.KDAParameters(*x[5:7], bound), *x[7:])

    return {
        "kda": (recurrence(-5.0), (q, k, v, g, beta, A_log, dt_bias)),
        "kda from a state": (recurrence(None), (q, k, v, g, beta, A_log, dt_bias, state)),
        "convolutions": (lambda *x: short_conv.short_convs(x[:3], x[3:], None, keep_tails=False)[0], (*xs, *weights)),
        "convolutions behind others": (lambda *x: short_conv.short_convs(x[:3], x[3:], tails)[0], (*xs, *weights)),
        "mix": (lambda w, p, *x: attn_res.attn_res_mix(x, w, p, 1e-5), (draw(width), draw(1, width), *sources)),
        "mix and norm": (
            lambda w, p, o, *x: attn_res.attn_res_mix_norm(x, w, p, 1e-5, o, 1e-6),
            (draw(width), draw(1, width), draw(width), *sources),
        ),
        "router": (lambda x: router.choose_experts(x, bias, 3, True, 2.5), (logits,)),
    }


def tensors_of(results):
    return (results,) if isinstance(results, torch.Tensor) else tuple(results)


def ordered(results):
    """A router's choice has no fixed order."""
    if results[0].dtype != torch.int64:
        return results
    order = results[0].argsort(-1)
    return tuple(x.gather(-1, order) for x in results)


@pytest.mark.parametrize("name", cases())
def test_a_graph_has_one_operator_and_computes_what_eager_does(name):
    function, inputs = cases()[name]
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    compiled = torch.compile(function, fullgraph=True, backend=backend)
    expected, results = ordered(tensors_of(function(*inputs))), ordered(tensors_of(compiled(*inputs)))
    called = [n for n in graphs[0].graph.nodes if str(n.target).startswith(operators.NAMESPACE)]
    assert len(called) == 1, graphs[0].graph
    grads = []
    for outputs in (expected, results):
        floats = [x for x in outputs if x.is_floating_point()]
        seeds = [torch.cos(torch.arange(x.numel(), device=DEVICE)).view(x.shape).to(x.dtype) for x in floats]
        grads.append(torch.autograd.grad(floats, inputs, seeds))
    exact = DTYPE == torch.float64 and name != "router"  # whose logits are float32
    tolerance = {"rtol": 1e-9, "atol": 1e-9} if exact else {"rtol": 1e-4, "atol": 1e-4}
    for ours, plain in zip((*results, *grads[1]), (*expected, *grads[0]), strict=True):
        torch.testing.assert_close(ours, plain, **tolerance)


@pytest.mark.parametrize("refusal", [None, "an old GPU"])
def test_a_device_without_kernels_has_no_operators(refusal, monkeypatch):
    """There, they would keep torch from fusing what it computes itself."""
    monkeypatch.setattr(dispatch, "has_kernels", HAS_KERNELS)
    monkeypatch.setattr(dispatch, "_device_refusal", lambda device: refusal)
    function, inputs = cases()["convolutions"]
    nodes = []

    def backend(graph, _):
        nodes.extend(str(n.target) for n in graph.graph.nodes)
        return lambda *inputs: (torch.zeros(1),) * 3

    torch.compile(function, fullgraph=True, backend=backend)(*inputs)
    assert sum(name.startswith(operators.NAMESPACE) for name in nodes) == (refusal is None)


@pytest.mark.parametrize("name", ["kda from a state", "mix and norm", "router", "convolutions behind others"])
def test_the_registrations_are_true(name):
    """Schema, fake results, autograd and tracing with dynamic shapes, by torch's own check."""
    function, inputs = cases()[name]
    found = []

    def backend(graph, _):
        for node in graph.graph.nodes:
            if str(node.target).startswith(operators.NAMESPACE):
                found.append(node.target)

        def run(*arguments):
            class Calls(torch.fx.Interpreter):
                def call_function(self, target, args, kwargs):
                    if target in found:
                        found.append(args)
                    return super().call_function(target, args, kwargs)

            return Calls(graph).run(*arguments)

        return run

    torch.compile(function, fullgraph=True, backend=backend)(*inputs)
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    if name != "router":  # this check adds numbers of experts to a loss
        checks.append("test_aot_dispatch_dynamic")
    torch.library.opcheck(found[0], found[1], test_utils=checks)


def test_the_registration_of_routed_experts_is_true():
    x, gate_up, down = (torch.randn(*shape, device=DEVICE) for shape in ((5, 32), (3, 64, 32), (3, 32, 32)))
    ids, weights = torch.randint(3, (5, 2), device=DEVICE), torch.rand(5, 2, device=DEVICE)
    arguments = x, ids, weights, gate_up, down, [], 4.0, 25.0, False
    torch.library.opcheck(experts._OPERATOR, arguments, test_utils=["test_schema", "test_faketensor"])


def test_outputs_share_no_storage():
    x, rows = torch.randn(4, 4), torch.randn(2, 4)
    fresh, offset = torch.randn(3, 2), torch.randn(9)[1:]
    outputs = [x, x[1:3], x.t(), offset, rows[0], rows[1], fresh]
    owned = operators.own(outputs, [x, None])
    storages = {y.untyped_storage().data_ptr() for y in (x, *owned)}
    assert len(storages) == 1 + len(outputs) and owned[-1] is fresh
    for ours, output in zip(owned, outputs, strict=True):
        assert torch.equal(ours, output) and ours.is_contiguous() and ours.data_ptr() % 16 == 0


def test_a_model_is_one_graph_and_learns_the_same():
    model = tiny.model("km").to(DEVICE, DTYPE).train()
    ids = torch.randint(3, tiny.VOCABULARY, (2, 19), device=DEVICE)
    plain = model(input_ids=ids, labels=ids, use_cache=False).loss
    plain.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    loss = compiled(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    tolerance = {"rtol": 1e-9, "atol": 1e-9} if DTYPE == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(loss, plain, **tolerance)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], **tolerance)


def test_lengths_share_graphs_and_a_forward_is_exported():
    model = tiny.model("km").to(DEVICE, DTYPE)
    close = {"rtol": 1e-9, "atol": 1e-9} if DTYPE == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    graphs = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(model, dynamic=True, backend=graphs)
    with torch.no_grad():
        for tokens in (17, 18, 24, 31, 32, 33, 48, 63, 64, 65, 100, 129):
            ids = torch.arange(tokens, device=DEVICE)[None] % tiny.VOCABULARY
            torch.testing.assert_close(
                compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits, **close
            )
        assert graphs.frame_count <= 4, graphs.frame_count
        exported = torch.export.export(model, (ids,), {"use_cache": False}, strict=True).module()
        torch.testing.assert_close(exported(ids, use_cache=False).logits, model(ids, use_cache=False).logits, **close)


@pytest.mark.parametrize("changes", [{}, tiny.PACKED], ids=["float", "packed"])
def test_routed_experts_are_an_operator_where_no_gradient_is_wanted(changes):
    block = tiny.model("km", **changes).model.layers[1].block_sparse_moe.to(DEVICE)
    x, graphs = torch.randn(2, 7, tiny.SIZES["hidden_size"], device=DEVICE), []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    with torch.no_grad():
        compiled, plain = torch.compile(block, fullgraph=True, backend=backend)(x), block(x)
    names = [str(n.target).split(".")[1] for n in graphs[0].graph.nodes if operators.NAMESPACE in str(n.target)]
    assert names == ["choose_experts", "fused_experts"]
    for ours, eager in zip(compiled, plain, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)
