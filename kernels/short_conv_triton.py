"""Short causal depthwise convolution with SiLU: Triton forward and backward.

One program handles 32 tokens of 128 channels; the W shifted reads of a block hit the cache. Tokens are numbered through
all rows of a batch, and every token knows the sequence that it belongs to.
"""

import torch

from . import triton_tools as tools

triton, tl = tools.triton, tools.tl
sigmoid = tools.sigmoid

BLOCK_T, BLOCK_P = 32, 128


@triton.jit
def bounds(token, tokens, T, cu_seqlens, sequence_of, VARLEN: tl.constexpr):
    """Sequence of every token, and its first token and its end."""
    inside = token < tokens
    if VARLEN:
        n = tl.load(sequence_of + token, mask=inside, other=0).to(tl.int64)
        return n, tl.load(cu_seqlens + n).to(tl.int64), tl.load(cu_seqlens + n + 1).to(tl.int64)
    n = token // T
    return n, n * T, (n + 1) * T


@triton.jit
def load_input(x, tail, token, n, first, c, mask, stride_x, P, W: tl.constexpr, HAS_TAIL: tl.constexpr):
    """Inputs [tokens, channels] float32 at `token`, from the tail where that is before the sequence."""
    known = token >= first
    value = tl.load(x + token[:, None] * stride_x + c[None, :], mask=mask & known[:, None], other=0.0).to(tl.float32)
    if HAS_TAIL:
        row = n * (W - 1) + (token - first + W - 1)
        older = mask & ((token < first) & (token >= first - (W - 1)))[:, None]
        value += tl.load(tail + row[:, None] * P + c[None, :], mask=older, other=0.0).to(tl.float32)
    return value


@triton.jit
def chosen(tensors, N: tl.constexpr):
    """The one of N tensors that the program belongs to."""
    tensor = tensors[0]
    for i in tl.static_range(1, N):
        if tl.program_id(2) == i:
            tensor = tensors[i]
    return tensor


@tools.jit(do_not_specialize=["tokens", "T"])
def conv_kernel(
    xs, weights, tails, ys, cu_seqlens, sequence_of, tokens, T, P, stride_x,
    N: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, BP: tl.constexpr, VARLEN: tl.constexpr, HAS_TAIL: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """N inputs of one shape, each with its weight and tail; a program belongs to one of them."""
    token = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    c = tl.program_id(1) * BP + tl.arange(0, BP)
    n, first, _ = bounds(token, tokens, T, cu_seqlens, sequence_of, VARLEN)
    x, weight, tail, y = chosen(xs, N), chosen(weights, N), chosen(tails, N), chosen(ys, N)
    mask = (token < tokens)[:, None] & (c < P)[None, :]
    total = tl.zeros((BT, BP), tl.float32)
    for tap in tl.static_range(W):
        value = load_input(x, tail, token - (W - 1) + tap, n, first, c, mask, stride_x, P, W, HAS_TAIL)  # [BT, BP]
        total += value * tl.load(weight + c * W + tap, mask=c < P, other=0.0).to(tl.float32)[None, :]
    total *= sigmoid(total, PTX)  # [BT, BP]
    tl.store(y + token[:, None] * P + c[None, :], total.to(y.dtype.element_ty), mask=mask)


@tools.jit(do_not_specialize=["tokens", "T"])
def conv_backward_kernel(
    xs, weights, tails, dys, dxs, dweights, cu_seqlens, sequence_of, tokens, T, P, stride_x,
    N: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, BP: tl.constexpr, VARLEN: tl.constexpr, HAS_TAIL: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """dx_t = sum over the W outputs that read x_t; the gradient of the weight is summed over the program's tokens.

    As `conv_kernel`; dweights [token blocks, N, P, W].
    """
    i_t = tl.program_id(0).to(tl.int64)
    token = i_t * BT + tl.arange(0, BT)
    c = tl.program_id(1) * BP + tl.arange(0, BP)
    in_p = c < P
    n, first, end = bounds(token, tokens, T, cu_seqlens, sequence_of, VARLEN)
    x, weight, tail, dy, dx = chosen(xs, N), chosen(weights, N), chosen(tails, N), chosen(dys, N), chosen(dxs, N)
    dweight = dweights + (i_t * N + tl.program_id(2)) * P * W
    total = tl.zeros((BT, BP), tl.float32)
    for later in tl.static_range(W):
        reader = token + later
        mask = ((token < tokens) & (reader < end))[:, None] & in_p[None, :]
        before = tl.zeros((BT, BP), tl.float32)
        for tap in tl.static_range(W):
            value = load_input(x, tail, reader - (W - 1) + tap, n, first, c, mask, stride_x, P, W, HAS_TAIL)
            before += value * tl.load(weight + c * W + tap, mask=in_p, other=0.0).to(tl.float32)[None, :]
        share = sigmoid(before, PTX)
        grad = tl.load(dy + reader[:, None] * P + c[None, :], mask=mask, other=0.0).to(tl.float32)  # [BT, BP]
        grad *= share * (1.0 + before * (1.0 - share))
        total += grad * tl.load(weight + c * W + (W - 1 - later), mask=in_p, other=0.0).to(tl.float32)[None, :]
        if later == 0:
            for tap in tl.static_range(W):
                value = load_input(x, tail, token - (W - 1) + tap, n, first, c, mask, stride_x, P, W, HAS_TAIL)
                tl.store(dweight + c * W + tap, tl.sum(grad * value, axis=0), mask=in_p)
    tl.store(dx + token[:, None] * P + c[None, :], total.to(dx.dtype.element_ty),
             mask=(token < tokens)[:, None] & in_p[None, :])  # fmt: skip


def _sequence_of(x, cu_seqlens):
    """Sequence of every token [T]; None without `cu_seqlens`."""
    if cu_seqlens is None:
        return None
    rows = torch.arange(x.shape[1], device=x.device)
    return (torch.searchsorted(cu_seqlens, rows, right=True) - 1).clamp_(0, len(cu_seqlens) - 2)


def forward(inputs, weights, tails, cu_seqlens):
    """Outputs [B, T, P] in the dtype of the inputs, of one shape with all tokens one stride apart, in one launch."""
    outputs = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs)
    x, width = inputs[0], weights[0].shape[-1]
    batch, length, channels = x.shape
    grid = tools.cdiv(batch * length, BLOCK_T), tools.cdiv(channels, BLOCK_P), len(inputs)
    conv_kernel[grid](
        xs=inputs, weights=weights, tails=tails or inputs, ys=outputs, cu_seqlens=cu_seqlens,
        sequence_of=_sequence_of(x, cu_seqlens), tokens=batch * length, T=length, P=channels, stride_x=x.stride(1),
        N=len(inputs), W=width, BT=BLOCK_T, BP=BLOCK_P, VARLEN=cu_seqlens is not None, HAS_TAIL=tails is not None,
        PTX=tools.USE_PTX, num_warps=4,
    )  # fmt: skip
    return outputs


def backward(inputs, weights, tails, cu_seqlens, grads):
    """Gradients of the inputs, then of the weights, all contiguous, in one launch."""
    x, weight, count = inputs[0], weights[0], len(inputs)
    batch, length, channels = x.shape
    dxs = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs)
    programs = tools.cdiv(batch * length, BLOCK_T)
    dweights = torch.empty(programs, count, *weight.shape, device=x.device, dtype=torch.float32)
    conv_backward_kernel[(programs, tools.cdiv(channels, BLOCK_P), count)](
        xs=inputs, weights=weights, tails=tails or inputs, dys=grads, dxs=dxs, dweights=dweights,
        cu_seqlens=cu_seqlens, sequence_of=_sequence_of(x, cu_seqlens), tokens=batch * length, T=length, P=channels,
        stride_x=x.stride(1), N=count, W=weight.shape[-1], BT=BLOCK_T, BP=BLOCK_P, VARLEN=cu_seqlens is not None,
        HAS_TAIL=tails is not None, PTX=tools.USE_PTX, num_warps=4,
    )  # fmt: skip
    totals = dweights.sum(0)
    if len({w.dtype for w in weights}) == 1:  # one conversion in place of one each
        return *dxs, *totals.to(weight.dtype)
    return *dxs, *(total.to(w.dtype) for total, w in zip(totals, weights, strict=True))
