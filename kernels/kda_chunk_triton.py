"""Kimi Delta Attention over many tokens: Triton forward (docs/kernels_kda.md draws the data flow).

Two kernels. `prepare_kernel` handles chunks of 32 tokens independently: gate, norms, the decayed keys and queries, the
two triangular matrices, the inverse, and the WY vectors. `scan_kernel` carries the state through the chunks in
registers. The state is held transposed, S^T [V, K]: in every product of the scan it, or what was just computed from it,
is then the left operand, which the tensor cores read from registers, so that nothing goes through shared memory between
one chunk and the next.

Inside a chunk the pairwise decays 2^(G_i - G_j) are factored as `up_i * down_j`:

* Gate with a lower bound down to -5 (Kimi K3): one factoring for the chunk, offset half the largest possible span past
  its start. It spans 32 * 5 / ln 2 = 231 of the 253 binary orders of float32 and bfloat16.
* Any other gate: three factorings. Pairs in different tiles of 16 (then of 8) use the end of the earlier tile as the
  offset: both factors are at most 1. Pairs inside a tile of 8 use the first form, with the log2-decay of one token cut
  at -28.8: a factor below 2e-9 counts as 2e-9, less than the rounding of the product that it enters in float32.

No offset depends on a row after the ones it serves, so a later token cannot change a bit of an earlier result.
"""

import torch

from . import triton_tools as tools

triton, tl = tools.triton, tools.tl
exp2, in_base_2, reciprocal, sigmoid = tools.exp2, tools.in_base_2, tools.reciprocal, tools.sigmoid

CHUNK = 32
# Tokens below which folding the parts of a sequence costs more than the idle multiprocessors.
LONG = 32768
# What `prepare_kernel` leaves for a chunk of one head lies side by side in one workspace, in this order:
# w, q_start and k_end [C, K], u [V, C], attn [C, C]. Each kernel computes the offsets with `tile_size` and these names.
# log2 of the offset of the first factoring, and the largest decay of one token inside a tile of 8
OFFSET = tl.constexpr(115.0)
STEEPEST = tl.constexpr(-28.75)
LOWEST_BOUND = -5.0


@triton.jit
def tile_size(C: tl.constexpr, K: tl.constexpr, V: tl.constexpr):
    return 3 * C * K + C * V + C * C


@triton.jit
def locate(i, T, cu_seqlens, block_offsets, block_seq, C: tl.constexpr, VARLEN: tl.constexpr):
    """Chunk i -> its sequence (-1: there is no such chunk), first token, and the end of the sequence."""
    if VARLEN:
        n = tl.load(block_seq + i)
        start = tl.load(cu_seqlens + tl.maximum(n, 0)).to(tl.int64)
        end = tl.load(cu_seqlens + tl.maximum(n, 0) + 1).to(tl.int64)
        first = start + (i - tl.load(block_offsets + tl.maximum(n, 0))).to(tl.int64) * C
    else:
        blocks = tl.cdiv(T, C)
        n = i // blocks
        end = (n + 1).to(tl.int64) * T
        first = n.to(tl.int64) * T + (i % blocks).to(tl.int64) * C
    return n, first, end


@triton.jit
def sequence(n, T, cu_seqlens, block_offsets, C: tl.constexpr, VARLEN: tl.constexpr):
    """Sequence n -> its first token, its length, its first chunk."""
    if VARLEN:
        first = tl.load(cu_seqlens + n).to(tl.int64)
        length = (tl.load(cu_seqlens + n + 1).to(tl.int64) - first).to(tl.int32)
        return first, length, tl.load(block_offsets + n).to(tl.int64)
    return n.to(tl.int64) * T, T, n.to(tl.int64) * tl.cdiv(T, C)


@triton.jit
def columns_head_sequence(H, parts):
    """Of a program of a scan. One axis holds them all, because the others end at 65535."""
    pid = tl.program_id(0)
    return pid % parts, pid // parts % H, pid // (parts * H)


@triton.jit
def log2_decay(x, rate, bias, lower_bound, BOUNDED: tl.constexpr, PTX: tl.constexpr):
    """The gate: log2-decay of the logits x [C, K]; rate = exp(A_log), bias [K]."""
    if BOUNDED:
        slope = in_base_2(-rate)
        return in_base_2(lower_bound) * reciprocal(1.0 + exp2(x * slope + (bias * slope)[None, :], PTX), PTX)
    z = x + bias[None, :]
    softplus = tl.maximum(z, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(z)))
    return -in_base_2(rate) * softplus


@triton.jit
def sum_rows(x, pairs, DT: tl.constexpr):
    """y_i = sum of x_j over the pairs (i, j) [C, C]; x [C, K] float32, in half precision as two parts of 8 bits."""
    if DT == tl.float32:
        return tl.dot(tl.where(pairs, 1.0, 0.0), x, input_precision="ieee")
    ones = tl.where(pairs, 1.0, 0.0).to(DT)
    high = x.to(DT)
    return tl.dot(ones, (x - high.to(tl.float32)).to(DT), tl.dot(ones, high))


@triton.jit
def rest_of(x, rounded):
    """What is left of x after rounding, rounded alike: together they carry twice the digits."""
    return (x - rounded.to(tl.float32)).to(rounded.dtype)


@triton.jit
def shifted_exp2(x, DT: tl.constexpr, PTX: tl.constexpr):
    """2^(x + OFFSET); in float32 the sum is split, so that a small x keeps its digits."""
    if DT == tl.float32:
        whole = tl.floor(x)
        return tl.exp2(x - whole) * tl.exp2(whole + OFFSET)
    return exp2(x + OFFSET, PTX)


@triton.jit
def level_pairs(i, j, LEVEL: tl.constexpr, NARROW: tl.constexpr):
    """Which pairs [C, C] a factoring serves: all, or those inside 8 rows, across 8 in 16, and across 16 in 32."""
    if NARROW:
        return i >= j
    if LEVEL == 0:
        return (i // 8 == j // 8) & (i >= j)
    return (i // (8 * LEVEL) > j // (8 * LEVEL)) & (i // (16 * LEVEL) == j // (16 * LEVEL))


@triton.jit
def level_factors(g, i, j, LEVEL: tl.constexpr, NARROW: tl.constexpr, DT: tl.constexpr, PTX: tl.constexpr):
    """(up, down) [C, K] of a factoring; g [C, K] log2-decays."""
    if NARROW:
        up = shifted_exp2(sum_rows(g, i >= j, DT), DT, PTX)
        return up, reciprocal(up, PTX)
    if LEVEL == 0:
        up = shifted_exp2(sum_rows(tl.maximum(g, STEEPEST), (i // 8 == j // 8) & (i >= j), DT), DT, PTX)
        return up, reciprocal(up, PTX)
    same = i // (8 * LEVEL) == j // (8 * LEVEL)
    return exp2(sum_rows(g, same & (i >= j), DT), PTX), exp2(sum_rows(g, same & (i < j), DT), PTX)


@triton.jit
def unit_lower_inverse(lower, i, j, C: tl.constexpr, IT: tl.constexpr):
    """(Id + lower)^-1 for a strictly lower triangular [C, C].

    Substitution by blocks, which does not cancel where powers of `lower` would: with D the inverse of the diagonal
    blocks of s rows and Q the quadrants below them, the inverse of the blocks of 2s rows is D - D Q D.
    """
    inverse = tl.where(i == j, 1.0, 0.0) - tl.where(((i ^ j) == 1) & (i > j), lower, 0.0)
    for step in tl.static_range(1, 5):
        if 2**step < C:
            quadrant = tl.where(((i ^ j) & -(2**step)) == 2**step, lower, 0.0)
            rounded = inverse.to(IT)
            product = tl.dot(rounded, quadrant.to(IT), input_precision="ieee")
            inverse -= tl.dot(product.to(IT), rounded, input_precision="ieee")
    return inverse


@triton.jit
def load_rows(x, offsets, mask, eps):
    """Rows of x at `offsets` [C, K] in float32, and the factors [C, 1] that normalise them.

    Multiply by the factors last: Triton moves the rows into the layout of the products in whatever type they have
    before the first multiplication, and the narrow type of memory halves the traffic of shared memory.
    """
    rows = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    return rows, tl.rsqrt(tl.sum(rows * rows, axis=1) + eps)[:, None]


@tools.jit(do_not_specialize=["T"])
def prepare_kernel(
    q, k, v, g, beta, A_log, dt_bias, cu_seqlens, block_offsets, block_seq,
    work, decay_out, inverse_out, lower_out, residual,
    T, stride_q, stride_k, stride_v, stride_g, stride_beta, scale, lower_bound, eps,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, DT: tl.constexpr, IT: tl.constexpr,
    BOUNDED: tl.constexpr, NARROW: tl.constexpr, VARLEN: tl.constexpr, FOR_BACKWARD: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    i_h, i_c = tl.program_id(0) % H, tl.program_id(0) // H
    n, first, end = locate(i_c, T, cu_seqlens, block_offsets, block_seq, C, VARLEN)
    if n < 0:
        return
    left = tl.minimum(end - first, C).to(tl.int32)
    r, c_k, c_v = tl.arange(0, C), tl.arange(0, BK), tl.arange(0, BV)
    i, j = r[:, None], r[None, :]
    real, in_k, in_v = r < left, c_k < K, c_v < V
    mask_k = real[:, None] & in_k[None, :]
    q += first * stride_q + i_h * K
    k += first * stride_k + i_h * K
    v += first * stride_v + i_h * V
    g += first * stride_g + i_h * K
    chunk = i_c.to(tl.int64) * H + i_h
    work += chunk * tile_size(C, K, V)
    tile = i * K + c_k[None, :]
    in_tile = (i >= 0) & in_k[None, :]

    b_g = tl.load(g + i * stride_g + c_k[None, :], mask=mask_k, other=0.0).to(tl.float32)  # [C, BK]
    bias = tl.load(dt_bias + i_h * K + c_k, mask=in_k, other=0.0).to(tl.float32)  # [BK]
    rate = tl.exp(tl.load(A_log + i_h).to(tl.float32))
    b_g = tl.where(mask_k, log2_decay(b_g, rate, bias, lower_bound, BOUNDED, PTX), 0.0)
    total = tl.sum(b_g, axis=0)  # [BK]
    tl.store(decay_out + chunk * K + c_k, exp2(total, PTX), mask=in_k)
    b_beta = tl.load(beta + first * stride_beta + i_h + r * stride_beta, mask=real, other=0.0).to(tl.float32)
    b_beta = tl.where(real, sigmoid(b_beta, PTX), 0.0)  # [C]
    b_k, norm_k = load_rows(k, i * stride_k + c_k[None, :], mask_k, eps)  # [C, BK], [C, 1]
    if NARROW:
        up, down = level_factors(b_g, i, j, 0, True, DT, PTX)  # [C, BK] each
        k_up = (b_k * up * norm_k).to(DT)
        k_down = b_k * down * norm_k
        tl.store(work + 2 * C * K + tile, (k_down * shifted_exp2(total, DT, PTX)[None, :]).to(DT), mask=in_tile)
        columns = tl.trans(k_down.to(DT))  # [BK, C]
        lower = tl.where(i > j, tl.dot(k_up, columns, input_precision="ieee"), 0.0)  # [C, C]
        b_q, norm_q = load_rows(q, i * stride_q + c_k[None, :], mask_k, eps)
        q_up = (b_q * up * (norm_q * scale)).to(DT)
        attn = tl.where(i >= j, tl.dot(q_up, columns, input_precision="ieee"), 0.0)  # [C, C]
        back = tl.exp2(-OFFSET)
        k_start = k_up
        tl.store(work + C * K + tile, q_up * back.to(DT), mask=in_tile)
    else:
        b_q, norm_q = load_rows(q, i * stride_q + c_k[None, :], mask_k, eps)
        b_q *= norm_q * scale
        b_k *= norm_k
        lower = tl.zeros((C, C), tl.float32)
        attn = tl.zeros((C, C), tl.float32)
        for level in tl.static_range(3):
            up, down = level_factors(b_g, i, j, level, False, DT, PTX)
            pairs = level_pairs(i, j, level, False)
            columns = tl.trans((b_k * down).to(DT))  # [BK, C]
            lower += tl.where(pairs & (i > j), tl.dot((b_k * up).to(DT), columns, input_precision="ieee"), 0.0)
            attn += tl.where(pairs, tl.dot((b_q * up).to(DT), columns, input_precision="ieee"), 0.0)
        start = exp2(sum_rows(b_g, i >= j, DT), PTX)  # [C, BK]
        k_start = (b_k * start).to(DT)
        back = 1.0
        tl.store(work + C * K + tile, (b_q * start).to(DT), mask=in_tile)
        tl.store(work + 2 * C * K + tile, (b_k * exp2(sum_rows(b_g, i < j, DT), PTX)).to(DT), mask=in_tile)
    tl.store(work + 3 * C * K + C * V + i * C + j, attn.to(DT))

    lower *= b_beta[:, None]
    inverse = unit_lower_inverse(lower, i, j, C, IT)  # [C, C]
    if FOR_BACKWARD:
        square = chunk * (C * C) + i * C + j
        tl.store(inverse_out + square, inverse.to(DT))
        tl.store(lower_out + square, lower.to(DT))
    inverse *= b_beta[None, :]
    rounded = inverse.to(DT)
    # negated: the scan adds its product with the state
    w = tl.dot(rounded, k_start, input_precision="ieee")  # [C, BK]
    if FOR_BACKWARD and DT != tl.float32:
        w = tl.dot(rest_of(inverse, rounded), k_start, w)
    tl.store(work + tile, (w * -back).to(DT), mask=in_tile)
    b_v = tl.load(v + i * stride_v + c_v[None, :], mask=real[:, None] & in_v[None, :], other=0.0).to(DT)
    u = tl.dot(rounded, b_v, input_precision="ieee")  # [C, BV]
    column, in_column = c_v[None, :] * C + i, (i >= 0) & in_v[None, :]
    if FOR_BACKWARD and DT != tl.float32:
        u = tl.dot(rest_of(inverse, rounded), b_v, u)
        tl.store(residual + chunk * (C * V) + column, rest_of(u, u.to(DT)), mask=in_column)
    tl.store(work + 3 * C * K + column, u.to(DT), mask=in_column)


@tools.jit(do_not_specialize=["T"])
def transition_kernel(
    work, decay, transition, offset, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    DT: tl.constexpr, SEGMENTS: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """What a segment of STEPS chunks makes of the state it starts from: S -> transition S + offset.

    The columns of the offset [K, V] follow from the zero state, those of the transition [K, K] from the identity
    without values; a program has some columns of either.
    """
    i_v, i_h, i_s = columns_head_sequence(H, tl.cdiv(V, BV) + tl.cdiv(K, BV))
    n, segment = i_s // SEGMENTS, i_s % SEGMENTS
    blocks = tl.cdiv(T, C)
    steps = tl.minimum(STEPS, blocks - segment * STEPS)
    chunk = (n.to(tl.int64) * blocks + segment * STEPS) * H + i_h
    of_values = i_v < tl.cdiv(V, BV)
    first_column = tl.where(of_values, i_v, i_v - tl.cdiv(V, BV)) * BV
    c_k, c_v, r = tl.arange(0, BK), first_column + tl.arange(0, BV), tl.arange(0, C)
    in_k, in_c = c_k < K, r >= 0
    in_u = c_v < tl.where(of_values, V, 0)
    # -1 is no column
    state = tl.where(tl.where(of_values, -1, c_v)[:, None] == c_k[None, :], 1.0, 0.0)
    tile = r[:, None] * K + c_k[None, :]  # [C, BK]
    in_tile = in_c[:, None] & in_k[None, :]
    for _ in tl.range(0, steps, num_stages=STAGES):
        of_chunk = work + chunk * tile_size(C, K, V)
        b_w = tl.load(of_chunk + tile, mask=in_tile, other=0.0)  # [C, BK]
        b_k = tl.load(of_chunk + 2 * C * K + tile, mask=in_tile, other=0.0)  # [C, BK]
        b_u = tl.load(of_chunk + 3 * C * K + c_v[:, None] * C + r[None, :],
                      mask=in_u[:, None] & in_c[None, :], other=0.0)  # fmt: skip
        b_d = tl.load(decay + chunk * K + c_k, mask=in_k, other=0.0)  # [BK]
        b_u = tl.dot(state.to(DT), tl.trans(b_w), b_u.to(tl.float32), input_precision="ieee").to(DT)
        state = tl.dot(b_u, b_k, state * b_d[None, :], input_precision="ieee")  # [BV, BK]
        chunk += H
    of_segment = (i_s.to(tl.int64) * H + i_h) * K
    if of_values:
        mask = in_u[:, None] & in_k[None, :]
        tl.store(offset + of_segment * V + c_k[None, :] * V + c_v[:, None], state, mask=mask)
    else:
        mask = (c_v < K)[:, None] & in_k[None, :]
        tl.store(transition + of_segment * K + c_k[None, :] * K + c_v[:, None], state, mask=mask)


@tools.jit(do_not_specialize=["T", "segment_steps"])
def scan_kernel(
    work, decay, h0, o, ht, checkpoints, states, updated, residual, cu_seqlens, block_offsets,
    checkpoint_offsets, T, segment_steps,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, DT: tl.constexpr, VARLEN: tl.constexpr, HAS_H0: tl.constexpr, EVERY: tl.constexpr,
    SEGMENTS: tl.constexpr, FOR_BACKWARD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Outputs and final states; for the backward pass instead the state before every chunk, and U.

    For the backward pass in half precision every product takes its left operand as two parts, and `residual` holds what
    the rounding of u [V, C] left, then what that of U leaves: the gradients sum many rounding errors.
    """
    i_v, i_h, i_n = columns_head_sequence(H, tl.cdiv(V, BV))
    first, length, block = sequence(i_n // SEGMENTS, T, cu_seqlens, block_offsets, C, VARLEN)
    if SEGMENTS > 1:
        skipped = (i_n % SEGMENTS) * segment_steps
        first, block = first + skipped * C, block + skipped
        length = tl.minimum(length - skipped * C, segment_steps * C)
    c_k, c_v, r = tl.arange(0, BK), i_v * BV + tl.arange(0, BV), tl.arange(0, C)
    in_k, in_v, in_c = c_k < K, c_v < V, r >= 0
    state_tile = c_k[None, :] * V + c_v[:, None]  # [BV, BK]
    in_state = in_v[:, None] & in_k[None, :]
    of_head = (i_n.to(tl.int64) * H + i_h) * (K * V)
    state = tl.zeros((BV, BK), tl.float32)
    if HAS_H0:
        state += tl.load(h0 + of_head + state_tile, mask=in_state, other=0.0).to(tl.float32)
    chunk = block * H + i_h
    tile = r[:, None] * K + c_k[None, :]  # [C, BK]
    in_tile = in_c[:, None] & in_k[None, :]
    column = c_v[:, None] * C + r[None, :]  # [BV, C]
    in_column = in_v[:, None] & in_c[None, :]
    for step in tl.range(0, tl.cdiv(length, C), num_stages=STAGES):
        of_chunk = work + chunk * tile_size(C, K, V)
        b_w = tl.load(of_chunk + tile, mask=in_tile, other=0.0)  # [C, BK]
        b_k = tl.load(of_chunk + 2 * C * K + tile, mask=in_tile, other=0.0)  # [C, BK]
        b_u = tl.load(of_chunk + 3 * C * K + column, mask=in_column, other=0.0)  # [BV, C]
        b_d = tl.load(decay + chunk * K + c_k, mask=in_k, other=0.0)  # [BK]
        rounded = state.to(DT)  # [BV, BK]
        if FOR_BACKWARD:
            tl.store(states + chunk * (K * V) + c_v[:, None] * K + c_k[None, :], rounded, mask=in_state)
            exact = b_u.to(tl.float32)
            if DT != tl.float32:
                exact += tl.load(residual + chunk * (C * V) + column, mask=in_column, other=0.0).to(tl.float32)
                exact = tl.dot(rest_of(state, rounded), tl.trans(b_w), exact)
            exact = tl.dot(rounded, tl.trans(b_w), exact, input_precision="ieee")  # [BV, C]
            b_u = exact.to(DT)
            state *= b_d[None, :]
            if DT != tl.float32:
                rest = rest_of(exact, b_u)
                tl.store(residual + chunk * (C * V) + column, rest, mask=in_column)
                state = tl.dot(rest, b_k, state)
            tl.store(updated + chunk * (C * V) + column, b_u, mask=in_column)
            state = tl.dot(b_u, b_k, state, input_precision="ieee")  # [BV, BK]
        else:
            b_u = tl.dot(rounded, tl.trans(b_w), b_u.to(tl.float32), input_precision="ieee").to(DT)
            b_q = tl.load(of_chunk + C * K + tile, mask=in_tile, other=0.0)  # [C, BK]
            b_a = tl.load(of_chunk + 3 * C * K + C * V + r[:, None] * C + r[None, :])  # [C, C]
            b_o = tl.dot(rounded, tl.trans(b_q), input_precision="ieee")  # [BV, C]
            state = tl.dot(b_u, b_k, state * b_d[None, :], input_precision="ieee")  # [BV, BK]
            b_o = tl.dot(b_u, tl.trans(b_a), b_o, input_precision="ieee")
            token = step * C + r
            address = (first + token)[None, :] * (H * V) + (i_h * V + c_v)[:, None]  # [BV, C]
            tl.store(o + address, b_o.to(o.dtype.element_ty), mask=in_v[:, None] & (token < length)[None, :])
            if EVERY > 0:
                passed = (step + 1) * C
                if (passed % EVERY == 0) & (passed <= length):
                    index = tl.load(checkpoint_offsets + i_n).to(tl.int64) + passed // EVERY - 1
                    tl.store(checkpoints + (index * H + i_h) * (K * V) + state_tile, state, mask=in_state)
        chunk += H
    if not FOR_BACKWARD:
        tl.store(ht + of_head + state_tile, state.to(ht.dtype.element_ty), mask=in_state)


def constants(heads: int, key_size: int, value_size: int, dtype: torch.dtype) -> dict:
    """What every kernel of the chunked form is compiled for."""
    return {
        "H": heads, "K": key_size, "V": value_size, "BK": tools.block(key_size), "C": CHUNK,
        "DT": tools.operand_types(dtype)[0],
    }  # fmt: skip


def is_narrow(lower_bound: float | None) -> bool:
    """Whether one factoring of the decays holds a chunk (module docstring)."""
    return lower_bound is not None and lower_bound >= LOWEST_BOUND


class Blocks:
    """Where the chunks of every sequence lie: `count` rows of the workspace, of which no host value depends on lengths.

    Attributes:
        sequences, count: number of sequences, and an upper bound of the number of chunks.
        offsets: [N + 1] first chunk of every sequence, None without cu_seqlens.
        sequence: [count] sequence of every chunk, -1 past the last one; None without cu_seqlens.
    """

    def __init__(self, batch: int, length: int, cu_seqlens: torch.Tensor | None):
        if cu_seqlens is None:
            self.sequences, self.count = batch, batch * -(-length // CHUNK)
            self.offsets = self.sequence = None
            return
        self.sequences = len(cu_seqlens) - 1
        self.count = length // CHUNK + self.sequences
        self.offsets = torch.nn.functional.pad(((cu_seqlens.diff() + CHUNK - 1) // CHUNK).cumsum(0), (1, 0))
        rows = torch.arange(self.count, device=cu_seqlens.device)
        found = torch.searchsorted(self.offsets, rows, right=True) - 1
        self.sequence = torch.where(rows < self.offsets[-1], found, -1)


def prepare(inputs, parameters, cu_seqlens, blocks, for_backward):
    """-> workspace [chunks, H, tile], decays [chunks, H, K].

    For the backward pass also inverses and L [chunks, H, C, C], and in half precision what the rounding of u left
    [chunks, H, V, C].
    """
    q, k, v, g, beta = inputs
    (_, length, heads, key_size), value_size = q.shape, v.shape[-1]
    narrow = is_narrow(parameters.lower_bound)
    stored = torch.float32 if q.dtype == torch.float32 else torch.bfloat16
    size = CHUNK * (3 * key_size + value_size + CHUNK)
    work = torch.empty(blocks.count, heads, size, device=q.device, dtype=stored)
    decay = torch.empty(blocks.count, heads, key_size, device=q.device, dtype=torch.float32)
    inverse = lower = residual = None
    if for_backward:
        if stored == torch.bfloat16:
            residual = torch.empty(blocks.count, heads, value_size, CHUNK, device=q.device, dtype=stored)
        inverse, lower = torch.empty(2, blocks.count, heads, CHUNK, CHUNK, device=q.device, dtype=stored)
    prepare_kernel[(heads * blocks.count,)](
        q=q, k=k, v=v, g=g, beta=beta, **parameters.for_kernels(),
        cu_seqlens=cu_seqlens, block_offsets=blocks.offsets, block_seq=blocks.sequence,
        work=work, decay_out=decay, inverse_out=inverse, lower_out=lower, residual=residual, T=length,
        stride_q=q.stride(1), stride_k=k.stride(1), stride_v=v.stride(1), stride_g=g.stride(1),
        stride_beta=beta.stride(1), scale=key_size**-0.5,
        **constants(heads, key_size, value_size, q.dtype), BV=tools.block(value_size),
        IT=tools.operand_types(q.dtype)[1], NARROW=narrow, VARLEN=cu_seqlens is not None,
        FOR_BACKWARD=for_backward, PTX=tools.USE_PTX,
        # three factorings hold more than two warps have registers for
        num_warps=2 if key_size <= 128 and narrow else 4, num_stages=1,
    )  # fmt: skip
    return work, decay, inverse, lower, residual


def value_block(value_size: int, dtype: torch.dtype) -> int:
    """Columns of the state that one program of a scan holds: two programs share a multiprocessor."""
    return min(16 if dtype == torch.float32 else 64, tools.block(value_size))


def scan_stages(dtype: torch.dtype) -> int:
    """Chunks in flight: three take 91 KB of shared memory, more than the 64 KB that AMD's MI300 has."""
    return 1 if dtype == torch.float32 or torch.version.hip is not None else 3


def segments_of(sequences: int, heads: int, length: int, value_size: int, device: torch.device) -> int:
    """Into how many parts to cut every sequence so that the scan fills the device; 1 where that does not pay."""
    programs = sequences * heads * tools.cdiv(value_size, 64)
    room = 2 * tools.multiprocessors(device) // programs
    return room if room > 1 and tools.cdiv(length, CHUNK) * CHUNK >= LONG else 1


def transitions(work, decay, value_size, sequences, length, segments):
    """What every segment of sequences of one length makes of the state it starts from: S -> transition S + offset.

    Returns:
        transition [N, segments, H, K, K] and offset [N, segments, H, K, V], float32. Rounding up the steps of a segment
        can leave fewer segments than were asked for.
    """
    _, heads, key_size = decay.shape
    columns, chunks = value_block(value_size, work.dtype), tools.cdiv(length, CHUNK)
    steps = tools.cdiv(chunks, segments)
    segments = tools.cdiv(chunks, steps)
    shape = (sequences, segments, heads, key_size)
    transition, offset = (torch.empty(*shape, x, device=work.device) for x in (key_size, value_size))
    parts = tools.cdiv(value_size, columns) + tools.cdiv(key_size, columns)
    transition_kernel[(parts * heads * sequences * segments,)](
        work=work, decay=decay, transition=transition, offset=offset, T=length,
        **constants(heads, key_size, value_size, work.dtype), BV=columns,
        SEGMENTS=segments, STEPS=steps, STAGES=scan_stages(work.dtype), num_warps=4,
    )  # fmt: skip
    return transition, offset


def _entry_states(work, decay, value_size, initial_state, blocks, length, segments):
    """State [N * segments, H, K, V] that every segment starts from, folded over the segments in float32."""
    transition, offset = transitions(work, decay, value_size, blocks.sequences, length, segments)
    entry = torch.empty_like(offset)
    state = torch.zeros_like(offset[:, 0]) if initial_state is None else initial_state.float()
    for segment in range(offset.shape[1]):
        entry[:, segment] = state
        state = offset[:, segment] + transition[:, segment] @ state
    return entry.flatten(0, 1)


def forward(
    inputs, parameters, initial_state, cu_seqlens, checkpoint_every: int = 0, segments: int | None = None, entry_of=None
):
    """As `kda.fused_kda`, whose arguments these are; also the checkpoints [n, H, K, V] (None without).

    `segments` overrides into how many parts a sequence is cut (tests). `entry_of` makes the initial state out of the
    workspace and the decays that `prepare` left (`kda_context`).
    """
    q, v = inputs.q, inputs.v
    (batch, length, heads, key_size), value_size = q.shape, v.shape[-1]
    blocks = Blocks(batch, length, cu_seqlens)
    work, decay, *_ = prepare(inputs, parameters, cu_seqlens, blocks, False)
    if entry_of is not None:
        initial_state = entry_of(work, decay)
    out = torch.empty(batch, length, heads, value_size, device=q.device, dtype=v.dtype)
    state_dtype = torch.float32 if initial_state is None else initial_state.dtype
    final = torch.empty(blocks.sequences, heads, key_size, value_size, device=q.device, dtype=state_dtype)
    checkpoints = checkpoint_offsets = None
    if checkpoint_every:
        counts = torch.full((batch,), length, device=q.device) if cu_seqlens is None else cu_seqlens.diff()
        checkpoint_offsets = torch.nn.functional.pad((counts // checkpoint_every).cumsum(0), (1, 0))
        total = int(checkpoint_offsets[-1])
        checkpoints = torch.empty(total, heads, key_size, value_size, device=q.device, dtype=state_dtype)
    if cu_seqlens is not None or checkpoint_every:
        segments = 1
    elif segments is None:
        segments = segments_of(batch, heads, length, value_size, q.device)
    entry, last, steps = initial_state, final, tools.cdiv(length, CHUNK)
    if segments > 1:
        entry = _entry_states(work, decay, value_size, initial_state, blocks, length, segments)
        steps, segments = tools.cdiv(steps, segments), entry.shape[0] // batch
        last = torch.empty_like(entry)
    columns = value_block(value_size, q.dtype)
    scan_kernel[(tools.cdiv(value_size, columns) * heads * blocks.sequences * segments,)](
        work=work, decay=decay, h0=entry, o=out, ht=last, checkpoints=checkpoints,
        states=None, updated=None, residual=None, cu_seqlens=cu_seqlens, block_offsets=blocks.offsets,
        checkpoint_offsets=checkpoint_offsets, T=length, segment_steps=steps,
        **constants(heads, key_size, value_size, q.dtype), BV=columns, VARLEN=cu_seqlens is not None,
        HAS_H0=entry is not None, EVERY=checkpoint_every, SEGMENTS=segments, FOR_BACKWARD=False,
        STAGES=scan_stages(q.dtype), num_warps=4,
    )  # fmt: skip
    if segments > 1:
        final.copy_(last.view(batch, segments, *final.shape[1:])[:, -1])
    return out, final, checkpoints
