"""Short causal depthwise convolution followed by SiLU, with the inputs that the next call needs (torch reference).

    y_t[c] = SiLU(sum_j w[c, 0, j] * u_{t - W + 1 + j}[c])        tap W-1 meets the current token

History before the start of a sequence is zero. Accumulation is float32, the result has the dtype of u.
"""

import torch
import torch.nn.functional as F

from . import dispatch, norms, operators


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
    (y,), new_tails = short_convs((x,), (weight,), None if tail is None else (tail,), cu_seqlens)
    assert new_tails is not None  # kept, unless the call says otherwise
    return y, new_tails[0]


def short_convs(
    inputs: tuple[torch.Tensor, ...],
    weights: tuple[torch.Tensor, ...],
    tails: tuple[torch.Tensor, ...] | None,
    cu_seqlens: torch.Tensor | None = None,
    keep_tails: bool = True,
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...] | None]:
    """`short_conv` of several inputs, each with its weight and tail (None: zeros for all): outputs and new tails.

    Inputs of one shape, stride and dtype are one launch. Without `keep_tails` there are no new tails.
    """
    tails = _in_type(tails, inputs)
    # Compared and not put into a set: a graph for many lengths has shapes that are not numbers.
    kinds = [(x.shape, x.dtype, x.stride(), w.shape, w.dtype) for x, w in zip(inputs, weights, strict=True)]
    if all(kind == kinds[0] for kind in kinds[1:]):
        one = bool(tails) and cu_seqlens is None and inputs[0].shape[1] == 1
        if one and keep_tails and dispatch.operator_refusal(*inputs, *weights) is not None:
            return _one_token(inputs, weights, tails)
        outputs = _outputs(inputs, weights, tails, cu_seqlens)
    else:
        each = _each(inputs, weights, tails)
        outputs = tuple(_outputs((x,), (w,), None if t is None else (t,), cu_seqlens)[0] for x, w, t in each)
    return outputs, _advance_tails(inputs, tails, weights, cu_seqlens) if keep_tails else None


def tails_after(
    inputs: tuple[torch.Tensor, ...],
    tails: tuple[torch.Tensor, ...] | None,
    weights: tuple[torch.Tensor, ...],
    tokens: int,
) -> tuple[torch.Tensor, ...]:
    """The tails that `short_convs` would return of the first `tokens` tokens of a batch without `cu_seqlens`."""
    return _advance_tails(tuple(x[:, :tokens] for x in inputs), _in_type(tails, inputs), weights, None)


def _each(inputs, weights, tails):
    """Every input with its weight and tail; tails None: None for each."""
    return zip(inputs, weights, tails or (None,) * len(inputs), strict=True)


def _in_type(tails, inputs):
    return tails and tuple(norms.cast(tail, x.dtype) for x, tail in zip(inputs, tails, strict=True))


def _advance_tails(inputs, tails, weights, cu_seqlens):
    kinds = [(x.shape, x.dtype, w.shape[-1]) for x, w in zip(inputs, weights, strict=True)]
    (_, length, _), _, width = kinds[0]
    if cu_seqlens is None and length >= width - 1 and all(kind == kinds[0] for kind in kinds[1:]):
        return torch.stack([x[:, length - width + 1 :] for x in inputs]).unbind(0)  # one launch in place of one each
    each = _each(inputs, weights, tails)
    return tuple(advance_tail(x, tail, weight.shape[-1], cu_seqlens) for x, weight, tail in each)


def _outputs(inputs, weights, tails, cu_seqlens):
    """Outputs for inputs of one shape and stride."""
    # The kernel has no gradient for the tails, which only a cache that is trained through would need.
    refusal_of = dispatch.operator_refusal if cu_seqlens is None else dispatch.triton_refusal
    refused = refusal_of(*inputs, *weights)
    if refused is None and not dispatch.needs_grad(*(tails or ())):
        tensors = *map(dispatch.token_rows, inputs), *(x.contiguous() for x in (*weights, *(tails or ())))
        outputs = _OPERATOR.run(tensors, (len(inputs), cu_seqlens))
        if outputs is not None:
            return outputs
    return tuple(_composed(*each, cu_seqlens) for each in _each(inputs, weights, tails))


def _composed(x, weight, tail, cu_seqlens):
    """y of `short_conv` in torch."""
    accumulate = torch.promote_types(x.dtype, torch.float32)
    taps = weight[:, 0].to(accumulate).t()  # [W, P]
    total = None
    for window, tap in zip(_windows(x, weight.shape[-1], tail, cu_seqlens), taps, strict=True):
        total = window.to(accumulate) * tap if total is None else torch.addcmul(total, window.to(accumulate), tap)
    return F.silu(total).to(x.dtype)


def _one_token(inputs, weights, tails):
    """Outputs and new tails of one token each behind a tail, all of one shape: joint torch operators, a few."""
    windows = torch.cat([part for pair in zip(tails, inputs, strict=True) for part in pair], dim=1)
    windows = windows.unflatten(1, (len(inputs), -1))  # [B, n, W, P]
    wide = norms.widened(windows)
    taps = norms.cast(torch.cat(weights, dim=1).permute(1, 2, 0), wide.dtype)  # [n, W, P]
    total = (wide * taps).sum(2, keepdim=True)
    # The tails are views: a joint tensor with one input more.
    return norms.cast(F.silu(total), windows.dtype).unbind(1), windows[:, :, 1:].unbind(1)


def _parted(tensors, count):
    """(inputs, weights, tails or None)."""
    return tensors[:count], tensors[count : 2 * count], tensors[2 * count :] or None


def _forward(tensors, options, _):
    from . import short_conv_triton

    count, cu_seqlens = options
    return short_conv_triton.forward(*_parted(tensors, count), cu_seqlens), ()


def _backward(tensors, _, options, grads):
    from . import short_conv_triton

    count, cu_seqlens = options
    inputs, weights, tails = _parted(tensors, count)
    found = dispatch.run_kernels(short_conv_triton.backward, inputs, weights, tails, cu_seqlens, tuple(grads))
    if found is None:

        def composed(*leaves):
            return [_composed(*each, cu_seqlens) for each in _each(*_parted(leaves, count)[:2], tails)]

        found = dispatch.recomputed(composed, (*inputs, *weights), grads)
    return *found, *(None for _ in tails or ())


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


def _reference(tensors, options):
    count, cu_seqlens = options
    return tuple(_composed(*each, cu_seqlens) for each in _each(*_parted(tensors, count)))


_OPERATOR = operators.Operator(
    "short_convs",
    "int count, Tensor? cu_seqlens",  # which graphs do not have
    _forward,
    _backward,
    _reference,
    fake=lambda tensors, options: [x.new_empty(x.shape) for x in tensors[: options[0]]],
    results=lambda outputs, tensors: tuple(outputs),
)
