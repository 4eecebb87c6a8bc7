"""Kimi Delta Attention: gate, L2 norm, the recurrence token by token, and its chunked form (torch reference).

For one head with key size K and value size V, state S [K, V] in float32 (Kimi K3 report, Eq. 1):

    S <- diag(exp(g)) S;   e = v - S^T k;   S <- S + beta k e^T;   o = S^T q

Chunked form (UT transform), inside a chunk with incoming state S0 and inclusive cumulative log-decay G:

    L = stril(beta_i <k_i, k_j> e^(G_i - G_j))        A = tril(<q_i, k_j> e^(G_i - G_j))
    w, u = (Id + L)^-1 [beta k e^G, beta v]            U = u - w S0
    o = (q e^G) S0 + A U                               S_C = diag(e^G_C) S0 + (k e^(G_C - G))^T U

Two properties decide how L and A are computed here:

* No exponent is ever positive, for any gate, bounded or not. The pairwise decays e^(G_i - G_j) are factored block by
  block over a binary tree: rows of the later half against columns of the earlier half, with the offset at the first row
  of the later half, so each factor is at most 1. Only the diagonal is left, where the decay is 1.
* Strict causality, also of rounding: every offset lies in the past of every row that it serves, so a later token cannot
  change the bits of an earlier output or gradient.

Sums of g run inside each block of the tree instead of being differences of one long cumulative sum, which would lose
small decays behind a large one. Memory is O(T (C + K + V)) a head.
"""

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from . import dispatch, norms, operators

L2_EPS = 1e-6
CHUNK = 64
# Tokens whose chunk matrices exist at once when no gradient is recorded: bounds the extra memory of a long prefill.
GROUP_TOKENS = 1024
# Up to this many tokens cost less one after another than as a chunk that is mostly padding (measured on a CPU).
FEW_TOKENS = 16


class KDAParameters(NamedTuple):
    """What a KDA layer brings to every token: the weights and numbers of the gate, and of the norm of queries and keys.

    Attributes:
        A_log: [H] float32, log of the rate of the gate.
        dt_bias: [H * K] float32, added to the decay logits of every channel.
        lower_bound: of the log-decay (Kimi K3), None for the gate without one (Kimi-Linear).
        l2_eps: added to the sum of squares by the L2 norms of q and k.
    """

    A_log: torch.Tensor
    dt_bias: torch.Tensor
    lower_bound: float | None
    l2_eps: float = L2_EPS

    def for_kernels(self) -> dict:
        """By the names that the Triton kernels have for them."""
        return {
            "A_log": self.A_log,
            "dt_bias": self.dt_bias,
            "lower_bound": self.lower_bound or 0.0,
            "eps": self.l2_eps,
            "BOUNDED": self.lower_bound is not None,
        }

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.A_log, self.dt_bias

    def with_tensors(self, A_log: torch.Tensor | None, dt_bias: torch.Tensor | None) -> "KDAParameters":
        """The same numbers with other tensors; None where autograd carries these."""
        return self._replace(A_log=A_log, dt_bias=dt_bias)  # type: ignore[arg-type]  # None only inside autograd


class KDAInputs(NamedTuple):
    """What the recurrence reads at every token, as `fused_kda` takes it."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor

    def part(self, start: int, end: int) -> "KDAInputs":
        """The tokens from `start` to `end`."""
        return KDAInputs(*(x[:, start:end] for x in self))

    def by_token(self) -> "KDAInputs":
        """As the kernels read them."""
        return KDAInputs(*map(dispatch.token_rows, self))

    @property
    def sizes(self) -> tuple[int, int]:
        """K and V."""
        return self.q.shape[-1], self.v.shape[-1]


def working_dtype(tensor: torch.Tensor) -> torch.dtype:
    """float64 stays float64, everything else is computed in float32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def full_precision(device: torch.device) -> contextlib.AbstractContextManager:
    """Autocast off: the parts that the architecture defines in float32 stay so under mixed precision."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):  # a context costs 10 us to make and enter
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


def l2norm(x: torch.Tensor, eps: float = L2_EPS) -> torch.Tensor:
    """x / sqrt(sum(x^2) + eps) over the last dimension, in float32 (float64 for float64). eps belongs to the sum."""
    x = norms.widened(x)
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True).add_(eps))


def kda_gate(logits: torch.Tensor, parameters: KDAParameters) -> torch.Tensor:
    """Log-decay g of every key channel.

    With a lower bound (Kimi K3): g = lower_bound * sigmoid(exp(A_log) * (logits + dt_bias)), in (lower_bound, 0).
    Without (Kimi-Linear): g = -exp(A_log) * softplus(logits + dt_bias).

    Args:
        logits: [..., H, K], output of the low-rank decay projection.

    Returns:
        [..., H, K] float32 (float64 for float64 logits), never positive.
    """
    dtype = working_dtype(logits)
    heads, size = logits.shape[-2:]
    z = norms.cast(logits, dtype) + norms.cast(parameters.dt_bias, dtype).view(heads, size)
    rate = norms.cast(parameters.A_log, dtype).exp().view(heads, 1)
    if parameters.lower_bound is None:
        # threshold: softplus(z) differs from z by less than a float64 can hold
        return -rate * F.softplus(z, threshold=40.0)
    return parameters.lower_bound * torch.sigmoid(rate * z)


def fused_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    parameters: KDAParameters,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """KDA from the outputs of the convolutions and the logits: L2 norms, gate, sigmoid of beta and the recurrence.

    On a GPU with Triton this is one fused operation (`kda_chunk_triton`), differentiable in every tensor; elsewhere it
    is composed of the functions of this file.

    Args:
        q, k: [B, T, H, K], after the convolution, not normalised.
        v: [B, T, H, V].
        g: [B, T, H, K] decay logits, for `kda_gate`.
        beta: [B, T, H] logits.
        initial_state, cu_seqlens: as `chunk_kda` takes them; the state may be bfloat16.

    Returns:
        o [B, T, H, V] in the dtype of v, and the final states [N, H, K, V], float32 or in the dtype of `initial_state`.
    """
    inputs = KDAInputs(q, k, v, g, beta)
    _check_shapes(*inputs, cu_seqlens)
    if takes_kernels(inputs, parameters, initial_state, traced=cu_seqlens is None):
        sequences = q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
        _check_state(initial_state, (sequences, *k.shape[2:], v.shape[3]))
        tensors = *inputs.by_token(), *parameters.tensors, initial_state
        results = _OPERATOR.run(tensors, (parameters.lower_bound, parameters.l2_eps, cu_seqlens))
        if results is not None:
            return results
    return composed_kda(inputs, parameters, initial_state, cu_seqlens)


def takes_kernels(
    inputs: KDAInputs, parameters: KDAParameters, *states: torch.Tensor | None, traced: bool = False
) -> bool:
    """Whether the Triton kernels run for these, or where a graph is `traced`, an operator."""
    tensors = (x for x in (*parameters.tensors, *states) if x is not None)
    refusal_of = dispatch.operator_refusal if traced else dispatch.triton_refusal
    return refusal_of(*inputs, *tensors, sizes=inputs.sizes) is None


def composed_kda(
    inputs: KDAInputs,
    parameters: KDAParameters,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`fused_kda` of the functions of this file."""
    q, k, v, g, beta = inputs
    state_dtype = working_dtype(q) if initial_state is None else initial_state.dtype
    few = 0 < q.shape[1] <= FEW_TOKENS and cu_seqlens is None
    if few:  # one norm of both: half the operators
        q, k = l2norm(torch.stack((q, k)), parameters.l2_eps).unbind(0)
    else:
        q, k = l2norm(q, parameters.l2_eps), l2norm(k, parameters.l2_eps)
    prepared = q, k, v, kda_gate(g, parameters), torch.sigmoid(norms.widened(beta))
    if few:
        out, state = recurrent_kda(*prepared, initial_state=initial_state)
    else:
        out, state = chunk_kda(*prepared, initial_state=initial_state, cu_seqlens=cu_seqlens)
    return norms.cast(out, v.dtype), norms.cast(state, state_dtype)


def fused_kda_states(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    parameters: KDAParameters,
    initial_state: torch.Tensor | None,
    boundaries: list[int],
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """`fused_kda` of a batch without `cu_seqlens`, and the states at boundaries inside it from the same scan.

    The scan kernel writes the states at evenly spaced boundaries itself; at others, and in torch, the sequence is
    scanned piece after piece, each once.

    Args:
        boundaries: numbers of tokens, rising, each from 1 to T - 1.

    Returns:
        o and the final states as `fused_kda`, and the states [B, H, K, V] after each number of tokens, each in memory
        of its own.
    """
    inputs, cuts = KDAInputs(q, k, v, g, beta), [0, *boundaries, q.shape[1]]
    needs_grad = dispatch.needs_grad(*inputs, *parameters.tensors, initial_state)
    kernels = not needs_grad and takes_kernels(inputs, parameters, initial_state)
    outputs: list[torch.Tensor] = []
    states: list[torch.Tensor] = []
    state, at = initial_state, 0
    while at + 1 < len(cuts):
        pieces, every = _even_pieces(cuts[at:]) if kernels else 1, cuts[at + 1] - cuts[at]
        results = None
        if pieces > 1:
            part = inputs.part(cuts[at], cuts[at + pieces]).by_token()
            results = dispatch.run_kernels(_forward_kernels, part, parameters, state, None, every)
        if results is None:
            pieces = 1
            out, state = fused_kda(*inputs.part(cuts[at], cuts[at + 1]), parameters, initial_state=state)
        else:
            out, state, inner = results
            inner = inner.view(q.shape[0], -1, *inner.shape[1:])
            states += [inner[:, i].clone() for i in range(pieces - 1)]
        outputs.append(out)
        states.append(state)
        at += pieces
    return torch.cat(outputs, dim=1), states[-1], states[:-1]


def _even_pieces(cuts: list[int]) -> int:
    """How many pieces from the first one on the scan kernel takes in one launch: of one size, the last one shorter.

    Between two states that it exports lies a multiple of its chunk. A piece that it would cut into parallel parts is
    better off alone, because one that exports states is not.
    """
    from . import kda_chunk_triton as kernels

    every = cuts[1] - cuts[0]
    if every % kernels.CHUNK or every >= kernels.LONG:
        return 1
    pieces = 1
    while pieces + 1 < len(cuts) and cuts[pieces + 1] - cuts[pieces] == every:
        pieces += 1
    if pieces + 2 == len(cuts) and cuts[-1] - cuts[pieces] < every:
        pieces += 1
    return pieces


def _forward_kernels(inputs, parameters, initial_state, cu_seqlens, checkpoint_every=0):
    from . import kda_chunk_triton

    if initial_state is not None:
        initial_state = initial_state.contiguous()
    results = kda_chunk_triton.forward(inputs, parameters, initial_state, cu_seqlens, checkpoint_every)
    return results if checkpoint_every else results[:2]


def _forward(tensors, options, _):
    return _forward_kernels(*_arguments(tensors, options)), ()


def _backward(tensors, _, options, grads):
    return gradients(*_arguments(tensors, options), *grads)


def _arguments(tensors, options):
    """(inputs, parameters, initial state, cu_seqlens) of an operator's tensors and options."""
    (*inputs, A_log, dt_bias, initial_state), (lower_bound, l2_eps, cu_seqlens) = tensors, options
    return KDAInputs(*inputs), KDAParameters(A_log, dt_bias, lower_bound, l2_eps), initial_state, cu_seqlens


def _fake(tensors, _):
    q, _, v, *_, initial_state = tensors
    state = q.new_empty(q.shape[0], *q.shape[2:], v.shape[3], dtype=torch.float32)
    return [v.new_empty(v.shape), state if initial_state is None else initial_state.new_empty(initial_state.shape)]


def gradients(
    inputs: KDAInputs,
    parameters: KDAParameters,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    d_out: torch.Tensor | None,
    d_final: torch.Tensor | None,
    final_of: Callable[[torch.Tensor], torch.Tensor | None] | None = None,
) -> Sequence[torch.Tensor | None]:
    """Gradients of the inputs, A_log, dt_bias and the initial state (None without), by kernels or else in torch.

    Args:
        d_out, d_final: of the results, contiguous, None where nothing depends on one.
        final_of: makes the gradient of the final states out of that of the initial states under `d_final`, where what
            follows lies elsewhere (`kda_context`).
    """
    d_out = inputs.v.new_zeros(inputs.v.shape) if d_out is None else d_out
    initial_state = None if initial_state is None else initial_state.contiguous()
    if takes_kernels(inputs, parameters, initial_state):
        from . import kda_backward_triton

        arguments = parameters, initial_state, cu_seqlens, d_out, d_final, final_of
        found = dispatch.run_kernels(kda_backward_triton.backward, inputs.by_token(), *arguments)
        if found is not None:
            return found

    def composed(*tensors):
        *inputs, A_log, dt_bias, state = tensors
        return composed_kda(KDAInputs(*inputs), parameters.with_tensors(A_log, dt_bias), state, cu_seqlens)

    leaves, results = dispatch.recompute(composed, (*inputs, *parameters.tensors, initial_state))
    if final_of is not None:
        seeds, entry = (d_out, torch.zeros_like(results[1]) if d_final is None else d_final), leaves[-1]
        assert entry is not None  # a part behind others starts from a state
        d_final = final_of(torch.autograd.grad(results, entry, seeds, retain_graph=True)[0])
    return dispatch.gradients(results, leaves, (d_out, d_final))


def recurrent_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence, one token after another; arguments and results as `chunk_kda` without `cu_seqlens`."""
    dtype = working_dtype(q)
    q, k, v, g, beta = (norms.cast(x, dtype) for x in (q, k, v, g, beta))
    batch, length, heads, key_size = q.shape
    q = q * (key_size**-0.5 if scale is None else scale)
    state = _entry_state(initial_state, batch, heads, key_size, v.shape[-1], q).reshape(batch * heads, key_size, -1)
    decay, outputs = g.exp(), []
    for t in range(length):
        query, key, keep = (x[:, t].reshape(batch * heads, 1, key_size) for x in (q, k, decay))
        state = state * keep.transpose(1, 2)
        error = torch.baddbmm(v[:, t].reshape(batch * heads, 1, -1), key, state, alpha=-1)
        state = torch.baddbmm(state, key.transpose(1, 2), error * beta[:, t].reshape(batch * heads, 1, 1))
        outputs.append(torch.bmm(query, state).view(batch, 1, heads, -1))
    return torch.cat(outputs, dim=1), state.view(batch, heads, key_size, -1)


def chunk_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chunked Kimi Delta Attention, differentiable in every argument.

    Args:
        q, k: [B, T, H, K], L2-normalised; q not yet scaled.
        v: [B, T, H, V].
        g: [B, T, H, K] log-decay, never positive.
        beta: [B, T, H], in (0, 1).
        scale: of q; K^-0.5 when None.
        initial_state: [N, H, K, V], zeros when None. N is B, or the number of sequences under `cu_seqlens`.
        cu_seqlens: [N + 1] integer offsets of the sequences inside T (B must be 1); lengths of 0 are allowed.

    Returns:
        o [B, T, H, V] and the final states [N, H, K, V], both float32 (float64 for float64 q).

    Raises:
        ValueError: for shapes that do not fit, naming the argument.
    """
    batch, length, heads, key_size = q.shape
    value_size = v.shape[-1]
    _check_shapes(q, k, v, g, beta, cu_seqlens)
    dtype = working_dtype(q)
    q, k, v, g, beta = (x.to(dtype).flatten(0, 1) for x in (q, k, v, g, beta))
    q = q * (key_size**-0.5 if scale is None else scale)

    if cu_seqlens is None:
        lengths = [length] * batch
    else:
        lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
    sequences = len(lengths)
    state = _entry_state(initial_state, sequences, heads, key_size, value_size, q)
    if sum(lengths) == 0:
        return q.new_zeros(batch, length, heads, value_size), state

    table, steps, order = _chunk_table(lengths, q.device)
    state = state[order]
    finished = []
    # Every real token stands in exactly one row of the table; the padding rows go to a row that is cut off.
    slots = torch.where(table >= 0, table, batch * length)
    flat = q.new_zeros(batch * length + 1, heads, value_size)
    for first, last in _groups(steps, q, k, v, g, beta):
        chunks = table[steps[first] : steps[last]]
        blocks = [_gather(x, chunks) for x in (q, k, v, g, beta)]
        q_decay, attn, w, u, k_restore, decay = _prepare(*blocks)
        outputs = []
        for step in range(first, last):
            rows = slice(steps[step] - steps[first], steps[step + 1] - steps[first])
            active = rows.stop - rows.start
            if active < state.shape[0]:  # sequences are sorted, the shorter ones end first
                finished.append(state[active:])
                state = state[:active]
            updated = u[rows] - w[rows] @ state
            outputs.append(q_decay[rows] @ state + attn[rows] @ updated)
            state = decay[rows] * state + k_restore[rows].transpose(-1, -2) @ updated
        out = torch.cat(outputs).transpose(1, 2).flatten(0, 1)  # [chunks * C, H, V]
        flat.index_copy_(0, slots[steps[first] : steps[last]].flatten(), out)
    state = torch.cat([state, *reversed(finished)])
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(sequences, device=order.device)
    return flat[:-1].view(batch, length, heads, value_size), state[inverse]


def _check_shapes(q, k, v, g, beta, cu_seqlens):
    for name, tensor, shape in (
        ("k", k, q.shape),
        ("g", g, q.shape),
        ("v", v, (*q.shape[:3], v.shape[-1])),
        ("beta", beta, q.shape[:3]),
    ):
        if tensor.shape != torch.Size(shape):
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {tuple(shape)} to match q")
    if cu_seqlens is not None and q.shape[0] != 1:
        raise ValueError(f"cu_seqlens needs one packed row, but q has batch size {q.shape[0]}")


def _entry_state(initial_state, sequences, heads, key_size, value_size, like):
    shape = (sequences, heads, key_size, value_size)
    if initial_state is None:
        return like.new_zeros(shape)
    _check_state(initial_state, shape)
    return norms.cast(initial_state, like.dtype)


def _check_state(initial_state, shape):
    if initial_state is not None and initial_state.shape != torch.Size(shape):
        raise ValueError(f"initial_state has shape {tuple(initial_state.shape)}, expected {shape}")


def _chunk_table(lengths: list[int], device: torch.device) -> tuple[torch.Tensor, list[int], torch.Tensor]:
    """Cut every sequence into chunks and order the chunks by their step, so that each step is one batch.

    Returns:
        table [chunks, C]: token index of every slot, -1 for padding; rows ordered by (step, sequence).
        steps: table rows of step s are steps[s]:steps[s + 1]; the sequences of a step are a prefix of `order`.
        order [N]: sequences, longest first.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    chunks = [-(-lengths[i] // CHUNK) for i in order]
    offsets = [0]
    for step in range(chunks[0]):
        offsets.append(offsets[-1] + sum(count > step for count in chunks))
    # (step, sequence) of every row; only Python numbers decide shapes, so that this can be compiled
    rows = [(step, order[rank]) for step in range(chunks[0]) for rank in range(offsets[step + 1] - offsets[step])]
    starts = [0, *itertools.accumulate(lengths)]
    first = torch.tensor([starts[i] + step * CHUNK for step, i in rows], device=device)
    left = torch.tensor([lengths[i] - step * CHUNK for step, i in rows], device=device)
    slot = torch.arange(CHUNK, device=device)
    table = torch.where(slot < left[:, None], first[:, None] + slot, -1)
    return table, offsets, torch.tensor(order, device=device)


def _groups(steps: list[int], *tensors: torch.Tensor) -> list[tuple[int, int]]:
    """Ranges of steps that are prepared together: everything under autograd, else about GROUP_TOKENS tokens."""
    total = len(steps) - 1
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return [(0, total)]
    groups, first = [], 0
    for step in range(1, total + 1):
        if step == total or (steps[step + 1] - steps[first]) * CHUNK > GROUP_TOKENS:
            groups.append((first, step))
            first = step
    return groups


def _gather(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """[tokens, H, ...] -> [chunks, H, C, ...]; padding slots are zero, which leaves the state as it is."""
    blocks = x[table.clamp_min(0)]
    padding = (table < 0).view(*table.shape, *[1] * (x.dim() - 1))
    return blocks.masked_fill(padding, 0.0).transpose(1, 2)


def _prepare(q, k, v, g, beta):
    """Everything of a chunk that does not need its incoming state; inputs [n, H, C, K or V], beta [n, H, C]."""
    attn, kk, from_start, to_end = _decayed_products(q, k, g)
    start_decay = from_start.exp()
    rhs = torch.cat([k * start_decay, v], dim=-1) * beta[..., None]
    solved = torch.linalg.solve_triangular(kk * beta[..., None], rhs, upper=False, unitriangular=True)
    w, u = solved.split([k.shape[-1], v.shape[-1]], dim=-1)
    return q * start_decay, attn, w, u, k * to_end.exp(), start_decay[..., -1, :, None]


def _decayed_products(q, k, g):
    """The two triangular matrices of a chunk and the log-decays to its ends.

    Args:
        q, k, g: [n, H, C, K], C a power of two.

    Returns:
        attn [n, H, C, C] = tril(<q_i, k_j> e^(G_i - G_j)); kk, its strictly lower part with k_i for q_i;
        from_start [n, H, C, K] = G_i; to_end [n, H, C, K] = G_C - G_i.
    """
    n, heads, chunk, size = q.shape
    rows = torch.stack([q, k], dim=2)  # [n, H, 2, C, K]
    matrices = q.new_zeros(n, heads, 2, chunk, chunk)
    matrices[:, :, 0].diagonal(dim1=-2, dim2=-1).copy_((q * k).sum(-1))
    after_first = torch.zeros_like(g)  # sum of g over (first row of the block, i], for blocks of s rows
    to_last = torch.zeros_like(g)  # sum of g over (i, last row of the block]
    s = 1
    while s < chunk:
        pairs = (n, heads, chunk // (2 * s), 2, s, size)
        early_to_last, late_after_first = to_last.view(pairs)[..., 0, :, :], after_first.view(pairs)[..., 1, :, :]
        late_first_g = g.reshape(pairs)[..., 1, :1, :]
        reach = early_to_last + late_first_g  # from an early row to the first late row
        columns = k.reshape(pairs)[..., 0, :, :] * reach.exp()
        late = rows.view(n, heads, 2, *pairs[2:])[..., 1, :, :] * late_after_first.exp()[:, :, None]
        if s == 1:
            cross = (late * columns[:, :, None]).sum(-1, keepdim=True)
        else:
            cross = late @ columns[:, :, None].transpose(-1, -2)
        # [n, H, 2, 2s, 2s, pairs]: the blocks of this level on the diagonal of the matrices
        blocks = matrices.view(n, heads, 2, pairs[2], 2 * s, pairs[2], 2 * s).diagonal(dim1=3, dim2=5)
        blocks[..., s:, :s, :].copy_(cross.movedim(3, -1))
        early_total = after_first.view(pairs)[..., 0, -1:, :] + late_first_g  # (first early row, first late row]
        late_total = late_after_first[..., -1:, :] + late_first_g
        after_first = torch.stack(
            [after_first.view(pairs)[..., 0, :, :], late_after_first + early_total], dim=-3
        ).view_as(g)
        to_last = torch.stack([early_to_last + late_total, to_last.view(pairs)[..., 1, :, :]], dim=-3).view_as(g)
        s *= 2
    attn, kk = matrices.unbind(2)
    return attn, kk, after_first + g[..., :1, :], to_last


_OPERATOR = operators.Operator(
    "fused_kda",
    "float? lower_bound, float l2_eps, Tensor? cu_seqlens",  # the last one no graph has
    _forward,
    _backward,
    lambda tensors, options: composed_kda(*_arguments(tensors, options)),
    _fake,
    results=lambda outputs, tensors: tuple(outputs),
)
