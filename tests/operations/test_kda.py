"""KDA reference operations against a float64 recurrence, token by token, written out here a second time."""

import math

import pytest
import torch

from kimi_k3.kernels import kda

pytestmark = pytest.mark.one_release

CHUNK = kda.CHUNK


def oracle(q, k, v, g, beta, initial_state=None):
    """The recurrence of the Kimi K3 report, Eq. 1, in float64 with explicit matrices: one sequence, one head.

    q, k, g [T, K]; v [T, V]; beta [T]; q already scaled. Returns o [T, V] and the final state [K, V].
    """
    identity = torch.eye(q.shape[1], dtype=torch.float64)
    state = torch.zeros(q.shape[1], v.shape[1], dtype=torch.float64) if initial_state is None else initial_state
    outputs = []
    for t in range(q.shape[0]):
        erase = identity - beta[t] * torch.outer(k[t], k[t])
        state = erase @ torch.diag(g[t].exp()) @ state + beta[t] * torch.outer(k[t], v[t])
        outputs.append(state.T @ q[t])
    return torch.stack(outputs), state


def oracle_batch(q, k, v, g, beta, initial_state):
    heads = [
        [oracle(*(x[b, :, h] for x in (q, k, v, g, beta)), initial_state[b, h]) for h in range(q.shape[2])]
        for b in range(q.shape[0])
    ]
    out = torch.stack([torch.stack([head[0] for head in row], dim=1) for row in heads])
    return out, torch.stack([torch.stack([head[1] for head in row]) for row in heads])


def rms_ratio(got, expected):
    return ((got.double() - expected).norm() / expected.norm().clamp_min(1e-30)).item()


GATES = {
    "mixed": lambda shape: -5 * torch.rand(shape, dtype=torch.float64),
    "all-at-bound": lambda shape: torch.full(shape, -5.0, dtype=torch.float64),
    "all-near-zero": lambda shape: -1e-4 * torch.rand(shape, dtype=torch.float64),
    "half-at-bound": lambda shape: -5.0 * (torch.rand(shape) < 0.5).double(),
    # the softplus gate has no bound: a huge decay must not swallow the small ones after it
    "unbounded": lambda shape: -torch.where(torch.rand(shape) < 0.1, 1e4, 0.01).double(),
}


def make_inputs(batch, length, heads, key_size, value_size, gate="mixed", parallel_keys=False, seed=0):
    torch.manual_seed(seed)
    shape = (batch, length, heads, key_size)
    keys = torch.randn(shape, dtype=torch.float64)
    if parallel_keys:
        keys = torch.randn(batch, 1, heads, key_size, dtype=torch.float64) + 0.01 * keys
    return {
        "q": kda.l2norm(torch.randn(shape, dtype=torch.float64)),
        "k": kda.l2norm(keys),
        "v": torch.randn(batch, length, heads, value_size, dtype=torch.float64),
        "g": GATES[gate](shape),
        "beta": torch.rand(batch, length, heads, dtype=torch.float64)
        if not parallel_keys
        else torch.full((batch, length, heads), 0.98, dtype=torch.float64),
        "initial_state": torch.randn(batch, heads, key_size, value_size, dtype=torch.float64),
    }


def run_with_gradients(function, inputs, seed=1):
    """Outputs and the gradients of a random projection of outputs and state."""
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    out, state = function(**leaves)
    torch.manual_seed(seed)
    weights = torch.randn(out.shape, dtype=torch.float64), torch.randn(state.shape, dtype=torch.float64)
    loss = (out.double() * weights[0]).sum() + (state.double() * weights[1]).sum()
    loss.backward()
    return {"o": out.detach(), "state": state.detach(), **{f"d{name}": x.grad for name, x in leaves.items()}}


def scaled_oracle(q, k, v, g, beta, initial_state):
    return oracle_batch(q * q.shape[-1] ** -0.5, k, v, g, beta, initial_state)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("parallel_keys", [False, True], ids=["random-keys", "near-parallel-keys"])
def test_chunked_equals_float64_recurrence(gate, parallel_keys):
    """Faults 68, 70, 74: strong, weak, mixed and unbounded gates; -320 of log-decay in a chunk; similar keys."""
    inputs = make_inputs(2, 2 * CHUNK + 5, 2, 16, 24, gate, parallel_keys)
    expected = run_with_gradients(scaled_oracle, inputs)
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        got = run_with_gradients(kda.chunk_kda, {name: x.to(dtype) for name, x in inputs.items()})
        for name, value in expected.items():
            assert torch.isfinite(got[name]).all(), (name, dtype)
            assert rms_ratio(got[name], value) < bound, (name, dtype)


@pytest.mark.parametrize("length", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK], ids=lambda n: f"T{n}")
@pytest.mark.parametrize("function", [kda.chunk_kda, kda.recurrent_kda], ids=["chunk", "recurrent"])
def test_every_length(function, length):
    """Fault 71: lengths around the chunk size."""
    inputs = make_inputs(1, length, 2, 16, 16)
    expected = run_with_gradients(scaled_oracle, inputs)
    got = run_with_gradients(function, inputs)
    assert max(rms_ratio(got[name], value) for name, value in expected.items()) < 1e-12


def test_steps_that_are_prepared_together(monkeypatch):
    """All that autograd records; else as many chunks as stay below a number of tokens, one step at least."""
    monkeypatch.setattr(kda, "GROUP_TOKENS", 4 * CHUNK)
    steps, plain, leaf = [0, 3, 5, 6, 7, 12, 13], torch.zeros(1), torch.zeros(1, requires_grad=True)
    assert kda._groups(steps, plain, plain) == [(0, 1), (1, 4), (4, 5), (5, 6)]
    assert kda._groups(steps, plain, leaf) == [(0, 6)]
    with torch.no_grad():
        assert kda._groups(steps, plain, leaf) == [(0, 1), (1, 4), (4, 5), (5, 6)]
    assert kda._groups([0, 9], plain) == [(0, 1)]


def test_few_tokens_go_one_after_another(monkeypatch):
    """What that costs less than, a chunk that is mostly padding, has the same results."""
    taken = []
    for name in ("recurrent_kda", "chunk_kda"):
        function = getattr(kda, name)
        monkeypatch.setattr(
            kda, name, lambda *args, name=name, function=function, **kw: taken.append(name) or function(*args, **kw)
        )
    parameters = kda.KDAParameters(torch.zeros(2), torch.zeros(2 * 16), None, 1e-6)
    few, offsets = kda.FEW_TOKENS, torch.tensor([0, 1, 3])
    for length, cu_seqlens in ((0, None), (1, None), (few, None), (few + 1, None), (3, offsets)):
        (*inputs, _) = make_inputs(1, length, 2, 16, 16).values()
        kda.composed_kda(kda.KDAInputs(*inputs), parameters, None, cu_seqlens)
    assert taken == ["chunk_kda", "recurrent_kda", "recurrent_kda", "chunk_kda", "chunk_kda"]


@pytest.mark.parametrize("sizes", [(16, 16), (32, 16), (64, 128), (96, 96), (256, 32), (5, 3)], ids=str)
def test_head_sizes(sizes):
    """Faults 63, 79: head sizes from 16 to 256, odd ones, keys and values of different size."""
    inputs = make_inputs(1, CHUNK + 3, 1, *sizes)
    expected, _ = scaled_oracle(**inputs)
    got, _ = kda.chunk_kda(**{name: x.float() for name, x in inputs.items()})
    assert rms_ratio(got, expected) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_half_precision_inputs_are_computed_in_float32(dtype):
    """Fault 75: no dtype is silently cast down: the result is that of the rounded inputs in float32."""
    inputs = {name: x.to(dtype) for name, x in make_inputs(1, CHUNK + 3, 2, 16, 16).items()}
    out, state = kda.chunk_kda(**inputs)
    expected, expected_state = scaled_oracle(**{name: x.double() for name, x in inputs.items()})
    assert out.dtype == state.dtype == torch.float32
    assert rms_ratio(out, expected) < 1e-5 and rms_ratio(state, expected_state) < 1e-5


def test_sequences_of_mixed_lengths_equal_each_alone():
    """Fault 32: length-1, empty and long sequences in one call, bitwise stable over repeats."""
    lengths = [1, 0, 2 * CHUNK, 5, CHUNK, 1, 0]
    inputs = make_inputs(1, sum(lengths), 2, 16, 16)
    inputs["initial_state"] = torch.randn(len(lengths), 2, 16, 16, dtype=torch.float64)
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0)])
    out, states = kda.chunk_kda(**inputs, cu_seqlens=offsets)
    again = kda.chunk_kda(**inputs, cu_seqlens=offsets)
    assert torch.equal(out, again[0]) and torch.equal(states, again[1])
    for i, length in enumerate(lengths):
        rows = slice(offsets[i], offsets[i + 1])
        state = inputs["initial_state"][i : i + 1]
        if length == 0:
            assert torch.equal(states[i : i + 1], state)
            continue
        alone = {name: inputs[name][:, rows] for name in ("q", "k", "v", "g", "beta")}
        expected, expected_state = scaled_oracle(**alone, initial_state=state)
        assert rms_ratio(out[:, rows], expected) < 1e-12
        assert rms_ratio(states[i : i + 1], expected_state) < 1e-12


def test_gradients_of_packed_sequences_and_several_heads():
    """Fault 64: the gradient of every input for H > 1, B > 1 and varlen."""
    lengths = [7, CHUNK + 1, 1]
    inputs = make_inputs(1, sum(lengths), 3, 16, 16)
    inputs["initial_state"] = torch.randn(3, 3, 16, 16, dtype=torch.float64)
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0)])

    def each_alone(initial_state, **tensors):
        parts = [
            scaled_oracle(
                **{name: x[:, offsets[i] : offsets[i + 1]] for name, x in tensors.items()},
                initial_state=initial_state[i : i + 1],
            )
            for i in range(3)
        ]
        return torch.cat([p[0] for p in parts], dim=1), torch.cat([p[1] for p in parts])

    expected = run_with_gradients(each_alone, inputs)
    got = run_with_gradients(lambda **x: kda.chunk_kda(**x, cu_seqlens=offsets), inputs)
    assert max(rms_ratio(got[name], value) for name, value in expected.items()) < 1e-12


@pytest.mark.parametrize("cut", [1, 7, 16, 33, CHUNK, CHUNK + 9, 2 * CHUNK - 1])
def test_strictly_causal_to_the_last_bit(cut):
    """Later inputs change neither earlier outputs nor earlier gradients, not even by rounding."""
    inputs = {name: x.float() for name, x in make_inputs(2, 2 * CHUNK, 2, 16, 16).items()}
    other = make_inputs(2, 2 * CHUNK, 2, 16, 16, gate="half-at-bound", seed=9)
    edited = dict(inputs)
    for name in ("q", "k", "v", "g", "beta"):
        edited[name] = torch.cat([inputs[name][:, :cut], other[name].float()[:, cut:]], dim=1)

    def earlier(tensors):
        leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
        out, _ = kda.chunk_kda(**leaves)
        out[:, :cut].square().sum().backward()
        return [
            out[:, :cut],
            leaves["initial_state"].grad,
            *(leaves[n].grad[:, :cut] for n in ("q", "k", "v", "g", "beta")),
        ]

    for before, after in zip(earlier(inputs), earlier(edited), strict=True):
        assert torch.equal(before, after)


def test_state_carries_over_any_split():
    inputs = make_inputs(2, 150, 2, 16, 16)
    state = inputs.pop("initial_state")
    expected, expected_state = kda.chunk_kda(**inputs, initial_state=state)
    outputs = []
    for start, stop in [(0, 1), (1, 3), (3, 70), (70, 150)]:
        out, state = kda.chunk_kda(**{name: x[:, start:stop] for name, x in inputs.items()}, initial_state=state)
        outputs.append(out)
    assert rms_ratio(torch.cat(outputs, dim=1), expected) < 1e-12
    assert rms_ratio(state, expected_state) < 1e-12


def test_long_sequence_in_several_groups_stays_finite_and_right():
    """Fault 73: more tokens than one group of chunks; the grouped and the one-group result agree bit for bit."""
    inputs = {
        name: x.float() for name, x in make_inputs(1, 3 * kda.GROUP_TOKENS + 70, 1, 8, 8, "half-at-bound").items()
    }
    with torch.no_grad():
        grouped, state = kda.chunk_kda(**inputs)
    whole, whole_state = kda.chunk_kda(**{**inputs, "q": inputs["q"].requires_grad_()})
    assert torch.isfinite(grouped).all()
    assert rms_ratio(grouped, whole.detach().double()) < 1e-6
    assert rms_ratio(state, whole_state.detach().double()) < 1e-6


def test_peak_memory_grows_with_tokens_times_chunk():
    """No [chunk, chunk, K] tensor: the largest tensor alive has at most tokens * 2 * max(chunk, K + V) elements."""
    length, heads, size = 8 * CHUNK, 2, 64
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, (tuple, list)) else [result]:
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.untyped_storage().nbytes() // tensor.element_size())
            return result

    inputs = {name: x.float() for name, x in make_inputs(1, length, heads, size, size).items()}
    with torch.no_grad(), Watch():
        kda.chunk_kda(**inputs)
    assert 0 < largest <= 2 * length * heads * max(CHUNK, 2 * size)


@pytest.mark.parametrize(
    "logit, a_log, bias, expected",
    [(-0.5, 0.25, 0.125, -1.9094786741), (0.75, 1.0, 0.5, -4.8381867323), (-2.0, 0.7, 0.4, -0.1917300307)],
)
def test_bounded_gate_values(logit, a_log, bias, expected):
    """Faults 12, 69: published values of the bounded gate; it is neither a clamp nor the softplus gate."""
    logits = torch.tensor([[logit]], dtype=torch.float64)
    weights = torch.tensor([a_log], dtype=torch.float64), torch.tensor([bias], dtype=torch.float64)
    bounded = kda.kda_gate(logits, kda.KDAParameters(*weights, lower_bound=-5.0)).item()
    assert bounded == pytest.approx(expected, abs=1e-9)
    softplus = kda.kda_gate(logits, kda.KDAParameters(*weights, lower_bound=None)).item()
    assert softplus == pytest.approx(-math.exp(a_log) * math.log1p(math.exp(logit + bias)), abs=1e-12)
    assert abs(softplus - bounded) > 1e-2


def test_gate_is_per_head_and_per_channel():
    logits = torch.zeros(1, 1, 2, 3, dtype=torch.float64)
    a_log, bias = torch.tensor([0.0, 1.0]), torch.arange(6.0)
    gate = kda.kda_gate(logits, kda.KDAParameters(a_log, bias, -5.0))[0, 0]
    expected = -5 * torch.sigmoid(a_log.double().exp()[:, None] * bias.double().view(2, 3))
    torch.testing.assert_close(gate, expected)


def test_l2norm_adds_eps_to_the_sum():
    """Pitfall of ports: eps inside a mean is 128 times too large."""
    x = torch.full((1, 128), 1e-4, dtype=torch.float64)
    expected = x / math.sqrt(128 * 1e-8 + 1e-6)
    torch.testing.assert_close(kda.l2norm(x), expected)
    zero = torch.zeros(1, 4, requires_grad=True)
    kda.l2norm(zero).sum().backward()
    assert torch.isfinite(zero.grad).all()


@pytest.mark.parametrize("name", ["k", "v", "g", "beta", "initial_state", "cu_seqlens"])
def test_wrong_shapes_are_named(name):
    """Fault 62: unequal head counts are refused, not misread."""
    inputs = make_inputs(2, 4, 2, 8, 8)
    if name == "cu_seqlens":
        inputs.pop("initial_state")
        inputs["cu_seqlens"] = torch.tensor([0, 4])
    else:
        inputs[name] = torch.cat([inputs[name]] * 2, dim=1 if name == "initial_state" else 2)
    with pytest.raises(ValueError, match=name):
        kda.chunk_kda(**inputs)
