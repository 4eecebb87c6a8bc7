"""Operations as registered operators: what torch.compile and torch.export see in place of launches.

Traced, an operation is one node of the graph forward and one backward; what lies between operations is fused as
everywhere. In eager the operation calls its kernels directly, because an operator costs some 10 us a call.

An operator takes what the operation's own `forward` and `backward` take: tensors, of which some may be missing, and
numbers. It returns a list of tensors in memory of their own, contiguous, and computes the torch reference where the
kernels do not run.
"""

import collections
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import dispatch

# The package and a folder's remote code are two copies in a process, and a module may be imported anew: each has
# operators of its own.
_names = (re.sub(r"\W", "_", __name__) + (f"_{n}" if n else "") for n in itertools.count())
NAMESPACE = next(name for name in _names if name not in vars(torch.ops))
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
Tensors = Sequence[torch.Tensor | None]


class Operator:
    """An operation whose gradients are kernels too, in eager and in graphs.

    Attributes:
        forward, backward: as `dispatch.run_differentiable` takes them.
        reference: of the tensors and the options -> the results in torch.
        fake: of the tensors and the options -> the results and what else is kept, without contents, one after another.
        results: of that list, or of the gradients in its place, and the tensors -> the results as `forward` has them.
        kept: of that list -> what `backward` is given beside the tensors.
        constant: positions of tensors that have no gradient.
    """

    def __init__(
        self,
        name: str,
        options: str,
        forward: Callable[..., Any],
        backward: Callable[..., Any],
        reference: Callable[..., Any],
        fake: Callable[..., list[torch.Tensor]],
        results: Callable[..., Any],
        kept: Callable[..., tuple] = lambda outputs: (),
        constant: tuple[int, ...] = (),
    ):
        """`options` are the types of the numbers as a schema has them, such as "float eps, int? count"."""
        self.forward, self.backward, self.reference, self.fake = forward, backward, reference, fake
        self.results, self.kept, self.constant = results, kept, constant
        tensors = "Tensor[] tensors, bool[] present"
        grads = "Tensor[] kept, Tensor[] grads, bool[] given"
        self.call = define(f"{name}({tensors}, {options}) -> Tensor[]", self._run, self._fake)
        self.call_backward = define(
            f"{name}_backward({tensors}, {grads}, {options}) -> Tensor[]", self._run_backward, self._fake_backward
        )
        # What is traced where a gradient is wanted; the graph that comes out of autograd has the two above.
        self.call_differentiable = define(
            f"{name}_differentiable({tensors}, {options}) -> Tensor[]", self.call, self._fake
        )
        _library.impl(f"{name}_differentiable", self._differentiate, "Autograd")

    def run(self, tensors: Tensors, options: tuple) -> Any:
        """The results; None as of `dispatch.run_differentiable`, in eager alone."""
        if torch.compiler.is_compiling():
            present, given = _parted(tensors)
            call = self.call_differentiable if dispatch.needs_grad(*given) else self.call
            return self.results(call(given, present, *options), tensors)
        return dispatch.run_differentiable(self.forward, self.backward, tuple(tensors), options)

    def _run(self, given, present, *options):
        tensors = _joined(given, present)
        found = None
        if dispatch.triton_refusal(*given) is None:
            found = dispatch.run_kernels(self.forward, tensors, options, True)
        if found is not None:
            results, kept = found
            outputs = [x for x in ((results,) if isinstance(results, torch.Tensor) else results) if x is not None]
            return own(outputs + [x for x in kept if not any(x is result for result in outputs)], given)
        outputs = [x for x in self._composed(tensors, options) if x is not None]
        return own([*outputs, *(torch.zeros_like(x) for x in self.fake(tensors, options)[len(outputs) :])], given)

    def _composed(self, tensors, options):
        results = self.reference(tensors, options)
        return (results,) if isinstance(results, torch.Tensor) else results

    def _fake(self, given, present, *options):
        return self.fake(_joined(given, present), options)

    def _run_backward(self, given, present, kept, grads, has_grad, *options):
        tensors = _joined(given, present)
        grads = self.results([x if x is None else x.contiguous() for x in _joined(grads, has_grad)], tensors)
        grads = [grads] if isinstance(grads, torch.Tensor) else list(grads)
        if dispatch.triton_refusal(*given) is None:
            found = self.backward(tensors, tuple(kept), options, grads)
        else:
            found = dispatch.recomputed(lambda *leaves: self._composed(leaves, options), tensors, grads)
        wanted = [(x, tensors[i]) for i, x in enumerate(found) if tensors[i] is not None and i not in self.constant]
        return own([torch.zeros_like(x) if grad is None else grad for grad, x in wanted], (*given, *kept, *grads))

    def _fake_backward(self, given, present, kept, grads, has_grad, *options):
        tensors = _joined(given, present)
        return [x.new_empty(x.shape) for i, x in enumerate(tensors) if x is not None and i not in self.constant]

    def _differentiate(self, given, present, *options):
        return list(_Differentiable.apply(self, present, options, *given))


class _Differentiable(torch.autograd.Function):
    """Both directions as operators."""

    @staticmethod
    def forward(ctx, operator, present, options, *given):
        with torch._C._AutoDispatchBelowAutograd():
            outputs = operator.call(list(given), present, *options)
        ctx.operator, ctx.present, ctx.options, ctx.count = operator, present, options, len(given)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(x for x in outputs if not x.is_floating_point()))
        ctx.save_for_backward(*given, *operator.kept(outputs))
        return tuple(outputs)

    @staticmethod
    def backward(ctx, *grads):
        operator, saved, count = ctx.operator, ctx.saved_tensors, ctx.count
        has_grad, grads = _parted(grads)
        found = iter(operator.call_backward(saved[:count], ctx.present, saved[count:], grads, has_grad, *ctx.options))
        places = [i for i, is_there in enumerate(ctx.present) if is_there]
        return None, None, None, *(None if i in operator.constant else next(found) for i in places)


def define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """A registered operator of this schema: what computes it, and the shapes of what it returns."""
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def own(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """The outputs as graphs want them: contiguous, at multiples of 16 bytes, each in a storage of its own.

    torch allows no storage of an input's, and none of another output's, disjoint as the two may be.
    """
    tensors = [x.contiguous() for x in outputs]
    holders = collections.Counter(_storage(x) for x in (*inputs, *tensors) if x is not None)
    return [x.clone() if x.data_ptr() % 16 or holders[_storage(x)] > 1 else x for x in tensors]


def _storage(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _parted(tensors: Tensors) -> tuple[list[bool], list[torch.Tensor]]:
    """Which tensors there are, and these: a list with gaps has no gradients."""
    return [x is not None for x in tensors], [x for x in tensors if x is not None]


def _joined(given: Sequence[torch.Tensor], present: Sequence[bool]) -> tuple[torch.Tensor | None, ...]:
    rest = iter(given)
    return tuple(next(rest) if is_there else None for is_there in present)
