"""HybridCache: the state of a Kimi K3 forward, a transformers `Cache`.

A KDA layer keeps one float32 matrix a head and the last inputs of its short convolutions, whatever the context; an MLA
layer keeps the compressed latent of every token. All layers belong to the same token boundary: the number of columns
(real tokens and padding) that were fed so far, `get_seq_length()`.
"""

from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

# A latent buffer grows by a quarter, so that appending a token does not copy the whole cache every time.
_GROWTH, _GRANULE = 1.25, 64


class KDACacheLayer(CacheLayerMixin):
    """State of one KDA layer.

    Attributes:
        conv_tails: the last W - 1 inputs of the q, k and v convolutions, three tensors [B, W - 1, H * K or V], or None.
        recurrent_state: [B, H, K, V] float32, or None before the first token.
    """

    def __init__(self):
        super().__init__()
        self.conv_tails: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        self.recurrent_state: torch.Tensor | None = None
        self.seq_length = 0

    def store(self, conv_tails: tuple[torch.Tensor, ...], recurrent_state: torch.Tensor, new_tokens: int) -> None:
        """Take over the state after `new_tokens` more columns. The tensors belong to the cache from here on."""
        self.conv_tails, self.recurrent_state = tuple(conv_tails), recurrent_state
        self.seq_length += new_tokens
        self.is_initialized = True

    def tensors(self) -> list[torch.Tensor]:
        return [*self.conv_tails, self.recurrent_state] if self.is_initialized else []

    def lazy_initialization(self, *args, **kwargs) -> None:
        raise NotImplementedError("a KDA layer has no keys and values; the model fills it through `store`")

    def update(self, *args, **kwargs):
        raise NotImplementedError("a KDA layer has no keys and values; the model fills it through `store`")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seq_length + query_length, 0

    def get_seq_length(self) -> int:
        return self.seq_length

    def get_max_length(self) -> int:
        return -1

    @property
    def batch_size(self) -> int:
        return self.recurrent_state.shape[0] if self.is_initialized else -1

    def _map(self, function) -> None:
        if self.is_initialized:
            self.conv_tails = tuple(function(tail) for tail in self.conv_tails)
            self.recurrent_state = function(self.recurrent_state)

    def reset(self) -> None:
        self.__init__()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._map(lambda x: x.index_select(0, indices.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda x: x.repeat_interleave(repeats, dim=0))


class LatentCacheLayer(CacheLayerMixin):
    """Latents of one MLA layer: the normed 512-wide latent and the shared 64-wide key part of every token."""

    def __init__(self):
        super().__init__()
        self.buffer: torch.Tensor | None = None  # [B, capacity, kv_lora_rank + qk_rope_head_dim]
        self.seq_length = 0

    @property
    def latents(self) -> torch.Tensor:
        """[B, tokens, kv_lora_rank + qk_rope_head_dim]"""
        return self.buffer[:, : self.seq_length]

    def append(self, latents: torch.Tensor) -> torch.Tensor:
        """Append [B, new tokens, width] and return the latents of all tokens, without a copy where possible."""
        length = self.seq_length + latents.shape[1]
        if latents.requires_grad or (self.buffer is not None and self.buffer.requires_grad):
            # Writing in place would cut or corrupt the autograd graph of earlier steps.
            self.buffer = latents if self.buffer is None else torch.cat([self.latents, latents], dim=1)
        else:
            if self.buffer is None or self.buffer.shape[1] < length:
                self._grow(latents, length)
            self.buffer[:, self.seq_length : length] = latents
        self.seq_length = length
        self.is_initialized = True
        return self.latents

    def _grow(self, like: torch.Tensor, length: int) -> None:
        # The first prefill is stored tight: most caches are built by one prefill and a short generation.
        capacity = length if self.buffer is None else int(length * _GROWTH)
        capacity = -(-(capacity + 1) // _GRANULE) * _GRANULE
        buffer = like.new_empty(like.shape[0], capacity, like.shape[2])
        if self.buffer is not None:
            buffer[:, : self.seq_length] = self.latents
        self.buffer = buffer

    def tensors(self) -> list[torch.Tensor]:
        return [self.latents] if self.is_initialized else []

    def lazy_initialization(self, *args, **kwargs) -> None:
        raise NotImplementedError("an MLA layer stores latents, not keys and values; the model calls `append`")

    def update(self, *args, **kwargs):
        raise NotImplementedError("an MLA layer stores latents, not keys and values; the model calls `append`")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seq_length + query_length, 0

    def get_seq_length(self) -> int:
        return self.seq_length

    def get_max_length(self) -> int:
        return -1

    @property
    def batch_size(self) -> int:
        return self.buffer.shape[0] if self.is_initialized else -1

    def reset(self) -> None:
        self.__init__()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self.is_initialized:
            self.buffer = self.buffer.index_select(0, indices.to(self.buffer.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self.buffer = self.buffer.repeat_interleave(repeats, dim=0)


class HybridCache(Cache):
    """Cache of a Kimi K3 model: `KDACacheLayer` and `LatentCacheLayer`, one a decoder layer.

    Args:
        config: a `KimiK3Config` or `KimiK3TextConfig`.

    Example:
        >>> cache = HybridCache(model.config)
        >>> model(input_ids, past_key_values=cache)  # or cache=cache
        >>> cache.get_seq_length(), cache.nbytes
    """

    def __init__(self, config: Any):
        text_config = config.get_text_config(decoder=True)
        super().__init__(
            layers=[
                KDACacheLayer() if layer_type == "linear_attention" else LatentCacheLayer()
                for layer_type in text_config.layer_types
            ]
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the states and of the latents held (not of the spare room of the latent buffers)."""
        return sum(tensor.numel() * tensor.element_size() for layer in self.layers for tensor in layer.tensors())

    def crop(self, tokens_to_remove: int) -> None:
        """Only `crop(0)` is possible: a recurrent state cannot be shortened without what it was before."""
        if tokens_to_remove != 0:
            raise NotImplementedError(
                "HybridCache cannot remove tokens: the state of a KDA layer has no way back. "
                "Keep a copy of the cache at the boundary you want to return to (copy.deepcopy)."
            )


__all__ = ["HybridCache", "KDACacheLayer", "LatentCacheLayer"]
