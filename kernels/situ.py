"""Gated activations of the MLPs and experts: SiTU-GLU (Kimi K3) and SwiGLU (Kimi-Linear), reference and dispatch."""

import torch
import torch.nn.functional as F

from . import dispatch, norms


def situ_glu(gate: torch.Tensor, up: torch.Tensor | None, beta: float, linear_beta: float | None) -> torch.Tensor:
    """[beta tanh(a / beta) sigmoid(a)] * [linear_beta tanh(b / linear_beta)], in float32 with one rounding at the end.

    The sigmoid takes the uncapped gate; `linear_beta` None leaves the up branch uncapped, otherwise the result is
    at most beta * linear_beta.

    Args:
        gate, up: [..., m], same dtype, which the result has too; or `up` None and `gate` [..., 2 m], its own columns
            first, so that the gradient is one tensor as well.
    """
    out = _fused(gate, up, beta, linear_beta)
    return _composed(gate, up, beta, linear_beta) if out is None else out


def swiglu(gate: torch.Tensor, up: torch.Tensor | None) -> torch.Tensor:
    """SiLU(gate) * up, arguments as there. (In half precision the Triton form rounds once, the torch form twice.)"""
    out = _fused(gate, up, None, None)
    return _composed(gate, up, None, None) if out is None else out


def _composed(gate, up, beta, linear_beta):
    if up is None:
        gate, up = gate.chunk(2, dim=-1)
    if beta is None:
        return F.silu(gate) * up
    a, b = norms.widened(gate), norms.widened(up)
    largest = beta
    if linear_beta is not None:
        b, largest = torch.tanh(b / linear_beta), beta * linear_beta
    return norms.cast(torch.tanh(a / beta) * torch.sigmoid(a) * b * largest, gate.dtype)


def _fused(gate, up, beta, linear_beta):
    """Either activation as one Triton kernel; None where that does not run."""
    if up is None and gate.shape[-1] % 2:
        raise ValueError(f"gate and up in one tensor have as many columns each, but there are {gate.shape[-1]} in all")
    tensors = [gate] if up is None else [gate, up]
    if dispatch.triton_refusal(*tensors) is not None or gate.dtype != tensors[-1].dtype or gate.numel() == 0:
        return None
    return dispatch.run_differentiable(_forward, _backward, (gate, up), (beta, linear_beta))


def _forward(tensors, betas, _):
    from . import situ_triton

    return situ_triton.forward(*tensors, *betas), ()


def _backward(tensors, _, betas, grads):
    from . import situ_triton

    found = dispatch.run_kernels(situ_triton.backward, *tensors, *betas, *grads)
    return found or dispatch.recomputed(lambda *leaves: (_composed(*leaves, *betas),), tensors, grads)
