"""Gated activations in one kernel each way: Triton form of `situ`."""

import torch

from . import triton_tools as tools

triton, tl = tools.triton, tools.tl
sigmoid, tanh = tools.sigmoid, tools.tanh
BLOCK = 1024


@triton.jit
def locate(stride_gate, stride_up, M: tl.constexpr, BLOCK: tl.constexpr):
    """Columns of this program, which are real, and offsets into gate, up and the contiguous result."""
    row = (tl.program_id(0) // tl.cdiv(M, BLOCK)).to(tl.int64)
    c = (tl.program_id(0) % tl.cdiv(M, BLOCK)) * BLOCK + tl.arange(0, BLOCK)
    return c < M, row * stride_gate + c, row * stride_up + c, row * M + c


@triton.jit
def glu_kernel(
    gate, up, out, stride_gate, stride_up, beta, linear_beta,
    M: tl.constexpr, BLOCK: tl.constexpr, SITU: tl.constexpr, CAPPED: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    inside, at_gate, at_up, at = locate(stride_gate, stride_up, M, BLOCK)
    a = tl.load(gate + at_gate, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(up + at_up, mask=inside, other=0.0).to(tl.float32)
    share = sigmoid(a, PTX)
    if SITU:
        a = beta * tanh(a / beta, PTX)
    if CAPPED:
        b = linear_beta * tanh(b / linear_beta, PTX)
    tl.store(out + at, (a * share * b).to(out.dtype.element_ty), mask=inside)


@triton.jit
def glu_backward_kernel(
    gate, up, d_out, d_gate, d_up, stride_gate, stride_up, beta, linear_beta,
    M: tl.constexpr, BLOCK: tl.constexpr, SITU: tl.constexpr, CAPPED: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    inside, at_gate, at_up, at = locate(stride_gate, stride_up, M, BLOCK)
    a = tl.load(gate + at_gate, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(up + at_up, mask=inside, other=0.0).to(tl.float32)
    upper = tl.load(d_out + at, mask=inside, other=0.0).to(tl.float32)
    share, slope = sigmoid(a, PTX), sigmoid(-a, PTX)
    capped = a
    d_capped = share * 0.0 + 1.0
    if SITU:
        bent = tanh(a / beta, PTX)
        capped, d_capped = beta * bent, 1.0 - bent * bent
    d_b = share * 0.0 + 1.0
    if CAPPED:
        bent = tanh(b / linear_beta, PTX)
        b, d_b = linear_beta * bent, 1.0 - bent * bent
    d_a = share * (d_capped + capped * slope) * b * upper
    tl.store(d_gate + at, d_a.to(d_gate.dtype.element_ty), mask=inside)
    tl.store(d_up + at, (capped * share * d_b * upper).to(d_up.dtype.element_ty), mask=inside)


def _launch(kernel, gate, up, beta, linear_beta, *results):
    gates, ups = tools.rows(gate), tools.rows(up)
    kernel[(len(gates) * triton.cdiv(gate.shape[-1], BLOCK),)](
        gates, ups, *results, gates.stride(0), ups.stride(0), beta or 1.0, linear_beta or 1.0,
        gate.shape[-1], BLOCK, beta is not None, linear_beta is not None, tools.USE_PTX, num_warps=4,
    )  # fmt: skip


def forward(gate, up, beta, linear_beta):
    """gate and up [..., m] -> [..., m]; `beta` None for SwiGLU."""
    out = torch.empty(gate.shape, device=gate.device, dtype=gate.dtype)
    _launch(glu_kernel, gate, up, beta, linear_beta, out)
    return out


def backward(gate, up, beta, linear_beta, d_out):
    """-> gradients of gate and up; d_out contiguous."""
    grads = [torch.empty(x.shape, device=x.device, dtype=x.dtype) for x in (gate, up)]
    _launch(glu_backward_kernel, gate, up, beta, linear_beta, d_out, *grads)
    return grads
