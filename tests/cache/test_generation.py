"""`generate` and the cache, on the tiny K3 with MLA, KDA, Attention Residuals and packed experts."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

import kimi_k3
from kimi_k3 import HybridCache
from rounding import EXACT

CACHE = kimi_k3.CACHE_ARGUMENT
NEW = 12


@pytest.fixture(scope="module")
def model(data_dir):
    return AutoModelForCausalLM.from_pretrained(data_dir / "k3_tiny_mxfp4", dtype=torch.float32).double()


@pytest.fixture
def prompt():
    return torch.randint(3, 160, (2, 37), generator=torch.Generator().manual_seed(0))


def generate(model, ids, **kwargs):
    kwargs = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, **kwargs}
    kwargs.setdefault("attention_mask", torch.ones_like(ids))
    return model.generate(ids, **kwargs)


def test_cache_changes_nothing(model, prompt):
    assert torch.equal(generate(model, prompt), generate(model, prompt, use_cache=False))


def test_sampling_is_reproducible(model, prompt):
    def sample(seed):
        torch.manual_seed(seed)
        return generate(model, prompt, do_sample=True, temperature=1.0, top_p=0.95)

    assert torch.equal(sample(0), sample(0))
    assert not torch.equal(sample(0), sample(1))


@pytest.mark.parametrize("returned", [1, 3])
def test_beams_with_and_without_cache(model, prompt, returned):
    """Faults 42, 44: beam search reorders every state, with several returned sequences too."""
    kwargs = {"num_beams": 3, "num_return_sequences": returned}
    assert torch.equal(generate(model, prompt, **kwargs), generate(model, prompt, use_cache=False, **kwargs))


def test_batch_composition_does_not_change_greedy_text(model, prompt):
    """Fault 31: the same prompt beside short and long neighbours, padded on the left."""
    alone = generate(model, prompt[:1])[0, -NEW:]
    for length in (3, 60):
        neighbour = torch.randint(3, 160, (1, length), generator=torch.Generator().manual_seed(length))
        width = max(length, 37)
        ids, mask = torch.zeros(2, width, dtype=torch.long), torch.zeros(2, width, dtype=torch.long)
        for row, tokens in enumerate((prompt[0], neighbour[0])):
            ids[row, width - len(tokens) :] = tokens
            mask[row, width - len(tokens) :] = 1
        both = generate(model, ids, attention_mask=mask)
        assert torch.equal(both[0, -NEW:], alone)


def test_generate_continues_from_a_returned_cache(model, prompt):
    """Faults 46, 47: a second turn on the returned cache equals one long run; one copy serves two follow-ups."""
    first = generate(model, prompt, return_dict_in_generate=True)
    cache = first.past_key_values
    for seed in (1, 2):
        turn = torch.randint(3, 160, (2, 5), generator=torch.Generator().manual_seed(seed))
        ids = torch.cat([first.sequences, turn], dim=1)
        expected = generate(model, ids)
        assert torch.equal(generate(model, ids, **{CACHE: copy.deepcopy(cache)}), expected)


def test_prefill_in_chunks(model, prompt):
    fed = []
    hook = model.get_input_embeddings().register_forward_hook(lambda module, args, out: fed.append(args[0].shape[1]))
    text = generate(model, prompt, prefill_chunk_size=8)
    hook.remove()
    assert fed == [8, 8, 8, 8, 5, *[1] * (NEW - 1)]
    assert torch.equal(text, generate(model, prompt))


def test_inputs_embeds(model, prompt):
    embeds = model.get_input_embeddings()(prompt)
    torch.testing.assert_close(model(inputs_embeds=embeds).logits, model(prompt).logits, **EXACT)
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model(prompt, inputs_embeds=embeds)


def test_logits_to_keep(model, prompt):
    whole = model(prompt).logits
    torch.testing.assert_close(model(prompt, logits_to_keep=2).logits, whole[:, -2:], **EXACT)
    positions = torch.tensor([0, 5])
    torch.testing.assert_close(model(prompt, logits_to_keep=positions).logits, whole[:, positions], **EXACT)


@torch.no_grad()
def test_batch_operations_of_the_cache(model, prompt):
    """Fault 44: select, repeat and reorder act on every tensor of every layer."""
    following = prompt[:, :1]

    def after(operation, rows):
        cache = HybridCache(model.config)
        model(prompt, **{CACHE: cache})
        operation(cache)
        got = model(following[rows], **{CACHE: cache}).logits
        expected = model(torch.cat([prompt, following], dim=1)[rows]).logits[:, -1:]
        torch.testing.assert_close(got, expected, **EXACT)
        assert all(layer.batch_size == len(rows) for layer in cache.layers) and cache.batch_size == len(rows)

    after(lambda cache: cache.batch_select_indices(torch.tensor([1])), [1])
    after(lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1])
    after(lambda cache: cache.reorder_cache(torch.tensor([1, 0])), [1, 0])


@torch.no_grad()
def test_reset_and_deepcopy(model, prompt):
    cache = HybridCache(model.config)
    first = model(prompt, **{CACHE: cache}).logits
    kept = copy.deepcopy(cache)
    model(prompt, **{CACHE: cache})
    assert kept.get_seq_length() == prompt.shape[1], "a copy does not follow"
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.nbytes == 0
    assert torch.equal(model(prompt, **{CACHE: cache}).logits, first)


@torch.no_grad()
def test_cache_holds_latents_and_states_only(model, prompt):
    """K3 caches kv_lora_rank + rope values a token and MLA layer, and a constant for each KDA layer."""
    cache = HybridCache(model.config)
    model(prompt, **{CACHE: cache})
    text = model.config.text_config
    linear = text.linear_attn_config
    channels = linear["num_heads"] * linear["head_dim"]
    state = channels * linear["head_dim"] + 3 * 3 * channels
    latents = prompt.shape[1] * (text.kv_lora_rank + text.qk_rope_head_dim)
    expected = 2 * 8 * (5 * state + 2 * latents)  # 2 rows of float64, 5 KDA and 2 MLA layers
    assert cache.nbytes == expected
    storages = [t.untyped_storage() for layer in cache.layers for t in layer.tensors()]
    held = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    assert held <= expected + 2 * 8 * 2 * 64 * (text.kv_lora_rank + text.qk_rope_head_dim), "no view of a whole prompt"
    assert all(layer.state.recurrent.dtype == torch.float64 for layer in cache.layers if hasattr(layer, "state"))


def test_states_are_float32_in_a_half_precision_model(data_dir, prompt):
    half = AutoModelForCausalLM.from_pretrained(data_dir / "k3_tiny_mxfp4", dtype=torch.bfloat16)
    cache = HybridCache(half.config)
    with torch.no_grad():
        half(prompt, **{CACHE: cache})
        half(prompt[:, :1], **{CACHE: cache})
    assert cache.layers[0].state.recurrent.dtype == torch.float32
    assert cache.layers[3].latents.dtype == torch.bfloat16


def test_what_the_cache_cannot_do_is_said(model, prompt):
    """A foreign cache and cache kinds that have no place for states are refused, not half used."""
    with pytest.raises(TypeError, match="use HybridCache"):
        model(prompt, **{CACHE: DynamicCache()})
    for implementation in ("quantized", "offloaded_static"):
        with pytest.raises(ValueError, match="HybridCache"):
            generate(model, prompt, cache_implementation=implementation)


def test_a_mask_may_be_written_after_its_forward(model, prompt):
    """What was padding is remembered, and not where the caller keeps it."""
    mask = torch.ones(2, 38, dtype=torch.bool)
    mask[0, :3] = False
    cache, given = HybridCache(model.config), mask[:, :-1].clone()
    model(prompt, attention_mask=given, **{CACHE: cache})
    given.fill_(True)
    again = model(prompt[:, :1], attention_mask=mask, **{CACHE: cache}).logits
    whole = model(torch.cat([prompt, prompt[:, :1]], dim=1), attention_mask=mask).logits[:, -1:]
    torch.testing.assert_close(again, whole, **EXACT)


def test_images_are_refused(model, prompt):
    with pytest.raises(ValueError, match="this model reads text only, its config has no vision_config"):
        model(prompt, pixel_values=torch.zeros(1, 3, 14, 14))


@torch.no_grad()
def test_hidden_states_are_what_the_layers_read(model, prompt):
    output = model(prompt, output_hidden_states=True, output_router_logits=True)
    text = model.config.text_config
    assert len(output.hidden_states) == text.num_hidden_layers + 1
    torch.testing.assert_close(output.hidden_states[0], model.get_input_embeddings()(prompt), **EXACT)
    torch.testing.assert_close(model.get_output_embeddings()(output.hidden_states[-1]), output.logits, **EXACT)
    assert len(output.router_logits) == 6 and output.router_logits[0].shape == (prompt.numel(), text.num_experts)


@torch.no_grad()
def test_autograd_keeps_earlier_latents(model, prompt):
    """A cache built under autograd is not written in place: gradients reach the first piece."""
    with torch.enable_grad():
        embeds = model.get_input_embeddings()(prompt).detach().requires_grad_()
        cache = HybridCache(model.config)
        model(inputs_embeds=embeds[:, :20], **{CACHE: cache})
        model(inputs_embeds=embeds[:, 20:], **{CACHE: cache}).logits[:, -1].sum().backward()
        split = embeds.grad.clone()
        embeds.grad = None
        model(inputs_embeds=embeds).logits[:, -1].sum().backward()
    torch.testing.assert_close(split, embeds.grad, **EXACT)
