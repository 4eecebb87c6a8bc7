"""RMS norms of the model (torch reference and dispatch), computed in float32 (float64 for float64)."""

import torch

from . import dispatch

# The widest row that one program of the Triton kernels holds.
MAX_WIDTH = 16384


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) over the last dimension, rounded to the dtype of x **before** the weight comes in (two roundings)."""
    out = _fused(x, None, weight, eps)
    return _composed(x, None, weight, eps) if out is None else out


def gated_rms_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight * sigmoid(gate) over the last dimension: rounded once, to the dtype of x."""
    out = _fused(x, gate, weight, eps)
    return _composed(x, gate, weight, eps) if out is None else out


def _composed(x, gate, weight, eps):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if gate is None:
        return weight * wide.to(x.dtype)
    return (wide * weight.to(wide.dtype) * torch.sigmoid(gate.to(wide.dtype))).to(x.dtype)


def _fused(x, gate, weight, eps):
    """Either norm as one Triton kernel; None where that does not run."""
    tensors = [x, weight] if gate is None else [x, gate, weight]
    if dispatch.triton_refusal(*tensors) is not None or x.numel() == 0 or x.shape[-1] > MAX_WIDTH:
        return None
    return dispatch.run_differentiable(_forward, _backward, (x, gate, weight), eps)


def _forward(tensors, eps, _):
    from . import norms_triton

    return norms_triton.forward(*tensors, eps), ()


def _backward(tensors, _, eps, grads):
    """The roundings of the plain norm have no gradient, as in the reference."""
    from . import norms_triton

    found = dispatch.run_kernels(norms_triton.backward, *tensors, eps, *grads)
    return found or dispatch.recomputed(lambda *leaves: (_composed(*leaves, eps),), tensors, grads)
