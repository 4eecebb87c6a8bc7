"""Short causal depthwise convolution followed by SiLU, with the inputs that the next call needs (torch reference).

    y_t[c] = SiLU(sum_j w[c, 0, j] * u_{t - W + 1 + j}[c])        tap W-1 meets the current token

History before the start of a sequence is zero. Accumulation is float32, the result has the dtype of u.
"""

import torch
import torch.nn.functional as F

from . import dispatch


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
    width = weight.shape[-1]
    if tail is not None:
        tail = tail.to(x.dtype)
    new_tail = advance_tail(x, tail, width, cu_seqlens)
    # The kernel has no gradient for the tail, which only a cache that is trained through would need.
    if dispatch.triton_refusal(x, weight) is None and not (tail is not None and tail.requires_grad):
        function = _ShortConv.apply if dispatch.needs_grad(x, weight) else _forward
        y = dispatch.run_kernels(function, x, weight, tail, cu_seqlens)
        if y is not None:
            return y, new_tail
    return _composed(x, weight, tail, cu_seqlens), new_tail


def short_convs(
    inputs: tuple[torch.Tensor, ...],
    weights: tuple[torch.Tensor, ...],
    tails: tuple[torch.Tensor, ...] | None,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """`short_conv` of several inputs, each with its weight and tail (None: zeros for all): outputs and new tails."""
    alike = len({(x.shape, x.dtype, x.stride(), w.shape) for x, w in zip(inputs, weights, strict=True)}) == 1
    if (
        alike
        and not dispatch.needs_grad(*inputs, *weights, *(tails or ()))
        and dispatch.triton_refusal(*inputs, *weights) is None
    ):  # one launch for all
        old = tails and tuple(tail.to(x.dtype) for x, tail in zip(inputs, tails, strict=True))
        outputs = dispatch.run_kernels(_forward_all, inputs, weights, old, cu_seqlens)
        if outputs is not None:
            return outputs, _advance_tails(inputs, old, weights, cu_seqlens)
    tails = tails or (None,) * len(inputs)
    results = [short_conv(x, w, tail, cu_seqlens) for x, w, tail in zip(inputs, weights, tails, strict=True)]
    outputs, new_tails = zip(*results, strict=True)
    return outputs, new_tails


def tails_after(
    inputs: tuple[torch.Tensor, ...],
    tails: tuple[torch.Tensor, ...] | None,
    weights: tuple[torch.Tensor, ...],
    tokens: int,
) -> tuple[torch.Tensor, ...]:
    """The tails that `short_convs` would return of the first so many tokens of a batch without `cu_seqlens`."""
    return _advance_tails(tuple(x[:, :tokens] for x in inputs), tails, weights)


def _advance_tails(inputs, tails, weights, cu_seqlens=None):
    """`advance_tail` of several inputs; tails None: zeros for all."""
    return tuple(
        advance_tail(x, None if tail is None else tail.to(x.dtype), weight.shape[-1], cu_seqlens)
        for x, tail, weight in zip(inputs, tails or (None,) * len(inputs), weights, strict=True)
    )


def _composed(x, weight, tail, cu_seqlens):
    """y of `short_conv` in torch."""
    accumulate = torch.promote_types(x.dtype, torch.float32)
    taps = weight[:, 0].to(accumulate).t()  # [W, P]
    total = None
    for window, tap in zip(_windows(x, weight.shape[-1], tail, cu_seqlens), taps, strict=True):
        total = window.to(accumulate) * tap if total is None else torch.addcmul(total, window.to(accumulate), tap)
    return F.silu(total).to(x.dtype)


def _forward_all(inputs, weights, tails, cu_seqlens):
    from . import short_conv_triton

    inputs = tuple(map(dispatch.token_rows, inputs))
    tails = tails and tuple(tail.contiguous() for tail in tails)
    return short_conv_triton.forward(inputs, tuple(weight.contiguous() for weight in weights), tails, cu_seqlens)


def _forward(x, weight, tail, cu_seqlens):
    return _forward_all((x,), (weight,), None if tail is None else (tail,), cu_seqlens)[0]


class _ShortConv(torch.autograd.Function):
    """The Triton kernels; the backward pass recomputes from the inputs."""

    @staticmethod
    def forward(ctx, x, weight, tail, cu_seqlens):
        x = dispatch.token_rows(x)
        tail = None if tail is None else tail.contiguous()
        ctx.save_for_backward(x, weight, tail, cu_seqlens)
        return _forward(x, weight, tail, cu_seqlens)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        from . import short_conv_triton

        x, weight, tail, cu_seqlens = ctx.saved_tensors
        arguments = (x, weight.contiguous(), tail, cu_seqlens)
        grads = dispatch.run_kernels(short_conv_triton.backward, *arguments, dy.contiguous())
        if grads is None:
            leaves = x.detach().requires_grad_(), weight.detach().requires_grad_()
            with torch.enable_grad():
                grads = torch.autograd.grad(_composed(*leaves, tail, cu_seqlens), leaves, dy)
        return *grads, None, None


def advance_tail(
    x: torch.Tensor, tail: torch.Tensor | None, width: int, cu_seqlens: torch.Tensor | None = None
) -> torch.Tensor:
    """The last W - 1 inputs after x [B, T, P], as `short_conv` returns them; tail [N, W - 1, P] or None."""
    length, history = x.shape[1], width - 1
    if cu_seqlens is None:
        if length < history:
            before = x.new_zeros(x.shape[0], history, x.shape[2]) if tail is None else tail
            return torch.cat([before[:, length:], x], dim=1)
        # cloned: a view would keep the inputs of a whole prompt alive in the cache
        return x[:, length - history :].clone()
    starts, ends = cu_seqlens[:-1, None], cu_seqlens[1:, None]
    rows = ends - history + torch.arange(history, device=x.device)  # [N, W - 1]
    new = x[0][rows.clamp(0, max(length - 1, 0))] if length else x.new_zeros(*rows.shape, x.shape[2])
    if tail is None:
        return new.masked_fill((rows < starts)[..., None], 0)
    old = tail.gather(1, (rows - starts + history).clamp(0, history - 1)[..., None].expand_as(new))
    return torch.where((rows >= starts)[..., None], new, old)


def _windows(x, width, tail, cu_seqlens):
    """An iterator over the W shifted views of x that the taps meet."""
    batch, length, channels = x.shape
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if tail is None:
        tail = x.new_zeros(sequences, width - 1, channels)
    if cu_seqlens is None:
        extended = torch.cat([tail, x], dim=1)
        return (extended[:, j : j + length] for j in range(width))
    # Every sequence gets its W - 1 rows of history in front: row t of sequence s moves to t + (s + 1)(W - 1).
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    sequence = torch.repeat_interleave(torch.arange(sequences, device=x.device), lengths, output_size=length)
    token_rows = torch.arange(length, device=x.device) + (sequence + 1) * (width - 1)
    history = torch.arange(width - 1, device=x.device)
    starts = cu_seqlens[:-1] + torch.arange(sequences, device=x.device) * (width - 1)
    rows = torch.cat([token_rows, (starts[:, None] + history).flatten()])
    extended = x.new_zeros(length + sequences * (width - 1), channels)
    extended = extended.index_copy(0, rows, torch.cat([x[0], tail.flatten(0, 1)]))
    return (extended[token_rows - (width - 1) + j][None] for j in range(width))
