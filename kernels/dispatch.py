"""Where the Triton kernels run: one place that decides, and says why not."""

import contextlib
import functools
import importlib.util
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._triton import has_triton

logger = logging.getLogger(__name__)

# Head sizes whose state, or whose chunk of keys, still fits the registers of one program.
MAX_SIZE = 256
# Set to False (or start with KIMI_K3_TRITON=0) to run the torch references everywhere.
use_triton = os.environ.get("KIMI_K3_TRITON", "1") != "0"
# Types of devices whose tensors go to torch, compiled or not.
without_kernels = ("cpu", "meta")
_TYPES = {torch.float32, torch.bfloat16, torch.float16}
# Operations of which a kernel failed to compile, and why.
_broken: dict[str, str] = {}
# What runs in place of kernels, as warnings say it.
TORCH = "the torch path instead of its Triton kernels"
PORTABLE = "portable kernels, slower ones, instead of its Gluon kernels"
_HAS_TRITON = importlib.util.find_spec("triton") is not None


class _Mode(threading.local):
    """Of a thread, whether its launches compile and do not run."""

    compiles_only = False


_mode = _Mode()


def triton_refusal(*tensors: torch.Tensor, sizes: tuple[int, ...] = ()) -> str | None:
    """Why the Triton kernels cannot take these tensors with heads of these sizes; None when they can.

    On a GPU every reason is logged once: there, running without the kernels is a surprise.
    """
    device = tensors[0].device
    if device.type in without_kernels:
        return f"the tensors are on {device.type}"
    if not use_triton:
        return "use_triton is False"
    if torch.compiler.is_compiling():
        return "torch.compile traces the torch path"  # launches would break the graph
    reason = _device_refusal(device)
    if reason is None:
        types = {x.dtype for x in tensors}
        if not types <= _TYPES:
            found = ", ".join(sorted(map(str, types)))
            reason = f"the tensors are of type {found}; the kernels take float32, bfloat16 and float16"
        elif len({x.device for x in tensors}) > 1:
            reason = "the tensors are on several devices"
        elif any(size > MAX_SIZE for size in sizes):
            reason = f"a head size of {max(sizes)} is above {MAX_SIZE}"
    if reason is not None:
        _tell(reason)
    return reason


def operator_refusal(*tensors: torch.Tensor, **limits: tuple[int, ...]) -> str | None:
    """`triton_refusal` for an operation of which a graph gets a registered operator (`operators.py`).

    Traced, what tensors are decides, and their device, so that torch fuses where no kernels run; nothing is logged.
    """
    if not torch.compiler.is_compiling():
        return triton_refusal(*tensors, **limits)
    device = tensors[0].device
    known = use_triton and device.type not in without_kernels and has_kernels(device)
    known = known and all(x.dtype in _TYPES and x.device == device for x in tensors)
    known = known and all(size <= MAX_SIZE for size in limits.get("sizes", ()))
    return None if known else "torch.compile traces the torch path"


@torch.compiler.assume_constant_result
def has_kernels(device: torch.device) -> bool:
    """Whether the Triton kernels run on this device, asked while a graph is traced."""
    return _device_refusal(device) is None


def needs_grad(*tensors: torch.Tensor | None) -> bool:
    """Whether autograd will want a backward pass of what is computed from these."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def is_intercepted(module: torch.nn.Module) -> bool:
    """Whether somebody acts where the module is called: a hook, its own or of all modules, or a forward of its own."""
    own = module.__dict__  # `getattr` for what is not there takes a microsecond
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    if any(hooks) or _has_any_global_hook():
        return True
    if "forward" not in own:
        return False
    # accelerate wraps every module of a model on several devices; without offloading the wrapper only moves inputs
    hook: Any = own.get("_hf_hook")
    return type(hook).__name__ != "AlignDevicesHook" or hook.offload


def stands_for_call(module: torch.nn.Module, kind: type[torch.nn.Module]) -> bool:
    """Whether an operation may read `module.weight`, which it fuses with others, in place of calling the module.

    Not where a call does more than the class `kind` says: an adapter or a parametrization has made another class of
    the module, it is intercepted, its weight is offloaded until it is called, or a quantizer (torchao) keeps it as a
    tensor of a class of its own.
    """
    if type(module) is not kind or is_intercepted(module):
        return False
    weight = module.weight
    return type(weight).__name__ in ("Parameter", "Tensor", "DTensor") and not weight.is_meta


def token_rows(x: torch.Tensor) -> torch.Tensor:
    """x [B, T, ...] with what belongs to a token side by side and all tokens one stride apart, copied if need be."""
    if x.is_contiguous():
        return x
    strides, inner = x.stride(), 1
    for dim in range(x.dim() - 1, 1, -1):
        if strides[dim] != inner and x.shape[dim] > 1:
            return x.contiguous()
        inner *= x.shape[dim]
    apart = x.shape[0] == 1 or strides[0] == x.shape[1] * strides[1]
    return x if apart else x.contiguous()


def run_kernels(function: Callable[..., Any], *arguments: Any) -> Any:
    """What the Triton `function` returns; None when a kernel does not compile here, and from then on.

    Compilation comes before any launch of a kernel, so the arguments are as they were. Triton launches on the current
    device, so that of the first tensor is made it.
    """
    operation = getattr(function, "__self__", function).__module__.rpartition(".")[2].removesuffix("_triton")
    if operation in _broken:
        return None
    try:
        with _current(_device_of(arguments)):
            results = function(*arguments)
        return zeroed(results) if is_compiling_only() else results
    except Exception as error:
        # Triton raises its own classes, and a plain RuntimeError where its pass manager gives up.
        if not type(error).__module__.startswith("triton") and "PassManager" not in str(error):
            raise
        reason = f"a kernel of {operation} does not compile here: {type(error).__name__}: {str(error).strip()[-300:]}"
        _broken[operation] = reason
        _tell(reason, PORTABLE if operation.endswith("_gluon") else TORCH)
        return None


@contextlib.contextmanager
def compiling_only() -> Iterator[None]:
    """Around what this thread runs while nothing is launched: results of kernels are zeros, and expert 0 exists."""
    _mode.compiles_only = True
    try:
        yield
    finally:
        _mode.compiles_only = False


def is_compiling_only() -> bool:
    return _mode.compiles_only


def zeroed(results: Any) -> Any:
    """The results of an operation, tensors and tuples of them, filled with zeros."""
    if isinstance(results, torch.Tensor):
        results.data.zero_()  # unseen by autograd, which would take it for a change of what it has saved
    elif isinstance(results, list | tuple):
        for result in results:
            zeroed(result)
    return results


class Differentiable(torch.autograd.Function):
    """`run_differentiable` where a gradient is wanted; once differentiable."""

    @staticmethod
    def forward(ctx, forward, backward, options, *tensors):
        ctx.gradients, ctx.options, ctx.count = backward, options, len(tensors)
        ctx.set_materialize_grads(False)
        results, kept = forward(tensors, options, True)
        ctx.save_for_backward(*tensors, *kept)
        return results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads):
        saved = ctx.saved_tensors  # unpacked once: re-entrant checkpoints refuse a second time
        grads = [None if grad is None else grad.contiguous() for grad in grads]
        return None, None, None, *ctx.gradients(saved[: ctx.count], saved[ctx.count :], ctx.options, grads)


def run_differentiable(
    forward: Callable[..., Any], backward: Callable[..., Any], tensors: tuple[torch.Tensor | None, ...], options: Any
) -> Any:
    """The results of kernels whose gradients are kernels too; None as of `run_kernels`.

    Args:
        forward: of the tensors, the options and whether a gradient is wanted -> the results, a tensor or a tuple, and
            a tuple of what else `backward` needs.
        backward: of the tensors, what is kept beside them, the options and the gradient of every result (None where
            nothing depends on it) -> a gradient, or None, for every tensor.
        tensors: None among them counts as one without a gradient.
    """
    if not needs_grad(*tensors):
        found = run_kernels(forward, tensors, options, False)
        return None if found is None else found[0]

    def run(*tensors):
        return Differentiable.apply(forward, backward, options, *tensors)

    run.__module__ = forward.__module__  # whose kernels these are
    return run_kernels(run, *tensors)


def run_first(modules: Iterable[Any], *arguments: Any) -> Any:
    """What `run` of the first of the modules returns whose kernels compile here; None where none of them do."""
    for module in modules:
        out = run_kernels(module.run, *arguments)
        if out is not None:
            return out
    return None


def capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of an NVIDIA GPU; None for any other device."""
    if device.type in ("cpu", "meta") or torch.version.hip is not None:
        return None
    capability_of = getattr(torch.get_device_module(device), "get_device_capability", None)
    found = capability_of(device) if capability_of is not None else None
    return found if isinstance(found, tuple) else None


def if_importable(load: Callable[[], Any], what: str) -> Any:
    """The module that `load` imports; None, which is logged, where this Triton does not know what it says."""
    try:
        return load()
    except (ImportError, AttributeError, TypeError) as error:
        logger.warning("kimi_k3 runs %s by portable kernels on this GPU, slower ones: %s", what, error)
        return None


def recomputed(
    function: Callable[..., tuple[torch.Tensor, ...]],
    tensors: Iterable[torch.Tensor | None],
    grads: Iterable[torch.Tensor | None],
) -> list[torch.Tensor | None]:
    """Gradients of the tensors (None for one that is None) where no kernel makes them: `function` runs again in torch.

    Args:
        function: of the tensors -> a tuple of results.
        grads: of each result; None where nothing depends on one.
    """
    leaves, results = recompute(function, tensors)
    return gradients(results, leaves, grads)


def recompute(
    function: Callable[..., tuple[torch.Tensor, ...]], tensors: Iterable[torch.Tensor | None]
) -> tuple[list[torch.Tensor | None], tuple[torch.Tensor, ...]]:
    """The tensors as leaves of a graph of their own, and `function` of them."""
    leaves = [None if x is None else x.detach().requires_grad_() for x in tensors]
    with torch.enable_grad():
        return leaves, function(*leaves)


def gradients(
    results: Iterable[torch.Tensor],
    leaves: list[torch.Tensor | None],
    grads: Iterable[torch.Tensor | None],
) -> list[torch.Tensor | None]:
    """Of what `recompute` returned, under the gradients of the results; None for a result that nobody used."""
    pairs = list(zip(results, grads, strict=True))
    used, used_grads = zip(*((result, grad) for result, grad in pairs if grad is not None), strict=True)
    tensors, some_unused = [x for x in leaves if x is not None], len(used) < len(pairs)
    # An input may go without a gradient only where a result does.
    own = iter(torch.autograd.grad(used, tensors, used_grads, allow_unused=some_unused))
    return [None if x is None else next(own) for x in leaves]


def _device_of(arguments: Iterable[Any]) -> torch.device | None:
    for x in arguments:
        if isinstance(x, torch.Tensor):
            return x.device
        if isinstance(x, list | tuple) and (device := _device_of(x)) is not None:
            return device
    return None


def _current(device: torch.device | None) -> contextlib.AbstractContextManager:
    if device is None or device.index is None:
        return contextlib.nullcontext()
    module = torch.get_device_module(device)
    return contextlib.nullcontext() if module.current_device() == device.index else module.device(device)


@functools.cache
def _device_refusal(device: torch.device) -> str | None:
    if not _HAS_TRITON:
        return "the package triton is not installed (pip install triton)"
    if not has_triton():
        return f"Triton has no backend for {device.type}"
    found = capability(device)
    if found is not None and found < (8, 0):
        return "the GPU is older than compute capability 8.0, which has no bfloat16 products"
    return None


@functools.cache
def _tell(reason: str, instead: str = TORCH) -> None:
    logger.warning("kimi_k3 runs %s: %s", instead, reason)
