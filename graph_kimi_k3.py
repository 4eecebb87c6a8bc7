"""A decoding step as a CUDA graph: one launch for the thousands of kernels of a forward on a static cache."""

import logging
import warnings
from pathlib import Path

import torch

logger = logging.getLogger(__name__)


def can_capture(model) -> bool:
    """Whether the model lies on one device that has graphs."""
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1 or next(iter(devices)).type == "meta":
        return False
    return hasattr(torch.get_device_module(devices.pop()), "CUDAGraph")


class CapturedForward:
    """A model's forward for steps of equal shape on one static cache; what `generate` calls for every token.

    The first call of a shape runs as it is (kernels are compiled, buffers made), the second is captured, and from then
    on calls copy their tensors into the captured ones and replay. Whatever cannot be captured runs as it is, and the
    reason is logged once. For one generation: a `reset` of the cache between two calls is not seen.
    """

    def __init__(self, model):
        self.model = model
        self._known = self._graph = self._inputs = self._outputs = self._refused = None

    def __call__(self, **inputs):
        """Arguments and result of the model's forward; the logits are a copy, the next call leaves them alone."""
        if self._refused is not None or torch.is_grad_enabled():
            return self.model(**inputs)
        tensors = {name: x for name, x in inputs.items() if isinstance(x, torch.Tensor)}
        rest = {name: x for name, x in inputs.items() if name not in tensors}
        shapes = {name: (x.shape, x.dtype, x.device) for name, x in tensors.items()}
        if (shapes, rest) != self._known:
            self._known, self._graph = (shapes, rest), None
            return self._watched(inputs)
        if self._graph is None and not self._capture(tensors, rest):
            return self.model(**inputs)
        for name, x in tensors.items():
            self._inputs[name].copy_(x)
        self._graph.replay()
        return type(self._outputs)(**{**self._outputs, "logits": self._outputs.logits.clone()})

    def _watched(self, inputs):
        """The forward as it is, refused for later if it waits for the device.

        A capture that breaks off leaves the process's random numbers and memory in the middle of it, so waiting is
        looked for beforehand. transformers' masks do not wait while a graph is captured: they ask.
        """
        device = torch.get_device_module(self.model.device)
        watch = getattr(device, "set_sync_debug_mode", None)
        before = device.get_sync_debug_mode() if watch is not None else None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                if watch is not None:
                    watch("warn")
                outputs = self.model(**inputs)
            finally:
                if watch is not None:
                    watch(before)
        waits = [
            w
            for w in caught
            if "called a synchronizing" in str(w.message) and Path(w.filename).name != "masking_utils.py"
        ]
        for other in caught:
            if other not in waits:
                warnings.warn_explicit(other.message, other.category, other.filename, other.lineno)
        if any(isinstance(value, tuple) for value in outputs.values()):
            self._refuse("hidden states, attention weights or router logits were asked for")
        elif waits:
            self._refuse(f"the forward waits for the device in {waits[0].filename}, line {waits[0].lineno}")
        return outputs

    def _capture(self, tensors, rest) -> bool:
        self._inputs = {name: x.clone() for name, x in tensors.items()}
        device = torch.get_device_module(self.model.device)
        graph = device.CUDAGraph()
        try:
            # Not the stream that torch would take, which belongs to whichever device captured first.
            with (
                device.device(self.model.device),
                device.graph(graph, stream=device.Stream(self.model.device), capture_error_mode="thread_local"),
            ):
                self._outputs = self.model(**self._inputs, **rest)
        except Exception as error:  # whatever a hook or an adapter in the model does that a capture forbids
            self._refuse(f"{type(error).__name__}: {str(error).strip()[:300]}")
            return False
        self._graph = graph
        return True

    def _refuse(self, reason: str) -> None:
        self._refused = reason
        logger.warning("the decoding step runs without a CUDA graph: %s", reason)
