"""The layers of a `HybridCache`: what a KDA and an MLA layer keep, as tensors that grow or in buffers of one size."""

import copy
import dataclasses
import weakref
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from transformers.cache_utils import CacheLayerMixin

from .rollback_kimi_k3 import KDAState, ProjectedInputs, Recording

# A latent buffer grows by a quarter, so that appending a token does not copy the whole cache every time.
_GROWTH, _GRANULE = 1.25, 64
STATIC_AUTOGRAD = (
    "a static cache is written in place, which autograd cannot follow: run under torch.no_grad(), or use "
    "HybridCache(config) without max_length"
)


def _columns_to_remove(tokens_to_remove: int, length: int) -> int:
    tokens_to_remove = int(tokens_to_remove)  # generate passes a tensor on some releases
    if tokens_to_remove > 0:
        raise ValueError(f"crop({tokens_to_remove}): pass minus the number of tokens to remove")
    if -tokens_to_remove > length:
        raise ValueError(f"crop({tokens_to_remove}): the cache holds {length} tokens")
    return -tokens_to_remove


class KDAForward(NamedTuple):
    """What a forward of a KDA layer leaves in its cache, handed over in one piece.

    Attributes:
        state: after the last column.
        columns: of the forward, padding included.
        inputs: makes what a recording layer keeps.
        passed: {tokens inside the forward: state there}, at all of the layer's `boundaries` unless there is padding.
        real: [B] rows of a step on a static cache that keep the new state, None for all.
    """

    state: KDAState
    columns: int
    inputs: Callable[[], ProjectedInputs]
    passed: dict[int, KDAState]
    real: torch.Tensor | None = None


class _StateLayer(CacheLayerMixin):
    """What the two kinds of layer have in common: a token count, and no keys and values."""

    seq_length: Any  # a number; of a static layer a tensor on its device

    def __init__(self):
        super().__init__()
        self.seq_length = 0

    @abstractmethod
    def tensors(self) -> list[torch.Tensor]:
        """What the layer keeps, in the order of `tensor_names`; empty before the first token."""

    @abstractmethod
    def fork(self) -> "_StateLayer":
        """A second holder of the same content."""

    @abstractmethod
    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Go on with a batch that consists of these rows."""

    @property
    @abstractmethod
    def batch_size(self) -> int:
        """Rows; -1 before the first token."""

    def update(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{type(self).__name__} holds no keys and values; the model fills it")

    lazy_initialization = update

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seq_length + query_length, 0

    def get_seq_length(self) -> int:
        return self.seq_length

    def get_max_length(self) -> int:
        return -1

    @property
    def nbytes(self) -> int:
        """Bytes of `tensors()`."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.batch_select_indices(torch.arange(max(self.batch_size, 0)).repeat_interleave(repeats))

    def check_crop(self, tokens_to_remove: int) -> int:
        """How many columns `crop(tokens_to_remove)` takes back.

        Raises:
            ValueError: if it cannot.
        """
        return _columns_to_remove(tokens_to_remove, self.seq_length)

    def restored(self, kept: Any) -> "_StateLayer":
        """The layer that stands at the boundary of `kept`, the layer of a snapshot."""
        return kept.fork()

    def __copy__(self):
        """A second holder of the same tensors; without this one, `copy.copy` would take what is pickled."""
        copied = type(self).__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled and deep-copied: tensors of its own, so that a process that is handed them in shared memory
        does not write into these, and cut off from autograd, whose graph cannot be copied."""
        return _copied(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __deepcopy__(self, memo):
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(self.__getstate__())
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
    if isinstance(value, list):
        return [_copied(item) for item in value]
    if isinstance(value, tuple):
        items = [_copied(item) for item in value]
        return value._make(items) if hasattr(value, "_make") else tuple(items)
    if dataclasses.is_dataclass(value):
        return type(value)(*(_copied(getattr(value, field.name)) for field in dataclasses.fields(value)))
    return value


KDA_TENSORS = ("q_tail", "k_tail", "v_tail", "recurrent_state")


class KDACacheLayer(_StateLayer):
    """State of one KDA layer.

    Attributes:
        offloaded: whether everything lies on the CPU between two forwards.
        state: of all rows after the columns that were fed. Its tensors are never written: while captured steps write
            the state in buffers of theirs, reading it takes a copy of these, and the next step starts from that.
        stepping: the layer of these buffers; None while the state lies in tensors of its own.
        recording: what `crop` needs to go back to any boundary since the last one.
    """

    tensor_names = KDA_TENSORS
    writes_in_place = False
    slots = None  # the state has a row for every row of a batch

    def __init__(self, offload: bool = False):
        super().__init__()
        self.offloaded = offload
        self.stepping: StaticKDACacheLayer | None = None
        self.state, self.recording = KDAState(), Recording()
        self.snapshot_columns: frozenset[int] = frozenset()  # at which forwards keep the state for a snapshot
        self.snapshots: dict[int, KDAState] = {}  # those of them that were passed

    @property
    def state(self) -> KDAState:
        if self.stepping is not None:
            self.state = self._current().map(torch.clone)
        return self._state

    @state.setter
    def state(self, state: KDAState) -> None:
        self._state, self.stepping = state, None

    def _current(self) -> KDAState:
        """The state where it lies, to look at."""
        return self._state if self.stepping is None else self.stepping.read(None)

    def borrow(self, stepping: "StaticKDACacheLayer") -> None:
        """From here on the state lies in the buffers of `stepping`, which has copied it; captured steps write it."""
        self._state, self.stepping = KDAState(), stepping

    def steps_on(self, stepping: "StaticKDACacheLayer") -> bool:
        """Whether the next step may be a captured one on these buffers, just so."""
        return self.stepping is stepping and not self.recording.active

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]  # transformers only reads it
        return self.recording.active

    def activate_past_recording(self) -> None:
        """From the next forward on, keep what `crop` needs."""
        self.recording.active = True

    def read(self, device: torch.device) -> KDAState:
        """The state on the device of the layer that asks."""
        return self.state.map(lambda x: _usable(x, device))

    def keep_states(self, columns: frozenset[int]) -> None:
        """Forget the states kept so far; from the next forward on keep those at these columns."""
        self.snapshot_columns, self.snapshots = columns, {}

    def boundaries(self, length: int) -> list[int]:
        """Numbers of tokens inside the next forward, of `length` columns without padding, at which it has to export its
        state: those that a snapshot may ask for, and where a recording cache will be able to go back to."""
        inside = {column - self.seq_length for column in self.snapshot_columns}
        if (split := self.recording.split(length)) is not None:
            inside.add(split)
        return sorted(boundary for boundary in inside if 0 < boundary < length)

    def store(self, forward: KDAForward) -> None:
        """Take over what a forward leaves. The tensors belong to the cache from here on."""
        home = _home(self.offloaded, forward.state.tensors[0].device)
        new = forward.state.map(lambda x: x.to(home))
        if self.recording.active:
            before = self.state.map(lambda x: _usable(x, home))
            passed = {inside: state.map(lambda x: x.to(home)) for inside, state in forward.passed.items()}
            self.recording.add(forward.inputs().to(home), before, passed, len(new.tensors[0]))
        for inside, state in forward.passed.items():
            if self.seq_length + inside in self.snapshot_columns:
                self.snapshots[self.seq_length + inside] = state.map(lambda x: x.to(home))
        self.state, self.is_initialized = new, True
        self.seq_length += forward.columns
        self.keep_reached()

    def keep_reached(self) -> None:
        """Keep the state for a snapshot where one was asked for at this boundary."""
        if self.seq_length in self.snapshot_columns:
            self.snapshots[self.seq_length] = self.state

    def check_crop(self, tokens_to_remove: int) -> int:
        remove, recorded = super().check_crop(tokens_to_remove), self.recording.columns
        if remove > recorded:
            raise ValueError(
                f"cannot remove {remove} tokens: a KDA layer recorded the last {recorded}. Call "
                "cache.activate_past_recording() before the forward whose tokens may be removed; at least the last "
                f"{self.recording.reach} can then be taken back"
            )
        return remove

    def crop(self, tokens_to_remove: int) -> None:
        """Go back by |tokens_to_remove| columns, to what is then the boundary to which the next `crop` can return."""
        if remove := self.check_crop(tokens_to_remove):
            left = self.recording.columns - remove
            self.state = self.recording.state_after(left, self.state, self.batch_size)
            self.seq_length -= remove
            self.snapshots = {column: state for column, state in self.snapshots.items() if column <= self.seq_length}
        self.recording.clear()

    def tensors(self) -> list[torch.Tensor]:
        return list(self.state.tensors)

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self._current().tensors)

    @property
    def batch_size(self) -> int:
        return self._current().tensors[0].shape[0] if self.is_initialized else -1

    def __getstate__(self):
        self._own()
        return super().__getstate__()

    def fork(self) -> "KDACacheLayer":
        """A second holder of the same state: tensors are replaced, never written, so they can be shared."""
        self._own()
        forked = copy.copy(self)
        forked.recording = self.recording.fork()
        forked.keep_states(frozenset())
        return forked

    def fork_at(self, column: int) -> "KDACacheLayer":
        """A holder of the state that was kept there, not recording."""
        forked = KDACacheLayer(self.offloaded)
        forked.load(list(self.snapshots[column].tensors), column)
        return forked

    def _own(self) -> None:
        """Have the state in tensors that nobody writes."""
        self.state = self.state

    def load(self, tensors: list[torch.Tensor], seq_length: int) -> None:
        self.state = KDAState(tuple(tensors[:3]), tensors[3])
        self.seq_length, self.is_initialized = seq_length, True

    def to(self, device: torch.device | str) -> None:
        self._map(lambda x: x.to(device))
        self.recording.to(device)

    def reset(self) -> None:
        recording = Recording(self.recording.active, self.recording.reach)
        self.__init__(self.offloaded)  # type: ignore[misc]  # no subclass has other arguments
        self.recording = recording

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.state = self.state.map(function)
        self.snapshots = {column: state.map(function) for column, state in self.snapshots.items()}

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._map(lambda x: x.index_select(0, indices.to(x.device)))
        self.recording.of_rows(indices)


class LatentCacheLayer(_StateLayer):
    """Latents of one MLA layer: the normed 512-wide latent and the shared 64-wide key part of every token."""

    is_croppable = True
    tensor_names = ("latents",)

    def __init__(self, offload: bool = False):
        super().__init__()
        # whether the buffer lies on the CPU; new latents are written there, all are read from it
        self.offloaded = offload
        self.buffer: torch.Tensor | None = None  # [B, capacity, kv_lora_rank + qk_rope_head_dim]
        self._holders = weakref.WeakSet([self])  # the layers that read this buffer, forks of one another
        self.stepping: StaticLatentCacheLayer | None = None  # whose buffer it is, if captured steps write behind these
        self.reserved = 0  # columns that a buffer has room for at least

    @property
    def latents(self) -> torch.Tensor:
        """[B, tokens, kv_lora_rank + qk_rope_head_dim], for whoever may keep them."""
        if self.stepping is not None:  # the view may live longer than this layer, which keeps steps of others away
            self.stepping.exposed = True
        return self.filled()

    def filled(self) -> torch.Tensor:
        """The same for whoever copies them at once: once this layer is gone, captured steps may write over them."""
        assert self.buffer is not None  # asked for behind a token only
        return self.buffer[:, : self.seq_length]

    @property
    def nbytes(self) -> int:
        return self.filled().numel() * self.filled().element_size() if self.is_initialized else 0

    def borrow(self, stepping: "StaticLatentCacheLayer") -> None:
        """From here on the latents lie in the buffer of `stepping`, which has copied them; captured steps append."""
        self._own(stepping.buffers[0])
        self.stepping = stepping

    def steps_on(self, stepping: "StaticLatentCacheLayer") -> bool:
        """Whether the next step may be a captured one on this buffer, just so."""
        return self.stepping is stepping and (len(self._holders) == 1 or self.is_foremost())

    def is_foremost(self) -> bool:
        """Whether no other layer reads the buffer behind this one's latents."""
        return all(holder.seq_length <= self.seq_length for holder in self._holders)

    def append(self, latents: torch.Tensor) -> torch.Tensor:
        """Append [B, new tokens, width] and return the latents of all tokens, without a copy where possible."""
        length, device = self.seq_length + latents.shape[1], latents.device
        latents = latents.to(_home(self.offloaded, device))
        if self.buffer is not None and (self.buffer.device, self.buffer.dtype) != (latents.device, latents.dtype):
            self._own(self.buffer.to(latents))  # the model has moved, or changed its precision
        buffer = self.buffer
        if latents.requires_grad or (
            buffer is not None
            and (buffer.requires_grad or (buffer.is_inference() and not torch.is_inference_mode_enabled()))
        ):
            # Writing in place would cut the autograd graph of earlier steps, and is forbidden for inference tensors.
            self._own(latents if buffer is None else torch.cat([self.filled(), latents], dim=1))
        else:
            if buffer is None or buffer.shape[1] < length or not self.is_foremost():
                buffer = self._grown(latents, length)
                self._own(buffer)
            buffer[:, self.seq_length : length] = latents
        self.seq_length = length
        self.is_initialized = True
        return (self.latents if torch.is_grad_enabled() else self.filled()).to(device)  # autograd keeps the view

    def _grown(self, like: torch.Tensor, length: int) -> torch.Tensor:
        """A larger buffer with these latents."""
        # The first prefill is stored tight: most caches are built by one prefill and a short generation.
        capacity = length if self.buffer is None else int(length * _GROWTH)
        capacity = max(-(-(capacity + 1) // _GRANULE) * _GRANULE, self.reserved)
        buffer = like.new_empty(like.shape[0], capacity, like.shape[2])
        if self.buffer is not None:
            buffer[:, : self.seq_length] = self.filled()
        return buffer

    def _own(self, buffer: torch.Tensor | None) -> None:
        """Take a buffer that no other layer reads."""
        self._holders.discard(self)
        self.buffer, self._holders, self.stepping = buffer, weakref.WeakSet([self]), None

    def tensors(self) -> list[torch.Tensor]:
        """To be copied at once, as what `filled` returns."""
        return [self.filled()] if self.is_initialized else []

    @property
    def batch_size(self) -> int:
        return -1 if self.buffer is None else self.buffer.shape[0]

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

    def __getstate__(self):
        state = {**self.__dict__, "stepping": None, "buffer": self.filled() if self.buffer is not None else None}
        del state["_holders"]
        return _copied(state)

    def __setstate__(self, state):
        super().__setstate__({**state, "_holders": weakref.WeakSet([self])})

    def load(self, tensors: list[torch.Tensor], seq_length: int) -> None:
        self.reset()
        self.append(tensors[0])

    def to(self, device: torch.device | str) -> None:
        if self.buffer is not None and self.buffer.device != torch.device(device):
            self._own(self.buffer.to(device))

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last columns; their place in the buffer is written over."""
        self.seq_length -= self.check_crop(tokens_to_remove)

    def reset(self) -> None:
        self._holders.discard(self)
        self.__init__(self.offloaded)  # type: ignore[misc]  # no subclass has other arguments

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self.buffer is not None:
            self._own(self.buffer.index_select(0, indices.to(self.buffer.device)))


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

    def get_seq_length(self) -> torch.Tensor | int:  # type: ignore[override]  # as transformers' static layers
        """Int64 tensor [], as in transformers' static caches; 0 before the first token."""
        return self.seq_length if self.is_initialized else 0

    def get_max_length(self) -> int:
        return self.max_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        # The first forward reads its own tokens alone (`StaticLatentCacheLayer.append`).
        return (self.max_length if self.is_initialized else query_length), 0

    def _reserve(self, *wanted: tuple[torch.Size, torch.dtype, torch.device]) -> bool:
        """Zeroed buffers of these shapes, unless the ones that are there (zeroed by `reset`) fit; whether it made new
        ones."""
        if [(buffer.shape, buffer.dtype, buffer.device) for buffer in self.buffers] == list(wanted):
            return False
        with torch.inference_mode(False):  # inference tensors could be written in inference mode only
            self.buffers = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in wanted]
            self.seq_length = torch.zeros((), dtype=torch.int64, device=self.buffers[0].device)
        if not torch.compiler.is_compiling():
            for buffer in (*self.buffers, self.seq_length):
                torch._dynamo.mark_static_address(buffer)
        return True

    def _stand_at(self, columns: int) -> None:
        self.seq_length.fill_(columns)
        self.is_initialized = True

    def _advance(self, new_tokens: int) -> None:
        self.seq_length.add_(new_tokens)
        self.is_initialized = True

    @staticmethod
    def _refuse_autograd(new: torch.Tensor) -> None:
        if new.requires_grad:
            raise ValueError(STATIC_AUTOGRAD)

    def activate_past_recording(self) -> None:
        raise ValueError(
            "a static cache cannot take tokens back (crop, assisted decoding): use HybridCache(config) without "
            'max_length, or cache_implementation="dynamic"'
        )

    def check_crop(self, tokens_to_remove: int) -> int:
        if remove := _columns_to_remove(tokens_to_remove, int(self.get_seq_length())):
            self.activate_past_recording()
        return remove

    def crop(self, tokens_to_remove: int) -> None:
        """By none: what takes columns back is refused."""
        self.check_crop(tokens_to_remove)

    @property
    def batch_size(self) -> int:
        return self.buffers[0].shape[0] if self.is_initialized else -1

    def fork(self) -> "_StaticLayer":
        return copy.deepcopy(self)

    def restored(self, kept: Any) -> "_StaticLayer":
        self.reset()
        if kept.is_initialized:
            self._reserve(*((buffer.shape, buffer.dtype, buffer.device) for buffer in kept.buffers))
            for buffer, other in zip(self.buffers, kept.buffers, strict=True):
                buffer.copy_(other)
            self.seq_length.copy_(kept.seq_length)
            self.is_initialized = True
        return self

    def to(self, device: torch.device | str) -> None:
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


class StaticKDACacheLayer(_StaticLayer):
    """State of one KDA layer, written in place: three tails [B, W - 1, P] and the state [B, H, K, V] float32."""

    tensor_names = KDA_TENSORS
    writes_in_place = True
    slots = None

    def __init__(self, max_length: int):
        super().__init__(max_length)
        self._reader: weakref.ref | None = None  # the growing layer whose state captured steps write here

    @staticmethod
    def is_lost() -> bool:
        """As `StaticLatentCacheLayer.is_lost`: whoever reads a state has a copy."""
        return False

    def is_free_for(self, layer: KDACacheLayer) -> bool:
        """Whether captured steps of a growing layer may write here: no other one's state lies here."""
        reader = None if self._reader is None else self._reader()
        return reader is None or reader is layer or reader.stepping is not self

    def take(self, layer: KDACacheLayer) -> bool:
        """Stand where a growing layer stands, with a copy of its state unless it lies here; whether that needed new
        buffers."""
        are_new = False
        if layer.stepping is not self:
            tensors = layer.tensors()
            are_new = self._reserve(*((tensor.shape, tensor.dtype, tensor.device) for tensor in tensors))
            for buffer, tensor in zip(self.buffers, tensors, strict=True):
                buffer.copy_(tensor)
        self._stand_at(layer.seq_length)
        return are_new

    def lend(self, layer: KDACacheLayer) -> None:
        """Lend the buffers to a growing layer: a step has started from the copy of its state that `take` made."""
        self._reader = weakref.ref(layer)
        layer.borrow(self)

    @staticmethod
    def boundaries(length: int) -> list[int]:
        """As `KDACacheLayer.boundaries`: nothing is exported."""
        return []

    def read(self, device: torch.device | None) -> KDAState:
        """As `KDACacheLayer.read`; the layer never leaves its device."""
        return KDAState(tuple(self.buffers[:3]), self.buffers[3]) if self.is_initialized else KDAState()

    def store(self, forward: KDAForward) -> None:
        """As `KDACacheLayer.store`, written into the buffers."""
        new = forward.state.tensors
        self._refuse_autograd(new[-1])
        if not self.is_initialized:
            self._reserve(*((tensor.shape, tensor.dtype, tensor.device) for tensor in new))
        for buffer, tensor in zip(self.buffers, new, strict=True):
            if tensor is buffer:  # the layer has written it in place
                continue
            if forward.real is not None:
                tensor = torch.where(forward.real.view(-1, *[1] * (buffer.dim() - 1)), tensor, buffer)
            buffer.copy_(tensor)
        self._advance(forward.columns)

    def tensors(self) -> list[torch.Tensor]:
        return list(self.buffers) if self.is_initialized else []


class StaticLatentCacheLayer(_StaticLayer):
    """Latents of one MLA layer in one buffer [B, max_length, kv_lora_rank + qk_rope_head_dim], zero where unused."""

    tensor_names = ("latents",)

    def __init__(self, max_length: int):
        super().__init__(max_length)
        self._readers: weakref.WeakSet | None = None  # growing layers whose buffer this is
        self.exposed = False  # whether others may hold views of it

    def is_free_for(self, layer: LatentCacheLayer) -> bool:
        """Whether captured steps of a growing layer may write here, where nobody else reads."""
        return layer.is_foremost() if layer.stepping is self else not (self._readers or self.exposed)

    def is_lost(self) -> bool:
        """Whether it is free for nobody ever again: views of it may live, and no growing layer has it."""
        return self.exposed and not self._readers

    def take(self, layer: LatentCacheLayer) -> bool:
        """Stand where a growing layer stands, and lend it the buffer, with a copy of its latents unless they lie here;
        whether that needed a new one."""
        is_new = False
        if layer.stepping is not self:
            latents = layer.filled()
            shape = torch.Size((latents.shape[0], self.max_length, latents.shape[2]))
            is_new = self._reserve((shape, latents.dtype, latents.device))
            self.buffers[0][:, : latents.shape[1]] = latents
            self.buffers[0][:, latents.shape[1] :] = 0
            layer.borrow(self)
            self._readers = layer._holders
        self._stand_at(layer.seq_length)
        return is_new

    def lend(self, layer: LatentCacheLayer) -> None:
        """`take` has done it: a step that was broken off writes behind the latents only."""

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
