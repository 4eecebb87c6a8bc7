"""What the Triton kernels share: fast exponentials, and where they can run."""

import functools
import os

import torch

from . import dispatch

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("the Triton kernels need the package triton (pip install 'kimi_k3[triton]')") from error

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# PTX in place of the portable form, which spends four more instructions on results below 2^-126.
USE_PTX = not INTERPRETED and torch.version.hip is None


class Kernel(triton.runtime.JITFunction):
    """A kernel whose launches compile and do not run, where `ahead.py` asks for it."""

    def __getitem__(self, grid):
        # Not around `run`, where the keywords of every launch would be unpacked once more (3 us with two dozens).
        return lambda *args, **kwargs: self.run(*args, grid=grid, warmup=dispatch.is_compiling_only(), **kwargs)


def jit(function=None, **options):
    """`triton.jit` for what is launched; functions that kernels call are `triton.jit`'s."""
    if function is None:
        return functools.partial(jit, **options)
    return triton.jit(**options)(function) if INTERPRETED else Kernel(function, **options)


@triton.jit
def exp2(x, PTX: tl.constexpr):
    """2^x in float32; with PTX, results below 2^-126 are zero."""
    if PTX:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    return tl.exp2(x)


@triton.jit
def reciprocal(x, PTX: tl.constexpr):
    """1 / x in float32, to one unit in the last place."""
    if PTX:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    return 1.0 / x


@triton.jit
def in_base_2(x):
    """A natural logarithm as one to base 2.

    The factor is written out: a constant that kernels read from their module is compared at every launch (0.8 us).
    """
    return x * 1.4426950408889634


@triton.jit
def exp(x, PTX: tl.constexpr):
    return exp2(in_base_2(x), PTX)


@triton.jit
def sigmoid(x, PTX: tl.constexpr):
    return reciprocal(1.0 + exp2(x * -1.4426950408889634, PTX), PTX)


@triton.jit
def tanh(x, PTX: tl.constexpr):
    """In float32; near zero by its series, because 2 sigmoid(2x) - 1 keeps no digits of a small x."""
    y = x * x
    series = x * (1.0 + y * (-1.0 / 3 + y * (2.0 / 15 + y * (-17.0 / 315 + y * (62.0 / 2835)))))
    return tl.where(y < 0.0625, series, 2.0 * sigmoid(2.0 * x, PTX) - 1.0)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    if device.type == "cpu":  # the interpreter
        return 1
    return getattr(torch.get_device_module(device).get_device_properties(device), "multi_processor_count", 64)


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Whether the GPU has the products of four warps, which came and went with NVIDIA's compute capability 9."""
    found = dispatch.capability(device) if USE_PTX else None
    return found is not None and found[0] == 9


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that one program may have."""
    if device.type == "cpu":  # the interpreter
        return 2**20
    index = torch.get_device_module(device).current_device() if device.index is None else device.index
    return triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"]


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. (Triton's own serves kernels as well, and takes ten times as long on the host.)"""
    return -(-a // b)


@functools.cache
def next_power_of_2(size: int) -> int:
    """The smallest one from `size` on, for a size of 1 at least."""
    return 1 << (size - 1).bit_length()


def rows(x: torch.Tensor) -> torch.Tensor:
    """[n, D] with columns side by side, a view of x [..., D] where there is one."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 or x.shape[-1] == 1 else flat.contiguous()


@functools.cache
def block(size: int) -> int:
    """Smallest power of two that holds `size` and that a tensor core product accepts."""
    return max(16, next_power_of_2(size))


def operand_types(dtype: torch.dtype):
    """Triton types of a kernel's matrix operands and of its triangular inverse for inputs of `dtype`.

    float32 computes in float32. Both half precisions multiply bfloat16, because the decay factors span its range; the
    entries of the inverse are at most about 1, so float16 holds them with three more bits.
    """
    return (tl.float32, tl.float32) if dtype == torch.float32 else (tl.bfloat16, tl.float16)
