"""Kimi Delta Attention over many tokens: Triton backward, by recomputation (docs/kernels_kda.md has the equations).

The forward pass keeps its inputs only. The backward pass prepares the chunks again, scans forward for the state before
every chunk, scans backward for the gradient of the state after every chunk, and then handles all chunks independently.
"""

import torch

from . import kda_chunk_triton as forward_pass
from . import triton_tools as tools

triton, tl = tools.triton, tools.tl
exp2, sigmoid = tools.exp2, tools.sigmoid
OFFSET = forward_pass.OFFSET
locate, sequence, tile_size = forward_pass.locate, forward_pass.sequence, forward_pass.tile_size
columns_head_sequence, log2_decay = forward_pass.columns_head_sequence, forward_pass.log2_decay
sum_rows, shifted_exp2, load_rows = forward_pass.sum_rows, forward_pass.shifted_exp2, forward_pass.load_rows
rest_of = forward_pass.rest_of
level_pairs, level_factors = forward_pass.level_pairs, forward_pass.level_factors
CHUNK = forward_pass.CHUNK


@tools.jit(do_not_specialize=["T"])
def scan_backward_kernel(
    work, decay, do, dht, du, dstates, dh0, cu_seqlens, block_offsets, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, DT: tl.constexpr, VARLEN: tl.constexpr, HAS_DHT: tl.constexpr, HAS_H0: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of U, of the state after every chunk, and of the initial state; transposed as in the forward scan."""
    i_v, i_h, i_n = columns_head_sequence(H, tl.cdiv(V, BV))
    first, length, block = sequence(i_n, T, cu_seqlens, block_offsets, C, VARLEN)
    c_k, c_v, r = tl.arange(0, BK), i_v * BV + tl.arange(0, BV), tl.arange(0, C)
    in_k, in_v, in_c = c_k < K, c_v < V, r >= 0
    state_tile = c_k[None, :] * V + c_v[:, None]  # [BV, BK]
    in_state = in_v[:, None] & in_k[None, :]
    of_head = (i_n.to(tl.int64) * H + i_h) * (K * V)
    grad = tl.zeros((BV, BK), tl.float32)
    if HAS_DHT:
        grad += tl.load(dht + of_head + state_tile, mask=in_state, other=0.0).to(tl.float32)
    tile = r[:, None] * K + c_k[None, :]  # [C, BK]
    in_tile = in_c[:, None] & in_k[None, :]
    steps = tl.cdiv(length, C)
    for back in tl.range(0, steps, num_stages=STAGES):
        step = steps - 1 - back
        chunk = (block + step) * H + i_h
        of_chunk = work + chunk * tile_size(C, K, V)
        b_w = tl.load(of_chunk + tile, mask=in_tile, other=0.0)  # [C, BK]
        b_q = tl.load(of_chunk + C * K + tile, mask=in_tile, other=0.0)  # [C, BK]
        b_k = tl.load(of_chunk + 2 * C * K + tile, mask=in_tile, other=0.0)  # [C, BK]
        b_a = tl.load(of_chunk + 3 * C * K + C * V + r[:, None] * C + r[None, :])  # [C, C]
        b_d = tl.load(decay + chunk * K + c_k, mask=in_k, other=0.0)  # [BK]
        token = step * C + r
        b_do = tl.load(do + (first + token)[:, None] * (H * V) + (i_h * V + c_v)[None, :],
                       mask=(token < length)[:, None] & in_v[None, :], other=0.0).to(DT)  # fmt: skip
        b_do = tl.trans(b_do)  # [BV, C]
        rounded = grad.to(DT)  # [BV, BK]
        tl.store(dstates + chunk * (K * V) + c_v[:, None] * K + c_k[None, :], rounded, mask=in_state)
        exact = tl.dot(b_do, b_a, input_precision="ieee")
        exact = tl.dot(rounded, tl.trans(b_k), exact, input_precision="ieee")  # [BV, C]
        if DT != tl.float32:
            exact = tl.dot(rest_of(grad, rounded), tl.trans(b_k), exact)
        b_du = exact.to(DT)
        tl.store(du + chunk * (C * V) + c_v[:, None] * C + r[None, :], b_du, mask=in_v[:, None] & in_c[None, :])
        grad = tl.dot(b_do, b_q, grad * b_d[None, :], input_precision="ieee")  # [BV, BK]
        grad = tl.dot(b_du, b_w, grad, input_precision="ieee")
        if DT != tl.float32:
            grad = tl.dot(rest_of(exact, b_du), b_w, grad)
    if HAS_H0:
        tl.store(dh0 + of_head + state_tile, grad.to(dh0.dtype.element_ty), mask=in_state)


@tools.jit(do_not_specialize=["T"])
def chunk_backward_kernel(
    q, k, g, beta, A_log, dt_bias, cu_seqlens, block_offsets, block_seq,
    inverse, lower, updated, residual, states, do, du, dstates,
    dq, dk, dv, dg, dbeta, dA_log, ddt_bias,
    T, stride_q, stride_k, stride_g, stride_beta, scale, lower_bound, eps,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BS: tl.constexpr,
    C: tl.constexpr, DT: tl.constexpr, BOUNDED: tl.constexpr, NARROW: tl.constexpr, VARLEN: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    i_h, i_c = tl.program_id(0) % H, tl.program_id(0) // H
    n, first, end = locate(i_c, T, cu_seqlens, block_offsets, block_seq, C, VARLEN)
    chunk = i_c.to(tl.int64) * H + i_h
    r, c_k, c_v = tl.arange(0, C), tl.arange(0, BK), tl.arange(0, BV)
    in_k, in_v = c_k < K, c_v < V
    if n < 0:
        tl.store(ddt_bias + chunk * K + c_k, tl.zeros((BK,), tl.float32), mask=in_k)
        tl.store(dA_log + chunk, 0.0)
        return
    left = tl.minimum(end - first, C).to(tl.int32)
    i, j = r[:, None], r[None, :]
    real = r < left
    mask_k, mask_v = real[:, None] & in_k[None, :], real[:, None] & in_v[None, :]
    q += first * stride_q + i_h * K
    k += first * stride_k + i_h * K
    g += first * stride_g + i_h * K
    do += first * (H * V) + i_h * V
    dv += first * (H * V) + i_h * V
    updated += chunk * (C * V)
    states += chunk * (K * V)
    dstates += chunk * (K * V)

    # Gradients of the [C, C] matrices, each also transposed by a product of its own: Triton 3.4 to 3.7 miscompiles an
    # accumulator that is transposed into the next product on Hopper.
    column = c_v[:, None] * C + j  # [BV, C]
    b_do = tl.load(do + i * (H * V) + c_v[None, :], mask=mask_v, other=0.0).to(DT)  # [C, BV]
    b_u = tl.load(updated + column, mask=in_v[:, None] & (j >= 0), other=0.0)  # [BV, C]
    b_du = tl.load(du + chunk * (C * V) + column, mask=in_v[:, None] & (j >= 0), other=0.0)  # [BV, C]
    b_inv = tl.load(inverse + chunk * (C * C) + i * C + j)  # [C, C]
    b_low = tl.load(lower + chunk * (C * C) + i * C + j)  # [C, C]
    logit = tl.load(beta + first * stride_beta + i_h + r * stride_beta, mask=real, other=0.0).to(tl.float32)  # [C]
    b_beta = tl.where(real, sigmoid(logit, PTX), 0.0)
    d_right = tl.dot(tl.trans(b_inv), tl.trans(b_du), input_precision="ieee")  # [C, BV]
    d_right_t = tl.dot(b_du, b_inv, input_precision="ieee").to(DT)  # [BV, C]
    d_lower = tl.where(i > j, -tl.dot(d_right.to(DT), b_u, input_precision="ieee"), 0.0)  # [C, C]
    d_lower_t = tl.where(i < j, -tl.dot(tl.trans(b_u), d_right_t, input_precision="ieee"), 0.0)
    d_attn = tl.dot(b_do, b_u, input_precision="ieee")  # [C, C]
    d_own = tl.sum(tl.where(i == j, d_attn, 0.0), axis=1)[:, None]  # a row with itself: no decay lies between
    d_attn = tl.where(i > j, d_attn, 0.0).to(DT)
    d_attn_t = tl.where(i < j, tl.dot(tl.trans(b_u), tl.trans(b_do), input_precision="ieee"), 0.0).to(DT)
    # By the logit of beta: beta cancels, so that a beta of zero needs no division.
    right = tl.trans(b_u).to(tl.float32) + tl.dot(b_low, tl.trans(b_u), input_precision="ieee")  # [C, BV]
    b_dbeta = sigmoid(-logit, PTX) * (tl.sum(d_right * right, axis=1) + tl.sum(d_lower * b_low.to(tl.float32), axis=1))
    tl.store(dbeta + (first + r) * H + i_h, b_dbeta.to(dbeta.dtype.element_ty), mask=real)
    d_lower = (d_lower * b_beta[:, None]).to(DT)
    d_lower_t = (d_lower_t * b_beta[None, :]).to(DT)
    tl.store(dv + i * (H * V) + c_v[None, :], (d_right * b_beta[:, None]).to(dv.dtype.element_ty), mask=mask_v)

    # Products with the states at the chunk's ends, a slice of V at a time.
    tl.debug_barrier()  # the loop reads the dv that other threads have just written
    d_q = tl.zeros((C, BK), tl.float32)
    k_start = tl.zeros((C, BK), tl.float32)
    d_k = tl.zeros((C, BK), tl.float32)
    overlap = tl.zeros((BK,), tl.float32)
    for v_first in range(0, V, BS):
        c_s = v_first + tl.arange(0, BS)
        in_s = c_s < V
        row_mask, state_mask = real[:, None] & in_s[None, :], in_s[:, None] & in_k[None, :]
        s_do = tl.load(do + i * (H * V) + c_s[None, :], mask=row_mask, other=0.0).to(DT)  # [C, BS]
        s_dv = tl.load(dv + i * (H * V) + c_s[None, :], mask=row_mask, other=0.0).to(DT)  # [C, BS]
        s_u = tl.load(updated + c_s[:, None] * C + j, mask=in_s[:, None] & (j >= 0), other=0.0)  # [BS, C]
        s_state = tl.load(states + c_s[:, None] * K + c_k[None, :], mask=state_mask, other=0.0)  # [BS, BK]
        s_grad = tl.load(dstates + c_s[:, None] * K + c_k[None, :], mask=state_mask, other=0.0)  # [BS, BK]
        d_q = tl.dot(s_do, s_state, d_q, input_precision="ieee")  # [C, BK]
        k_start = tl.dot(s_dv, s_state, k_start, input_precision="ieee")  # [C, BK]
        d_k = tl.dot(tl.trans(s_u), s_grad, d_k, input_precision="ieee")  # [C, BK]
        if DT != tl.float32:
            places = chunk * (C * V) + c_s[:, None] * C + j
            s_u = tl.load(residual + places, mask=in_s[:, None] & (j >= 0), other=0.0)
            d_k = tl.dot(tl.trans(s_u), s_grad, d_k)
        overlap += tl.sum(s_state.to(tl.float32) * s_grad.to(tl.float32), axis=0)  # [BK]

    # The gates, keys and queries of the chunk again, as in `prepare_kernel`.
    logits = tl.load(g + i * stride_g + c_k[None, :], mask=mask_k, other=0.0).to(tl.float32)  # [C, BK]
    bias = tl.load(dt_bias + i_h * K + c_k, mask=in_k, other=0.0).to(tl.float32)  # [BK]
    rate = tl.exp(tl.load(A_log + i_h).to(tl.float32))
    b_g = tl.where(mask_k, log2_decay(logits, rate, bias, lower_bound, BOUNDED, PTX), 0.0)
    total = tl.sum(b_g, axis=0)  # [BK]
    if NARROW:
        up, down = level_factors(b_g, i, j, 0, True, DT, PTX)
        start = up * tl.exp2(-OFFSET)
        d_k *= down * shifted_exp2(total, DT, PTX)[None, :]
    else:
        start = exp2(sum_rows(b_g, i >= j, DT), PTX)
        d_k *= exp2(sum_rows(b_g, i < j, DT), PTX)
    b_k, norm_k = load_rows(k, i * stride_k + c_k[None, :], mask_k, eps)  # [C, BK], [C, 1]
    # What a row adds to the state at the chunk's end passes the decays of later rows only.
    d_g = sum_rows(b_k * d_k * norm_k, i > j, DT) + (overlap * exp2(total, PTX))[None, :]  # [C, BK]
    b_q, norm_q = load_rows(q, i * stride_q + c_k[None, :], mask_k, eps)  # [C, BK], [C, 1]
    d_q *= start * scale
    k_start *= start
    d_later = b_q * d_q * norm_q - b_k * k_start * norm_k  # [C, BK]
    d_q += b_k * (norm_k * d_own * scale)
    d_k += b_q * (norm_q * d_own * scale) - k_start
    # A pair of rows inside the chunk enters d_later at both its rows with opposite signs. The same rounded factors
    # stand in both places, so that they cancel in the sum over later rows instead of leaving their rounding errors.
    for level in tl.static_range(1 if NARROW else 3):
        up, down = level_factors(b_g, i, j, level, NARROW, DT, PTX)  # [C, BK] each
        l_lower, l_lower_t, l_attn, l_attn_t = d_lower, d_lower_t, d_attn, d_attn_t
        if not NARROW:
            pairs, pairs_t = level_pairs(i, j, level, False), level_pairs(j, i, level, False)
            zero = tl.zeros((C, C), DT)
            l_lower, l_lower_t = tl.where(pairs, d_lower, zero), tl.where(pairs_t, d_lower_t, zero)
            l_attn, l_attn_t = tl.where(pairs, d_attn, zero), tl.where(pairs_t, d_attn_t, zero)
        k_up, k_down = (b_k * up * norm_k).to(DT), (b_k * down * norm_k).to(DT)
        q_up = (b_q * up * (norm_q * scale)).to(DT)
        within = tl.dot(l_lower, k_down, input_precision="ieee")  # [C, BK]
        d_later += k_up.to(tl.float32) * within
        d_k += up * within
        within = tl.dot(l_attn, k_down, input_precision="ieee")
        d_later += q_up.to(tl.float32) * within
        d_q += (up * scale) * within
        within = tl.dot(l_attn_t, q_up, input_precision="ieee")
        within = tl.dot(l_lower_t, k_up, within, input_precision="ieee")
        d_later -= k_down.to(tl.float32) * within
        d_k += down * within

    grads = first * (H * K) + i_h * K + i * (H * K) + c_k[None, :]  # [C, BK]
    out = norm_q * (d_q - b_q * (norm_q * norm_q * tl.sum(b_q * d_q, axis=1)[:, None]))
    tl.store(dq + grads, out.to(dq.dtype.element_ty), mask=mask_k)
    out = norm_k * (d_k - b_k * (norm_k * norm_k * tl.sum(b_k * d_k, axis=1)[:, None]))
    tl.store(dk + grads, out.to(dk.dtype.element_ty), mask=mask_k)

    d_g += sum_rows(d_later, i <= j, DT)
    logits = tl.load(g + i * stride_g + c_k[None, :], mask=mask_k, other=0.0).to(tl.float32)  # [C, BK]
    z = logits + bias[None, :]
    if BOUNDED:
        slope = sigmoid(rate * z, PTX) * sigmoid(-rate * z, PTX)  # 1 - sigmoid would lose a saturated gate
        d_z = tl.where(mask_k, d_g * slope * (rate * lower_bound), 0.0)
        d_rate = tl.sum(d_z * z)
    else:
        # A state that decays by more than 2^-64 in one step has no gradient there, only the rounding of other terms,
        # which a large gate would blow up in the gradient of A_log.
        log2 = log2_decay(logits, rate, bias, lower_bound, False, PTX)
        d_g = tl.where(mask_k & (log2 > -64.0), d_g, 0.0)
        d_z = -d_g * rate * sigmoid(z, PTX)
        d_rate = tl.sum(d_g * log2) / 1.4426950408889634  # to base e
    tl.store(dg + grads, d_z.to(dg.dtype.element_ty), mask=mask_k)
    tl.store(ddt_bias + chunk * K + c_k, tl.sum(d_z, axis=0), mask=in_k)
    tl.store(dA_log + chunk, d_rate)


def backward(inputs, parameters, initial_state, cu_seqlens, d_out, d_final, final_of=None):
    """Gradients of q, k, v, g, beta, A_log, dt_bias and the initial state (None without).

    Args:
        d_out: [B, T, H, V], contiguous.
        d_final: [N, H, K, V] gradient of the final states, or None.
        final_of: as `kda.gradients` takes it.
    """
    q, k, v, g, beta = inputs
    (batch, length, heads, key_size), value_size = q.shape, v.shape[-1]
    blocks = forward_pass.Blocks(batch, length, cu_seqlens)
    work, decay, inverse, lower, residual = forward_pass.prepare(inputs, parameters, cu_seqlens, blocks, True)
    block_v, columns = tools.block(value_size), forward_pass.value_block(value_size, q.dtype)
    constants = forward_pass.constants(heads, key_size, value_size, q.dtype)
    varlen, stages = cu_seqlens is not None, forward_pass.scan_stages(q.dtype)
    grid = (tools.cdiv(value_size, columns) * heads * blocks.sequences,)
    states = torch.empty(blocks.count, heads, value_size, key_size, device=q.device, dtype=work.dtype)
    updated = torch.empty(blocks.count, heads, value_size, CHUNK, device=q.device, dtype=work.dtype)
    forward_pass.scan_kernel[grid](
        work=work, decay=decay, h0=initial_state, o=None, ht=None, checkpoints=None,
        states=states, updated=updated, residual=residual, cu_seqlens=cu_seqlens, block_offsets=blocks.offsets,
        checkpoint_offsets=None, T=length, segment_steps=0,
        **constants, BV=columns, VARLEN=varlen, HAS_H0=initial_state is not None, EVERY=0, SEGMENTS=1,
        FOR_BACKWARD=True, STAGES=stages, num_warps=4,
    )  # fmt: skip
    du, dstates = torch.empty_like(updated), torch.empty_like(states)
    d_initial = None if initial_state is None else torch.empty_like(initial_state)
    for exact in (True,) if final_of is None else (False, True):
        scan_backward_kernel[grid](
            work=work, decay=decay, do=d_out, dht=d_final, du=du, dstates=dstates, dh0=d_initial,
            cu_seqlens=cu_seqlens, block_offsets=blocks.offsets, T=length,
            **constants, BV=columns, VARLEN=varlen, HAS_DHT=d_final is not None, HAS_H0=initial_state is not None,
            STAGES=stages, num_warps=4,
        )  # fmt: skip
        if not exact:
            d_final = final_of(d_initial)
    del work
    # Tokens that belong to no sequence keep a gradient of zero.
    new = torch.empty if cu_seqlens is None else torch.zeros
    dq, dk, dv, dg, dbeta = (new(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v, g, beta))
    d_rate = torch.empty(blocks.count, heads, device=q.device)
    d_bias = torch.empty(blocks.count, heads, key_size, device=q.device)
    narrow = forward_pass.is_narrow(parameters.lower_bound)
    warps = 4 if key_size <= 128 and narrow else 8  # the three factorings of other gates hold more than 4 can
    chunk_backward_kernel[(heads * blocks.count,)](
        q=q, k=k, g=g, beta=beta, **parameters.for_kernels(),
        cu_seqlens=cu_seqlens, block_offsets=blocks.offsets, block_seq=blocks.sequence,
        inverse=inverse, lower=lower, updated=updated, residual=residual, states=states, do=d_out, du=du,
        dstates=dstates, dq=dq, dk=dk, dv=dv, dg=dg, dbeta=dbeta, dA_log=d_rate, ddt_bias=d_bias, T=length,
        stride_q=q.stride(1), stride_k=k.stride(1), stride_g=g.stride(1), stride_beta=beta.stride(1),
        scale=key_size**-0.5, **constants, BV=block_v, BS=min(32, block_v), NARROW=narrow, VARLEN=varlen,
        PTX=tools.USE_PTX, num_warps=warps, num_stages=1,
    )  # fmt: skip
    d_A_log = d_rate.sum(0).to(parameters.A_log.dtype)
    d_dt_bias = d_bias.sum(0).flatten().to(parameters.dt_bias.dtype)
    return dq, dk, dv, dg, dbeta, d_A_log, d_dt_bias, d_initial
