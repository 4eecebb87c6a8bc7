"""Triton's interpreter with right bfloat16, and without what it does again at every call of a function in a kernel."""

import numpy
from triton import language as tl
from triton.runtime import interpreter

Builder, Handle = interpreter.InterpreterBuilder, interpreter.TensorHandle


def patch_once_a_launch() -> None:
    """Have a launch replace the language's functions once for all functions of a module that it calls.

    The interpreter does so at each call, one or two milliseconds that are most of what a small kernel takes. What it
    replaces stays replaced until the launch ends.
    """
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    done = set()

    def patch_new(function):
        module = function.__globals__["__name__"]
        if module not in done:
            done.add(module)
            return patch(function)

    def launch_anew(*args, **kwargs):
        done.clear()
        return launch(*args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_new, launch_anew


def wide(x: Handle) -> Handle:
    """A bfloat16, whose bits are all that the interpreter has, as float32; anything else as it is."""
    if x.dtype.scalar != tl.bfloat16:
        return x
    return Handle((x.data.astype(numpy.uint32) << 16).view(numpy.float32), tl.float32)


def rounded(x: Handle) -> Handle:
    """float32 to the nearest bfloat16, of two as near the even one."""
    bits = numpy.ascontiguousarray(x.data).view(numpy.uint32)
    high = (bits + numpy.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    return Handle(numpy.where(numpy.isnan(x.data), 0x7FC0, high).astype(numpy.uint16), tl.bfloat16)


def compute_bfloat16() -> None:
    """Numbers of bfloat16 are added and multiplied as such: the interpreter takes their bits for integers, and cuts
    them off where they come from float32."""
    binary, cast, dot = Builder.binary_op, Builder.cast_impl, Builder.create_dot

    def binary_op(self, left, right, op):
        if left.dtype.scalar != tl.bfloat16:
            return binary(self, left, right, op)
        found = binary(self, wide(left), wide(right), op)
        return found if found.data.dtype == bool else rounded(found)

    def cast_impl(self, x, kind):
        if kind.scalar == tl.bfloat16 and x.dtype.scalar != tl.bfloat16:
            return rounded(cast(self, x, tl.float32))
        return cast(self, wide(x), kind) if kind.scalar != tl.bfloat16 else x

    def create_dot(self, left, right, *rest):
        return dot(self, wide(left), wide(right), *rest)

    Builder.binary_op, Builder.cast_impl, Builder.create_dot = binary_op, cast_impl, create_dot
