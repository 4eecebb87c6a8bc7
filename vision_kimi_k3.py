"""Vision tower and projector: their weights load and save; no image is read yet."""

import math

import torch
from torch import nn

from .configuration_kimi_k3 import KimiK3VisionConfig


class KimiK3PositionTable(nn.Module):
    """Learned positions [height, width, hidden] of the patch grid."""

    def __init__(self, height: int, width: int, hidden_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(height, width, hidden_size))


class KimiK3VisionTower(nn.Module):
    """Weights of MoonViT-V2. They load and save; images are refused by `KimiK3ForConditionalGeneration`."""

    def __init__(self, config: KimiK3VisionConfig):
        super().__init__()
        width, patch = config.vt_hidden_size, config.patch_size
        self.patch_embed = nn.Module()
        self.patch_embed.proj = nn.Conv2d(3, width, patch, stride=patch, bias=config.patch_embed_proj_bias)
        self.patch_embed.pos_emb = KimiK3PositionTable(config.init_pos_emb_height, config.init_pos_emb_width, width)
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
