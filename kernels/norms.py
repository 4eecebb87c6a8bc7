"""RMS norms of the model (torch reference and dispatch), computed in float32 (float64 for float64)."""

import torch

from . import dispatch

# The widest row that one program of the Triton kernels holds.
MAX_WIDTH = 16384
_WIDE = (torch.float32, torch.float64)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) over the last dimension, rounded to the dtype of x **before** the weight comes in (two roundings)."""
    out = _fused(x, None, weight, eps)
    return _composed(x, None, weight, eps) if out is None else out


def gated_rms_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight * sigmoid(gate) over the last dimension: rounded once, to the dtype of x."""
    out = _fused(x, gate, weight, eps)
    return _composed(x, gate, weight, eps) if out is None else out


def _composed(x, gate, weight, eps):
    wide = widened(x)
    wide = wide * inverse_rms(wide, eps)
    if gate is None:
        return weight * cast(wide, x.dtype)
    return cast(wide * cast(weight, wide.dtype) * torch.sigmoid(cast(gate, wide.dtype)), x.dtype)


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in `dtype`; for one that is, `Tensor.to` costs what an operator costs."""
    return x if x.dtype == dtype else x.to(dtype)


def widened(x: torch.Tensor) -> torch.Tensor:
    """x in float32; float64 stays."""
    return x if x.dtype in _WIDE else x.to(torch.float32)


def inverse_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last dimension, which is kept with size 1."""
    # In place, and no mean: on a CPU a decoding step is what its operators cost.
    return torch.rsqrt(x.square().sum(-1, keepdim=True).mul_(1.0 / x.shape[-1]).add_(eps))


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
