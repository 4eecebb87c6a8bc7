"""What the Gluon kernels share: Triton's lower layer, in which it is said which warps do what and wait for whom.

Gluon is experimental, and releases rename things: a module that imports this one says so by an ImportError, an
AttributeError or a TypeError where this Triton has it not, or under other names (`dispatch.if_importable`).
"""

import functools

from . import dispatch
from . import triton_tools as tools

triton = tools.triton
if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 6):  # Gluon was there, with other names and arguments
    raise ImportError(f"Gluon as it is used here came with Triton 3.6, this is {triton.__version__}")
try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonJITFunction
    from triton.experimental.gluon.language.nvidia import hopper
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
except ImportError as error:
    raise ImportError("this Triton has no Gluon for Hopper") from error

fence, mbarrier = hopper.fence_async_shared, hopper.mbarrier
mma, mma_wait = hopper.warpgroup_mma, hopper.warpgroup_mma_wait
# As newer releases of Triton call them, and older ones: a barrier of a group's warps, and a bulk copy.
synchronize = getattr(gl, "barrier", None) or gl.thread_barrier
load = getattr(hopper.tma, "async_load", None) or hopper.tma.async_copy_global_to_shared
# Where a bulk copy leaves a tile of half precision, as products of four warps read it.
SHARED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


class Kernel(GluonJITFunction):
    """As `triton_tools.Kernel`."""

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.run(*args, grid=grid, warmup=dispatch.is_compiling_only(), **kwargs)


def jit(**options):
    """`gluon.jit` for what is launched."""
    return functools.partial(Kernel, **options)


def described(matrix, rows: int, columns: int, layout):
    """A matrix for bulk copies of [rows, columns], which come to lie in the layout."""
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns], layout)


__all__ = [
    "SHARED", "TensorDescriptor", "described", "fence", "gl", "gluon", "jit", "load", "mbarrier", "mma", "mma_wait",
    "synchronize",
]  # fmt: skip
