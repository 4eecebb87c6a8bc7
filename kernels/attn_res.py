"""Attention over depth: the mix of finished block sums and the running partial sum (torch reference).

For sources v_1..v_n of one token (Attention Residuals, arXiv 2603.15031; Kimi K3 report p. 6), all in float32:

    r_i = rsqrt(mean(v_i^2) + eps);   s_i = r_i <w, v_i>, w = norm.weight * proj.weight;   out = sum_i softmax(s)_i v_i

The values are mixed un-normalised, there is no temperature. No [T, n, d] stack is made.
"""

from collections.abc import Sequence

import torch


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
    dtype = torch.promote_types(sources[-1].dtype, torch.float32)
    query = norm_weight.to(dtype) * proj_weight.to(dtype).view(-1)
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
