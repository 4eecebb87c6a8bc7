"""Attention of absorbed queries over many latents on Hopper: two groups of warps a program, in Gluon.

docs/kernels_mla.md draws them.

As `mla_decode_triton`, whose splits, partial results and merge these are, for one new token without a mask. What Triton
does not express is who waits for what: here each group of four warps scores and weighs one of two tiles of 64 latents,
both add both tiles to their half of the columns, and whatever is no longer needed is loaded anew at once.
"""

import math

import torch

from . import gluon_tools as hopper
from . import mla_decode_triton as portable
from . import triton_tools as tools

gl, gluon, mbarrier, TensorDescriptor = hopper.gl, hopper.gluon, hopper.mbarrier, hopper.TensorDescriptor
fence, load, mma, mma_wait, synchronize = hopper.fence, hopper.load, hopper.mma, hopper.mma_wait, hopper.synchronize

# Queries and latents of a tile, columns of a half, rope columns.
TILE, HALF, ROPE = 64, 256, 64
SHARED = hopper.SHARED
# Products [64, 64] and [64, 256] of four warps, and one number a row of the first and of the second.
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
ROW = gl.constexpr(gl.SliceLayout(1, SCORES.value))
ROW_OF_SUMS = gl.constexpr(gl.SliceLayout(1, SUMS.value))
# Barriers: tiles of two latents, the half and rope part of the left group and the half of the right one, have arrived;
# weights of either tile are there; those of the first are no longer needed; a group has its softmax's sum.
LEFT, RIGHT, WEIGHTS, READ, DONE, BARRIERS = (gl.constexpr(n) for n in (0, 2, 4, 6, 7, 9))
# Keys of all rows from which on this is faster than the portable kernel.
MANY_KEYS = 8192


@gluon.jit
def fetch_left(latents, rope, row, half, rope_part, arrived, wanted):
    mbarrier.expect(arrived, 64 * (256 + 64) * 2, pred=wanted)
    load(latents, [row, 0], arrived, half, pred=wanted)
    load(rope, [row, 512], arrived, rope_part, pred=wanted)


@gluon.jit
def fetch_right(latents, row, half, arrived, wanted):
    mbarrier.expect(arrived, 64 * 256 * 2, pred=wanted)
    load(latents, [row, 256], arrived, half, pred=wanted)


@gluon.jit
def clear(tile, kept, WIDTH: gl.constexpr):
    """Zeros in the rows from `kept` on: what lies there may be anything, and 0 times NaN is NaN."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, 64, gl.SliceLayout(1, layout))
    for first in gl.static_range(0, WIDTH, 64):
        piece = tile.slice(first, 64, dim=1)
        value = piece.load(layout)
        piece.store(gl.where((row < kept)[:, None], value, gl.zeros_like(value)))


@gluon.jit
def begin(lefts, rights, ropes, barriers, WHICH: gl.constexpr, first, last, end):
    """A group's sums, maximum and total before the first pair of tiles, the number of pairs, and the last row from
    which a tile has 64. Where the sequence has fewer, the group's tile is cleared behind them, once it has arrived."""
    if (end < 64) & (first < last):
        mbarrier.wait(barriers.index(LEFT + WHICH), 0)
        mbarrier.wait(barriers.index(RIGHT + WHICH), 0)
        clear(lefts.index(WHICH), end, 256)
        clear(rights.index(WHICH), end, 256)
        clear(ropes.index(WHICH), end, 64)
        fence()
        synchronize()
    sums = gl.zeros([64, 256], gl.float32, SUMS)
    top = gl.full([64], -float("inf"), gl.float32, ROW)
    total = gl.zeros([64], gl.float32, ROW)
    return sums, top, total, gl.cdiv(last - first, 128), gl.maximum(end - 64, 0)


@gluon.jit
def scored(queries, halves, rope, barriers, WHICH: gl.constexpr, phase, row, start, last):
    """Products [64, 64] of the queries with the latents from `row` on; -inf for all but the keys `start` to `last`."""
    mbarrier.wait(barriers.index(LEFT + WHICH), phase)
    s = gl.zeros([64, 64], gl.float32, SCORES)
    s = mma(queries[0], halves[0].permute((1, 0)), s, use_acc=False, is_async=True)
    s = mma(queries[2], rope.permute((1, 0)), s, is_async=True)
    mbarrier.wait(barriers.index(RIGHT + WHICH), phase)
    s = mma(queries[1], halves[1].permute((1, 0)), s, is_async=True)
    s = mma_wait(0, deps=[s])
    if (row != start) | (start + 64 > last):
        key = row + gl.arange(0, 64, gl.SliceLayout(0, SCORES))
        s = gl.where(((key >= start) & (key < last))[None, :], s, -float("inf"))
    return s


@gluon.jit
def finite(top):
    """A query that has seen no key yet has -inf here, and -inf - -inf is NaN."""
    return gl.where(top == -float("inf"), 0.0, top)


@gluon.jit
def weighed(s, top, total, scale):
    """Softmax numerators of the products s [64, 64], the maximum and sum with them, and the factor of earlier sums."""
    new_top = gl.maximum(top, gl.max(s, 1) * scale)
    base = finite(new_top)
    weight = gl.exp2(s * scale - base[:, None])
    kept = gl.exp2(top - base)
    return weight, new_top, total * kept + gl.sum(weight, 1), kept


@gluon.jit
def scaled(sums, factor):
    return sums * gl.convert_layout(factor, ROW_OF_SUMS)[:, None]


@gluon.jit
def added(sums, kept, weights, half):
    """sums [64, 256] times their factor [64], and the weights [64, 64] times half of a tile's columns [64, 256]."""
    sums = mma(weights, half, scaled(sums, kept), is_async=True)
    sums = mma_wait(0, deps=[sums])
    synchronize()
    return sums


@gluon.jit
def finish(part, log2_sum, sums, top, total, numbers, barriers, rows, WHICH: gl.constexpr):
    """A half of the mean of latents, and from the first group the log2 of the softmax's sum, to which both add."""
    COLUMN: gl.constexpr = 256 * WHICH
    numbers.index(2 + WHICH).store(total)
    synchronize()
    mbarrier.arrive(barriers.index(DONE + WHICH))
    mbarrier.wait(barriers.index(DONE + (1 - WHICH)), 0)
    total += numbers.index(2 + (1 - WHICH)).load(ROW)
    r = gl.program_id(0) * 64 + gl.arange(0, 64, ROW)
    at = (gl.program_id(2).to(gl.int64) * rows + r) * gl.num_programs(1) + gl.program_id(1)
    if COLUMN == 0:
        gl.store(log2_sum + at, gl.where(total == 0.0, -float("inf"), top + gl.log2(total)), mask=r < rows)
    sums = scaled(sums, 1.0 / gl.where(total == 0.0, 1.0, total))
    c = COLUMN + gl.arange(0, 256, gl.SliceLayout(0, SUMS))
    places = gl.convert_layout(at, ROW_OF_SUMS)[:, None] * 512 + c[None, :]
    gl.store(part + places, sums, mask=gl.convert_layout(r < rows, ROW_OF_SUMS)[:, None])


@gluon.jit
def left_group(
    latents, rope, queries, lefts, rights, ropes, weights, numbers, barriers, part, log2_sum,
    row_0, first, last, end, scale, rows,
):  # fmt: skip
    """Scores the even tiles and sums the left columns of all."""
    sums, top, total, pairs, final = begin(lefts, rights, ropes, barriers, 0, first, last, end)
    for i in range(pairs):
        phase, start, more = i & 1, first + 128 * i, i + 1 < pairs
        halves = lefts.index(0), rights.index(0)
        s = scored(queries, halves, ropes.index(0), barriers, 0, phase, gl.minimum(start, final), start, last)
        weight, top_0, total, kept = weighed(s, top, total, scale)
        mbarrier.wait(barriers.index(READ), phase ^ 1)
        weights.store(weight.to(weights.dtype))
        numbers.index(0).store(top_0)
        fence()
        synchronize()
        mbarrier.arrive(barriers.index(WEIGHTS))
        sums = added(sums, kept, weights, lefts.index(0))
        row = row_0 + gl.minimum(start + 128, final)
        fetch_left(latents, rope, row, lefts.index(0), ropes.index(0), barriers.index(LEFT), more)
        mbarrier.wait(barriers.index(WEIGHTS + 1), phase)
        mbarrier.wait(barriers.index(LEFT + 1), phase)
        top = numbers.index(1).load(ROW)
        kept = gl.exp2(top_0 - finite(top))
        total *= kept
        sums = added(sums, kept, ropes.index(1), lefts.index(1))
        row = row_0 + gl.minimum(start + 192, final)
        fetch_left(latents, rope, row, lefts.index(1), ropes.index(1), barriers.index(LEFT + 1), more)
    finish(part, log2_sum, sums, top, total, numbers, barriers, rows, 0)


@gluon.jit
def right_group(
    latents, rope, queries, lefts, rights, ropes, weights, numbers, barriers, part, log2_sum,
    row_0, first, last, end, scale, rows,
):  # fmt: skip
    """Scores the odd tiles and sums the right columns of all. Its weights lie where the tile's rope part was."""
    sums, top, total, pairs, final = begin(lefts, rights, ropes, barriers, 1, first, last, end)
    for i in range(pairs):
        phase, start, more = i & 1, first + 128 * i, i + 1 < pairs
        # The first tile before the own one is looked at: so its place is loaded anew half a round before the other's.
        mbarrier.wait(barriers.index(WEIGHTS), phase)
        mbarrier.wait(barriers.index(RIGHT), phase)
        top_0 = numbers.index(0).load(ROW)
        kept = gl.exp2(top - finite(top_0))
        total *= kept
        sums = added(sums, kept, weights, rights.index(0))
        mbarrier.arrive(barriers.index(READ))
        row = row_0 + gl.minimum(start + 128, final)
        fetch_right(latents, row, rights.index(0), barriers.index(RIGHT), more)
        row, halves = gl.minimum(start + 64, final), (lefts.index(1), rights.index(1))
        s = scored(queries, halves, ropes.index(1), barriers, 1, phase, row, start + 64, last)
        weight, top, total, kept = weighed(s, top_0, total, scale)
        rounded = weight.to(weights.dtype)
        synchronize()  # every warp has read the rope part that the weights lie over
        ropes.index(1).store(rounded)
        numbers.index(1).store(top)
        fence()
        synchronize()
        mbarrier.arrive(barriers.index(WEIGHTS + 1))
        # From registers: the other group loads new latents over what lies in shared memory.
        rounded = gl.convert_layout(rounded, gl.DotOperandLayout(0, SUMS, 2))
        sums = added(sums, kept, rounded, rights.index(1))
        row = row_0 + gl.minimum(start + 192, final)
        fetch_right(latents, row, rights.index(1), barriers.index(RIGHT + 1), more)
    finish(part, log2_sum, sums, top, total, numbers, barriers, rows, 1)


@hopper.jit(do_not_specialize=["keys"])
def decode_kernel(
    query, query_rope, latents, rope, lengths, part, log2_sum,
    keys, rows, batch_q, head_q, batch_p, head_p, batch_rows, batch_n, scale,
):  # fmt: skip
    """One split of the keys for 64 heads: the mean of latents, and log2 of the softmax's sum.

    `latents` and `rope` describe [64, 256] and [64, 64] of the same matrix, in which a sequence's keys begin at
    `batch_rows` times its number.
    """
    i_b, i_s, splits = gl.program_id(2), gl.program_id(1), gl.num_programs(1)
    end = keys
    if lengths is not None:
        end = gl.minimum(gl.load(lengths + i_b * batch_n).to(gl.int32), keys)
    tiles = gl.cdiv(end, 64)
    first = (tiles * i_s // splits) * 64
    last = gl.minimum((tiles * (i_s + 1) // splits) * 64, end)
    dtype: gl.constexpr = query.dtype.element_ty
    shared: gl.constexpr = latents.layout
    q_left = gl.allocate_shared_memory(dtype, [64, 256], shared)
    q_right = gl.allocate_shared_memory(dtype, [64, 256], shared)
    q_rope = gl.allocate_shared_memory(dtype, [64, 64], shared)
    lefts = gl.allocate_shared_memory(dtype, [2, 64, 256], shared)
    rights = gl.allocate_shared_memory(dtype, [2, 64, 256], shared)
    ropes = gl.allocate_shared_memory(dtype, [2, 64, 64], shared)
    weights = gl.allocate_shared_memory(dtype, [64, 64], shared)
    # The maximum after either tile, and both groups' sums.
    numbers = gl.allocate_shared_memory(gl.float32, [4, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    barriers = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(BARRIERS):
        mbarrier.init(barriers.index(i), count=1)
    fence()
    synchronize()
    row_0 = i_b * batch_rows
    for i in gl.static_range(2):
        row = row_0 + gl.minimum(first + 64 * i, gl.maximum(end - 64, 0))
        fetch_left(latents, rope, row, lefts.index(i), ropes.index(i), barriers.index(LEFT + i), first < last)
        fetch_right(latents, row, rights.index(i), barriers.index(RIGHT + i), first < last)
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    narrow: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    h = gl.program_id(0) * 64 + gl.arange(0, 64, gl.SliceLayout(1, wide))
    at = query + i_b.to(gl.int64) * batch_q + h[:, None] * head_q + gl.arange(0, 256, gl.SliceLayout(0, wide))[None, :]
    q_left.store(gl.load(at, mask=(h < rows)[:, None], other=0.0))
    q_right.store(gl.load(at + 256, mask=(h < rows)[:, None], other=0.0))
    h = gl.program_id(0) * 64 + gl.arange(0, 64, gl.SliceLayout(1, narrow))
    c = gl.arange(0, 64, gl.SliceLayout(0, narrow))
    at = query_rope + i_b.to(gl.int64) * batch_p + h[:, None] * head_p + c[None, :]
    q_rope.store(gl.load(at, mask=(h < rows)[:, None], other=0.0))
    fence()
    synchronize()
    queries = q_left, q_right, q_rope
    arguments = (
        latents, rope, queries, lefts, rights, ropes, weights, numbers, barriers, part, log2_sum,
        row_0, first, last, end, scale, rows,
    )  # fmt: skip
    gl.warp_specialize([(left_group, arguments), (right_group, arguments)], [4], [240])


def fits(query, query_rope, latents, scale, mask, lengths=None, pages=None) -> bool:
    """Whether these go faster here: half precision, one token, no mask, latents of 512 + 64 in rows of one matrix.

    On a Hopper GPU, which the caller knows.
    """
    if pages is not None:
        return False
    batch, keys, _ = latents.shape
    rows_apart, columns_apart = latents.stride()[1:]
    return (
        mask is None
        and scale > 0.0  # it multiplies the maximum of the scores
        and query.dtype == query_rope.dtype == latents.dtype
        and query.dtype in (torch.bfloat16, torch.float16)
        and (query.shape[1], query.shape[3], query_rope.shape[3]) == (1, 2 * HALF, ROPE)
        and query.stride(3) == query_rope.stride(3) == columns_apart == 1
        and batch * keys >= MANY_KEYS
        and latents.data_ptr() % 16 == 0
        and rows_apart % 8 == 0
        and rows_apart >= latents.shape[2]  # a bulk copy takes no rows that lie over each other
        and (batch == 1 or latents.stride(0) % rows_apart == 0)
    )


def run(query, query_rope, latents, scale, mask, lengths, pages=None):
    """As `mla_decode.mla_decode`, whose arguments these are."""
    (batch, _, heads, rank), keys = query.shape, latents.shape[1]
    rows_apart = latents.stride(1)
    batch_rows = keys if batch == 1 else latents.stride(0) // rows_apart
    matrix = [(batch - 1) * batch_rows + keys, latents.shape[2]], [rows_apart, 1]
    halves, rope = (TensorDescriptor(latents, *matrix, [TILE, width], SHARED) for width in (HALF, ROPE))
    lengths = None if lengths is None else lengths.expand(batch)
    row_tiles = tools.cdiv(heads, TILE)
    processors = tools.multiprocessors(query.device)
    splits = portable.count_splits(row_tiles * batch, tools.cdiv(keys, 2 * TILE), processors)
    part = torch.empty(batch, heads, splits, rank, device=query.device, dtype=torch.float32)
    log2_sum = torch.empty(batch, heads, splits, device=query.device, dtype=torch.float32)
    decode_kernel[(row_tiles, splits, batch)](
        query=query, query_rope=query_rope, latents=halves, rope=rope, lengths=lengths, part=part, log2_sum=log2_sum,
        keys=keys, rows=heads, batch_q=query.stride(0), head_q=query.stride(2), batch_p=query_rope.stride(0),
        head_p=query_rope.stride(2), batch_rows=batch_rows, batch_n=0 if lengths is None else lengths.stride(0),
        scale=scale * math.log2(math.e), num_warps=4,
    )  # fmt: skip
    return portable.merged(part, log2_sum, query)
