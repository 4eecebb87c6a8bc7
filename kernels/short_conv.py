"""Short causal depthwise convolution followed by SiLU, with the inputs that the next call needs (torch reference).

    y_t[c] = SiLU(sum_j w[c, 0, j] * u_{t - W + 1 + j}[c])        tap W-1 meets the current token

History before the start of a sequence is zero. Accumulation is float32, the result has the dtype of u.
"""

import torch
import torch.nn.functional as F


def short_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    tail: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convolve every sequence on its own.

    Args:
        x: [B, T, P] inputs.
        weight: [P, 1, W].
        tail: [N, W - 1, P], the inputs before the first one, zeros when None. N is B, or the number of sequences.
        cu_seqlens: [N + 1] offsets of the sequences inside T (B must be 1).

    Returns:
        y [B, T, P] in the dtype of x, and the last W - 1 inputs of every sequence [N, W - 1, P] in the dtype of x.
    """
    windows, new_tail = _windows(x, weight.shape[-1], tail, cu_seqlens)
    accumulate = torch.promote_types(x.dtype, torch.float32)
    taps = weight[:, 0].to(accumulate).t()  # [W, P]
    total = None
    for window, tap in zip(windows, taps, strict=True):
        total = window.to(accumulate) * tap if total is None else torch.addcmul(total, window.to(accumulate), tap)
    return F.silu(total).to(x.dtype), new_tail


def advance_tail(x: torch.Tensor, tail: torch.Tensor, cu_seqlens: torch.Tensor | None = None) -> torch.Tensor:
    """The last W - 1 inputs after x, as `short_conv` returns them, without convolving; tail [N, W - 1, P]."""
    return _windows(x, tail.shape[1] + 1, tail, cu_seqlens)[1]


def _windows(x, width, tail, cu_seqlens):
    """An iterator over the W shifted views of x that the taps meet, and the new tail."""
    batch, length, channels = x.shape
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if tail is None:
        tail = x.new_zeros(sequences, width - 1, channels)
    tail = tail.to(x.dtype)
    if cu_seqlens is None:
        extended = torch.cat([tail, x], dim=1)
        # cloned: a view would keep the inputs of a whole prompt alive in the cache
        return (extended[:, j : j + length] for j in range(width)), extended[:, length:].clone()
    # Every sequence gets its W - 1 rows of history in front: row t of sequence s moves to t + (s + 1)(W - 1).
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    sequence = torch.repeat_interleave(torch.arange(sequences, device=x.device), lengths, output_size=length)
    token_rows = torch.arange(length, device=x.device) + (sequence + 1) * (width - 1)
    ends = cu_seqlens[1:] + torch.arange(1, sequences + 1, device=x.device) * (width - 1)
    history = torch.arange(width - 1, device=x.device)
    starts = cu_seqlens[:-1] + torch.arange(sequences, device=x.device) * (width - 1)
    rows = torch.cat([token_rows, (starts[:, None] + history).flatten()])
    extended = x.new_zeros(length + sequences * (width - 1), channels)
    extended = extended.index_copy(0, rows, torch.cat([x[0], tail.flatten(0, 1)]))
    windows = (extended[token_rows - (width - 1) + j][None] for j in range(width))
    return windows, extended[ends[:, None] - (width - 1) + history]
