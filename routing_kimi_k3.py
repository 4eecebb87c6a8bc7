"""Router replay: the experts that tokens went to, as an earlier forward returned them for a later one."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig
from transformers.generation.configuration_utils import GenerationMode

from .cache_kimi_k3 import RefusedForward
from .configuration_kimi_k3 import KimiK3TextConfig


def checked_routing(
    routed_experts: Any,
    wanted: bool,
    embeds: torch.Tensor,
    layers: Iterable[nn.Module],
    config: KimiK3TextConfig,
) -> torch.Tensor | None:
    """The experts that routers are to take, as int64 where the embeddings lie; None where they choose.

    Args:
        routed_experts: what a forward was given, [B, T, MoE layers, experts a token], or None.
        wanted: whether it is to return what its routers say or choose.
        embeds: [B, T, hidden].
        layers: all decoder layers of the forward.

    Raises:
        RefusedForward: for what is no such tensor, and for a model without routed experts.
    """
    if routed_experts is None and not wanted:
        return None
    moe_layers = sum(hasattr(layer, "block_sparse_moe") for layer in layers)
    if not moe_layers:
        raise RefusedForward(
            "this model has no routed experts: leave routed_experts, output_routed_experts and output_router_logits "
            "out (trl asks for the last one where router_aux_loss_coef is set)"
        )
    if routed_experts is None:
        return None
    expected, most = [*embeds.shape[:2], moe_layers, config.num_experts_per_token], (config.num_experts or 0) - 1
    found = list(routed_experts.shape) if isinstance(routed_experts, torch.Tensor) else type(routed_experts).__name__
    if found != expected or routed_experts.dtype.is_floating_point or routed_experts.dtype == torch.bool:
        raise RefusedForward(
            f"routed_experts must be integers [B, T, MoE layers, experts a token], here {expected}, not {found}"
            f"{f' of {routed_experts.dtype}' if found == expected else ''}"
        )
    routed_experts = routed_experts.to(embeds.device, torch.int64)
    if routed_experts.is_meta or torch.compiler.is_compiling():
        return routed_experts
    ordered = routed_experts.sort(dim=-1).values
    valid = (ordered[..., 0] >= 0) & (ordered[..., -1] <= most) & (ordered.diff(dim=-1) > 0).all(dim=-1)
    if not (valid | (ordered == -1).all(dim=-1)).all():
        raise RefusedForward(
            f"routed_experts must name {expected[-1]} different experts from 0 to {most} for every token and MoE "
            "layer, or be -1 in all of these places, where the router chooses"
        )
    return routed_experts


def check_generation(
    generation_config: GenerationConfig, model_kwargs: dict[str, Any], generation_mode: GenerationMode
) -> None:
    """Refuse what `generate` cannot do with the experts of its tokens."""
    if model_kwargs.get("routed_experts") is not None:
        raise ValueError("generate chooses experts itself: give routed_experts to a forward of the finished text")
    if not model_kwargs.get("output_routed_experts"):
        return
    if generation_mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(
            "output_routed_experts works with greedy decoding and sampling: beams and drafts feed tokens that are not "
            "in the result"
        )
    if not generation_config.use_cache:
        raise ValueError("output_routed_experts needs use_cache=True: every token is to be fed once")
    if not generation_config.return_dict_in_generate:
        raise ValueError("output_routed_experts needs return_dict_in_generate=True, which gives it a place")
