"""Choice and weights of a token's experts in one kernel each way: Triton form of `router` (docs/kernels.md)."""

import torch

from . import triton_tools as tools

triton, tl = tools.triton, tools.tl
exp, sigmoid = tools.exp, tools.sigmoid


@triton.jit
def scores_of(logit, here, SOFTMAX: tl.constexpr, PTX: tl.constexpr):
    """Scores [BE] of a token's logits [BE]; zero where no expert is `here`, in a softmax."""
    if SOFTMAX:
        logit = tl.where(here, logit, -float("inf"))
        score = exp(logit - tl.max(logit, axis=0), PTX)
        score /= tl.sum(score, axis=0)
    else:
        score = sigmoid(logit, PTX)
    return score


@tools.jit
def choose_kernel(
    logits, bias, chosen, weights, stride, scaling, E: tl.constexpr, BE: tl.constexpr, K: tl.constexpr,
    BK: tl.constexpr, SOFTMAX: tl.constexpr, RENORMALIZE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """One token: the best of what is left, K times; among equals the first."""
    token = tl.program_id(0).to(tl.int64)
    e, slot = tl.arange(0, BE), tl.arange(0, BK)
    score = scores_of(tl.load(logits + token * stride + e, mask=e < E, other=0.0), e < E, SOFTMAX, PTX)  # [BE]
    choice = score + tl.load(bias + e, mask=e < E, other=0.0).to(tl.float32)  # [BE]
    # What was chosen becomes -inf: an expert that a bias of -inf forbids stays above it.
    choice = tl.where(e < E, tl.maximum(choice, -3.0e38), -float("inf"))
    ids, picked = tl.zeros((BK,), tl.int32), tl.zeros((BK,), tl.float32)
    for n in range(K):
        # NaN compares with nothing, so that the place of one may be past the last expert.
        best = tl.minimum(tl.argmax(choice, axis=0), E - 1)
        here = e == best
        ids = tl.where(slot == n, best, ids)
        picked = tl.where(slot == n, tl.sum(tl.where(here, score, 0.0), axis=0), picked)
        choice = tl.where(here, -float("inf"), choice)
    if RENORMALIZE:
        picked /= tl.sum(picked, axis=0) + 1e-20
    at = token * K + slot
    tl.store(chosen + at, ids.to(tl.int64), mask=slot < K)
    tl.store(weights + at, picked * scaling, mask=slot < K)


@tools.jit
def choose_backward_kernel(
    logits, chosen, d_weights, d_logits, stride, scaling, E: tl.constexpr, BE: tl.constexpr, K: tl.constexpr,
    BK: tl.constexpr, SOFTMAX: tl.constexpr, RENORMALIZE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """One token: the gradient of its logits, with a sigmoid zero but for those of the chosen experts."""
    token = tl.program_id(0).to(tl.int64)
    e, slot = tl.arange(0, BE), tl.arange(0, BK)
    at, mask = token * K + slot, slot < K
    ids = tl.load(chosen + at, mask=mask, other=0).to(tl.int32)
    if SOFTMAX:
        every = scores_of(tl.load(logits + token * stride + e, mask=e < E, other=0.0), e < E, SOFTMAX, PTX)  # [BE]
        score = tl.zeros((BK,), tl.float32)
        for n in range(K):
            expert = tl.sum(tl.where(slot == n, ids, 0), axis=0)
            score = tl.where(slot == n, tl.sum(tl.where(e == expert, every, 0.0), axis=0), score)
    else:
        logit = tl.load(logits + token * stride + ids, mask=mask, other=0.0)  # [BK]
        score = tl.where(mask, sigmoid(logit, PTX), 0.0)
    grad = tl.load(d_weights + at, mask=mask, other=0.0) * scaling  # [BK]
    if RENORMALIZE:
        total = tl.sum(score, axis=0) + 1e-20
        grad = (grad - tl.sum(grad * score, axis=0) / total) / total
    if not SOFTMAX:
        grad *= score * sigmoid(-logit, PTX)  # 1 - sigmoid would lose a saturated score
    row = tl.zeros((BE,), tl.float32)
    for n in range(K):
        here = slot == n
        expert = tl.sum(tl.where(here, ids, 0), axis=0)
        row += tl.where(e == expert, tl.sum(tl.where(here, grad, 0.0), axis=0), 0.0)
    if SOFTMAX:
        row = every * (row - tl.sum(grad * score, axis=0))
    tl.store(d_logits + token * E + e, row, mask=e < E)


def run(logits, bias, top_k, activation, renormalize, scaling):
    """As `router.choose_experts`, whose arguments these are."""
    tokens, experts = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    chosen = torch.empty(tokens, top_k, device=logits.device, dtype=torch.int64)
    weights = torch.empty(tokens, top_k, device=logits.device, dtype=torch.float32)
    choose_kernel[(tokens,)](
        logits=logits, bias=bias, chosen=chosen, weights=weights, stride=logits.stride(0), scaling=float(scaling),
        E=experts, BE=tools.next_power_of_2(experts), K=top_k, BK=tools.next_power_of_2(top_k),
        SOFTMAX=activation == "softmax", RENORMALIZE=renormalize, PTX=tools.USE_PTX, num_warps=1,
    )  # fmt: skip
    return chosen, weights


def backward(logits, chosen, d_weights, activation, renormalize, scaling):
    """Gradient of the logits [T, E] float32 from that of the weights [T, K], contiguous."""
    (tokens, experts), top_k = logits.shape, chosen.shape[1]
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    d_logits = torch.empty(tokens, experts, device=logits.device, dtype=torch.float32)
    choose_backward_kernel[(tokens,)](
        logits=logits, chosen=chosen, d_weights=d_weights, d_logits=d_logits, stride=logits.stride(0),
        scaling=float(scaling), E=experts, BE=tools.next_power_of_2(experts), K=top_k,
        BK=tools.next_power_of_2(top_k), SOFTMAX=activation == "softmax", RENORMALIZE=renormalize,
        PTX=tools.USE_PTX, num_warps=1,
    )  # fmt: skip
    return d_logits
