"""Kimi K3: the hybrid text model (KDA and gated MLA over Attention Residuals and latent experts) and its heads.

The file reads in the order of the computation: norms, KDA layer, MLA layer, MLP and experts, decoder layer, model,
heads. The operations with a kernel live in `kernels/`, each with its torch reference; this file holds the parameters
and the data flow (`docs/design.md` draws it).

Files the remote-code loader must carry, in the slash form that its regular expression reads:

from .kernels/attn_res import
from .kernels/experts import
from .kernels/kda import
from .kernels/mxfp4 import
from .kernels/short_conv import
from .kernels/situ import
"""

import dataclasses
import importlib
import math
import shutil
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import DynamicCache
from transformers.integrations import use_experts_implementation
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging

from .cache_kimi_k3 import HybridCache
from .checkpoint_kimi_k3 import load_checked, weight_conversions
from .configuration_kimi_k3 import KimiK3Config, KimiK3TextConfig, KimiK3VisionConfig


def _kernel(name):
    """Modules below `kernels/` are out of reach of the remote-code loader's relative imports (module docstring)."""
    return importlib.import_module(f".kernels.{name}", __package__)


attn_res, experts_op, kda, mxfp4, short_conv, situ = map(
    _kernel, ("attn_res", "experts", "kda", "mxfp4", "short_conv", "situ")
)

logger = logging.get_logger(__name__)

# transformers 5.24 renamed `past_key_values` to `cache`; the field of the output says which one this release uses.
CACHE_ARGUMENT = (
    "cache" if "cache" in {f.name for f in dataclasses.fields(MoeModelOutputWithPast)} else "past_key_values"
)

# The latent norms of MLA keep the default of the official module, not `rms_norm_eps` (docs/design.md, disputed facts).
LATENT_NORM_EPS = 1e-6


def full_precision(device: torch.device):
    """Autocast off: the parts that the architecture defines in float32 stay so under mixed-precision training."""
    return torch.autocast(device.type, enabled=False)


def at_least_float32() -> torch.dtype:
    """dtype of the parameters that stay float32 when the model is built or loaded in a half precision."""
    return torch.promote_types(torch.get_default_dtype(), torch.float32)


@dataclasses.dataclass
class TokenLayout:
    """Which columns of a [B, T] forward are real tokens, and to which sequence each belongs.

    Only made when some column is padding or a row holds several documents; a plain batch has none.

    Attributes:
        order: [n] flat indices of the real tokens, sequence after sequence.
        cu_seqlens: [N + 1] offsets of the sequences inside `order`; a row of padding alone is a sequence of length 0.
        documents: [B, T] number of the document of every column, None when each row is one document.
    """

    order: torch.Tensor
    cu_seqlens: torch.Tensor
    documents: torch.Tensor | None

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, D] -> [1, n, D]"""
        return x.flatten(0, 1)[self.order][None]

    def put_back(self, x: torch.Tensor, batch: int, length: int) -> torch.Tensor:
        """[1, n, D] -> [B, T, D], zeros at the padding"""
        flat = x.new_zeros(batch * length, x.shape[-1])
        return flat.index_copy(0, self.order, x[0]).view(batch, length, -1)


class KimiK3RMSNorm(nn.Module):
    """float32 normalisation, rounded to the input's dtype **before** the weight is applied (two roundings)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)

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
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight.to(wide.dtype) * torch.sigmoid(gate.to(wide.dtype))).to(x.dtype)


class KimiK3ShortConvolution(nn.Module):
    """Weights of one causal depthwise convolution, [channels, 1, width] as in the checkpoint."""

    def __init__(self, channels: int, width: int, dtype: torch.dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width, dtype=dtype))

    def forward(self, x, tail=None, cu_seqlens=None):
        return short_conv.short_conv(x, self.weight, tail, cu_seqlens)


class KimiK3DeltaAttention(nn.Module):
    """Kimi Delta Attention (`architecture`: report p. 4-5; Kimi Linear, arXiv 2510.26692)."""

    def __init__(self, config: KimiK3TextConfig, layer_idx: int):
        super().__init__()
        linear = config.linear_attn_config
        self.layer_idx = layer_idx
        self.num_heads, self.head_dim = linear["num_heads"], linear["head_dim"]
        self.lower_bound = config.gate_lower_bound
        hidden, channels, width = config.hidden_size, self.num_heads * self.head_dim, linear["short_conv_kernel_size"]
        stored = torch.get_default_dtype() if config.is_kimi_linear_layout else at_least_float32()

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

    def forward(self, hidden_states, cache: HybridCache | None = None, layout: TokenLayout | None = None):
        """[B, T, hidden] -> [B, T, hidden]; reads and advances the layer's state in `cache`."""
        batch, length, _ = hidden_states.shape
        state = cache.layers[self.layer_idx] if cache is not None else None
        tails = state.conv_tails if state is not None and state.is_initialized else (None, None, None)
        recurrent = state.recurrent_state if state is not None else None
        x, cu_seqlens = (hidden_states, None) if layout is None else (layout.take(hidden_states), layout.cu_seqlens)

        q, q_tail = self.q_conv1d(self.q_proj(x), tails[0], cu_seqlens)
        k, k_tail = self.k_conv1d(self.k_proj(x), tails[1], cu_seqlens)
        v, v_tail = self.v_conv1d(self.v_proj(x), tails[2], cu_seqlens)
        heads = (*x.shape[:2], self.num_heads, self.head_dim)
        decay, beta = self.f_b_proj(self.f_a_proj(x)).view(heads), self.b_proj(x)
        with full_precision(x.device):
            inputs = (
                kda.l2norm(q.view(heads)),
                kda.l2norm(k.view(heads)),
                v.view(heads),
                kda.kda_gate(decay, self.A_log, self.dt_bias, self.lower_bound),
                torch.sigmoid(beta.to(torch.promote_types(beta.dtype, torch.float32))),
            )
            if length == 1 and layout is None:
                out, recurrent = kda.recurrent_kda(*inputs, initial_state=recurrent)
            else:
                out, recurrent = kda.chunk_kda(*inputs, initial_state=recurrent, cu_seqlens=cu_seqlens)
        if state is not None:
            state.store((q_tail, k_tail, v_tail), recurrent, length)

        gate = self.g_proj(x) if self.full_rank_gate else self.g_b_proj(self.g_a_proj(x))
        out = self.o_norm(out.to(q.dtype), gate.view(heads)).flatten(-2)
        if layout is not None:
            out = layout.put_back(out, batch, length)
        return self.o_proj(out)


def eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
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

    def forward(self, hidden_states, attention_mask=None, cache: HybridCache | None = None, **kwargs):
        """[B, T, hidden] -> ([B, T, hidden], attention weights [B, H, T, S] or None)."""
        batch, length, _ = hidden_states.shape
        if self.config.q_lora_rank is None:
            query = self.q_proj(hidden_states)
        else:
            query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        query = query.view(batch, length, self.num_heads, self.qk_dim).transpose(1, 2)
        latent, k_pe = self.kv_a_proj_with_mqa(hidden_states).split([self.kv_rank, self.rope_dim], dim=-1)
        latents = torch.cat([self.kv_a_layernorm(latent), k_pe], dim=-1)
        if cache is not None:
            latents = cache.layers[self.layer_idx].append(latents)

        if self._absorbing_is_cheaper(length, latents.shape[1]):
            out, weights = self._absorbed(query, latents, attention_mask, **kwargs)
        else:
            out, weights = self._expanded(query, latents, attention_mask, **kwargs)
        out = out.reshape(batch, length, -1)
        if self.config.mla_use_output_gate:
            out = out * torch.sigmoid(self.g_proj(hidden_states))
        return self.o_proj(out), weights

    def _absorbing_is_cheaper(self, queries: int, keys: int) -> bool:
        """Multiplications a head: expanding costs `kv_rank * (nope + v)` a key, absorbing makes each pair wider."""
        if queries == keys:
            return False
        wider = 2 * self.kv_rank - self.nope_dim - self.v_dim
        return queries * wider < self.kv_rank * (self.nope_dim + self.v_dim)

    def _expanded(self, query, latents, attention_mask, **kwargs):
        batch, keys, _ = latents.shape
        latent, k_pe = latents.split([self.kv_rank, self.rope_dim], dim=-1)
        expanded = self.kv_b_proj(latent).view(batch, keys, self.num_heads, self.nope_dim + self.v_dim).transpose(1, 2)
        key_nope, value = expanded.split([self.nope_dim, self.v_dim], dim=-1)
        key = torch.cat([key_nope, k_pe[:, None].expand(-1, self.num_heads, -1, -1)], dim=-1)
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        # The fused kernels of sdpa want one head size; without padding torch falls back to a [T, S] matrix.
        padding = self.qk_dim - self.v_dim if self.config._attn_implementation == "sdpa" else 0
        if padding > 0:
            value = F.pad(value, (0, padding))
        out, weights = attention(self, query, key, value, attention_mask, scaling=self.scaling, **kwargs)
        return out[..., : self.v_dim] if padding > 0 else out, weights

    def _absorbed(self, query, latents, attention_mask, **kwargs):
        """Heads become rows of one query against the latents: [B, 1, T * H, kv_rank + rope]."""
        batch, heads, length, _ = query.shape
        w_uk, w_uv = self.kv_b_proj.weight.view(heads, -1, self.kv_rank).split([self.nope_dim, self.v_dim], dim=1)
        query_nope, query_pe = query.split([self.nope_dim, self.rope_dim], dim=-1)
        rows = torch.cat([query_nope @ w_uk, query_pe], dim=-1).transpose(1, 2).reshape(batch, 1, length * heads, -1)
        if attention_mask is not None and length > 1:
            attention_mask = attention_mask.repeat_interleave(heads, dim=2)
        latents = latents[:, None]
        # Always the explicit form: it reads the latents once for all heads and makes rows x S scores, not T x S x H copies.
        out, weights = eager_attention_forward(
            self, rows, latents, latents[..., : self.kv_rank], self._additive(attention_mask, rows), self.scaling
        )
        out = out.view(batch, length, heads, self.kv_rank).transpose(1, 2) @ w_uv.transpose(1, 2)
        return out.transpose(1, 2), weights.view(batch, length, heads, -1).transpose(1, 2)

    @staticmethod
    def _additive(mask, like):
        if mask is None or mask.dtype != torch.bool:
            return mask
        return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(~mask, torch.finfo(like.dtype).min)


def glu(config: KimiK3TextConfig, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The gated activation that the config names."""
    if config.hidden_act == "situ":
        return situ.situ_glu(gate, up, config.activation_situ_beta, config.activation_situ_linear_beta)
    return situ.swiglu(gate, up)


class KimiK3MLP(nn.Module):
    """Dense gated MLP: the layers before the first MoE layer, and the shared experts as one wide MLP."""

    def __init__(self, config: KimiK3TextConfig, intermediate_size: int):
        super().__init__()
        self.config = config
        self.gate_proj = nn.Linear(config.hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(glu(self.config, self.gate_proj(x), self.up_proj(x)))


class KimiK3TopkRouter(nn.Module):
    """Sigmoid router in float32. The selection bias decides which experts are chosen, never how they are weighted."""

    def __init__(self, config: KimiK3TextConfig):
        super().__init__()
        self.config = config
        dtype = torch.get_default_dtype() if config.is_kimi_linear_layout else at_least_float32()
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        # A buffer: it is moved by a balancing rule, not by gradients.
        self.register_buffer("e_score_correction_bias", torch.zeros(config.num_experts, dtype=dtype))

    def forward(self, x):
        """[T, hidden] -> logits [T, E] float32, chosen experts [T, k], their weights [T, k] float32."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        with full_precision(x.device):
            logits = F.linear(x.to(dtype), self.weight.to(dtype))
        scores = torch.sigmoid(logits)
        choice = self._limit_groups(scores.detach() + self.e_score_correction_bias.to(dtype))
        chosen = choice.topk(self.config.num_experts_per_token, dim=-1, sorted=False).indices
        weights = scores.gather(-1, chosen)
        if self.config.moe_renormalize and self.config.num_experts_per_token > 1:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return logits, chosen, weights * self.config.routed_scaling_factor

    def _limit_groups(self, choice):
        """Keep the experts of the `topk_group` groups whose two best experts score highest together."""
        groups = self.config.num_expert_group or 1
        kept = self.config.topk_group or 1
        if not self.config.use_grouped_topk or groups == kept:
            return choice
        grouped = choice.unflatten(-1, (groups, -1))
        best = grouped.topk(2, dim=-1).values.sum(-1).topk(kept, dim=-1, sorted=False).indices
        dropped = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, False)
        return grouped.masked_fill(dropped[..., None], float("-inf")).flatten(-2)


@use_experts_implementation
class KimiK3Experts(nn.Module):
    """Routed experts in floating point; `gate_up_proj` [E, 2M, D] has the gate rows (w1) first, `down_proj` [E, D, M]."""

    def __init__(self, config: KimiK3TextConfig):
        super().__init__()
        self.config, self.num_experts = config, config.num_experts
        size, width = config.routed_expert_hidden_size or config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(self.num_experts, 2 * width, size))
        self.down_proj = nn.Parameter(torch.empty(self.num_experts, size, width))

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        return glu(self.config, *gate_up.chunk(2, dim=-1))

    def forward(self, hidden_states, top_k_index, top_k_weights):
        """[T, D] -> [T, D] float32, combined with the float32 routing weights."""
        # unbind once: indexing a parameter for every expert would make a full-size gradient for each of them
        gate_up, down = self.gate_up_proj.unbind(0), self.down_proj.unbind(0)
        return experts_op.grouped_experts(
            hidden_states,
            top_k_index,
            top_k_weights,
            self.num_experts,
            lambda expert: (gate_up[expert], down[expert]),
            self._apply_gate,
        )


class KimiK3PackedExperts(nn.Module):
    """Routed experts as packed MXFP4: bytes in, bytes out, one expert decoded at a time when tokens hit it."""

    def __init__(self, config: KimiK3TextConfig):
        super().__init__()
        self.config, self.num_experts = config, config.num_experts
        size, width = config.routed_expert_hidden_size or config.hidden_size, config.moe_intermediate_size
        for name, rows, columns in (("gate_up_proj", 2 * width, size), ("down_proj", size, width)):
            for kind, bytes_a_row in (("packed", columns // 2), ("scale", columns // mxfp4.GROUP)):
                data = torch.empty(self.num_experts, rows, bytes_a_row, dtype=torch.uint8)
                self.register_parameter(f"{name}_{kind}", nn.Parameter(data, requires_grad=False))

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        return glu(self.config, *gate_up.chunk(2, dim=-1))

    def forward(self, hidden_states, top_k_index, top_k_weights):
        def weights_of(expert):
            dtype = hidden_states.dtype
            return (
                mxfp4.dequantize_mxfp4(self.gate_up_proj_packed[expert], self.gate_up_proj_scale[expert], dtype),
                mxfp4.dequantize_mxfp4(self.down_proj_packed[expert], self.down_proj_scale[expert], dtype),
            )

        return experts_op.grouped_experts(
            hidden_states, top_k_index, top_k_weights, self.num_experts, weights_of, self._apply_gate
        )


class KimiK3SparseMoeBlock(nn.Module):
    """Stable LatentMoE: compress, route, experts in the latent width, norm, decompress; plus the shared experts."""

    def __init__(self, config: KimiK3TextConfig):
        super().__init__()
        self.latent = config.routed_expert_hidden_size is not None
        self.gate = KimiK3TopkRouter(config)
        self.experts = (KimiK3Experts if config.expert_quantization is None else KimiK3PackedExperts)(config)
        if self.latent:
            size = config.routed_expert_hidden_size
            self.routed_expert_down_proj = nn.Linear(config.hidden_size, size, bias=False)
            if config.latent_moe_use_norm:
                self.routed_expert_norm = KimiK3RMSNorm(size, config.rms_norm_eps)
            self.routed_expert_up_proj = nn.Linear(size, config.hidden_size, bias=False)
        if config.num_shared_experts:
            self.shared_experts = KimiK3MLP(config, config.moe_intermediate_size * config.num_shared_experts)

    def forward(self, x):
        """[B, T, hidden] -> ([B, T, hidden], router logits [B * T, E])."""
        flat = x.flatten(0, 1)
        logits, chosen, weights = self.gate(flat)
        routed = self.routed_expert_down_proj(flat) if self.latent else flat
        routed = self.experts(routed, chosen, weights).to(routed.dtype)
        if self.latent:
            if hasattr(self, "routed_expert_norm"):
                routed = self.routed_expert_norm(routed)
            routed = self.routed_expert_up_proj(routed)
        routed = routed.view_as(x)
        if hasattr(self, "shared_experts"):
            routed = routed + self.shared_experts(x)
        return routed, logits


class KimiK3DecoderLayer(GradientCheckpointingLayer):
    """Attention and feed-forward, reading a mix over depth (or the ordinary residual stream).

    Under Attention Residuals `partial` is the sum of the sublayer outputs of the running block and `blocks` are the
    sums of the finished ones, the embedding first.
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
            self.self_attention_res_norm = KimiK3RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.self_attention_res_proj = nn.Linear(config.hidden_size, 1, bias=False)
            self.mlp_res_norm = KimiK3RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.mlp_res_proj = nn.Linear(config.hidden_size, 1, bias=False)

    @property
    def starts_block(self) -> bool:
        return self.block_size is not None and self.layer_idx % self.block_size == 0

    def forward(self, partial, blocks, attention_mask=None, cache=None, layout=None, **kwargs):
        """
        Args:
            partial: [B, T, hidden]; at a block's first layer the sum that is to be sealed.
            blocks: tuple of [B, T, hidden]; without Attention Residuals empty.

        Returns:
            the new partial sum, the stream that this layer read, attention weights or None, router logits or None.
        """
        read = self._mix(blocks, partial, "self_attention") if blocks else partial
        hidden = self.input_layernorm(read)
        weights = None
        if self.is_linear:
            attended = self.self_attn(hidden, cache=cache, layout=layout)
        else:
            attended, weights = self.self_attn(hidden, attention_mask=attention_mask, cache=cache, **kwargs)
        if self.starts_block:
            blocks, partial = (*blocks, partial), attended
        else:
            partial = partial + attended
        hidden = self._mix(blocks, partial, "mlp") if self.block_size is not None else partial
        hidden = self.post_attention_layernorm(hidden)
        logits = None
        if hasattr(self, "block_sparse_moe"):
            hidden, logits = self.block_sparse_moe(hidden)
        else:
            hidden = self.mlp(hidden)
        return partial + hidden, read, weights, logits

    def _mix(self, blocks, partial, sublayer):
        norm, proj = getattr(self, f"{sublayer}_res_norm"), getattr(self, f"{sublayer}_res_proj")
        return attn_res.attn_res_mix((*blocks, partial), norm.weight, proj.weight, self.eps)


class KimiK3PreTrainedModel(PreTrainedModel):
    config_class = KimiK3TextConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["KimiK3DecoderLayer"]
    _supports_sdpa = True
    _supports_attention_backend = False
    _can_compile_fullgraph = False
    _is_stateful = True
    _skip_keys_device_placement = ["past_key_values", "cache"]
    # float32 in the file and in memory, whatever dtype is asked for; the constructor adds those of the bounded gate
    _keep_in_fp32_modules_strict = ["A_log", "dt_bias"]
    _fp32_of_bounded_gate = ["q_conv1d", "k_conv1d", "v_conv1d", "o_norm", "e_score_correction_bias"]

    def __init__(self, config, *inputs, dequantize: bool = False, **kwargs):
        text_config = config.get_text_config(decoder=True)
        self.expert_storage = "float" if text_config.expert_quantization is None else "packed"
        if dequantize and self.expert_storage == "packed":
            self.expert_storage = "dequantize"
            text_config.expert_quantization = None
        super().__init__(config, *inputs, **kwargs)
        if not text_config.is_kimi_linear_layout:
            self._keep_in_fp32_modules_strict = [*self._keep_in_fp32_modules_strict, *self._fp32_of_bounded_gate]
        self._weight_conversions = self._conversions()

    def _conversions(self):
        if self.expert_storage == "dequantize":
            return weight_conversions(self.config, "float")
        return weight_conversions(self.config, self.expert_storage)

    def get_correct_experts_implementation(self, requested_experts):
        # Our own grouped path by default; transformers would pick grouped_mm, which has no packed experts.
        if self.config.get_text_config(decoder=True).expert_quantization is not None:
            if requested_experts not in (None, "eager"):
                raise ValueError(
                    f"experts_implementation={requested_experts!r} cannot read packed MXFP4 experts; "
                    "load with dequantize=True to use it"
                )
        return super().get_correct_experts_implementation(requested_experts or "eager")

    @staticmethod
    def _load_pretrained_model(model, state_dict, checkpoint_files, load_config, *args, **kwargs):
        conversions = weight_conversions(model.config, model.expert_storage, mxfp4.dequantize_mxfp4)
        result = load_checked(
            model, state_dict, checkpoint_files, load_config, conversions, model.expert_storage, *args, **kwargs
        )
        model._weight_conversions = model._conversions()
        return result

    def save_pretrained(self, save_directory, *args, push_to_hub: bool = False, **kwargs):
        """transformers' `save_pretrained`, and beside the weights the code that reads them, `kernels/` included."""
        if push_to_hub:
            raise ValueError(
                "save_pretrained(push_to_hub=True) would upload before the code files are in place; "
                "use model.push_to_hub(repo_id)"
            )
        self.config.auto_map = auto_map(self)
        super().save_pretrained(save_directory, *args, **kwargs)
        copy_code(Path(save_directory))

    @torch.no_grad()
    def _init_weights(self, module):
        std = self.config.get_text_config(decoder=True).initializer_range
        super()._init_weights(module)
        if isinstance(module, KimiK3DeltaAttention):
            if module.lower_bound is None:
                init.copy_(module.A_log, torch.empty_like(module.A_log).uniform_(1.0, 16.0).log())
            else:
                # exp(A_log) scales the argument of the sigmoid: larger values would saturate channels from the start
                init.zeros_(module.A_log)
            # dt is log-uniform in [0.001, 0.1], dt_bias its inverse softplus (as in Mamba-2 and Gated DeltaNet)
            dt = torch.empty_like(module.dt_bias).uniform_(math.log(1e-3), math.log(1e-1)).exp()
            init.copy_(module.dt_bias, dt + torch.log(-torch.expm1(-dt)))
        elif isinstance(module, KimiK3ShortConvolution):
            bound = module.weight.shape[-1] ** -0.5
            init.uniform_(module.weight, -bound, bound)
        elif isinstance(module, KimiK3RMSNormGated):
            init.ones_(module.weight)
        elif isinstance(module, KimiK3TopkRouter):
            init.normal_(module.weight, mean=0.0, std=std)
            init.zeros_(module.e_score_correction_bias)
        elif isinstance(module, KimiK3Experts):
            init.normal_(module.gate_up_proj, mean=0.0, std=std)
            init.normal_(module.down_proj, mean=0.0, std=std)
        elif isinstance(module, KimiK3PackedExperts):
            for name in ("gate_up_proj", "down_proj"):
                packed, scale = getattr(module, f"{name}_packed"), getattr(module, f"{name}_scale")
                shape = (*packed.shape[:-1], packed.shape[-1] * 2)
                weight = torch.empty(shape, dtype=torch.float32, device=packed.device).normal_(0.0, std)
                for parameter, data in zip((packed, scale), mxfp4.quantize_mxfp4(weight), strict=True):
                    init.copy_(parameter, data)
        elif isinstance(module, KimiK3DecoderLayer) and module.block_size is not None:
            # Zero pseudo-queries start Attention Residuals as a plain average over depth (arXiv 2603.15031).
            init.zeros_(module.self_attention_res_proj.weight)
            init.zeros_(module.mlp_res_proj.weight)
        elif isinstance(module, KimiK3Model) and module.config.attn_res_block_size is not None:
            init.zeros_(module.output_attn_res_proj.weight)


CODE_FILES = ("cache_kimi_k3.py", "checkpoint_kimi_k3.py", "configuration_kimi_k3.py", "modeling_kimi_k3.py")


def auto_map(model: PreTrainedModel) -> dict[str, str]:
    """Which of our classes the Auto classes find in a saved folder."""
    config, head = type(model.config).__name__, type(model).__name__
    base = "KimiK3Model" if isinstance(model.config, KimiK3TextConfig) else head
    causal = "KimiK3ForCausalLM" if isinstance(model.config, KimiK3TextConfig) else head
    return {
        "AutoConfig": f"configuration_kimi_k3.{config}",
        "AutoModel": f"modeling_kimi_k3.{base}",
        "AutoModelForCausalLM": f"modeling_kimi_k3.{causal}",
    }


def copy_code(folder: Path) -> None:
    """Write our files into a checkpoint folder, so that it needs nothing else; `kernels/` keeps its place."""
    source = Path(__file__).parent
    kernels = Path(kda.__file__).parent
    if folder.resolve() == source.resolve():
        return
    (folder / "kernels").mkdir(exist_ok=True)
    for name in CODE_FILES:
        shutil.copyfile(source / name, folder / name)
    for file in sorted(kernels.glob("*.py")):
        if file.name != "__init__.py":  # the remote-code cache makes one; it would shadow the package `kernels`
            shutil.copyfile(file, folder / "kernels" / file.name)
            (folder / file.name).unlink(missing_ok=True)  # transformers' copy, flattened


class KimiK3Model(KimiK3PreTrainedModel):
    """The text backbone: embedding, decoder layers, the output mix over depth and the final norm."""

    _keys_to_ignore_on_load_unexpected = [r"^(language_model\.)?lm_head\.", r"^vision_tower\.", r"^mm_projector\."]

    def __init__(self, config: KimiK3TextConfig, dequantize: bool = False):
        super().__init__(config, dequantize=dequantize)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=None)
        self.layers = nn.ModuleList(KimiK3DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = KimiK3RMSNorm(config.hidden_size, config.rms_norm_eps)
        if config.attn_res_block_size is not None:
            self.output_attn_res_norm = KimiK3RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.output_attn_res_proj = nn.Linear(config.hidden_size, 1, bias=False)
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: HybridCache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        output_router_logits: bool | None = None,
        cache: HybridCache | None = None,
        **kwargs,
    ) -> MoeModelOutputWithPast:
        """
        Args:
            input_ids: [B, T], or `inputs_embeds` [B, T, hidden].
            attention_mask: [B, S] of the S columns seen so far, this forward's T last; 0 marks padding, anywhere.
            position_ids: [B, T]; the model has no positions, they only show where packed documents start.
            cache, past_key_values: two names of one argument.
            output_hidden_states: entry l is the stream that layer l reads (the mix over depth; the embedding for
                l = 0), the last entry is the normed output.
        """
        cache = _one_cache(cache, past_key_values)
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass exactly one of input_ids and inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        use_cache = self.config.use_cache if use_cache is None else use_cache
        masks = attention_mask if isinstance(attention_mask, dict) else {}
        columns = masks.get("linear_attention") if masks else attention_mask
        layout = token_layout(columns, position_ids, kwargs.pop("cu_seq_lens_q", None), inputs_embeds, cache)
        packed = layout is not None and layout.documents is not None
        if packed and cache is not None:
            raise ValueError("packed documents cannot share a cache: it holds one state for each row")
        if self.gradient_checkpointing and self.training and use_cache:
            logger.warning_once("gradient checkpointing recomputes the forward, so no cache is built")
            use_cache = False
        if use_cache and cache is None and not packed:
            cache = HybridCache(self.config)

        if masks:
            attention_mask = masks["full_attention"]
        else:
            document = (lambda b, h, q, kv: layout.documents[b, q] == layout.documents[b, kv]) if packed else None
            attention_mask = create_causal_mask(
                self.config, inputs_embeds, attention_mask, cache, and_mask_function=document
            )

        collect = {
            "hidden_states": self.config.output_hidden_states if output_hidden_states is None else output_hidden_states,
            "attentions": self.config.output_attentions if output_attentions is None else output_attentions,
            "router_logits": self.config.output_router_logits if output_router_logits is None else output_router_logits,
        }
        collected = {name: () for name, wanted in collect.items() if wanted}
        partial, blocks = inputs_embeds, ()
        for layer in self.layers:
            entering = partial
            partial, read, weights, logits = layer(
                partial, blocks, attention_mask=attention_mask, cache=cache if use_cache else None, layout=layout, **kwargs
            )
            if layer.starts_block:
                blocks = (*blocks, entering)
            for name, value in (("hidden_states", read), ("attentions", weights), ("router_logits", logits)):
                if name in collected and value is not None:
                    collected[name] += (value,)
        if self.config.attn_res_block_size is not None:
            norm, proj = self.output_attn_res_norm, self.output_attn_res_proj
            partial = attn_res.attn_res_mix((*blocks, partial), norm.weight, proj.weight, self.config.rms_norm_eps)
        hidden_states = self.norm(partial)
        if "hidden_states" in collected:
            collected["hidden_states"] += (hidden_states,)
        return MoeModelOutputWithPast(
            last_hidden_state=hidden_states, **{CACHE_ARGUMENT: cache if use_cache else None}, **collected
        )


def _one_cache(cache, past_key_values) -> HybridCache | None:
    if cache is not None and past_key_values is not None and cache is not past_key_values:
        raise ValueError("cache and past_key_values are two names of one argument, but two different caches were given")
    cache = past_key_values if cache is None else cache
    if cache is not None and not isinstance(cache, HybridCache):
        raise TypeError(
            f"{type(cache).__name__} has no place for recurrent states and latents: use HybridCache(model.config)"
        )
    return cache


def token_layout(attention_mask, position_ids, cu_seq_lens, embeds, cache) -> TokenLayout | None:
    """Find padding and packed documents; None for a plain batch, in which every row is one sequence of real tokens.

    Args:
        attention_mask: [B, S] with the T columns of this forward last, or None.
        position_ids: [B, T] or None; a document starts where a position does not follow that of the real token before.
        cu_seq_lens: [N + 1] offsets of documents in a packed row (B = 1), or None.
        embeds: [B, T, hidden].
        cache: while a cache holds tokens, positions are not read as documents.
    """
    batch, length, _ = embeds.shape
    device = embeds.device
    real = None
    if attention_mask is not None and attention_mask.dim() == 2:
        real = attention_mask[:, -length:].to(device).bool()
        if real.all():
            real = None
    starts = _document_starts(real, position_ids, cu_seq_lens, batch, length, device, cache)
    if real is None and starts is None:
        return None
    real = torch.ones(batch, length, dtype=torch.bool, device=device) if real is None else real
    order = real.flatten().nonzero().flatten()
    if starts is None:
        lengths = real.sum(-1)
        documents = None
    else:
        documents = starts.flatten().cumsum(0).view(batch, length)
        lengths = torch.bincount(documents.flatten()[order], minlength=int(documents[-1, -1]) + 1)[1:]
    return TokenLayout(order, F.pad(lengths.cumsum(0), (1, 0)), documents)


def _document_starts(real, position_ids, cu_seq_lens, batch, length, device, cache):
    """[B, T] True where a document starts, None when no row holds more than one."""
    if cache is not None and cache.get_seq_length() > 0:
        return None
    starts = torch.zeros(batch, length, dtype=torch.bool, device=device)
    if cu_seq_lens is not None:
        if batch != 1:
            raise ValueError(f"cu_seq_lens_q describes one packed row, but the batch has {batch} rows")
        offsets = cu_seq_lens.to(device).long()
        if offsets[0] != 0 or offsets[-1] != length or (offsets.diff() < 0).any():
            raise ValueError(f"cu_seq_lens_q must rise from 0 to the length of the row ({length}), got {offsets.tolist()}")
        starts[0, offsets[:-1][offsets[:-1] < length]] = True
    elif position_ids is not None and length > 1:
        if position_ids.dim() != 2:  # positions of several axes say nothing about documents
            return None
        positions = position_ids.to(device).expand(batch, -1)
        previous = positions[:, :-1]
        if real is not None:
            # the position of the last real token before each column, whatever padding lies between
            index = torch.arange(length, device=device).expand(batch, -1).masked_fill(~real, -1)
            last_real = index.cummax(-1).values[:, :-1]
            previous = positions.gather(-1, last_real.clamp_min(0)).where(last_real >= 0, positions[:, 1:] - 1)
        starts[:, 1:] = positions[:, 1:] != previous + 1
        if real is not None:
            starts &= real
    else:
        return None
    starts[:, 0] = False
    if not starts.any():
        return None
    starts[:, 0] = True
    return starts


class KimiK3GenerationMixin(GenerationMixin):
    """What generation needs to know of a model whose cache is a `HybridCache`."""

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        implementation = generation_config.cache_implementation
        if implementation not in (None, "dynamic"):
            raise ValueError(
                f"cache_implementation={implementation!r} is not supported: recurrent states and latents live in HybridCache"
            )
        given = model_kwargs.get(CACHE_ARGUMENT)
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        if given is None and isinstance(model_kwargs.get(CACHE_ARGUMENT), DynamicCache):
            model_kwargs[CACHE_ARGUMENT] = HybridCache(self.config)


class KimiK3ForCausalLM(KimiK3PreTrainedModel, KimiK3GenerationMixin):
    """The text model with its language-model head; reads the text part of a multimodal checkpoint too."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _keys_to_ignore_on_load_unexpected = [r"^vision_tower\.", r"^mm_projector\."]

    def __init__(self, config: KimiK3TextConfig, dequantize: bool = False):
        super().__init__(config, dequantize=dequantize)
        self.model = KimiK3Model(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: HybridCache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        cache: HybridCache | None = None,
        **kwargs,
    ) -> MoeCausalLMOutputWithPast:
        """
        Args:
            labels: [B, T], -100 is ignored; shifted inside.
            logits_to_keep: only the last so many positions (0: all), or the positions of a 1-D tensor.

        The other arguments are those of `KimiK3Model.forward`.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            cache=cache,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return MoeCausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            router_logits=outputs.router_logits,
            **{CACHE_ARGUMENT: outputs[CACHE_ARGUMENT] if CACHE_ARGUMENT in outputs else None},
        )


class KimiK3VisionTower(nn.Module):
    """Weights of MoonViT-V2. They load and save; images are refused by `KimiK3ForConditionalGeneration`."""

    def __init__(self, config: KimiK3VisionConfig):
        super().__init__()
        width, patch = config.vt_hidden_size, config.patch_size
        self.patch_embed = nn.Module()
        self.patch_embed.proj = nn.Conv2d(3, width, patch, stride=patch, bias=config.patch_embed_proj_bias)
        table = torch.empty(config.init_pos_emb_height, config.init_pos_emb_width, width)
        self.patch_embed.register_module("pos_emb", nn.Module())
        self.patch_embed.pos_emb.weight = nn.Parameter(table.normal_())
        self.encoder = nn.Module()
        self.encoder.blocks = nn.ModuleList(self._block(config) for _ in range(config.vt_num_hidden_layers))
        self.encoder.final_layernorm = nn.RMSNorm(width)

    @staticmethod
    def _block(config: KimiK3VisionConfig) -> nn.Module:
        width, block = config.vt_hidden_size, nn.Module()
        block.norm0, block.norm1 = nn.RMSNorm(width), nn.RMSNorm(width)
        block.wqkv = nn.Linear(width, 3 * config.qkv_hidden_size, bias=config.attn_bias)
        block.wo = nn.Linear(config.qkv_hidden_size, width, bias=config.attn_bias)
        block.mlp = nn.Module()
        block.mlp.fc0 = nn.Linear(width, config.vt_intermediate_size, bias=config.linear_bias)
        block.mlp.fc1 = nn.Linear(config.vt_intermediate_size, width, bias=config.linear_bias)
        return block


class KimiK3Projector(nn.Module):
    """Weights of the projector from merged patches into the text width."""

    def __init__(self, config: KimiK3VisionConfig):
        super().__init__()
        width = config.mm_hidden_size * math.prod(config.merge_kernel_size)
        self.proj = nn.Sequential(
            nn.Linear(width, width, bias=False), nn.GELU(), nn.Linear(width, config.text_hidden_size, bias=False)
        )
        self.post_norm = nn.RMSNorm(config.text_hidden_size, eps=config.projector_ln_eps)


class KimiK3ForConditionalGeneration(KimiK3PreTrainedModel, KimiK3GenerationMixin):
    """The class that the released checkpoint names. Text works; images are refused until vision is implemented."""

    config_class = KimiK3Config
    base_model_prefix = "language_model"
    _image_arguments = ("pixel_values", "pixel_values_videos", "grid_thws", "image_grid_hws", "grid_hws")

    def __init__(self, config: KimiK3Config, dequantize: bool = False):
        super().__init__(config, dequantize=dequantize)
        if config.vision_config is not None:
            self.vision_tower = KimiK3VisionTower(config.vision_config)
            self.mm_projector = KimiK3Projector(config.vision_config)
        self.language_model = KimiK3ForCausalLM(config.text_config)
        self.post_init()

    def get_input_embeddings(self):
        return self.language_model.get_input_embeddings()

    def set_input_embeddings(self, value):
        self.language_model.set_input_embeddings(value)

    def get_output_embeddings(self):
        return self.language_model.get_output_embeddings()

    def set_output_embeddings(self, value):
        self.language_model.set_output_embeddings(value)

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: HybridCache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        cache: HybridCache | None = None,
        **kwargs,
    ) -> MoeCausalLMOutputWithPast:
        """Arguments and result of `KimiK3ForCausalLM.forward`; image arguments raise NotImplementedError."""
        for name in self._image_arguments:
            if kwargs.pop(name, None) is not None:
                raise NotImplementedError(f"{name}: image input is not implemented yet, this model reads text only")
        return self.language_model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            labels=labels,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            cache=cache,
            **kwargs,
        )


__all__ = [
    "CACHE_ARGUMENT",
    "KimiK3ForCausalLM",
    "KimiK3ForConditionalGeneration",
    "KimiK3Model",
    "KimiK3PreTrainedModel",
]
