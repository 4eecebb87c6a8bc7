"""Gated activations in one kernel each way: Triton form of `situ`."""

import torch

from . import triton_tools as tools

triton, tl = tools.triton, tools.tl
sigmoid, tanh = tools.sigmoid, tools.tanh
BLOCK = 1024


@triton.jit
def locate(M: tl.constexpr, BLOCK: tl.constexpr):
    """Row of this program, its columns, and which are real."""
    row = (tl.program_id(0) // tl.cdiv(M, BLOCK)).to(tl.int64)
    c = (tl.program_id(0) % tl.cdiv(M, BLOCK)) * BLOCK + tl.arange(0, BLOCK)
    return row, c, c < M


@tools.jit
def glu_kernel(
    gate, up, stride_gate, stride_up, out, beta, linear_beta,
    M: tl.constexpr, BLOCK: tl.constexpr, SITU: tl.constexpr, CAPPED: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    row, c, inside = locate(M, BLOCK)
    a = tl.load(gate + row * stride_gate + c, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(up + row * stride_up + c, mask=inside, other=0.0).to(tl.float32)
    share = sigmoid(a, PTX)
    if SITU:
        a = beta * tanh(a / beta, PTX)
    if CAPPED:
        b = linear_beta * tanh(b / linear_beta, PTX)
    tl.store(out + row * M + c, (a * share * b).to(out.dtype.element_ty), mask=inside)


@tools.jit
def glu_backward_kernel(
    gate, up, stride_gate, stride_up, d_out, d_gate, d_up, stride_grad, beta, linear_beta,
    M: tl.constexpr, BLOCK: tl.constexpr, SITU: tl.constexpr, CAPPED: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    row, c, inside = locate(M, BLOCK)
    a = tl.load(gate + row * stride_gate + c, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(up + row * stride_up + c, mask=inside, other=0.0).to(tl.float32)
    upper = tl.load(d_out + row * M + c, mask=inside, other=0.0).to(tl.float32)
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
    at = row * stride_grad + c
    tl.store(d_gate + at, d_a.to(d_gate.dtype.element_ty), mask=inside)
    tl.store(d_up + at, (capped * share * d_b * upper).to(d_up.dtype.element_ty), mask=inside)


def _launch(kernel, gate, up, beta, linear_beta, **arguments):
    gate, up = _halves(gate, up)
    gates, ups = tools.rows(gate), tools.rows(up)
    width = gates.shape[1]
    kernel[(len(gates) * tools.cdiv(width, BLOCK),)](
        gate=gates, up=ups, stride_gate=gates.stride(0), stride_up=ups.stride(0), **arguments, beta=beta or 1.0,
        linear_beta=linear_beta or 1.0, M=width, BLOCK=BLOCK, SITU=beta is not None, CAPPED=linear_beta is not None,
        PTX=tools.USE_PTX, num_warps=4,
    )  # fmt: skip


def _halves(gate, up):
    return gate.chunk(2, dim=-1) if up is None else (gate, up)


def forward(gate, up, beta, linear_beta):
    """gate and up [..., m], or `up` None and both in gate [..., 2 m] -> [..., m]; `beta` None for SwiGLU."""
    width = gate.shape[-1] if up is not None else gate.shape[-1] // 2
    out = torch.empty(*gate.shape[:-1], width, device=gate.device, dtype=gate.dtype)
    _launch(glu_kernel, gate, up, beta, linear_beta, out=out)
    return out


def backward(gate, up, beta, linear_beta, d_out):
    """-> gradients of gate and up, None for the latter where it is; d_out contiguous."""
    grads = [None if x is None else torch.empty(x.shape, device=x.device, dtype=x.dtype) for x in (gate, up)]
    d_gate, d_up = _halves(*grads)
    stride = grads[0].shape[-1]
    _launch(glu_backward_kernel, gate, up, beta, linear_beta, d_out=d_out, d_gate=d_gate, d_up=d_up, stride_grad=stride)
    return grads
