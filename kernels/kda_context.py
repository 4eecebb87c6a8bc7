"""Kimi Delta Attention over a part of longer sequences, whose other parts lie elsewhere.

The state after a part is an affine function of the state before it, so a part is summed up by two matrices a head:

    S_end = Phi S_entry + S^            Phi [K, K], S^ [K, V]

Forward: Phi and S^ go to whoever holds the parts behind, the entry state comes back, and the outputs are those of the
exact entry state. Backward: the gradient of the entry state is dS_entry = Phi^T dS_end + (what the outputs of the part
give), so the parts behind send the latter, the gradient of the end state comes back, and all other gradients follow
from it. Phi needs no gradient of its own. Who sends what to whom is up to the `exchange` (`parallel/context.py`).
"""

import torch

from . import dispatch, kda


def part_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float | None,
    cu_seqlens: torch.Tensor | None,
    exchange,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`kda.fused_kda` whose initial states come from `exchange`; differentiable, once, in every tensor.

    Args:
        q, k, v, g, beta, A_log, dt_bias, lower_bound, cu_seqlens: as `fused_kda` takes them.
        exchange: an object with

            * `last`: for every row, the number of its last sequence; `lengths`: tokens of every sequence, as numbers;
            * `entry_states(transition [B, H, K, K], offset [B, H, K, V])` of the last sequence of every row, float32
              (float64 for float64) -> initial states [N, H, K, V] and what the next one needs;
            * `end_gradients(gradient of the initial states [N, H, K, V], kept)` -> gradient of the final states.

    Returns:
        o [B, T, H, V] in the dtype of v, and the final states [N, H, K, V].
    """
    arguments = (q, k, v, g, beta, A_log, dt_bias, lower_bound, cu_seqlens, exchange)
    if dispatch.needs_grad(*arguments[:7]):
        return _PartKDA.apply(*arguments)
    return _forward(*arguments)[:2]


def _forward(q, k, v, g, beta, A_log, dt_bias, lower_bound, cu_seqlens, exchange):
    """o, final states, initial states, and what `exchange.end_gradients` needs."""
    tensors = q, k, v, g, beta, A_log, dt_bias
    if dispatch.triton_refusal(*tensors, sizes=(q.shape[-1], v.shape[-1])) is None:
        rows = map(dispatch.token_rows, tensors[:5])
        results = dispatch.run_kernels(_forward_kernels, *rows, A_log, dt_bias, lower_bound, cu_seqlens, exchange)
        if results is not None:
            return results
    entry, kept = exchange.entry_states(*_transitions(*tensors, lower_bound, exchange))
    return *kda._composed(*tensors, lower_bound, entry, cu_seqlens), entry, kept


def _transitions(q, k, v, g, beta, A_log, dt_bias, lower_bound, exchange):
    """Phi and S^ of the last sequence of every row: the chunked form, the columns of Phi beside those of the values.

    They start from the identity, and no values are added to them.
    """
    (_, _, heads, size), tokens = k.shape, [0]
    for length in exchange.lengths:
        tokens.append(tokens[-1] + length)
    found = []
    for last in exchange.last:
        part = [x.flatten(0, 1)[None, tokens[last] : tokens[last + 1]] for x in (k, v, g, beta)]
        k_, v_, g_, beta_ = (x.to(kda.working_dtype(x)) for x in part)
        k_ = kda.l2norm(k_)
        columns = torch.cat([v_.new_zeros(*v_.shape[:-1], size), v_], dim=-1)
        start = torch.eye(size, v_.shape[-1] + size, dtype=v_.dtype, device=v_.device).expand(1, heads, -1, -1)
        gate = kda.kda_gate(g_, A_log, dt_bias, lower_bound)
        found.append(kda.chunk_kda(k_, k_, columns, gate, beta_.sigmoid(), initial_state=start)[1])
    return torch.cat(found).split([size, v.shape[-1]], dim=-1)


def _forward_kernels(q, k, v, g, beta, A_log, dt_bias, lower_bound, cu_seqlens, exchange):
    from . import kda_chunk_triton as kernels

    states = []

    def entry_of(work, decay):
        value_size, device = v.shape[-1], v.device

        def of(first, sequences, length):
            """Phi and S^ [sequences, H, K, K or V] of sequences of one length whose chunks begin with `first`."""
            segments = kernels.segments_of(sequences, v.shape[2], length, value_size, device)
            parts = kernels.transitions(work[first:], decay[first:], value_size, sequences, length, segments)
            transition, offset = (x[:, 0] for x in parts)
            for later, added in zip(parts[0].unbind(1)[1:], parts[1].unbind(1)[1:], strict=True):
                transition, offset = later @ transition, later @ offset + added
            return transition, offset

        if cu_seqlens is None:
            found = of(0, len(exchange.last), exchange.lengths[0])
        else:
            chunks = [0]
            for length in exchange.lengths:
                chunks.append(chunks[-1] + -(-length // kernels.CHUNK))
            pairs = [of(chunks[last], 1, exchange.lengths[last]) for last in exchange.last]
            found = [torch.cat(parts) for parts in zip(*pairs, strict=True)]
        states.extend(exchange.entry_states(*found))
        return states[0]

    arguments = (q, k, v, g, beta, A_log, dt_bias, lower_bound, q.shape[-1] ** -0.5, kda.L2_EPS, None, cu_seqlens)
    out, final, _ = kernels.forward(*arguments, entry_of=entry_of)
    return out, final, *states


class _PartKDA(torch.autograd.Function):
    """The backward pass recomputes from the inputs and the initial states."""

    @staticmethod
    def forward(ctx, q, k, v, g, beta, A_log, dt_bias, lower_bound, cu_seqlens, exchange):
        ctx.lower_bound, ctx.exchange = lower_bound, exchange
        ctx.set_materialize_grads(False)
        out, final, entry, kept = _forward(q, k, v, g, beta, A_log, dt_bias, lower_bound, cu_seqlens, exchange)
        ctx.save_for_backward(q, k, v, g, beta, A_log, dt_bias, entry, cu_seqlens, kept)
        return out, final

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_out, d_final):
        *tensors, entry, cu_seqlens, kept = ctx.saved_tensors
        q, v = tensors[0], tensors[2]
        d_out = torch.zeros(v.shape, dtype=v.dtype, device=v.device) if d_out is None else d_out.contiguous()
        d_final = None if d_final is None else d_final.contiguous()

        def final_of(d_entry):
            found = ctx.exchange.end_gradients(d_entry, kept)
            return (found if d_final is None else found + d_final).contiguous()

        grads = None
        if dispatch.triton_refusal(*tensors, sizes=(q.shape[-1], v.shape[-1])) is None:
            from . import kda_backward_triton

            options = ctx.lower_bound, q.shape[-1] ** -0.5, kda.L2_EPS, entry, cu_seqlens, d_out, d_final, final_of
            rows = map(dispatch.token_rows, tensors[:5])
            grads = dispatch.run_kernels(kda_backward_triton.backward, *rows, *tensors[5:], *options)
        if grads is None:
            grads = _composed_gradients(tensors, ctx.lower_bound, entry, cu_seqlens, d_out, d_final, final_of)
        return *grads[:7], None, None, None


def _composed_gradients(tensors, lower_bound, entry, cu_seqlens, d_out, d_final, final_of):
    leaves = [x.detach().requires_grad_() for x in (*tensors, entry)]
    with torch.enable_grad():
        outputs = kda._composed(*leaves[:7], lower_bound, leaves[7], cu_seqlens)
        seeds = d_out, torch.zeros_like(outputs[1]) if d_final is None else d_final
        d_entry = torch.autograd.grad(outputs, leaves[7], seeds, retain_graph=True)[0]
        return torch.autograd.grad(outputs, leaves[:7], (d_out, final_of(d_entry)))
