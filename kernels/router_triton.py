"""Choice and weights of a token's experts in one kernel: Triton form of `router` (docs/kernels.md)."""

import torch

from . import triton_tools as tools

triton, tl = tools.triton, tools.tl
sigmoid = tools.sigmoid


@triton.jit
def choose_kernel(
    logits, bias, chosen, weights, stride, scaling,
    E: tl.constexpr, BE: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, RENORMALIZE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """One token: the best of what is left, K times; among equals the first."""
    token = tl.program_id(0).to(tl.int64)
    e, slot = tl.arange(0, BE), tl.arange(0, BK)
    score = sigmoid(tl.load(logits + token * stride + e, mask=e < E, other=0.0), PTX)
    choice = score + tl.load(bias + e, mask=e < E, other=0.0).to(tl.float32)
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


def run(logits, bias, top_k, renormalize, scaling):
    """As `router.choose_experts`, whose arguments these are."""
    tokens, experts = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    chosen = torch.empty(tokens, top_k, device=logits.device, dtype=torch.int64)
    weights = torch.empty(tokens, top_k, device=logits.device, dtype=torch.float32)
    choose_kernel[(tokens,)](
        logits, bias, chosen, weights, logits.stride(0), float(scaling),
        experts, triton.next_power_of_2(experts), top_k, triton.next_power_of_2(top_k), renormalize, tools.USE_PTX,
        num_warps=1,
    )  # fmt: skip
    return chosen, weights
