"""`cache_implementation="static"`: buffers that never move, the text of the growing cache, no graph but the first."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, CompileConfig

from kimi_k3 import CACHE_ARGUMENT as CACHE
from kimi_k3 import HybridCache
from pairwise import pairwise
from rounding import EXACT

NEW, PROMPT = 10, 37


FOLDERS = ["k3_tiny_mxfp4", "kimi_linear_flat", "k3_dense_flat"]
# Has every kind of layer but one: the gate of the other family. For what compiles, which takes seconds.
every_kind_of_layer = pytest.mark.parametrize("model", ["k3_tiny_mxfp4"], indirect=True)


@pytest.fixture(scope="module", params=FOLDERS)
def model(request, data_dir):
    return AutoModelForCausalLM.from_pretrained(data_dir / request.param, dtype=torch.float32).double()


@pytest.fixture
def few_layers(model, monkeypatch):
    """Every kind of layer, with a border of blocks of the depth mix: tracing takes as long as there are layers."""
    text = model.config.get_text_config()
    monkeypatch.setattr(text, "num_hidden_layers", 4 if text.num_experts else 5)


def tokens(rows, length, seed=0):
    return torch.randint(3, 160, (rows, length), generator=torch.Generator().manual_seed(seed))


def mask_of(padding):
    mask = torch.ones(2, PROMPT, dtype=torch.long)
    if padding == "left":
        mask[0, :9] = 0
    elif padding == "middle":
        mask[0, 5:11] = 0
        mask[1, 30:33] = 0
    return mask


def generate(model, ids, mask, **kwargs):
    settings = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, **kwargs}
    return model.generate(ids, attention_mask=mask, **settings)


def addresses(cache):
    buffers = [buffer for layer in cache.layers for buffer in (*layer.buffers, layer.seq_length)]
    return [buffer.data_ptr() for buffer in (*buffers, cache.real)]


HOW = {
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "chunks": {"prefill_chunk_size": 8},
    "more room": {"max_cache_len": 100},
}


@pytest.mark.parametrize("model, padding, how", pairwise(FOLDERS, ["none", "left", "middle"], HOW), indirect=["model"])
def test_the_text_is_that_of_the_growing_cache(model, padding, how):
    ids, mask, how = tokens(2, PROMPT), mask_of(padding), HOW[how]
    plain = {name: value for name, value in how.items() if name != "max_cache_len"}
    expected = generate(model, ids, mask, **plain)
    assert torch.equal(generate(model, ids, mask, cache_implementation="static", **how), expected)


@pytest.mark.parametrize("padding", ["none", "left"])
def test_a_static_cache_is_continued(model, padding):
    """Two turns on one static cache equal one run without it; the buffers stay where they are."""
    ids, mask, cache = tokens(2, PROMPT), mask_of(padding), HybridCache(model.config, max_length=80)
    first = generate(model, ids, mask, **{CACHE: cache})
    before = addresses(cache)
    turn = torch.cat([first, tokens(2, 5, 1)], dim=1)
    mask = torch.nn.functional.pad(mask, (0, turn.shape[1] - PROMPT), value=1)
    assert torch.equal(generate(model, turn, mask, **{CACHE: cache}), generate(model, turn, mask))
    assert addresses(cache) == before


@pytest.mark.portable
@pytest.mark.parametrize("wide", [True, False], ids=["one column a place", "one column a token"])
@torch.no_grad()
def test_padding_anywhere(model, wide):
    """Padding in a prefill, in a later piece and in single steps, with both forms of the mask."""
    ids, places = tokens(2, 40), 48
    mask = torch.zeros(2, places, dtype=torch.long)
    mask[:, :40] = torch.rand(2, 40, generator=torch.Generator().manual_seed(2)) < 0.6
    cache, outputs, start = HybridCache(model.config, max_length=places), [], 0
    for size in (20, 1, 1, 1, 10, 1, 1, 1, 1, 1, 1, 1):
        stop = start + size
        seen = mask if wide else mask[:, :stop]
        outputs.append(model(ids[:, start:stop], attention_mask=seen, **{CACHE: cache}).logits)
        start = stop
    logits = torch.cat(outputs, dim=1)
    for row in range(2):
        real = mask[row, :40].bool()
        torch.testing.assert_close(logits[row, real], model(ids[row, real][None]).logits[0], **EXACT)


@torch.no_grad()
def test_the_smallest_cache_holds_a_token(model):
    ids = tokens(2, 2)
    cache = HybridCache(model.config, max_length=1)
    assert torch.equal(model(ids[:, :1], **{CACHE: cache}).logits, model(ids[:, :1]).logits)
    with pytest.raises(RuntimeError, match="has room for 1 tokens"):
        model(ids[:, 1:], **{CACHE: cache})
    with pytest.raises(ValueError, match="max_length=0: a static cache needs room for a token"):
        HybridCache(model.config, max_length=0)


@pytest.mark.one_release
@pytest.mark.parametrize("model", ["k3_tiny_mxfp4", "kimi_linear_flat"], indirect=True)
@torch.no_grad()
def test_decoding_compiles_once(model, few_layers):
    """One graph without a break serves every step, padded rows included, and writes the buffers in place."""
    ids, places, graphs = tokens(2, PROMPT + 6), 48, []
    mask = torch.zeros(2, places, dtype=torch.long)
    mask[:, : PROMPT + 6] = 1
    mask[0, :9], mask[1, PROMPT + 2] = 0, 0
    cache = HybridCache(model.config, max_length=places)
    model(ids[:, :PROMPT], attention_mask=mask, **{CACHE: cache})
    before = addresses(cache)
    torch._dynamo.reset()
    step = torch.compile(model, fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    logits = [step(ids[:, t : t + 1], attention_mask=mask, **{CACHE: cache}).logits for t in range(PROMPT, PROMPT + 6)]
    assert len(graphs) == 1
    assert addresses(cache) == before
    for row in range(2):
        real = mask[row, : PROMPT + 6].bool()
        expected = model(ids[row, real][None]).logits[0]
        got = torch.cat(logits, dim=1)[row, real[PROMPT:]]
        torch.testing.assert_close(got, expected[-len(got) :], **EXACT)


@every_kind_of_layer
def test_generate_compiles_the_decoding(model, few_layers):
    """transformers' own compilation of a generation with a static cache: no break, and the same text."""
    ids, mask, graphs = tokens(2, PROMPT), mask_of("left"), []
    torch._dynamo.reset()
    config = CompileConfig(
        fullgraph=True, mode=None, backend=lambda graph, _: graphs.append(graph) or graph.forward, dynamic=False
    )
    config._compile_all_devices = True
    text = generate(model, ids, mask, cache_implementation="static", compile_config=config)
    assert len(graphs) == 1
    assert torch.equal(text, generate(model, ids, mask))


@torch.no_grad()
def test_operations_keep_the_addresses(model):
    """Snapshot, restore, reset and reorder write the buffers that are there, so a captured graph stays valid."""
    ids, cache = tokens(2, 20), HybridCache(model.config, max_length=30)
    first = model(ids, **{CACHE: cache}).logits
    before, kept = addresses(cache), cache.snapshot()
    following = model(ids[:, :1], **{CACHE: cache}).logits
    cache.restore(kept)
    assert cache.get_seq_length() == 20
    assert torch.equal(model(ids[:, :1], **{CACHE: cache}).logits, following)
    cache.restore(kept)
    cache.reorder_cache(torch.tensor([1, 0]))
    swapped = model(ids[:, :1].flip(0), **{CACHE: cache}).logits
    torch.testing.assert_close(swapped, following.flip(0), **EXACT)
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.nbytes == 0
    assert torch.equal(model(ids, **{CACHE: cache}).logits, first)
    assert addresses(cache) == before
    other = copy.deepcopy(cache)
    other.batch_repeat_interleave(2)
    assert other.batch_size == 4 and cache.batch_size == 2 and len(other.real) == 4
    repeated = model(ids[:, :1].repeat_interleave(2, 0), **{CACHE: other}).logits
    torch.testing.assert_close(repeated, following.repeat_interleave(2, 0), **EXACT)


@pytest.mark.parametrize("wide", [True, False], ids=["one column a place", "one column a token"])
@torch.no_grad()
def test_what_was_fed_as_a_token_cannot_become_padding(model, wide, tmp_path):
    """The states hold it; also in single steps, after every operation of the cache, and from a file."""
    ids, places, mask = tokens(2, 30), 40, torch.zeros(2, 40, dtype=torch.long)
    mask[:, :30] = 1
    mask[0, :4], mask[1, 13] = 0, 0
    cache, empty = HybridCache(model.config, max_length=places), HybridCache(model.config, max_length=places)
    for start, stop in ((0, 12), (12, 13), (13, 14), (14, 20)):
        model(ids[:, start:stop], attention_mask=mask, **{CACHE: cache})
    cache.save(tmp_path / "cache.safetensors", model)
    selected, repeated, restored = (copy.deepcopy(cache) for _ in range(3))
    selected.reorder_cache(torch.tensor([1, 0]))
    repeated.batch_repeat_interleave(2)
    kept = restored.snapshot()
    model(ids[:, 20:22], attention_mask=mask, **{CACHE: restored})
    restored.restore(kept)
    empty.restore(kept)
    for held, order in [
        (cache, [0, 1]),
        (HybridCache.load(tmp_path / "cache.safetensors", model), [0, 1]),
        (selected, [1, 0]),
        (repeated, [0, 0, 1, 1]),
        (restored, [0, 1]),
        (empty, [0, 1]),
    ]:
        before, static = held.get_seq_length() + 0, held.is_compileable
        for length in (1, 3):
            seen = mask[order] if wide and static else mask[order, : 20 + length]
            step = length == 1 and wide and static
            for column in (1, 13, 19):
                other = seen.clone()
                other[0, column] = 1 - other[0, column]
                with pytest.raises(RuntimeError if step else ValueError, match="contradicts the one under which"):
                    model(ids[order, 20 : 20 + length], attention_mask=other, **{CACHE: held})
            with pytest.raises(ValueError, match="holds padding"):
                model(ids[order, 20 : 20 + length], **{CACHE: held})
            assert held.get_seq_length() == before
        output = model(ids[order, 20:23], attention_mask=seen, **{CACHE: held})
        torch.testing.assert_close(
            output.logits, model(ids[order, :23], attention_mask=mask[order, :23]).logits[:, 20:], **EXACT
        )
    cache.reset()
    model(tokens(1, 3), **{CACHE: cache})


@pytest.mark.one_release
@every_kind_of_layer
@torch.no_grad()
def test_padding_that_came_in_a_step_wants_its_mask(model, few_layers):
    """Nobody has read its value, so the next step asserts it where it lies; compiled too, and a longer piece raises."""
    ids, mask = tokens(2, 16), torch.ones(2, 20, dtype=torch.long)
    mask[1, 11] = 0
    for step in (model, torch.compile(model, fullgraph=True, backend="eager")):
        torch._dynamo.reset()
        cache = HybridCache(model.config, max_length=20)
        model(ids[:, :10], **{CACHE: cache})
        for t in (10, 11):
            step(ids[:, t : t + 1], attention_mask=mask, **{CACHE: cache})
        with pytest.raises(RuntimeError, match="holds padding"):
            step(ids[:, 12:13], **{CACHE: cache})
        with pytest.raises(ValueError, match="holds padding"):
            model(ids[:, 12:15], **{CACHE: cache})
        step(ids[:, 12:13], attention_mask=mask, **{CACHE: cache})


def test_the_second_turn_of_a_batch_whose_rows_ended_apart(model):
    """As for the growing cache: on the cache of the first turn, which read the padding as tokens, it is refused."""
    ids, mask, cache = tokens(2, PROMPT), mask_of("left"), HybridCache(model.config, max_length=80)
    plain = generate(model, ids, mask)[:, PROMPT:]
    settings = {"eos_token_id": int(plain[0, 2]), "pad_token_id": 0, "min_new_tokens": None}
    first = generate(model, ids, mask, **{CACHE: cache}, **settings)
    said = (first[:, PROMPT:] != 0).long()
    assert said.sum(1).unique().numel() > 1
    turn = tokens(2, 4, 1)
    both = torch.cat([first, turn], dim=1)
    both_mask = torch.cat([mask, said, torch.ones_like(turn)], dim=1)
    with pytest.raises(ValueError, match="rows ended before others"):
        generate(model, both, both_mask, **{CACHE: cache})


def test_static_cache_crosses_inference_mode_and_is_saved(model, tmp_path):
    ids, cache = tokens(1, 20), HybridCache(model.config, max_length=30)
    with torch.inference_mode():
        model(ids[:, :12], **{CACHE: cache})
        cache.batch_repeat_interleave(2)
    cache.save(tmp_path / "cache.safetensors", model)
    loaded = HybridCache.load(tmp_path / "cache.safetensors", model)
    assert loaded.get_seq_length() == 12
    with torch.no_grad():
        expected = model(ids).logits[:, 12:].expand(2, -1, -1)
        for held in (cache, loaded):
            steps = [model(ids[:, t : t + 1].expand(2, -1), **{CACHE: held}).logits for t in range(12, 20)]
            torch.testing.assert_close(torch.cat(steps, dim=1), expected, **EXACT)


@pytest.mark.parametrize("length", [1, 3])
def test_a_refused_step_under_autograd_changes_nothing(model, length):
    """The fused step writes states in place; forgetting `no_grad` once must not spoil them."""
    ids = tokens(2, PROMPT + length)
    with torch.no_grad():
        cache = HybridCache(model.config, max_length=50)
        model(ids[:, :PROMPT], **{CACHE: cache})
    with pytest.raises(ValueError, match=r"torch\.no_grad"):
        model(ids[:, PROMPT:], **{CACHE: cache})
    assert not any(tensor.requires_grad for layer in cache.layers for tensor in layer.tensors())
    with torch.no_grad():
        got = model(ids[:, PROMPT:], **{CACHE: cache}).logits
        torch.testing.assert_close(got, model(ids).logits[:, PROMPT:], **EXACT)


def test_what_a_static_cache_cannot_do_is_said(model):
    ids = tokens(1, 12)
    with pytest.raises(ValueError, match=r"torch\.no_grad"):
        model(ids, **{CACHE: HybridCache(model.config, max_length=20)})
    with torch.no_grad():
        with pytest.raises(ValueError, match="room for 8 tokens"):
            model(ids, **{CACHE: HybridCache(model.config, max_length=8)})
        cache = HybridCache(model.config, max_length=12)
        model(ids, **{CACHE: cache})
        with pytest.raises(RuntimeError, match="room for 12 tokens"):
            model(ids[:, :1], **{CACHE: cache})
    cache.crop(0)
    with pytest.raises(ValueError, match="cannot take tokens back"):
        cache.crop(-1)
    with pytest.raises(ValueError, match="cannot take tokens back"):
        cache.activate_past_recording()
    with pytest.raises(ValueError, match="must not move"):
        HybridCache(model.config, max_length=8, offload=True)
    for name in ("quantized", "offloaded_static", "sliding_window"):
        with pytest.raises(ValueError, match=r"(use one of 'dynamic', 'static', 'offloaded'|Invalid)"):
            generate(model, ids, torch.ones_like(ids), cache_implementation=name)
