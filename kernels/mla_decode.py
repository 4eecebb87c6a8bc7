"""Multi-head latent attention of a few new tokens over the latent cache, in the absorbed form (torch reference).

`kv_b_proj` is folded into the queries before and into the output after (Kimi K3 report; DeepSeek-V2, arXiv 2405.04434),
so that all heads attend to the one latent of a token, whose first R columns are its value as well:

    s_j = scale (<q, c_j> + <q_rope, k_rope_j>);   out = sum_j softmax(s)_j c_j

The keys of a decoding step are the whole context and its queries a few rows, so the latents' bytes are what it costs.
"""

import functools
from typing import NamedTuple

import torch

from . import dispatch

# New tokens of one call: a step, the draft of a speculative one, a turn's short addition to a long text.
MAX_TOKENS = 64
# The widest latent and rope part whose tiles fit the shared memory and the registers of one program.
MAX_RANK, MAX_RANK_FLOAT32, MAX_ROPE = 512, 128, 64
# Tokens of a page are a multiple of this where the kernels read pages: a tile of keys then lies in one.
PAGE_TILE = 64


class Pages(NamedTuple):
    """Where the latents of several sequences lie in one buffer [rows, R + P].

    Attributes:
        table: [B, pages of the longest] int32; page j of a sequence has the rows from `table[b, j] * size` on. Entries
            behind the last page of a sequence are not read.
        size: tokens of a page.
    """

    table: torch.Tensor
    size: int

    def gathered(self, latents: torch.Tensor) -> torch.Tensor:
        """[B, S, R + P], every sequence's latents one behind the other."""
        rows = self.table.long()[..., None] * self.size + torch.arange(self.size, device=latents.device)
        return latents[rows.flatten(1)]


def is_fused(query: torch.Tensor, latents: torch.Tensor, rope_dim: int, pages: Pages | None = None) -> bool:
    """Whether `mla_decode` runs as Triton kernels.

    Args:
        query: [B, H, T, size], of any size: its heads, tokens, dtype and device count.
        latents: [B, S, R + rope_dim], or [rows, R + rope_dim] in pages.
    """
    rank = latents.shape[-1] - rope_dim
    return (
        dispatch.triton_refusal(query, latents) is None  # first: a traced graph must not depend on the token count
        and 0 < query.shape[2] <= MAX_TOKENS
        and query.numel() > 0
        and query.dtype == latents.dtype
        and rank <= (MAX_RANK_FLOAT32 if query.dtype == torch.float32 else MAX_RANK)
        and rope_dim <= MAX_ROPE
        and (pages is None or pages.size % PAGE_TILE == 0)
        and not dispatch.needs_grad(query, latents)
    )


def mla_decode(
    query: torch.Tensor,
    query_rope: torch.Tensor,
    latents: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    pages: Pages | None = None,
) -> torch.Tensor:
    """Attend to the latents with absorbed queries.

    Args:
        query: [B, T, H, R], any strides that keep a head's columns side by side.
        query_rope: [B, T, H, P] the same, P may be 0.
        latents: [B, S, R + P], the new tokens' included.
        scale: of the scores (`qk_head_dim ** -0.5`, not a power of R + P).
        mask: [B or 1, 1, T or 1, S], True for a visible key, or a number to add to its score, of which the dtype's
            lowest hides it. Or [B, S], 0 for a hidden key, or None: beside these causality is understood, the last T
            keys being those of the new tokens.
        lengths: [B] or [] integers on the device, keys of each row that count; those behind are not read. None: S.
        pages: where the keys of each row lie in latents [rows, R + P]; S is then the room of the table.

    Returns:
        [B, T, H, R] in the dtype of the query; zeros for a query that sees no key. Scores, softmax and sums are
        float32; the Triton kernels round the softmax's numerators to the latents' dtype before they weigh them.
    """
    arguments = query, query_rope, latents, scale, mask, lengths, pages
    if is_fused(query.transpose(1, 2), latents, query_rope.shape[-1], pages) and not dispatch.needs_grad(query_rope):
        return _run(*arguments)
    return _composed(*arguments)


def absorbed_attention(
    query: torch.Tensor,
    latents: torch.Tensor,
    kv_b: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    pages: Pages | None = None,
) -> torch.Tensor | None:
    """The attention of a layer by `mla_decode`, or None where that does not run as Triton kernels.

    Args:
        query: [B, H, T, D + P], not yet absorbed.
        latents: [B, S, R + P], the new tokens' included.
        kv_b: [H, D + V, R], what makes keys and values of a latent.
        scale, mask, lengths, pages: as `mla_decode` takes them.

    Returns:
        [B, T, H, V].
    """
    (batch, heads, length, size), rank = query.shape, kv_b.shape[-1]
    rope = latents.shape[-1] - rank
    if not is_fused(query, latents, rope, pages) or dispatch.needs_grad(kv_b):
        return None
    w_uk, w_uv = kv_b[:, : size - rope], kv_b[:, size - rope :]
    query_nope, query_rope = query.split([size - rope, rope], dim=-1)
    # Per head, rows and tokens as the rows of one product: views throughout, no weight is copied.
    absorbed = torch.bmm(query_nope.transpose(0, 1).reshape(heads, batch * length, -1), w_uk)
    absorbed = absorbed.view(heads, batch, length, -1).permute(1, 2, 0, 3)
    out = _run(absorbed, query_rope.transpose(1, 2), latents, scale, mask, lengths, pages)
    out = torch.bmm(out.permute(2, 0, 1, 3).reshape(heads, batch * length, -1), w_uv.transpose(1, 2))
    return out.view(heads, batch, length, -1).permute(1, 2, 0, 3)


def _run(query, query_rope, latents, scale, mask, lengths, pages):
    arguments = query, query_rope, latents, scale, mask, lengths, pages
    out = dispatch.run_first(_kernels(*arguments), *arguments)
    return _composed(*arguments) if out is None else out


def _composed(query, query_rope, latents, scale, mask, lengths, pages=None):
    if pages is not None:
        latents = pages.gathered(latents)
    dtype = torch.promote_types(query.dtype, torch.float32)
    batch, tokens, _, rank = query.shape
    place = torch.arange(latents.shape[1], device=latents.device)
    ends = torch.as_tensor(len(place) if lengths is None else lengths, device=place.device).expand(batch)
    seen = (place < ends[:, None])[:, None]  # [B, 1 or T, S]
    if mask is None or mask.dim() == 2:
        new = torch.arange(tokens, device=place.device)
        seen = seen & (place <= ends[:, None, None] - tokens + new[:, None])
        mask = None if mask is None else mask.bool()[:, None, None]
    latents = latents.to(dtype).masked_fill(place[:, None] >= ends[:, None, None], 0.0)
    rows = torch.cat([query, query_rope], dim=-1).to(dtype).flatten(1, 2)
    scores = (rows @ latents.transpose(1, 2)).unflatten(1, (tokens, -1)) * scale  # [B, T, H, S]
    if mask is not None and mask.dtype == torch.bool:
        seen = seen & mask[:, 0]
    elif mask is not None:
        seen = seen & (mask[:, 0] > torch.finfo(mask.dtype).min)
        scores = scores + mask[:, 0, :, None].to(dtype)
    weights = scores.masked_fill(~seen[:, :, None], float("-inf")).softmax(-1).nan_to_num(0.0)
    return (weights.flatten(1, 2) @ latents[..., :rank]).unflatten(1, (tokens, -1)).to(query.dtype)


def _kernels(query, *rest):
    """The modules whose kernels take these, the fastest first."""
    from . import mla_decode_triton, triton_tools

    gluon = _gluon() if triton_tools.is_hopper(query.device) else None
    fits = gluon is not None and gluon.fits(query, *rest)
    return (gluon, mla_decode_triton) if fits else (mla_decode_triton,)


@functools.cache  # an import that fails is made anew every time
def _gluon():
    """The module for Hopper, or None."""

    def load():
        from . import mla_decode_gluon

        return mla_decode_gluon

    return dispatch.if_importable(load, "MLA decoding")
