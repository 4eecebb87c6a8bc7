"""One or a few tokens of a KDA layer, from its projections to the gated norm, against a state (torch reference).

This is the whole of a decode step between the projections: short convolution, SiLU, L2 norms, gate, recurrence and
gated RMSNorm (Kimi K3 report, p. 4-5). Several tokens at once verify a draft: the state passed in is left as it is
unless `in_place`, so that an accepted prefix is committed by running its tokens once more.
"""

import torch

from . import dispatch, kda, norms, short_conv

# More tokens than this fill the chunked kernels better than one program a head.
MAX_TOKENS = 16


def advance(
    projected: tuple[torch.Tensor, ...],
    logits: tuple[torch.Tensor, torch.Tensor],
    conv_weights: tuple[torch.Tensor, ...],
    parameters: kda.KDAParameters,
    tails: tuple[torch.Tensor, ...] | None,
    state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Tails and states after the tokens of N sequences, without outputs.

    Args:
        projected: query, key and value before the convolution, [N, T, H * K or V], or [1, n, ...] when packed.
        logits: of the decay [N, T, H * K] and of beta [N, T, H], packed alike.
        conv_weights, parameters: as `kda_step` takes them.
        tails, state: before the tokens, [N, W - 1, H * K or V] and [N, H, K, V]; None for zeros.
        cu_seqlens: [N + 1] offsets of packed sequences, or None.
    """
    convolved, new_tails = short_conv.short_convs(projected, conv_weights, tails, cu_seqlens)
    assert new_tails is not None  # kept, unless the call says otherwise
    _, k, v = (x.unflatten(-1, (len(parameters.A_log), -1)) for x in convolved)
    decay, beta = logits
    return new_tails, kda.fused_kda(k, k, v, decay.view_as(k), beta, parameters, state, cu_seqlens)[1]


def kda_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    gate: torch.Tensor,
    tails: tuple[torch.Tensor, ...],
    conv_weights: tuple[torch.Tensor, ...],
    parameters: kda.KDAParameters,
    norm_weight: torch.Tensor,
    state: torch.Tensor,
    norm_eps: float,
    in_place: bool = False,
    slots: torch.Tensor | None = None,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], torch.Tensor]:
    """
    Args:
        q, k, g: [B, T, H * K] projections: query and key before the convolution, decay logits.
        v, gate: [B, T, H * V] projections: value before the convolution, logits of the output gate.
        beta: [B, T, H] logits.
        tails: the last W - 1 inputs of the three convolutions, [B, W - 1, H * K or V].
        conv_weights: [H * K or V, 1, W] each.
        norm_weight: [V].
        state: [B, H, K, V] float32 or bfloat16.
        in_place: write the new state and tails into `state` and `tails`.
        slots: [B] int64, the rows of `tails` and `state` that the sequences have; they are then written in place, and
            may be rows of buffers for more sequences than run. A row may be named twice, if nobody reads it.

    Returns:
        out [B, T, H * V] in the dtype of q, the new tails, the new state in the dtype of `state`.
    """
    inputs = (q, k, v, g, beta, gate)
    tensors = (*inputs, *tails, *conv_weights, *parameters.tensors, norm_weight, state)
    refused = dispatch.needs_grad(*tensors) or dispatch.triton_refusal(*tensors, sizes=state.shape[2:])
    if not refused and all(x.stride(-1) == 1 for x in inputs):
        from . import kda_step_triton

        rest = tails, conv_weights, parameters, norm_weight, state, norm_eps, in_place, slots
        results = dispatch.run_kernels(kda_step_triton.step, *inputs, *rest)
        if results is not None:
            return results
    buffers = *tails, state
    if slots is not None:
        tails, state = tuple(tail.index_select(0, slots) for tail in tails), state.index_select(0, slots)
    convolved, new_tails = short_conv.short_convs((q, k, v), conv_weights, tails)
    assert new_tails is not None
    heads = (*q.shape[:2], state.shape[1], -1)
    q, k, v = (x.view(heads) for x in convolved)
    out, new_state = kda.fused_kda(q, k, v, g.view(heads), beta, parameters, initial_state=state)
    out = norms.gated_rms_norm(out, gate.view(heads), norm_weight, norm_eps).flatten(2)
    if in_place or slots is not None:
        for old, new in zip(buffers, (*new_tails, new_state), strict=True):
            old.copy_(new) if slots is None else old.index_copy_(0, slots, new)
        return out, buffers[:3], buffers[3]
    return out, new_tails, new_state
