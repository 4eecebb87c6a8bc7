"""Every Triton kernel once on small, ragged shapes, for a checker of memory accesses.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 1 python tests/operations/every_kernel_once.py

Without its cache torch asks the driver for every tensor, so that a byte past the end of one is nobody's. Values are
compared with the references in `test_*_triton.py`; here they only must be finite.
"""

import sys

import torch

from kimi_k3.kernels import (
    attn_res,
    dispatch,
    experts,
    kda,
    kda_chunk_triton,
    kda_step,
    kda_step_triton,
    mla_decode,
    mxfp4,
    norms,
    router,
    short_conv,
    situ,
)

HALF = torch.bfloat16


def random(*shape, dtype=HALF, grad=False):
    return torch.randn(shape, device="cuda", dtype=dtype).requires_grad_(grad)


def offsets(*lengths):
    return torch.tensor([0, *lengths], device="cuda").cumsum(0)


def recurrence(key_size, value_size, lengths, lower_bound, grad, dtype=HALF):
    tokens, heads = sum(lengths), 3
    q, k, g = (random(1, tokens, heads, key_size, dtype=dtype, grad=grad) for _ in range(3))
    v, beta = random(1, tokens, heads, value_size, dtype=dtype, grad=grad), random(1, tokens, heads, grad=grad)
    A_log, bias = (
        random(heads, dtype=torch.float32, grad=grad),
        random(heads * key_size, dtype=torch.float32, grad=grad),
    )
    state = random(len(lengths), heads, key_size, value_size, dtype=torch.float32, grad=grad)
    inputs, parameters = (q, k, v, g, beta.to(dtype)), kda.KDAParameters(A_log, bias, lower_bound)
    return kda.fused_kda(*inputs, parameters, state, offsets(*lengths) if len(lengths) > 1 else None)


def step(tokens, key_size=48, value_size=80, batch=3, heads=2, width=4, rows=None):
    """With `rows`, states are rows of buffers for so many sequences."""
    q, k, g = (random(batch, tokens, heads * key_size) for _ in range(3))
    v, gate = (random(batch, tokens, heads * value_size) for _ in range(2))
    slots = None if rows is None else torch.randperm(rows, device="cuda")[:batch]
    tails = tuple(random(rows or batch, width - 1, x.shape[-1]) for x in (q, k, v))
    weights = tuple(random(x.shape[-1], 1, width, dtype=torch.float32) for x in (q, k, v))
    A_log, bias = random(heads, dtype=torch.float32), random(heads * key_size, dtype=torch.float32)
    out, tails, state = kda_step.kda_step(
        q, k, v, g, random(batch, tokens, heads), gate, tails, weights, kda.KDAParameters(A_log, bias, -5.0),
        random(value_size, dtype=torch.float32),
        random(rows or batch, heads, key_size, value_size, dtype=torch.float32), norm_eps=1e-5, in_place=True,
        slots=slots,
    )  # fmt: skip
    return out, *tails, state


def routed(pairs, packed, top_k=3, count=5, size=96, width=160):
    x, ids = random(pairs, size), torch.randint(0, count, (pairs, top_k), device="cuda")
    gate_up, down, scales = random(count, 2 * width, size), random(count, size, width), None
    if packed:
        (gate_up, up_scale), (down, down_scale) = map(mxfp4.quantize_mxfp4, (gate_up, down))
        scales = up_scale, down_scale
    return experts.fused_experts(x, ids, torch.rand(pairs, top_k, device="cuda"), gate_up, down, scales, 3.0, 2.0)


def moved(tokens, top_k, size):
    """Rows to their experts' order and back, as in training, without the products between."""
    order = torch.randperm(tokens * top_k, device="cuda")
    inverse = order.argsort().view(tokens, top_k)
    rows = experts._Spread.apply(random(tokens, size, grad=True), order, inverse, True)
    weights = random(tokens, top_k, dtype=torch.float32, grad=True)
    return experts._Combine.apply(rows, weights, order, inverse, rows.dtype)


def results():
    """Yields the tensors that the kernels return, with a graph where they have a backward."""
    for sizes in ((128, 128), (48, 80), (16, 256)):
        yield recurrence(*sizes, (1, 33, 70), -5.0, grad=True)
        yield recurrence(*sizes, (1, 33, 70), -5.0, grad=False)
    yield recurrence(64, 64, (5, 64), None, grad=True)
    yield recurrence(64, 64, (5, 64), None, grad=True, dtype=torch.float32)
    kda_chunk_triton.LONG = 64  # a sequence is cut, so that the scan fills the device, from here on
    yield recurrence(48, 80, (97,), -5.0, grad=False)
    for tokens in (1, 3):
        yield step(tokens)
    yield step(1, rows=7)
    kda_step_triton.MANY = 0  # three kernels take a token
    for rows in (None, 7):
        yield step(1, key_size=64, value_size=128, rows=rows)
    for grad in (False, True):
        inputs = tuple(random(1, 71, 200, grad=grad) for _ in range(3))
        weights = tuple(random(200, 1, 4, dtype=torch.float32, grad=grad) for _ in range(3))
        yield short_conv.short_convs(inputs, weights, None, offsets(1, 33, 37))[0]
        sources = [random(1, 37, 200, grad=grad) for _ in range(5)]
        vectors = random(200, grad=grad), random(1, 200, grad=grad), random(200, grad=grad)
        yield attn_res.attn_res_mix_norm(sources, *vectors[:2], 1e-5, vectors[2], 1e-5)
        yield (norms.rms_norm(random(37, 200, grad=grad), random(200, grad=grad), 1e-5),)
        gated = random(37, 200, grad=grad), random(37, 200, grad=grad), random(200, dtype=torch.float32, grad=grad)
        yield (norms.gated_rms_norm(*gated, 1e-5),)
        yield (situ.situ_glu(random(37, 200, grad=grad), random(37, 200, grad=grad), 3.0, 2.0),)
        yield (situ.swiglu(random(37, 400, grad=grad), None),)
        logits = random(7, 24, dtype=torch.float32, grad=grad)
        for activation in router.ACTIVATIONS:
            bias = random(24, dtype=torch.float32)
            yield router.choose_experts(logits, bias, 4, True, 2.5, activation=activation)[1:]
    for pairs in (2, 90, 700):
        yield (routed(pairs, packed=True),)
        yield (routed(pairs, packed=False),)
    yield (routed(320, packed=True, size=256, width=384),)  # on Hopper groups of warps, tiles of every width
    yield (routed(6, packed=True, size=512, width=512),)  # and for few pairs an expert
    for sizes in ((7, 3, 200), (5, 16, 1032)):
        yield (moved(*sizes),)
    yield (mla_decode.mla_decode(random(2, 3, 5, 64), random(2, 3, 5, 16), random(2, 77, 80), 0.1),)
    # on Hopper two groups of warps, with a row that is not full
    lengths = torch.arange(150, 1050, 100, device="cuda")
    inputs = random(9, 1, 70, 512), random(9, 1, 70, 64), random(9, 1000, 576)
    yield (mla_decode.mla_decode(*inputs, 0.05, None, lengths),)
    # in pages, of which the last is not full
    table, ends = torch.tensor([[3, 0], [1, 4]], dtype=torch.int32, device="cuda"), torch.tensor([65, 100]).cuda()
    inputs = random(2, 1, 5, 64), random(2, 1, 5, 16), random(5 * 64, 80)
    yield (mla_decode.mla_decode(*inputs, 0.1, None, ends, mla_decode.Pages(table, 64)),)


def main():
    if not torch.cuda.is_available():
        sys.exit("tests/operations/every_kernel_once.py runs the kernels on a GPU, and torch sees no GPU here")
    torch.manual_seed(0)
    seen = 0
    for tensors in results():
        total = sum(tensor.float().square().sum() for tensor in tensors)
        assert total.isfinite()
        if total.requires_grad:
            total.backward()
        seen += 1
    torch.cuda.synchronize()
    assert not dispatch._broken, dispatch._broken
    print(seen, "results")


if __name__ == "__main__":
    main()
