"""The Triton KDA kernels against the recurrence in float64: in Triton's interpreter on a CPU, for real on a GPU.

Half precision, which takes several times as many products, is tested on a GPU, and on a CPU in one test.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F

from kimi_k3.kernels import dispatch, kda, kda_context, kda_step, short_conv

pytest.importorskip("triton")

from kimi_k3.kernels import kda_step_triton

pytestmark = pytest.mark.one_release

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
PRECISIONS = [
    pytest.param(torch.float32, 1e-5, id="float32"),
    *(
        pytest.param(dtype, 5e-3, id=str(dtype)[6:], marks=pytest.mark.skipif(not ON_GPU, reason="needs a GPU"))
        for dtype in (torch.bfloat16, torch.float16)
    ),
]
# name -> lower bound, factor and offset of the decay logits
GATES = {
    "mixed": (-5.0, 3.0, 0.0),
    "all-at-the-bound": (-5.0, 0.1, 12.0),
    "all-near-zero": (-5.0, 0.1, -12.0),
    "half-at-the-bound": (-5.0, 40.0, 0.0),
    "softplus": (None, 1.0, 0.0),
    "softplus-steep": (None, 40.0, 0.0),
    "bound-below-the-narrow-range": (-8.0, 40.0, 0.0),
}


@pytest.fixture(autouse=True)
def _triton_everywhere(monkeypatch):
    monkeypatch.setattr(dispatch, "triton_refusal", lambda *tensors, sizes=(): None)


def make_inputs(length, heads=2, key_size=32, value_size=32, gate="mixed", parallel_keys=False, lengths=None, seed=0,
                batch=1, dtype=torch.float32):  # fmt: skip
    """Arguments of `fused_kda`, inputs in `dtype`."""
    torch.manual_seed(seed)
    lower_bound, factor, offset = GATES[gate]
    shape = (batch, length, heads)
    q, k, g = (torch.randn(*shape, key_size) for _ in range(3))
    beta = torch.randn(shape)
    if parallel_keys:
        k, beta = torch.randn(batch, 1, heads, key_size) + 0.05 * k, beta + 4
    sequences = batch if lengths is None else len(lengths)
    half = {
        "q": q,
        "k": k,
        "v": torch.randn(*shape, value_size),
        "g": g * factor + offset,
        "beta": beta,
    }
    full = {
        "A_log": torch.randn(heads).abs(),
        "dt_bias": torch.randn(heads * key_size),
        "initial_state": torch.randn(sequences, heads, key_size, value_size),
    }
    inputs = {name: x.to(DEVICE, dtype) for name, x in half.items()} | {n: x.to(DEVICE) for n, x in full.items()}
    offsets = None
    if lengths is not None:
        offsets = torch.tensor([0, *itertools.accumulate(lengths)], device=DEVICE)
    return inputs, {"lower_bound": lower_bound, "cu_seqlens": offsets}


def bundled(inputs, lower_bound, **options):
    """What the operations take: A_log, dt_bias and the bound as one."""
    rest = {name: x for name, x in inputs.items() if name not in ("A_log", "dt_bias")}
    return {**rest, "parameters": kda.KDAParameters(inputs["A_log"], inputs["dt_bias"], lower_bound), **options}


def oracle(inputs, lower_bound, cu_seqlens):
    """The recurrence token by token in float64, one sequence after the other."""
    x = {name: tensor.double() for name, tensor in inputs.items()}
    parts = (
        kda.l2norm(x["q"]),
        kda.l2norm(x["k"]),
        x["v"],
        kda.kda_gate(x["g"], kda.KDAParameters(x["A_log"], x["dt_bias"], lower_bound)),
        torch.sigmoid(x["beta"]),
    )
    if cu_seqlens is None:
        return kda.recurrent_kda(*parts, initial_state=x["initial_state"])
    outputs, states = [], []
    for n, (start, end) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        out, state = kda.recurrent_kda(*(p[:, start:end] for p in parts), initial_state=x["initial_state"][n : n + 1]) \
            if end > start else (x["v"][:, :0], x["initial_state"][n : n + 1])  # fmt: skip
        outputs.append(out)
        states.append(state)
    return torch.cat(outputs, dim=1), torch.cat(states)


def rms_ratio(got, expected):
    return ((got.double() - expected).norm() / expected.norm().clamp_min(1e-30)).item()


def exact_results(inputs, options, seeds, rounding=0.0, draw=0):
    """Outputs, final states and gradients in float64, with every token, state and seed off by a random rounding."""

    def off(x):
        return (x.double() * (1 + rounding * (2 * torch.rand(x.shape, dtype=torch.float64) - 1).to(x.device))).detach()

    torch.manual_seed(2 + draw)
    leaves = {n: off(x) if n not in ("A_log", "dt_bias") else x.double().detach() for n, x in inputs.items()}
    results = oracle({n: x.requires_grad_() for n, x in leaves.items()}, **options)
    grads = torch.autograd.grad(results, list(leaves.values()), [off(seed) for seed in seeds])
    return dict(zip(("out", "state", *leaves), (*(x.detach() for x in results), *grads), strict=True))


def assert_matches_oracle(inputs, options, bound, gradients=True):
    """Outputs, final states and, with `gradients`, all gradients.

    Some results are small differences of large terms (gradients under near-parallel keys, the one number that A_log
    has a head): there no arithmetic of this precision stays below the bound. Then the limit is what a dozen roundings
    do, sqrt(12) times the RMS change by one rounding of the inputs, and what the result's own type loses. Either limit
    is 2.5 times as much for A_log, in whose one or two numbers chance does not average out.
    """
    torch.manual_seed(1)
    seeds = [torch.randn(x.shape).to(x) for x in (inputs["v"], inputs["initial_state"])]
    expected = exact_results(inputs, options, seeds)
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    out, state = kda.fused_kda(**bundled(leaves, **options))
    assert out.dtype == inputs["v"].dtype and state.dtype == torch.float32
    got = {"out": out, "state": state}
    if gradients:
        got |= zip(leaves, torch.autograd.grad([out, state], list(leaves.values()), seeds), strict=True)
    assert all(name not in inputs or x.dtype == inputs[name].dtype for name, x in got.items())
    errors = {name: rms_ratio(x, expected[name]) for name, x in got.items()}
    few = {name: 2.5 if name == "A_log" else 1.0 for name in errors}
    errors = {name: error for name, error in errors.items() if not error < bound * few[name]}
    if errors:
        size = 2**-9 if inputs["v"].dtype != torch.float32 else 2**-22
        rounded = [exact_results(inputs, options, seeds, size, draw) for draw in range(4)]
    for name, error in list(errors.items()):
        one = (sum(rms_ratio(r[name], expected[name]) ** 2 for r in rounded) / len(rounded)) ** 0.5
        stored = rms_ratio(expected[name].to(got[name].dtype), expected[name])
        limit = 12**0.5 * one * few[name] + stored
        errors[name] = error, limit
        if error < limit:
            del errors[name]
    assert not errors


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(("dtype", "bound"), PRECISIONS)
def test_all_gates_forward_and_backward(gate, dtype, bound):
    """Faults 9-12: exact at every decay, bounded or not."""
    inputs, options = make_inputs(70, heads=1, gate=gate, dtype=dtype)
    assert_matches_oracle(inputs, options, bound)


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 64, 95])
@pytest.mark.parametrize(("dtype", "bound"), PRECISIONS)
def test_ragged_lengths(length, dtype, bound):
    inputs, options = make_inputs(length, heads=1, batch=2, dtype=dtype)
    assert_matches_oracle(inputs, options, bound, gradients=length in (1, 33))


@pytest.mark.parametrize("gate", ["mixed", "softplus"])
@pytest.mark.parametrize(("dtype", "bound"), PRECISIONS)
def test_sequences_of_mixed_lengths(gate, dtype, bound):
    lengths = [0, 1, 32, 1, 40, 0, 5]
    inputs, options = make_inputs(sum(lengths), gate=gate, lengths=lengths, dtype=dtype)
    assert_matches_oracle(inputs, options, bound)


@pytest.mark.parametrize(("dtype", "bound"), PRECISIONS)
def test_near_parallel_keys(dtype, bound):
    """The triangular inverse must not cancel: keys almost equal, beta near 1, little decay."""
    inputs, options = make_inputs(96, parallel_keys=True, gate="all-near-zero", dtype=dtype)
    assert_matches_oracle(inputs, options, bound)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_anywhere(dtype):
    """Gradients that are small differences of large terms, of several sequences."""
    lengths = [40, 0, 33]
    inputs, options = make_inputs(sum(lengths), heads=1, key_size=16, value_size=32, parallel_keys=True,
                                  gate="all-near-zero", lengths=lengths, dtype=dtype)  # fmt: skip
    assert_matches_oracle(inputs, options, 5e-3)


def test_a_rest_is_that_of_its_rounding(monkeypatch):
    """The scan's own: `prepare` left there what its part of the sum lost."""
    from kimi_k3.kernels import kda_backward_triton

    class Launch:
        def __getitem__(self, grid):
            return lambda **given: handed.update(given)

    handed = {}
    monkeypatch.setattr(kda_backward_triton, "chunk_backward_kernel", Launch())
    inputs, options = make_inputs(64, heads=1, key_size=16, value_size=32, dtype=torch.bfloat16)
    inputs["v"].requires_grad_()
    kda.fused_kda(**bundled(inputs, **options))[0].sum().backward()
    rest, whole = (handed[name].float().abs() for name in ("residual", "updated"))
    assert rest.max() > 0 and (rest <= whole * 2**-8).all(), "half of a last place"


SIZES = [(16, 32), (48, 80), (24, 16), *([(128, 128), (256, 64), (64, 256)] if ON_GPU else [])]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("dtype", "bound"), PRECISIONS)
def test_head_sizes(sizes, dtype, bound):
    """Fault 79: any size to 256, keys and values of different sizes, forward and backward."""
    inputs, options = make_inputs(45, heads=1, key_size=sizes[0], value_size=sizes[1], dtype=dtype)
    assert_matches_oracle(inputs, options, bound)


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU: many seeds at full size")
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("seed", range(4))
def test_full_size_on_a_gpu(gate, seed):
    inputs, options = make_inputs(333, 4, 128, 128, gate, batch=2, seed=seed, dtype=torch.bfloat16)
    assert_matches_oracle(inputs, options, 5e-3)


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU with 60 GB: tensors of more than 2^31 elements")
def test_addresses_past_two_to_the_31():
    """Fault 66: the last tokens of a huge sequence equal those of a run from the state before them."""
    length, heads, size, last = 180_000, 96, 128, 96
    torch.manual_seed(0)
    q, k, v, g = (torch.randn(1, length, heads, size, device=DEVICE, dtype=torch.bfloat16) for _ in range(4))
    assert q.numel() > 2**31
    beta = torch.randn(1, length, heads, device=DEVICE, dtype=torch.bfloat16)
    parameters = kda.KDAParameters(
        torch.randn(heads, device=DEVICE), torch.randn(heads * size, device=DEVICE), -5.0
    )  # fmt: skip
    whole, state = kda.fused_kda(q, k, v, g, beta, parameters)
    cut = length - last
    _, middle = kda.fused_kda(*(x[:, :cut] for x in (q, k, v, g, beta)), parameters)
    part, final = kda.fused_kda(*(x[:, cut:] for x in (q, k, v, g, beta)), parameters, initial_state=middle)
    assert torch.equal(part, whole[:, cut:]) and torch.equal(final, state)


def test_no_bit_of_an_earlier_result_depends_on_a_later_token():
    """Strict causality of outputs and gradients, rounding included."""
    for gate in ("mixed", "softplus"):
        inputs, options = make_inputs(60, gate=gate)
        results = []
        for change in (False, True):
            leaves = {name: x.clone() for name, x in inputs.items()}
            if change:
                for name in ("q", "k", "v", "g", "beta"):
                    leaves[name][:, 41:] += 3.0
            tokens = [leaves[name].requires_grad_() for name in ("q", "k", "v", "g", "beta")]
            out, _ = kda.fused_kda(**bundled(leaves, **options))
            results.append([out[:, :41], *(x[:, :41] for x in torch.autograd.grad(out[:, :41].square().sum(), tokens))])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_unwritten_memory_is_never_read_and_two_runs_are_equal(monkeypatch):
    """Every allocation starts as NaN; results are finite and the same bit for bit."""
    lengths = [1, 40, 0]
    inputs, options = make_inputs(sum(lengths), heads=2, key_size=24, value_size=48, lengths=lengths)
    plain_empty, plain_empty_like = torch.empty, torch.empty_like

    def poisoned(function):
        def wrapped(*args, **kwargs):
            x = function(*args, **kwargs)
            return x.fill_(float("nan")) if x.is_floating_point() else x

        return wrapped

    results = []
    for poison in (False, True):
        if poison:
            monkeypatch.setattr(torch, "empty", poisoned(plain_empty))
            monkeypatch.setattr(torch, "empty_like", poisoned(plain_empty_like))
        leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
        out, state = kda.fused_kda(**bundled(leaves, **options))
        grads = torch.autograd.grad([out.sum() + state.square().sum()], list(leaves.values()))
        results.append([out, state, *grads])
    assert all(x.isfinite().all() for x in results[1])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_sequence_cut_into_segments_gives_the_same():
    """Of five chunks four segments are three: of two, two and one."""
    from kimi_k3.kernels import kda_chunk_triton

    inputs, options = make_inputs(140, heads=1, batch=2, key_size=16, value_size=48)
    x = bundled(inputs, **options)
    tokens = kda.KDAInputs(*(x[name] for name in kda.KDAInputs._fields))
    arguments = tokens, x["parameters"], x["initial_state"], None
    whole = kda_chunk_triton.forward(*arguments, segments=1)
    parts = kda_chunk_triton.forward(*arguments, segments=4)
    assert rms_ratio(parts[0], whole[0].double()) < 1e-5
    assert rms_ratio(parts[1], whole[1].double()) < 1e-5


@pytest.mark.parametrize("lengths", [None, [70, 20, 64]])
def test_checkpoints_are_the_states_after_every_multiple(lengths):
    from kimi_k3.kernels import kda_chunk_triton

    length = 100 if lengths is None else sum(lengths)
    inputs, options = make_inputs(length, lengths=lengths)
    x = bundled(inputs, **options)
    tokens = kda.KDAInputs(*(x[name] for name in kda.KDAInputs._fields))
    _, _, checkpoints = kda_chunk_triton.forward(
        tokens, x["parameters"], x["initial_state"], options["cu_seqlens"], checkpoint_every=32
    )
    expected = []
    starts = [0, *itertools.accumulate(lengths or [length])]
    for n, (start, end) in enumerate(itertools.pairwise(starts)):
        for stop in range(start + 32, end + 1, 32):
            expected.append(oracle({**inputs, **tokens.part(start, stop)._asdict(),
                                    "initial_state": inputs["initial_state"][n : n + 1]},
                                   options["lower_bound"], None)[1])  # fmt: skip
    assert checkpoints.shape[0] == len(expected)
    assert rms_ratio(checkpoints, torch.cat(expected)) < 1e-5


@pytest.mark.parametrize(
    ("boundaries", "launches"),
    [([32, 64, 96], [128]), ([64], [100]), ([32, 64], [64, 64]), ([30, 62, 94, 100], [30, 102])],
)
def test_states_at_boundaries_of_one_scan(monkeypatch, boundaries, launches):
    """Evenly spaced ones come from one launch, whatever lies between others is scanned once."""
    length, seen, plain = sum(launches) + (6 if 30 in boundaries else 0), [], kda._forward_kernels
    monkeypatch.setattr(kda, "_forward_kernels", lambda x, *rest: seen.append(x.q.shape[1]) or plain(x, *rest))
    inputs, options = make_inputs(length, batch=2, seed=1)
    del options["cu_seqlens"]
    out, final, states = kda.fused_kda_states(**bundled(inputs, **options), boundaries=boundaries)
    expected = oracle(inputs, options["lower_bound"], None)
    assert rms_ratio(out, expected[0]) < 1e-5 and rms_ratio(final, expected[1]) < 1e-5
    for boundary, state in zip(boundaries, states, strict=True):
        part = {name: inputs[name][:, :boundary] for name in ("q", "k", "v", "g", "beta")}
        assert rms_ratio(state, oracle({**inputs, **part}, options["lower_bound"], None)[1]) < 1e-5
        assert state.untyped_storage().nbytes() == state.nbytes
    assert sum(seen) == length


def test_views_of_one_wide_projection_and_a_bfloat16_state():
    inputs, options = make_inputs(40, heads=2, key_size=16, value_size=16)
    wide = torch.cat([inputs[name].flatten(2) for name in ("q", "k", "v", "g")], dim=-1)
    views = {n: x.unflatten(-1, (2, 16)) for n, x in zip(("q", "k", "v", "g"), wide.chunk(4, dim=-1), strict=True)}
    expected = kda.fused_kda(**bundled(inputs, **options))
    got = kda.fused_kda(**bundled({**inputs, **views}, **options))
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
    state = inputs["initial_state"].bfloat16()
    _, final = kda.fused_kda(**bundled({**inputs, "initial_state": state}, **options))
    assert final.dtype == torch.bfloat16
    assert rms_ratio(final, oracle({**inputs, "initial_state": state}, **options)[1]) < 5e-3


@pytest.mark.parametrize(("with_tail", "alike"), [(True, True), (False, True), (True, False)])
def test_several_convolutions_are_one_after_the_other(with_tail, alike):
    """Outputs, gradients and tails of three inputs, in one launch or not, bit for bit; unwanted tails are not made."""
    torch.manual_seed(0)
    inputs = [torch.randn(2, 37, 40, device=DEVICE, requires_grad=True) for _ in range(3)]
    weights = [torch.randn(40, 1, 4, device=DEVICE, requires_grad=True) for _ in range(3)]
    if not alike:
        weights[1] = weights[1].detach().half().requires_grad_()
    tails = [torch.randn(2, 3, 40, device=DEVICE) for _ in range(3)] if with_tail else None
    grads = [torch.randn(2, 37, 40, device=DEVICE) for _ in range(3)]
    got, new_tails = short_conv.short_convs(inputs, weights, tails)
    found = torch.autograd.grad(got, [*inputs, *weights], grads)
    for i in range(3):
        y, new_tail = short_conv.short_conv(inputs[i], weights[i], tails[i] if with_tail else None)
        of_x, of_weight = torch.autograd.grad(y, [inputs[i], weights[i]], grads[i])
        for a, b in ((got[i], y), (new_tails[i], new_tail), (found[i], of_x), (found[3 + i], of_weight)):
            assert torch.equal(a, b)
    assert short_conv.short_convs(inputs, weights, tails, keep_tails=False)[1] is None


@pytest.mark.parametrize("lengths", [None, [1, 0, 39, 2, 28]])
@pytest.mark.parametrize("with_tail", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), PRECISIONS)
def test_short_convolution(lengths, with_tail, dtype, bound):
    torch.manual_seed(0)
    batch = 2 if lengths is None else 1
    x = torch.randn(batch, 70, 40).to(DEVICE, dtype)
    weight = torch.randn(40, 1, 4, device=DEVICE)
    tail = torch.randn(batch if lengths is None else len(lengths), 3, 40).to(DEVICE, dtype) if with_tail else None
    offsets = None if lengths is None else torch.tensor([0, *itertools.accumulate(lengths)], device=DEVICE)
    leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
    got, new_tail = short_conv.short_conv(*leaves, tail, offsets)
    expected_x, expected_weight = x.double().requires_grad_(), weight.double().requires_grad_()
    pieces, tails = [], []
    pairs = [(row, 0, 70) for row in range(batch)] if lengths is None else \
        [(0, a, b) for a, b in itertools.pairwise(offsets.tolist())]  # fmt: skip
    for n, (row, start, end) in enumerate(pairs):
        before = torch.zeros(3, 40, device=DEVICE, dtype=torch.float64) if tail is None else tail[n].double()
        padded = torch.cat([before, expected_x[row, start:end]])
        if end > start:
            pieces.append(F.silu(F.conv1d(padded.t()[None], expected_weight, groups=40))[0].t())
        tails.append(padded[-3:])
    expected = torch.cat(pieces).view(x.shape)
    grad = torch.randn(x.shape).to(DEVICE, dtype)
    assert rms_ratio(got, expected) < bound
    assert torch.equal(new_tail.double(), torch.stack(tails))
    for a, b in zip(torch.autograd.grad(got, leaves, grad),
                    torch.autograd.grad(expected, (expected_x, expected_weight), grad.double()),
                    strict=True):  # fmt: skip
        assert rms_ratio(a, b) < bound


def step_inputs(tokens, dtype, heads=2, key_size=32, value_size=16, state_dtype=torch.float32):
    torch.manual_seed(tokens)

    def random(*shape, dtype=torch.float32):
        return torch.randn(*shape).to(DEVICE, dtype)

    widths = (heads * key_size, heads * key_size, heads * value_size)
    return {
        "q": random(3, tokens, widths[0], dtype=dtype),
        "k": random(3, tokens, widths[1], dtype=dtype),
        "v": random(3, tokens, widths[2], dtype=dtype),
        "g": random(3, tokens, widths[0], dtype=dtype),
        "beta": random(3, tokens, heads, dtype=dtype),
        "gate": random(3, tokens, widths[2], dtype=dtype),
        "tails": tuple(random(3, 3, width, dtype=dtype) for width in widths),
        "conv_weights": tuple(random(width, 1, 4) for width in widths),
        "A_log": random(heads),
        "dt_bias": random(widths[0]),
        "norm_weight": random(value_size),
        "state": random(3, heads, key_size, value_size, dtype=state_dtype),
    }


def double(value):
    return tuple(map(double, value)) if isinstance(value, tuple) else value.double()


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize(("dtype", "bound"), PRECISIONS)
def test_fused_step(tokens, lower_bound, dtype, bound, monkeypatch):
    inputs = step_inputs(tokens, dtype)
    state_before = inputs["state"].clone()
    options = {"lower_bound": lower_bound, "norm_eps": 1e-5}
    out, tails, state = kda_step.kda_step(**bundled(inputs, **options))
    assert torch.equal(inputs["state"], state_before)
    monkeypatch.setattr(dispatch, "triton_refusal", lambda *tensors, sizes=(): "the oracle")
    expected = kda_step.kda_step(**bundled({name: double(x) for name, x in inputs.items()}, **options))
    assert out.dtype == dtype and rms_ratio(out, expected[0]) < bound
    assert all(torch.equal(a.double(), b) for a, b in zip(tails, expected[1], strict=True))
    assert rms_ratio(state, expected[2]) < bound


@pytest.mark.parametrize(("heads", "key_size", "value_size", "state_dtype", "lower_bound"), [
    (6, 32, 128, torch.float32, -5.0), (1, 64, 32, torch.float32, None), (4, 128, 64, torch.bfloat16, -5.0),
])  # fmt: skip
@pytest.mark.parametrize(("dtype", "bound"), PRECISIONS)
def test_fused_step_of_many(lower_bound, heads, key_size, value_size, state_dtype, dtype, bound, monkeypatch):
    """Where sequences fill the device three kernels take a token: against float64, and in place to the same bits."""
    inputs = step_inputs(1, dtype, heads, key_size, value_size, state_dtype)
    options = {"lower_bound": lower_bound, "norm_eps": 1e-5}
    taken = []
    real = kda_step_triton.step_of_many
    monkeypatch.setattr(kda_step_triton, "step_of_many", lambda *args: taken.append(real(*args)))
    monkeypatch.setattr(kda_step_triton, "MANY", 0)
    before = double(tuple(inputs.values()))
    results = kda_step.kda_step(**bundled(inputs, **options))
    assert len(taken) == 1
    assert all(torch.equal(a.double(), b) for a, b in zip(inputs["tails"], before[6], strict=True))
    assert torch.equal(inputs["state"].double(), before[-1])
    copies = {**inputs, "tails": tuple(x.clone() for x in inputs["tails"]), "state": inputs["state"].clone()}
    in_place = kda_step.kda_step(**bundled(copies, **options), in_place=True)
    assert in_place[2] is copies["state"] and len(taken) == 2
    for a, b in zip((results[0], *results[1], results[2]), (in_place[0], *in_place[1], in_place[2]), strict=True):
        assert torch.equal(a, b)
    monkeypatch.setattr(dispatch, "triton_refusal", lambda *tensors, sizes=(): "the oracle")
    expected = kda_step.kda_step(**bundled({name: double(x) for name, x in inputs.items()}, **options))
    assert results[0].dtype == dtype and rms_ratio(results[0], expected[0]) < bound
    assert all(torch.equal(a.double(), b) for a, b in zip(results[1], expected[1], strict=True))
    assert rms_ratio(results[2], expected[2]) < (bound if state_dtype == torch.float32 else 5e-3)


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), PRECISIONS)
def test_fused_step_of_rows_of_larger_buffers(many, dtype, bound, monkeypatch):
    """States anywhere among those of others, which stay as they are: to the bits of a batch of their own."""
    inputs = step_inputs(1, dtype, 4, 32, 64)
    if many:
        monkeypatch.setattr(kda_step_triton, "MANY", 0)
    options, batch = {"lower_bound": -5.0, "norm_eps": 1e-5}, len(inputs["state"])
    expected = kda_step.kda_step(**bundled(inputs, **options))
    slots = torch.arange(batch, device=inputs["state"].device).flip(0) * 2 + 1
    own = (*inputs["tails"], inputs["state"])

    def spread(slots):
        buffers = [torch.full((2 * batch + 1, *x.shape[1:]), float("nan")).to(x) for x in own]
        for buffer, x in zip(buffers, own, strict=True):
            buffer[slots] = x
        return buffers

    *tails, state = buffers = spread(slots)
    rows = {**inputs, "tails": tuple(tails), "state": state}
    out, new_tails, new_state = kda_step.kda_step(**bundled(rows, **options), slots=slots)
    assert torch.equal(out, expected[0]) and new_state is state
    for buffer, returned, x in zip(buffers, (*new_tails, new_state), (*expected[1], expected[2]), strict=True):
        assert returned is buffer and torch.equal(buffer[slots], x)
        others = torch.ones(len(buffer), dtype=torch.bool).index_fill(0, slots.cpu(), False)
        assert buffer.cpu()[others].isnan().all()
    monkeypatch.setattr(dispatch, "triton_refusal", lambda *tensors, sizes=(): "the oracle")
    *tails, state = spread(slots)
    rows = {**inputs, "tails": tuple(tails), "state": state}
    composed = kda_step.kda_step(**bundled({name: double(x) for name, x in rows.items()}, **options), slots=slots)
    assert rms_ratio(out, composed[0]) < bound and rms_ratio(new_state[slots], composed[2][slots]) < bound


def test_which_kernels_take_a_step(monkeypatch):
    """Three where sequences fill the device and the heads are whole blocks; one that slices the state where programs
    share a multiprocessor."""
    taken = []

    class Launches:
        def __getitem__(self, grid):
            return lambda **given: taken.append((*grid, given["BS"], given["num_warps"], given["ONE_TOKEN"]))

    monkeypatch.setattr(kda_step_triton, "step_kernel", Launches())
    monkeypatch.setattr(kda_step_triton, "step_of_many", lambda *args: taken.append("three"))
    monkeypatch.setattr(kda_step_triton.tools, "multiprocessors", lambda device: 6)
    for (tokens, heads, key_size, value_size), launch in {
        (1, 2, 64, 128): (6, 128, 2, True),
        (1, 3, 64, 128): (9, 32, 2, True),
        (1, 3, 64, 20): (9, 32, 1, True),
        (5, 2, 200, 64): (6, 64, 2, False),
        (1, 20, 32, 64): "three",
        (1, 19, 32, 64): (57, 32, 1, True),
        (2, 20, 32, 64): (60, 32, 1, False),
        (1, 20, 32, 48): (60, 32, 1, True),
        (1, 20, 40, 64): (60, 32, 2, True),
        (1, 20, 16, 64): (60, 32, 1, True),
        (1, 20, 64, 16): (60, 16, 1, True),
    }.items():
        inputs = step_inputs(tokens, torch.float32, heads, key_size, value_size)  # of three rows
        kda_step.kda_step(**bundled(inputs, lower_bound=-5.0, norm_eps=1e-5))
        assert taken == [launch], (tokens, heads, key_size, value_size)
        taken.clear()


def test_fused_step_in_place_and_token_by_token():
    """Several tokens at once (a draft) are the same as one after the other, in place, bit for bit."""
    inputs = step_inputs(3, torch.float32)
    options = {"lower_bound": -5.0, "norm_eps": 1e-5}
    out, tails, state = kda_step.kda_step(**bundled(inputs, **options))
    addresses = [x.data_ptr() for x in (*inputs["tails"], inputs["state"])]
    outputs = []
    for t in range(3):
        part = {n: inputs[n][:, t : t + 1] for n in ("q", "k", "v", "g", "beta", "gate")}
        one, *held = kda_step.kda_step(**bundled({**inputs, **part}, **options), in_place=True)
        outputs.append(one)
        assert [x.data_ptr() for x in (*held[0], held[1])] == addresses
    assert torch.equal(torch.cat(outputs, dim=1), out)
    assert torch.equal(inputs["state"], state)
    assert all(torch.equal(a, b) for a, b in zip(inputs["tails"], tails, strict=True))


def test_fused_step_with_a_bfloat16_state():
    inputs = step_inputs(1, torch.float32, state_dtype=torch.bfloat16)
    options = {"lower_bound": -5.0, "norm_eps": 1e-5}
    _, _, state = kda_step.kda_step(**bundled(inputs, **options))
    _, _, expected = kda_step.kda_step(**bundled({**inputs, "state": inputs["state"].float()}, **options))
    assert state.dtype == torch.bfloat16 and rms_ratio(state, expected.double()) < 5e-3


class Elsewhere:
    """An exchange of `kda_context` that hands out what it was made with and keeps what it was given."""

    def __init__(self, lengths, last, entry, d_final):
        self.lengths, self.last, self.entry, self.d_final = lengths, last, entry, d_final

    def entry_states(self, transition, offset):
        self.transition, self.offset = transition, offset
        return self.entry, transition

    def end_gradients(self, d_entry, transition):
        assert transition is self.transition or torch.equal(transition, self.transition)
        self.d_entry = d_entry.clone()
        return self.d_final


@pytest.mark.parametrize("path", ["torch", "triton"])
@pytest.mark.parametrize("lengths", [None, [70, 20, 44]], ids=["rows", "documents"])
def test_a_part_gives_its_transition_and_takes_entry_and_end(path, lengths, monkeypatch):
    """Random entry states and gradients of the end states play the parts that lie elsewhere."""
    refusal = None if path == "triton" else "not this time"
    monkeypatch.setattr(dispatch, "triton_refusal", lambda *tensors, sizes=(): refusal)
    monkeypatch.setattr("kimi_k3.kernels.kda_chunk_triton.segments_of", lambda *shape: 2)
    length, rows = (67, 2) if lengths is None else (sum(lengths), 1)
    inputs, options = make_inputs(length, key_size=16, value_size=32, lengths=lengths, batch=rows,
                                  gate="all-near-zero")  # fmt: skip
    last = [0, 1] if lengths is None else [2]
    entry = inputs.pop("initial_state")
    d_out, d_final, d_given = (torch.randn(x.shape).to(DEVICE) for x in (inputs["v"], entry, entry))
    there = Elsewhere(lengths or [length] * rows, last, entry, d_final)
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    out, final = kda_context.part_kda(**bundled(leaves, **options), exchange=there)
    grads = torch.autograd.grad([out, final], list(leaves.values()), [d_out, d_given])

    exact = {name: x.double().requires_grad_() for name, x in (inputs | {"initial_state": entry}).items()}
    expected = oracle(exact, **options)
    wanted = torch.autograd.grad(expected, list(exact.values()), [d_out.double(), (d_final + d_given).double()],
                                 retain_graph=True)  # fmt: skip
    seeds = [d_out.double(), d_given.double()]
    d_entry = torch.autograd.grad(expected, exact["initial_state"], seeds)[0]
    assert rms_ratio(out, expected[0].detach()) < 1e-5 and rms_ratio(final, expected[1].detach()) < 1e-5
    assert rms_ratio(there.transition @ entry[last] + there.offset, expected[1][last].detach()) < 1e-5
    assert there.transition.norm() > 1e-3, "a transition of zero would test nothing"
    assert rms_ratio(there.d_entry, d_entry) < 1e-5
    for name, got, want in zip(leaves, grads, wanted, strict=False):
        assert rms_ratio(got, want) < 2e-5, name
    with torch.no_grad():
        assert torch.equal(kda_context.part_kda(**bundled(inputs, **options), exchange=there)[0], out)
