"""Kimi Delta Attention over a part of longer sequences, whose other parts lie elsewhere.

The state after a part is an affine function of the state before it, so a part is summed up by two matrices a head:

    S_end = Phi S_entry + S^            Phi [K, K], S^ [K, V]

Forward: Phi and S^ go to whoever holds the parts behind, the entry state comes back, and the outputs are those of the
exact entry state. Backward: the gradient of the entry state is dS_entry = Phi^T dS_end + (what the outputs of the part
give), so the parts behind send the latter, the gradient of the end state comes back, and all other gradients follow
from it. Phi needs no gradient of its own. Who sends what to whom is up to the `exchange` (`parallel/context.py`).
"""

import itertools
from typing import Any

import torch

from . import dispatch, kda


def part_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    parameters: kda.KDAParameters,
    cu_seqlens: torch.Tensor | None,
    exchange: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`kda.fused_kda` whose initial states come from `exchange`; differentiable, once, in every tensor.

    Args:
        exchange: an object with

            * `last`: for every row, the number of its last sequence; `lengths`: tokens of every sequence, as numbers;
            * `entry_states(transition [B, H, K, K], offset [B, H, K, V])` of the last sequence of every row, float32
              (float64 for float64) -> initial states [N, H, K, V] and what the next one needs;
            * `end_gradients(gradient of the initial states [N, H, K, V], kept)` -> gradient of the final states.

    Returns:
        o [B, T, H, V] in the dtype of v, and the final states [N, H, K, V].
    """
    inputs = kda.KDAInputs(q, k, v, g, beta)
    if dispatch.needs_grad(*inputs, *parameters.tensors):
        numbers = parameters.with_tensors(None, None)
        options, tensors = (numbers, cu_seqlens, exchange), (*inputs, *parameters.tensors)
        return dispatch.Differentiable.apply(_of_part, _gradients, options, *tensors)
    return _forward(inputs, parameters, cu_seqlens, exchange)[:2]


def _forward(inputs, parameters, cu_seqlens, exchange):
    """o, final states, initial states, and what `exchange.end_gradients` needs."""
    if kda.takes_kernels(inputs, parameters):
        arguments = inputs.by_token(), parameters, cu_seqlens, exchange
        results = dispatch.run_kernels(_forward_kernels, *arguments)
        if results is not None:
            return results
    entry, kept = exchange.entry_states(*_transitions(inputs, parameters, exchange))
    return *kda.composed_kda(inputs, parameters, entry, cu_seqlens), entry, kept


def _transitions(inputs, parameters, exchange):
    """Phi and S^ of the last sequence of every row: the chunked form, the columns of Phi beside those of the values.

    They start from the identity, and no values are added to them.
    """
    (_, _, heads, size), tokens = inputs.k.shape, [0, *itertools.accumulate(exchange.lengths)]
    found = []
    for last in exchange.last:
        part = kda.KDAInputs(*(x.flatten(0, 1)[None] for x in inputs)).part(tokens[last], tokens[last + 1])
        _, k, v, g, beta = (x.to(kda.working_dtype(x)) for x in part)
        k = kda.l2norm(k, parameters.l2_eps)
        columns = torch.cat([v.new_zeros(*v.shape[:-1], size), v], dim=-1)
        start = torch.eye(size, columns.shape[-1], dtype=v.dtype, device=v.device).expand(1, heads, -1, -1)
        gate = kda.kda_gate(g, parameters)
        found.append(kda.chunk_kda(k, k, columns, gate, beta.sigmoid(), initial_state=start)[1])
    return torch.cat(found).split([size, inputs.v.shape[-1]], dim=-1)


def _forward_kernels(inputs, parameters, cu_seqlens, exchange):
    from . import kda_chunk_triton as kernels

    states, v = [], inputs.v

    def entry_of(work, decay):
        def of(first, sequences, length):
            """Phi and S^ [sequences, H, K, K or V] of sequences of one length whose chunks begin with `first`."""
            segments = kernels.segments_of(sequences, v.shape[2], length, v.shape[-1], v.device)
            parts = kernels.transitions(work[first:], decay[first:], v.shape[-1], sequences, length, segments)
            transition, offset = (x[:, 0] for x in parts)
            for later, added in zip(parts[0].unbind(1)[1:], parts[1].unbind(1)[1:], strict=True):
                transition, offset = later @ transition, later @ offset + added
            return transition, offset

        if cu_seqlens is None:
            found = of(0, len(exchange.last), exchange.lengths[0])
        else:
            chunks = [0, *itertools.accumulate(-(-length // kernels.CHUNK) for length in exchange.lengths)]
            pairs = [of(chunks[last], 1, exchange.lengths[last]) for last in exchange.last]
            found = [torch.cat(parts) for parts in zip(*pairs, strict=True)]
        states.extend(exchange.entry_states(*found))
        return states[0]

    out, final, _ = kernels.forward(inputs, parameters, None, cu_seqlens, entry_of=entry_of)
    return out, final, *states


def _of_part(tensors, options, _):
    (*inputs, A_log, dt_bias), (numbers, *rest) = tensors, options
    out, final, *kept = _forward(kda.KDAInputs(*inputs), numbers.with_tensors(A_log, dt_bias), *rest)
    return (out, final), kept


def _gradients(tensors, kept, options, grads):
    (*inputs, A_log, dt_bias), (numbers, cu_seqlens, exchange), (d_out, d_final) = tensors, options, grads
    entry, of_exchange = kept

    def final_of(d_entry):
        found = exchange.end_gradients(d_entry, of_exchange)
        return (found if d_final is None else found + d_final).contiguous()

    parameters = numbers.with_tensors(A_log, dt_bias)
    *found, _ = kda.gradients(kda.KDAInputs(*inputs), parameters, entry, cu_seqlens, d_out, d_final, final_of)
    return found
