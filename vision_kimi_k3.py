"""Vision tower (MoonViT-V2) and projector: patches of images to features as wide as the text (`docs/vision.md`).

All images of a forward lie end to end, [N, ...] for their N patches; only position, attention and merging look at the
grids [t, h, w] of the single images.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import is_flash_attention_requested

from .configuration_kimi_k3 import KimiK3VisionConfig
from .layers_kimi_k3 import eager_attention_forward

# The released code leaves it to torch (eps=None), whose choice depends on its version; this is what 2.13 takes for
# float32 and halves (docs/vision.md).
NORM_EPS = 2**-23
THETA = 10000.0

# (frames, rows, columns) of patches
Grid = tuple[int, int, int]


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def checked_grids(pixel_values: Any, grid_thws: Any, config: KimiK3VisionConfig) -> list[Grid]:
    """The grids of the images as numbers.

    Args:
        pixel_values: [N, 3, p, p], patches of all images row by row.
        grid_thws: [n, 3] integers, frames, rows and columns of patches of each image.

    Raises:
        ValueError: where the shapes do not fit each other or the configuration, with the numbers.
    """
    patch, (down, across) = config.patch_size, config.merge_kernel_size
    if not isinstance(pixel_values, torch.Tensor) or pixel_values.shape[1:] != (3, patch, patch):
        shape = list(pixel_values.shape) if isinstance(pixel_values, torch.Tensor) else type(pixel_values).__name__
        raise ValueError(
            f"pixel_values must be a tensor [patches, 3, {patch}, {patch}], got {shape}: the image processor makes it"
        )
    if not isinstance(grid_thws, torch.Tensor) or grid_thws.dim() != 2 or grid_thws.shape[1] != 3:
        shape = list(grid_thws.shape) if isinstance(grid_thws, torch.Tensor) else type(grid_thws).__name__
        raise ValueError(f"grid_thws must be a tensor [images, 3] beside pixel_values, got {shape}")
    if not len(grid_thws):
        raise ValueError("grid_thws holds no image: leave pixel_values and grid_thws out where there is none")
    grids = [(int(t), int(h), int(w)) for t, h, w in grid_thws.tolist()]
    for number, (t, h, w) in enumerate(grids, 1):
        if min(t, h, w) < 1 or h % down or w % across:
            raise ValueError(
                f"image {number} has a grid of {t} x {h} x {w} patches: rows must be a multiple of {down} and columns "
                f"of {across}"
            )
        if t > config.init_pos_emb_time:
            raise ValueError(f"image {number} has {t} frames, the tower knows {config.init_pos_emb_time} at most")
    patches = sum(math.prod(grid) for grid in grids)
    if patches != len(pixel_values):
        raise ValueError(f"pixel_values holds {len(pixel_values)} patches, but the grids in grid_thws have {patches}")
    return grids


def merged_patches(grids: Sequence[Grid], config: KimiK3VisionConfig) -> list[int]:
    """Tokens that each image takes in a text."""
    return [h * w // math.prod(config.merge_kernel_size) for _, h, w in grids]


def rotary_angles(grids: Sequence[Grid], head_dim: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """[N, head_dim / 2]: by how much each pair of neighbouring channels turns, column and row in turn."""
    frequencies = THETA ** (-4 * torch.arange(head_dim // 4, device=device, dtype=dtype) / head_dim)
    angles = []
    for t, h, w in grids:
        column = torch.arange(w, device=device, dtype=dtype).expand(h, w)
        row = torch.arange(h, device=device, dtype=dtype)[:, None].expand(h, w)
        turned = torch.stack([column, row], dim=-1)[..., None, :] * frequencies[:, None]  # [h, w, head_dim / 4, 2]
        angles.append(turned.flatten(2).flatten(0, 1).repeat(t, 1))
    return torch.cat(angles)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn neighbouring channels of x [N, heads, head_dim] in float32; cos and sin [N, 1, head_dim / 2]."""
    even, odd = x.to(cos.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2).to(x.dtype)


class KimiK3PositionTable(nn.Module):
    """Learned positions [height, width, hidden] of the patch grid; frames of a clip differ by sines and cosines."""

    def __init__(self, height: int, width: int, hidden_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(height, width, hidden_size))

    def forward(self, x: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """x [N, hidden] with the positions added."""
        return x + torch.cat([self._positions(*grid) for grid in grids]).to(x)

    def _positions(self, t: int, h: int, w: int) -> torch.Tensor:
        """[t h w, hidden]"""
        table: torch.Tensor = self.weight
        if (h, w) != table.shape[:2]:
            planes = table.permute(2, 0, 1)[None]
            table = F.interpolate(planes, (h, w), mode="bilinear", align_corners=False)[0].permute(1, 2, 0)
        table = table.flatten(0, 1)
        if t == 1:
            return table
        half, dtype = table.shape[1] // 2, _at_least_float32(table.dtype)
        frequencies = THETA ** (-torch.arange(half, device=table.device, dtype=dtype) / half)
        angles = torch.arange(t, device=table.device, dtype=dtype)[:, None] * frequencies
        return (table + torch.cat([angles.sin(), angles.cos()], dim=-1)[:, None].to(table.dtype)).flatten(0, 1)


class KimiK3PatchEmbed(nn.Module):
    """Patches to vectors, their positions added."""

    def __init__(self, config: KimiK3VisionConfig):
        super().__init__()
        width, patch = config.vt_hidden_size, config.patch_size
        self.proj = nn.Conv2d(3, width, patch, stride=patch, bias=config.patch_embed_proj_bias)
        self.pos_emb = KimiK3PositionTable(config.init_pos_emb_height, config.init_pos_emb_width, width)

    def forward(self, pixel_values: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """[N, 3, p, p] -> [N, hidden]"""
        return self.pos_emb(self.proj(pixel_values).flatten(1), grids)


class KimiK3VisionMLP(nn.Module):
    def __init__(self, config: KimiK3VisionConfig):
        super().__init__()
        self.fc0 = nn.Linear(config.vt_hidden_size, config.vt_intermediate_size, bias=config.linear_bias)
        self.fc1 = nn.Linear(config.vt_intermediate_size, config.vt_hidden_size, bias=config.linear_bias)
        self.activation = ACT2FN[config.activation_func]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, hidden] -> [N, hidden]"""
        return self.fc1(self.activation(self.fc0(x)))


class KimiK3VisionBlock(GradientCheckpointingLayer):
    """Attention inside each image and MLP, each behind a norm and beside an ordinary residual."""

    # What transformers' attention functions ask of the module that calls them.
    is_causal = False
    num_key_value_groups = 1

    def __init__(self, config: KimiK3VisionConfig):
        super().__init__()
        self.config = config
        self.num_heads = config.vt_num_attention_heads
        width, inner = config.vt_hidden_size, config.qkv_hidden_size
        self.scaling = (inner // self.num_heads) ** -0.5
        self.norm0, self.norm1 = nn.RMSNorm(width, eps=NORM_EPS), nn.RMSNorm(width, eps=NORM_EPS)
        self.wqkv = nn.Linear(width, 3 * inner, bias=config.attn_bias)
        self.wo = nn.Linear(inner, width, bias=config.attn_bias)
        self.mlp = KimiK3VisionMLP(config)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, lengths: Sequence[int], offsets: torch.Tensor
    ) -> torch.Tensor:
        """
        Args:
            x: [N, hidden].
            cos, sin: [N, 1, head_dim / 2] float32, of `rotary_angles`.
            lengths: patches of each image.
            offsets: [n + 1] int32, where each image begins and ends.
        """
        query, key, value = self.wqkv(self.norm0(x)).view(len(x), 3, self.num_heads, -1).unbind(1)
        attended = self.attend(rotate(query, cos, sin), rotate(key, cos, sin), value, lengths, offsets)
        x = x + self.wo(attended.flatten(1))
        return x + self.mlp(self.norm1(x))

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: Sequence[int], offsets: torch.Tensor
    ) -> torch.Tensor:
        """[N, heads, head_dim] each, and so is the result: flash kernels take all images at once, others one by one."""
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        query, key, value = (each.transpose(0, 1)[None] for each in (query, key, value))
        if is_flash_attention_requested(self.config):
            longest = max(lengths)
            out, _ = attention(
                self, query, key, value, None, scaling=self.scaling, is_causal=False, cu_seq_lens_q=offsets,
                cu_seq_lens_k=offsets, max_length_q=longest, max_length_k=longest,
            )  # fmt: skip
            return out[0]
        images = zip(*(each.split(list(lengths), dim=2) for each in (query, key, value)), strict=True)
        outs = [attention(self, *image, None, scaling=self.scaling, is_causal=False)[0][0] for image in images]
        return torch.cat(outs)


class KimiK3VisionEncoder(nn.Module):
    def __init__(self, config: KimiK3VisionConfig):
        super().__init__()
        self.head_dim = config.qkv_hidden_size // config.vt_num_attention_heads
        self.blocks = nn.ModuleList(KimiK3VisionBlock(config) for _ in range(config.vt_num_hidden_layers))
        self.final_layernorm = nn.RMSNorm(config.vt_hidden_size, eps=NORM_EPS)

    def forward(self, x: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """[N, hidden] -> [N, hidden]"""
        angles = rotary_angles(grids, self.head_dim, x.device, _at_least_float32(x.dtype))[:, None]
        cos, sin, lengths = angles.cos(), angles.sin(), [math.prod(grid) for grid in grids]
        ends = itertools.accumulate(lengths, initial=0)
        offsets = torch.tensor(list(ends), dtype=torch.int32, device=x.device)
        for block in self.blocks:
            x = block(x, cos, sin, lengths, offsets)
        return self.final_layernorm(x)


class KimiK3VisionTower(PreTrainedModel):
    """MoonViT-V2: patches of images to merged patches, the cells of 2 x 2 that become one token each."""

    config: KimiK3VisionConfig
    config_class = KimiK3VisionConfig
    base_model_prefix = "vision_tower"
    main_input_name = "pixel_values"
    input_modalities = ["image"]
    supports_gradient_checkpointing = True
    _no_split_modules = ["KimiK3VisionBlock"]
    _supports_sdpa = True
    _supports_flash_attn = True

    def __init__(self, config: KimiK3VisionConfig):
        super().__init__(config)
        self.patch_embed = KimiK3PatchEmbed(config)
        self.encoder = KimiK3VisionEncoder(config)
        self.post_init()

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        # Flex attention is there for the masks of the text; within an image there is none.
        requested = "sdpa" if requested_attention == "flex_attention" else requested_attention
        return super().get_correct_attn_implementation(requested, is_init_check)

    def get_input_embeddings(self) -> nn.Module:
        return self.patch_embed.proj

    @torch.no_grad()
    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, KimiK3PositionTable):
            init.normal_(module.weight, mean=0.0, std=1.0)

    def forward(self, pixel_values: torch.Tensor, grid_thws: torch.Tensor) -> torch.Tensor:
        """
        Args:
            pixel_values: [N, 3, p, p], patches of all images, row by row within frames; cast to the tower's dtype.
            grid_thws: [n, 3], frames, rows and columns of patches of each image.

        Returns:
            [M, 4, hidden]: every cell's patches row by row, their mean over the frames; cells row by row.

        Raises:
            ValueError: where patches and grids do not fit, with the numbers.
        """
        grids = checked_grids(pixel_values, grid_thws, self.config)
        x = self.encoder(self.patch_embed(pixel_values.to(self.patch_embed.proj.weight.dtype), grids), grids)
        images = x.split([math.prod(grid) for grid in grids])
        return torch.cat([self._merged(image, grid) for image, grid in zip(images, grids, strict=True)])

    def _merged(self, image: torch.Tensor, grid: Grid) -> torch.Tensor:
        """[t h w, hidden] -> [h w / 4, 4, hidden]"""
        (t, h, w), (down, across) = grid, self.config.merge_kernel_size
        cells = image.view(t, h // down, down, w // across, across, -1).transpose(2, 3)
        return cells.mean(0).flatten(0, 1).flatten(1, 2)


class KimiK3Projector(nn.Module):
    """Merged patches into the text width."""

    def __init__(self, config: KimiK3VisionConfig):
        super().__init__()
        width = config.mm_hidden_size * math.prod(config.merge_kernel_size)
        self.proj = nn.Sequential(
            nn.Linear(width, width, bias=False), nn.GELU(), nn.Linear(width, config.text_hidden_size, bias=False)
        )
        self.post_norm = nn.RMSNorm(config.text_hidden_size, eps=config.projector_ln_eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[M, 4, hidden] -> [M, text hidden]"""
        return self.post_norm(self.proj(x.flatten(1)))
