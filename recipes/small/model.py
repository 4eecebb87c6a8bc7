"""What the small checkpoint needs beside the model: its shape, the copy that computes, and the packed copy."""

import torch

from kimi_k3 import KimiK3ForCausalLM, KimiK3TextConfig
from kimi_k3.kernels.mxfp4 import quantize_mxfp4
from kimi_k3.training.qat import mxfp4

EXPERT_WEIGHTS = ("gate_up_proj", "down_proj")


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
        "kv_lora_rank": 96,
        "qk_nope_head_dim": 48,
        "qk_rope_head_dim": 16,
        "v_head_dim": 64,
        "linear_attn_config": {
            "full_attn_layers": [4, 8],
            "kda_layers": [1, 2, 3, 5, 6, 7],
            "head_dim": 64,
            "num_heads": 4,  # the same as MLA's: llama.cpp knows one number of heads
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


def is_expert(name):
    return name.endswith(tuple(f".experts.{weight}" for weight in EXPERT_WEIGHTS))


class MixedPrecision:
    """float32 weights that the optimizer moves, and a model in `dtype` that computes with them.

    Gradients of several backward passes are added in float32. The routed experts of the computing model can be rounded
    to MXFP4 (`rounded`): the gradient then passes straight through to the unrounded weights.

    Attributes:
        master: the model whose parameters are to be optimized; it never runs.
        model: the model that runs. Buffers, the router's selection biases among them, are its own.
    """

    def __init__(self, master, dtype):
        self.master, self.rounded = master, False
        kept = torch.get_default_dtype()
        torch.set_default_dtype(dtype)  # what the model keeps in float32 stays so
        try:
            with torch.device(next(master.parameters()).device):
                self.model = KimiK3ForCausalLM(master.config)
        finally:
            torch.set_default_dtype(kept)
        self.model.load_state_dict(master.state_dict())
        self.names = [name for name, _ in master.named_parameters()]
        self.masters, self.copies = list(master.parameters()), list(self.model.parameters())

    @torch.no_grad()
    def take_gradients(self):
        """Adds the computing model's gradients to those of the float32 weights."""
        fresh = [(weight, copy.grad) for weight, copy in zip(self.masters, self.copies, strict=True)]
        for weight, gradient in fresh:
            if gradient is not None and weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        weights, gradients = zip(*((w.grad, g) for w, g in fresh if g is not None), strict=True)
        torch._foreach_add_(weights, gradients)
        self.model.zero_grad(set_to_none=True)

    @torch.no_grad()
    def give_weights(self):
        """Copies the float32 weights into the model that computes."""
        values = self.masters
        if self.rounded:
            values = [mxfp4(w) if is_expert(name) else w for name, w in zip(self.names, self.masters, strict=True)]
        torch._foreach_copy_(self.copies, values)

    def state(self):
        """The whole model in float32: weights of the optimizer, buffers of the model that computes."""
        return {**self.model.state_dict(), **dict(self.master.named_parameters())}


def packed_state(state):
    """State of the packed model: routed experts as MXFP4 codes and scales, the rest as it is."""
    packed = {}
    for name, tensor in state.items():
        if is_expert(name):
            packed[f"{name}_packed"], packed[f"{name}_scale"] = quantize_mxfp4(tensor.detach())
        else:
            packed[name] = tensor.detach()
    return packed
