"""Routed experts over ragged groups of tokens, for floating-point and for packed MXFP4 weights, in Triton.

Pairs of token and expert are sorted by expert on the device; nothing waits for the host. A program takes up to BM pairs
of one expert against a block of its rows, weights on the left. The first kernel makes gate and up together and applies
the activation, the second one multiplies by the routing weight; every pair has a row of its own in the result, so that
the sum over a token's experts has a fixed order.

Packed weights hold the even columns in the low nibbles and the odd ones in the high nibbles. A product does not care
about the order of its columns, so the two halves are multiplied apart, by activations stored even columns first.
"""

import torch

from . import triton_tools as tools

triton, tl = tools.triton, tools.tl
exp2, reciprocal, sigmoid = tools.exp2, tools.reciprocal, tools.sigmoid
LOG2E = tools.LOG2E
# 2^126: a code's exponent and mantissa bits, in the place of a float's, are the value times 2^-126.
CODE_SCALE = tl.constexpr(8.507059173023462e37)


@triton.jit
def decode(code, scale, DT: tl.constexpr):
    """E2M1 codes (0 to 15) times E8M0 bytes, exact in the normal range of DT; 255 is NaN."""
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
def load_packed(packed, scale, offsets, groups, mask, DT: tl.constexpr):
    """Even and odd columns of a tile of packed weights [BN, BK bytes]."""
    both = tl.load(packed + offsets, mask=mask, other=0).to(tl.int32)
    power = tl.load(scale + groups, mask=mask, other=127).to(tl.int32)
    return decode(both & 15, power, DT), decode(both >> 4, power, DT)


@triton.jit
def tanh(x, PTX: tl.constexpr):
    return 2.0 * sigmoid(2.0 * x, PTX) - 1.0


@triton.jit
def expert_tile(tile_expert, tile_row, offsets, order, BM: tl.constexpr, blocks):
    """(expert or -1, block of rows, positions in the sorted order [BM], their pairs, which of them are real)."""
    tile = tl.program_id(0) // blocks
    expert = tl.load(tile_expert + tile)
    rows = tl.load(tile_row + tile) + tl.arange(0, BM)
    real = rows < tl.load(offsets + tl.maximum(expert, 0) + 1)
    return expert, tl.program_id(0) % blocks, rows, tl.load(order + rows, mask=real, other=0), real


@triton.jit
def gate_up_kernel(
    x, order, offsets, tile_expert, tile_row, weight, scale, h, beta, linear_beta,
    D: tl.constexpr, M: tl.constexpr, TOP_K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PACKED: tl.constexpr, SITU: tl.constexpr, CAPPED: tl.constexpr, DT: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """h [R, M] = activation(gate, up) of the sorted pairs, even columns first when the next weights are packed."""
    expert, n_block, rows, pairs, real = expert_tile(tile_expert, tile_row, offsets, order, BM, tl.cdiv(M, BN))
    if expert < 0:
        return
    n, c = n_block * BN + tl.arange(0, BN), tl.arange(0, BK)
    in_n = n < M
    WIDE: tl.constexpr = D // 2 if PACKED else D  # elements of weight in a row
    x_rows = (pairs // TOP_K).to(tl.int64)[:, None] * D
    w_rows = expert.to(tl.int64) * (2 * M * WIDE) + n[:, None] * WIDE
    s_rows = expert.to(tl.int64) * (2 * M * (D // 32)) + n[:, None] * (D // 32)
    gate = tl.zeros((BN, BM), tl.float32)
    up = tl.zeros((BN, BM), tl.float32)
    for first in range(0, WIDE, BK):
        k = first + c
        in_x, in_w = real[:, None] & (k < WIDE)[None, :], in_n[:, None] & (k < WIDE)[None, :]
        even = tl.trans(tl.load(x + x_rows + k[None, :], mask=in_x, other=0.0).to(DT))
        if PACKED:
            odd = tl.trans(tl.load(x + x_rows + WIDE + k[None, :], mask=in_x, other=0.0).to(DT))
            places, groups = w_rows + k[None, :], s_rows + (k // 16)[None, :]
            low, high = load_packed(weight, scale, places, groups, in_w, DT)
            gate = tl.dot(low, even, gate, input_precision="ieee")
            gate = tl.dot(high, odd, gate, input_precision="ieee")
            low, high = load_packed(weight + M * WIDE, scale + M * (D // 32), places, groups, in_w, DT)
            up = tl.dot(low, even, up, input_precision="ieee")
            up = tl.dot(high, odd, up, input_precision="ieee")
        else:
            w = tl.load(weight + w_rows + k[None, :], mask=in_w, other=0.0).to(DT)
            gate = tl.dot(w, even, gate, input_precision="ieee")
            w = tl.load(weight + M * WIDE + w_rows + k[None, :], mask=in_w, other=0.0).to(DT)
            up = tl.dot(w, even, up, input_precision="ieee")
    share = sigmoid(gate, PTX)
    if SITU:
        gate = beta * tanh(gate / beta, PTX)
        if CAPPED:
            up = linear_beta * tanh(up / linear_beta, PTX)
    value = gate * share * up
    place = n // 2 + (n % 2) * (M // 2) if PACKED else n
    tl.store(h + rows.to(tl.int64)[None, :] * M + place[:, None], value.to(h.dtype.element_ty),
             mask=in_n[:, None] & real[None, :])  # fmt: skip


@triton.jit
def down_kernel(
    h, order, offsets, tile_expert, tile_row, weight, scale, routing, y,
    D: tl.constexpr, M: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PACKED: tl.constexpr,
    DT: tl.constexpr,
):  # fmt: skip
    """y [R, D] float32 = routing weight times down(h), at the place of the pair before sorting."""
    expert, n_block, rows, pairs, real = expert_tile(tile_expert, tile_row, offsets, order, BM, tl.cdiv(D, BN))
    if expert < 0:
        return
    n, c = n_block * BN + tl.arange(0, BN), tl.arange(0, BK)
    in_n = n < D
    WIDE: tl.constexpr = M // 2 if PACKED else M
    h_rows = rows.to(tl.int64)[:, None] * M
    w_rows = expert.to(tl.int64) * (D * WIDE) + n[:, None] * WIDE
    s_rows = expert.to(tl.int64) * (D * (M // 32)) + n[:, None] * (M // 32)
    total = tl.zeros((BN, BM), tl.float32)
    for first in range(0, WIDE, BK):
        k = first + c
        in_h, in_w = real[:, None] & (k < WIDE)[None, :], in_n[:, None] & (k < WIDE)[None, :]
        even = tl.trans(tl.load(h + h_rows + k[None, :], mask=in_h, other=0.0).to(DT))
        if PACKED:
            odd = tl.trans(tl.load(h + h_rows + WIDE + k[None, :], mask=in_h, other=0.0).to(DT))
            low, high = load_packed(weight, scale, w_rows + k[None, :], s_rows + (k // 16)[None, :], in_w, DT)
            total = tl.dot(low, even, total, input_precision="ieee")
            total = tl.dot(high, odd, total, input_precision="ieee")
        else:
            w = tl.load(weight + w_rows + k[None, :], mask=in_w, other=0.0).to(DT)
            total = tl.dot(w, even, total, input_precision="ieee")
    total *= tl.load(routing + pairs, mask=real, other=0.0).to(tl.float32)[None, :]
    tl.store(y + pairs.to(tl.int64)[None, :] * D + n[:, None], total, mask=in_n[:, None] & real[None, :])


def rows_a_tile(pairs: int, experts: int) -> int:
    """BM for the average number of pairs an expert gets, as if they were spread evenly."""
    return max(16, min(128, triton.next_power_of_2(triton.cdiv(pairs, experts))))


def run(x, expert_ids, expert_weights, gate_up, down, gate_up_scale, down_scale, beta, linear_beta):
    """As `experts.fused_experts`, whose arguments these are; `beta` None for SwiGLU."""
    (tokens, size), top_k = x.shape, expert_ids.shape[1]
    experts, width, packed = gate_up.shape[0], gate_up.shape[1] // 2, gate_up_scale is not None
    pairs = tokens * top_k
    flat = expert_ids.flatten()
    order = torch.argsort(flat, stable=True)
    offsets = torch.searchsorted(flat[order], torch.arange(experts + 1, device=x.device))
    block_m = rows_a_tile(pairs, experts)
    # Tiles of every expert; there are at most so many, whatever the routing.
    tiles = torch.nn.functional.pad(((offsets.diff() + block_m - 1) // block_m).cumsum(0), (1, 0))
    count = pairs // block_m + min(experts, pairs)
    ids = torch.arange(count, device=x.device)
    expert = torch.searchsorted(tiles, ids, right=True) - 1
    row = offsets[expert.clamp_max(experts - 1)] + (ids - tiles[expert]) * block_m
    expert = torch.where(ids < tiles[-1], expert, -1)
    if packed:
        x = x.unflatten(-1, (-1, 2)).transpose(1, 2).flatten(1)
    x = x.contiguous()
    operand = tl.float32 if x.dtype == torch.float32 else tl.bfloat16
    h = torch.empty(pairs, width, device=x.device, dtype=x.dtype)
    y = torch.empty(pairs, size, device=x.device, dtype=torch.float32)
    block_n, block_k = 64, 32 if packed else 64
    gate_up_kernel[(count * triton.cdiv(width, block_n),)](
        x, order, offsets, expert, row, gate_up, gate_up_scale, h, beta or 1.0, linear_beta or 1.0,
        size, width, top_k, block_m, block_n, block_k, packed, beta is not None, linear_beta is not None, operand,
        tools.USE_PTX, num_warps=4,
    )  # fmt: skip
    down_kernel[(count * triton.cdiv(size, block_n),)](
        h, order, offsets, expert, row, down, down_scale, expert_weights.contiguous(), y,
        size, width, block_m, block_n, block_k, packed, operand, num_warps=4,
    )  # fmt: skip
    return y.view(tokens, top_k, size).sum(1)
