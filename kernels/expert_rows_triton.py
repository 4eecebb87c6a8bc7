"""Rows of pairs of token and expert, back into the order of the tokens: Triton form of `experts.sorted_experts`' moves.

Both kernels go token by token. Its k rows lie in k places of the sorted order, which `inverse` names; whole rows are
gathered and scattered at the cost of reading and writing in order. Nothing as large as all rows is made but their own
gradient, and every number is written once, by one program.
"""

import torch

from . import triton_tools as tools

triton, tl = tools.triton, tools.tl


@tools.jit
def combine_kernel(rows, inverse, weights, out, D: tl.constexpr, BD: tl.constexpr, K: tl.constexpr):
    """out [T, D] = sum_j weights[:, j] rows[inverse[:, j]], one token and BD columns; `weights` None for ones."""
    token = (tl.program_id(0) // tl.cdiv(D, BD)).to(tl.int64)
    c = (tl.program_id(0) % tl.cdiv(D, BD)) * BD + tl.arange(0, BD)
    total = tl.zeros((BD,), tl.float32)
    for j in tl.static_range(K):
        place = tl.load(inverse + token * K + j)
        value = tl.load(rows + place * D + c, mask=c < D, other=0.0).to(tl.float32)  # [BD]
        if weights is not None:
            value *= tl.load(weights + token * K + j).to(tl.float32)
        total += value
    tl.store(out + token * D + c, total.to(out.dtype.element_ty), mask=c < D)


@tools.jit
def combine_backward_kernel(
    grad, rows, inverse, weights, d_rows, d_weights,
    D: tl.constexpr, BD: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One token: its gradient is read once for its K rows, BD columns at a time."""
    token, j = tl.program_id(0).to(tl.int64), tl.arange(0, BK)
    place = tl.load(inverse + token * K + j, mask=j < K, other=0)  # [BK]
    weight = tl.load(weights + token * K + j, mask=j < K, other=0.0).to(tl.float32)  # [BK]
    products = tl.zeros((BK, BD), tl.float32)
    for first in range(0, D, BD):
        c = first + tl.arange(0, BD)
        at, mask = (place * D)[:, None] + c[None, :], (j < K)[:, None] & (c < D)[None, :]  # [BK, BD]
        upper = tl.load(grad + token * D + c, mask=c < D, other=0.0).to(tl.float32)[None, :]  # [1, BD]
        products += tl.load(rows + at, mask=mask, other=0.0).to(tl.float32) * upper
        tl.store(d_rows + at, (weight[:, None] * upper).to(d_rows.dtype.element_ty), mask=mask)
    d_weight = tl.sum(products, axis=1)  # [BK]
    tl.store(d_weights + token * K + j, d_weight.to(d_weights.dtype.element_ty), mask=j < K)


def combine_blocks(size: int) -> tuple[int, int]:
    """Columns and warps of a program: four columns a thread, so that K rows at once take few registers."""
    columns = min(512, tools.next_power_of_2(size))
    return columns, max(1, columns // 128)


def backward_blocks(size: int, top_k: int, item: int) -> tuple[int, int, int]:
    """Columns, rows and warps of a program: 8 KB of rows at a time, 64 bytes a thread."""
    rows = tools.next_power_of_2(top_k)
    columns = min(tools.next_power_of_2(size), max(64, 8192 // (rows * item)))
    return columns, rows, max(1, min(16, rows * columns * item // 2048))


def combine(rows, inverse, weights, dtype):
    """Sums of every token's rows, in float32 and in the order of its experts, rounded once.

    Args:
        rows: [T k, D].
        inverse: [T, k] int64, where the row of a pair lies.
        weights: [T, k], or None for a plain sum.
        dtype: of the result.

    Returns:
        [T, D].
    """
    tokens, top_k = inverse.shape
    size = rows.shape[1]
    columns, warps = combine_blocks(size)
    out = torch.empty(tokens, size, device=rows.device, dtype=dtype)
    combine_kernel[(tokens * tools.cdiv(size, columns),)](
        rows=rows.contiguous(), inverse=inverse, weights=None if weights is None else weights.contiguous(), out=out,
        D=size, BD=columns, K=top_k, num_warps=warps,
    )  # fmt: skip
    return out


def combine_backward(grad, rows, inverse, weights):
    """Gradients of the rows and weights of `combine`, in their dtypes, from `grad` [T, D] of its result."""
    tokens, top_k = inverse.shape
    columns, block, warps = backward_blocks(rows.shape[1], top_k, rows.element_size())
    d_rows = torch.empty(rows.shape, device=rows.device, dtype=rows.dtype)
    d_weights = torch.empty(weights.shape, device=weights.device, dtype=weights.dtype)
    combine_backward_kernel[(tokens,)](
        grad=grad.contiguous(), rows=rows.contiguous(), inverse=inverse, weights=weights.contiguous(),
        d_rows=d_rows, d_weights=d_weights, D=rows.shape[1], BD=columns, K=top_k, BK=block, num_warps=warps,
    )  # fmt: skip
    return d_rows, d_weights
