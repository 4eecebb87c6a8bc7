"""Router replay: a forward says which experts its tokens went to, and another one takes them.

The second forward has other selection biases, with which it would choose other experts: what it computes is that of the
first only if it took them.
"""

import pytest
import torch

import tiny
from kimi_k3 import CACHE_ARGUMENT, HybridCache, KimiK3ForCausalLM

ROWS, TOKENS, LAYERS, TOP_K = 2, 11, 3, 3


def build(**changes):
    return tiny.model("kmkk", **tiny.NO_SPECIAL, **changes).double()


@pytest.fixture(scope="module")
def ids():
    return torch.randint(tiny.VOCABULARY, (ROWS, TOKENS), generator=torch.Generator().manual_seed(3))


def routers(model):
    return [layer.block_sparse_moe.gate for layer in model.model.layers if hasattr(layer, "block_sparse_moe")]


@torch.no_grad()
def other_biases(model):
    generator = torch.Generator().manual_seed(9)
    for router in routers(model):
        router.e_score_correction_bias.copy_(torch.randn(9, generator=generator))


def recorded(model, **inputs):
    """Output of a forward whose routing is asked for; the model has other biases from then on."""
    first = model(**inputs, output_routed_experts=True)
    other_biases(model)
    return first


def assert_replays(model, first, **inputs):
    again = model(**inputs, routed_experts=first.routed_experts, output_routed_experts=True)
    torch.testing.assert_close(again.logits, first.logits, rtol=1e-10, atol=1e-12)
    assert torch.equal(again.routed_experts, first.routed_experts)


@pytest.mark.one_release
@pytest.mark.parametrize("activation", ["sigmoid", "softmax"])
@torch.no_grad()
def test_a_forward_takes_the_routing_of_another(activation, ids):
    model = build(moe_router_activation_func=activation)
    assert model(ids).routed_experts is None
    first = recorded(model, input_ids=ids)
    assert first.routed_experts.shape == (ROWS, TOKENS, LAYERS, TOP_K) and first.routed_experts.dtype == torch.int64
    assert (model(ids).logits - first.logits).abs().max() > 1e-3, "the biases matter"
    assert_replays(model, first, input_ids=ids)
    first.routed_experts = first.routed_experts.to(torch.uint8)  # as somebody may keep it
    again = model(ids, routed_experts=first.routed_experts)
    assert torch.equal(again.logits, model(ids, routed_experts=first.routed_experts.long()).logits)


@pytest.mark.one_release
@torch.no_grad()
def test_padded_and_packed_rows_and_pieces_of_a_cache_take_it(ids):
    model = build()
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    first = recorded(model, input_ids=ids, attention_mask=mask)
    chosen, real = first.routed_experts, mask.bool()
    padded = model(ids, attention_mask=mask, routed_experts=chosen)
    torch.testing.assert_close(padded.logits[real], first.logits[real], rtol=1e-10, atol=1e-12)
    packed = model(
        ids[real][None],
        position_ids=torch.cat([torch.arange(n) for n in mask.sum(1)])[None],
        routed_experts=chosen[real][None],
    )
    torch.testing.assert_close(packed.logits[0], first.logits[real], rtol=1e-10, atol=1e-12)
    for places in (None, TOKENS):
        cache, at, pieces = HybridCache(model.config, max_length=places), 0, []
        for tokens in (5, 1, 1, 4):
            columns = slice(at, at + tokens)
            piece = {CACHE_ARGUMENT: cache, "attention_mask": mask[:, : at + tokens]}
            pieces.append(model(ids[:, columns], **piece, routed_experts=chosen[:, columns]).logits)
            at += tokens
        torch.testing.assert_close(torch.cat(pieces, 1)[real], first.logits[real], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["plain", "checkpointing", "re-entrant"])
def test_training_takes_it(checkpointing, ids):
    """Loss and every gradient, the router's included, are those of the first forward."""
    model = build().train()
    if checkpointing is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing})
        model.enable_input_require_grads()
    first = model(ids, labels=ids, use_cache=False, output_routed_experts=True)
    first.loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert any(gradient.any() for name, gradient in expected.items() if "gate.weight" in name)
    other_biases(model)
    model.zero_grad()
    again = model(ids, labels=ids, use_cache=False, routed_experts=first.routed_experts)
    again.loss.backward()
    torch.testing.assert_close(again.loss, first.loss, rtol=1e-12, atol=0)
    for name, p in model.named_parameters():
        if name in expected:
            torch.testing.assert_close(p.grad, expected[name], rtol=1e-8, atol=1e-12, msg=lambda m, name=name: name + m)


@pytest.mark.one_release
@torch.no_grad()
def test_minus_one_leaves_the_choice(ids):
    """Of a token and layer that has no routing, the last one of a rollout, say."""
    model = build()
    first = recorded(model, input_ids=ids)
    mixed = first.routed_experts.clone()
    mixed[:, -1], mixed[:, 4, 1] = -1, -1
    again = model(ids, routed_experts=mixed, output_routed_experts=True)
    chosen = again.routed_experts
    assert torch.equal(chosen[mixed >= 0], mixed[mixed >= 0]) and 0 <= chosen.min() and chosen.max() < 9
    assert not torch.equal(chosen[:, -1], first.routed_experts[:, -1])
    free = model(ids, routed_experts=torch.full_like(mixed, -1))
    assert torch.equal(free.logits, model(ids).logits)


REFUSALS = {
    "other-columns": (lambda e: e[:, 1:], r"here \[2, 11, 3, 3\], not \[2, 10, 3, 3\]"),
    "fractions": (torch.Tensor.double, r"must be integers .*not \[2, 11, 3, 3\] of torch.float64"),
    "a-list": (torch.Tensor.tolist, "must be integers .*not list"),
    "no-such-expert": (lambda e: e.where(e != 8, 9), "3 different experts from 0 to 8"),
    "flags": (lambda e: e.bool(), "integers .* of torch.bool"),
    "twice": (lambda e: e[..., :1].expand(-1, -1, -1, 3), "3 different experts"),
    "partly-free": (lambda e: e.index_fill(-1, torch.tensor([1]), -1), "-1 in all of these places"),
}


@pytest.mark.one_release
@torch.no_grad()
def test_what_is_no_routing_is_refused(ids):
    model = build()
    cache = HybridCache(model.config)
    chosen = model(ids, **{CACHE_ARGUMENT: cache}, output_routed_experts=True).routed_experts
    for change, sentence in REFUSALS.values():
        with pytest.raises(ValueError, match=sentence):
            model(ids, **{CACHE_ARGUMENT: cache}, routed_experts=change(chosen))
        assert cache.get_seq_length() == TOKENS
    dense = tiny.model("km", **tiny.DENSE)
    for wish in ({"output_routed_experts": True}, {"routed_experts": chosen}):
        with pytest.raises(ValueError, match="has no routed experts"):
            dense(ids, **wish)


SAMPLING = {"max_new_tokens": 6, "do_sample": True, "output_routed_experts": True, "return_dict_in_generate": True}


@pytest.mark.parametrize("way", [{}, {"prefill_chunk_size": 4}, {"cache_implementation": "static"}], ids=str)
@torch.no_grad()
def test_generate_returns_the_routing_of_what_it_fed(way, ids):
    model = build()
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    torch.manual_seed(0)
    output = model.generate(ids, attention_mask=mask, **SAMPLING, **way, output_logits=True)
    assert output.routed_experts.shape == (ROWS, TOKENS + 5, LAYERS, TOP_K)
    torch.manual_seed(0)
    assert torch.equal(output.sequences, model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=True))
    assert output.cache.get_seq_length() == output.past_key_values.get_seq_length() == TOKENS + 5
    other_biases(model)
    fed, mask = output.sequences[:, :-1], torch.cat([mask, mask.new_ones(ROWS, 5)], dim=1)
    again = model(fed, attention_mask=mask, routed_experts=output.routed_experts).logits[:, TOKENS - 1 :]
    torch.testing.assert_close(again.float(), torch.stack(output.logits, 1), rtol=1e-6, atol=1e-7)


def test_generate_refuses_what_has_no_place_for_it(ids):
    model = build()
    chosen = model(ids, output_routed_experts=True).routed_experts
    for wish, sentence in (
        ({"return_dict_in_generate": False}, "needs return_dict_in_generate=True"),
        ({"use_cache": False}, "needs use_cache=True"),
        ({"num_beams": 2}, "greedy decoding and sampling"),
        ({"prompt_lookup_num_tokens": 2}, "greedy decoding and sampling"),
        ({"routed_experts": chosen}, "generate chooses experts itself"),
    ):
        with pytest.raises(ValueError, match=sentence):
            model.generate(ids[:1], attention_mask=torch.ones_like(ids[:1]), **{**SAMPLING, **wish})


def log_probabilities(logits, sequences, start):
    """[B, T - start] of the tokens from `start` on."""
    return logits[:, start - 1 : -1].float().log_softmax(-1).gather(-1, sequences[:, start:, None])[..., 0]


@torch.no_grad()
def test_a_training_forward_repeats_a_rollout(ids):
    """To 1e-5 in float32. In bfloat16, whose routers waver, most of what differs is the routing."""
    prompts, differences = ids.repeat(12, 1), {}
    for dtype in (torch.float32, torch.bfloat16):
        model = tiny.model("kmkk", **tiny.NO_SPECIAL, initializer_range=0.1).to(dtype)
        for router in routers(model):  # scores near one another, as those of many experts are
            router.weight.mul_(0.1)
        torch.manual_seed(1)
        mask = torch.ones_like(prompts)
        rollout = model.generate(prompts, attention_mask=mask, **SAMPLING, output_logits=True)
        sampled = torch.stack(rollout.logits, 1).log_softmax(-1).gather(-1, rollout.sequences[:, TOKENS:, None])[..., 0]
        routed = torch.nn.functional.pad(rollout.routed_experts, (0, 0, 0, 0, 0, 1), value=-1)
        for replayed in (False, True):
            training = model(rollout.sequences, use_cache=False, routed_experts=routed if replayed else None)
            found = log_probabilities(training.logits, rollout.sequences, TOKENS)
            differences[dtype, replayed] = (found - sampled).abs().max().item()
    assert differences[torch.float32, True] < 1e-5
    assert differences[torch.bfloat16, True] < differences[torch.bfloat16, False] / 2


def test_both_classes_take_it(data_dir):
    """The multimodal class hands it on."""
    from kimi_k3 import KimiK3ForConditionalGeneration

    folder = data_dir / "k3_tiny_mxfp4"
    whole = KimiK3ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    text = KimiK3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.arange(10, 20)[None]
    with torch.no_grad():
        chosen = whole(ids, output_routed_experts=True).routed_experts
        assert torch.equal(text(ids, routed_experts=chosen).logits, whole(ids).logits)
    output = whole.generate(ids, attention_mask=torch.ones_like(ids), **SAMPLING)
    assert torch.equal(output.routed_experts[:, :10], chosen)
