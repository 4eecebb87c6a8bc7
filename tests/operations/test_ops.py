"""The other reference operations: short convolution, depth mix, gated activations, MXFP4, routing, grouped experts."""

import copy
import functools
import math
import pickle
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from kimi_k3.kernels import attn_res, experts, mxfp4, router, short_conv, situ

pytestmark = pytest.mark.one_release


def conv_oracle(x, weight):
    """One sequence [T, P] by torch's own convolution."""
    width = weight.shape[-1]
    padded = F.pad(x.T[None], (width - 1, 0))
    return F.silu(F.conv1d(padded, weight, groups=x.shape[1]))[0].T


def test_short_conv_equals_torch_convolution():
    torch.manual_seed(0)
    x, weight = torch.randn(2, 11, 6, dtype=torch.float64), torch.randn(6, 1, 4, dtype=torch.float64)
    y, tail = short_conv.short_conv(x, weight)
    for row in range(2):
        torch.testing.assert_close(y[row], conv_oracle(x[row], weight))
    assert torch.equal(tail, x[:, -3:])


@pytest.mark.parametrize("pieces", [[1] * 9, [2, 1, 6], [3, 6], [8, 1]], ids=str)
def test_short_conv_over_pieces_shorter_than_the_kernel(pieces):
    torch.manual_seed(0)
    x, weight = torch.randn(2, 9, 6, dtype=torch.float64), torch.randn(6, 1, 4, dtype=torch.float64)
    expected, _ = short_conv.short_conv(x, weight)
    tail, outputs = None, []
    for piece in x.split(pieces, dim=1):
        out, tail = short_conv.short_conv(piece, weight, tail)
        outputs.append(out)
    torch.testing.assert_close(torch.cat(outputs, dim=1), expected)
    assert torch.equal(tail, x[:, -3:])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_short_convs_of_one_token_are_those_of_each_input(dtype):
    """Several inputs behind tails go through joint operators; two rows, so that a mixed-up layout shows."""
    torch.manual_seed(0)
    inputs = tuple(torch.randn(2, 1, 6, dtype=dtype) for _ in range(3))
    tails = tuple(torch.randn(2, 3, 6, dtype=dtype) for _ in range(3))
    weights = tuple(torch.randn(6, 1, 4, dtype=torch.float64) for _ in range(3))
    outputs, new_tails = short_conv.short_convs(inputs, weights, tails)
    for x, tail, weight, out, new_tail in zip(inputs, tails, weights, outputs, new_tails, strict=True):
        behind = torch.cat([tail, x], dim=1)
        expected = torch.stack([conv_oracle(row, weight)[3:] for row in behind.double()])
        assert out.dtype == dtype and out.shape == x.shape
        # bfloat16: the convolution sums in float32 and rounds once
        torch.testing.assert_close(out, expected.to(dtype), rtol=2**-8 if dtype == torch.bfloat16 else 1e-12, atol=0)
        assert torch.equal(new_tail, behind[:, 1:])
    assert short_conv.short_convs(inputs, weights, tails, keep_tails=False)[1] is None


def test_short_conv_restarts_at_every_sequence():
    """Fault 55: the first tokens of a second document equal a fresh start; empty sequences keep their tail."""
    torch.manual_seed(0)
    lengths = [5, 0, 1, 2, 7]
    x, weight = torch.randn(1, 15, 6, dtype=torch.float64), torch.randn(6, 1, 4, dtype=torch.float64)
    history = torch.randn(5, 3, 6, dtype=torch.float64)
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0)])
    fresh, _ = short_conv.short_conv(x, weight, cu_seqlens=offsets)
    y, tails = short_conv.short_conv(x, weight, history, offsets)
    for i, length in enumerate(lengths):
        alone = x[0, offsets[i] : offsets[i + 1]]
        with_history = torch.cat([history[i], alone])
        assert torch.equal(tails[i], with_history[length:])
        if length:
            torch.testing.assert_close(fresh[0, offsets[i] : offsets[i + 1]], conv_oracle(alone, weight))
            torch.testing.assert_close(y[0, offsets[i] : offsets[i + 1]], conv_oracle(with_history, weight)[3:])


@pytest.mark.parametrize("lengths", [None, [4, 5]], ids=["batch", "packed"])
def test_tails_are_tensors_of_their_own(lengths):
    """Views would keep the inputs of a whole prompt alive in the cache, and follow what is written into them."""
    torch.manual_seed(0)
    x, weight = torch.randn(1, 9, 6), torch.randn(6, 1, 4)
    offsets = None if lengths is None else torch.tensor([0, *lengths]).cumsum(0)
    _, tail = short_conv.short_conv(x, weight, cu_seqlens=offsets)
    kept = tail.clone()
    assert tail.untyped_storage().nbytes() == tail.numel() * tail.element_size()
    (after,) = short_conv.tails_after((x,), None, (weight,), 7)
    assert torch.equal(after, x[:, 4:7]) and after.untyped_storage().nbytes() == after.numel() * after.element_size()
    x.zero_()
    assert torch.equal(tail, kept)


def test_short_conv_accumulates_in_float32():
    torch.manual_seed(0)
    x, weight = torch.randn(1, 8, 4).bfloat16(), torch.randn(4, 1, 4)
    y, _ = short_conv.short_conv(x, weight)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y[0], conv_oracle(x[0].float(), weight).bfloat16())


def attn_res_oracle(sources, norm, proj, eps):
    """softmax over depth of <normed source * norm, proj>, as the paper writes it, on a stack."""
    stacked = torch.stack(sources, dim=-2).double()
    normed = F.rms_norm(stacked, stacked.shape[-1:], eps=eps) * norm.double()
    weights = (normed @ proj.double().view(-1)).softmax(-1)
    return (weights[..., None] * stacked).sum(-2)


@pytest.mark.parametrize("count", [1, 2, 9])
def test_attn_res_mix(count):
    """Fault 117: scores from norm.weight * proj.weight on normalised values, values mixed un-normalised."""
    torch.manual_seed(0)
    sources = [torch.randn(2, 5, 32, dtype=torch.float64) * (i + 1) for i in range(count)]
    norm, proj = torch.rand(32, dtype=torch.float64) + 0.5, torch.randn(1, 32, dtype=torch.float64)
    out = attn_res.attn_res_mix(sources, norm, proj, 1e-5)
    torch.testing.assert_close(out, attn_res_oracle(sources, norm, proj, 1e-5))
    reordered = attn_res.attn_res_mix(sources[::-1], norm, proj, 1e-5)
    torch.testing.assert_close(out, reordered)


@pytest.mark.parametrize("shape", [(1, 1, 24), (2, 3, 24)])
def test_attn_res_mix_of_few_tokens_is_that_of_many(shape, monkeypatch):
    """Few are stacked; values and gradients are those of the other form."""
    torch.manual_seed(0)
    sources = [torch.randn(*shape, dtype=torch.float64) for _ in range(3)]
    norm, proj = torch.randn(24, dtype=torch.float64), torch.randn(1, 24, dtype=torch.float64)

    def run(most):
        monkeypatch.setattr(attn_res, "MAX_STACKED", most)
        leaves = [x.clone().requires_grad_() for x in (*sources, norm, proj)]
        out = attn_res.attn_res_mix(leaves[:3], *leaves[3:], 1e-5)
        weighed = (out * torch.linspace(-1, 1, 24, dtype=torch.float64)).sum()
        return out, *torch.autograd.grad(weighed, leaves)

    torch.testing.assert_close(run(2**16), run(0))


def test_attn_res_mix_in_bfloat16_rounds_once():
    """Fault 117: float32 inside, so the drift of a half-precision mix is one rounding."""
    torch.manual_seed(0)
    sources = [torch.randn(4, 64).bfloat16() for _ in range(5)]
    norm, proj = torch.rand(64).bfloat16(), torch.randn(1, 64).bfloat16()
    out = attn_res.attn_res_mix(sources, norm, proj, 1e-5)
    expected = attn_res_oracle(sources, norm, proj, 1e-5)
    assert out.dtype == torch.bfloat16
    assert ((out.double() - expected).abs() <= expected.abs() * 2**-8 + 1e-6).all()


@pytest.mark.parametrize(
    "gate, up, expected",
    [(1, 1, 0.7158178281), (10, 30, 82.2458215453), (-3, 5, -0.5945436833), (0.5, -40, -7.1341465341)],
)
def test_situ_values(gate, up, expected):
    got = situ.situ_glu(torch.tensor([gate]).double(), torch.tensor([up]).double(), 4.0, 25.0)
    assert got.item() == pytest.approx(expected, abs=1e-9)


def test_situ_uncapped_up_branch_and_bound():
    gate, up = torch.tensor([1.0]).double(), torch.tensor([1000.0]).double()
    capped = situ.situ_glu(gate, up, 4.0, 25.0)
    assert situ.situ_glu(gate, up, 4.0, None) == pytest.approx((capped / 25 * 1000).item())
    extreme = torch.tensor([-1e4, 1e4])
    assert situ.situ_glu(extreme, extreme, 4.0, 25.0).abs().max() <= 100


def test_mxfp4_every_code_and_every_scale_byte():
    """Fault 84: byte s is 2^(s - 127), 255 is NaN; all 16 codes against float64."""
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    codes = torch.arange(16, dtype=torch.uint8)
    row = codes.repeat(2)
    packed = (row[0::2] | (row[1::2] << 4)).repeat(256, 1)
    scale = torch.arange(256, dtype=torch.uint8)[:, None]
    got = mxfp4.dequantize_mxfp4(packed, scale, torch.float32)
    values = torch.tensor([*magnitudes, *(-m for m in magnitudes)], dtype=torch.float64).repeat(2)
    for byte in range(255):
        expected = values * 2.0 ** (byte - 127)
        assert torch.equal(got[byte].double(), expected.float().double()), byte
    assert torch.isnan(got[255]).all()


def test_mxfp4_low_nibble_comes_first():
    """Fault 114: byte 0x2B is (-1.5, 1.0) before scaling; with scale byte 125 it is (-0.375, 0.25)."""
    packed = torch.tensor([[0x2B] + [0] * 15], dtype=torch.uint8)
    for scale, expected in ((127, [-1.5, 1.0]), (125, [-0.375, 0.25])):
        got = mxfp4.dequantize_mxfp4(packed, torch.tensor([[scale]], dtype=torch.uint8), torch.float64)
        assert got[0, :2].tolist() == expected


def test_mxfp4_is_exact_in_bfloat16():
    torch.manual_seed(0)
    packed = torch.randint(0, 256, (64, 48), dtype=torch.uint8)
    scale = torch.randint(1, 250, (64, 3), dtype=torch.uint8)
    wide = mxfp4.dequantize_mxfp4(packed, scale, torch.float64)
    assert torch.equal(mxfp4.dequantize_mxfp4(packed, scale, torch.bfloat16).double(), wide)


def test_mxfp4_quantizes_to_the_nearest_value():
    """Fault 109: the round trip gives the nearest representable value; ties go to the even code."""
    torch.manual_seed(0)
    weight = torch.randn(32, 96)
    packed, scale = mxfp4.quantize_mxfp4(weight)
    assert packed.shape == (32, 48) and scale.shape == (32, 3)
    got = mxfp4.dequantize_mxfp4(packed, scale, torch.float64)
    step = torch.exp2(scale.double() - 127)[..., None]
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]).double()
    groups = weight.double().view(32, 3, 32)
    best = (groups.abs()[..., None] - grid * step[..., None]).abs().amin(-1)
    torch.testing.assert_close((got.view(32, 3, 32) - groups).abs(), best, rtol=0, atol=1e-12)
    assert (groups.abs() < 7 * step).all(), "what exceeds 6 steps has its nearest value there at any scale"
    again = mxfp4.dequantize_mxfp4(*mxfp4.quantize_mxfp4(got.float()), torch.float64)
    assert torch.equal(again, got)
    ties = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] + [0.0] * 24])
    assert mxfp4.dequantize_mxfp4(*mxfp4.quantize_mxfp4(ties))[0, :8].tolist() == [0, 1, 1, 2, 2, 4, 4, 6]


@pytest.mark.parametrize("exponent", [-20, -1, 0, 3, 40])
def test_mxfp4_scales_change_at_seven(exponent):
    """The largest of a group is at least 3.5 steps and less than 7: where it is 7 x 2^e, the step is 2^(e + 1)."""
    below = 1 - 2.0**-24  # the float32 before a power of two, and nearly that before 7
    for largest, step, stored in ((7, 2, 8), (7 * below, 1, 6), (3.5, 1, 4), (3.5 * below, 0.5, 3)):
        weight = torch.tensor([[largest * 2.0**exponent] + [0.0] * 31])
        assert (weight[0, 0].item() == largest * 2.0**exponent) or largest not in (7, 3.5)
        packed, scale = mxfp4.quantize_mxfp4(weight)
        assert 2.0 ** (scale.item() - 127) == step * 2.0**exponent
        assert mxfp4.dequantize_mxfp4(packed, scale, torch.float64)[0, 0].item() == stored * 2.0**exponent


def test_mxfp4_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="multiple of 32"):
        mxfp4.quantize_mxfp4(torch.randn(2, 40))
    with pytest.raises(ValueError, match="not finite"):
        mxfp4.quantize_mxfp4(torch.full((1, 32), float("inf")))
    with pytest.raises(ValueError, match="belong together"):
        mxfp4.dequantize_mxfp4(torch.zeros(4, 16, dtype=torch.uint8), torch.zeros(4, 2, dtype=torch.uint8))


def test_mxfp4_of_zeros_and_of_tiny_values():
    for weight in (torch.zeros(1, 32), torch.full((1, 32), 1e-40), torch.full((1, 32), 1e38)):
        got = mxfp4.dequantize_mxfp4(*mxfp4.quantize_mxfp4(weight), torch.float32)
        torch.testing.assert_close(got, weight, rtol=0.34, atol=1e-38)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_product_has_the_value_and_gradient_of_the_decoded_weight(dtype):
    torch.manual_seed(0)
    packed, scale = mxfp4.quantize_mxfp4(torch.randn(48, 64))
    ours, theirs = (torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).to(dtype) for _ in range(2))
    out = mxfp4.packed_linear(ours.requires_grad_(), packed, scale)
    expected = torch.nn.functional.linear(theirs.requires_grad_(), mxfp4.dequantize_mxfp4(packed, scale, dtype))
    assert torch.equal(out, expected)
    out.square().sum().backward(), expected.square().sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (4, 1), (4, 2), (4, 4), (2, 1), (6, 5)])
@pytest.mark.parametrize("renormalize", [False, True])
def test_choice_of_experts_equals_a_loop(groups, kept, renormalize):
    """A group counts by the sum of its two best; the bias chooses and does not weigh."""
    torch.manual_seed(0)
    count, top_k, scaling = 12, 2, 2.5
    logits, bias = torch.randn(200, count, dtype=torch.float64), torch.randn(count, dtype=torch.float64) * 0.3
    chosen, weights = router.choose_experts(logits, bias, top_k, renormalize, scaling, groups, kept)
    by_best_one = 0
    for t in range(len(logits)):
        scores = [1 / (1 + math.exp(-logit)) for logit in logits[t].tolist()]
        choice = [score + offset for score, offset in zip(scores, bias.tolist(), strict=True)]
        members = [range(g * count // groups, (g + 1) * count // groups) for g in range(groups)]
        pairs = [sum(sorted(choice[e] for e in group)[-2:]) for group in members]
        best = sorted(range(groups), key=pairs.__getitem__)[-kept:]
        by_best_one += set(best) != set(sorted(range(groups), key=lambda g: max(choice[e] for e in members[g]))[-kept:])
        expected = sorted((e for g in best for e in members[g]), key=choice.__getitem__)[-top_k:]
        assert set(chosen[t].tolist()) == set(expected)
        total = sum(scores[e] for e in expected) if renormalize else 1
        for e, weight in zip(chosen[t].tolist(), weights[t].tolist(), strict=True):
            assert weight == pytest.approx(scores[e] / total * scaling, rel=1e-12)
    assert (by_best_one > 0) == (groups > kept), "the data can tell a group's best two from its best one"


def test_grouped_experts_equal_a_loop_over_tokens():
    torch.manual_seed(0)
    tokens, size, width, count, top_k = 13, 6, 4, 5, 2
    x = torch.randn(tokens, size, dtype=torch.float64)
    gate_up, down = torch.randn(count, 2 * width, size).double(), torch.randn(count, size, width).double()
    ids = torch.stack([torch.randperm(count - 1)[:top_k] for _ in range(tokens)])  # the last expert is never hit
    weights = torch.rand(tokens, top_k).double()
    asked = []

    def weights_of(expert):
        asked.append(expert)
        return gate_up[expert], down[expert]

    def activation(h):
        return situ.swiglu(*h.chunk(2, dim=-1))

    out = experts.grouped_experts(x, ids, weights, count, weights_of, activation)
    for t in range(tokens):
        expected = sum(
            weights[t, j] * (down[e] @ activation((gate_up[e] @ x[t])[None])[0]) for j, e in enumerate(ids[t].tolist())
        )
        torch.testing.assert_close(out[t], expected)
    assert asked == sorted(set(ids.flatten().tolist())), "only experts that are hit are decoded"


def test_one_token_has_the_experts_of_many():
    torch.manual_seed(0)
    gate_up, down = torch.randn(5, 12, 8, dtype=torch.float64), torch.randn(5, 8, 6, dtype=torch.float64)
    x, ids, weights = torch.randn(1, 8, dtype=torch.float64), torch.tensor([[4, 0, 3]]), torch.rand(1, 3)

    def weights_of(expert):
        return gate_up[expert], down[expert]

    def activation(rows):
        return situ.situ_glu(rows, None, 3.0, 2.0)

    expected = experts.grouped_experts(x, ids, weights.double(), 5, weights_of, activation)
    torch.testing.assert_close(experts.token_experts(x, ids, weights, weights_of, activation), expected)
    single = experts.token_experts(
        x.bfloat16(), ids, weights, lambda e: tuple(w.bfloat16() for w in weights_of(e)), activation
    )
    assert single.dtype == torch.float32


def packed_experts(seed=0):
    """Five experts [12, 64] and [64, 32]: packed weights, and their scales."""
    torch.manual_seed(seed)
    pairs = [mxfp4.quantize_mxfp4(torch.randn(5, *shape)) for shape in ((12, 64), (64, 32))]
    return [packed for packed, _ in pairs], [scale for _, scale in pairs]


def fresh(expert, weights, scales, dtype=torch.float32):
    return [mxfp4.dequantize_mxfp4(w[expert], s[expert], dtype) for w, s in zip(weights, scales, strict=True)]


def swap_data(tensor, other):
    tensor.data = other.clone()


def write(tensor, other):
    tensor.copy_(other)


def write_inferring(tensor, other):
    with torch.inference_mode():
        tensor.copy_(other)


@pytest.mark.parametrize("change", [write, write_inferring, swap_data, None])
@pytest.mark.parametrize("which", range(4))
def test_decoded_experts_are_never_stale(which, change):
    """Whichever of the four tensors is written, swapped or replaced (`change` None): to the bit as decoded anew."""
    weights, scales = packed_experts()
    others = [x for group in packed_experts(seed=1) for x in group]
    decoded = experts.DecodedExperts()
    before = decoded.of(weights, scales, torch.float32)(3)
    assert before[0] is decoded.of(weights, scales, torch.float32)(3)[0], "nothing was kept"
    if change is None:
        (weights if which < 2 else scales)[which % 2] = others[which]
    else:
        change((*weights, *scales)[which], others[which])
    after, expected = decoded.of(weights, scales, torch.float32)(3), fresh(3, weights, scales)
    assert all(torch.equal(got, wanted) for got, wanted in zip(after, expected, strict=True))
    assert not all(torch.equal(got, old) for got, old in zip(after, before, strict=True))


def test_decoded_experts_know_a_tensor_from_another_on_its_memory():
    """Versions are counted anew for it, and may come to the same number."""
    weights, scales = packed_experts()
    (other, _), _ = packed_experts(seed=1)
    weights[0].copy_(weights[0].clone())
    decoded = experts.DecodedExperts()
    decoded.of(weights, scales, torch.float32)(3)
    weights[0] = weights[0].data
    weights[0].copy_(other)
    assert torch.equal(decoded.of(weights, scales, torch.float32)(3)[0], fresh(3, weights, scales)[0])


def test_decoded_experts_stay_within_their_bytes(monkeypatch):
    weights, scales = packed_experts()
    one = 4 * (12 * 64 + 64 * 32)
    decoded = experts.DecodedExperts()
    monkeypatch.setattr(experts.DecodedExperts, "BYTES", 2 * one)
    first = decoded.of(weights, scales, torch.float32)(0)[0]
    for expert in (1, 0, 2):  # 0 was hit after 1, which goes
        decoded.of(weights, scales, torch.float32)(expert)
    assert list(decoded._kept) == [0, 2] and decoded.of(weights, scales, torch.float32)(0)[0] is first
    held = {
        x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for pair in decoded._kept.values() for x in pair
    }
    assert sum(held.values()) == 2 * one
    assert decoded.of(weights, scales, torch.bfloat16)(0)[0].dtype == torch.bfloat16
    assert not copy.deepcopy(decoded)._kept and not pickle.loads(pickle.dumps(decoded))._kept
    monkeypatch.setattr(experts.DecodedExperts, "BYTES", one - 1)
    decoded.clear()
    decoded.of(weights, scales, torch.float32)(0)
    assert not decoded._kept, "an expert that does not fit was kept"


def test_decoded_experts_of_tensors_without_versions_are_not_kept():
    with torch.inference_mode():
        weights, scales = packed_experts()
        decoded = experts.DecodedExperts()
        decoded.of(weights, scales, torch.float32)(2)
        weights[0].zero_()
        got = decoded.of(weights, scales, torch.float32)(2)
    assert not got[0].any()


def test_grouped_experts_combine_in_float32():
    """Pitfall of ports: the weighted sum of half-precision experts is accumulated in float32."""
    x = torch.ones(1, 2).bfloat16()
    gate_up, down = torch.ones(2, 4, 2).bfloat16(), torch.ones(2, 2, 2).bfloat16()
    weights = torch.tensor([[1.0, 2.0**-10]])
    out = experts.grouped_experts(
        x, torch.tensor([[0, 1]]), weights, 2, lambda e: (gate_up[e], down[e]), lambda h: h.chunk(2, dim=-1)[0]
    )
    assert out.dtype == torch.float32 and out[0, 0].item() == 4 * (1 + 2.0**-10)


@pytest.mark.skipif(not hasattr(torch.nn.functional, "grouped_mm"), reason="this torch has no grouped matrix product")
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-6), (torch.bfloat16, 6e-3)])
def test_sorted_experts_have_the_values_and_gradients_of_grouped_experts(dtype, bound):
    torch.manual_seed(0)
    tokens, size, width, count, top_k = 37, 16, 24, 8, 3
    x, gate_up, down = (
        torch.randn(shape, dtype=dtype).requires_grad_()
        for shape in ((tokens, size), (count, 2 * width, size), (count, size, width))
    )
    weights = torch.rand(tokens, top_k).requires_grad_()
    ids = torch.rand(tokens, count - 1).topk(top_k).indices  # the last expert is never hit
    seed, leaves = torch.randn(tokens, size), (x, gate_up, down, weights)

    def activation(h):
        return situ.swiglu(*h.chunk(2, dim=-1))

    ours = experts.sorted_experts(x, ids, weights, gate_up, down, activation)
    found = torch.autograd.grad((ours * seed).sum(), leaves)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    halves = exact[1].unbind(0), exact[2].unbind(0)
    theirs = experts.grouped_experts(exact[0], ids, exact[3], count, lambda e: (halves[0][e], halves[1][e]), activation)
    expected = torch.autograd.grad((theirs * seed).sum(), exact)
    assert ours.dtype == dtype
    assert [got.dtype for got in found] == [leaf.dtype for leaf in leaves] and not found[1][-1].any()
    for name, got, want in zip(
        ("out", "x", "gate_up", "down", "weights"), (ours, *found), (theirs, *expected), strict=True
    ):
        assert (got - want).norm() / want.norm() < bound, name


def test_when_the_groups_of_experts_stay_on_the_device(monkeypatch):
    """torch's grouped product takes bfloat16 on a GPU, rows of multiples of 16 bytes; an old torch has none."""

    def asked(x=torch.bfloat16, gate_up=torch.bfloat16, down=torch.bfloat16, is_cuda=True, **sizes):
        rows, hidden, width = (sizes.get(name, size) for name, size in (("rows", 96), ("hidden", 40), ("width", 48)))
        weights = torch.empty(3, rows, hidden, dtype=gate_up), torch.empty(3, hidden, width, dtype=down)
        return experts.groups_on_device(
            SimpleNamespace(is_cuda=is_cuda, dtype=x, device=torch.device("cuda")), *weights
        )

    monkeypatch.setattr(F, "grouped_mm", None, raising=False)
    assert asked()
    assert not asked(is_cuda=False)
    assert not any(asked(**{name: torch.float32}) for name in ("x", "gate_up", "down"))
    assert not asked(torch.float16, torch.float16, torch.float16)
    assert not any(asked(**{name: 44}) for name in ("rows", "hidden", "width"))
    for autocast, takes in ((torch.bfloat16, True), (torch.float16, False)):
        with monkeypatch.context() as patch:
            patch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
            patch.setattr(torch, "get_autocast_dtype", lambda device, autocast=autocast: autocast)
            assert asked(torch.float32, torch.float32, torch.float32) == asked(gate_up=torch.float32) == takes
            assert not asked(torch.float64, torch.float64, torch.float64)
    monkeypatch.delattr(F, "grouped_mm")
    assert not asked()


@pytest.mark.skipif(not hasattr(torch.nn.functional, "grouped_mm"), reason="this torch has no grouped matrix product")
def test_sorted_experts_compute_in_the_dtype_of_autocast():
    """To the bit what rounded tensors give, gradients in float32; the reference rounds at the same places."""
    torch.manual_seed(0)
    x, gate_up, down = torch.randn(40, 32), torch.randn(4, 48, 32) / 6, torch.randn(4, 32, 24) / 5
    ids, weights = torch.rand(40, 4).topk(2).indices, torch.rand(40, 2)
    activation = functools.partial(situ.swiglu, up=None)

    def run(function, *tensors):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        out = function(*leaves)
        assert out.dtype == torch.float32
        return out, *torch.autograd.grad(out.square().sum(), leaves)

    def sorted_experts(x, gate_up, down):
        return experts.sorted_experts(x, ids, weights, gate_up, down, activation, torch.float32)

    def reference(x, gate_up, down):
        return experts.grouped_experts(x, ids, weights, 4, lambda e: (gate_up[e], down[e]), activation)

    with torch.autocast("cpu", torch.bfloat16):
        got, expected = run(sorted_experts, x, gate_up, down), run(reference, x, gate_up, down)
    rounded = run(sorted_experts, *(tensor.bfloat16() for tensor in (x, gate_up, down)))
    for own, same, other in zip(got, rounded, expected, strict=True):
        assert torch.equal(own, same.float()) and own.dtype == torch.float32
        assert (own - other).norm() / other.norm() < 2**-7  # sums of bfloat16 in other orders


@pytest.mark.skipif(not hasattr(torch.nn.functional, "grouped_mm"), reason="this torch has no grouped matrix product")
@pytest.mark.parametrize("count", [2**15 - 1, 2**15, 2**15 + 9])
def test_sorted_experts_take_more_experts_than_16_bits_count(count, monkeypatch):
    """The groups' ends only grow: products on a GPU run side by side."""
    ends, grouped_mm = [], torch.nn.functional.grouped_mm
    monkeypatch.setattr(
        torch.nn.functional, "grouped_mm", lambda *operands, offs: ends.append(offs) or grouped_mm(*operands, offs=offs)
    )
    torch.manual_seed(0)
    gate_up, down = torch.rand(count, 16, 8).bfloat16(), torch.rand(count, 8, 8).bfloat16()
    ids = torch.tensor([[count - 1, 0], [3, count - 2], [count - 1, 7]])
    arguments = torch.rand(3, 8).bfloat16(), ids, torch.rand(3, 2)

    def activation(h):
        return situ.swiglu(h, None)

    ours = experts.sorted_experts(*arguments, gate_up, down, activation)
    theirs = experts.grouped_experts(*arguments, count, lambda e: (gate_up[e], down[e]), activation)
    torch.testing.assert_close(ours.float(), theirs, rtol=1e-2, atol=1e-2)
    assert (ends[0].diff() >= 0).all() and ends[0][-1] == ids.numel()
