"""Tiny models, the one place where tests take their sizes from: no two sizes are alike.

Where two sizes are one number, a test cannot see that the code takes one for the other. `test_tiny.py` watches over it.
"""

import os
from pathlib import Path

import torch

from kimi_k3 import KimiK3ForCausalLM, KimiK3TextConfig

VOCABULARY = 71

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 56,
    "intermediate_size": 76,
    "num_attention_heads": 6,
    "q_lora_rank": 28,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 14,
    "v_head_dim": 10,
    "num_experts": 9,
    "num_experts_per_token": 3,
    "num_shared_experts": 2,
    "moe_intermediate_size": 24,
    "routed_expert_hidden_size": 32,
}
KDA_SIZES = {"num_heads": 5, "head_dim": 8, "short_conv_kernel_size": 4}
# A released checkpoint has ends of text; a test that generates a fixed number of tokens wants none.
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
NO_SPECIAL = dict.fromkeys(SPECIAL)

# Changes of `config` that make other families of it.
DENSE = {"num_experts": None, "num_experts_per_token": None}
KIMI_LINEAR = {
    "kda": {"gate_lower_bound": None, "use_full_rank_gate": False},
    "attn_res_block_size": None,
    "hidden_act": "silu",
    "mla_use_output_gate": False,
    "q_lora_rank": None,
    "routed_expert_hidden_size": None,
    "latent_moe_use_norm": False,
}
# Packed experts need widths of whole groups of 32.
PACKED = {
    "moe_intermediate_size": 32,
    "routed_expert_hidden_size": 96,
    "quantization_config": {"format": "mxfp4-pack-quantized", "quant_method": "compressed-tensors"},
}


def config(layers: str = "kmk", kda: dict | None = None, **changes) -> KimiK3TextConfig:
    """K3 with Attention Residuals, latent experts behind one dense layer, low-rank queries and both output gates.

    Args:
        layers: their kinds, k for KDA and m for MLA.
        kda: changes of `linear_attn_config`.
        changes: of the other keys.
    """
    linear = {
        "kda_layers": [number for number, kind in enumerate(layers, 1) if kind == "k"],
        "full_attn_layers": [number for number, kind in enumerate(layers, 1) if kind == "m"],
        "gate_lower_bound": -5.0,
        "use_full_rank_gate": True,
    }
    settings = {
        "num_hidden_layers": len(layers),
        "linear_attn_config": {**linear, **KDA_SIZES, **(kda or {})},
        "num_key_value_heads": None,
        "attn_res_block_size": 2,
    }
    return KimiK3TextConfig(**{**SIZES, **settings, **SPECIAL, **changes})


def model(layers: str = "kmk", seed: int = 0, **changes) -> KimiK3ForCausalLM:
    """A float32 model of `config(layers, **changes)` with random weights, in evaluation."""
    settings = config(layers, **changes)
    torch.manual_seed(seed)
    return KimiK3ForCausalLM(settings).eval()


def environment(**variables: str) -> dict[str, str]:
    """Of a process that runs a test file by itself, and has to find this module."""
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **variables}
