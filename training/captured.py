"""A training step as a CUDA graph: one launch for the thousands of kernels of a forward and its backward.

The host of a small model issues kernels more slowly than its GPU runs them. Captured are forward, loss and backward,
which are nearly all of them. Clipping, optimizer, schedules and callbacks stay as they are: the host issues them while
the GPU is still busy with the graph, so they need no form that could be captured.
"""

import collections
import dataclasses
import functools
import logging
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.module import _has_any_global_hook

from ..graph_kimi_k3 import Graph, GraphMemory, described_error, examined, has_graphs, settings_of_process, waiting

logger = logging.getLogger(__name__)

# Graphs of one step, and shapes of batches that it remembers to have seen once.
MOST_GRAPHS, MOST_SEEN = 16, 64
_WARNING = "the training step runs without a CUDA graph: %s"


@dataclasses.dataclass
class _Kind:
    """Calls that one graph serves.

    Attributes:
        shapes: shape and dtype of every tensor by its name.
        rest: the other arguments.
        is_fresh: whether there are no gradients before it, so that they are written and not added to.
        is_refused: whether it always runs as it is.
        inputs: the tensors that the graph reads.
    """

    shapes: dict[str, tuple[torch.Size, torch.dtype]]
    rest: dict[str, Any]
    is_fresh: bool
    is_refused: bool = False
    inputs: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    graph: Graph | None = None


class CapturedStep:
    """Forward, loss and backward of a Kimi K3 model, replayed for batches of a shape that came before.

        step = CapturedStep(model)
        for batch in batches:
            loss = step(input_ids=batch, labels=batch)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    The first batch of a shape runs as it is, the second is captured, and from then on batches are copied into the
    captured tensors and replayed. Losses and gradients are those of the same kernels; gradients add up over calls until
    they are set to None, and lie in the same tensors at every step. What cannot be captured runs as it is, and the
    reason is logged once; on a device without graphs everything does. Whatever decides what a forward computes is
    looked at in every call: a parameter that moved, a layer that was frozen or got an adapter are captured anew.

    The memory of a step, activations included, stays with it until `release`.

    Args:
        model: in training mode, its parameters on one device.
        run: keyword arguments of a call -> the loss, whose gradients it adds to the parameters'. Python runs in it at
            the capture only, so what changes from call to call has to be a tensor among its arguments. None: a forward
            with these arguments, and backward of its loss.
    """

    def __init__(self, model: Any, run: Callable[..., torch.Tensor] | None = None):
        self.model, self.run = model, run or functools.partial(_forward_and_backward, model)
        self._reasons: set[str] = set()  # that were logged
        # What was examined last, and what came out.
        self._process: tuple | None = None
        self._parts: list = []
        self._marks: list = []
        self._computation: Any = None
        self._reason: str | None = None
        self._parameters: list[torch.nn.Parameter] = []
        self.release()

    def release(self) -> None:
        """Free what the graphs hold: the gradients of the last call too, unless somebody else holds them."""
        self._kinds: list[_Kind] = []  # the newest last
        self._grads: list[torch.Tensor | None] | None = None  # of the parameters, where graphs write
        self._memory: GraphMemory | None = None

    @property
    def has_graphs(self) -> bool:
        """Whether the model's device has graphs."""
        return has_graphs(self.model.device)

    def __call__(self, **batch: Any) -> torch.Tensor:
        """The loss, detached. Tensors may lie on the CPU."""
        if not self.has_graphs:
            return self._as_it_is(batch)
        batch = without_needless(batch)
        self._examine()
        parameters = self._parameters
        if self._reason is not None:
            self._tell(self._reason)
            return self._as_it_is(batch)
        grads = [parameter.grad for parameter in parameters]
        is_fresh = all(grad is None for grad in grads)
        if not (is_fresh or self._are_ours(grads)):
            return self._as_it_is(batch)
        tensors = {name: x for name, x in batch.items() if isinstance(x, torch.Tensor)}
        rest = {name: x for name, x in batch.items() if name not in tensors}
        shapes = {name: (x.shape, x.dtype) for name, x in tensors.items()}
        kind = next(
            (each for each in self._kinds if (each.shapes, each.rest, each.is_fresh) == (shapes, rest, is_fresh)), None
        )
        if kind is None:
            return self._first(_Kind(shapes, rest, is_fresh), batch)
        if kind.is_refused or (kind.graph is None and not self._capture(kind, tensors, parameters)):
            return self._as_it_is(batch)
        return self._replay(kind, tensors, parameters)

    def _as_it_is(self, batch: dict[str, Any]) -> torch.Tensor:
        return self.run(**_moved(batch, self.model.device)).detach()

    def _first(self, kind: _Kind, batch: dict[str, Any]) -> torch.Tensor:
        """A call as it is, watched for what a capture forbids."""
        batch = _moved(batch, self.model.device)
        loss, waits = waiting(self.model.device, lambda: self.run(**batch))
        seen = [each for each in self._kinds if each.graph is None]
        if len(seen) >= MOST_SEEN:
            self._kinds.remove(seen[0])
        self._kinds.append(kind)
        if waits:
            self._refuse(kind, f"it waits for the device in {waits[0]}")
        elif sum(each.graph is not None for each in self._kinds) >= MOST_GRAPHS:
            self._refuse(kind, f"its batches have more than {MOST_GRAPHS} shapes")
        return loss.detach()

    def _capture(self, kind: _Kind, tensors: dict[str, torch.Tensor], parameters: list[torch.nn.Parameter]) -> bool:
        """Whether the kind has its graph now. The first one brings the gradients that all others write to."""
        before, ours = [parameter.grad for parameter in parameters], self._grads
        zeroed = [grad for grad in ours or () if grad is not None] if kind.is_fresh else []

        def run(**batch):
            if zeroed:
                torch._foreach_zero_(zeroed)
            return self.run(**batch).detach()  # a graph of autograd that lived on would keep to this stream

        try:
            self._memory = self._memory or GraphMemory(self.model.device)
            kind.inputs = {name: x.detach().to(self.model.device, copy=True) for name, x in tensors.items()}
            _set_grads(parameters, before if ours is None else ours)
            kind.graph = Graph(self.model, {**kind.inputs, **kind.rest}, run, self._memory)
        except Exception as error:  # whatever an adapter in the model does that a capture forbids
            _set_grads(parameters, before)
            no_memory = isinstance(error, torch.OutOfMemoryError)
            self._refuse(kind, "there is no memory for it" if no_memory else described_error(error))
            return False
        if ours is None:
            self._grads = [parameter.grad for parameter in parameters]
        return True

    def _replay(self, kind: _Kind, tensors: dict[str, torch.Tensor], parameters: list[torch.nn.Parameter]):
        for name, x in tensors.items():
            into = kind.inputs[name]
            if x.device.type == "cpu" and into.device.type != "cpu":
                x = x.pin_memory()  # a copy from other memory would wait for the step before
            into.copy_(x, non_blocking=True)
        kind.graph.replay()
        _set_grads(parameters, self._grads)
        return kind.graph.outputs.clone()  # the next replay overwrites it

    def _are_ours(self, grads: list[torch.Tensor | None]) -> bool:
        ours = self._grads
        return ours is not None and all(grad is own for grad, own in zip(grads, ours, strict=True))

    def _examine(self) -> None:
        """Let go of graphs of what the model was before, and find out why it cannot be captured as it stands.

        Looking at everything takes as long as a few layers; that nothing was put in another's place is seen at once.
        """
        place = self.model.device
        process = (torch.is_grad_enabled(), torch.is_autocast_enabled(place.type), _has_any_global_hook(),
                   *settings_of_process(place))  # fmt: skip
        parts, marks = _parts(self.model)
        if process == self._process and marks == self._marks and len(parts) == len(self._parts):
            if all(map(operator.is_, parts, self._parts)):
                return
        self._process, self._parts, self._marks = process, parts, marks
        computation, reason = examined(self.model)
        self._parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        computation.append(list(map(id, self._parameters)))
        if computation != self._computation:
            self.release()
        self._computation, self._reason = computation, reason or _reason(self.model, self._parameters)

    def _refuse(self, kind: _Kind, reason: str) -> None:
        kind.is_refused, kind.inputs = True, {}
        self._tell(reason)

    def _tell(self, reason: str) -> None:
        if reason not in self._reasons:
            self._reasons.add(reason)
            logger.warning(_WARNING, reason)


def _forward_and_backward(model: Any, **batch: Any) -> torch.Tensor:
    loss = model(**{"use_cache": False, **batch}).loss
    loss.backward()
    return loss


def _reason(model: torch.nn.Module, parameters: list[torch.nn.Parameter]) -> str | None:
    """Why a backward pass of the model cannot be captured."""
    if not torch.is_grad_enabled():
        return "gradients are switched off"
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return "several processes train together"
    if any(parameter._backward_hooks or parameter._post_accumulate_grad_hooks for parameter in parameters):
        return "a parameter has a hook, which a graph would not call"
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            return f"{name or 'the model'} has a backward hook, which a graph would not call"
        options = getattr(getattr(module, "_gradient_checkpointing_func", None), "keywords", {})
        if getattr(module, "gradient_checkpointing", False) and options.get("preserve_rng_state", True):
            return (
                "gradient checkpointing keeps the state of random numbers, which a capture forbids: "
                "gradient_checkpointing_enable({'use_reentrant': False, 'preserve_rng_state': False})"
            )
    return None


_CONTAINERS = frozenset((dict, collections.OrderedDict, list, tuple, set))


def _parts(model: Any) -> tuple[list, list]:
    """All objects that the model and its modules consist of, and where its parameters lie and what they are."""
    configs = model.config, model.config.get_text_config(decoder=True)
    parts, marks, modules = [x for config in configs for x in vars(config).values()], [], [model]
    while modules:
        module = modules.pop()
        modules += [each for each in module._modules.values() if each is not None]
        values = vars(module).values()
        parts += values
        for x in values:
            if type(x) in _CONTAINERS and x:
                parts += x.values() if isinstance(x, dict) else x
        for x in (*module._parameters.values(), *module._buffers.values()):
            if x is not None:
                marks += x.data_ptr(), x.requires_grad, bool(x._backward_hooks), bool(x._post_accumulate_grad_hooks)
    return parts, marks


def without_needless(batch: dict[str, Any]) -> dict[str, Any]:
    """A batch without what says nothing to a forward and would be read on the host there: a mask of ones, and positions
    of rows that hold one document each."""
    mask, positions = batch.get("attention_mask"), batch.get("position_ids")
    batch = dict(batch)
    if isinstance(mask, torch.Tensor) and bool((mask == 1).all()):
        del batch["attention_mask"]
    if isinstance(positions, torch.Tensor) and positions.dim() <= 2 and bool((positions.diff(dim=-1) == 1).all()):
        del batch["position_ids"]
    return batch


def _moved(batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in batch.items()}


def _set_grads(parameters: list[torch.nn.Parameter], grads: Any) -> None:
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad


class CapturedTraining:
    """Mixin of transformers' `Trainer`, whose forward and backward passes `CapturedStep` runs then.

        class CapturedTrainer(CapturedTraining, Trainer):
            pass

    Batches of equal shapes without padding are captured. With `logging_nan_inf_filter`, which is on unless arguments
    say otherwise, a Trainer waits for every step's loss.
    """

    _captured: CapturedStep | None = None

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        trainer: Any = self
        step = super().training_step  # type: ignore[misc]  # of the Trainer
        if model is not trainer.model or trainer.args.torch_empty_cache_steps is not None:
            return step(model, inputs, num_items_in_batch)  # of a wrapper, or it lets go of memory
        if self._captured is None:

            def run(items=None, accumulated=None, **inputs):
                return step(model, inputs, items)

            self._captured = CapturedStep(model, run)
        model.train()
        items = None if num_items_in_batch is None else torch.as_tensor(num_items_in_batch)
        # Without a number of items the loss is divided by the passes of a step.
        accumulated = trainer.current_gradient_accumulation_steps if items is None else None
        return self._captured(**inputs, items=items, accumulated=accumulated)
