"""Attention over depth: Triton forward and backward (docs/kernels.md).

A program handles one row (token) at a time with the whole width on chip: every source is read once. The backward pass
keeps the scores and 1/rms of the forward, recomputes the softmax, and uses <d_out, out> = sum_i p_i <d_out, v_i>, so it
too reads every source once.
"""

import functools

import torch

from . import triton_tools as tools

triton, tl = tools.triton, tools.tl
exp = tools.exp


@triton.jit
def pair_sum(a, b, c, d):
    return a + c, b + d


@triton.jit
def source_offset(sources, i, N: tl.constexpr):
    """Elements from the first source to source i: a loop over the sources, unlike unrolled code, loads ahead."""
    start = sources[0].to(tl.int64)
    offset = start - start
    for other in tl.static_range(1, N):
        offset = tl.where(i == other, sources[other].to(tl.int64) - start, offset)
    return tl.multiple_of(offset // (sources[0].dtype.element_ty.primitive_bitwidth // 8), 8)


@tools.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["scores", "inverse_rms"])
def mix_kernel(
    sources, norm_weight, proj_weight, out_weight, mixed, out, scores, inverse_rms, rows, eps, out_eps,
    N: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, NORM: tl.constexpr, KEEP: tl.constexpr, PTX: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Online softmax over the sources of a row; then the norm that follows, with the roundings of the model's."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    c = tl.arange(0, BD)
    inside = c < D
    query = tl.load(norm_weight + c, mask=inside, other=0.0).to(tl.float32)
    query *= tl.load(proj_weight + c, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BD,), tl.float32)
    top = -float("inf")
    denominator = 0.0
    # One loop over all rows of this program and their sources, so that the next row loads while this one ends.
    for step in tl.range(0, tl.cdiv(rows - program, programs) * N, num_stages=STAGES):
        i = step % N
        row = (program + (step // N) * programs).to(tl.int64)
        place = sources[0] + (source_offset(sources, i, N) + row * D)
        value = tl.load(place + c, mask=inside, other=0.0).to(tl.float32)  # [BD]
        squares, product = tl.reduce((value * value, value * query), 0, pair_sum)
        rms = tl.rsqrt(squares / D + eps)
        score = product * rms
        new_top = tl.where(i == 0, score, tl.maximum(top, score))
        kept = tl.where(i == 0, 0.0, exp(top - new_top, PTX))
        weight = exp(score - new_top, PTX)
        total = total * kept + value * weight
        denominator = denominator * kept + weight
        top = new_top
        if KEEP:
            tl.store(scores + row * N + i, score)
            tl.store(inverse_rms + row * N + i, rms)
        if i == N - 1:
            rounded = (total / denominator).to(mixed.dtype.element_ty)
            tl.store(mixed + row * D + c, rounded, mask=inside)
            if NORM:
                normed = rounded.to(tl.float32)
                normed *= tl.rsqrt(tl.sum(normed * normed, axis=0) / D + out_eps)
                normed = normed.to(rounded.dtype) * tl.load(out_weight + c, mask=inside, other=0.0)
                tl.store(out + row * D + c, normed.to(out.dtype.element_ty), mask=inside)


@tools.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["scores", "inverse_rms"])
def mix_backward_kernel(
    sources, grads, norm_weight, proj_weight, out_weight, mixed, d_mixed, d_out, scores, inverse_rms,
    d_query, d_out_weight, rows, out_eps,
    N: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, HAS_MIXED: tl.constexpr, HAS_OUT: tl.constexpr,
    PTX: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients [N, rows, D] of the sources, and sums over this program's rows for the weights."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    c = tl.arange(0, BD)
    inside = c < D
    query = tl.load(norm_weight + c, mask=inside, other=0.0).to(tl.float32)
    query *= tl.load(proj_weight + c, mask=inside, other=0.0).to(tl.float32)
    query_sum = tl.zeros((BD,), tl.float32)
    weight_sum = tl.zeros((BD,), tl.float32)
    for place in range(program, rows, programs):
        row = tl.cast(place, tl.int64)
        value = tl.load(mixed + row * D + c, mask=inside, other=0.0).to(tl.float32)  # [BD]
        grad = tl.zeros((BD,), tl.float32)
        if HAS_MIXED:
            grad += tl.load(d_mixed + row * D + c, mask=inside, other=0.0).to(tl.float32)
        if HAS_OUT:
            weight = tl.load(out_weight + c, mask=inside, other=0.0).to(tl.float32)
            upper = tl.load(d_out + row * D + c, mask=inside, other=0.0).to(tl.float32)
            rms = tl.rsqrt(tl.sum(value * value, axis=0) / D + out_eps)
            weight_sum += upper * value * rms
            upper *= weight
            grad += rms * (upper - value * (rms * rms * tl.sum(upper * value, axis=0) / D))
        both = tl.sum(grad * value, axis=0)
        top = -float("inf")
        for i in tl.static_range(N):
            top = tl.maximum(top, tl.load(scores + row * N + i))
        denominator = 0.0
        for i in tl.static_range(N):
            denominator += exp(tl.load(scores + row * N + i) - top, PTX)
        for i in tl.range(0, N, num_stages=STAGES):
            source = sources[0] + (source_offset(sources, i, N) + row * D)
            value = tl.load(source + c, mask=inside, other=0.0).to(tl.float32)  # [BD]
            score = tl.load(scores + row * N + i)
            rms = tl.load(inverse_rms + row * N + i)
            share = exp(score - top, PTX) / denominator
            d_score = share * (tl.sum(grad * value, axis=0) - both)
            query_sum += (d_score * rms) * value
            d_value = share * grad + d_score * (rms * query - (rms * rms * score / D) * value)
            tl.store(grads + (i * rows + row) * D + c, d_value.to(grads.dtype.element_ty), mask=inside)
    tl.store(d_query + program * D + c, query_sum, mask=inside)
    if HAS_OUT:
        tl.store(d_out_weight + program * D + c, weight_sum, mask=inside)


@functools.cache
def _warps(width: int) -> int:
    return max(1, min(16, tools.next_power_of_2(width) // 1024))


def _stages(x) -> int:
    """Rows of sources on their way at a time: two programs of them fit the shared memory of a multiprocessor."""
    return 1 if x.dtype == torch.float32 or torch.version.hip is not None else 4


def forward(sources, norm_weight, proj_weight, eps, out_weight, out_eps, keep: bool):
    """-> mixed [..., d], its norm (None without `out_weight`), scores and 1/rms [..., n] float32 (None unless `keep`).

    The sources are contiguous and lie at multiples of 16 bytes.
    """
    shape, count, width = sources[0].shape, len(sources), sources[0].shape[-1]
    rows = sources[0].numel() // width
    mixed = torch.empty_like(sources[-1])
    out = None
    if out_weight is not None:
        out = torch.empty_like(mixed, dtype=torch.promote_types(mixed.dtype, out_weight.dtype))
    scores = inverse_rms = None
    if keep:
        scores, inverse_rms = torch.empty(2, *shape[:-1], count, device=mixed.device, dtype=torch.float32)
    mix_kernel[(min(rows, 2 * tools.multiprocessors(mixed.device)),)](
        sources=tuple(sources), norm_weight=norm_weight, proj_weight=proj_weight, out_weight=out_weight, mixed=mixed,
        out=out, scores=scores, inverse_rms=inverse_rms, rows=rows, eps=eps, out_eps=out_eps,
        N=count, D=width, BD=tools.next_power_of_2(width), NORM=out_weight is not None, KEEP=keep, PTX=tools.USE_PTX,
        STAGES=_stages(mixed), num_warps=_warps(width),
    )  # fmt: skip
    return mixed, out, scores, inverse_rms


def backward(sources, norm_weight, proj_weight, out_weight, out_eps, mixed, scores, inverse_rms, d_mixed, d_out):
    """-> gradients of the sources (a list), of norm_weight, proj_weight and out_weight (None without)."""
    width = mixed.shape[-1]
    rows = mixed.numel() // width
    grads = mixed.new_empty(len(sources), *mixed.shape)
    programs = min(rows, 2 * tools.multiprocessors(mixed.device))
    d_query = torch.empty(programs, width, device=mixed.device, dtype=torch.float32)
    d_weight = None if d_out is None else torch.empty_like(d_query)
    mix_backward_kernel[(programs,)](
        sources=tuple(sources), grads=grads, norm_weight=norm_weight, proj_weight=proj_weight, out_weight=out_weight,
        mixed=mixed, d_mixed=d_mixed, d_out=d_out, scores=scores, inverse_rms=inverse_rms,
        d_query=d_query, d_out_weight=d_weight, rows=rows, out_eps=out_eps,
        N=len(sources), D=width, BD=tools.next_power_of_2(width), HAS_MIXED=d_mixed is not None,
        HAS_OUT=d_out is not None, PTX=tools.USE_PTX, STAGES=_stages(mixed), num_warps=_warps(width),
    )  # fmt: skip
    d_query = d_query.sum(0)
    d_norm = (d_query * proj_weight.float().view(-1)).to(norm_weight.dtype)
    d_proj = (d_query * norm_weight.float()).view_as(proj_weight).to(proj_weight.dtype)
    return grads.unbind(0), d_norm, d_proj, None if d_weight is None else d_weight.sum(0).to(out_weight.dtype)
