"""One or a few tokens of a KDA layer from its projections to the gated norm, in Triton.

The traffic is the state's, which is read and written once. In `step_kernel` a program owns one head of one sequence and
does all of it; one token of many sequences takes three kernels, of which the second only streams the state. State and
tails may be written in place, and nothing depends on a host value but the shapes, so that launches can be captured in a
CUDA graph.
"""

import torch

from . import triton_tools as tools

triton, tl = tools.triton, tools.tl
exp2, in_base_2, sigmoid = tools.exp2, tools.in_base_2, tools.sigmoid

# Columns of the state in hand: in `step_kernel` where many programs share the device, and in `state_kernel`.
SLICE, COLUMNS = 32, 64
# Heads of sequences from which on three kernels take a token, a multiprocessor.
MANY = 10


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
def decay_factor(z, rate, lower_bound, BOUNDED: tl.constexpr, PTX: tl.constexpr):
    """exp of the log decay of the gate's logits z, with A_log's exponential as `rate`."""
    if BOUNDED:
        log2 = in_base_2(lower_bound) * sigmoid(rate * z, PTX)
    else:
        log2 = -in_base_2(rate) * (tl.maximum(z, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(z))))
    return exp2(log2, PTX)


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
    decay = decay_factor(z, rate, lower_bound, BOUNDED, PTX)
    return b_q, b_k, decay, sigmoid(tl.load(beta + t * stride_beta).to(tl.float32), PTX)


@triton.jit
def update(s, q, k, decay, beta, v, qk):
    """(output [V], new state [K, V]) of one token; qk is <q, k>, with which neither sum waits for the new state."""
    s *= decay[:, None]
    read = tl.sum(s * q[:, None], axis=0)
    u = beta * (v - tl.sum(s * k[:, None], axis=0))
    return read + qk * u, s + k[:, None] * u[None, :]


@triton.jit
def row_of(slots, i_b):
    """The row of tails and state that a sequence of the batch has."""
    if slots is None:
        return i_b
    else:
        return tl.load(slots + i_b)


@tools.jit
def step_kernel(
    q, k, v, g, beta, gate, tails, conv_weights, A_log, dt_bias, norm_weight, state, out, new_tails, new_state, slots,
    T, batch_strides, token_strides, scale, lower_bound, eps, norm_eps,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BS: tl.constexpr,
    W: tl.constexpr, BOUNDED: tl.constexpr, ONE_TOKEN: tl.constexpr, IN_PLACE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    # What the compiler knows to be one token and one address takes fewer registers.
    if ONE_TOKEN:
        T = 1
    if IN_PLACE:
        new_tails = tails
    q_tail, k_tail, v_tail = tails
    new_q_tail, new_k_tail, new_v_tail = new_tails
    q_weight, k_weight, v_weight = conv_weights
    batch_q, batch_k, batch_v, batch_g, batch_beta, batch_gate = batch_strides
    stride_q, stride_k, stride_v, stride_g, stride_beta, stride_gate = token_strides
    i_h, i_b = tl.program_id(0) % H, (tl.program_id(0) // H).to(tl.int64)
    c_k, c_v = tl.arange(0, BK), tl.arange(0, BV)
    in_k, in_v = c_k < K, c_v < V
    of_k, of_v = i_h * K + c_k, i_h * V + c_v
    row = row_of(slots, i_b)
    tail_k, tail_v = row * (W - 1) * (H * K), row * (W - 1) * (H * V)
    q += i_b * batch_q
    k += i_b * batch_k
    v += i_b * batch_v
    g += i_b * batch_g
    beta += i_b * batch_beta + i_h
    gate += i_b * batch_gate
    out += i_b * T * (H * V)
    state += (row * H + i_h) * (K * V)
    if IN_PLACE:
        new_state = state
    else:
        new_state += (row * H + i_h) * (K * V)
    rate = tl.exp(tl.load(A_log + i_h).to(tl.float32))
    bias = tl.load(dt_bias + of_k, mask=in_k, other=0.0).to(tl.float32)
    b_q = tl.zeros((BK,), tl.float32)
    b_k, decay, b_beta, qk = b_q, b_q, 0.0, 0.0
    # Columns of the state do not see each other: a slice at a time, the next ones on their way.
    for first in tl.range(0, V, BS, num_stages=3):
        c_s = first + tl.arange(0, BS)
        in_s = c_s < V
        tile = c_k[:, None] * V + c_s[None, :]  # [BK, BS]
        if K == BK and V % BS == 0:
            s = tl.load(state + tile).to(tl.float32)  # [BK, BS]
        else:
            s = tl.load(state + tile, mask=in_k[:, None] & in_s[None, :], other=0.0).to(tl.float32)
        if ONE_TOKEN:
            if first == 0:  # in the loop, because what comes before it delays the first slices
                b_q, b_k, decay, b_beta = key_side(
                    q, k, g, beta, q_tail + tail_k, k_tail + tail_k, q_weight, k_weight, rate, bias, 0, stride_q,
                    stride_k, stride_g, stride_beta, H * K, of_k, in_k, scale, lower_bound, eps, W, BOUNDED, PTX,
                )  # fmt: skip
                qk = tl.sum(b_q * b_k, axis=0)
            b_v = convolve(v, v_tail + tail_v, v_weight, 0, stride_v, H * V, i_h * V + c_s, in_s, W, PTX)  # [BS]
            b_o, s = update(s, b_q, b_k, decay, b_beta, b_v, qk)  # [BS], [BK, BS]
            tl.store(out + i_h * V + c_s, b_o.to(out.dtype.element_ty), mask=in_s)
        else:
            for t in range(T):
                b_q, b_k, decay, b_beta = key_side(
                    q, k, g, beta, q_tail + tail_k, k_tail + tail_k, q_weight, k_weight, rate, bias, t, stride_q,
                    stride_k, stride_g, stride_beta, H * K, of_k, in_k, scale, lower_bound, eps, W, BOUNDED, PTX,
                )  # fmt: skip
                b_v = convolve(v, v_tail + tail_v, v_weight, t, stride_v, H * V, i_h * V + c_s, in_s, W, PTX)
                b_o, s = update(s, b_q, b_k, decay, b_beta, b_v, tl.sum(b_q * b_k, axis=0))
                tl.store(out + t * (H * V) + i_h * V + c_s, b_o.to(out.dtype.element_ty), mask=in_s)
        if K == BK and V % BS == 0:
            tl.store(new_state + tile, s.to(new_state.dtype.element_ty))
        else:
            tl.store(new_state + tile, s.to(new_state.dtype.element_ty), mask=in_k[:, None] & in_s[None, :])
    # Every thread has written its part of the outputs, and has read the tails, which may be written in place.
    tl.debug_barrier()
    weight = tl.load(norm_weight + c_v, mask=in_v, other=0.0).to(tl.float32)
    for t in range(T):
        b_o = tl.load(out + t * (H * V) + of_v, mask=in_v, other=0.0).to(tl.float32)  # [BV]
        b_gate = tl.load(gate + t * stride_gate + of_v, mask=in_v, other=0.0).to(tl.float32)  # [BV]
        b_o *= tl.rsqrt(tl.sum(b_o * b_o, axis=0) / V + norm_eps) * weight * sigmoid(b_gate, PTX)
        tl.store(out + t * (H * V) + of_v, b_o.to(out.dtype.element_ty), mask=in_v)
    advance_tail(q, q_tail + tail_k, new_q_tail + tail_k, T, stride_q, H * K, of_k, in_k, W)
    advance_tail(k, k_tail + tail_k, new_k_tail + tail_k, T, stride_k, H * K, of_k, in_k, W)
    advance_tail(v, v_tail + tail_v, new_v_tail + tail_v, T, stride_v, H * V, of_v, in_v, W)


@triton.jit
def convolve_new(x, tail, new_tail, weight, c, P: tl.constexpr, W: tl.constexpr, PTX: tl.constexpr):
    """`convolve` at the first new token, which also moves the tail on: no other thread reads these channels."""
    new = tl.load(x + c)
    total = new.to(tl.float32) * tl.load(weight + c * W + (W - 1)).to(tl.float32)
    for tap in tl.static_range(W - 1):
        old = tl.load(tail + tap * P + c)
        total += old.to(tl.float32) * tl.load(weight + c * W + tap).to(tl.float32)
        if tap > 0:
            tl.store(new_tail + (tap - 1) * P + c, old)
    if W > 1:
        tl.store(new_tail + (W - 2) * P + c, new)
    return (total * sigmoid(total, PTX)).to(x.dtype.element_ty)


@tools.jit
def keys_kernel(
    q, k, v, g, tails, conv_weights, A_log, dt_bias, keys, values, new_tails, slots, batch_strides, scale, lower_bound,
    eps,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BH: tl.constexpr, W: tl.constexpr, BOUNDED: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """keys [B, H, 3, K] float32: query, key and decay factor; values [B, H, V]; and the next tails; for BH heads."""
    i_b = (tl.program_id(0) // (H // BH)).to(tl.int64)
    h = tl.program_id(0) % (H // BH) * BH + tl.arange(0, BH)
    c_k = h[:, None] * K + tl.arange(0, K)[None, :]  # [BH, K]
    c_v = h[:, None] * V + tl.arange(0, V)[None, :]  # [BH, V]
    row = row_of(slots, i_b)
    tail_k, tail_v = row * ((W - 1) * H * K), row * ((W - 1) * H * V)
    q_tail, k_tail, v_tail = tails
    new_q_tail, new_k_tail, new_v_tail = new_tails
    q_weight, k_weight, v_weight = conv_weights
    batch_q, batch_k, batch_v, batch_g = batch_strides
    b_q = convolve_new(q + i_b * batch_q, q_tail + tail_k, new_q_tail + tail_k, q_weight, c_k, H * K, W, PTX)
    b_k = convolve_new(k + i_b * batch_k, k_tail + tail_k, new_k_tail + tail_k, k_weight, c_k, H * K, W, PTX)
    b_v = convolve_new(v + i_b * batch_v, v_tail + tail_v, new_v_tail + tail_v, v_weight, c_v, H * V, W, PTX)
    b_q, b_k = b_q.to(tl.float32), b_k.to(tl.float32)
    b_q *= (scale * tl.rsqrt(tl.sum(b_q * b_q, axis=1) + eps))[:, None]
    b_k *= tl.rsqrt(tl.sum(b_k * b_k, axis=1) + eps)[:, None]
    rate = tl.exp(tl.load(A_log + h).to(tl.float32))[:, None]
    z = tl.load(g + i_b * batch_g + c_k).to(tl.float32) + tl.load(dt_bias + c_k).to(tl.float32)  # [BH, K]
    at = keys + (i_b * H + h)[:, None] * (3 * K) + tl.arange(0, K)[None, :]
    tl.store(at, b_q)
    tl.store(at + K, b_k)
    tl.store(at + 2 * K, decay_factor(z, rate, lower_bound, BOUNDED, PTX))
    tl.store(values + i_b * (H * V) + c_v, b_v)


@tools.jit
def state_kernel(
    keys, values, beta, state, out, new_state, slots, batch_beta,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BS: tl.constexpr, IN_PLACE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """BS columns of one state, in registers from the first instruction on; out [B, H, V] before its norm."""
    head = (tl.program_id(0) // (V // BS)).to(tl.int64)  # of a sequence
    c_k, c_v = tl.arange(0, K), tl.program_id(0) % (V // BS) * BS + tl.arange(0, BS)
    tile = c_k[:, None] * V + c_v[None, :]  # [K, BS]
    at = head if slots is None else row_of(slots, head // H) * H + head % H
    s = tl.load(state + at * (K * V) + tile).to(tl.float32)
    keys += head * (3 * K)
    b_q, b_k = tl.load(keys + c_k), tl.load(keys + K + c_k)  # [K] each
    b_beta = sigmoid(tl.load(beta + head // H * batch_beta + head % H).to(tl.float32), PTX)
    b_v = tl.load(values + head * V + c_v).to(tl.float32)  # [BS]
    b_o, s = update(s, b_q, b_k, tl.load(keys + 2 * K + c_k), b_beta, b_v, tl.sum(b_q * b_k, axis=0))  # [BS], [K, BS]
    if IN_PLACE:
        new_state = state
    tl.store(new_state + at * (K * V) + tile, s.to(new_state.dtype.element_ty))
    tl.store(out + head * V + c_v, b_o.to(out.dtype.element_ty))


@tools.jit
def norm_kernel(
    out, gate, norm_weight, batch_gate, norm_eps,
    H: tl.constexpr, V: tl.constexpr, BH: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    i_b = (tl.program_id(0) // (H // BH)).to(tl.int64)
    c = (tl.program_id(0) % (H // BH) * BH + tl.arange(0, BH))[:, None] * V + tl.arange(0, V)[None, :]  # [BH, V]
    b_gate = sigmoid(tl.load(gate + i_b * batch_gate + c).to(tl.float32), PTX)
    weight = tl.load(norm_weight + tl.arange(0, V)).to(tl.float32)
    b_o = tl.load(out + i_b * (H * V) + c).to(tl.float32)
    b_o *= tl.rsqrt(tl.sum(b_o * b_o, axis=1) / V + norm_eps)[:, None] * weight[None, :] * b_gate
    tl.store(out + i_b * (H * V) + c, b_o.to(out.dtype.element_ty))


def step_of_many(
    q, k, v, g, beta, gate, tails, conv_weights, parameters, norm_weight, state, norm_eps, out, new_tails, new_state,
    slots,
):  # fmt: skip
    """One token by three kernels, into `out`, `new_tails` and `new_state`."""
    batch, (_, heads, key_size, value_size) = len(q), state.shape
    keys = torch.empty(batch, heads, 3, key_size, device=q.device, dtype=torch.float32)
    values = torch.empty(batch, heads, value_size, device=q.device, dtype=v.dtype)
    together = 2 - heads % 2
    columns = min(COLUMNS, value_size)
    keys_kernel[(batch * (heads // together),)](
        q=q, k=k, v=v, g=g, tails=tails, conv_weights=conv_weights, **parameters.for_kernels(), keys=keys,
        values=values, new_tails=new_tails, slots=slots,
        batch_strides=(q.stride(0), k.stride(0), v.stride(0), g.stride(0)),
        scale=key_size**-0.5, H=heads, K=key_size, V=value_size, BH=together, W=conv_weights[0].shape[-1],
        PTX=tools.USE_PTX,
        num_warps=max(1, min(4, together * min(key_size, value_size) // 64)),  # no more threads than channels
    )  # fmt: skip
    state_kernel[(batch * heads * (value_size // columns),)](
        keys=keys, values=values, beta=beta, state=state, out=out, new_state=new_state, slots=slots,
        batch_beta=beta.stride(0), H=heads, K=key_size, V=value_size, BS=columns, IN_PLACE=new_state is state,
        PTX=tools.USE_PTX, num_warps=4,
    )  # fmt: skip
    norm_kernel[(batch * (heads // together),)](
        out=out, gate=gate, norm_weight=norm_weight, batch_gate=gate.stride(0), norm_eps=norm_eps,
        H=heads, V=value_size, BH=together, PTX=tools.USE_PTX, num_warps=4,
    )  # fmt: skip


def step(q, k, v, g, beta, gate, tails, conv_weights, parameters, norm_weight, state, norm_eps, in_place, slots):
    """As `kda_step.kda_step`, whose arguments these are."""
    in_place = in_place or slots is not None
    slots = None if slots is None else slots.contiguous()
    batch, length, _ = q.shape
    _, heads, key_size, value_size = state.shape
    out = torch.empty(batch, length, heads * value_size, device=q.device, dtype=q.dtype)
    new_tails = tails if in_place else tuple(torch.empty_like(tail) for tail in tails)
    new_state = state if in_place else torch.empty_like(state)
    block_k, block_v = tools.block(key_size), tools.block(value_size)
    processors = tools.multiprocessors(q.device)
    whole = (key_size, value_size) == (block_k, block_v) and min(key_size, value_size) >= 32
    if length == 1 and whole and heads * batch >= MANY * processors:
        weights = conv_weights, parameters, norm_weight
        step_of_many(q, k, v, g, beta, gate, tails, *weights, state, norm_eps, out, new_tails, new_state, slots)
        return out, new_tails, new_state
    inputs = (q, k, v, g, beta, gate)
    # A program with a multiprocessor to itself asks for all its state at once.
    columns = block_v if heads * batch <= processors else min(SLICE, block_v)
    step_kernel[(heads * batch,)](
        q=q, k=k, v=v, g=g, beta=beta, gate=gate, tails=tails, conv_weights=conv_weights, **parameters.for_kernels(),
        norm_weight=norm_weight, state=state, out=out, new_tails=new_tails, new_state=new_state, slots=slots,
        T=length, batch_strides=tuple([x.stride(0) for x in inputs]),
        token_strides=tuple([x.stride(1) for x in inputs]),
        scale=key_size**-0.5, norm_eps=norm_eps, H=heads, K=key_size, V=value_size, BK=block_k, BV=block_v,
        BS=columns, W=conv_weights[0].shape[-1], ONE_TOKEN=length == 1, IN_PLACE=in_place, PTX=tools.USE_PTX,
        # no more threads than channels: Triton would load a shorter vector once for every thread
        num_warps=max(1, min(block_k, block_v) // 32),
    )  # fmt: skip
    return out, new_tails, new_state
