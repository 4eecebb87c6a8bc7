"""Quantisation-aware training of the routed experts: MXFP4 weights and MXFP8 activations, straight through.

The Kimi K3 report (p. 12, 14) trains with both from supervised fine-tuning on; attention, latent projections, shared
experts and routers stay as they are. The forward sees rounded values, the backward ignores the rounding, and the
optimizer moves the unrounded weights.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from ..kernels.experts import grouped_experts
from ..kernels.mxfp4 import GROUP, dequantize_mxfp4, quantize_mxfp4
from ..layers_kimi_k3 import KimiK3Experts, KimiK3PackedExperts

WEIGHTS = ("gate_up_proj", "down_proj")
# Largest number and exponent of E4M3.
LARGEST, TOP_EXPONENT = 448.0, 8


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rounded):
        return rounded

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def mxfp4(weight: torch.Tensor) -> torch.Tensor:
    """Every weight [..., K] as its MXFP4 value, in the dtype of `weight`; the gradient passes unchanged."""
    return _StraightThrough.apply(weight, dequantize_mxfp4(*quantize_mxfp4(weight), weight.dtype))


def mxfp8(x: torch.Tensor) -> torch.Tensor:
    """Every activation [..., K] as its MXFP8 value (OCP Microscaling 1.0, section 6.3: E4M3, a power of two for 32).

    Raises:
        ValueError: if K is not a multiple of 32.
    """
    if x.shape[-1] % GROUP:
        raise ValueError(f"the last dimension ({x.shape[-1]}) must be a multiple of {GROUP}")
    groups = x.detach().float().unflatten(-1, (-1, GROUP))
    exponent = torch.frexp(groups.abs().amax(-1, keepdim=True)).exponent - 1 - TOP_EXPONENT
    exponent = exponent.clamp(-127, 127)  # of an E8M0 scale
    scaled = torch.ldexp(groups, -exponent).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float()
    rounded = torch.where(groups.isfinite(), torch.ldexp(scaled, exponent), groups)
    return _StraightThrough.apply(x, rounded.flatten(-2).to(x.dtype))


class _QuantizedExperts(KimiK3Experts):
    """`KimiK3Experts` whose products see rounded weights and, with `quantized_activations`, rounded rows."""

    def forward(self, hidden_states, top_k_index, top_k_weights):
        gate_up, down = self.gate_up_proj.unbind(0), self.down_proj.unbind(0)
        rows = mxfp8 if self.quantized_activations else lambda x: x
        return grouped_experts(
            hidden_states,
            top_k_index,
            top_k_weights,
            self.num_experts,
            lambda expert: (mxfp4(gate_up[expert]), mxfp4(down[expert])),
            self._apply_gate,
            lambda x, weight: F.linear(rows(x), weight),
        )


def start_qat(model: nn.Module, activations: bool = True) -> nn.Module:
    """Round the routed experts of a model in every forward from now on; names and parameters stay as they are.

    Args:
        model: a Kimi K3 model with floating-point experts.
        activations: also round the rows that enter the experts' products, to MXFP8.

    Returns:
        the model.

    Raises:
        ValueError: if it has no floating-point experts, or transformers' own experts implementation is set.
    """
    experts = _experts(model, KimiK3Experts)
    if not experts:
        hint = ": load its packed ones with dequantize=True" if _experts(model, KimiK3PackedExperts) else ""
        raise ValueError(f"the model has no floating-point experts to quantise{hint}")
    if any(isinstance(getattr(module, "base_layer", None), KimiK3Experts) for module in model.modules()):
        raise ValueError("adapters lie on the routed experts and would read unrounded weights: merge or remove them")
    implementation = getattr(experts[0].config, "_experts_implementation", None)
    if implementation not in (None, "eager"):
        raise ValueError(f"experts_implementation={implementation!r} reads unrounded weights: set it to 'eager'")
    for module in experts:
        module.__class__, module.quantized_activations = _QuantizedExperts, activations
    return model


@torch.no_grad()
def finish_qat(model: nn.Module) -> nn.Module:
    """Replace the trained weights by the rounded ones, and restore the forward as it was before `start_qat`.

    The result is exact in MXFP4: quantising it for a packed checkpoint changes no value.
    """
    for module in _experts(model, _QuantizedExperts):
        for name in WEIGHTS:
            weight = getattr(module, name)
            if isinstance(weight, DTensor):  # FSDP2 leaves whole experts on a process
                weight = weight.to_local()
            for expert in weight.unbind(0):
                expert.copy_(mxfp4(expert))
        del module.quantized_activations
        module.__class__ = KimiK3Experts
    return model


def _experts(model, kind):
    return [module for module in model.modules() if isinstance(module, kind)]
