"""How far two right programs may lie apart, and why.

Two programs that compute one thing round at other places: they add in another order (the width of a processor's
registers, the number of threads, rows at once or alone), or split a product. A network makes more of it. On the golden
checkpoints another order of the sums, which is a unit in the last place of float32 (2^-24 = 6e-8) here and there, moves
single logits by up to 4e-4 and single gradients of embeddings by 5e-2: by 1e4 and 1e6 units. And a token whose experts
score alike to the last digits goes to others, and nothing is close any more. No limit for float32 follows from that:
one that holds on every processor lets wrong code through.

So one program is compared with another in float64. A unit is 2^-53 = 1.1e-16 there, 1e4 and 1e6 of them are 1e-12 and
1e-10, and the scores of experts, of which no two that matter are closer than 1e-5 in these tests, keep their order.
What float32 itself does to a result is compared as a whole, with what a unit in every weight does to it.
"""

import copy
from collections.abc import Callable

import torch

# For what float64 models compute. A program that computes something else is far outside, be it by a sum in float32.
EXACT = {"atol": 1e-9, "rtol": 1e-9}


def rms(tensor: torch.Tensor) -> float:
    """Root of the mean square, over all elements."""
    return tensor.double().square().mean().sqrt().item()


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """RMS of the difference over the RMS of what is expected."""
    return rms(got.double() - expected.double()) / max(rms(expected), 1e-30)


def rms_of_float32(model: torch.nn.Module, compute: Callable) -> float:
    """Limit of the RMS error of `compute(model.float())` against `compute(model)`.

    A float32 program rounds each product and each sum, which is as if every weight had moved by a unit or two. So the
    limit is eight times what a move of every weight by one unit, up or down by chance, does to the result.

    Args:
        model: in float64.
        compute: takes a model, returns a tensor.
    """
    moved, chance = copy.deepcopy(model), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in moved.parameters():
            if parameter.is_floating_point():
                up_or_down = 2 * torch.randint(2, parameter.shape, generator=chance) - 1
                parameter.mul_(1 + 2**-24 * up_or_down.to(parameter.device, parameter.dtype))
    return 8 * rms(compute(moved) - compute(model))
