"""MXFP4 experts with few rows each on Hopper: weights stream through shared memory, in Gluon.

As `experts_triton`, whose plan and tiles these are (docs/kernels_experts.md). Every weight is read once, so what counts
is how many bytes are on their way and how many instructions a code takes. One warp asks for the weights, scales and
activations of several steps, and of the next tile, by bulk copies; the others take codes apart and multiply.

A program takes two halves of `HALF` rows of weights, gate and up or neighbours of down, against up to 8 pairs of one
expert. Its warps share the rows, and the four blocks of 128 columns of a step, whose sums are added in the end. A
lane has the 32 columns of one scale of a block, four words of eight codes, and the activations lie in the order in
which the words of the lanes come apart (`lane_order`).
"""

import torch

from . import experts_gluon as many
from . import experts_triton as portable
from . import gluon_tools as hopper
from . import triton_tools as tools

triton, tl = tools.triton, tools.tl
gl, gluon, mbarrier, described = hopper.gl, hopper.gluon, hopper.mbarrier, hopper.described
fence, load, synchronize = hopper.fence, hopper.load, hopper.synchronize
activation, following, tile_of = portable.activation, many.following, many.tile_of

# Warps that share the rows of a half, tiles of 8 rows of it a warp, programs a multiprocessor.
ROW_WARPS, TILES, PROGRAMS = 2, 2, 2
WARPS, HALF = 4 * ROW_WARPS, gl.constexpr(8 * ROW_WARPS * TILES)
# Pairs of a tile; columns of a step, whose scales' 16 bytes a row are the least that a bulk copy takes; steps on their
# way, 25 KB each.
PAIRS, STEP, STAGES = (gl.constexpr(n) for n in (8, 512, 4))
# Of a thread, before the loading warp gives its own.
REGISTERS = 65536 // (PROGRAMS * 32 * (WARPS + 4)) // 8 * 8
WORDS_SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
SCALES_SHARED = gl.constexpr(gl.NVMMASharedLayout(0, 8, 2))


def _layout(shape, registers, lane, row, tile, block):
    """Four lanes side by side, the others down 8 rows in the order in which reads meet no bank of shared memory twice;
    then the warps. Arguments are how far apart neighbours lie.
    """

    def bases(step, numbers):
        return [[n * part for part in step] for n in numbers]

    powers = [2**i for i in range((ROW_WARPS * TILES).bit_length() - 1)]
    own = bases(tile, [n for n in powers if n >= ROW_WARPS]) if any(tile) else []
    warps = bases(tile, [n for n in powers if n < ROW_WARPS]) + bases(block, (1, 2))
    lanes = bases(lane, (1, 2)) + bases(row, (4, 1, 2))
    return gl.constexpr(gl.DistributedLinearLayout([*registers, *own], lanes, warps, [], shape))


# [tiles, 8 rows, 4 blocks of 4 lanes]
TILE = _layout([ROW_WARPS * TILES, 8, 16], [], [0, 0, 1], [0, 1, 0], [1, 0, 0], [0, 0, 4])
# [rows, 4 blocks of 4 lanes of 4 words], [rows, 4 blocks of 4 lanes], [rows, 4 lanes, 2 pairs]
WORDS = _layout([HALF.value, 64], [[0, 1], [0, 2]], [0, 4], [1, 0], [8, 0], [0, 16])
SCALES = _layout([HALF.value, 16], [], [0, 1], [1, 0], [8, 0], [0, 4])
SUMS = _layout([HALF.value, 4, 2], [[0, 0, 1]], [0, 1, 0], [1, 0, 0], [8, 0, 0], [0, 0, 0])
# [pairs, 4 blocks of 4 words of 4 lanes of 4 times 2 numbers]
ACTIVATIONS = _layout([8, 256], [[0, 1], [0, 2], [0, 16], [0, 32]], [0, 4], [1, 0], [0, 0], [0, 64])


def _product():
    """PTX of a warp's product of 16 rows of weights by 128 columns and 8 pairs of activations, and its constraints.

    Operands: the new sums; words of a lane's first and of its second row; the two bytes of their scales; activations by
    words; sums. As in `decode_words` a code becomes its value times 2^-126, and one factor completes it:
    2^(byte - 1) for bytes up to 127, a scale of 1. Greater ones, rare enough for a branch of the warp, bring 2^128
    more, as two factors, or NaN.
    """
    first, second, scales, x, old = 4, 8, 12, 14, 30
    lines = [
        "{ .reg .b32 z, h, k, p<2>, q<2>, m<8>; .reg .pred large, nan;",
        ".reg .f32 c<4>;",
        "mov.b32 z, 0x80008000;",
        *(f"mov.f32 c{i}, ${old + i};" for i in range(4)),
    ]
    for row in range(2):
        lines += [
            f"and.b32 k, ${scales + row}, 127;",
            f"mad.lo.u32 p{row}, k, 0x00800080, 0x3f003f00;",
        ]
    lines += [
        f"or.b32 k, ${scales}, ${scales + 1};",
        "setp.gt.u32 large, k, 127;",
        "vote.sync.any.pred large, large, 0xffffffff;",
        "@large bra LARGE;",
    ]

    def words(more):
        for word in range(4):
            for row, at in enumerate((first, second)):
                m = [f"m{4 * row + i}" for i in range(4)]
                yield f"shr.u32 h, ${at + word}, 8;"
                for i in range(4):
                    source = f"${at + word}" if i < 2 else "h"
                    mask, factor = (("0x00f000f0", "0x0104"), ("0x000f000f", "0x1040"))[i % 2 == 0]
                    yield f"and.b32 {m[i]}, {source}, {mask};"
                    yield f"mul.lo.u32 {m[i]}, {m[i]}, {factor};"
                    yield f"and.b32 {m[i]}, {m[i]}, 0x81c081c0;"
                    yield f"fma.rn.bf16x2 {m[i]}, {m[i]}, p{row}, z;"
                    for _ in range(2 * more):
                        yield f"fma.rn.bf16x2 {m[i]}, {m[i]}, q{row}, z;"
            for i in range(0, 4, 2):
                a = f"{{m{i}, m{4 + i}, m{i + 1}, m{5 + i}}}"
                b, c = x + 4 * word + i, "{c0, c1, c2, c3}"
                yield f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {c}, {a}, {{${b}, ${b + 1}}}, {c};"

    lines += [*words(False), "bra.uni DONE;", "LARGE:"]
    for row in range(2):
        lines += [
            f"setp.gt.u32 large, ${scales + row}, 127;",
            f"setp.eq.u32 nan, ${scales + row}, 255;",
            f"selp.b32 q{row}, 0x5f805f80, 0x3f803f80, large;",
            f"selp.b32 q{row}, 0x7fc07fc0, q{row}, nan;",
        ]
    lines += [*words(True), "DONE:", *(f"mov.f32 ${i}, c{i};" for i in range(4)), "}"]
    constraints = ["=f"] * 4 + ["r"] * 26 + ["f"] * 4
    return gl.constexpr("\n".join(lines)), gl.constexpr(",".join(constraints))


PRODUCT, OPERANDS = _product()


@gluon.jit
def load_group(
    sources, ring, tiles, count,
    COLUMNS: gl.constexpr, N: gl.constexpr, BLOCKS: gl.constexpr, DOWN: gl.constexpr,
):  # fmt: skip
    """Copies for all tiles of this program, as far ahead as there are stages."""
    activations, weight, scale = sources
    x, upper, lower, upper_scale, lower_scale, full, empty = ring
    item, stage, phase = gl.program_id(0), gl.to_tensor(0), gl.to_tensor(1)
    expert, first, _ = tile_of(tiles, count, item, BLOCKS)
    while expert >= 0:
        if DOWN:
            row = expert * N + item % BLOCKS * (2 * HALF)
        else:
            row = expert * (2 * N) + item % BLOCKS * HALF
        other_row = row + (HALF if DOWN else N)
        for step in range(COLUMNS // STEP):
            mbarrier.wait(empty.index(stage), phase)
            arrived = full.index(stage)
            mbarrier.expect(arrived, 2 * HALF * (STEP // 2 + STEP // 32) + PAIRS * STEP * 2)
            load(weight, [row, step * (STEP // 8)], arrived, upper.index(stage))
            load(weight, [other_row, step * (STEP // 8)], arrived, lower.index(stage))
            load(scale, [row, step * (STEP // 32)], arrived, upper_scale.index(stage))
            load(scale, [other_row, step * (STEP // 32)], arrived, lower_scale.index(stage))
            load(activations, [first, step * (STEP // 2)], arrived, x.index(stage))
            stage, phase = following(stage, phase, STAGES)
        item += gl.num_programs(0)
        expert, first, _ = tile_of(tiles, count, item, BLOCKS)


@gluon.jit
def quarters(x):
    """x [..., 2, 2] as its four numbers."""
    even, odd = gl.split(x)
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    return first, second, third, fourth


@gluon.jit
def words_of(memory):
    """Packed weights [HALF, 64] as a lane's four words, each of the shape of `TILE`."""
    words = gl.reshape(memory.load(WORDS), (HALF // 8, 8, 16, 2, 2))
    first, second, third, fourth = quarters(words)
    return (
        gl.convert_layout(first, TILE, assert_trivial=True), gl.convert_layout(second, TILE, assert_trivial=True),
        gl.convert_layout(third, TILE, assert_trivial=True), gl.convert_layout(fourth, TILE, assert_trivial=True),
    )  # fmt: skip


@gluon.jit
def scales_of(memory):
    scales = gl.reshape(memory.load(SCALES), (HALF // 8, 8, 16)).to(gl.int32)
    return gl.convert_layout(scales, TILE, assert_trivial=True)


@gluon.jit
def shared_by_tiles(x):
    """x [8, 16], the same for every tile of 8 rows."""
    return gl.convert_layout(gl.reshape(x, (1, 8, 16)), TILE, assert_trivial=True)


@gluon.jit
def operands_of(x):
    """Activations [8, 4 blocks, 4 words, 4 lanes, 4] as a lane's 16 registers, by words."""
    words = gl.reshape(gl.permute(x, (0, 1, 3, 4, 2)), (8, 16, 2, 2, 2, 2))
    w0, w1, w2, w3 = quarters(words)
    a0, a1, a2, a3 = quarters(w0)
    b0, b1, b2, b3 = quarters(w1)
    c0, c1, c2, c3 = quarters(w2)
    d0, d1, d2, d3 = quarters(w3)
    return (
        shared_by_tiles(a0), shared_by_tiles(a1), shared_by_tiles(a2), shared_by_tiles(a3),
        shared_by_tiles(b0), shared_by_tiles(b1), shared_by_tiles(b2), shared_by_tiles(b3),
        shared_by_tiles(c0), shared_by_tiles(c1), shared_by_tiles(c2), shared_by_tiles(c3),
        shared_by_tiles(d0), shared_by_tiles(d1), shared_by_tiles(d2), shared_by_tiles(d3),
    )  # fmt: skip


@gluon.jit
def multiply(x, upper, lower, upper_scale, lower_scale, sums):
    """Four sums plus the products of a step: of the upper row with pairs t and t + 4, t being the place of a lane among
    four, and of the lower row with these."""
    weights = words_of(upper) + words_of(lower) + (scales_of(upper_scale), scales_of(lower_scale))
    operands = weights + operands_of(gl.reshape(x.load(ACTIVATIONS), (8, 4, 4, 4, 4))) + sums
    return gl.inline_asm_elementwise(PRODUCT, OPERANDS, operands, (gl.float32,) * 4, True, 1)


@gluon.jit
def total(of_first, of_fourth, below_first, below_fourth):
    """The sums of the upper and of the lower rows over the blocks: each [HALF, 4 lanes, 2 pairs]."""
    both = gl.join(gl.join(of_first, of_fourth), gl.join(below_first, below_fourth))
    upper, lower = gl.split(gl.sum(gl.reshape(both, (HALF, 4, 4, 2, 2)), axis=1))
    return gl.convert_layout(upper, SUMS, assert_trivial=True), gl.convert_layout(lower, SUMS, assert_trivial=True)


@gluon.jit
def rows_of_sums():
    return gl.arange(0, HALF, gl.SliceLayout(1, gl.SliceLayout(2, SUMS)))[:, None, None]


@gluon.jit
def goals(order, routing, first, end, DOWN: gl.constexpr):
    """Rows of the result that a tile's pairs have, -1 for none, and their routing weights; [1, 4, 2]."""
    lane = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, SUMS)))[None, :, None]
    place = first + lane + 4 * gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, SUMS)))[None, None, :]
    if DOWN:
        row = gl.load(order + place, mask=place < end, other=-1)
        weight = gl.load(routing + row, mask=row >= 0, other=0.0).to(gl.float32)
    else:
        row, weight = gl.where(place < end, place, -1), gl.to_tensor(1.0)
    return row, weight


@gluon.jit
def store_activated(
    h, upper, lower, pair, column, beta, linear_beta, N: gl.constexpr, SITU: gl.constexpr, CAPPED: gl.constexpr
):
    """The activation of gate and up sums, in the order of `lane_order`, at rows `pair` of h [R, N]."""
    value = activation(upper, lower, beta, linear_beta, SITU, CAPPED, True).to(gl.bfloat16)
    row = rows_of_sums()
    c = column + row
    lane, word, half, number = c // 32 % 4, c // 8 % 4, c // 4 % 2, c % 4
    c = c // 128 * 128 + word * 32 + lane * 8 + number * 2 + half
    gl.store(h + (pair.to(gl.int64) * N + c), value, mask=(pair >= 0) & (row >= 0))


@gluon.jit
def store_weighted(y, upper, lower, pair, weight, column, N: gl.constexpr):
    """Sums times the routing weights, at rows `pair` of y [R, N]."""
    row = rows_of_sums()
    at = y + (pair.to(gl.int64) * N + (column + row))
    mask = (pair >= 0) & (row >= 0)
    gl.store(at, upper * weight, mask=mask)
    gl.store(at + HALF, lower * weight, mask=mask)


@gluon.jit
def multiply_group(
    ring, tiles, count, rest,
    COLUMNS: gl.constexpr, N: gl.constexpr, BLOCKS: gl.constexpr, DOWN: gl.constexpr, SITU: gl.constexpr,
    CAPPED: gl.constexpr,
):  # fmt: skip
    """All tiles of this program."""
    x, upper, lower, upper_scale, lower_scale, full, empty = ring
    order, routing, out, beta, linear_beta = rest
    item, stage, phase = gl.program_id(0), gl.to_tensor(0), gl.to_tensor(0)
    expert, first, end = tile_of(tiles, count, item, BLOCKS)
    while expert >= 0:
        # What the end of the tile needs is asked for at its beginning.
        pair, weight = goals(order, routing, first, end, DOWN)
        next_expert, first, end = tile_of(tiles, count, item + gl.num_programs(0), BLOCKS)
        zero = gl.zeros([HALF // 8, 8, 16], gl.float32, TILE)
        sums = zero, zero, zero, zero
        for _ in range(COLUMNS // STEP):
            mbarrier.wait(full.index(stage), phase)
            sums = multiply(
                x.index(stage), upper.index(stage), lower.index(stage), upper_scale.index(stage),
                lower_scale.index(stage), sums,
            )  # fmt: skip
            synchronize()
            mbarrier.arrive(empty.index(stage))
            stage, phase = following(stage, phase, STAGES)
        of_upper, of_lower = total(*sums)
        if DOWN:
            store_weighted(out, of_upper, of_lower, pair, weight, item % BLOCKS * (2 * HALF), N)
        else:
            store_activated(out, of_upper, of_lower, pair, item % BLOCKS * HALF, beta, linear_beta, N, SITU, CAPPED)
        item += gl.num_programs(0)
        expert = next_expert


@hopper.jit(do_not_specialize=["count"])
def experts_kernel(
    activations, weight, scale, tiles, count, order, routing, out, beta, linear_beta,
    COLUMNS: gl.constexpr, N: gl.constexpr, BLOCKS: gl.constexpr, DOWN: gl.constexpr, SITU: gl.constexpr,
    CAPPED: gl.constexpr,
):  # fmt: skip
    """Either product. Gate and up: out = h [R, N] of the sorted pairs, its columns in the order of `lane_order`;
    down: out = y [R, N] float32, routing weight times down(h), at the place of the pair before sorting.

    The first three describe [PAIRS, 256] of activations of the sorted pairs, columns in that order, two an int32;
    [HALF, 64] of weights, eight an int32; [HALF, 16] of their scales.
    """
    x = gl.allocate_shared_memory(gl.int32, [STAGES, PAIRS, STEP // 2], WORDS_SHARED)
    upper = gl.allocate_shared_memory(gl.int32, [STAGES, HALF, STEP // 8], WORDS_SHARED)
    lower = gl.allocate_shared_memory(gl.int32, [STAGES, HALF, STEP // 8], WORDS_SHARED)
    upper_scale = gl.allocate_shared_memory(gl.uint8, [STAGES, HALF, STEP // 32], SCALES_SHARED)
    lower_scale = gl.allocate_shared_memory(gl.uint8, [STAGES, HALF, STEP // 32], SCALES_SHARED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence()
    synchronize()
    ring = x, upper, lower, upper_scale, lower_scale, full, empty
    rest = order, routing, out, beta, linear_beta
    gl.warp_specialize(
        [
            (multiply_group, (ring, tiles, count, rest, COLUMNS, N, BLOCKS, DOWN, SITU, CAPPED)),
            (load_group, ((activations, weight, scale), ring, tiles, count, COLUMNS, N, BLOCKS, DOWN)),
        ],
        [1],
        [24],
    )


def fits(x, expert_ids, expert_weights, gate_up, *rest) -> bool:
    """Whether these go faster here: packed weights, bfloat16, few pairs an expert, columns in whole steps.

    On a Hopper GPU, which the caller knows.
    """
    few = 2 * expert_ids.numel() <= PAIRS.value * len(gate_up)
    return few and many.aligned(x, gate_up, *rest[:3], columns=STEP.value)


def run(x, expert_ids, expert_weights, gate_up, down, gate_up_scale, down_scale, *rest):
    """As `experts_triton.run`, whose arguments these are."""
    weights, scales = (gate_up, down), (gate_up_scale, down_scale)
    for activations, weight, scale, shared in many.products(
        x, expert_ids, expert_weights, weights, scales, *rest, PAIRS.value, True
    ):
        blocks = shared["N"] // (2 * HALF.value if shared["DOWN"] else HALF.value)
        experts_kernel[(min(PROGRAMS * tools.multiprocessors(x.device), shared["count"] * blocks),)](
            activations=described(activations.view(torch.int32), PAIRS.value, STEP.value // 2, WORDS_SHARED.value),
            weight=described(weight.view(torch.int32).flatten(0, 1), HALF.value, STEP.value // 8, WORDS_SHARED.value),
            scale=described(scale.flatten(0, 1), HALF.value, STEP.value // 32, SCALES_SHARED.value),
            BLOCKS=blocks, **shared, num_warps=WARPS, maxnreg=REGISTERS,
        )  # fmt: skip
    return portable.summed(shared["out"], expert_ids.shape[1])
