"""A DSpark-style draft: a few small layers that read the target's hidden states and draft a block of tokens at once.

The hidden states that some layers of the target read are concatenated, projected and normed; every draft layer keeps a
latent of that context for each token. A block is drafted in one pass that is not causal: its first
position holds the newest token, the others a mask token, and position i gives the logits of the i-th token after the
newest. A bias of low rank, w2 w1[token before], ties each token of the block to the one before it; a confidence head
says where the block should end. Embedding and head are the target's. Tensor names are those of the published drafts for
Kimi K3; their scaled rotary embedding is refused, because nothing here could verify it.
"""

import json
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from ..checkpoint_kimi_k3 import refuse_unusable_values
from ..files_kimi_k3 import save_described


@dataclass(frozen=True)
class DSparkConfig:
    """Sizes as in the draft's `config.json`; `block_size` tokens are drafted at once."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    markov_rank: int
    block_size: int
    rope_theta: float = 50000.0
    rms_norm_eps: float = 1e-5
    model_type: str = "k3_dspark"

    @classmethod
    def read(cls, folder: Path) -> "DSparkConfig":
        """
        Raises:
            ValueError: for a folder without a draft, or one of a kind that is not implemented.
        """
        try:
            data = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"{folder} holds no draft: {error}") from error
        if not isinstance(data, dict):
            raise ValueError(f"{folder} holds no draft: its config.json is no object")
        if data.get("rope_scaling"):
            raise ValueError(f"{folder}: a draft with rope_scaling is not implemented")
        known = {field.name: field.default is MISSING for field in fields(cls)}
        unknown = sorted(set(data) - set(known))
        missing = sorted(name for name, needed in known.items() if needed and name not in data)
        if unknown or missing:
            raise ValueError(f"{folder}: the draft's config has unknown keys {unknown} and lacks {missing}")
        if wrong := [name for name, value in data.items() if not _can_be(name, value)]:
            raise ValueError(f"{folder}: the draft's {wrong[0]} cannot be {str(data[wrong[0]])[:100]}")
        if data["mask_token_id"] >= data["vocab_size"]:
            raise ValueError(f"{folder}: the draft's mask_token_id is none of its {data['vocab_size']} tokens")
        return cls(**{**data, "target_layer_ids": tuple(data["target_layer_ids"])})


def _can_be(name: str, value: Any) -> bool:
    """Whether a field of a draft's config has a value that means something."""
    if name == "model_type":
        return value == DSparkConfig.model_type
    if name == "target_layer_ids":
        return isinstance(value, list) and bool(value) and all(type(layer) is int and layer >= 0 for layer in value)
    if name in ("rope_theta", "rms_norm_eps"):
        return type(value) in (int, float) and 0 < value < float("inf")
    if type(value) is not int or (name == "qk_rope_head_dim" and value % 2):
        return False
    return value >= (0 if name == "mask_token_id" else 1)


def rotary(positions: torch.Tensor, size: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [T, size / 2] for `rotated`, of positions [T]."""
    half = size // 2
    rates = theta ** (-torch.arange(half, device=positions.device, dtype=torch.float32) / half)
    angles = positions.to(torch.float32)[:, None] * rates
    return angles.cos(), angles.sin()


def rotated(x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotary embedding (arXiv 2104.09864) of x [..., T, P]; channel i is rotated with channel i + P / 2."""
    (cos, sin), (first, second) = rotary, x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class DSparkAttention(nn.Module):
    """MLA with rotary positions, whose queries read the context and the whole of their own block.

    Queries are projected into the space of the latents, so that no round expands the context into keys and values.
    """

    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.config, hidden, heads = config, config.hidden_size, config.num_attention_heads
        self.q_a_proj = nn.Linear(hidden, config.q_lora_rank, bias=False)
        self.q_a_layernorm = nn.RMSNorm(config.q_lora_rank, config.rms_norm_eps)
        query = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
        self.q_b_proj = nn.Linear(config.q_lora_rank, query, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, config.kv_lora_rank + config.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(config.kv_lora_rank, config.rms_norm_eps)
        values = heads * (config.qk_nope_head_dim + config.v_head_dim)
        self.kv_b_proj = nn.Linear(config.kv_lora_rank, values, bias=False)
        self.o_proj = nn.Linear(heads * config.v_head_dim, hidden, bias=False)

    def latents(self, x: torch.Tensor, rotary) -> torch.Tensor:
        """[..., T, hidden] -> [..., T, kv_lora_rank + qk_rope_head_dim], rotated already."""
        latent, key = self.kv_a_proj_with_mqa(x).split([self.config.kv_lora_rank, self.config.qk_rope_head_dim], dim=-1)
        return torch.cat([self.kv_a_layernorm(latent), rotated(key, rotary)], dim=-1)

    def forward(self, x, rotary, latents, mask=None):
        """x [B, T, hidden] with the `rotary` of its positions reads latents [B, S, ...] where `mask` [T, S] allows."""
        c, heads = self.config, self.config.num_attention_heads
        query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).unflatten(-1, (heads, -1)).transpose(1, 2)
        nope, rope = query.split([c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
        to_key, to_value = self.kv_b_proj.weight.unflatten(0, (heads, -1)).split([c.qk_nope_head_dim, c.v_head_dim], 1)
        query = torch.cat([nope @ to_key, rotated(rope, rotary)], dim=-1)
        shared = latents[:, None].expand(-1, heads, -1, -1)
        scale = (c.qk_nope_head_dim + c.qk_rope_head_dim) ** -0.5
        read = F.scaled_dot_product_attention(query, shared, shared, attn_mask=mask, scale=scale)
        out = read[..., : c.kv_lora_rank] @ to_value.mT
        return self.o_proj(out.transpose(1, 2).flatten(2))


class DSparkMLP(nn.Module):
    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DSparkLayer(nn.Module):
    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = DSparkAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = DSparkMLP(config)

    def forward(self, x, rotary, context, mask=None):
        hidden = self.input_layernorm(x)
        latents = torch.cat([context, self.self_attn.latents(hidden, rotary)], dim=1)
        x = x + self.self_attn(hidden, rotary, latents, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class DSparkDraft(nn.Module):
    """The draft; `lm_head` is the target's and is passed in."""

    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.config, hidden, vocabulary, rank = config, config.hidden_size, config.vocab_size, config.markov_rank
        self.context_proj = nn.Linear(len(config.target_layer_ids) * hidden, hidden, bias=False)
        self.context_norm = nn.RMSNorm(hidden, config.rms_norm_eps)
        self.embed_tokens = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(DSparkLayer(config) for _ in range(config.num_hidden_layers))
        self.final_norm = nn.RMSNorm(hidden, config.rms_norm_eps)
        w1, w2 = nn.Embedding(vocabulary, rank), nn.Linear(rank, vocabulary, bias=False)
        self.markov_head = nn.ModuleDict({"markov_w1": w1, "markov_w2": w2})
        self.confidence_head = nn.ModuleDict({"proj": nn.Linear(hidden + rank, 1)})

    def taps(self, hidden_states: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """The target's hidden states (entry l is what layer l reads), concatenated: [B, T, taps * hidden]."""
        return torch.cat([hidden_states[layer] for layer in self.config.target_layer_ids], dim=-1)

    def context(self, taps: torch.Tensor, start: int) -> list[torch.Tensor]:
        """Latents [B, T, R] of every draft layer for tapped states of tokens start, start + 1, ..."""
        x = self.context_norm(self.context_proj(taps))
        turn = self._rotary(torch.arange(start, start + x.shape[1], device=x.device))
        return [layer.self_attn.latents(x, turn) for layer in self.layers]

    def _rotary(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rotary(positions, self.config.qk_rope_head_dim, self.config.rope_theta)

    def block(self, newest: torch.Tensor, positions: torch.Tensor, context: list[torch.Tensor], mask=None):
        """Hidden states [B, blocks * block_size, hidden] of blocks that start with the tokens `newest` [B, blocks].

        `positions` [blocks * block_size] are those of the block's slots.
        """
        slots = newest[..., None].expand(-1, -1, self.config.block_size).clone()
        slots[..., 1:] = self.config.mask_token_id
        x, turn = self.embed_tokens(slots.flatten(1)), self._rotary(positions)
        for layer, latents in zip(self.layers, context, strict=True):
            x = layer(x, turn, latents, mask)
        return self.final_norm(x)

    def bias(self, before: torch.Tensor) -> torch.Tensor:
        """The bias [..., V] that the token before adds to the logits."""
        return self.markov_head.markov_w2(self.markov_head.markov_w1(before))

    def confidence(self, hidden: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Logit of the chance that a token drafted from `hidden` behind the token `before` is accepted."""
        return self.confidence_head.proj(torch.cat([hidden, self.markov_head.markov_w1(before)], dim=-1)).squeeze(-1)

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        description = json.dumps(asdict(self.config), indent=2)
        save_described(self.state_dict(), folder / "model.safetensors", description, folder / "config.json")

    @classmethod
    def load(cls, folder: Path, target: torch.nn.Module) -> "DSparkDraft":
        """The draft in a folder, on the target's device and in its dtype.

        Raises:
            ValueError: if there is none or it is damaged, or it was made for a model of other sizes.
        """
        config, text = DSparkConfig.read(folder), target.config.get_text_config(decoder=True)
        for name in ("vocab_size", "hidden_size"):
            made_for, here = getattr(config, name), getattr(text, name)
            if made_for != here:
                raise ValueError(f"{folder} drafts for a model with {name} {made_for}, this one has {here}")
        if max(config.target_layer_ids) >= text.num_hidden_layers:
            layer, layers = max(config.target_layer_ids), text.num_hidden_layers
            raise ValueError(f"{folder} taps layer {layer}, but the model has {layers} layers, counted from 0")
        try:
            weights = load_file(folder / "model.safetensors")
            refuse_unusable_values(weights)
            layers = {name.split(".")[1] for name in weights if name.startswith("layers.")}
            if len(layers) != config.num_hidden_layers:  # before as many are made
                raise ValueError(f"{len(layers)} layers in the file, {config.num_hidden_layers} in the config")
            with torch.device("meta"):
                draft = cls(config)
            draft.load_state_dict(weights, assign=True)
        except Exception as error:  # of whatever type the reader has for what it cannot read
            raise ValueError(f"{folder}: the draft's weights do not fit its config: {error}") from error
        return draft.to(target.device, target.dtype).eval()
