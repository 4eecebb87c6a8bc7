"""Which experts a token goes to, and with what weights (torch reference and dispatch)."""

import functools
from collections.abc import Callable

import torch

from . import dispatch, operators

# The most experts that one program of the Triton kernel holds.
MAX_EXPERTS = 4096
# What makes scores of logits.
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sigmoid": torch.sigmoid,
    "softmax": functools.partial(torch.softmax, dim=-1),
}


def choose_experts(
    logits: torch.Tensor,
    bias: torch.Tensor,
    top_k: int,
    renormalize: bool,
    scaling: float,
    groups: int = 1,
    kept_groups: int = 1,
    activation: str = "sigmoid",
) -> tuple[torch.Tensor, torch.Tensor]:
    """The bias decides which experts are chosen, never how they are weighted (Kimi K3 report, p. 8).

    Args:
        logits: [T, E] float32 or wider.
        bias: [E].
        top_k: experts of a token.
        renormalize: whether the weights of a token are divided by their sum.
        scaling: of the weights.
        groups, kept_groups: number of groups that the experts are in, and of those that experts can be chosen from: the
            groups whose two best experts score highest together.
        activation: of the logits, one of `ACTIVATIONS`.

    Returns:
        chosen [T, top_k] int64 in no fixed order, and their weights [T, top_k] in the dtype of the logits.
    """
    plain = groups == kept_groups and logits.dtype == torch.float32 and 0 < logits.shape[-1] <= MAX_EXPERTS
    if plain and dispatch.operator_refusal(logits, bias) is None and len(logits):
        results = _OPERATOR.run((logits, bias), (top_k, activation, renormalize, float(scaling)))
        if results is not None:
            return results
    return _composed(logits, bias, top_k, activation, renormalize, scaling, groups, kept_groups)


def _composed(logits, bias, top_k, activation, renormalize, scaling, groups, kept_groups):
    scores = expert_scores(logits, activation)
    choice = _limit_groups(scores.detach() + bias.to(logits.dtype), groups, kept_groups)
    chosen = choice.topk(top_k, dim=-1, sorted=False).indices
    return chosen, _weigh(scores.gather(-1, chosen), renormalize, scaling)


def expert_scores(logits: torch.Tensor, activation: str) -> torch.Tensor:
    """Scores [T, E] of logits [T, E]: of each expert alone (`sigmoid`), or shares of the token (`softmax`)."""
    return ACTIVATIONS[activation](logits)


def weigh_experts(
    logits: torch.Tensor, chosen: torch.Tensor, renormalize: bool, scaling: float, activation: str = "sigmoid"
) -> torch.Tensor:
    """Weights [T, k] of experts [T, k] that somebody else has chosen; the other arguments are `choose_experts`'."""
    return _weigh(expert_scores(logits, activation).gather(-1, chosen), renormalize, scaling)


def _weigh(scores, renormalize, scaling):
    """Weights of the chosen experts from their scores."""
    if renormalize:
        scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    return scores if scaling == 1.0 else scores * scaling


def _limit_groups(choice, groups, kept):
    if groups == kept:
        return choice
    grouped = choice.unflatten(-1, (groups, -1))
    best = grouped.topk(2, dim=-1).values.sum(-1).topk(kept, dim=-1, sorted=False).indices
    dropped = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, False)
    return grouped.masked_fill(dropped[..., None], float("-inf")).flatten(-2)


def _forward(tensors, options, _):
    from . import router_triton

    chosen, weights = router_triton.run(*tensors, *options)
    return (chosen, weights), (chosen,)


def _backward(tensors, kept, options, grads):
    from . import router_triton

    (logits, _), (chosen,), (_, activation, *numbers), (_, d_weights) = tensors, kept, options, grads
    grad = dispatch.run_kernels(router_triton.backward, logits, chosen, d_weights, activation, *numbers)
    if grad is None:

        def weights_of(logits):
            return (weigh_experts(logits, chosen, *numbers, activation),)

        (grad,) = dispatch.recomputed(weights_of, [logits], [d_weights])
    return grad, None


def _reference(tensors, options):
    return _composed(*tensors, *options, groups=1, kept_groups=1)


def _fake(tensors, options):
    (logits, _), (top_k, *_) = tensors, options
    chosen = logits.new_empty(len(logits), top_k, dtype=torch.int64)
    return [chosen, logits.new_empty(chosen.shape)]


_OPERATOR = operators.Operator(
    "choose_experts",
    "int top_k, str activation, bool renormalize, float scaling",
    _forward,
    _backward,
    _reference,
    _fake,
    results=lambda outputs, tensors: tuple(outputs),
    kept=lambda outputs: (outputs[0],),
    constant=(1,),
)
