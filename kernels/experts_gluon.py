"""MXFP4 experts with many rows each on Hopper: three groups of warps multiply, a fourth loads, in Gluon.

As `experts_triton`, whose plan, tiles and order of columns these are (docs/kernels_experts.md). What Triton does not
express is who waits for what: here a group of four warps decodes the weights of the next step while the tensor cores
work on those of the last one, and the groups do not wait for each other.

A program takes 192 rows of weights, 64 a group, against up to 192 pairs of one expert. Weights are read by the thread
that decodes and multiplies them; activations, in the order of the experts, arrive by bulk copies in a ring of stages.
"""

import torch

from . import experts_triton as portable
from . import gluon_tools as hopper
from . import triton_tools as tools

triton, tl = tools.triton, tools.tl
gl, gluon, mbarrier, described = hopper.gl, hopper.gluon, hopper.mbarrier, hopper.described
fence, load, mma, mma_wait, synchronize = hopper.fence, hopper.load, hopper.mma, hopper.mma_wait, hopper.synchronize
activation, unpacked_order = portable.activation, portable.unpacked_order
decode_words, powers = portable.decode_words, portable.powers

# Groups that multiply, rows of weights of each, columns of a step, stages of activations.
GROUPS, ROWS, STEP, STAGES = (gl.constexpr(n) for n in (3, 64, 64, 8))
# Pairs of a tile: in the wide part, and at most and at least in the narrow one.
WIDE, NARROW, NARROWEST = (gl.constexpr(n) for n in (128, 64, 32))
SHARED = hopper.SHARED
# A thread holds rows r and r + 8 of the 16 of its warp, and the 2 words of a step that it multiplies as one number.
WORDS = gl.constexpr(
    gl.DistributedLinearLayout([], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0]], [], [32, 4])
)
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE.value, 16]))
NARROW_SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, NARROW.value, 16]))
NARROWEST_SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, NARROWEST.value, 16]))
# What the assembler may not put off: a store, before the next barrier, that would happen if bits 0 to 4 of the numbers
# were not alike. They are 0 in every number that a code and a scale give, and 1 in NaN.
MADE = gl.constexpr(
    "{ .reg .b32 t, u; .reg .pred p; xor.b32 t, $16, $17;"
    + "".join(f" xor.b32 t, t, ${i};" for i in range(18, 32))
    + " shr.u32 u, t, 1; xor.b32 t, t, u; and.b32 t, t, 0x000f000f; setp.ne.u32 p, t, 0; mov.b32 u, 0;"
    + " @p st.shared.b32 [u], t;"
    + "".join(f" mov.b32 ${i}, ${i + 16};" for i in range(16))
    + " }"
)
REGISTERS = gl.constexpr(",".join(["=r"] * 16 + ["r"] * 16))
# h as it is stored.
PIECES = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))


@triton.jit
def lane_order(x, BM: tl.constexpr, BN: tl.constexpr):
    """x [BM, BN] with its columns, in blocks of 128, as lanes with four neighbouring words each multiply them.

    Codes j and j + 4 of a word become neighbours, then come its other codes, the four lanes, and their words.
    """
    x = tl.permute(tl.reshape(x, (BM, BN // 128, 4, 4, 2, 4)), (0, 1, 3, 2, 5, 4))  # word, lane, number, half
    return tl.reshape(x, (BM, BN))


@tools.jit(do_not_specialize=["pairs"])
def spread_kernel(
    x, order, spread, pairs,
    D: tl.constexpr, TOP_K: tl.constexpr, LANES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Rows of x [T, D] for the sorted pairs, their columns in the order of `lane_order` or of `unpacked_order`."""
    place = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.program_id(1) * BN + tl.arange(0, BN)[None, :]
    real = (place < pairs)[:, None] & (c < D)
    token = tl.load(order + place, mask=place < pairs, other=0).to(tl.int64) // TOP_K
    value = tl.load(x + token[:, None] * D + c, mask=real, other=0.0)  # [BM, BN]
    value = lane_order(value, BM, BN) if LANES else unpacked_order(value, BM, BN)
    tl.store(spread + place[:, None].to(tl.int64) * D + c, value, mask=real)


@gluon.jit
def tile_of(tiles, count, item, BLOCKS: gl.constexpr):
    """(expert, -1 behind the last tile; first and end of its places in the sorted order)."""
    tile = item // BLOCKS
    inside = tile < count
    at = tiles + gl.where(inside, tile, 0)
    expert = gl.load(at)
    return gl.where(inside, expert, -1), gl.load(at + count), gl.load(at + 2 * count)


@gluon.jit
def following(stage, phase, STAGES: gl.constexpr):
    stage += 1
    last = stage == STAGES
    return gl.where(last, 0, stage), gl.where(last, phase ^ 1, phase)


@gluon.jit
def load_group(activations, ring, tiles, count, COLUMNS: gl.constexpr, BLOCKS: gl.constexpr):
    """Copies of the activations of all tiles of this program, as far ahead as there are stages."""
    wide_x, narrow_x, narrowest_x = activations
    wide, narrow, full, empty = ring
    item, stage, phase = gl.program_id(0), gl.to_tensor(0), gl.to_tensor(1)
    expert, first, end = tile_of(tiles, count, item, BLOCKS)
    while expert >= 0:
        long = end - first > WIDE + NARROWEST
        for column in range(0, COLUMNS, STEP):
            mbarrier.wait(empty.index(stage), phase)
            arrived, part = full.index(stage), narrow.index(stage)
            mbarrier.expect(arrived, (WIDE + NARROW) * STEP * 2, pred=long)
            mbarrier.expect(arrived, (WIDE + NARROWEST) * STEP * 2, pred=long == 0)
            load(wide_x, [first, column], arrived, wide.index(stage))
            load(narrow_x, [first + WIDE, column], arrived, part, pred=long)
            load(narrowest_x, [first + WIDE, column], arrived, part.slice(0, NARROWEST, dim=0), pred=long == 0)
            stage, phase = following(stage, phase, STAGES)
        item += gl.num_programs(0)
        expert, first, end = tile_of(tiles, count, item, BLOCKS)


@gluon.jit
def packed_rows(expert, block, group, N: gl.constexpr, DOWN: gl.constexpr):
    """The upper one [32, 1] of the two rows of weights, counted over all experts, that a thread takes.

    Gate and up rows of the same column of h are 8 apart, and columns of h lie as `unpacked_order` has them; of down,
    neighbours are 8 apart: what is neighbours in the result, or one number of it, is then in one thread.
    """
    r = gl.arange(0, ROWS // 2, gl.SliceLayout(1, WORDS))
    if DOWN:
        return (expert * N + gl.minimum(block * (GROUPS * ROWS) + group * ROWS, N - ROWS) + 2 * r)[:, None]
    place = gl.minimum((block * GROUPS + group) * (ROWS // 2), N - ROWS // 2) + r
    word, half, number = place // 2 % 4 * 2 + place // 8 % 2, place % 2, place // 16 % 4
    return (expert * (2 * N) + place // 64 * 64 + word * 8 + half * 4 + number)[:, None]


@gluon.jit
def both_rows(at, APART: gl.constexpr):
    """[32, 4, 2]: what lies there, and that far behind, for the two rows of a thread."""
    return gl.join(gl.load(at), gl.load(at + APART))


@gluon.jit
def load_words(weight, rows, step, COLUMNS: gl.constexpr, APART: gl.constexpr):
    """Words of 64 bits of a step, of the last one behind the end; the second row is APART behind the first."""
    lane = gl.arange(0, 4, gl.SliceLayout(0, WORDS))[None, :]
    at = weight + gl.minimum(step, COLUMNS // STEP - 1) * 4 + (rows * (COLUMNS // 16) + lane)
    return both_rows(at, APART * (COLUMNS // 16))


@gluon.jit
def load_scales(scale, rows, pair, COLUMNS: gl.constexpr, APART: gl.constexpr):
    """Scales of two steps, the four bytes of a row; of the last two behind the end."""
    same = gl.zeros([1, 4], gl.int32, WORDS)
    at = scale + gl.minimum(pair, COLUMNS // (2 * STEP) - 1) + (rows * (COLUMNS // 128) + same)
    return both_rows(at, APART * (COLUMNS // 128))


@gluon.jit
def decoded(word, scales, ODD: gl.constexpr):
    """Weights [64, 64], the operand of a product, of their words of 64 bits and the scales of two steps.

    The assembler would decode where the result is needed, behind the wait for the products that run meanwhile.
    """
    layout: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, word.type.layout))
    byte = gl.arange(0, 4, layout)[None, :] // 2 + 2 * ODD
    power = powers((scales >> (byte * 8)[:, :, None]) & 255, gl.bfloat16, True)
    a0, b0, a1, b1, a2, b2, a3, b3 = decode_words(word.to(gl.int32), power, gl.bfloat16, True)
    c0, d0, c1, d1, c2, d2, c3, d3 = decode_words((word >> 32).to(gl.int32), power, gl.bfloat16, True)
    first = gl.join(gl.join(gl.join(a0, c0), gl.join(b0, d0)), gl.join(gl.join(a1, c1), gl.join(b1, d1)))
    second = gl.join(gl.join(gl.join(a2, c2), gl.join(b2, d2)), gl.join(gl.join(a3, c3), gl.join(b3, d3)))
    both = gl.reshape(gl.join(first, second), (4, 8, 4, 2, 2, 2, 2, 2))  # warp, row, lane, row's 8, word, half, number
    both = gl.reshape(gl.permute(both, (0, 3, 1, 7, 6, 4, 2, 5)), (ROWS, STEP))
    both = gl.convert_layout(both, gl.DotOperandLayout(0, SUMS, 2), assert_trivial=True)
    return gl.inline_asm_elementwise(MADE, REGISTERS, [both], dtype=gl.bfloat16, is_pure=False, pack=32)


@gluon.jit
def start(wide, narrow, weights, sums, narrow_sums, stage, NARROW: gl.constexpr):
    """Products of a step's weights, which run on."""
    sums = mma(weights, wide.index(stage).permute((1, 0)), sums, is_async=True)
    layout: gl.constexpr = gl.DotOperandLayout(0, narrow_sums.type.layout, 2)
    again = gl.convert_layout(weights, layout, assert_trivial=True)
    part = narrow.index(stage).slice(0, NARROW, dim=0)
    return sums, mma(again, part.permute((1, 0)), narrow_sums, is_async=True)


@gluon.jit
def finish(full, empty, running, narrow_running, stage, phase, more):
    """Waits for the next step's activations, which has a barrier, and for the products, and gives the stage back."""
    next_stage, phase = following(stage, phase, STAGES)
    mbarrier.wait(full.index(next_stage), phase, pred=more)
    sums, narrow_sums = mma_wait(0, deps=[running, narrow_running])
    synchronize()
    mbarrier.arrive(empty.index(stage))
    return sums, narrow_sums, next_stage, phase


@gluon.jit
def product(
    ring, weight, scale, rows, ahead, stage, phase,
    COLUMNS: gl.constexpr, APART: gl.constexpr, NARROW: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """A group's weights times the wide and the narrow part of the activations of a tile."""
    wide, narrow, full, empty = ring
    sums = gl.zeros([ROWS, WIDE], gl.float32, SUMS)
    narrow_sums = gl.zeros([ROWS, NARROW], gl.float32, LAYOUT)
    word, word_1, word_2, scales = ahead
    even = decoded(word, scales, 0)  # [ROWS, STEP]
    mbarrier.wait(full.index(stage), phase)
    for i in range(COLUMNS // (2 * STEP)):
        running, narrow_running = start(wide, narrow, even, sums, narrow_sums, stage, NARROW)
        odd = decoded(word_1, scales, 1)  # [ROWS, STEP]
        word_1 = load_words(weight, rows, 2 * i + 3, COLUMNS, APART)
        scales = load_scales(scale, rows, i + 1, COLUMNS, APART)
        sums, narrow_sums, stage, phase = finish(full, empty, running, narrow_running, stage, phase, True)
        running, narrow_running = start(wide, narrow, odd, sums, narrow_sums, stage, NARROW)
        even = decoded(word_2, scales, 0)
        word_2 = load_words(weight, rows, 2 * i + 4, COLUMNS, APART)
        more = i + 1 < COLUMNS // (2 * STEP)
        sums, narrow_sums, stage, phase = finish(full, empty, running, narrow_running, stage, phase, more)
    return sums, narrow_sums, stage, phase


@gluon.jit
def store_activated(
    h, sums, first, end, column, beta, linear_beta,
    N: gl.constexpr, SITU: gl.constexpr, CAPPED: gl.constexpr, PAIRS: gl.constexpr,
):  # fmt: skip
    """The activation of sums [64, PAIRS], gate and up rows 8 apart, at rows `first` on of h [R, N]."""
    both = gl.permute(gl.reshape(sums, (4, 2, 8, PAIRS)), (0, 2, 3, 1))
    gate, up = gl.split(both)  # [4, 8, PAIRS] each
    value = activation(gate, up, beta, linear_beta, SITU, CAPPED, True).to(gl.bfloat16)
    value = gl.permute(gl.reshape(value, (ROWS // 2, PAIRS)), (1, 0))  # [PAIRS, ROWS // 2]
    value = gl.convert_layout(value, PIECES)
    row = first + gl.arange(0, PAIRS, gl.SliceLayout(1, PIECES))
    c = column + gl.arange(0, ROWS // 2, gl.SliceLayout(0, PIECES))
    gl.store(h + row.to(gl.int64)[:, None] * N + c[None, :], value, mask=((row < end) & (column < N))[:, None])


@gluon.jit
def store_weighted(y, order, routing, sums, first, end, column, N: gl.constexpr, PAIRS: gl.constexpr):
    """sums [64, PAIRS] times the routing weights, at the rows of y [R, N] that their pairs have before sorting."""
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    place = first + gl.arange(0, PAIRS, flat)
    pair = gl.load(order + place, mask=place < end, other=-1)
    weight = gl.load(routing + pair, mask=pair >= 0, other=0.0).to(gl.float32)
    layout: gl.constexpr = gl.SliceLayout(0, sums.type.layout)
    sums *= gl.convert_layout(weight, layout)[None, :]
    value = gl.reshape(gl.permute(gl.reshape(sums, (4, 2, 8, PAIRS)), (3, 0, 2, 1)), (PAIRS, ROWS))  # [PAIRS, ROWS]
    row = gl.convert_layout(pair, gl.SliceLayout(1, value.type.layout))
    c = column + gl.arange(0, ROWS, gl.SliceLayout(0, value.type.layout))
    at = row.to(gl.int64)[:, None] * N + c[None, :]
    gl.store(y + at, value, mask=((row >= 0) & (column < N))[:, None])


@gluon.jit
def first_steps(weight, scale, rows, COLUMNS: gl.constexpr, APART: gl.constexpr):
    word = load_words(weight, rows, 0, COLUMNS, APART)
    word_1 = load_words(weight, rows, 1, COLUMNS, APART)
    word_2 = load_words(weight, rows, 2, COLUMNS, APART)
    return word, word_1, word_2, load_scales(scale, rows, 0, COLUMNS, APART)


@gluon.jit
def tile(
    group, item, ring, packed, rest, rows, ahead, stage, phase,
    COLUMNS: gl.constexpr, N: gl.constexpr, BLOCKS: gl.constexpr, DOWN: gl.constexpr, SITU: gl.constexpr,
    CAPPED: gl.constexpr, NARROW: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """A tile, and the first weights of the next one, which arrive while this one is stored."""
    tiles, count, weight, scale = packed
    order, routing, out, beta, linear_beta = rest
    APART: gl.constexpr = 1 if DOWN else N
    sums, narrow_sums, stage, phase = product(
        ring, weight, scale, rows, ahead, stage, phase, COLUMNS, APART, NARROW, LAYOUT
    )
    # Asked for again: there are no registers to keep it in.
    _, first, end = tile_of(tiles, count, item, BLOCKS)
    next_item = item + gl.num_programs(0)
    next_expert, _, _ = tile_of(tiles, count, next_item, BLOCKS)
    rows = packed_rows(gl.maximum(next_expert, 0), next_item % BLOCKS, group, N, DOWN)
    ahead = first_steps(weight, scale, rows, COLUMNS, APART)
    if DOWN:
        column = (item % BLOCKS * GROUPS + group) * ROWS
        store_weighted(out, order, routing, sums, first, end, column, N, WIDE)
        store_weighted(out, order, routing, narrow_sums, first + WIDE, end, column, N, NARROW)
    else:
        column = (item % BLOCKS * GROUPS + group) * (ROWS // 2)
        store_activated(out, sums, first, end, column, beta, linear_beta, N, SITU, CAPPED, WIDE)
        store_activated(out, narrow_sums, first + WIDE, end, column, beta, linear_beta, N, SITU, CAPPED, NARROW)
    return rows, ahead, stage, phase


@gluon.jit
def multiply_group(
    group, ring, packed, rest,
    COLUMNS: gl.constexpr, N: gl.constexpr, BLOCKS: gl.constexpr, DOWN: gl.constexpr, SITU: gl.constexpr,
    CAPPED: gl.constexpr,
):  # fmt: skip
    """64 rows of weights of every tile of this program."""
    tiles, count, weight, scale = packed
    item, stage, phase = gl.program_id(0), gl.to_tensor(0), gl.to_tensor(0)
    expert, first, end = tile_of(tiles, count, item, BLOCKS)
    rows = packed_rows(gl.maximum(expert, 0), item % BLOCKS, group, N, DOWN)
    ahead = first_steps(weight, scale, rows, COLUMNS, 1 if DOWN else N)
    while expert >= 0:
        if end - first > WIDE + NARROWEST:
            rows, ahead, stage, phase = tile(
                group, item, ring, packed, rest, rows, ahead, stage, phase,
                COLUMNS, N, BLOCKS, DOWN, SITU, CAPPED, NARROW, NARROW_SUMS,
            )  # fmt: skip
        else:
            rows, ahead, stage, phase = tile(
                group, item, ring, packed, rest, rows, ahead, stage, phase,
                COLUMNS, N, BLOCKS, DOWN, SITU, CAPPED, NARROWEST, NARROWEST_SUMS,
            )  # fmt: skip
        item += gl.num_programs(0)
        expert, first, end = tile_of(tiles, count, item, BLOCKS)


@hopper.jit(do_not_specialize=["count"])
def experts_kernel(
    wide_x, narrow_x, narrowest_x, tiles, count, weight, scale, order, routing, out, beta, linear_beta,
    COLUMNS: gl.constexpr, N: gl.constexpr, BLOCKS: gl.constexpr, DOWN: gl.constexpr, SITU: gl.constexpr,
    CAPPED: gl.constexpr,
):  # fmt: skip
    """Either product. Gate and up: out = h [R, N] of the sorted pairs, its columns in the order of `unpacked_order`;
    down: out = y [R, N] float32, routing weight times down(h), at the place of the pair before sorting.

    `wide_x` and the others describe [128, 64], [64, 64] and [32, 64] of the activations of the sorted pairs, columns in
    that order; `weight` [E, 2 N or N, COLUMNS / 16] int64 and `scale` [E, 2 N or N, COLUMNS / 128] int32 are packed.
    """
    wide = gl.allocate_shared_memory(gl.bfloat16, [STAGES, WIDE, STEP], SHARED)
    narrow = gl.allocate_shared_memory(gl.bfloat16, [STAGES, NARROW, STEP], SHARED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=GROUPS)
    fence()
    synchronize()
    ring = wide, narrow, full, empty
    packed = tiles, count, weight, scale
    rest = order, routing, out, beta, linear_beta
    activations = wide_x, narrow_x, narrowest_x
    gl.warp_specialize(
        [
            (multiply_group, (0, ring, packed, rest, COLUMNS, N, BLOCKS, DOWN, SITU, CAPPED)),
            (multiply_group, (1, ring, packed, rest, COLUMNS, N, BLOCKS, DOWN, SITU, CAPPED)),
            (multiply_group, (2, ring, packed, rest, COLUMNS, N, BLOCKS, DOWN, SITU, CAPPED)),
            (load_group, (activations, ring, tiles, count, COLUMNS, BLOCKS)),
        ],
        [4, 4, 1],
        [160, 160, 24],
    )


def fits(x, expert_ids, expert_weights, gate_up, down, gate_up_scale, down_scale, *_) -> bool:
    """Whether these go faster here: packed weights, bfloat16, many pairs an expert, columns in whole pairs of steps.

    On a Hopper GPU, which the caller knows.
    """
    many = portable.tile_size(expert_ids.numel(), len(gate_up), True)[1] > 1
    return (
        many
        and aligned(x, gate_up, down, gate_up_scale, down_scale, columns=2 * STEP.value)
        and max(gate_up.numel(), down.numel()) < 2**34  # words of 64 bits are counted in 32
    )


def aligned(x, gate_up, down, gate_up_scale, down_scale, columns: int) -> bool:
    """Whether x is bfloat16 and the weights are packed, in whole blocks of `columns`, and lie as bulk copies want."""
    if gate_up_scale is None or x.dtype != torch.bfloat16:
        return False
    weights = gate_up, down, gate_up_scale, down_scale
    return x.shape[1] % columns == 0 == down.shape[2] * 2 % columns and all(
        w.is_contiguous() and w.data_ptr() % 16 == 0 for w in weights
    )


def products(x, expert_ids, expert_weights, weights, scales, beta, linear_beta, elsewhere, of_tile: int, lanes: bool):
    """The two products that a kernel of packed experts is launched for, gate and up, then down.

    Args:
        weights, scales: of gate and up, and of down.
        of_tile: pairs of a tile at most.
        lanes: which of the orders of `spread_kernel` the columns of the activations have.

    Yields:
        the activations of the sorted pairs, the product's packed weights and scales, and the arguments that both
        modules' kernels share. Of the last ones `out` is y [R, D], with zeros where no tile is.
    """
    (tokens, size), top_k = x.shape, expert_ids.shape[1]
    pairs, (experts, width) = tokens * top_k, (weights[0].shape[0], weights[0].shape[1] // 2)
    order, tiles = portable.plan_experts(expert_ids, experts, of_tile, elsewhere)
    spread = torch.empty(pairs, size, device=x.device, dtype=x.dtype)
    spread_kernel[tools.cdiv(pairs, 16), tools.cdiv(size, 256)](
        x=x.contiguous(), order=order, spread=spread, pairs=pairs,
        D=size, TOP_K=top_k, LANES=lanes, BM=16, BN=256, num_warps=4,
    )  # fmt: skip
    h = torch.empty(pairs, width, device=x.device, dtype=x.dtype)
    y = (torch.zeros if elsewhere else torch.empty)(pairs, size, device=x.device, dtype=torch.float32)
    shared = {
        "tiles": tiles, "count": tiles.shape[1], "order": order, "routing": expert_weights.contiguous(),
        "beta": beta or 1.0, "linear_beta": linear_beta or 1.0, "SITU": beta is not None,
        "CAPPED": linear_beta is not None,
    }  # fmt: skip
    yield spread, weights[0], scales[0], {**shared, "out": h, "COLUMNS": size, "N": width, "DOWN": False}
    yield h, weights[1], scales[1], {**shared, "out": y, "COLUMNS": width, "N": size, "DOWN": True}


def run(x, expert_ids, expert_weights, gate_up, down, gate_up_scale, down_scale, *rest):
    """As `experts_triton.run`, whose arguments these are."""
    weights, scales, of_tile = (gate_up, down), (gate_up_scale, down_scale), WIDE.value + NARROW.value
    for activations, weight, scale, shared in products(
        x, expert_ids, expert_weights, weights, scales, *rest, of_tile, False
    ):
        wide, narrow, narrowest = (
            described(activations, n.value, STEP.value, SHARED) for n in (WIDE, NARROW, NARROWEST)
        )
        rows = ROWS.value if shared["DOWN"] else ROWS.value // 2
        blocks = tools.cdiv(shared["N"], GROUPS.value * rows)
        experts_kernel[(min(tools.multiprocessors(x.device), shared["count"] * blocks),)](
            wide_x=wide, narrow_x=narrow, narrowest_x=narrowest, weight=weight.view(torch.int64),
            scale=scale.view(torch.int32), BLOCKS=blocks, **shared, num_warps=4,
        )  # fmt: skip
    return portable.summed(shared["out"], expert_ids.shape[1])
