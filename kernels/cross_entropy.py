"""Cross entropy of a language-model head that never holds the logits of all tokens."""

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from . import dispatch

IGNORED = -100


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Gradients are made with the loss, chunk by chunk: what is kept for backward is [T, D] and [V, D]."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, chunk):
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        loss = hidden.new_zeros((), dtype=dtype)
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=dtype) if ctx.needs_input_grad[1] else None
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            h, target = hidden[rows], targets[rows, None]
            counted = target != IGNORED
            target = target.masked_fill(~counted, 0)
            logits = (h @ weight.T).to(dtype)
            normaliser = logits.logsumexp(-1, keepdim=True)
            loss += ((normaliser - logits.gather(-1, target)) * counted).sum()
            # d loss / d logits = softmax - one at the target
            slope = logits.sub_(normaliser).exp_()
            slope.scatter_add_(-1, target, slope.new_full((), -1).expand(target.shape))
            slope = (slope * counted).to(h.dtype)
            grad_hidden[rows] = slope @ weight.to(h.dtype)
            if grad_weight is not None:
                grad_weight += slope.T @ h
        ctx.save_for_backward(grad_hidden, grad_weight, (targets != IGNORED).any())
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        grad_hidden, grad_weight, counted = ctx.saved_tensors
        grad = grad.where(counted, 0.0)  # the mean of no targets has an infinite slope; torch's gradient is 0
        grad_weight = None if grad_weight is None else grad_weight * grad
        return grad_hidden * grad.to(grad_hidden.dtype), grad_weight, None, None


def chunked_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, chunk: int = 1024
) -> torch.Tensor:
    """Sum over tokens of the cross entropy of `hidden @ weight.T`, with at most [chunk, V] logits in memory.

    Args:
        hidden: [T, D].
        weight: [V, D] of the head.
        targets: [T] token ids; -100 is ignored.
        chunk: tokens at a time.

    Returns:
        float32 scalar (float64 for float64 hidden), the sum; divide by the number of targets for the mean.

    Raises:
        ValueError: for a chunk of less than one token, and where targets are not one for each token.
    """
    if not isinstance(chunk, int) or chunk < 1:
        raise ValueError(f"the loss is made in chunks of a whole number of tokens, at least 1, not {chunk!r}")
    if targets.shape != hidden.shape[:1]:
        raise ValueError(f"{targets.numel()} labels do not fit {len(hidden)} tokens")
    return _ChunkedCrossEntropy.apply(hidden, weight, targets, chunk)


def causal_lm_loss(
    hidden: torch.Tensor,
    head: torch.nn.Module,
    labels: torch.Tensor,
    chunk: int,
    num_items_in_batch: torch.Tensor | int | None = None,
    shift_labels: torch.Tensor | None = None,
    ignore_index: int = IGNORED,
    **kwargs: Any,
) -> torch.Tensor:
    """The loss of transformers' `ForCausalLMLoss` from hidden states, `chunk` tokens at a time.

    Args:
        hidden: [B, T, D].
        head: a linear layer without a bias, [V, D].
        labels: [B, T], shifted inside, unless `shift_labels` [B, T] are; `ignore_index` is ignored.
        num_items_in_batch: what the sum is divided by; None: the targets that count.

    Raises:
        ValueError: for a head that is more than its weight, or is spread over processes.
    """
    plain = isinstance(head, torch.nn.Linear) and head.bias is None and not dispatch.is_intercepted(head)
    if not plain or hasattr(head.weight, "device_mesh"):
        raise ValueError(
            f"loss_chunk reads the weight of lm_head alone, and this {type(head).__name__} has an adapter, a bias, a "
            "hook or a weight that processes share: set loss_chunk to None"
        )
    targets = F.pad(labels, (0, 1), value=IGNORED)[..., 1:] if shift_labels is None else shift_labels
    targets = targets.to(hidden.device).flatten()
    targets = targets.masked_fill(targets == ignore_index, IGNORED)
    total = chunked_cross_entropy(hidden.flatten(0, 1), head.weight, targets, chunk)
    count = (targets != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
    return total / (count.to(total.device) if isinstance(count, torch.Tensor) else count)
