"""RMS norms in one kernel each way: Triton form of `norms` (docs/kernels.md).

A program takes BR rows at a time with the whole width on chip. The backward pass computes 1/rms again and sums the
gradient of the weight over its rows, then over programs, in a fixed order.
"""

import functools

import torch

from . import triton_tools as tools

triton, tl = tools.triton, tools.tl
sigmoid = tools.sigmoid


@tools.jit(do_not_specialize=["rows"])
def norm_kernel(
    x, gate, weight, out, rows, stride_x, stride_gate, eps,
    D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr, GATED: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    c = tl.arange(0, BD)
    mask = (row < rows)[:, None] & (c < D)[None, :]
    narrow = tl.load(x + (row * stride_x)[:, None] + c[None, :], mask=mask, other=0.0)  # [BR, BD]
    value = narrow.to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, axis=1) / D + eps)[:, None]
    b_w = tl.load(weight + c, mask=c < D, other=0.0)  # [BD]
    if GATED:
        b_gate = tl.load(gate + (row * stride_gate)[:, None] + c[None, :], mask=mask, other=0.0).to(tl.float32)
        value *= b_w.to(tl.float32)[None, :] * sigmoid(b_gate, PTX)
    else:  # two roundings, as in the model that was trained
        value = value.to(narrow.dtype).to(tl.float32) * b_w.to(tl.float32)[None, :]
    tl.store(out + (row * D)[:, None] + c[None, :], value.to(out.dtype.element_ty), mask=mask)


@tools.jit(do_not_specialize=["rows"])
def norm_backward_kernel(
    x, gate, weight, d_out, dx, d_gate, d_weight, rows, stride_x, stride_gate, eps,
    D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr, GATED: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """d_weight [programs, D] float32: sums over this program's rows."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    c = tl.arange(0, BD)
    b_w = tl.load(weight + c, mask=c < D, other=0.0).to(tl.float32)[None, :]
    weight_sum = tl.zeros((BD,), tl.float32)
    for first in range(program * BR, rows, programs * BR):
        row = tl.cast(first, tl.int64) + tl.arange(0, BR)
        mask = (row < rows)[:, None] & (c < D)[None, :]
        value = tl.load(x + (row * stride_x)[:, None] + c[None, :], mask=mask, other=0.0).to(tl.float32)  # [BR, BD]
        upper = tl.load(d_out + (row * D)[:, None] + c[None, :], mask=mask, other=0.0).to(tl.float32)  # [BR, BD]
        rms = tl.rsqrt(tl.sum(value * value, axis=1) / D + eps)[:, None]  # [BR, 1]
        value *= rms
        if GATED:
            share = tl.load(gate + (row * stride_gate)[:, None] + c[None, :], mask=mask, other=0.0).to(tl.float32)
            slope = sigmoid(-share, PTX)
            share = sigmoid(share, PTX)
            b_gate = upper * value * b_w * share * slope
            tl.store(d_gate + (row * D)[:, None] + c[None, :], b_gate.to(d_gate.dtype.element_ty), mask=mask)
            upper *= share
        weight_sum += tl.sum(upper * value, axis=0)
        upper *= b_w
        grad = rms * (upper - value * (tl.sum(upper * value, axis=1) / D)[:, None])
        tl.store(dx + (row * D)[:, None] + c[None, :], grad.to(dx.dtype.element_ty), mask=mask)
    tl.store(d_weight + program * D + c, weight_sum, mask=c < D)


@functools.cache
def _blocks(width: int) -> tuple[int, int, int]:
    """Columns, rows and warps of a program."""
    columns = tools.next_power_of_2(width)
    return columns, max(1, 2048 // columns), max(1, min(16, max(columns, 2048) // 1024))


def forward(x, gate, weight, eps):
    """x and gate (None for the plain norm) [..., D], weight [D] -> [..., D]; the plain norm's type is that of both."""
    dtype = torch.promote_types(x.dtype, weight.dtype) if gate is None else x.dtype
    out = torch.empty(x.shape, device=x.device, dtype=dtype)
    columns, block, warps = _blocks(x.shape[-1])
    rows, gates = tools.rows(x), None if gate is None else tools.rows(gate)
    norm_kernel[(tools.cdiv(len(rows), block),)](
        x=rows, gate=gates, weight=weight, out=out, rows=len(rows), stride_x=rows.stride(0),
        stride_gate=0 if gate is None else gates.stride(0), eps=eps,
        D=x.shape[-1], BD=columns, BR=block, GATED=gate is not None, PTX=tools.USE_PTX, num_warps=warps,
    )  # fmt: skip
    return out


def backward(x, gate, weight, eps, d_out):
    """-> gradients of x, gate (None without) and weight; d_out contiguous."""
    columns, block, warps = _blocks(x.shape[-1])
    rows, gates = tools.rows(x), None if gate is None else tools.rows(gate)
    programs = min(tools.cdiv(len(rows), block), 4 * tools.multiprocessors(x.device))
    dx = torch.empty(x.shape, device=x.device, dtype=x.dtype)
    d_gate = None if gate is None else torch.empty(gate.shape, device=x.device, dtype=gate.dtype)
    d_weight = torch.empty(programs, x.shape[-1], device=x.device, dtype=torch.float32)
    norm_backward_kernel[(programs,)](
        x=rows, gate=gates, weight=weight, d_out=d_out, dx=dx, d_gate=d_gate, d_weight=d_weight, rows=len(rows),
        stride_x=rows.stride(0), stride_gate=0 if gate is None else gates.stride(0), eps=eps,
        D=x.shape[-1], BD=columns, BR=block, GATED=gate is not None, PTX=tools.USE_PTX, num_warps=warps,
    )  # fmt: skip
    return dx, d_gate, d_weight.sum(0).to(weight.dtype)
