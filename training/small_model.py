"""What the small checkpoint needs beside the model: its shape, MXFP4 rounding and the packed copy."""

import contextlib

import torch
from torch import nn
from torch.nn.utils import parametrize
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from kimi_k3 import KimiK3TextConfig
from kimi_k3.kernels.mxfp4 import quantize_mxfp4
from kimi_k3.training.qat import mxfp4

EXPERT_WEIGHTS = ("gate_up_proj", "down_proj")
# Vectors and the like: weight decay would pull them away from values that mean something.
NOT_DECAYED = ("norm", "conv1d", "A_log", "dt_bias", "bias", "res_proj", "embed_tokens")


def small_config(tokenizer, **changes):
    """K3 in every part, 8 layers deep and 192 wide; `changes` are config keys."""
    settings = {
        "vocab_size": len(tokenizer),
        "hidden_size": 192,
        "intermediate_size": 320,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "linear_attn_config": {
            "full_attn_layers": [4, 8],
            "kda_layers": [1, 2, 3, 5, 6, 7],
            "head_dim": 64,
            "num_heads": 3,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
            "gate_lower_bound": -5.0,
        },
        "attn_res_block_size": 4,
        # 0.02 suits a width of 7168; at 192 it would start with near-uniform attention
        "initializer_range": 0.05,
        "num_experts": 32,
        "num_experts_per_token": 4,
        "num_shared_experts": 1,
        "moe_intermediate_size": 128,
        "routed_expert_hidden_size": 96,
        "max_position_embeddings": tokenizer.model_max_length,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    return KimiK3TextConfig(**{**settings, **changes})


def padded_experts(experts, x, expert_ids, expert_weights):
    """Routed experts as two batched products over rows padded to the fullest expert.

    A third of the launches of a loop over experts, which is what a small model on a GPU waits for. Wasteful when the
    load is uneven; Quantile Balancing keeps it even. Arguments and result as `KimiK3Experts.forward`.
    """
    tokens, top_k = expert_ids.shape
    flat = expert_ids.flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=experts.num_experts)
    capacity = int(counts.max())
    first = counts.cumsum(0) - counts
    slots = torch.empty_like(flat)
    slots[order] = flat[order] * capacity + torch.arange(len(flat), device=flat.device) - first[flat[order]]
    rows = x.new_zeros(experts.num_experts * capacity, x.shape[-1])
    rows = rows.index_copy(0, slots, x.repeat_interleave(top_k, dim=0)).view(experts.num_experts, capacity, -1)
    hidden = experts._apply_gate(torch.bmm(rows, experts.gate_up_proj.transpose(1, 2)))
    results = torch.bmm(hidden, experts.down_proj.transpose(1, 2)).flatten(0, 1)[slots]
    return (results.view(tokens, top_k, -1).float() * expert_weights[..., None]).sum(1)


ALL_EXPERTS_FUNCTIONS.register("padded_bmm", padded_experts)


def moe_layers(model):
    return [layer.block_sparse_moe for layer in model.model.layers if hasattr(layer, "block_sparse_moe")]


def parameter_groups(model, weight_decay):
    """Groups for AdamW: matrices are decayed, everything else is not."""
    decayed, kept = [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_matrix = parameter.ndim >= 2 and not any(part in name for part in NOT_DECAYED)
            (decayed if is_matrix else kept).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]


class RoundToMXFP4(nn.Module):
    """The forward pass sees weights rounded to MXFP4, the gradient passes straight through to the master weights."""

    def forward(self, weight):
        return mxfp4(weight)


def round_experts(model):
    """Puts every routed expert weight through RoundToMXFP4. The parameters themselves stay the optimizer's."""
    for layer in moe_layers(model):
        for name in EXPERT_WEIGHTS:
            parametrize.register_parametrization(layer.experts, name, RoundToMXFP4())


def experts_rounded(model):
    return any(parametrize.is_parametrized(layer.experts) for layer in moe_layers(model))


def rounding_once(model):
    """Context in which rounded weights are computed once and not at every access."""
    return parametrize.cached() if experts_rounded(model) else contextlib.nullcontext()


def master_state(model):
    """state_dict under the names of a model without parametrizations."""
    state = model.state_dict()
    return {name.replace("parametrizations.", "").removesuffix(".original"): state[name] for name in state}


def packed_state(model):
    """State of the packed model: routed experts as MXFP4 codes and scales, the rest as it is."""
    state = {}
    for name, tensor in master_state(model).items():
        if name.endswith(tuple(f".experts.{weight}" for weight in EXPERT_WEIGHTS)):
            state[f"{name}_packed"], state[f"{name}_scale"] = quantize_mxfp4(tensor)
        else:
            state[name] = tensor
    return state
