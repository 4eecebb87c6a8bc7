"""The layers of Kimi K3 in the order of the computation: norms, KDA, MLA, MLP and experts, decoder layer.

The operations live in `kernels/`, each with its torch reference; this file holds the parameters and what flows between
them (`docs/design.md` draws it).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import BlockMask
from transformers.integrations import use_experts_implementation
from transformers.integrations.moe import grouped_mm_experts_forward
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging
from transformers.utils.generic import is_flash_attention_requested

from .cache_kimi_k3 import HybridCache
from .cache_layers_kimi_k3 import (
    KDACacheLayer,
    KDAForward,
    LatentCacheLayer,
    StaticKDACacheLayer,
    StaticLatentCacheLayer,
)
from .configuration_kimi_k3 import KimiK3TextConfig
from .kernels_kimi_k3 import (
    attn_res,
    dispatch,
    kda,
    kda_step,
    mla_decode,
    mla_prefill,
    mxfp4,
    norms,
    router,
    short_conv,
    situ,
)
from .kernels_kimi_k3 import (
    experts as experts_op,
)
from .packing_kimi_k3 import Packing, StepPacking
from .rollback_kimi_k3 import KDAState, ProjectedInputs

logger = logging.get_logger(__name__)

# The latent norms of MLA keep the default of the official module, not `rms_norm_eps` (docs/design.md, disputed facts).
LATENT_NORM_EPS = 1e-6
# Scores [T, H, S] of the absorbed form that may be in memory at once: 64 MB in float32. More go in blocks of keys.
MOST_SCORES = 1 << 24


# In the form of the attention implementation: [B, 1, T, S], boolean or additive; [B, S]; flex attention's; or none.
Mask = torch.Tensor | BlockMask | None


def at_least_float32() -> torch.dtype:
    """dtype of the parameters that stay float32 when the model is built or loaded in a half precision."""
    return torch.promote_types(torch.get_default_dtype(), torch.float32)


class KimiK3RMSNorm(nn.Module):
    """float32 normalisation, rounded to the input's dtype **before** the weight is applied (two roundings)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return norms.rms_norm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class KimiK3RMSNormGated(nn.Module):
    """KDA output norm: norm first, sigmoid gate after, float32 throughout with one rounding at the end."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype))
        self.eps = eps

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """x and gate [..., V], of one dtype."""
        return norms.gated_rms_norm(x, gate, self.weight, self.eps)


class KimiK3ShortConvolution(nn.Module):
    """Weight of one causal depthwise convolution, [channels, 1, width] as in the checkpoint.

    Called for it, so that offloading hooks act; the convolution belongs to the fused operations.
    """

    def __init__(self, channels: int, width: int, dtype: torch.dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width, dtype=dtype))

    def forward(self) -> torch.Tensor:
        return self.weight


class KimiK3DeltaAttention(nn.Module):
    """Kimi Delta Attention (Kimi K3 report, p. 4-5; Kimi Linear, arXiv 2510.26692)."""

    def __init__(self, config: KimiK3TextConfig, layer_idx: int):
        super().__init__()
        linear = config.linear_attn_config
        self.layer_idx = layer_idx
        self.num_heads, self.head_dim = linear["num_heads"], linear["head_dim"]
        self.lower_bound = config.gate_lower_bound
        hidden, channels, width = config.hidden_size, self.num_heads * self.head_dim, linear["short_conv_kernel_size"]
        stored = torch.get_default_dtype() if config.has_softplus_gate else at_least_float32()

        self.q_proj = nn.Linear(hidden, channels, bias=False)
        self.k_proj = nn.Linear(hidden, channels, bias=False)
        self.v_proj = nn.Linear(hidden, channels, bias=False)
        self.q_conv1d = KimiK3ShortConvolution(channels, width, stored)
        self.k_conv1d = KimiK3ShortConvolution(channels, width, stored)
        self.v_conv1d = KimiK3ShortConvolution(channels, width, stored)
        self.f_a_proj = nn.Linear(hidden, self.head_dim, bias=False)
        self.f_b_proj = nn.Linear(self.head_dim, channels, bias=False)
        self.A_log = nn.Parameter(torch.empty(self.num_heads, dtype=at_least_float32()))
        self.dt_bias = nn.Parameter(torch.empty(channels, dtype=at_least_float32()))
        self.b_proj = nn.Linear(hidden, self.num_heads, bias=False)
        self.full_rank_gate = linear.get("use_full_rank_gate", False)
        if self.full_rank_gate:
            self.g_proj = nn.Linear(hidden, channels, bias=False)
        else:
            self.g_a_proj = nn.Linear(hidden, self.head_dim, bias=False)
            self.g_b_proj = nn.Linear(self.head_dim, channels, bias=False)
        self.o_norm = KimiK3RMSNormGated(self.head_dim, config.rms_norm_eps, stored)
        self.o_proj = nn.Linear(channels, hidden, bias=False)

    def forward(
        self,
        hidden_states: torch.Tensor,
        cache: HybridCache | None = None,
        packing: Packing | StepPacking | None = None,
        context: Any = None,
    ) -> torch.Tensor:
        """[B, T, hidden] -> [B, T, hidden]; reads and advances the layer's state in `cache`.

        `context` knows the tokens before these where they lie on other processes (`parallel/context.py`).
        """
        convolve, recur = short_conv.short_convs, kda.fused_kda
        if context is not None:
            convolve, recur = context.short_convs, context.fused_kda
        batch, length, _ = hidden_states.shape
        cache_layer: KDACacheLayer | StaticKDACacheLayer | None = None
        if cache is not None:
            cache_layer = cache.layers[self.layer_idx]
        before = cache_layer.read(hidden_states.device) if cache_layer is not None else KDAState()
        real = None
        if isinstance(packing, StepPacking):  # every row computes, those at padding do not keep the result
            real, packing = packing.real, None
        x, cu_seqlens = (hidden_states, None) if packing is None else (packing.take(hidden_states), packing.cu_seqlens)

        projected = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        logits = self.f_b_proj(self.f_a_proj(x)), self.b_proj(x)
        gate = self.g_proj(x) if self.full_rank_gate else self.g_b_proj(self.g_a_proj(x))
        conv_weights = self.q_conv1d(), self.k_conv1d(), self.v_conv1d()
        parameters = kda.KDAParameters(self.A_log, self.dt_bias, self.lower_bound)
        boundaries = cache_layer.boundaries(length) if cache_layer is not None and packing is None else []
        tails: tuple[torch.Tensor, ...] | None
        passed: dict[int, KDAState] = {}
        with kda.full_precision(x.device):
            few = packing is None and length <= kda_step.MAX_TOKENS and not boundaries
            few = few and dispatch.stands_for_call(self.o_norm, KimiK3RMSNormGated)
            slots = None if cache_layer is None else cache_layer.slots
            if slots is not None and not few:
                before = before.map(lambda x: x.index_select(0, slots))
            if few and cache_layer is not None and before.tails is not None and before.recurrent is not None:
                step = *projected, *logits, gate, before.tails, conv_weights, parameters, self.o_norm.weight
                # Under autograd the cache refuses what it is given, unchanged.
                in_place = cache_layer.writes_in_place and real is None and not torch.is_grad_enabled()
                out, tails, recurrent = kda_step.kda_step(
                    *step, before.recurrent, self.o_norm.eps, in_place=in_place, slots=slots
                )
            else:
                convolved, tails = convolve(projected, conv_weights, before.tails, cu_seqlens, cache_layer is not None)
                heads = (*x.shape[:2], self.num_heads, self.head_dim)
                q, k, v, decay = (u.view(heads) for u in (*convolved, logits[0]))
                arguments = q, k, v, decay, logits[1], parameters
                if boundaries:
                    out, recurrent, states = kda.fused_kda_states(*arguments, before.recurrent, boundaries)
                    for tokens, state in zip(boundaries, states, strict=True):
                        at = short_conv.tails_after(projected, before.tails, conv_weights, tokens)
                        passed[tokens] = KDAState(at, state)
                else:
                    out, recurrent = recur(*arguments, initial_state=before.recurrent, cu_seqlens=cu_seqlens)
                out = self.o_norm(out, gate.view(heads)).flatten(-2)
        if cache_layer is not None:
            order = None if packing is None else packing.order

            def inputs():
                return ProjectedInputs.of_forward(projected, logits, conv_weights, parameters, order, batch, length)

            cache_layer.store(KDAForward(KDAState(tails, recurrent), length, inputs, passed, real))
        if packing is not None:
            out = packing.put_back(out, batch, length)
        return self.o_proj(out)


def eager_attention_forward(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None, scaling: float, dropout: float = 0.0, **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """softmax(q k^T scaling + mask) v with a float32 softmax; query [B, H, T, D], key and value [B, H, S, D / V]."""
    weights = torch.matmul(query, key.transpose(2, 3)) * scaling
    if attention_mask is not None:
        weights = weights + attention_mask
    weights = F.softmax(weights, dim=-1, dtype=torch.promote_types(query.dtype, torch.float32)).to(query.dtype)
    weights = F.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


class KimiK3MLAttention(nn.Module):
    """Multi-head latent attention without positions, optionally with a low-rank query and a sigmoid output gate.

    What is cached is the compressed latent. A long prompt expands it into keys and values; a few new tokens against a
    long cache are cheaper in the absorbed form, where `kv_b_proj` is folded into query and output and all heads read
    the one latent. Both are the same sum in another order.
    """

    def __init__(self, config: KimiK3TextConfig, layer_idx: int):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        hidden, self.num_heads = config.hidden_size, config.num_attention_heads
        self.nope_dim, self.rope_dim, self.v_dim = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.qk_dim, self.kv_rank = self.nope_dim + self.rope_dim, config.kv_lora_rank
        self.scaling = self.qk_dim**-0.5
        self.is_causal = True

        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(hidden, self.num_heads * self.qk_dim, bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden, config.q_lora_rank, bias=False)
            self.q_a_layernorm = KimiK3RMSNorm(config.q_lora_rank, LATENT_NORM_EPS)
            self.q_b_proj = nn.Linear(config.q_lora_rank, self.num_heads * self.qk_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, self.kv_rank + self.rope_dim, bias=False)
        self.kv_a_layernorm = KimiK3RMSNorm(self.kv_rank, LATENT_NORM_EPS)
        self.kv_b_proj = nn.Linear(self.kv_rank, self.num_heads * (self.nope_dim + self.v_dim), bias=False)
        if config.mla_use_output_gate:
            self.g_proj = nn.Linear(hidden, self.num_heads * self.v_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.v_dim, hidden, bias=False)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Mask = None,
        cache: HybridCache | None = None,
        packing: Packing | StepPacking | None = None,
        need_weights: bool = False,
        in_blocks: bool = False,
        context: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[B, T, hidden] -> ([B, T, hidden], attention weights [B, H, T, S] or None).

        With `need_weights` the attention runs eagerly, whatever implementation is set: the fused ones have none.
        `in_blocks` says that causality is all there is to mask, and bounds the memory (`kernels/mla_prefill.py`).
        `context` reaches the tokens on other processes (`parallel/context.py`).
        """
        rows, columns, _ = hidden_states.shape
        ragged = None
        if isinstance(packing, Packing) and cache is None and not need_weights:
            # flash kernels know no mask between documents: as in KDA, real tokens only, end to end
            ragged = packing if is_flash_attention_requested(self.config) else None
        if ragged is not None:
            hidden_states, attention_mask = ragged.take(hidden_states), None
            offsets = ragged.cu_seqlens.to(torch.int32)
            kwargs |= {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets}
            kwargs |= {"max_length_q": ragged.longest, "max_length_k": ragged.longest}
        batch, length, _ = hidden_states.shape
        if self.config.q_lora_rank is None:
            query = self.q_proj(hidden_states)
        else:
            query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        query = query.view(batch, length, self.num_heads, self.qk_dim).transpose(1, 2)
        latent, k_pe = self.kv_a_proj_with_mqa(hidden_states).split([self.kv_rank, self.rope_dim], dim=-1)
        latents = torch.cat([self.kv_a_layernorm(latent), k_pe], dim=-1)
        filled = None
        if cache is not None:
            cache_layer: LatentCacheLayer | StaticLatentCacheLayer = cache.layers[self.layer_idx]
            latents = cache_layer.append(latents)
            filled = cache_layer.get_seq_length()

        if context is not None:
            out, weights = context.attention(self, query, latents, **kwargs), None
        else:
            out, weights = self.attend(query, latents, attention_mask, filled, need_weights, in_blocks, **kwargs)
        out = out.reshape(batch, length, -1)
        if self.config.mla_use_output_gate:
            out = out * torch.sigmoid(self.g_proj(hidden_states))
        out = self.o_proj(out)
        return ragged.put_back(out, rows, columns) if ragged is not None else out, weights

    def attend(
        self, query: torch.Tensor, latents: torch.Tensor, attention_mask: Mask, filled: Any, need_weights: bool,
        in_blocks: bool, **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """([B, T, H, V], attention weights or None) in the form that costs least.

        A few tokens on a GPU run as a kernel; a static cache's count `filled` tells it where the filled part ends.
        """
        if self._absorbing_is_cheaper(query.shape[2], latents.shape[1]):
            if isinstance(attention_mask, BlockMask):
                attention_mask = self.explicit_mask(attention_mask, query, latents.shape[1])
            if not need_weights:
                kv_b = self.kv_b_proj.weight.view(self.num_heads, -1, self.kv_rank)
                lengths = filled if isinstance(filled, torch.Tensor) else None
                out = mla_decode.absorbed_attention(query, latents, kv_b, self.scaling, attention_mask, lengths)
                if out is not None:
                    return out, None
            if not (in_blocks and self._scores_are_many(query, latents)):
                return self._absorbed(query, latents, attention_mask)
        if in_blocks:
            return mla_prefill.attend_in_blocks(query, latents, self._keys_and_values, self.scaling), None
        return self._expanded(query, latents, attention_mask, need_weights, **kwargs)

    def _absorbing_is_cheaper(self, queries: int, keys: int) -> bool:
        """Multiplications a head: expanding costs `kv_rank * (nope + v)` a key, absorbing makes each pair wider."""
        if queries == keys or not dispatch.stands_for_call(self.kv_b_proj, nn.Linear):
            return False
        wider = 2 * self.kv_rank - self.nope_dim - self.v_dim
        return queries * wider < self.kv_rank * (self.nope_dim + self.v_dim)

    def _scores_are_many(self, query: torch.Tensor, latents: torch.Tensor) -> bool:
        """Too many of the absorbed form for memory: never those of one token."""
        batch, heads, length, _ = query.shape
        return length > 1 and batch * heads * length * latents.shape[1] > MOST_SCORES

    def _keys_and_values(
        self, latents: torch.Tensor, heads: int | None = None, kv_b: nn.Module | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, S, R + P] -> keys [B, H, S, nope + rope] and values [B, H, S, V].

        `kv_b` stands in for `kv_b_proj` where it makes some of the heads only, `heads` of them.
        """
        heads, kv_b = heads or self.num_heads, kv_b or self.kv_b_proj
        latent, k_pe = latents.split([self.kv_rank, self.rope_dim], dim=-1)
        expanded = kv_b(latent).view(*latents.shape[:2], heads, self.nope_dim + self.v_dim).transpose(1, 2)
        key_nope, value = expanded.split([self.nope_dim, self.v_dim], dim=-1)
        return torch.cat([key_nope, k_pe[:, None].expand(-1, heads, -1, -1)], dim=-1), value

    def _expanded(self, query, latents, attention_mask, need_weights, kv_b=None, **kwargs):
        key, value = self._keys_and_values(latents, query.shape[1], kv_b)
        if need_weights:
            mask = self.explicit_mask(attention_mask, query, latents.shape[1])
            return eager_attention_forward(self, query, key, value, mask, self.scaling)
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        # The fused kernels of sdpa want one head size; without padding torch falls back to a [T, S] matrix.
        # transformers pads the values for flash kernels, flex attention takes them as they are.
        padding = self.qk_dim - self.v_dim if self.config._attn_implementation == "sdpa" else 0
        if padding > 0:
            value = F.pad(value, (0, padding))
        out, weights = attention(self, query, key, value, attention_mask, scaling=self.scaling, **kwargs)
        return out[..., : self.v_dim] if padding > 0 else out, weights

    def _absorbed(self, query, latents, attention_mask):
        """Heads become rows of one query against the latents: [B, 1, T * H, kv_rank + rope]."""
        batch, heads, length, _ = query.shape
        w_uk, w_uv = self.kv_b_proj.weight.view(heads, -1, self.kv_rank).split([self.nope_dim, self.v_dim], dim=1)
        query_nope, query_pe = query.split([self.nope_dim, self.rope_dim], dim=-1)
        rows = torch.cat([query_nope @ w_uk, query_pe], dim=-1).transpose(1, 2).reshape(batch, 1, length * heads, -1)
        mask = self.explicit_mask(attention_mask, query, latents.shape[1])
        if mask is not None and length > 1:
            mask = mask.repeat_interleave(heads, dim=2)
        latents = latents[:, None]
        # Always the explicit form: it reads the latents once for all heads and copies none of them.
        out, weights = eager_attention_forward(self, rows, latents, latents[..., : self.kv_rank], mask, self.scaling)
        out = out.view(batch, length, heads, self.kv_rank).transpose(1, 2) @ w_uv.transpose(1, 2)
        return out.transpose(1, 2), weights.view(batch, length, heads, -1).transpose(1, 2)

    @staticmethod
    def explicit_mask(mask: Mask, query: torch.Tensor, keys: int) -> torch.Tensor | None:
        """The mask of any implementation as one to add to scores [B, H, T, S]; None for a token that reads all keys.

        Args:
            mask: [B, 1, T, S], boolean or additive; the [B, S] of flash kernels or None, beside which causality is
                understood; or the BlockMask of flex attention.
        """
        queries, device = query.shape[2], query.device
        if isinstance(mask, BlockMask):
            at = [torch.arange(n, device=device) for n in (query.shape[0], 1, queries, keys)]
            mask = mask.mask_mod(at[0][:, None, None, None], at[1], at[2][:, None], at[3])
            mask = mask.expand(query.shape[0], 1, queries, keys)  # one that asks for no row has no dimension for it
        elif mask is None or mask.dim() == 2:
            if mask is not None:
                mask = mask[:, None, None].bool()
            if queries > 1:
                causal = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
                mask = causal if mask is None else causal & mask
        if mask is None or mask.dtype != torch.bool:
            return mask
        return torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, torch.finfo(query.dtype).min)


def activation_betas(config: KimiK3TextConfig) -> tuple[float | None, float | None]:
    """The two numbers of the gated activation that the config names, as `glu` takes them; None and None for SwiGLU."""
    is_situ = config.hidden_act == "situ"
    return (config.activation_situ_beta, config.activation_situ_linear_beta) if is_situ else (None, None)


def glu(betas: tuple[float | None, float | None], gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
    """The gated activation of these `activation_betas`; without `up`, gate is [..., 2 m] with the columns of both."""
    beta, linear_beta = betas
    return situ.swiglu(gate, up) if beta is None else situ.situ_glu(gate, up, beta, linear_beta)


def fused_experts(
    experts: "KimiK3Experts | KimiK3PackedExperts",
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor | None:
    """`kernels.experts.fused_experts` with the gated activation that the config names."""
    # Expert parallelism marks the tokens of other processes' experts with numbers past the last of its own.
    elsewhere = experts.num_experts < experts.experts_of_all
    return experts_op.fused_experts(x, expert_ids, expert_weights, gate_up, down, scales, *experts.betas, elsewhere)


def expert_sizes(config: KimiK3TextConfig) -> tuple[int, int, int]:
    """Of a MoE layer: the number of routed experts, the width that they work in, the width between their matrices."""
    experts, inner = config.num_experts, config.moe_intermediate_size
    assert experts is not None and inner is not None  # without experts there are no such layers
    return experts, config.routed_expert_hidden_size or config.hidden_size, inner


class KimiK3MLP(nn.Module):
    """Dense gated MLP: the layers before the first MoE layer, and the shared experts as one wide MLP."""

    def __init__(self, config: KimiK3TextConfig, intermediate_size: int):
        super().__init__()
        self.betas = activation_betas(config)
        self.gate_proj = nn.Linear(config.hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(glu(self.betas, self.gate_proj(x), self.up_proj(x)))


class KimiK3TopkRouter(nn.Module):
    """Router in float32. The selection bias decides which experts are chosen, never how they are weighted."""

    e_score_correction_bias: torch.Tensor

    def __init__(self, config: KimiK3TextConfig):
        super().__init__()
        self.config = config
        dtype = torch.get_default_dtype() if config.has_softplus_gate else at_least_float32()
        experts, _, _ = expert_sizes(config)
        top_k = config.num_experts_per_token
        assert top_k is not None  # there are experts
        self.top_k, self.activation = top_k, config.moe_router_activation_func
        self.weighting = config.moe_renormalize and top_k > 1, config.routed_scaling_factor
        self.groups = (config.num_expert_group or 1, config.topk_group or 1) if config.use_grouped_topk else (1, 1)
        self.weight = nn.Parameter(torch.empty(experts, config.hidden_size))
        # A buffer: it is moved by a balancing rule, not by gradients.
        self.register_buffer("e_score_correction_bias", torch.zeros(experts, dtype=dtype))

    def forward(
        self, x: torch.Tensor, routed_experts: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[T, hidden] -> logits [T, E] float32, chosen experts [T, k], their weights [T, k] float32.

        `routed_experts` [T, k] were chosen by an earlier forward and are taken here too; a row of -1 leaves the choice.
        """
        x = norms.widened(x)
        with kda.full_precision(x.device):
            logits = F.linear(x, norms.cast(self.weight, x.dtype))
        options, bias = (self.top_k, *self.weighting, *self.groups, self.activation), self.e_score_correction_bias
        chosen, weights = router.choose_experts(logits, bias, *options)
        if routed_experts is not None:
            chosen = torch.where(routed_experts < 0, chosen, routed_experts)
            weights = router.weigh_experts(logits, chosen, *self.weighting, activation=self.activation)
        return logits, chosen, weights


@use_experts_implementation
class KimiK3Experts(nn.Module):
    """Routed experts in floating point: `gate_up_proj` [E, 2M, D], gate rows (w1) first, and `down_proj` [E, D, M]."""

    def __init__(self, config: KimiK3TextConfig):
        super().__init__()
        self.config = config
        self.num_experts, size, width = expert_sizes(config)
        self.experts_of_all, self.betas = self.num_experts, activation_betas(config)
        self.gate_up_proj = nn.Parameter(torch.empty(self.num_experts, 2 * width, size))
        self.down_proj = nn.Parameter(torch.empty(self.num_experts, size, width))

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        return glu(self.betas, gate_up)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """[T, D] -> [T, D], combined with the float32 routing weights in float32 (and rounded once by some paths).

        The Triton kernels where they run; where they do not, a grouped matrix product for training on a GPU, and
        transformers' for graphs and expert parallelism, because the reference counts tokens on the host.
        """
        weights = self.gate_up_proj, self.down_proj
        out = fused_experts(self, hidden_states, top_k_index, top_k_weights, *weights, None)
        if out is not None:
            return out
        token = hidden_states, top_k_index, top_k_weights
        if self.num_experts == self.experts_of_all and experts_op.is_one_token(*token, *weights):
            return experts_op.token_experts(
                *token, lambda expert: (self.gate_up_proj[expert], self.down_proj[expert]), self._apply_gate
            )
        # Expert parallelism marks the tokens of other processes with numbers past the last expert.
        parallel = self.num_experts < self.experts_of_all
        on_device = experts_op.groups_on_device(hidden_states, *weights)
        if on_device and not parallel and not torch.compiler.is_compiling():
            # Tensor parallelism cuts the width, and adds what every process makes of its part in this dtype.
            cut = self.gate_up_proj.shape[1] < 2 * expert_sizes(self.config)[2]
            dtype = top_k_weights.dtype if cut else hidden_states.dtype
            return experts_op.sorted_experts(
                hidden_states, top_k_index, top_k_weights, *weights, self._apply_gate, dtype
            )
        if torch.compiler.is_compiling() or on_device:
            return grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
        # unbind once: indexing a parameter for every expert would make a full-size gradient for each of them
        gate_up, down = (weight.unbind(0) for weight in weights)
        return experts_op.grouped_experts(
            hidden_states,
            top_k_index,
            top_k_weights,
            self.num_experts,
            lambda expert: (gate_up[expert], down[expert]),
            self._apply_gate,
        )


class KimiK3PackedExperts(nn.Module):
    """Routed experts as packed MXFP4: bytes in, bytes out, one expert decoded at a time when tokens hit it.

    On a CPU `decoded` keeps a few of them for the tokens that come one at a time.
    """

    gate_up_proj_packed: nn.Parameter  # codes, two a byte
    gate_up_proj_scale: nn.Parameter  # a byte for 32 of them
    down_proj_packed: nn.Parameter
    down_proj_scale: nn.Parameter

    def __init__(self, config: KimiK3TextConfig):
        super().__init__()
        self.config = config
        self.num_experts, size, width = expert_sizes(config)
        self.experts_of_all, self.betas = self.num_experts, activation_betas(config)
        for name, rows, columns in (("gate_up_proj", 2 * width, size), ("down_proj", size, width)):
            for kind, bytes_a_row in (("packed", columns // 2), ("scale", columns // mxfp4.GROUP)):
                data = torch.empty(self.num_experts, rows, bytes_a_row, dtype=torch.uint8)
                self.register_parameter(f"{name}_{kind}", nn.Parameter(data, requires_grad=False))
        self.decoded = experts_op.DecodedExperts()

    def _apply(self, fn, recurse=True):
        self.decoded.clear()  # the module moves
        return super()._apply(fn, recurse)

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        return glu(self.betas, gate_up)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """[T, D] -> [T, D] float32. Compiled, the experts of all tokens are decoded at once: meant for few tokens."""
        weights = self.gate_up_proj_packed, self.down_proj_packed
        scales = self.gate_up_proj_scale, self.down_proj_scale
        out = fused_experts(self, hidden_states, top_k_index, top_k_weights, *weights, scales)
        if out is not None:
            return out
        token = hidden_states, top_k_index, top_k_weights
        if self.num_experts == self.experts_of_all and experts_op.is_one_token(*token, *weights):
            matrices_of = self.decoded.of(weights, scales, hidden_states.dtype)
            return experts_op.token_experts(*token, matrices_of, self._apply_gate)

        def packed(expert):
            return (
                (self.gate_up_proj_packed[expert], self.gate_up_proj_scale[expert]),
                (self.down_proj_packed[expert], self.down_proj_scale[expert]),
            )

        def decoded(experts):
            experts = experts.clamp_max(self.num_experts - 1)  # another process's come with a weight of 0
            return tuple(mxfp4.dequantize_mxfp4(*weight, hidden_states.dtype) for weight in packed(experts))

        if torch.compiler.is_compiling():
            return experts_op.gathered_experts(hidden_states, top_k_index, top_k_weights, decoded, self._apply_gate)
        return experts_op.grouped_experts(
            hidden_states,
            top_k_index,
            top_k_weights,
            self.num_experts,
            packed,
            self._apply_gate,
            lambda rows, weight: mxfp4.packed_linear(rows, *weight),
        )


class KimiK3SparseMoeBlock(nn.Module):
    """Stable LatentMoE: compress, route, experts in the latent width, norm, decompress; plus the shared experts."""

    def __init__(self, config: KimiK3TextConfig):
        super().__init__()
        _, size, width = expert_sizes(config)
        self.latent = config.routed_expert_hidden_size is not None
        self.gate = KimiK3TopkRouter(config)
        self.experts = (KimiK3Experts if config.expert_quantization is None else KimiK3PackedExperts)(config)
        if self.latent:
            self.routed_expert_down_proj = nn.Linear(config.hidden_size, size, bias=False)
            if config.latent_moe_use_norm:
                self.routed_expert_norm = KimiK3RMSNorm(size, config.rms_norm_eps)
            self.routed_expert_up_proj = nn.Linear(size, config.hidden_size, bias=False)
        if config.num_shared_experts:
            self.shared_experts = KimiK3MLP(config, width * config.num_shared_experts)

    def forward(
        self, x: torch.Tensor, routed_experts: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[B, T, hidden] -> ([B, T, hidden], router logits [B * T, E], chosen experts [B * T, k]).

        `routed_experts` [B, T, k] as of the router.
        """
        if self.training and torch.is_grad_enabled():
            self._tell_of_frozen_experts()
        flat = x.flatten(0, 1)
        logits, chosen, weights = self.gate(flat, None if routed_experts is None else routed_experts.flatten(0, 1))
        routed = self.routed_expert_down_proj(flat) if self.latent else flat
        routed = self.experts(routed, chosen, weights).to(routed.dtype)
        if self.latent:
            if hasattr(self, "routed_expert_norm"):
                routed = self.routed_expert_norm(routed)
            routed = self.routed_expert_up_proj(routed)
        routed = routed.view_as(x)
        if hasattr(self, "shared_experts"):
            routed = routed + self.shared_experts(x)
        return routed, logits, chosen

    def _tell_of_frozen_experts(self):
        """Once, where all but the packed experts trains: an adapter on them is another module in their place, and one
        elsewhere leaves the router frozen."""
        if not isinstance(self.experts, KimiK3PackedExperts) or torch.compiler.is_compiling():
            return
        if next(self.gate.parameters()).requires_grad:
            logger.warning_once(
                "the routed experts are packed MXFP4 and stay frozen while the rest of the model trains: load with "
                "dequantize=True to train them, or put adapters on them (kimi_k3.training.lora_targets)"
            )


class KimiK3DepthRMSNorm(nn.Module):
    """Norm weight [hidden] of the scores of a mix over depth; called for it, so that offloading hooks act."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def forward(self) -> torch.Tensor:
        return self.weight


class KimiK3PseudoQuery(nn.Module):
    """Learned query [1, hidden] of a mix over depth; no Linear, because an adapter on it would be dead."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, hidden_size))

    def forward(self) -> torch.Tensor:
        return self.weight


class KimiK3DecoderLayer(GradientCheckpointingLayer):
    """Attention and feed-forward, reading a mix over depth (or the ordinary residual stream).

    Under Attention Residuals `partial` is the sum of the sublayer outputs of the running block and `blocks` are the
    sums of the finished ones, the embedding first; `run_layers` seals them.
    """

    def __init__(self, config: KimiK3TextConfig, layer_idx: int):
        super().__init__()
        self.block_size, self.eps = config.attn_res_block_size, config.rms_norm_eps
        self.layer_idx = layer_idx
        self.is_linear = config.layer_types[layer_idx] == "linear_attention"
        self.self_attn = (KimiK3DeltaAttention if self.is_linear else KimiK3MLAttention)(config, layer_idx)
        if config.mlp_layer_types[layer_idx] == "sparse":
            self.block_sparse_moe = KimiK3SparseMoeBlock(config)
        else:
            self.mlp = KimiK3MLP(config, config.intermediate_size)
        self.input_layernorm = KimiK3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = KimiK3RMSNorm(config.hidden_size, config.rms_norm_eps)
        if self.block_size is not None:
            self.self_attention_res_norm = KimiK3DepthRMSNorm(config.hidden_size)
            self.self_attention_res_proj = KimiK3PseudoQuery(config.hidden_size)
            self.mlp_res_norm = KimiK3DepthRMSNorm(config.hidden_size)
            self.mlp_res_proj = KimiK3PseudoQuery(config.hidden_size)

    @property
    def starts_block(self) -> bool:
        return self.block_size is not None and self.layer_idx % self.block_size == 0

    def forward(
        self, partial: torch.Tensor | None, *blocks: torch.Tensor, attention_mask: Mask = None,
        cache: HybridCache | None = None, packing: Packing | StepPacking | None = None, context: Any = None,
        need_weights: bool = False, in_blocks: bool = False, routed_experts: torch.Tensor | None = None, **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
        """
        Args:
            partial: [B, T, hidden], or None at a block's first layer, whose attention output begins the sum.
            blocks: each [B, T, hidden], none without Attention Residuals. Arguments of their own and not a tuple, so
                that re-entrant gradient checkpointing sees them.
            routed_experts: [B, T, k] as of the router.

        Returns:
            the new partial sum, the stream that this layer read, attention weights or None, and of a MoE layer router
            logits and the experts that it chose, or None.
        """
        read, hidden = self._read(blocks, partial, "self_attention", self.input_layernorm)
        weights = None
        if self.is_linear:
            attended = self.self_attn(hidden, cache=cache, packing=packing, context=context)
        else:
            attended, weights = self.self_attn(
                hidden,
                attention_mask=attention_mask,
                cache=cache,
                packing=packing,
                need_weights=need_weights,
                in_blocks=in_blocks,
                context=context,
                **kwargs,
            )
        partial = attended if partial is None else partial + attended
        _, hidden = self._read(blocks, partial, "mlp", self.post_attention_layernorm)
        logits, chosen = None, None
        if hasattr(self, "block_sparse_moe"):
            hidden, logits, chosen = self.block_sparse_moe(hidden, routed_experts)
        else:
            hidden = self.mlp(hidden)
        return partial + hidden, read, weights, logits, chosen

    def _read(self, blocks, partial, sublayer, layernorm):
        """What a sublayer reads, the mix over depth (without Attention Residuals the stream itself), and its norm."""
        sources = blocks if partial is None else (*blocks, partial)
        # The mix of one source is that source. In training it runs all the same, for gradients of zero: DDP waits for
        # every parameter's.
        if self.block_size is None or (len(sources) == 1 and not torch.is_grad_enabled()):
            return sources[0], layernorm(sources[0])
        norm, proj = getattr(self, f"{sublayer}_res_norm"), getattr(self, f"{sublayer}_res_proj")
        fused = dispatch.stands_for_call(layernorm, KimiK3RMSNorm)
        weight = (layernorm.weight, layernorm.eps) if fused else (None, 0.0)
        return attn_res.attn_res_mix_norm(sources, norm(), proj(), self.eps, *weight, layernorm)


def run_layers(
    layers: Iterable[KimiK3DecoderLayer],
    partial: torch.Tensor,
    blocks: Sequence[torch.Tensor] = (),
    observe: Callable[..., None] | None = None,
    routed_experts: torch.Tensor | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
    """A stream through decoder layers. Here, and nowhere else, blocks of Attention Residuals are sealed: the running
    sum becomes a finished block where the next block's first layer begins.

    Args:
        layers: all decoder layers, or those of a pipeline stage.
        partial, blocks: the running sum (first the embedding) and the finished blocks, each [B, T, hidden].
        observe: called after every layer with the sum, and with what the layer read, its attention weights, its router
            logits and the experts that it chose.
        routed_experts: [B, T, MoE layers, k], what the routers take.
        arguments: of every layer's forward.

    Returns:
        the running sum and the finished blocks.
    """
    replayed = iter(() if routed_experts is None else routed_experts.unbind(2))
    for layer in layers:
        if routed_experts is not None:
            arguments["routed_experts"] = next(replayed) if hasattr(layer, "block_sparse_moe") else None
        running: torch.Tensor | None = partial
        if layer.starts_block:
            running, blocks = None, (*blocks, partial)
        partial, read, weights, logits, chosen = layer(running, *blocks, **arguments)
        if observe is not None:
            observe(partial, hidden_states=read, attentions=weights, router_logits=logits, routed_experts=chosen)
    return partial, blocks
