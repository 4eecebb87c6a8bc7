"""A decoding step as a CUDA graph: one launch for the thousands of kernels of a forward on a static cache.

`CapturedForward` replays steps on a static cache. `CapturedSteps` is what plain `generate` runs: its cache grows, and
may be kept, forked and continued, so the steps write buffers beside it that never move (`docs/cache.md` says who owns
which buffer when).
"""

import logging
import threading
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.modules.module import _has_any_global_hook
from transformers import PreTrainedModel

from .cache_kimi_k3 import STATIC_ATTENTION, HybridCache
from .cache_layers_kimi_k3 import KDACacheLayer
from .kernels_kimi_k3 import dispatch

logger = logging.getLogger(__name__)

# Columns that new buffers have room for at least behind the text that they are made for.
SPARE = 128
# Steps that a model keeps beside those in use, and bytes of those for other batches than the newest.
KEPT_STEPS, KEPT_BYTES = 4, 1 << 30
# Arguments of a step that are tensors.
_TENSORS = ("input_ids", "attention_mask", "position_ids")
# A capture begins with a wait for the device, which would spoil that of another thread; `watched` changes the process.
alone = threading.Lock()
_WARNING = "the decoding step runs without a CUDA graph: %s"


def has_graphs(device: torch.device) -> bool:
    return device.type != "meta" and hasattr(torch.get_device_module(device), "CUDAGraph")


def can_capture(model: Any) -> bool:
    """Whether the model lies on one device that has graphs."""
    devices = {parameter.device for parameter in model.parameters()}
    return len(devices) == 1 and has_graphs(devices.pop())


class GraphMemory:
    """What graphs share of which never two are replayed at once: their memory, and the stream of their captures."""

    def __init__(self, place: torch.device):
        device = torch.get_device_module(place)
        self.stream, self.pool = device.Stream(place), device.graph_pool_handle()


class Graph:
    """A forward of a model on given tensors, captured: `replay` runs it on what they hold then, and fills `outputs`.

    With `run` it is another function of these tensors that is captured. In a memory that graphs share, `outputs` is
    overwritten by the next replay of any of them.
    """

    def __init__(
        self,
        model: Any,
        inputs: dict[str, Any],
        run: Callable[..., Any] | None = None,
        memory: GraphMemory | None = None,
    ):
        device = torch.get_device_module(model.device)
        self._graph = device.CUDAGraph()
        # Not the stream that torch would take, which belongs to whichever device captured first.
        where = {"stream": device.Stream(model.device)} if memory is None else vars(memory)
        self._caches = [x for x in inputs.values() if isinstance(x, HybridCache)]
        self._check_whole()
        try:
            with (
                alone,
                device.device(model.device),
                device.graph(self._graph, capture_error_mode="thread_local", **where),
            ):
                self.outputs = (run or model)(**inputs)
        finally:
            for cache in self._caches:  # a capture computes nothing, nor does one that fails
                cache.commit()

    def _check_whole(self) -> None:
        for cache in self._caches:
            cache.check_whole()

    def replay(self) -> None:
        self._check_whole()
        for cache in self._caches:
            cache.is_whole = False
        self._graph.replay()
        for cache in self._caches:
            cache.commit()


class CapturedForward:
    """A model's forward for steps of equal shape on one static cache; what `generate` calls for every token.

    The first call of a shape runs as it is (kernels are compiled, buffers made), the second is captured, and from then
    on calls copy their tensors into the captured ones and replay. Whatever cannot be captured runs as it is, and the
    reason is logged once. For one generation: a `reset` of the cache between two calls is not seen.
    """

    def __init__(self, model: Any):
        self.model = model
        self._known: tuple[dict, dict] | None = None  # shapes of the tensors, other arguments
        self._graph: Graph | None = None
        self._inputs: dict[str, torch.Tensor] = {}
        self._refused: str | None = None

    def __call__(self, **inputs: Any) -> Any:
        """Arguments and result of the model's forward; the logits are a copy, the next call leaves them alone."""
        if self._refused is not None or torch.is_grad_enabled():
            return self.model(**inputs)
        tensors = {name: x for name, x in inputs.items() if isinstance(x, torch.Tensor)}
        rest = {name: x for name, x in inputs.items() if name not in tensors}
        shapes = {name: (x.shape, x.dtype, x.device) for name, x in tensors.items()}
        if (shapes, rest) != self._known:
            self._known, self._graph = (shapes, rest), None
            outputs, reason = watched(self.model, inputs)
            if reason is not None:
                self._refuse(reason)
            return outputs
        graph = self._graph or self._capture(tensors, rest)
        if graph is None:
            return self.model(**inputs)
        for name, x in tensors.items():
            self._inputs[name].copy_(x)
        graph.replay()
        outputs = graph.outputs
        return type(outputs)(**{**outputs, "logits": outputs.logits.clone()})

    def _capture(self, tensors: dict[str, torch.Tensor], rest: dict[str, Any]) -> Graph | None:
        self._inputs = {name: x.clone() for name, x in tensors.items()}
        try:
            self._graph = Graph(self.model, {**self._inputs, **rest})
        except Exception as error:  # whatever a hook or an adapter in the model does that a capture forbids
            self._refuse(described_error(error))
        return self._graph

    def _refuse(self, reason: str) -> None:
        self._refused = reason
        logger.warning(_WARNING, reason)


def described_error(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:300]}"


def watched(model: PreTrainedModel, inputs: dict[str, Any]) -> tuple[Any, str | None]:
    """A forward as it is, and why later ones must not be captured: waiting for the device, or more than logits."""
    outputs, waits = waiting(model.device, lambda: model(**inputs))
    if any(isinstance(value, tuple) for value in outputs.values()) or outputs.get("routed_experts") is not None:
        return outputs, "hidden states, attention weights, router logits or routed experts were asked for"
    return outputs, f"the forward waits for the device in {waits[0]}" if waits else None


def waiting(place: torch.device, call: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What the call returns, and the lines at which it waits for the device.

    A capture that breaks off leaves the process's random numbers and memory in the middle of it, so waiting is looked
    for beforehand. transformers' masks do not wait while a graph is captured: they ask.
    """
    device = torch.get_device_module(place)
    watch = getattr(device, "set_sync_debug_mode", None)
    thread = threading.get_ident()
    caught: list[tuple[int, Any, Any, str, int]] = []
    with alone, warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, category, filename, lineno, *_: caught.append(
            (threading.get_ident(), message, category, filename, lineno)
        )
        before = device.get_sync_debug_mode() if watch is not None else None
        try:
            if watch is not None:
                watch("warn")
            result = call()
        finally:
            if watch is not None:
                watch(before)
    waits = []
    for source, message, category, filename, lineno in caught:
        if "Synchronization debug mode is a prototype" in str(message):  # what watching says of itself
            continue
        if "called a synchronizing" not in str(message):
            warnings.warn_explicit(message, category, filename, lineno)
        elif source == thread and Path(filename).name != "masking_utils.py":
            waits.append(f"{filename}, line {lineno}")
    return result, waits


class DecodingStep:
    """A step of decoding on buffers that never move, lent to one growing cache at a time, and its graph.

    Attributes:
        rows, padded, rest: of the batches that it serves: rows, whether padding was fed, and all arguments of a forward
            that are no tensors.
        cache: the buffers, static layers with room for `capacity` columns.
        ids: [rows, 1] int64, the tokens of the step.
        mask: [rows, capacity] int64, 1 behind the text, where `generate` feeds tokens only; None without padding.
        busy: locked while a generation runs on it.
        length: columns of the growing cache, a number of the host that keeps step with the device's.
        warm: whether it has run as it is, so that its kernels are compiled.
    """

    _layers: list[Any] | None  # of the growing cache
    _pairs: list[tuple[Any, Any]]  # a buffer's layer, and the growing one
    _recurrent: list[KDACacheLayer]

    def __init__(self, model: PreTrainedModel, rows: int, padded: bool, rest: dict[str, Any], capacity: int, name: str):
        self.rows, self.padded, self.rest, self.capacity = rows, padded, rest, capacity
        self.cache, self.busy, self.length = HybridCache(model.config, max_length=capacity), threading.Lock(), 0
        with torch.inference_mode(False):  # inference tensors could be written in inference mode only
            self.ids = torch.zeros(rows, 1, dtype=torch.int64, device=model.device)
            real = torch.ones(rows, capacity, dtype=torch.bool, device=model.device)
            self.mask = torch.ones_like(real, dtype=torch.int64) if padded else None
            self.cache.real = real
        self.inputs = {"input_ids": self.ids, name: self.cache, **rest}
        if padded:
            self.inputs["attention_mask"] = self.mask
        self.graph: Graph | None = None
        self.warm = False
        self._let_go()

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for layer in self.cache.layers for buffer in layer.buffers)

    def serves(self, rows: int, padded: bool, rest: dict[str, Any]) -> bool:
        return (self.rows, self.padded, self.rest) == (rows, padded, rest)

    def is_free_for(self, cache: HybridCache) -> bool:
        """Whether steps of this growing cache may write here: no other one that lives reads where they write."""
        return all(static.is_free_for(layer) for static, layer in zip(self.cache.layers, cache.layers, strict=True))

    def is_lent_to(self, cache: HybridCache) -> bool:
        """Whether a part of this growing cache lies here."""
        return any(layer.stepping is static for static, layer in zip(self.cache.layers, cache.layers, strict=True))

    @property
    def is_lost(self) -> bool:
        """Whether it is free for no cache ever again."""
        return any(static.is_lost() for static in self.cache.layers)

    def take(self, cache: HybridCache) -> None:
        """Stand where a growing cache stands. Its latents lie here from now on, its states from the first step on, so
        that one that breaks off leaves the cache as it was."""
        self._layers, self._lent = cache.layers, False
        self._pairs = list(zip(self.cache.layers, cache.layers, strict=True))
        self._recurrent = [layer for layer in cache.layers if isinstance(layer, KDACacheLayer)]
        # A graph writes where the buffers were: it stays only if this goes through and none of them is new.
        graph, warm, self.graph, self.warm = self.graph, self.warm, None, False
        if not any([static.take(layer) for static, layer in self._pairs]):
            self.graph, self.warm = graph, warm
        self.length = cache.get_seq_length()
        self.cache.commit()  # a forward that failed here may have left it
        if self.mask is not None and self.cache.real is not None and cache.real is not None:
            self.mask.fill_(1)
            self.mask[:, : self.length] = cache.real
            self.cache.real.copy_(self.mask)

    def release(self) -> None:
        """Let other generations have the step; the cache keeps what lies here for as long as it lives."""
        self._let_go()
        self.busy.release()

    def _let_go(self) -> None:
        self._lent, self._layers, self._pairs, self._recurrent = False, None, [], []

    def continues(self, cache: HybridCache) -> bool:
        """Whether the growing cache is as the last step left it, with room for the next."""
        length = self.length
        return (
            length < self.capacity
            and cache.is_whole
            and cache.layers is self._layers
            and cache.padded == self.padded
            and all(layer.seq_length == length and layer.steps_on(static) for static, layer in self._pairs)
        )

    def run(self, model: PreTrainedModel, cache: HybridCache) -> tuple[Any, str | None]:
        """A step as it is: the model's outputs, and why later ones must not be captured."""
        outputs, reason = watched(model, self.inputs)
        self.warm = True
        cache.is_whole = False
        self._lend()
        self._stepped(cache)
        return outputs, reason

    def replay(self, graph: Graph, cache: HybridCache) -> None:
        """A captured step. The next forward refuses a cache that an interrupt inside leaves behind."""
        cache.is_whole = False
        if not self._lent:
            self._lend()
        graph.replay()
        self._stepped(cache)

    def _lend(self) -> None:
        for static, layer in self._pairs:
            static.lend(layer)
        self._lent = True

    def _stepped(self, cache: HybridCache) -> None:
        for layer in cache.layers:
            layer.seq_length += 1
        self.length += 1
        if self.padded and cache.real is not None:
            cache.real = F.pad(cache.real, (0, 1), value=True)
        for layer in self._recurrent:
            layer.keep_reached()
        cache.commit()


class _KeptSteps:
    """The steps of a model: reused by every generation of the same shapes, as long as the model computes the same."""

    def __init__(self) -> None:
        self._steps: list[DecodingStep] = []  # the newest last
        self._refused: list[tuple[bool, dict]] = []
        self._reasons: set[str] = set()
        self._computation: Any = None
        self._lock = threading.Lock()

    def open(self, computation: Any, rows: int) -> None:
        """A generation begins: forget what was captured of another computation, what no cache can use any more, and
        much of what other batches need."""
        with self._lock:
            if computation != self._computation:
                self._steps, self._refused, self._computation = [], [], computation
            self._steps = [step for step in self._steps if step.busy.locked() or not step.is_lost]
            self._trim([step for step in self._steps if step.rows != rows], KEPT_BYTES)
            self._trim(self._steps)

    def _trim(self, steps: list[DecodingStep], most_bytes: int | None = None) -> None:
        idle = [step for step in steps if not step.busy.locked()]
        while len(idle) > KEPT_STEPS or (most_bytes is not None and sum(step.nbytes for step in idle) > most_bytes):
            self._steps.remove(idle.pop(0))

    def acquire(
        self, model: PreTrainedModel, cache: HybridCache, padded: bool, rest: dict[str, Any], name: str
    ) -> DecodingStep:
        """A step for this cache, locked, with room for a token at least; it has yet to `take` it."""
        columns = max(cache.get_seq_length() + 1, *(getattr(layer, "reserved", 0) for layer in cache.layers))
        with self._lock:
            chosen = self._free_one(cache, padded, rest, columns)
            if chosen is None:
                chosen = DecodingStep(model, cache.batch_size, padded, rest, room_for(columns), name)
                chosen.busy.acquire()
            else:
                self._steps.remove(chosen)
            self._steps.append(chosen)
        return chosen

    def _free_one(self, cache: HybridCache, padded: bool, rest: dict, columns: int) -> DecodingStep | None:
        """One that is free and large enough, the cache's own if there is; smaller ones that are free are let go."""
        rows, free = cache.batch_size, []
        for step in list(self._steps):
            if step.serves(rows, padded, rest) and step.is_free_for(cache) and step.busy.acquire(blocking=False):
                free.append(step)
        large = sorted((step for step in free if step.capacity >= columns), key=lambda step: step.is_lent_to(cache))
        for step in free:
            if not large:
                self._steps.remove(step)
            if not large or step is not large[-1]:
                step.busy.release()
        return large[-1] if large else None

    def refuse(self, reason: str, step: DecodingStep | None = None) -> None:
        """Log a reason once, and with a step never capture one of its kind again."""
        with self._lock:
            if step is not None:
                self._refused.append((step.padded, step.rest))
                self._steps = [kept for kept in self._steps if kept is not step]
            if reason not in self._reasons:
                self._reasons.add(reason)
                logger.warning(_WARNING, reason)

    def has_refused(self, padded: bool, rest: dict) -> bool:
        return (padded, rest) in self._refused

    def release_idle(self) -> None:
        with self._lock:
            self._steps = [step for step in self._steps if step.busy.locked()]


def room_for(columns: int) -> int:
    """Capacity of new buffers for a text: two to a power, or one and a half of it."""
    capacity = 2
    while capacity < columns + SPARE:
        capacity += capacity // 2 if capacity & (capacity - 1) == 0 else capacity // 3
    return capacity


# Beside the models and not on them: neither copied nor saved with a model, and gone when it is.
_kept: weakref.WeakKeyDictionary[torch.nn.Module, _KeptSteps] = weakref.WeakKeyDictionary()


def release_steps(model: Any) -> None:
    """Free what captured steps of this model hold, but for those in use."""
    if model in _kept:
        _kept[model].release_idle()


class CapturedSteps:
    """What one `generate` calls for every token on a growing cache: captured steps, on buffers that the model keeps.

    The first step of a shape runs as it is, the second is captured, and from then on steps are replays, those of later
    generations too. What cannot be captured runs as it is, and the reason is logged once. To be closed.
    """

    def __init__(self, model: PreTrainedModel, cache: HybridCache, name: str, rows: int):
        """
        Args:
            cache: the growing cache of all calls.
            name: of the forward's argument that takes it.
            rows: of the batch.
        """
        self.model, self.cache, self.name = model, cache, name
        self._kept = _kept.setdefault(model, _KeptSteps())
        self._step: DecodingStep | None = None
        self._outputs: Any = None
        computation, reason = examined(model)
        self._kept.open(computation, rows)
        self._is_refused = reason is not None
        if reason is not None:
            self._kept.refuse(reason)

    def close(self) -> None:
        """Let later generations have the buffers, once the cache lets go of them."""
        if self._step is not None:
            self._step.release()
        self._step = self._outputs = None

    def __call__(self, **inputs: Any) -> Any:
        """Arguments and result of the model's forward; the next call writes over the logits."""
        step = None
        if not (self._is_refused or torch.is_grad_enabled()):
            step = self._step if self._continues(inputs) else self._prepared(inputs)
        if step is None:
            return self.model(**inputs)
        step.ids.copy_(inputs["input_ids"])
        if not step.warm:
            return self._first(step, inputs)
        graph = step.graph or self._capture(step)
        if graph is None:
            return self.model(**inputs)
        step.replay(graph, self.cache)
        if self._outputs is None:
            self._outputs = self._with_growing_cache(graph.outputs)
        return self._outputs

    def drop_unread(self, model_kwargs: dict) -> None:
        """Take out of the loop's arguments, behind the prompt, what steps do not read and the loop makes longer with
        every token: positions of single tokens, and a mask where nothing is padding."""
        if not self._is_refused:
            model_kwargs.pop("position_ids", None)
            if not self.cache.padded:
                model_kwargs.pop("attention_mask", None)

    def _continues(self, inputs: dict[str, Any]) -> bool:
        """Whether the last call's step takes this one as it is."""
        step = self._step
        if step is None or inputs["input_ids"].shape != step.ids.shape or inputs[self.name] is not self.cache:
            return False
        others = [name for name in inputs if name not in _TENSORS and name != self.name]
        same = len(others) == len(step.rest) and all(
            name in step.rest and (inputs[name] is step.rest[name] or inputs[name] == step.rest[name])
            for name in others
        )
        return same and step.continues(self.cache)

    def _prepared(self, inputs: dict[str, Any]) -> DecodingStep | None:
        """A step that stands where the cache stands; None where this call runs as it is."""
        self.close()
        cache, ids = self.cache, inputs.get("input_ids")
        cache.check_whole()
        if ids is None or ids.shape != (cache.batch_size, 1) or inputs.get(self.name) is not cache:
            return None
        rest = {name: x for name, x in inputs.items() if name not in _TENSORS and name != self.name}
        if (reason := self._reason(rest)) is not None:
            self._refuse(reason)
            return None
        if self._kept.has_refused(cache.padded, rest):
            self._is_refused = True
            return None
        try:
            self._step = step = self._kept.acquire(self.model, cache, cache.padded, rest, self.name)
            step.take(cache)
        except torch.OutOfMemoryError as error:
            self._failed(error)
            return None
        return step

    def _reason(self, rest: dict[str, Any]) -> str | None:
        """Why no step on this cache with these arguments can be captured."""
        tensors = [name for name, x in rest.items() if isinstance(x, torch.Tensor)]
        if tensors:
            return f"every step comes with {', '.join(tensors)}"
        attention = self.model.config.get_text_config(decoder=True)._attn_implementation
        if attention not in STATIC_ATTENTION:
            return f"attn_implementation={attention!r} would read a whole buffer, not only what is filled: use 'sdpa'"
        if any(isinstance(layer, KDACacheLayer) and layer.recording.active for layer in self.cache.layers):
            return "the cache records its tokens, so that crop can take them back"
        return None

    def _first(self, step: DecodingStep, inputs: dict[str, Any]) -> Any:
        try:
            outputs, reason = step.run(self.model, self.cache)
        except Exception as error:  # the cache is as it was: what is not the buffers' fault is raised again
            self._failed(error)
            return self.model(**inputs)
        if reason is not None:
            self._refuse(reason, step)
        return self._with_growing_cache(outputs)

    def _capture(self, step: DecodingStep) -> Graph | None:
        try:
            step.graph = Graph(self.model, step.inputs)
        except Exception as error:  # whatever an adapter in the model does that a capture forbids
            self._failed(error)
        return step.graph

    def _failed(self, error: Exception) -> None:
        if not isinstance(error, torch.OutOfMemoryError):
            self._refuse(described_error(error), self._step)
            return
        self._refuse("there is no memory for its buffers")
        self._kept.release_idle()

    def _refuse(self, reason: str, step: DecodingStep | None = None) -> None:
        """Run as it is from here on; a step that is named is refused in later generations too."""
        self._kept.refuse(reason, step)
        self._is_refused = True
        self.close()

    def _with_growing_cache(self, outputs: Any) -> Any:
        return type(outputs)(**{**outputs, self.name: self.cache})


def capturable(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a hook of which a graph repeats all that it does: operations on tensors that stay where they are."""
    hook.is_capturable = True  # type: ignore[attr-defined]
    return hook


def _is_capturable(hook: Callable[..., Any]) -> bool:
    # That of transformers is for checkpoints of layers, and marks what enters the first one.
    return getattr(hook, "is_capturable", False) or getattr(hook, "__name__", "") == "make_inputs_require_grads"


# What every module has that says nothing of its forward, where it has no hooks; and settings of the loop around it.
_NOT_COMPUTATION = {*vars(torch.nn.Module()), "generation_config"} - {"training", "_parameters", "_buffers", "_modules"}


def settings_of_process(device: torch.device) -> list[Any]:
    """Those that decide which kernels run."""
    matmul = getattr(getattr(torch.backends, device.type, None), "matmul", None)
    precision = getattr(matmul, "fp32_precision", None) or getattr(matmul, "allow_tf32", None)
    return [dispatch.use_triton, torch.are_deterministic_algorithms_enabled(), precision]


def examined(model: PreTrainedModel) -> tuple[list, str | None]:
    """What decides what a forward of the model computes, and why its steps must not be captured.

    The first compares equal as long as no parameter moved and no module, setting or adapter changed; values inside the
    parameters may, a graph reads them anew.
    """
    computation: list[Any] = settings_of_process(model.device)
    computation += [_plain(vars(model.config)), _plain(vars(model.config.get_text_config(decoder=True)))]
    devices: set[torch.device] = set()
    reason = None
    for name, module in model.named_modules():
        own = {key: x for key, x in vars(module).items() if key not in _NOT_COMPUTATION}
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        # What accelerate puts around a model is autocast and a cast of the results, which a graph repeats.
        replaced = {"forward", "_compiled_call_impl"} & own.keys() and (name or "_original_forward" not in own)
        if replaced or not all(map(_is_capturable, hooks)):
            reason = f"{name or 'the model'} has a hook, or a forward of its own, which a graph would not call"
        tensors = [x for x in (*module._parameters.values(), *module._buffers.values()) if x is not None]
        devices.update(x.device for x in tensors)
        if any(type(x) not in (torch.Tensor, torch.nn.Parameter) for x in tensors):
            reason = f"{name or 'the model'} holds tensors of a special kind"
        values = [(key, _plain(x)) for key, x in own.items()]
        computation.append((id(module), type(module), values, list(map(id, hooks))))
    if _has_any_global_hook():
        reason = "a hook of all modules is set, which a graph would not call"
    if len(devices) > 1:
        reason = "the model lies on several devices"
    if torch.is_autocast_enabled(model.device.type):
        reason = "autocast keeps what it casts, and a graph would read that later"
    return computation, reason


def _plain(value):
    """Something that compares equal while the value stays what it was."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr(), value.shape, value.stride(), value.dtype
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return value
    if isinstance(value, dict):
        return [(key, _plain(x)) for key, x in value.items()]
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(x) for x in value]
    return id(value)
