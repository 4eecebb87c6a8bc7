"""The layers of a `HybridCache`: what a KDA and an MLA layer keep, as tensors that grow or in buffers of one size."""

import copy
import dataclasses
import importlib
import weakref

import torch
from transformers.cache_utils import CacheLayerMixin

# `kernels/` is out of reach of the remote-code loader's relative imports (layers_kimi_k3.py lists its files).
kda, kda_step = (importlib.import_module(f".kernels.{name}", __package__) for name in ("kda", "kda_step"))

# A latent buffer grows by a quarter, so that appending a token does not copy the whole cache every time.
_GROWTH, _GRANULE = 1.25, 64
# Columns that a recording layer can take back at least; it keeps the inputs of up to twice as many.
RECORDED_COLUMNS = 64


def _columns_to_remove(tokens_to_remove: int, length: int) -> int:
    tokens_to_remove = int(tokens_to_remove)  # generate passes a tensor on some releases
    if tokens_to_remove > 0:
        raise ValueError(f"crop({tokens_to_remove}): pass minus the number of tokens to remove")
    if -tokens_to_remove > length:
        raise ValueError(f"crop({tokens_to_remove}): the cache holds {length} tokens")
    return -tokens_to_remove


@dataclasses.dataclass
class ProjectedInputs:
    """What one forward fed to a KDA layer, enough to advance a state again: real tokens only, row after row.

    Attributes:
        tokens: q, k, v before the convolution and the logits of decay and beta, each [n, P].
        weights: of the convolutions and the gate, as `kda_step.advance` takes them.
        rows, columns: [n] batch row and column (counted from the start of the forward) of every token.
        length: columns of the forward.
        plain: whether every column of every row is a token.
    """

    tokens: tuple[torch.Tensor, ...]
    weights: tuple
    rows: torch.Tensor
    columns: torch.Tensor
    length: int
    plain: bool

    def _map(self, function) -> "ProjectedInputs":
        tokens = tuple(function(x) for x in self.tokens)
        rows, columns = function(self.rows), function(self.columns)
        return dataclasses.replace(self, tokens=tokens, rows=rows, columns=columns)

    def select(self, index: torch.Tensor) -> "ProjectedInputs":
        """The tokens at `index` (positions or a mask), copied, so that the others can be freed."""
        return self._map(lambda x: x[index])

    def to(self, device) -> "ProjectedInputs":
        return self._map(lambda x: x.to(device))

    def of_rows(self, indices: list[int]) -> "ProjectedInputs":
        """The same for a batch that consists of the given rows."""
        places = [torch.nonzero(self.rows == row).flatten() for row in indices]
        part = self.select(torch.cat(places))
        part.rows = torch.cat([torch.full_like(place, row) for row, place in enumerate(places)])
        return part

    def without_first(self, columns: int) -> "ProjectedInputs":
        part = self.select(self.columns >= columns)
        part.columns, part.length = part.columns - columns, self.length - columns
        return part

    def advance(self, columns: int, tails, state, batch: int):
        """(tails, state) after the tokens in the first `columns` columns; computed where the weights lie."""
        home, device = self.rows.device, self.weights[1].device
        part = self.select(self.columns < columns).to(device)
        if self.plain:  # as a batch, in which a few tokens need no chunks
            tokens, cu_seqlens = tuple(x.unflatten(0, (batch, -1)) for x in part.tokens), None
        else:
            tokens = tuple(x[None] for x in part.tokens)
            cu_seqlens = torch.nn.functional.pad(torch.bincount(part.rows, minlength=batch).cumsum(0), (1, 0))
        if state is not None:
            tails, state = tuple(tail.to(device) for tail in tails), state.to(device)
        with kda.full_precision(device):
            tails, state = kda_step.advance(tokens[:3], tokens[3:], *self.weights, tails, state, cu_seqlens)
        return tuple(tail.to(home) for tail in tails), state.to(home)


class _StateLayer(CacheLayerMixin):
    """What the two kinds of layer have in common: a token count, and no keys and values."""

    def __init__(self):
        super().__init__()
        self.seq_length = 0

    def lazy_initialization(self, *args, **kwargs) -> None:
        raise NotImplementedError(f"{type(self).__name__} holds no keys and values; the model fills it")

    def update(self, *args, **kwargs):
        raise NotImplementedError(f"{type(self).__name__} holds no keys and values; the model fills it")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seq_length + query_length, 0

    def get_seq_length(self) -> int:
        return self.seq_length

    def get_max_length(self) -> int:
        return -1

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.batch_select_indices(beam_idx)

    def restored(self, kept: "_StateLayer") -> "_StateLayer":
        """The layer that stands at the boundary of `kept`, the layer of a snapshot."""
        return kept.fork()

    def __deepcopy__(self, memo):
        """A copy cut off from autograd, whose graph cannot be copied."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__ = _copied(self.__dict__)
        return copied


def _home(offload: bool, device: torch.device) -> torch.device:
    """Where the tensors of a layer on `device` lie between two forwards."""
    return torch.device("cpu") if offload else device


def _usable(state: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The state on `device`, and as a tensor that autograd can save: one made in inference mode is copied for that."""
    state = state.to(device)
    return state.clone() if torch.is_grad_enabled() and state.is_inference() else state


def _copied(value):
    """A deep copy of nested containers of tensors, without their autograd history."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(item) for item in value)
    if dataclasses.is_dataclass(value):
        return type(value)(*(_copied(getattr(value, field.name)) for field in dataclasses.fields(value)))
    return value


KDA_TENSORS = ("q_tail", "k_tail", "v_tail", "recurrent_state")


class KDACacheLayer(_StateLayer):
    """State of one KDA layer.

    Attributes:
        offload: whether everything lies on the CPU between two forwards.
        record_past: whether projected inputs are kept, so that `crop` can go back to any boundary since the last one.
        conv_tails: the last W - 1 inputs of the q, k and v convolutions, three tensors [B, W - 1, H * K or V], or None.
        recurrent_state: [B, H, K, V] float32, or None before the first token.
    """

    tensor_names = KDA_TENSORS
    writes_in_place = False

    def __init__(self, offload: bool = False):
        super().__init__()
        self.offload = offload
        self.conv_tails: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        self.recurrent_state: torch.Tensor | None = None
        self.record_past = False
        self.recorded_columns = RECORDED_COLUMNS
        self.wanted: frozenset[int] = frozenset()  # columns at which forwards keep the state for a snapshot
        self.kept: dict[int, tuple] = {}  # {column: (conv_tails, recurrent_state)}, of those that were passed
        self._boundary: tuple | None = None  # (conv_tails, recurrent_state) before the recorded tokens
        self._recorded: list[ProjectedInputs] = []

    @property
    def is_croppable(self) -> bool:
        return self.record_past

    def activate_past_recording(self) -> None:
        """From the next forward on, keep what `crop` needs."""
        self.record_past = True

    def read(self, device) -> tuple[tuple[torch.Tensor, ...] | None, torch.Tensor | None]:
        """(conv_tails, recurrent_state) on the device of the layer that asks, (None, None) before the first token."""
        if not self.is_initialized:
            return None, None
        return tuple(_usable(tail, device) for tail in self.conv_tails), _usable(self.recurrent_state, device)

    def keep_states(self, columns: frozenset[int]) -> None:
        """Forget the states kept so far; from the next forward on keep those at these columns."""
        self.wanted, self.kept = columns, {}

    def boundaries(self, length: int) -> list[int]:
        """Numbers of tokens inside the next forward, of `length` columns without padding, at which it has to export its
        state: those that a snapshot may ask for, and where a recording cache will be able to go back to."""
        inside = {column - self.seq_length for column in self.wanted}
        if self.record_past and self._recorded_columns() + length > 2 * self.recorded_columns:
            inside.add(length - self.recorded_columns)
        return sorted(boundary for boundary in inside if 0 < boundary < length)

    def export(self, states: dict[int, tuple]) -> None:
        """Before `store`: keep what was asked for of {tokens inside the forward: (conv_tails, recurrent_state)}."""
        for inside, (tails, state) in states.items():
            if self.seq_length + inside in self.wanted:
                home = _home(self.offload, state.device)
                self.kept[self.seq_length + inside] = tuple(tail.to(home) for tail in tails), state.to(home)

    def record(self, projected, logits, weights, order, batch: int, length: int, exported: dict[int, tuple]) -> None:
        """Keep the inputs of a forward before its state is stored.

        Args:
            projected, logits: q, k, v before the convolution, and of decay and beta; [B, T, P], or [1, n, P] of the
                real tokens.
            weights: as `kda_step.advance` takes them.
            order: [n] flat indices of the real tokens in [B, T], None when all are.
            exported: as `export` takes them, for all of `boundaries` unless there is padding.
        """
        home = _home(self.offload, projected[0].device)
        if not self._recorded:
            self._boundary = self.read(home)
        flat = torch.arange(batch * length, device=projected[0].device) if order is None else order
        part = ProjectedInputs(
            tuple(x.detach().flatten(0, 1) for x in (*projected, *logits)),
            (tuple(x.detach() for x in weights[0]), *(x.detach() for x in weights[1:3]), weights[3]),
            flat // length,
            flat % length,
            length,
            order is None,
        )
        excess = self._recorded_columns() + length - self.recorded_columns
        if excess > self.recorded_columns and length - self.recorded_columns in exported:  # a prompt
            passed = length - self.recorded_columns
            tails, state = exported[passed]
            self._boundary = tuple(tail.detach().to(home) for tail in tails), state.detach().to(home)
            self._recorded = [part.without_first(passed).to(home)]
            return
        self._recorded.append(part.to(home))
        if excess > self.recorded_columns:  # a prompt with padding, or a long run without a crop: move the boundary up
            self._boundary = self._advanced(excess, batch)
            while excess >= self._recorded[0].length:
                excess -= self._recorded.pop(0).length
            self._recorded[0] = self._recorded[0].without_first(excess)

    def _recorded_columns(self) -> int:
        return sum(part.length for part in self._recorded)

    def crop(self, tokens_to_remove: int) -> None:
        """Go back by so many columns and make that the boundary to which the next `crop` can return."""
        remove = _columns_to_remove(tokens_to_remove, self.seq_length)
        recorded = self._recorded_columns()
        if remove > recorded:
            raise ValueError(
                f"cannot remove {remove} tokens: a KDA layer recorded the last {recorded}. Call "
                "cache.activate_past_recording() before the forward whose tokens may be removed; at least the last "
                f"{self.recorded_columns} can then be taken back"
            )
        if remove:
            self.conv_tails, self.recurrent_state = self._advanced(recorded - remove, self.batch_size)
            self.seq_length -= remove
            self.kept = {column: state for column, state in self.kept.items() if column <= self.seq_length}
        self._boundary, self._recorded = None, []

    @torch.no_grad()
    def _advanced(self, columns: int, batch: int) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """(conv_tails, recurrent_state) `columns` recorded columns after the boundary."""
        tails, state = self._boundary
        if columns == 0:  # nothing to replay; before the first token everything is zero
            if state is None:
                tails, state = tuple(map(torch.zeros_like, self.conv_tails)), torch.zeros_like(self.recurrent_state)
            return tails, state
        for part in self._recorded:
            tails, state = part.advance(columns, tails, state, batch)
            columns -= part.length
            if columns <= 0:
                break
        return tails, state

    def store(self, conv_tails: tuple[torch.Tensor, ...], recurrent_state: torch.Tensor, new_tokens: int) -> None:
        """Take over the state after `new_tokens` more columns. The tensors belong to the cache from here on."""
        home = _home(self.offload, recurrent_state.device)
        self.conv_tails, self.recurrent_state = tuple(tail.to(home) for tail in conv_tails), recurrent_state.to(home)
        self.seq_length += new_tokens
        self.is_initialized = True
        if self.seq_length in self.wanted:
            self.kept[self.seq_length] = self.conv_tails, self.recurrent_state

    def tensors(self) -> list[torch.Tensor]:
        return [*self.conv_tails, self.recurrent_state] if self.is_initialized else []

    @property
    def batch_size(self) -> int:
        return self.recurrent_state.shape[0] if self.is_initialized else -1

    def _map(self, function) -> None:
        if self.is_initialized:
            self.conv_tails = tuple(function(tail) for tail in self.conv_tails)
            self.recurrent_state = function(self.recurrent_state)
        if self._boundary is not None and self._boundary[1] is not None:
            tails, state = self._boundary
            self._boundary = tuple(function(tail) for tail in tails), function(state)
        self.kept = {
            column: (tuple(function(tail) for tail in tails), function(state))
            for column, (tails, state) in self.kept.items()
        }

    def fork(self) -> "KDACacheLayer":
        """A second holder of the same state: tensors are replaced, never written, so they can be shared."""
        forked = copy.copy(self)
        forked._recorded = list(self._recorded)
        forked.keep_states(frozenset())
        return forked

    def fork_at(self, column: int) -> "KDACacheLayer":
        """A holder of the state that was kept there, not recording."""
        tails, state = self.kept[column]
        forked = KDACacheLayer(self.offload)
        forked.load([*tails, state], column)
        return forked

    def load(self, tensors: list[torch.Tensor], seq_length: int) -> None:
        self.conv_tails, self.recurrent_state = tuple(tensors[:3]), tensors[3]
        self.seq_length, self.is_initialized = seq_length, True

    def to(self, device) -> None:
        self._map(lambda x: x.to(device))
        self._recorded = [part.to(device) for part in self._recorded]

    def reset(self) -> None:
        recording = self.record_past, self.recorded_columns
        self.__init__(self.offload)
        self.record_past, self.recorded_columns = recording

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._map(lambda x: x.index_select(0, indices.to(x.device)))
        if self._recorded:
            self._recorded = [part.of_rows(indices.tolist()) for part in self._recorded]

    def batch_repeat_interleave(self, repeats: int) -> None:
        rows = torch.arange(max(self.batch_size, 0)).repeat_interleave(repeats)
        self.batch_select_indices(rows)


class LatentCacheLayer(_StateLayer):
    """Latents of one MLA layer: the normed 512-wide latent and the shared 64-wide key part of every token."""

    is_croppable = True
    tensor_names = ("latents",)

    def __init__(self, offload: bool = False):
        super().__init__()
        self.offload = (
            offload  # whether the buffer lies on the CPU; new latents are written there, all are read from it
        )
        self.buffer: torch.Tensor | None = None  # [B, capacity, kv_lora_rank + qk_rope_head_dim]
        self._holders = weakref.WeakSet([self])  # the layers that read this buffer, forks of one another
        self.reserved = 0  # columns that a buffer has room for at least

    @property
    def latents(self) -> torch.Tensor:
        """[B, tokens, kv_lora_rank + qk_rope_head_dim]"""
        return self.buffer[:, : self.seq_length]

    def append(self, latents: torch.Tensor) -> torch.Tensor:
        """Append [B, new tokens, width] and return the latents of all tokens, without a copy where possible."""
        length, device = self.seq_length + latents.shape[1], latents.device
        latents = latents.to(_home(self.offload, device))
        if self.buffer is not None and (self.buffer.device, self.buffer.dtype) != (latents.device, latents.dtype):
            self._own(self.buffer.to(latents))  # the model has moved, or changed its precision
        held = self.buffer
        if latents.requires_grad or (
            held is not None and (held.requires_grad or (held.is_inference() and not torch.is_inference_mode_enabled()))
        ):
            # Writing in place would cut the autograd graph of earlier steps, and is forbidden for inference tensors.
            self._own(latents if self.buffer is None else torch.cat([self.latents, latents], dim=1))
        else:
            if held is None or held.shape[1] < length or any(h.seq_length > self.seq_length for h in self._holders):
                self._grow(latents, length)
            self.buffer[:, self.seq_length : length] = latents
        self.seq_length = length
        self.is_initialized = True
        return self.latents.to(device)

    def _grow(self, like: torch.Tensor, length: int) -> None:
        # The first prefill is stored tight: most caches are built by one prefill and a short generation.
        capacity = length if self.buffer is None else int(length * _GROWTH)
        capacity = max(-(-(capacity + 1) // _GRANULE) * _GRANULE, self.reserved)
        buffer = like.new_empty(like.shape[0], capacity, like.shape[2])
        if self.buffer is not None:
            buffer[:, : self.seq_length] = self.latents
        self._own(buffer)

    def _own(self, buffer: torch.Tensor | None) -> None:
        """Take a buffer that no other layer reads."""
        self._holders.discard(self)
        self.buffer, self._holders = buffer, weakref.WeakSet([self])

    def tensors(self) -> list[torch.Tensor]:
        return [self.latents] if self.is_initialized else []

    @property
    def batch_size(self) -> int:
        return self.buffer.shape[0] if self.is_initialized else -1

    def fork(self) -> "LatentCacheLayer":
        """A second holder of the same latents; whoever would write where another one reads copies the buffer first."""
        forked = copy.copy(self)
        self._holders.add(forked)
        return forked

    def fork_at(self, column: int) -> "LatentCacheLayer":
        """The same of the first `column` columns."""
        forked = self.fork()
        forked.seq_length = column
        return forked

    def __deepcopy__(self, memo):
        copied = super().__deepcopy__(memo)
        copied._holders = weakref.WeakSet([copied])
        return copied

    def load(self, tensors: list[torch.Tensor], seq_length: int) -> None:
        self.reset()
        self.append(tensors[0])

    def to(self, device) -> None:
        if self.is_initialized and self.buffer.device != torch.device(device):
            self._own(self.buffer.to(device))

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last columns; their place in the buffer is written over."""
        self.seq_length -= _columns_to_remove(tokens_to_remove, self.seq_length)

    def reset(self) -> None:
        self._holders.discard(self)
        self.__init__(self.offload)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self.is_initialized:
            self._own(self.buffer.index_select(0, indices.to(self.buffer.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self._own(self.buffer.repeat_interleave(repeats, dim=0))


class _StaticLayer(_StateLayer):
    """State in buffers of one size and address, which every forward writes in place (`torch.compile`, CUDA graphs).

    The token count is a tensor beside them, so that no step depends on a number of the host. The buffers are made in
    the first forward; `reset`, `reorder_cache` and `restore` keep them.
    """

    is_compileable = True
    is_croppable = False

    def __init__(self, max_length: int):
        super().__init__()
        self.max_length = max_length
        self.buffers: list[torch.Tensor] = []

    def get_seq_length(self) -> torch.Tensor | int:
        """Int64 tensor [], as in transformers' static caches; 0 before the first token."""
        return self.seq_length if self.is_initialized else 0

    def get_max_length(self) -> int:
        return self.max_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        # The first forward reads its own tokens alone (`StaticLatentCacheLayer.append`).
        return (self.max_length if self.is_initialized else query_length), 0

    def _reserve(self, *wanted: tuple[torch.Size, torch.dtype, torch.device]) -> None:
        """Zeroed buffers of these shapes, unless the ones that are there (zeroed by `reset`) fit."""
        if [(buffer.shape, buffer.dtype, buffer.device) for buffer in self.buffers] == list(wanted):
            return
        with torch.inference_mode(False):  # inference tensors could be written in inference mode only
            self.buffers = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in wanted]
            self.seq_length = torch.zeros((), dtype=torch.int64, device=self.buffers[0].device)
        if not torch.compiler.is_compiling():
            for buffer in (*self.buffers, self.seq_length):
                torch._dynamo.mark_static_address(buffer)

    def _advance(self, new_tokens: int) -> None:
        self.seq_length.add_(new_tokens)
        self.is_initialized = True

    @staticmethod
    def _refuse_autograd(new: torch.Tensor) -> None:
        if new.requires_grad:
            raise ValueError(
                "a static cache is written in place, which autograd cannot follow: run under torch.no_grad(), or use "
                "HybridCache(config) without max_length"
            )

    def activate_past_recording(self) -> None:
        raise ValueError(
            "a static cache cannot take tokens back (crop, assisted decoding): use HybridCache(config) without "
            'max_length, or cache_implementation="dynamic"'
        )

    def crop(self, tokens_to_remove: int) -> None:
        if _columns_to_remove(tokens_to_remove, int(self.get_seq_length())):
            self.activate_past_recording()

    @property
    def batch_size(self) -> int:
        return self.buffers[0].shape[0] if self.is_initialized else -1

    def fork(self) -> "_StaticLayer":
        return copy.deepcopy(self)

    def restored(self, kept: "_StaticLayer") -> "_StaticLayer":
        self.reset()
        if kept.is_initialized:
            self._reserve(*((buffer.shape, buffer.dtype, buffer.device) for buffer in kept.buffers))
            for buffer, other in zip(self.buffers, kept.buffers, strict=True):
                buffer.copy_(other)
            self.seq_length.copy_(kept.seq_length)
            self.is_initialized = True
        return self

    def to(self, device) -> None:
        if self.buffers:
            self.buffers = [buffer.to(device) for buffer in self.buffers]
            self.seq_length = self.seq_length.to(device)

    def reset(self) -> None:
        for buffer in self.buffers:
            buffer.zero_()
        if self.buffers:
            self.seq_length.zero_()
        self.is_initialized = False

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if not self.is_initialized:
            return
        with torch.inference_mode(False):
            chosen = [buffer.index_select(0, indices.to(buffer.device)) for buffer in self.buffers]
        if len(indices) != self.batch_size:
            self.buffers = chosen
            return
        for buffer, rows in zip(self.buffers, chosen, strict=True):
            buffer.copy_(rows)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.batch_select_indices(torch.arange(max(self.batch_size, 0)).repeat_interleave(repeats))


class StaticKDACacheLayer(_StaticLayer):
    """State of one KDA layer, written in place: three tails [B, W - 1, P] and the state [B, H, K, V] float32."""

    tensor_names = KDA_TENSORS
    writes_in_place = True
    record_past = False

    @staticmethod
    def boundaries(length: int) -> list[int]:
        """As `KDACacheLayer.boundaries`: nothing is exported."""
        return []

    def read(self, device) -> tuple[tuple[torch.Tensor, ...] | None, torch.Tensor | None]:
        """As `KDACacheLayer.read`; the layer never leaves its device."""
        return (tuple(self.buffers[:3]), self.buffers[3]) if self.is_initialized else (None, None)

    def store(self, conv_tails, recurrent_state, new_tokens: int, real: torch.Tensor | None = None) -> None:
        """As `KDACacheLayer.store`; rows in which `real` [B] is False keep their state."""
        new = (*conv_tails, recurrent_state)
        self._refuse_autograd(recurrent_state)
        if not self.is_initialized:
            self._reserve(*((tensor.shape, tensor.dtype, tensor.device) for tensor in new))
        for buffer, tensor in zip(self.buffers, new, strict=True):
            if tensor is buffer:  # the layer has written it in place
                continue
            if real is not None:
                tensor = torch.where(real.view(-1, *[1] * (buffer.dim() - 1)), tensor, buffer)
            buffer.copy_(tensor)
        self._advance(new_tokens)

    def tensors(self) -> list[torch.Tensor]:
        return list(self.buffers) if self.is_initialized else []


class StaticLatentCacheLayer(_StaticLayer):
    """Latents of one MLA layer in one buffer [B, max_length, kv_lora_rank + qk_rope_head_dim], zero where unused."""

    tensor_names = ("latents",)

    def append(self, latents: torch.Tensor) -> torch.Tensor:
        """Write [B, new tokens, width] and return what the tokens read: themselves in the first forward, all after."""
        self._refuse_autograd(latents)
        first = not self.is_initialized
        if first:
            batch, _, width = latents.shape
            self._reserve((torch.Size((batch, self.max_length, width)), latents.dtype, latents.device))
        buffer = self.buffers[0]
        columns = self.seq_length + torch.arange(latents.shape[1], device=buffer.device)
        buffer.index_copy_(1, columns, latents.to(buffer.dtype))
        self._advance(latents.shape[1])
        return latents if first else buffer.to(latents.dtype)

    def tensors(self) -> list[torch.Tensor]:
        return [self.buffers[0][:, : int(self.seq_length)]] if self.is_initialized else []
