"""Attention of a few absorbed queries over the latent cache: split-KV Triton kernels (docs/kernels_mla.md).

All heads of a sequence read the same latents, so a tile of queries is BM pairs of token and head, and one tile of BN
latents serves them as keys and, in its first R columns, as values. The keys are cut into splits that run side by side;
each writes its own softmax and the logarithm of its sum, and a second kernel adds them in the order of the splits.
Lengths stay on the device and the launch depends on shapes alone, so it can be captured in a CUDA graph.
"""

import functools

import torch

from . import triton_tools as tools

triton, tl = tools.triton, tools.tl
exp2, in_base_2, reciprocal = tools.exp2, tools.in_base_2, tools.reciprocal


@triton.jit
def weigh(s, top, total, PTX: tl.constexpr):
    """Softmax numerators of the scores s [BM, BN], the maximum and sum with them, and the factor of earlier sums."""
    new_top = tl.maximum(top, tl.max(s, axis=1))
    # A query that has seen no key yet has -inf here, and -inf - -inf is NaN.
    base = tl.where(new_top == -float("inf"), 0.0, new_top)
    kept = exp2(top - base, PTX)
    weight = exp2(s - base[:, None], PTX)
    return weight, new_top, total * kept + tl.sum(weight, axis=1), kept


@tools.jit(do_not_specialize=["keys"])
def decode_kernel(
    query, query_rope, latents, mask, lengths, table, part, log2_sum,
    keys, T, query_strides, rope_strides, latents_strides, mask_strides, batch_n, batch_t, scale, lowest,
    H: tl.constexpr, R: tl.constexpr, P: tl.constexpr, BR: tl.constexpr, BP: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, ONE_MASK: tl.constexpr, CAUSAL: tl.constexpr, STAGES: tl.constexpr, BRANCH: tl.constexpr,
    PAGE: tl.constexpr, PRECISION: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """One split of the keys for BM pairs of token and head: the mean of latents, and log2 of the softmax's sum."""
    i_b, i_s, splits = tl.program_id(2).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    r = tl.program_id(0) * BM + tl.arange(0, BM)
    t, h = r // H, (r % H).to(tl.int64)  # a head of many rows of many tokens is far from the next
    batch_q, token_q, head_q = query_strides
    batch_p, token_p, head_p = rope_strides
    batch_l, key_l = latents_strides
    batch_m, token_m = mask_strides
    c, p, n = tl.arange(0, BR), tl.arange(0, BP), tl.arange(0, BN)
    in_r, in_c, in_p = (r < T * H)[:, None], (c < R)[None, :], (p < P)[None, :]
    q_at = query + i_b * batch_q + t * token_q + h * head_q
    b_q = tl.load(q_at[:, None] + c[None, :], mask=in_r & in_c, other=0.0)  # [BM, BR]
    if P > 0:
        p_at = query_rope + i_b * batch_p + t * token_p + h * head_p
        b_p = tl.load(p_at[:, None] + p[None, :], mask=in_r & in_p, other=0.0)  # [BM, BP]
    end = keys
    if lengths is not None:
        end = tl.minimum(tl.load(lengths + i_b * batch_n).to(tl.int32), keys)
    # Splits of whole tiles, as equal as this row's length allows.
    tiles = tl.cdiv(end, BN)
    first = (tiles * i_s // splits) * BN
    last = tl.minimum((tiles * (i_s + 1) // splits) * BN, end)
    latents += i_b * batch_l
    if mask is not None:
        mask += i_b * batch_m
    top = tl.full((BM,), -float("inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, BR), tl.float32)
    for start in tl.range(first, last, BN, num_stages=STAGES):
        inside = start + n < last
        row = tl.cast(start, tl.int64)
        if table is not None:  # whose pages hold whole tiles
            row = tl.load(table + i_b * batch_t + start // PAGE).to(tl.int64) * PAGE + start % PAGE
        tile = latents + row * key_l
        b_c = tl.load(tile + n[:, None] * key_l + c[None, :], mask=inside[:, None] & in_c, other=0.0)  # [BN, BR]
        s = tl.dot(b_q, tl.trans(b_c), input_precision=PRECISION) * in_base_2(scale)  # [BM, BN]
        if P > 0:
            b_k = tl.load(tile + n[:, None] * key_l + (R + p)[None, :], mask=inside[:, None] & in_p, other=0.0)
            s += tl.dot(b_p, tl.trans(b_k), input_precision=PRECISION) * in_base_2(scale)
        seen = inside[None, :]
        if CAUSAL:
            seen = seen & ((start + n)[None, :] <= (end - T + t)[:, None])
        if mask is not None:
            if ONE_MASK:
                b_m = tl.load(mask + start + n, mask=inside, other=0)[None, :]
            else:
                m_at = mask + t[:, None] * token_m + (start + n)[None, :]
                b_m = tl.load(m_at, mask=in_r & inside[None, :], other=0)
            if mask.dtype.element_ty.is_floating():
                bias = b_m.to(tl.float32)
                seen = seen & (bias > lowest)
                s += in_base_2(tl.where(seen, bias, 0.0))
            else:
                seen = seen & (b_m != 0)
        s = tl.where(seen, s, -float("inf"))
        # The branch is always taken. Where Triton sees one product feed another it gives a row of the first to one
        # warp, and on Hopper two warp groups then compute all of it twice; through a branch it does not look.
        if BRANCH:
            if start < last:
                b_w, top, total, kept = weigh(s, top, total, PTX)
            else:
                b_w, kept = s, top
        else:
            b_w, top, total, kept = weigh(s, top, total, PTX)  # [BM, BN], [BM] each
        acc = tl.dot(b_w.to(b_c.dtype), b_c, acc * kept[:, None], input_precision=PRECISION)  # [BM, BR]
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    at = (i_b * (T * H) + r) * splits + i_s
    tl.store(log2_sum + at, tl.where(empty, -float("inf"), top + tl.log2(total)), mask=r < T * H)
    tl.store(part + at[:, None] * R + c[None, :], acc * reciprocal(total, PTX)[:, None], mask=in_r & in_c)


@tools.jit(do_not_specialize=["splits"])
def merge_kernel(
    part, log2_sum, out, splits, rows, out_strides,
    H: tl.constexpr, R: tl.constexpr, BC: tl.constexpr, BS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """BC columns of one query: the splits' means weighted by their share of the softmax, zeros where none saw a key."""
    row, i_b = tl.program_id(0), tl.program_id(2).to(tl.int64)
    c, s = tl.program_id(1) * BC + tl.arange(0, BC), tl.arange(0, BS)
    at = (i_b * rows + row) * splits
    tops = tl.full((BS,), -float("inf"), tl.float32)
    for first in range(0, splits, BS):
        tops = tl.maximum(tops, tl.load(log2_sum + at + first + s, mask=first + s < splits, other=-float("inf")))
    top = tl.max(tops, axis=0)
    top = tl.where(top == -float("inf"), 0.0, top)
    totals = tl.zeros((BS,), tl.float32)
    acc = tl.zeros((BS, BC), tl.float32)
    for first in range(0, splits, BS):
        inside = first + s < splits
        share = exp2(tl.load(log2_sum + at + first + s, mask=inside, other=-float("inf")) - top, PTX)  # [BS]
        places = (at + first + s)[:, None] * R + c[None, :]  # [BS, BC]
        totals += share
        acc += share[:, None] * tl.load(part + places, mask=inside[:, None] & (c < R)[None, :], other=0.0)
    total = tl.sum(totals, axis=0)
    result = tl.sum(acc, axis=0) / tl.where(total == 0.0, 1.0, total)  # [BC]
    batch_o, token_o, head_o = out_strides
    out += i_b * batch_o + row // H * token_o + (row % H).to(tl.int64) * head_o
    tl.store(out + c, result.to(out.dtype.element_ty), mask=c < R)


def tiles(dtype: torch.dtype, width: int, shared_bytes: int) -> tuple[int, int, int, int]:
    """(queries of a program, keys of a tile, warps, stages of the pipeline) for latents of `width` columns.

    Args:
        shared_bytes: what a program may have. Hopper's products take 64 queries at least; they and two tiles of 64
            keys are 224 KB at K3's width, and eight warps hold the [64, 512] sums in half of their registers.
    """
    if dtype == torch.float32:
        return 16, 16, 4, 1
    if shared_bytes >= 225 * 1024 and width >= 256:
        return 64, 64, 8, 2
    if shared_bytes >= 192 * 1024:
        return 64, 32, 8 if width >= 256 else 4, 3
    return 16, 32, 4, 2 if shared_bytes > 64 * 1024 else 1


@functools.lru_cache(maxsize=1024)
def count_splits(programs: int, key_tiles: int, multiprocessors: int) -> int:
    """Splits of the keys for `programs` tiles of queries: the fewest rounds of the device, a tile's time being one.

    What a program does beside its tiles (its queries in, its sums out and merged) takes about as long as four.
    """
    most = max(1, min(key_tiles, 4 * multiprocessors // programs))
    return min(
        range(1, most + 1), key=lambda n: tools.cdiv(programs * n, multiprocessors) * (tools.cdiv(key_tiles, n) + 4)
    )


def run(query, query_rope, latents, scale, mask, lengths, pages=None):
    """As `mla_decode.mla_decode`, whose arguments these are."""
    batch, length, heads, rank = query.shape
    rope, device = query_rope.shape[-1], latents.device
    table, page = (None, 1) if pages is None else (pages.table.contiguous(), pages.size)
    keys = latents.shape[1] if table is None else table.shape[1] * page
    query, query_rope, latents = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, query_rope, latents))
    causal = length > 1 and (mask is None or mask.dim() == 2)
    if mask is not None:
        mask = (mask[:, None, None] if mask.dim() == 2 else mask).expand(batch, 1, length, keys)
        mask = mask if mask.stride(-1) == 1 else mask.contiguous()
    lengths = None if lengths is None else lengths.expand(batch)
    block_r = tools.block(rank)
    rows_a_tile, keys_a_tile, warps, stages = tiles(query.dtype, block_r, tools.shared_bytes(device))
    rows = length * heads
    row_tiles = tools.cdiv(rows, rows_a_tile)
    splits = count_splits(row_tiles * batch, tools.cdiv(keys, keys_a_tile), tools.multiprocessors(device))
    part = torch.empty(batch, rows, splits, rank, device=device, dtype=torch.float32)
    log2_sum = torch.empty(batch, rows, splits, device=device, dtype=torch.float32)
    decode_kernel[(row_tiles, splits, batch)](
        query=query, query_rope=query_rope, latents=latents, mask=mask, lengths=lengths, table=table, part=part,
        log2_sum=log2_sum, keys=keys, T=length, query_strides=query.stride()[:3], rope_strides=query_rope.stride()[:3],
        latents_strides=latents.stride()[:2] if table is None else (0, latents.stride(0)),
        mask_strides=(0, 0) if mask is None else mask.stride()[::2],
        batch_n=0 if lengths is None else lengths.stride(0), batch_t=0 if table is None else table.stride(0),
        scale=scale, lowest=torch.finfo(mask.dtype).min if mask is not None and mask.is_floating_point() else 0.0,
        H=heads, R=rank, P=rope, BR=block_r, BP=tools.block(rope), BM=rows_a_tile, BN=keys_a_tile,
        ONE_MASK=mask is None or length == 1 or mask.stride(2) == 0, CAUSAL=causal, STAGES=stages,
        BRANCH=rows_a_tile == 64, PAGE=page,
        PRECISION="tf32x3" if tools.USE_PTX and query.dtype == torch.float32 else "ieee",
        PTX=tools.USE_PTX, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return merged(part, log2_sum, query)


def merged(part, log2_sum, query):
    """[B, T, H, R] in the dtype of the query [B, T, H, R]: the splits' means [B, T H, splits, R], by their sums."""
    batch, length, heads, rank = query.shape
    splits = part.shape[2]
    # A head's rows together, as the matrix product that follows reads them.
    out = torch.empty(heads, batch, length, rank, device=query.device, dtype=query.dtype).permute(1, 2, 0, 3)
    at_once = min(64, tools.next_power_of_2(splits))
    columns = min(tools.block(rank), max(128, 8192 // at_once))  # few splits: fewer, larger programs
    merge_kernel[(length * heads, tools.cdiv(rank, columns), batch)](
        part=part, log2_sum=log2_sum, out=out, splits=splits, rows=length * heads, out_strides=out.stride()[:3],
        H=heads, R=rank, BC=columns, BS=at_once, PTX=tools.USE_PTX, num_warps=4,
    )  # fmt: skip
    return out
