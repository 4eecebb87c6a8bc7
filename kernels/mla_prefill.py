"""Attention of new tokens to a long latent cache in blocks of keys: memory does not grow with the cache (torch).

The keys of a block are attended to alone, with the logarithm of their softmax's sum, and results are merged as an
online softmax does (Milakov & Gimelshein, arXiv 1805.02867; FlashAttention, arXiv 2205.14135):

    m = log(e^lse_a + e^lse_b);   out = e^(lse_a - m) out_a + e^(lse_b - m) out_b

That is exact up to rounding; sums are float32. The new tokens' own keys come first, causally; all keys before them are
visible, so no [T, S] mask is made.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

# Keys of a block at least; with more new tokens as many as those, so that a block costs what a chunk does.
MIN_BLOCK = 4096


def attend_in_blocks(
    query: torch.Tensor,
    latents: torch.Tensor,
    expand: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    scale: float,
) -> torch.Tensor:
    """Attend to all latents, of which the last T belong to the new tokens; without autograd.

    Args:
        query: [B, H, T, D].
        latents: [B, S, R + P], S at least T; no padding among them.
        expand: makes keys [B, H, n, D] and values [B, H, n, V] of latents [B, n, R + P].
        scale: of the scores.

    Returns:
        [B, T, H, V] in the dtype of the query.
    """
    tokens, past = query.shape[2], latents.shape[1] - query.shape[2]
    block = max(tokens, MIN_BLOCK)
    merged_out: tuple[torch.Tensor, torch.Tensor] | None = None
    for first in (past, *range(0, past, block)):
        end = latents.shape[1] if first == past else min(first + block, past)
        key, value = expand(latents[:, first:end])
        size = value.shape[-1]
        part, part_lse = _attention(query, key, value, first == past, scale)
        part = part[..., :size]
        if merged_out is None:
            merged_out = part.to(part_lse.dtype), part_lse
            continue
        out, lse = merged_out
        merged = torch.logaddexp(lse, part_lse)
        out *= (lse - merged).exp_()[..., None]
        out.addcmul_(part.to(out.dtype), (part_lse - merged).exp_()[..., None])
        merged_out = out, merged
    assert merged_out is not None  # the new tokens are a block
    return merged_out[0].transpose(1, 2).to(query.dtype)


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [B, H, T, at least V], log of the softmax's sum [B, H, T] in float32) of one block.

    The operators behind `scaled_dot_product_attention`, which does not return the sum. They want one head size, on a
    GPU a multiple of 8.
    """
    size = max(query.shape[-1], value.shape[-1])
    if query.device.type == "cpu":
        tensors = [_padded(x, size) for x in (query, key, value)]
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*tensors, 0.0, causal, scale=scale)
    if query.is_cuda:
        size = -(-size // 8) * 8
        tensors = [_padded(x, size) for x in (query, key, value)]
        backends = getattr(torch.backends, query.device.type)
        case = backends.SDPAParams(*tensors, None, 0.0, causal, False)
        if backends.can_use_flash_attention(case):
            return torch.ops.aten._scaled_dot_product_flash_attention(*tensors, 0.0, causal, scale=scale)[:2]
        if backends.can_use_efficient_attention(case):
            results = torch.ops.aten._scaled_dot_product_efficient_attention(
                *tensors, None, True, 0.0, causal, scale=scale
            )
            return results[0], results[1][..., : query.shape[2]]  # sums are padded to a multiple of 32
    return _composed(query, key, value, causal, scale)


def _composed(query, key, value, causal, scale):
    scores = (query @ key.transpose(-1, -2)).to(torch.promote_types(query.dtype, torch.float32)) * scale
    if causal:
        scores = scores.masked_fill(scores.new_ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    return scores.softmax(-1) @ value.to(scores.dtype), scores.logsumexp(-1)


def _padded(x: torch.Tensor, size: int) -> torch.Tensor:
    return x if x.shape[-1] == size else F.pad(x, (0, size - x.shape[-1]))
