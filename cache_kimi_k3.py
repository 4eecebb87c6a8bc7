"""HybridCache: the state of a Kimi K3 forward, a transformers `Cache`.

A KDA layer keeps one float32 matrix a head and the last inputs of its short convolutions, whatever the context; an MLA
layer keeps the compressed latent of every token. All layers belong to the same token boundary: the number of columns
(real tokens and padding) that were fed so far, `get_seq_length()`.

Going back (`crop`) is exact. A latent is dropped; a recurrent state is not inverted but replayed, as the Kimi K3 report
does for speculative decoding: while recording, a KDA layer keeps its state of an earlier boundary and the projected
inputs since then, a few KB a token, and rebuilds the state from the tokens that stay.
"""

import contextlib
import copy
import functools
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from .cache_layers_kimi_k3 import KDACacheLayer, LatentCacheLayer, StaticKDACacheLayer, StaticLatentCacheLayer
from .files_kimi_k3 import load_tensors, save_tensors
from .fingerprint_kimi_k3 import model_fingerprint

# Attention implementations that can read the filled part of a buffer.
STATIC_ATTENTION = ("eager", "sdpa")
_ONE_STATE = "a static cache keeps one state: use HybridCache(config) without max_length"
_FORMAT = "kimi-k3 HybridCache 3"
_BROKEN_OFF = (
    "a forward on this cache, or a change of it, was broken off, so nobody knows which of its tokens were fed: restore "
    "a snapshot, or start over with cache.reset()"
)
_MASK_MISSING = (
    "the cache holds padding, so every call needs the attention_mask of all columns; without it the MLA layers would "
    "read the padding as tokens"
)
_MASK_CONTRADICTS = (
    "the attention_mask contradicts the one under which the cache was filled: what was fed as a token cannot become "
    "padding, nor the other way round. After a batch in which rows ended before others, start from the whole text "
    "without a cache"
)


class RefusedForward(ValueError):
    """A forward that cannot work and fed nothing: its cache is as it was."""


class HybridCache(Cache):
    """Cache of a Kimi K3 model: `KDACacheLayer` and `LatentCacheLayer`, one a decoder layer.

    Args:
        config: a `KimiK3Config` or `KimiK3TextConfig`.
        max_length: columns for which buffers that never move have room (static shapes); None grows as needed.
        offload: keep every layer's tensors on the CPU between its forwards.

    Example:
        >>> cache = HybridCache(model.config)
        >>> model(input_ids, past_key_values=cache)  # or cache=cache
        >>> cache.get_seq_length(), cache.nbytes
    """

    layers: list[Any]  # of the four classes in `cache_layers_kimi_k3.py`; whoever takes one says of which kind

    def __init__(self, config: Any, max_length: int | None = None, offload: bool = False):
        if max_length is not None and offload:
            raise ValueError("max_length and offload exclude each other: a static buffer must not move")
        if max_length is not None and max_length < 1:
            raise ValueError(f"max_length={max_length}: a static cache needs room for a token at least")
        text_config = config.get_text_config(decoder=True)

        def layer(layer_type):
            if layer_type == "linear_attention":
                return KDACacheLayer(offload) if max_length is None else StaticKDACacheLayer(max_length)
            return LatentCacheLayer(offload) if max_length is None else StaticLatentCacheLayer(max_length)

        super().__init__(layers=[layer(layer_type) for layer_type in text_config.layer_types])
        # [B, columns] bool, which of the columns that were fed are tokens; None while all are. With static shapes
        # [B, max_length], a buffer like those of the layers, of which the first `get_seq_length()` columns count.
        self.real: torch.Tensor | None = None
        self.padded = False  # whether padding is known, without reading a value, to have been fed
        # whether every forward that began on it has returned, its head included, and all layers have every other change
        self.is_whole = True

    @property
    def nbytes(self) -> int:
        """Bytes of the states and latents held, without the spare room of latent buffers and what `crop` needs."""
        return sum(layer.nbytes for layer in self.layers)

    def reserve(self, columns: int) -> None:
        """Make room for this many columns at the next token: a cache of known length is then never copied to grow."""
        for layer in self.layers:
            if hasattr(layer, "reserved"):
                layer.reserved = columns

    def keep_recorded(self, columns: int) -> None:
        """While recording, let at least this many columns be taken back, if that is more than 64."""
        for layer in self.layers:
            if hasattr(layer, "recording"):
                layer.recording.reach = max(columns, layer.recording.reach)

    def keep_states(self, columns: Iterable[int]) -> None:
        """Let coming forwards, of tokens without padding, export the states at these columns for `snapshot(column)`.

        What was asked for and kept before is forgotten; without columns nothing is kept any more.

        Raises:
            ValueError: for a column that has been passed, and for static shapes.
        """
        columns, cached = frozenset(map(int, columns)), self.get_seq_length()
        if self.is_compileable:
            raise ValueError(_ONE_STATE)
        if columns and min(columns) <= cached:
            raise ValueError(f"column {min(columns)} has been passed, the cache holds {cached}: ask before the forward")
        for layer in self.layers:
            if isinstance(layer, KDACacheLayer):
                layer.keep_states(columns)

    def snapshot(self, column: int | None = None) -> "HybridCache":
        """This boundary, to return to with `restore` or to continue as a cache of its own.

        Nothing is copied until one of the two is written where the other reads.

        Args:
            column: an earlier boundary, of those that `keep_states` named.

        Raises:
            ValueError: for a column at which no state was kept, for an earlier one of static shapes, and for a cache on
                which a forward was broken off.
        """
        self.check_whole()
        earlier = None if column is None or int(column) == self.get_seq_length() else int(column)
        if earlier is not None:
            self._check_kept(earlier)
        forked = copy.copy(self)
        forked.layers = [layer.fork() if earlier is None else layer.fork_at(earlier) for layer in self.layers]
        forked.real = None
        forked._replace_real(self.real if earlier is None or self.real is None else self.real[:, :earlier])
        return forked

    def _check_kept(self, column: int) -> None:
        if self.is_compileable:
            raise ValueError(_ONE_STATE)
        for layer in self.layers:
            if not (column in layer.snapshots if isinstance(layer, KDACacheLayer) else 0 < column <= layer.seq_length):
                raise ValueError(f"no state was kept at column {column}: call keep_states before the forward")

    def restore(self, snapshot: "HybridCache") -> None:
        """Return to the boundary of a snapshot, which stays usable."""
        if [type(layer) for layer in self.layers] != [type(kept) for kept in snapshot.layers]:
            raise ValueError("restore takes a snapshot of this cache: that one has other layers")
        self.is_whole = False
        self.layers = [layer.restored(kept) for layer, kept in zip(self.layers, snapshot.layers, strict=True)]
        self.padded = snapshot.padded
        self._replace_real(snapshot.real)
        self.is_whole = snapshot.is_whole

    def reset(self) -> None:
        self.is_whole = False
        super().reset()
        self.padded = False
        self._replace_real(None)
        self.is_whole = True

    def check_whole(self) -> None:
        """
        Raises:
            ValueError: if a forward on the cache was broken off, whatever it had reached, or another change of it.
        """
        if not self.is_whole:
            raise ValueError(_BROKEN_OFF)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Around what changes one layer after another: where it is broken off, they do not belong together."""
        before, self.is_whole = self.is_whole, False
        yield
        self.is_whole = before

    def commit(self) -> None:
        """After the forward that `begin` announced, once nothing behind it can fail any more: its tokens are fed."""
        self.is_whole = True

    def begin(
        self, embeds: torch.Tensor, attention_mask: torch.Tensor | None, padding: bool, is_linear: list[bool], runs: int
    ) -> None:
        """Before a forward fills the cache: refuse what does not fit, with nothing changed, then keep the mask.

        Until `commit` the cache takes no other forward: one that fails leaves it to `restore` and `reset`.

        Args:
            embeds: [B, T, hidden] of the new columns.
            attention_mask: [B, columns of the cache and new ones], or [B, max_length], or None.
            padding: whether some of the new columns are known to be padding.
            is_linear: of every layer of the model, whether it is a KDA layer.
            runs: how many of them will run; fewer in a draft that exits early.

        Raises:
            RefusedForward: for a cache of other layers or rows, one that is full, and one on which a forward left out
                layers; for a mask that contradicts what was fed, since a column read as a token is part of every state.
            ValueError: for a cache on which a forward was broken off.
        """
        self.check_whole()
        self._check_room(*embeds.shape[:2])
        self._check_layers(is_linear, runs)
        if attention_mask is None and self.padded:
            raise RefusedForward(_MASK_MISSING)
        inside = range(1, embeds.shape[1])
        recurrent = [layer for layer in self.layers if isinstance(layer, KDACacheLayer)] if padding else []
        if any(column - layer.seq_length in inside for layer in recurrent for column in layer.snapshot_columns):
            raise RefusedForward("a forward with padding exports no states: call keep_states for rows without padding")
        if self.is_compileable:
            self._take_mask_in_place(attention_mask, embeds)
        elif attention_mask is not None:
            self._take_mask(attention_mask, padding)
        self.padded, self.is_whole = self.padded or padding, False

    def _check_room(self, rows: int, length: int) -> None:
        places, seen = self.get_max_length(), self.get_seq_length() + length
        if places > 0:
            full = f"this static cache has room for {places} tokens and this forward needs more: raise its max_length"
            if isinstance(seen, torch.Tensor):  # checked where the count lies, without waiting for it
                torch._assert_async(seen <= places, full)
            elif seen > places:
                raise RefusedForward(full)
        # `not in (-1, rows)` would be true of equal numbers where a compiled graph has any number of rows
        if self.batch_size != -1 and self.batch_size != rows:
            raise RefusedForward(
                f"the cache holds {self.batch_size} rows, the input has {rows}: cache.batch_repeat_interleave(n) or "
                "cache.batch_select_indices(rows) fit it"
            )

    def _check_layers(self, is_linear: list[bool], runs: int) -> None:
        if not self.is_compileable and len({layer.get_seq_length() for layer in self.layers[:runs]}) > 1:
            raise RefusedForward(
                "the layers of this cache stand at different tokens, as after a draft that exits early: restore a "
                "snapshot, or start over with cache.reset()"
            )
        kinds = ["recurrent_state" in layer.tensor_names for layer in self.layers]
        if kinds != is_linear[: len(kinds)] or len(kinds) < runs:
            raise RefusedForward("the cache belongs to a model with other layers: its states mean nothing to this one")

    def _take_mask(self, attention_mask: torch.Tensor, padding: bool) -> None:
        mask, cached = attention_mask.to(torch.bool, copy=True), self.get_seq_length()
        known = torch.ones_like(mask[:, :cached]) if self.real is None else self.real.to(mask.device)
        if not torch.equal(mask[:, :cached], known):
            raise RefusedForward(_MASK_CONTRADICTS)
        if padding or self.padded:
            self.real = mask

    def _take_mask_in_place(self, attention_mask: torch.Tensor | None, embeds: torch.Tensor) -> None:
        """`_take_mask` with static shapes: a step compares where the mask lies and waits for nothing."""
        (rows, length), device = embeds.shape[:2], embeds.device
        cached, places = self.get_seq_length(), self.get_max_length()
        if self.real is None or len(self.real) != rows:
            with torch.inference_mode(False):
                self.real = torch.ones(rows, places, dtype=torch.bool, device=device)
            if not torch.compiler.is_compiling():
                torch._dynamo.mark_static_address(self.real)
        elif self.real.device != device:
            self.real = self.real.to(device)
        waited = False  # for the token count, to read a mask that grows
        if attention_mask is None:
            mask = torch.ones_like(self.real)
        else:
            waited = attention_mask.shape[1] != places
            mask = torch.nn.functional.pad(attention_mask.to(device).bool(), (0, places - attention_mask.shape[1]))
        if isinstance(cached, torch.Tensor):  # else nothing was fed
            refusal = _MASK_MISSING if attention_mask is None else _MASK_CONTRADICTS
            agrees = ((mask == self.real) | (torch.arange(places, device=device) >= cached.to(device))).all()
            if torch.compiler.is_compiling() or (length == 1 and not waited):
                torch._assert_async(agrees, refusal)
            elif not agrees:
                raise RefusedForward(refusal)
        self.real.copy_(mask)

    def _replace_real(self, real: torch.Tensor | None) -> None:
        """With static shapes a copy, in the buffer that is there; before the first token its values do not count."""
        if not self.is_compileable:
            self.real = real
        elif real is not None and self.real is not None and real.shape == self.real.shape:
            self.real.copy_(real)
        elif real is not None:
            with torch.inference_mode(False):
                self.real = real.clone()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if indices.device.type == "cpu" and (rows := self.batch_size) >= 0:
            torch.arange(rows).index_select(0, indices)  # which fails before anything is changed
        with self._changing():
            super().batch_select_indices(indices)
            if self.real is not None:
                self._replace_real(self.real.index_select(0, indices.to(self.real.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        torch.arange(1).repeat_interleave(repeats)  # which fails before anything is changed
        with self._changing():
            super().batch_repeat_interleave(repeats)
            if self.real is not None:
                self._replace_real(self.real.repeat_interleave(repeats, dim=0))

    def to(self, device: torch.device | str | None) -> "HybridCache":
        """Move every layer, in place; None moves nothing, as of a tensor: hooks of accelerate that have no device.

        (A model on several devices fills each layer on that layer's device.)
        """
        if device is not None:
            for layer in self.layers:
                layer.to(device)
            self.real = None if self.real is None else self.real.to(device)
        return self

    def save(self, path: str | os.PathLike, model: PreTrainedModel) -> None:
        """Write the cache as one safetensors file with its token boundary, the model's fingerprint and a checksum.

        What a recording cache keeps for `crop` is not written.

        Raises:
            ValueError: if the cache is empty, a forward on it was broken off, its layers stand at different tokens, or
                the model has other layers.
        """
        self.check_whole()
        is_linear = [kind == "linear_attention" for kind in model.config.get_text_config(decoder=True).layer_types]
        self._check_layers(is_linear, len(is_linear))
        if self.get_seq_length() == 0:
            raise ValueError("the cache is empty, there is nothing to save")
        tensors = {
            f"layers.{i}.{name}": tensor.contiguous()
            for i, layer in enumerate(self.layers)
            for name, tensor in zip(layer.tensor_names, layer.tensors(), strict=True)
        }
        tokens = int(self.get_seq_length())
        if self.real is not None and not (real := self.real[:, :tokens]).all():
            tensors["real"] = real.contiguous()
        metadata = {"format": _FORMAT, "tokens": str(tokens), "fingerprint": model_fingerprint(model)}
        save_tensors(tensors, path, metadata)

    @classmethod
    def load(
        cls, path: str | os.PathLike, model: PreTrainedModel, device: torch.device | str | None = None
    ) -> "HybridCache":
        """Read a cache that `save` wrote, for the same model.

        Args:
            device: where the tensors go; None puts all of them on the model's device.

        Raises:
            ValueError: for a file of another kind or of another model, and one that was damaged.
        """
        metadata, tensors = load_tensors(path)
        if metadata.get("format") != _FORMAT:
            raise ValueError(f"{path} is not a saved HybridCache of this version")
        if metadata["fingerprint"] != model_fingerprint(model):
            raise ValueError(f"{path} was saved with another model: its states mean nothing to this one")
        device = next(model.parameters()).device if device is None else device
        cache = cls(model.config)
        cache.real = tensors["real"].to(device) if "real" in tensors else None
        cache.padded = cache.real is not None
        for i, layer in enumerate(cache.layers):
            state = [tensors[f"layers.{i}.{name}"].to(device) for name in layer.tensor_names]
            layer.load(state, int(metadata["tokens"]))
        return cache

    def crop(self, tokens_to_remove: int) -> None:
        """Go back by |tokens_to_remove| columns (a number that is not positive, as in transformers), exactly.

        Needs `activate_past_recording()` before the forward whose tokens are removed. Every call, `crop(0)` too, ends
        the recorded span: the next one can return to here and no further.

        Raises:
            ValueError: for a positive number, more tokens than were recorded, or a cache on which a forward was broken
                off; the cache is unchanged.
        """
        self.check_whole()
        for layer in self.layers:
            layer.check_crop(tokens_to_remove)
        with self._changing():
            for layer in self.layers:
                layer.crop(tokens_to_remove)
            if self.real is not None and not self.is_compileable:
                self.real = self.real[:, : self.get_seq_length()]


def committing(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward of transformers' that has a head behind our backbone: the caches that it is given, or returns, count as
    fed when it has returned."""

    @functools.wraps(forward)
    def committed(self: Any, *args: Any, commit: bool = True, **kwargs: Any) -> Any:
        outputs = forward(self, *args, commit=False, **kwargs)
        for value in (*args, *kwargs.values(), *(outputs.values() if isinstance(outputs, dict) else outputs)):
            if commit and isinstance(value, HybridCache):
                value.commit()
        return outputs

    return committed


__all__ = ["HybridCache", "KDACacheLayer", "LatentCacheLayer"]
