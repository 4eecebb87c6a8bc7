"""Gated activations of the MLPs and experts: SiTU-GLU (Kimi K3) and SwiGLU (Kimi-Linear), torch reference."""

import torch
import torch.nn.functional as F


def situ_glu(gate: torch.Tensor, up: torch.Tensor, beta: float, linear_beta: float | None) -> torch.Tensor:
    """[beta tanh(a / beta) sigmoid(a)] * [linear_beta tanh(b / linear_beta)], in float32 with one rounding at the end.

    The sigmoid takes the uncapped gate; `linear_beta` None leaves the up branch uncapped, otherwise the result is
    at most beta * linear_beta.

    Args:
        gate, up: [..., m], same dtype, which the result has too.
    """
    dtype = torch.promote_types(gate.dtype, torch.float32)
    a, b = gate.to(dtype), up.to(dtype)
    if linear_beta is not None:
        b = linear_beta * torch.tanh(b / linear_beta)
    return (beta * torch.tanh(a / beta) * torch.sigmoid(a) * b).to(gate.dtype)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """SiLU(gate) * up, [..., m]."""
    return F.silu(gate) * up
