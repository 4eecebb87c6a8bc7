"""Peak memory of a prefill on a GPU, compared with the bytes it cannot do without: weights, cache and one chunk."""

import contextlib
import gc

import torch


class PeakMemory:
    """Measures the forwards of one text; on a CPU it measures nothing.

    Args:
        model: whose weights and device count.

    Attributes:
        peak: the most bytes allocated during the forwards so far, without those that were allocated before and are not
            the model's.
        chunk: the most bytes that the first forward, which reads no context, needed beside those it left (the cache).
    """

    def __init__(self, model: torch.nn.Module):
        self.device, self.on = model.device, model.device.type == "cuda"
        tensors = {tensor.data_ptr(): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
        self.weights = sum(tensors.values())
        self.peak = self.chunk = self._foreign = 0
        self._first = True
        if self.on:  # the workspace of products is made once and belongs to no text
            ones = torch.ones(16, 16, device=self.device, dtype=model.dtype)
            torch.nn.functional.linear(ones, ones)

    def start(self) -> None:
        """Before the first forward of a text."""
        if self.on:
            gc.collect()
            torch.cuda.empty_cache()
            self._foreign = torch.cuda.memory_allocated(self.device) - self.weights
        self.peak, self._first = 0, True

    @contextlib.contextmanager
    def forward(self):
        """Around a forward."""
        if not self.on:
            yield
            return
        torch.cuda.reset_peak_memory_stats(self.device)
        yield
        highest = torch.cuda.max_memory_allocated(self.device)
        self.peak = max(self.peak, highest - self._foreign)
        if self._first:
            self.chunk, self._first = highest - torch.cuda.memory_allocated(self.device), False

    def line(self, cache_bytes: int) -> dict:
        """The bytes, and the peak's ratio to weights + cache + one chunk; {} on a CPU."""
        if not self.on:
            return {}
        parts = self.weights + cache_bytes + self.chunk
        return {
            "weight_bytes": self.weights,
            "cache_bytes": cache_bytes,
            "chunk_bytes": self.chunk,
            "peak_bytes": self.peak,
            "peak_ratio": round(self.peak / parts, 3),
        }
