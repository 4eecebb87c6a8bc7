"""Attention over depth: the mix of finished block sums and the running partial sum (torch reference).

For sources v_1..v_n of one token (Attention Residuals, arXiv 2603.15031; Kimi K3 report p. 6), all in float32:

    r_i = rsqrt(mean(v_i^2) + eps);   s_i = r_i <w, v_i>, w = norm.weight * proj.weight;   out = sum_i softmax(s)_i v_i

The values are mixed un-normalised, there is no temperature. A [T, n, d] stack is made of few tokens only, for which the
number of operators is what counts.
"""

from collections.abc import Callable, Sequence

import torch

from . import dispatch, norms, operators

# The widest row that one program of the Triton kernels holds.
MAX_WIDTH = 16384
# Values of a source up to which the torch form stacks the sources, a third of the operators.
MAX_STACKED = 2**16


def attn_res_mix(
    sources: Sequence[torch.Tensor], norm_weight: torch.Tensor, proj_weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Mix the sources of every token.

    Args:
        sources: n tensors [..., d] of one dtype; their order does not matter.
        norm_weight: [d].
        proj_weight: [1, d], the pseudo-query.
        eps: of the RMS norm inside the scores.

    Returns:
        [..., d] in the dtype of the last source (one rounding at the end).
    """
    return _mix(sources, norm_weight, proj_weight, eps, None, 0.0)[0]


def attn_res_mix_norm(
    sources: Sequence[torch.Tensor],
    norm_weight: torch.Tensor,
    proj_weight: torch.Tensor,
    eps: float,
    out_weight: torch.Tensor | None,
    out_eps: float,
    out_norm: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The mix, and the RMS norm that follows it, in one kernel where there is one.

    Args:
        sources, norm_weight, proj_weight, eps: as `attn_res_mix` takes them.
        out_weight, out_eps: of the norm, as `norms.rms_norm` takes them; no weight where `out_norm` must be called.
        out_norm: makes the norm of a mix that no kernel normed; None: `norms.rms_norm`.
    """
    mixed, normed = _mix(sources, norm_weight, proj_weight, eps, out_weight, out_eps)
    if normed is not None:
        return mixed, normed
    if out_norm is not None:
        return mixed, out_norm(mixed)
    assert out_weight is not None  # one of the two is given
    return mixed, norms.rms_norm(mixed, out_weight, out_eps)


def _mix(sources, norm_weight, proj_weight, eps, out_weight, out_eps):
    """The mix, and its norm where there is an `out_weight` and a kernel ran; else None."""
    same = all(source.dtype == sources[-1].dtype for source in sources)
    weights = [norm_weight] if out_weight is None else [norm_weight, out_weight]
    if same and sources[0].shape[-1] <= MAX_WIDTH and dispatch.operator_refusal(*sources, *weights) is None:
        results = _OPERATOR.run((norm_weight, proj_weight, out_weight, *sources), (eps, out_eps))
        if results is not None:
            return results
    return _composed(sources, norm_weight, proj_weight, eps), None


def _composed(sources, norm_weight, proj_weight, eps):
    dtype = torch.promote_types(sources[-1].dtype, torch.float32)
    query = norms.cast(norm_weight, dtype) * norms.cast(proj_weight, dtype).view(-1)
    if not torch.compiler.is_compiling() and sources[-1].numel() <= MAX_STACKED:
        shape = sources[-1].shape
        stack = torch.stack(tuple(sources), dim=-2).view(-1, len(sources), shape[-1])
        stack = norms.cast(stack, dtype)  # [tokens, n, d]
        scores = norms.inverse_rms(stack, eps) * (stack * query).sum(-1, keepdim=True)
        mixed = torch.bmm(scores.softmax(1).transpose(1, 2), stack)
        return norms.cast(mixed.view(shape), sources[-1].dtype)
    scores = []
    for source in sources:
        source = source.to(dtype)
        scores.append(torch.rsqrt(source.square().mean(-1) + eps) * (source * query).sum(-1))
    weights = torch.stack(scores, dim=-1).softmax(-1)
    out = None
    for source, weight in zip(sources, weights.unbind(-1), strict=True):
        source = source.to(dtype)
        out = source * weight[..., None] if out is None else torch.addcmul(out, source, weight[..., None])
    return out.to(sources[-1].dtype)


def _aligned(x):
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _forward(tensors, options, keep):
    from . import attn_res_triton

    (norm_weight, proj_weight, out_weight, *sources), (eps, out_eps) = tensors, options
    sources = [_aligned(source.contiguous()) for source in sources]
    mixed, out, *kept = attn_res_triton.forward(sources, norm_weight, proj_weight, eps, out_weight, out_eps, keep)
    return (mixed, out), (mixed, *kept)


def _backward(tensors, kept, options, grads):
    """The norm's result is not differentiable in its roundings, as nowhere in the model."""
    from . import attn_res_triton

    (*weights, out_weight), (eps, out_eps) = tensors[:3], options
    sources = [_aligned(source.contiguous()) for source in tensors[3:]]
    found = dispatch.run_kernels(attn_res_triton.backward, sources, *weights, out_weight, out_eps, *kept, *grads)
    if found is not None:
        d_sources, *d_weights = found
        return *d_weights, *d_sources

    def composed(norm_weight, proj_weight, out_weight, *sources):
        mixed = _composed(sources, norm_weight, proj_weight, eps)
        return mixed, None if out_weight is None else norms.rms_norm(mixed, out_weight, out_eps)

    return dispatch.recomputed(composed, tensors, grads)


def _reference(tensors, options):
    (norm_weight, proj_weight, out_weight, *sources), (eps, out_eps) = tensors, options
    mixed = _composed(sources, norm_weight, proj_weight, eps)
    return mixed, None if out_weight is None else norms.rms_norm(mixed, out_weight, out_eps)


def _fake(tensors, _):
    _, _, out_weight, *sources = tensors
    mixed = sources[-1].new_empty(sources[-1].shape)
    out = []
    if out_weight is not None:
        out = [mixed.new_empty(mixed.shape, dtype=torch.promote_types(mixed.dtype, out_weight.dtype))]
    scores = [mixed.new_empty(*mixed.shape[:-1], len(sources), dtype=torch.float32) for _ in range(2)]
    return [mixed, *out, *scores]


def _results(outputs, tensors):
    return outputs[0], None if tensors[2] is None else outputs[1]


_OPERATOR = operators.Operator(
    "attn_res_mix",
    "float eps, float out_eps",
    _forward,
    _backward,
    _reference,
    _fake,
    _results,
    kept=lambda outputs: (outputs[0], *outputs[-2:]),
)
