"""Routed experts over ragged groups of tokens, for floating-point and for packed MXFP4 weights, in Triton.

Pairs of token and expert are sorted by expert on the device; nothing waits for the host. A program takes up to BM pairs
of one expert against a block of its rows, weights on the left. The first kernel makes gate and up together and applies
the activation, the second one multiplies by the routing weight; every pair has a row of its own in the result, so that
the sum over a token's experts has a fixed order.

Packed weights are read as words of 32 bits, 8 codes each. A product does not care about the order of its columns, so a
word is taken apart the way that costs least: codes j and j + 4 lie 16 bits apart, as the two halves of a register of
bfloat16 do. The activations are laid out in the order that this gives the columns, in blocks of 64 (`unpacked_order`).
"""

import functools

import torch

from . import triton_tools as tools

triton, tl = tools.triton, tools.tl
sigmoid, tanh = tools.sigmoid, tools.tanh


@triton.jit
def decode(code, scale, DT: tl.constexpr):
    """E2M1 codes (0 to 15) times E8M0 bytes, exact in the normal range of DT; 255 is NaN."""
    # 2^126: a code's exponent and mantissa bits, in the place of a float's, are the value times 2^-126.
    CODE_SCALE: tl.constexpr = 8.507059173023462e37
    if DT == tl.float32:
        bits = ((code & 7) << 22) | ((code & 8) << 28)
        power = tl.where(scale == 0, 1 << 22, tl.where(scale == 255, 0x7FC00000, scale << 23))
        value = bits.to(tl.float32, bitcast=True) * CODE_SCALE
        power = power.to(tl.float32, bitcast=True)
    else:
        bits = ((code & 7) << 6) | ((code & 8) << 12)
        power = tl.where(scale == 0, 1 << 6, tl.where(scale == 255, 0x7FC0, scale << 7))
        value = bits.to(tl.int16).to(DT, bitcast=True) * tl.full((), CODE_SCALE, DT)
        power = power.to(tl.int16).to(DT, bitcast=True)
    return value * power


@triton.jit
def powers(scale, DT: tl.constexpr, PTX: tl.constexpr):
    """What `decode_words` wants of E8M0 bytes: int32, with PTX the power of two as a bfloat16, twice."""
    scale = scale.to(tl.int32)
    if PTX and DT == tl.bfloat16:
        # The other bit makes 2^-127 of 0 and NaN of 255.
        return (scale * 0x00800080) | tl.where((scale == 0) | (scale == 255), 0x00400040, 0)
    return scale


@triton.jit
def decode_words(word, scale, DT: tl.constexpr, PTX: tl.constexpr):
    """The 8 codes of words [N, W] under `powers` [N, W]: codes 0, 4, 1, 5, 2, 6, 3, 7, each [N, W] of type DT."""
    if PTX and DT == tl.bfloat16:
        # As `decode`, on two codes at a time. One product moves a code's sign and its other bits, because logical
        # operations and shifts, at half the rate of the rest, are what limits these kernels. The products of bfloat16
        # are written as sums with -0, which sm_80 has.
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 m, h, c, z;
            mov.b32 c, 0x7e807e80;
            mov.b32 z, 0x80008000;
            and.b32 m, $8, 0x000f000f;
            mul.lo.u32 m, m, 0x1040;
            and.b32 m, m, 0x81c081c0;
            fma.rn.bf16x2 m, m, c, z;
            fma.rn.bf16x2 m, m, $9, z;
            mov.b32 {$0, $1}, m;
            and.b32 m, $8, 0x00f000f0;
            mul.lo.u32 m, m, 0x0104;
            and.b32 m, m, 0x81c081c0;
            fma.rn.bf16x2 m, m, c, z;
            fma.rn.bf16x2 m, m, $9, z;
            mov.b32 {$2, $3}, m;
            shr.u32 h, $8, 8;
            and.b32 m, h, 0x000f000f;
            mul.lo.u32 m, m, 0x1040;
            and.b32 m, m, 0x81c081c0;
            fma.rn.bf16x2 m, m, c, z;
            fma.rn.bf16x2 m, m, $9, z;
            mov.b32 {$4, $5}, m;
            and.b32 m, h, 0x00f000f0;
            mul.lo.u32 m, m, 0x0104;
            and.b32 m, m, 0x81c081c0;
            fma.rn.bf16x2 m, m, c, z;
            fma.rn.bf16x2 m, m, $9, z;
            mov.b32 {$6, $7}, m;
            }""",
            "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [word, scale], dtype=(tl.bfloat16,) * 8, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return (
            decode(word & 15, scale, DT), decode((word >> 16) & 15, scale, DT),
            decode((word >> 4) & 15, scale, DT), decode((word >> 20) & 15, scale, DT),
            decode((word >> 8) & 15, scale, DT), decode((word >> 24) & 15, scale, DT),
            decode((word >> 12) & 15, scale, DT), decode((word >> 28) & 15, scale, DT),
        )  # fmt: skip


@triton.jit
def load_words(words, rows, first, COLUMNS: tl.constexpr, BW: tl.constexpr):
    """Packed weights [N, BW] from word `first` on."""
    at = first + tl.arange(0, BW)
    return tl.load(words + rows[:, None] * (COLUMNS // 8) + at[None, :], mask=(at < COLUMNS // 8)[None, :], other=0)


@triton.jit
def load_scales(scales, rows, first, COLUMNS: tl.constexpr, BW: tl.constexpr):
    """Their scales [N, BW / 4]."""
    at = first // 4 + tl.arange(0, BW // 4)
    return tl.load(scales + rows[:, None] * (COLUMNS // 32) + at[None, :], mask=(at < COLUMNS // 32)[None, :], other=0)


@triton.jit
def unpack(word, scale, BN: tl.constexpr, BW: tl.constexpr, DT: tl.constexpr, PTX: tl.constexpr):
    """Weights [BN, 8 BW] of type DT of packed ones, their columns in the order of `unpacked_order`."""
    scale = tl.broadcast_to(powers(scale, DT, PTX)[:, :, None], (BN, BW // 4, 4))
    a0, b0, a1, b1, a2, b2, a3, b3 = decode_words(word, tl.reshape(scale, (BN, BW)), DT, PTX)
    low = tl.join(tl.join(a0, b0), tl.join(a1, b1))
    high = tl.join(tl.join(a2, b2), tl.join(a3, b3))
    both = tl.reshape(tl.join(low, high), (BN, BW // 8, 4, 2, 2, 2, 2))  # row, 8 words, lane, its word, half, number
    return tl.reshape(tl.permute(both, (0, 1, 6, 5, 3, 2, 4)), (BN, 8 * BW))


@triton.jit
def load_columns(x, real, c, WIDTH: tl.constexpr, DT: tl.constexpr):
    """Columns c of the activations at the `real` ones of the rows x [BM] of pointers, as [columns, BM]."""
    return tl.trans(tl.load(x[:, None] + c[None, :], mask=real[:, None] & (c < WIDTH)[None, :], other=0.0).to(DT))


@tools.jit(do_not_specialize=["pairs", "count"])
def plan_kernel(expert_ids, order, tiles, pairs, count, P: tl.constexpr, BM: tl.constexpr):
    """`plan` for few pairs in one program, by comparing every pair with every other."""
    p = tl.arange(0, P)
    inside = p < pairs
    own = tl.load(expert_ids + p, mask=inside, other=0).to(tl.int32)  # [P]
    place = tl.zeros((P,), tl.int32)  # in the sorted order
    before = tl.zeros((P,), tl.int32)  # pairs of the same expert before this one, and in all
    alike = tl.zeros((P,), tl.int32)
    for first in range(0, pairs, 16):
        q = first + tl.arange(0, 16)
        other = tl.load(expert_ids + q, mask=q < pairs, other=0).to(tl.int32)[None, :]
        real = (q < pairs)[None, :]
        same = real & (other == own[:, None])  # [P, 16]
        earlier = same & (q[None, :] < p[:, None])
        place += tl.sum((earlier | (real & (other < own[:, None]))).to(tl.int32), axis=1)  # [P]
        before += tl.sum(earlier.to(tl.int32), axis=1)
        alike += tl.sum(same.to(tl.int32), axis=1)
    tl.store(order + place, p, mask=inside)
    # In the sorted order, through the memory of the result: the pairs that open a tile, and where it ends.
    opens = tl.where(before % BM == 0, place + tl.minimum(BM, alike - before), 0)  # [P]
    tl.debug_barrier()
    tl.store(order + pairs + place, opens, mask=inside)
    tl.debug_barrier()
    end = tl.load(order + pairs + p, mask=inside, other=0)  # [P]
    tile = tl.cumsum((end > 0).to(tl.int32), axis=0) - 1
    expert = tl.load(expert_ids + tl.load(order + p, mask=inside, other=0))
    tl.store(tiles + tile, expert.to(tl.int32), mask=end > 0)
    tl.store(tiles + count + tile, p, mask=end > 0)
    tl.store(tiles + 2 * count + tile, end, mask=end > 0)
    used = tl.sum((end > 0).to(tl.int32), axis=0)
    for first in range(0, count, P):
        tl.store(tiles + first + p, -1, mask=(first + p >= used) & (first + p < count))


@tools.jit(do_not_specialize=["pairs"])
def rank_kernel(expert_ids, counts, ranks, pairs, P: tl.constexpr):
    """Pairs of every expert, and for every pair how many of its expert came before it, in no fixed order.

    What a tile makes of a pair does not depend on its place, so the result is the same in every order.
    """
    p = tl.program_id(0) * P + tl.arange(0, P)
    expert = tl.load(expert_ids + p, mask=p < pairs, other=0)
    tl.store(ranks + p, tl.atomic_add(counts + expert, 1, mask=p < pairs), mask=p < pairs)


@tools.jit(do_not_specialize=["count"])
def tiles_kernel(counts, tiles, count, EXPERTS: tl.constexpr, E: tl.constexpr, BM: tl.constexpr):
    """The tiles of all experts; `counts` become the place of every expert's first pair."""
    e = tl.arange(0, E)
    pairs = tl.load(counts + e, mask=e < EXPERTS, other=0)  # [E]
    own = (pairs + BM - 1) // BM
    first = tl.cumsum(pairs, axis=0) - pairs
    tile = tl.cumsum(own, axis=0) - own
    tl.debug_barrier()
    tl.store(counts + e, first, mask=e < EXPERTS)
    for nth in range(tl.max(own, axis=0)):
        here = nth < own
        tl.store(tiles + tile + nth, e, mask=here)
        tl.store(tiles + count + tile + nth, first + nth * BM, mask=here)
        tl.store(tiles + 2 * count + tile + nth, first + tl.minimum(nth * BM + BM, pairs), mask=here)
    used = tl.sum(own, axis=0)
    for start in range(used, count, E):
        tl.store(tiles + start + e, -1, mask=start + e < count)


@tools.jit(do_not_specialize=["pairs"], do_not_specialize_on_alignment=["order"])
def place_kernel(expert_ids, counts, ranks, order, pairs, P: tl.constexpr):
    p = tl.program_id(0) * P + tl.arange(0, P)
    expert = tl.load(expert_ids + p, mask=p < pairs, other=0)
    place = tl.load(counts + expert) + tl.load(ranks + p, mask=p < pairs, other=0)
    tl.store(order + place, p, mask=p < pairs)


@triton.jit
def expert_tile(tiles, count, blocks):
    """(expert or -1, block of rows of its weights, first and end of the tile's places in the sorted order)."""
    tile = tl.program_id(0) // blocks
    expert = tl.load(tiles + tile)
    first = tl.load(tiles + count + tile, mask=expert >= 0, other=0)
    return expert, tl.program_id(0) % blocks, first, tl.load(tiles + 2 * count + tile, mask=expert >= 0, other=0)


@triton.jit
def tile_rows(order, first, end, PART: tl.constexpr, BM: tl.constexpr):
    """(places [BM] of a tile's part, counted from `first`, their pairs, which are real).

    The others repeat the first and are not stored.
    """
    rows = PART * BM + tl.arange(0, BM)
    real = rows < end - first
    rows = tl.where(real, rows, 0)
    return rows, tl.load(order + first + rows), real


@triton.jit
def activation(gate, up, beta, linear_beta, SITU: tl.constexpr, CAPPED: tl.constexpr, PTX: tl.constexpr):
    share = sigmoid(gate, PTX)
    if SITU:
        gate = beta * tanh(gate / beta, PTX)
        if CAPPED:
            up = linear_beta * tanh(up / linear_beta, PTX)
    return gate * share * up


@triton.jit
def unpacked_order(x, BM: tl.constexpr, BN: tl.constexpr):
    """x [BM, BN] with its columns as `unpack` orders them, in blocks of 64.

    Codes j and j + 4 of a word become neighbours, and four lanes take turns of two words each.
    """
    x = tl.permute(tl.reshape(x, (BM, BN // 64, 4, 2, 2, 4)), (0, 1, 5, 3, 2, 4))  # lane, its word, half, number
    return tl.reshape(x, (BM, BN))


@tools.jit(do_not_specialize=["tokens"])
def order_kernel(x, ordered, tokens, D: tl.constexpr, X: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    row = tl.program_id(0) * BM + tl.arange(0, BM)[:, None].to(tl.int64)
    c = tl.program_id(1) * BN + tl.arange(0, BN)[None, :]
    value = tl.load(x + row * D + c, mask=(row < tokens) & (c < D), other=0.0)  # [BM, BN]
    tl.store(ordered + row * X + c, unpacked_order(value, BM, BN), mask=(row < tokens) & (c < X))


@triton.jit
def packed_product(
    x0, x1, x2, real0, real1, real2, weight, scale, rows,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr, PARTS: tl.constexpr, BN: tl.constexpr,
    BW: tl.constexpr, DT: tl.constexpr, PTX: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Rows [BN] of packed weights times the activations at x0, x1, x2 [BM], the first one alone if PARTS is 1."""
    total0 = tl.zeros((BN, BM), tl.float32)
    total1, total2 = total0, total0
    # Scales are too narrow for Triton's pipeline: the next ones are asked for a step ahead by hand.
    scales = load_scales(scale, rows, 0, COLUMNS, BW)
    for word in tl.range(0, COLUMNS // 8, BW, num_stages=STAGES):
        next_scales = load_scales(scale, rows, word + BW, COLUMNS, BW)
        weights = unpack(load_words(weight, rows, word, COLUMNS, BW), scales, BN, BW, DT, PTX)  # [BN, 8 BW]
        c = 8 * word + tl.arange(0, 8 * BW)
        total0 = tl.dot(weights, load_columns(x0, real0, c, WIDTH, DT), total0, input_precision="ieee")  # [BN, BM]
        if PARTS == 3:
            total1 = tl.dot(weights, load_columns(x1, real1, c, WIDTH, DT), total1, input_precision="ieee")
            total2 = tl.dot(weights, load_columns(x2, real2, c, WIDTH, DT), total2, input_precision="ieee")
        scales = next_scales
    return total0, total1, total2


@triton.jit
def store_activated(
    h, rows, real, gate_up, first_n, beta, linear_beta, M: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, SITU: tl.constexpr, CAPPED: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """gate_up [BN, BM], half of it gate, at the rows [BM] of h [R, WIDTH], in the order of `unpacked_order`."""
    gate, up = tl.split(tl.permute(tl.reshape(gate_up, (2, BN // 2, BM)), (1, 2, 0)))  # [BN // 2, BM] each
    value = activation(gate, up, beta, linear_beta, SITU, CAPPED, PTX)
    c = first_n + tl.arange(0, BN // 2)
    value = tl.trans(tl.where((c < M)[:, None], value, 0.0).to(h.dtype.element_ty))  # [BM, BN // 2]
    place = (rows * WIDTH)[:, None] + c[None, :]
    tl.store(h + place, unpacked_order(value, BM, BN // 2), mask=real[:, None] & (c < WIDTH)[None, :])


@tools.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["order"])
def packed_gate_up_kernel(
    x, order, tiles, count, weight, scale, h, beta, linear_beta,
    D: tl.constexpr, M: tl.constexpr, X: tl.constexpr, WIDTH: tl.constexpr, TOP_K: tl.constexpr, BM: tl.constexpr,
    PARTS: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr, SITU: tl.constexpr, CAPPED: tl.constexpr,
    DT: tl.constexpr, PTX: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """h [R, WIDTH] = activation(gate, up) of the sorted pairs from x [T, X]; a tile has PARTS (1 or 3) of BM."""
    expert, n_block, first, end = expert_tile(tiles, count, tl.cdiv(WIDTH, BN // 2))
    if expert < 0:
        return
    n = tl.arange(0, BN)
    n = n // (BN // 2) * M + tl.minimum(n_block * (BN // 2) + n % (BN // 2), M - 1)
    weight += expert.to(tl.int64) * (2 * M * (D // 8))
    scale += expert.to(tl.int64) * (2 * M * (D // 32))
    h += first.to(tl.int64) * WIDTH
    rows, pairs, real = tile_rows(order, first, end, 0, BM)
    x0 = x + (pairs // TOP_K).to(tl.int64) * X
    x1, x2, real1, real2 = x0, x0, real, real
    if PARTS == 3:
        rows1, pairs1, real1 = tile_rows(order, first, end, 1, BM)
        rows2, pairs2, real2 = tile_rows(order, first, end, 2, BM)
        x1, x2 = x + (pairs1 // TOP_K).to(tl.int64) * X, x + (pairs2 // TOP_K).to(tl.int64) * X
    total, total1, total2 = packed_product(
        x0, x1, x2, real, real1, real2, weight, scale, n, D, X, BM, PARTS, BN, BW, DT, PTX, STAGES
    )
    c = n_block * (BN // 2)
    store_activated(h, rows, real, total, c, beta, linear_beta, M, WIDTH, BM, BN, SITU, CAPPED, PTX)
    if PARTS == 3:
        store_activated(h, rows1, real1, total1, c, beta, linear_beta, M, WIDTH, BM, BN, SITU, CAPPED, PTX)
        store_activated(h, rows2, real2, total2, c, beta, linear_beta, M, WIDTH, BM, BN, SITU, CAPPED, PTX)


@triton.jit
def store_weighted(y, routing, pairs, real, value, c, D: tl.constexpr):
    """value [BN, BM] times the routing weights, at the rows `pairs` [BM] of y [R, D] and its columns c [BN]."""
    value *= tl.load(routing + pairs).to(tl.float32)[None, :]
    place = (pairs.to(tl.int64) * D)[:, None] + c[None, :]
    tl.store(y + place, tl.trans(value), mask=real[:, None] & (c < D)[None, :])


@tools.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["order"])
def packed_down_kernel(
    h, order, tiles, count, weight, scale, routing, y,
    D: tl.constexpr, M: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr, PARTS: tl.constexpr, BN: tl.constexpr,
    BW: tl.constexpr, DT: tl.constexpr, PTX: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """y [R, D] float32 = routing weight times down(h), at the place of the pair before sorting."""
    expert, n_block, first, end = expert_tile(tiles, count, tl.cdiv(D, BN))
    if expert < 0:
        return
    c = n_block * BN + tl.arange(0, BN)
    n = tl.minimum(c, D - 1)
    weight += expert.to(tl.int64) * (D * (M // 8))
    scale += expert.to(tl.int64) * (D * (M // 32))
    h += first.to(tl.int64) * WIDTH
    rows, pairs, real = tile_rows(order, first, end, 0, BM)
    h0 = h + rows * WIDTH
    h1, h2, real1, real2 = h0, h0, real, real
    if PARTS == 3:
        rows1, pairs1, real1 = tile_rows(order, first, end, 1, BM)
        rows2, pairs2, real2 = tile_rows(order, first, end, 2, BM)
        h1, h2 = h + rows1 * WIDTH, h + rows2 * WIDTH
    total, total1, total2 = packed_product(
        h0, h1, h2, real, real1, real2, weight, scale, n, M, WIDTH, BM, PARTS, BN, BW, DT, PTX, STAGES
    )
    store_weighted(y, routing, pairs, real, total, c, D)
    if PARTS == 3:
        store_weighted(y, routing, pairs1, real1, total1, c, D)
        store_weighted(y, routing, pairs2, real2, total2, c, D)


@tools.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["order"])
def gate_up_kernel(
    x, order, tiles, count, weight, h, beta, linear_beta,
    D: tl.constexpr, M: tl.constexpr, TOP_K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SITU: tl.constexpr, CAPPED: tl.constexpr, DT: tl.constexpr, PTX: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """h [R, M] = activation(gate, up) of the sorted pairs, for floating-point weights."""
    expert, n_block, first, end = expert_tile(tiles, count, tl.cdiv(M, BN))
    if expert < 0:
        return
    c = n_block * BN + tl.arange(0, BN)
    n = tl.minimum(c, M - 1)
    rows, pairs, real = tile_rows(order, first, end, 0, BM)
    x += (pairs // TOP_K).to(tl.int64) * D
    weight += expert.to(tl.int64) * (2 * M * D)
    gate, up = tl.zeros((BN, BM), tl.float32), tl.zeros((BN, BM), tl.float32)
    for column in tl.range(0, D, BK, num_stages=STAGES):
        k = column + tl.arange(0, BK)
        inside = (k < D)[None, :]
        b_x = load_columns(x, real, k, D, DT)  # [BK, BM]
        w = tl.load(weight + n[:, None] * D + k[None, :], mask=inside, other=0.0).to(DT)  # [BN, BK]
        gate = tl.dot(w, b_x, gate, input_precision="ieee")  # [BN, BM]
        w = tl.load(weight + M * D + n[:, None] * D + k[None, :], mask=inside, other=0.0).to(DT)  # [BN, BK]
        up = tl.dot(w, b_x, up, input_precision="ieee")
    value = activation(gate, up, beta, linear_beta, SITU, CAPPED, PTX).to(h.dtype.element_ty)
    h += first.to(tl.int64) * M
    tl.store(h + (rows * M)[:, None] + c[None, :], tl.trans(value), mask=real[:, None] & (c < M)[None, :])


@tools.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["order"])
def down_kernel(
    h, order, tiles, count, weight, routing, y,
    D: tl.constexpr, M: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, DT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """As `packed_down_kernel`, for floating-point weights and h in the order of its columns."""
    expert, n_block, first, end = expert_tile(tiles, count, tl.cdiv(D, BN))
    if expert < 0:
        return
    c = n_block * BN + tl.arange(0, BN)
    n = tl.minimum(c, D - 1)
    rows, pairs, real = tile_rows(order, first, end, 0, BM)
    h += first.to(tl.int64) * M + rows * M
    weight += expert.to(tl.int64) * (D * M)
    total = tl.zeros((BN, BM), tl.float32)
    for column in tl.range(0, M, BK, num_stages=STAGES):
        k = column + tl.arange(0, BK)
        inside = (k < M)[None, :]
        b_h = load_columns(h, real, k, M, DT)  # [BK, BM]
        w = tl.load(weight + n[:, None] * M + k[None, :], mask=inside, other=0.0).to(DT)  # [BN, BK]
        total = tl.dot(w, b_h, total, input_precision="ieee")  # [BN, BM]
    store_weighted(y, routing, pairs, real, total, c, D)


# Pairs that one program sorts.
FEW_PAIRS = 512


@functools.cache
def tile_size(pairs: int, experts: int, packed: bool) -> tuple[int, int]:
    """Rows of a part and parts of a tile, for the average number of pairs an expert gets.

    Packed weights are decoded once for a tile, so that many pairs make it three parts of 64 rows.
    """
    rows = max(16, tools.next_power_of_2(tools.cdiv(pairs, experts)))
    return (64, 3) if packed and rows > 64 else (min(128, rows), 1)


def plan(expert_ids, experts: int, block_m: int):
    """Sort the pairs by expert and cut every expert's into tiles, without waiting for the device.

    Args:
        expert_ids: [P] expert of every pair.
        block_m: pairs a tile.

    Returns:
        order [>= P] pairs grouped by expert; tiles [3, n] expert (-1: no tile), first and end of its places in `order`.
    """
    pairs, device = len(expert_ids), expert_ids.device
    # The most that there can be, whatever the routing.
    count = pairs // block_m + min(experts, pairs)
    if pairs <= FEW_PAIRS:
        order = torch.empty(2 * pairs, device=device, dtype=torch.int32)  # the second half is the kernel's own
        tiles = torch.empty(3, count, device=device, dtype=torch.int32)
        block = tools.block(pairs)
        plan_kernel[(1,)](
            expert_ids=expert_ids, order=order, tiles=tiles, pairs=pairs, count=count, P=block, BM=block_m,
            num_warps=max(1, block // 64),
        )  # fmt: skip
        return order, tiles
    counts = torch.zeros(experts, device=device, dtype=torch.int32)
    ranks, order = torch.empty(2, pairs, device=device, dtype=torch.int32)
    tiles = torch.empty(3, count, device=device, dtype=torch.int32)
    grid = (tools.cdiv(pairs, 1024),)
    placing = {"expert_ids": expert_ids, "counts": counts, "ranks": ranks, "pairs": pairs, "P": 1024, "num_warps": 4}
    rank_kernel[grid](**placing)
    tiles_kernel[(1,)](
        counts=counts, tiles=tiles, count=count, EXPERTS=experts, E=tools.next_power_of_2(experts), BM=block_m,
        num_warps=4,
    )  # fmt: skip
    place_kernel[grid](order=order, **placing)
    return order, tiles


def plan_experts(expert_ids, experts: int, block_m: int, elsewhere: bool):
    """`plan` of expert_ids [T, k], of which `elsewhere` those from `experts` on are another process's.

    Pairs of these lie last and are nobody's tiles; their rows of the result stay 0.
    """
    ids = expert_ids.flatten()
    if not elsewhere:
        return plan(ids, experts, block_m)
    order, tiles = plan(ids.clamp_max(experts), experts + 1, block_m)
    tiles[0].masked_fill_(tiles[0] == experts, -1)
    return order, tiles


def in_unpacked_order(x):
    """x [T, D] with its columns as `unpack` orders them, and zeros up to a multiple of 64."""
    tokens, size = x.shape
    ordered = torch.empty(tokens, tools.cdiv(size, 64) * 64, device=x.device, dtype=x.dtype)
    grid = (tools.cdiv(tokens, 16), tools.cdiv(size, 256))
    order_kernel[grid](
        x=x, ordered=ordered, tokens=tokens, D=size, X=ordered.shape[1], BM=16, BN=256, num_warps=4
    )  # fmt: skip
    return ordered


def run(x, expert_ids, expert_weights, gate_up, down, gate_up_scale, down_scale, beta, linear_beta, elsewhere):
    """As `experts.fused_experts`, whose arguments these are; `beta` None for SwiGLU."""
    (tokens, size), top_k = x.shape, expert_ids.shape[1]
    experts, width, packed = gate_up.shape[0], gate_up.shape[1] // 2, gate_up_scale is not None
    pairs = tokens * top_k
    block_m, parts = tile_size(pairs, experts, packed)
    order, tiles = plan_experts(expert_ids, experts, block_m * parts, elsewhere)
    gate_up, down = gate_up.contiguous(), down.contiguous()
    x, routing = x.contiguous(), expert_weights.contiguous()
    if packed:
        x = in_unpacked_order(x)
        gate_up, down = gate_up.view(torch.int32), down.view(torch.int32)
        gate_up_scale, down_scale = gate_up_scale.contiguous(), down_scale.contiguous()
    # Scales of packed weights span the range of bfloat16.
    operand = tl.float32 if x.dtype == torch.float32 else tl.bfloat16 if packed else operand_of(x.dtype)
    inner = tools.cdiv(width, 64) * 64 if packed else width
    h = torch.empty(pairs, inner, device=x.device, dtype=x.dtype)
    y = (torch.zeros if elsewhere else torch.empty)(pairs, size, device=x.device, dtype=torch.float32)
    count, shared = tiles.shape[1], tools.shared_bytes(x.device)
    activated = {
        "x": x, "beta": beta or 1.0, "linear_beta": linear_beta or 1.0, "TOP_K": top_k, "SITU": beta is not None,
        "CAPPED": linear_beta is not None, "PTX": tools.USE_PTX,
    }  # fmt: skip
    combined = {"routing": routing, "y": y}

    def product(kernel, rows: int, weight, **arguments):
        """`rows` of the weights of every expert times the activations of its pairs."""
        block_n, step, warps, stages = block_sizes(
            block_m, parts, packed, weight is down, x.dtype, weight.dtype, shared
        )
        arguments["BW" if packed else "BK"] = step
        kernel[(count * tools.cdiv(rows, block_n),)](
            h=h, order=order, tiles=tiles, count=count, weight=weight, **arguments,
            D=size, M=width, BM=block_m, BN=block_n, DT=operand, STAGES=stages, num_warps=warps,
        )  # fmt: skip

    if packed:
        tile = {"WIDTH": inner, "PARTS": parts}
        product(packed_gate_up_kernel, 2 * inner, gate_up, scale=gate_up_scale, X=x.shape[1], **activated, **tile)
        product(packed_down_kernel, size, down, scale=down_scale, **combined, PTX=tools.USE_PTX, **tile)
    else:
        product(gate_up_kernel, width, gate_up, **activated)
        product(down_kernel, size, down, **combined)
    return summed(y, top_k)


def summed(y, top_k: int):
    """[T, D]: every token's rows of y [T k, D], in the order of its experts."""
    return y if top_k == 1 else y.unflatten(0, (-1, top_k)).sum(1)


def operand_of(dtype: torch.dtype):
    return tl.float16 if dtype == torch.float16 else tl.bfloat16


@functools.cache
def block_sizes(
    block_m: int, parts: int, packed: bool, down: bool, dtype: torch.dtype, weight_dtype: torch.dtype, shared: int
) -> tuple[int, int, int, int]:
    """Rows of weights, columns (words of packed ones) a step, warps, and steps in flight (measured on an H200).

    Fewer steps in flight, then narrower ones, where a program has less than `shared` bytes of shared memory for them:
    on small GPUs, and where autocast brings half precision to float32 weights, which lie there as they are.
    """
    if dtype == torch.float32:
        return (128, 8, 4, 1) if packed else (32, 32, 4, 1)
    if packed:
        rows, columns, warps, stages = (128, 16, 8, 3) if parts == 3 else (128, 16, 4, 3)
    elif block_m == 128:
        # Two accumulators, or one of the same size: the larger a tile, the less is read again.
        rows, columns, warps, stages = (256 if down else 128), 64, 8, 4
    else:
        rows, columns, warps, stages = 64, 128, 4, 3

    def needed():
        weights = rows * columns * 4.25 if packed else (1 if down else 2) * rows * columns * weight_dtype.itemsize
        # Outside NVIDIA's products unpacked weights go through shared memory.
        unpacked = 0 if tools.USE_PTX or not packed else rows * columns * 16
        return max(1, stages - 1) * (parts * block_m * columns * (16 if packed else 2) + weights) + unpacked

    while needed() > shared and stages > 2:
        stages -= 1
    while needed() > shared:
        columns //= 2
    return rows, columns, warps, stages
