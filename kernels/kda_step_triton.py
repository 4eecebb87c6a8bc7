"""One or a few tokens of a KDA layer from its projections to the gated norm, in one Triton kernel.

A program owns one head of one sequence: it reads a slice of the state once, runs the tokens, and writes the slice once,
so the traffic is the state's. State and tails may be written in place, and nothing depends on a host value but the
shapes, so the launch can be captured in a CUDA graph.
"""

import torch

from . import triton_tools as tools

triton, tl = tools.triton, tools.tl
exp2, reciprocal, sigmoid = tools.exp2, tools.reciprocal, tools.sigmoid
LOG2E = tools.LOG2E

# Columns of the state that a program has in hand where many programs share the device.
SLICE = 32


@triton.jit
def convolve(x, tail, weight, t, stride_x, P, c, mask, W: tl.constexpr, PTX: tl.constexpr):
    """SiLU of the causal convolution at token t for the channels c, rounded to the type of x; float32."""
    total = tl.zeros_like(c).to(tl.float32)
    for tap in tl.static_range(W):
        token = tl.zeros_like(c) + (t - (W - 1) + tap)
        new = tl.load(x + token * stride_x + c, mask=mask & (token >= 0), other=0.0).to(tl.float32)
        old = tl.load(tail + (token + W - 1) * P + c, mask=mask & (token < 0), other=0.0).to(tl.float32)
        total += (new + old) * tl.load(weight + c * W + tap, mask=mask, other=0.0).to(tl.float32)
    return (total * sigmoid(total, PTX)).to(x.dtype.element_ty).to(tl.float32)


@triton.jit
def advance_tail(x, tail, new_tail, T, stride_x, P, c, mask, W: tl.constexpr):
    """The last W - 1 inputs after T more tokens; may overwrite the tail, a row only after what reads it."""
    for row in tl.static_range(W - 1):
        token = tl.zeros_like(c) + (T - (W - 1) + row)
        new = tl.load(x + token * stride_x + c, mask=mask & (token >= 0), other=0.0)
        old = tl.load(tail + (token + W - 1) * P + c, mask=mask & (token < 0), other=0.0)
        tl.store(new_tail + row * P + c, tl.where(token >= 0, new, old), mask=mask)


@triton.jit
def key_side(
    q, k, g, beta, q_tail, k_tail, q_weight, k_weight, rate, bias, t, stride_q, stride_k, stride_g, stride_beta, P, c,
    mask, scale, lower_bound, eps, W: tl.constexpr, BOUNDED: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Query, key, decay factor [K] and beta of token t."""
    b_q = convolve(q, q_tail, q_weight, t, stride_q, P, c, mask, W, PTX)
    b_k = convolve(k, k_tail, k_weight, t, stride_k, P, c, mask, W, PTX)
    b_q *= scale * tl.rsqrt(tl.sum(b_q * b_q, axis=0) + eps)
    b_k *= tl.rsqrt(tl.sum(b_k * b_k, axis=0) + eps)
    z = tl.load(g + t * stride_g + c, mask=mask, other=0.0).to(tl.float32) + bias
    if BOUNDED:
        log2 = (lower_bound * LOG2E) * sigmoid(rate * z, PTX)
    else:
        log2 = -(rate * LOG2E) * (tl.maximum(z, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(z))))
    return b_q, b_k, exp2(log2, PTX), sigmoid(tl.load(beta + t * stride_beta).to(tl.float32), PTX)


@triton.jit
def step_kernel(
    q, k, v, g, beta, gate, q_tail, k_tail, v_tail, q_weight, k_weight, v_weight, A_log, dt_bias, norm_weight,
    state, out, new_q_tail, new_k_tail, new_v_tail, new_state,
    T, batch_q, batch_k, batch_v, batch_g, batch_beta, batch_gate, stride_q, stride_k, stride_v, stride_g, stride_beta,
    stride_gate, scale, lower_bound, eps, norm_eps,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BS: tl.constexpr,
    W: tl.constexpr, BOUNDED: tl.constexpr, ONE_TOKEN: tl.constexpr, IN_PLACE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    # What the compiler knows to be one token and one address takes fewer registers.
    if ONE_TOKEN:
        T = 1
    if IN_PLACE:
        new_q_tail, new_k_tail, new_v_tail = q_tail, k_tail, v_tail
    i_h, i_b = tl.program_id(0) % H, (tl.program_id(0) // H).to(tl.int64)
    c_k, c_v = tl.arange(0, BK), tl.arange(0, BV)
    in_k, in_v = c_k < K, c_v < V
    of_k, of_v = i_h * K + c_k, i_h * V + c_v
    tail_k, tail_v = i_b * (W - 1) * (H * K), i_b * (W - 1) * (H * V)
    q += i_b * batch_q
    k += i_b * batch_k
    v += i_b * batch_v
    g += i_b * batch_g
    beta += i_b * batch_beta + i_h
    gate += i_b * batch_gate
    out += i_b * T * (H * V)
    state += (i_b * H + i_h) * (K * V)
    if IN_PLACE:
        new_state = state
    else:
        new_state += (i_b * H + i_h) * (K * V)
    rate = tl.exp(tl.load(A_log + i_h).to(tl.float32))
    bias = tl.load(dt_bias + of_k, mask=in_k, other=0.0).to(tl.float32)
    b_q = tl.zeros((BK,), tl.float32)
    b_k, decay, b_beta = b_q, b_q, 0.0
    # Columns of the state do not see each other: a slice at a time, the next ones on their way.
    for first in tl.range(0, V, BS, num_stages=3):
        c_s = first + tl.arange(0, BS)
        in_s = c_s < V
        tile = c_k[:, None] * V + c_s[None, :]
        if K == BK and V % BS == 0:
            s = tl.load(state + tile).to(tl.float32)
        else:
            s = tl.load(state + tile, mask=in_k[:, None] & in_s[None, :], other=0.0).to(tl.float32)
        if ONE_TOKEN:
            if first == 0:  # in the loop, because what comes before it delays the first slices
                b_q, b_k, decay, b_beta = key_side(
                    q, k, g, beta, q_tail + tail_k, k_tail + tail_k, q_weight, k_weight, rate, bias, 0, stride_q,
                    stride_k, stride_g, stride_beta, H * K, of_k, in_k, scale, lower_bound, eps, W, BOUNDED, PTX,
                )  # fmt: skip
            b_v = convolve(v, v_tail + tail_v, v_weight, 0, stride_v, H * V, i_h * V + c_s, in_s, W, PTX)
            s *= decay[:, None]
            b_u = b_beta * (b_v - tl.sum(s * b_k[:, None], axis=0))
            s += b_k[:, None] * b_u[None, :]
            tl.store(out + i_h * V + c_s, tl.sum(s * b_q[:, None], axis=0).to(out.dtype.element_ty), mask=in_s)
        else:
            for t in range(T):
                b_q, b_k, decay, b_beta = key_side(
                    q, k, g, beta, q_tail + tail_k, k_tail + tail_k, q_weight, k_weight, rate, bias, t, stride_q,
                    stride_k, stride_g, stride_beta, H * K, of_k, in_k, scale, lower_bound, eps, W, BOUNDED, PTX,
                )  # fmt: skip
                b_v = convolve(v, v_tail + tail_v, v_weight, t, stride_v, H * V, i_h * V + c_s, in_s, W, PTX)
                s *= decay[:, None]
                b_u = b_beta * (b_v - tl.sum(s * b_k[:, None], axis=0))
                s += b_k[:, None] * b_u[None, :]
                b_o = tl.sum(s * b_q[:, None], axis=0).to(out.dtype.element_ty)
                tl.store(out + t * (H * V) + i_h * V + c_s, b_o, mask=in_s)
        if K == BK and V % BS == 0:
            tl.store(new_state + tile, s.to(new_state.dtype.element_ty))
        else:
            tl.store(new_state + tile, s.to(new_state.dtype.element_ty), mask=in_k[:, None] & in_s[None, :])
    # Every thread has written its part of the outputs, and has read the tails, which may be written in place.
    tl.debug_barrier()
    weight = tl.load(norm_weight + c_v, mask=in_v, other=0.0).to(tl.float32)
    for t in range(T):
        b_o = tl.load(out + t * (H * V) + of_v, mask=in_v, other=0.0).to(tl.float32)
        b_gate = tl.load(gate + t * stride_gate + of_v, mask=in_v, other=0.0).to(tl.float32)
        b_o *= tl.rsqrt(tl.sum(b_o * b_o, axis=0) / V + norm_eps) * weight * sigmoid(b_gate, PTX)
        tl.store(out + t * (H * V) + of_v, b_o.to(out.dtype.element_ty), mask=in_v)
    advance_tail(q, q_tail + tail_k, new_q_tail + tail_k, T, stride_q, H * K, of_k, in_k, W)
    advance_tail(k, k_tail + tail_k, new_k_tail + tail_k, T, stride_k, H * K, of_k, in_k, W)
    advance_tail(v, v_tail + tail_v, new_v_tail + tail_v, T, stride_v, H * V, of_v, in_v, W)


def step(
    q, k, v, g, beta, gate, tails, conv_weights, A_log, dt_bias, lower_bound, norm_weight, state, scale, eps, norm_eps,
    in_place,
):  # fmt: skip
    """As `kda_step.kda_step`, whose arguments these are."""
    batch, length, _ = q.shape
    _, heads, key_size, value_size = state.shape
    out = torch.empty(batch, length, heads * value_size, device=q.device, dtype=q.dtype)
    new_tails = tails if in_place else tuple(torch.empty_like(tail) for tail in tails)
    new_state = state if in_place else torch.empty_like(state)
    block_k, block_v = tools.block(key_size), tools.block(value_size)
    inputs = (q, k, v, g, beta, gate)
    # A program with a multiprocessor to itself asks for all its state at once.
    columns = block_v if heads * batch <= tools.multiprocessors(q.device) else min(SLICE, block_v)
    step_kernel[(heads * batch,)](
        *inputs, *tails, *conv_weights, A_log, dt_bias, norm_weight, state, out, *new_tails, new_state,
        length, *(x.stride(0) for x in inputs), *(x.stride(1) for x in inputs), scale, lower_bound or 0.0, eps,
        norm_eps,
        heads, key_size, value_size, block_k, block_v, columns, conv_weights[0].shape[-1],
        lower_bound is not None, length == 1, in_place, tools.USE_PTX,
        # no more threads than channels: Triton would load a shorter vector once for every thread
        num_warps=max(1, min(block_k, block_v) // 32),
    )  # fmt: skip
    return out, new_tails, new_state
