"""A model from a config alone: it starts sane, learns, and every parameter that was used gets a gradient."""

import math

import pytest
import torch

import tiny
from kimi_k3 import KimiK3ForCausalLM
from kimi_k3.kernels import mxfp4

# Four experts, so that every one of them gets tokens.
FEW = {"num_experts": 4, "num_experts_per_token": 2}
VARIANTS = {
    "k3": {},
    "kimi-linear": tiny.KIMI_LINEAR,
    "dense": tiny.DENSE,
    "grouped-routing": {"num_expert_group": 2, "topk_group": 1},
    "tied": {"tie_word_embeddings": True},
}


def build(seed=0, dtype=torch.float32, **changes):
    torch.manual_seed(seed)
    return KimiK3ForCausalLM._from_config(tiny.config("kkmkm", **{**FEW, **changes}), dtype=dtype)


def batch():
    return torch.randint(3, tiny.VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_every_tensor_is_finite_and_follows_the_seed(variant, dtype):
    """Fault 15: no uninitialised memory, reproducible by seed, first loss near ln(vocabulary)."""
    model, same, other = (build(seed, dtype, **VARIANTS[variant]) for seed in (0, 0, 1))
    for name, tensor in model.state_dict().items():
        assert torch.isfinite(tensor).all(), name
        assert torch.equal(tensor, same.state_dict()[name]), name
    assert not torch.equal(model.model.embed_tokens.weight, other.model.embed_tokens.weight)
    ids = batch()
    loss = model(ids, labels=ids).loss.item()
    assert loss == pytest.approx(math.log(tiny.VOCABULARY), abs=0.2)


def test_initial_values_of_the_papers():
    bounded = build().model.layers[0].self_attn
    assert (bounded.A_log == 0).all(), "no channel of the bounded gate starts saturated"
    softplus = build(**tiny.KIMI_LINEAR).model.layers[0].self_attn
    assert (softplus.A_log >= 0).all() and (softplus.A_log <= math.log(16)).all() and softplus.A_log.std() > 0
    for layer in (bounded, softplus):
        step = torch.nn.functional.softplus(layer.dt_bias)
        assert (step > 0.9e-3).all() and (step < 1.1e-1).all()
    layer = build().model.layers[1]
    assert (layer.mlp_res_proj.weight == 0).all(), "Attention Residuals start as a plain average"
    assert (layer.block_sparse_moe.gate.e_score_correction_bias == 0).all()


def test_every_tensor_is_drawn_anew():
    """Whatever memory held before, by the deviation that the configuration names."""
    model = build()
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.detach().fill_(7)
        tensor._is_hf_initialized = False
    for module in model.modules():
        model._init_weights(module)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if "conv" in name:
            bound = tensor.shape[-1] ** -0.5
            assert 0.9 * bound < tensor.abs().max() <= bound, name
        elif "norm" in name:
            assert (tensor == 1).all(), name
        elif "res_proj" in name or "correction_bias" in name or name.endswith("A_log"):
            assert (tensor == 0).all(), name
        elif not name.endswith("dt_bias"):
            values, std = tensor.double(), model.config.initializer_range
            assert values.std().item() == pytest.approx(std, rel=5 / tensor.numel() ** 0.5), name
            assert values.mean().abs() < 5 * std / tensor.numel() ** 0.5, name


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_reach_every_parameter_that_was_used(variant):
    """Fault 15: experts, gates, decay parameters. Layer 0's first depth mix has one source: its gradient is zero."""
    model = build(**VARIANTS[variant]).train()
    with torch.no_grad():  # away from zero, where the norm weights beside the queries have no gradient yet
        for name, parameter in model.named_parameters():
            if "res_proj" in name:
                parameter.normal_(0, 0.5)
    ids = batch()
    model(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        if name.startswith("model.layers.0.self_attention_res"):
            assert parameter.grad.eq(0).all()  # and not None, which DDP would wait for
            continue
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.abs().sum() > 0, name
    assert "e_score_correction_bias" not in " ".join(name for name, _ in model.named_parameters()), "fault 105"


def test_training_learns_and_repeats_bit_for_bit():
    """Fault 15: the same seed gives identical runs; a few steps fit a batch."""

    def run():
        model = build().train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        ids, losses = batch(), []
        for _ in range(15):
            loss = model(ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    first = run()
    assert first == run()
    assert first[-1] < first[0] - 1.0


def test_mixed_precision_keeps_the_float32_parts():
    """Autocast does not reach gate, recurrence, router or depth mix: bf16 stays near float32, gradients are finite."""
    model, ids = build().train(), batch()
    expected = model(ids).logits
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(ids, labels=ids)
    output.loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    cosine = torch.nn.functional.cosine_similarity(output.logits.float(), expected, dim=-1)
    assert cosine.min() > 0.99


def test_routing_bias_chooses_but_does_not_weigh():
    """Faults 104, 105: the same bias gives the same experts in train and eval, and moves no mixture weight."""
    router = build().model.layers[1].block_sparse_moe.gate
    x = torch.randn(50, 56)
    router.e_score_correction_bias.copy_(torch.tensor([3.0, 0.0, 0.0, -3.0]))
    logits, chosen, weights = router.train()(x)
    assert (chosen == 0).any(-1).all() and not (chosen == 3).any()
    assert torch.equal(router.eval()(x)[1], chosen)
    scores = torch.sigmoid(logits).gather(-1, chosen)
    torch.testing.assert_close(weights, scores / scores.sum(-1, keepdim=True))


def test_group_limited_routing_keeps_to_the_best_groups():
    router = build(**VARIANTS["grouped-routing"]).model.layers[1].block_sparse_moe.gate
    router.e_score_correction_bias.copy_(torch.tensor([-9.0, -9.0, -9.5, -9.5]))  # masked groups must not win at 0
    _, chosen, _ = router(torch.randn(50, 56))
    groups = chosen // 2
    assert (groups[:, 0] == groups[:, 1]).all() and (groups == 0).all()


def test_router_and_combine_are_float32_in_a_half_precision_model():
    moe = build(dtype=torch.bfloat16).model.layers[1].block_sparse_moe
    logits, _, weights = moe.gate(torch.randn(5, 56).bfloat16())
    assert logits.dtype == weights.dtype == torch.float32
    assert moe.gate.e_score_correction_bias.dtype == torch.float32


def test_replacing_one_expert_changes_only_its_tokens():
    """Fault 13: experts are addressable."""
    model = build()
    moe = model.model.layers[1].block_sparse_moe
    x = torch.randn(1, 40, 56)
    before, *_ = moe(x)
    chosen = moe.gate(x[0])[1]
    with torch.no_grad():
        moe.experts.down_proj[2].zero_()
    after, *_ = moe(x)
    hit = (chosen == 2).any(-1)
    assert hit.any() and not hit.all()
    assert torch.equal(before[0, ~hit], after[0, ~hit])
    assert not torch.allclose(before[0, hit], after[0, hit])


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_transformers_expert_backends_agree(implementation):
    model, ids = build(), batch()
    expected = model(ids).logits
    model.set_experts_implementation(implementation)
    torch.testing.assert_close(model(ids).logits, expected, atol=1e-4, rtol=1e-3)


def test_packed_experts_refuse_other_backends_and_start_sane():
    model = build(**tiny.PACKED)
    experts = model.model.layers[1].block_sparse_moe.experts
    weight = mxfp4.dequantize_mxfp4(experts.gate_up_proj_packed, experts.gate_up_proj_scale, torch.float32)
    assert weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert torch.isfinite(model(batch()).logits).all()
    with pytest.raises(ValueError, match="dequantize=True"):
        model.set_experts_implementation("grouped_mm")
