"""Kernels compiled ahead of their first launch, several at a time.

Triton compiles a kernel where it is launched, so that a first forward compiles thirty kernels one after another, and
builds a launcher for each with the C compiler. Most of either is spent outside of Python's lock: threads share it.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed
from typing import Any

import torch

from . import dispatch

# With more threads the ones that hold Python's lock keep the others waiting.
MOST_WORKERS = 16


def is_possible() -> bool:
    """Whether this Triton compiles in threads (from 3.6 on)."""
    from . import triton_tools as tools

    return hasattr(tools.triton, "AsyncCompileMode") and not tools.INTERPRETED


def cache_folder() -> str:
    """Where Triton keeps what it compiles: `TRITON_CACHE_DIR`, or a folder of the user's."""
    from . import triton_tools as tools

    return tools.triton.knobs.cache.dir


@contextlib.contextmanager
def compiled_only(device: torch.device, progress: Callable[..., Iterable[Future]] = iter) -> Iterator[list[str]]:
    """What this thread launches in the block is compiled and does not run: results of operations are zeros.

    At the end of the block all that it asked for is compiled, stored in Triton's cache and loaded on the device. What
    does not compile is left to the launch that needs it. Launches of other threads run as always.

    Args:
        progress: makes a bar of an iterator over the last ones that compile.

    Yields:
        the names of the kernels, complete behind the block.
    """
    from . import triton_tools as tools

    names: list[str] = []
    workers = min(MOST_WORKERS, os.cpu_count() or 1)
    with ThreadPoolExecutor(workers, initializer=_use, initargs=(device,)) as pool:
        executor = _Loading(pool)
        with tools.triton.AsyncCompileMode(executor, ignore_errors=True), executor.cancelled_by_interrupts():
            with dispatch.compiling_only():
                yield names
            for future in progress(as_completed(executor.futures)):
                if future.exception() is None:
                    names.append(future.result().name)


def _use(device: torch.device) -> None:
    """A thread of the pool loads kernels on the device of the one that asked."""
    if device.type != "cpu":  # tests without a GPU
        torch.get_device_module(device).set_device(device)


class _Loading(Executor):
    """A pool whose tasks compile a kernel, build its launcher and load it."""

    def __init__(self, pool: ThreadPoolExecutor):
        self.pool = pool
        self.futures: list[Future] = []

    def submit(self, compile_kernel: Callable[[], Any], /, *args: Any, **kwargs: Any) -> Future:
        self.futures.append(self.pool.submit(_loaded, compile_kernel))
        return self.futures[-1]

    @contextlib.contextmanager
    def cancelled_by_interrupts(self) -> Iterator[None]:
        """Who interrupts the block waits for what compiles at the moment, and not for all that is queued."""
        try:
            yield
        except KeyboardInterrupt:
            self.pool.shutdown(wait=False, cancel_futures=True)
            for future in self.futures:
                if future.cancelled():
                    future.set_running_or_notify_cancel()  # or Triton would wait for it
            raise


def _loaded(compile_kernel: Callable[[], Any]) -> Any:
    kernel = compile_kernel()
    _ = kernel.run  # made at the first use
    return kernel
