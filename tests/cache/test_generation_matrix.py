"""`generate` over modes x kinds of cache x shapes of a batch, against loops that know neither cache nor padding.

Expected tokens come from `alone`: each row by itself, unpadded, whole, again for every token. Greedy, sampled and beam
text is then found by the few lines below; what has more rules (eos in beams, logits processors) runs transformers' own
loop over that naive forward.
"""

import contextlib
import dataclasses
import functools
import inspect

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    TextIteratorStreamer,
    pipeline,
)
from transformers.generation.streamers import BaseStreamer
from transformers.modeling_outputs import CausalLMOutput

import tiny
from kimi_k3 import CACHE_ARGUMENT as CACHE
from kimi_k3 import HybridCache
from pairwise import pairwise

VOCABULARY = tiny.VOCABULARY
NEW = 5
BEAMS = 3


def small_model(layers, k3, seed=1):
    """The weights are large, so that every token matters."""
    family = {} if k3 else tiny.KIMI_LINEAR
    return tiny.model(layers, seed, **{"initializer_range": 0.23, **family})


FAMILIES = ["k3", "kimi-linear"]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return small_model("kmk", True) if request.param == "k3" else small_model("km", False)


def foreign_model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    return LlamaForCausalLM(config).eval()


def tokens(length, seed):
    return torch.randint(3, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed))


@dataclasses.dataclass(frozen=True)
class Shape:
    """Lengths of the rows (the shorter ones are padded on the left) and how they are handed to `generate`."""

    lengths: tuple[int, ...]
    embeds: bool = False
    ids: bool = True
    mask: bool = False

    def rows(self):
        return [tokens(length, 10 * i + length) for i, length in enumerate(self.lengths)]

    def padded(self):
        """ids [B, T] and mask [B, T]."""
        width = max(self.lengths)
        ids, mask = (torch.zeros(len(self.lengths), width, dtype=torch.long) for _ in range(2))
        for row, text in enumerate(self.rows()):
            ids[row, width - len(text) :], mask[row, width - len(text) :] = text, 1
        return ids, mask

    def inputs(self, model):
        ids, mask = self.padded()
        given = {"input_ids": ids} if self.ids else {}
        given |= {"inputs_embeds": model.get_input_embeddings()(ids).detach()} if self.embeds else {}
        return given | ({"attention_mask": mask} if self.mask else {})


SHAPES = {
    "one": Shape((21,)),
    "one-with-mask": Shape((21,), mask=True),
    "left-padded": Shape((5, 21, 13), mask=True),
    "embeds": Shape((17, 17), embeds=True, ids=False),
    "embeds-padded": Shape((9, 17), embeds=True, ids=False, mask=True),
    "ids-and-embeds": Shape((9, 17), embeds=True, mask=True),
    "one-token": Shape((1,)),
    "chunk-minus-1": Shape((63,)),
    "chunk": Shape((64,)),
    "chunk-plus-1": Shape((65,)),
}


def alone(model, rows):
    """[n] ids of every row -> next logits [B, V]."""
    with torch.no_grad():
        return torch.cat([model(row[None], use_cache=False).logits[:, -1] for row in rows])


def greedy(model, rows, steps=NEW):
    for _ in range(steps):
        rows = [torch.cat([row, best[None]]) for row, best in zip(rows, alone(model, rows).argmax(-1), strict=True)]
    return torch.stack([row[-steps:] for row in rows])


def sample(model, rows, steps=NEW, returned=1):
    rows = [row for row in rows for _ in range(returned)]
    for _ in range(steps):
        chosen = torch.multinomial(torch.softmax(alone(model, rows), -1), 1)
        rows = [torch.cat([row, token]) for row, token in zip(rows, chosen, strict=True)]
    return torch.stack([row[-steps:] for row in rows])


def beams(model, rows, steps=NEW):
    """The BEAMS best of each row, best first; no token ends a text."""
    found = []
    for row in rows:
        held = [(0.0, row)]
        for _ in range(steps):
            scores = alone(model, [text for _, text in held]).log_softmax(-1)
            scores += torch.tensor([score for score, _ in held])[:, None]
            best = scores.flatten().topk(BEAMS)
            held = [
                (score.item(), torch.cat([held[place // VOCABULARY][1], (place % VOCABULARY)[None]]))
                for score, place in zip(*best, strict=True)
            ]
        found += [text[-steps:] for _, text in held]
    return torch.stack(found)


@contextlib.contextmanager
def naive_forward(model):
    """Inside, a forward runs every row alone and returns only the last logits; for `generate(use_cache=False)`."""
    forward = model.forward

    @functools.wraps(forward)  # generate reads the signature
    def row_by_row(input_ids=None, attention_mask=None, **kwargs):
        assert kwargs.get(CACHE) is None
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        rows = [ids[real.bool()] for ids, real in zip(input_ids, mask, strict=True)]
        return CausalLMOutput(logits=torch.cat([forward(row[None], use_cache=False).logits[:, -1:] for row in rows]))

    model.forward = row_by_row
    yield
    del model.forward


NO_EOS = {"max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0}
SAMPLING = {"do_sample": True, "top_k": 0}
MODES = {
    "greedy": (greedy, {"do_sample": False}),
    "sample": (sample, SAMPLING),
    "sample-three": (functools.partial(sample, returned=3), {**SAMPLING, "num_return_sequences": 3}),
    "beams": (beams, {"num_beams": BEAMS, "num_return_sequences": BEAMS, "do_sample": False}),
    "beam-sample": (None, {"num_beams": BEAMS, "num_return_sequences": 2, **SAMPLING}),
}


@functools.cache
def expected(model, shape, mode):
    loop, settings = MODES[mode]
    torch.manual_seed(3)
    if loop is not None:
        return loop(model, shape.rows())
    ids, mask = shape.padded()
    with naive_forward(model):
        return model.generate(ids, attention_mask=mask, use_cache=False, **NO_EOS, **settings)[:, -NEW:]


def cache_of_first_half(model, shape, copies):
    """What the model holds after half of the columns, one row for each that `generate` will run."""
    ids, mask = shape.padded()
    half = ids.shape[1] // 2
    cache = HybridCache(model.config)
    with torch.no_grad():
        model(ids[:, :half], attention_mask=mask[:, :half], **{CACHE: cache})
    if copies > 1:
        cache.batch_repeat_interleave(copies)
    return cache


def can_be(family, name, kind, mode):
    """A cache goes on with at least one new token, and transformers turns the cache on for inputs_embeds."""
    shape = SHAPES[name]
    return not (kind == "continued" and max(shape.lengths) == 1) and not (kind == "none" and shape.embeds)


MATRIX = pairwise(FAMILIES, SHAPES, ["dynamic", "own", "continued", "none"], MODES, allowed=can_be)


@pytest.mark.parametrize("model, name, kind, mode", MATRIX, indirect=["model"])
def test_matrix(model, name, kind, mode):
    """Faults 31, 42: a row's text is what the row alone gives, whatever cache, neighbours and form of the input."""
    shape, settings = SHAPES[name], MODES[mode][1]
    inputs = shape.inputs(model)
    if kind == "none":
        inputs["use_cache"] = False
    elif kind == "own":
        inputs[CACHE] = HybridCache(model.config)
    elif kind == "continued":
        copies = max(settings.get("num_beams", 1), settings.get("num_return_sequences", 1))
        inputs[CACHE] = cache_of_first_half(model, shape, copies)
    torch.manual_seed(3)
    text = model.generate(**inputs, **NO_EOS, **settings)
    assert text.shape[1] == NEW + (max(shape.lengths) if shape.ids else 0)
    assert torch.equal(text[:, -NEW:], expected(model, shape, mode))
    if kind == "own":
        assert inputs[CACHE].get_seq_length() == max(shape.lengths) + NEW - 1


@pytest.mark.parametrize("mode", ["greedy", "sample", "sample-three"])
@pytest.mark.parametrize("name", ["one", "left-padded", "embeds", "one-token", "chunk-minus-1"])
def test_two_turns_on_a_returned_cache(model, name, mode):
    """Faults 46, 47: two tokens, then the others on the cache that came back, are one run; by the new ids alone too."""
    shape, settings = SHAPES[name], MODES[mode][1]
    inputs = shape.inputs(model)
    copies = settings.get("num_return_sequences", 1)
    torch.manual_seed(3)
    first = model.generate(**inputs, **{**NO_EOS, "max_new_tokens": 2}, **settings, return_dict_in_generate=True)
    ids = torch.cat([shape.padded()[0].repeat_interleave(copies, 0), first.sequences[:, -2:]], dim=1)
    mask = torch.nn.functional.pad(shape.padded()[1].repeat_interleave(copies, 0), (0, 2), value=1)
    rest = {**NO_EOS, "max_new_tokens": NEW - 2, **settings, "num_return_sequences": 1, "attention_mask": mask}
    state, wanted = torch.get_rng_state(), expected(model, shape, mode)[:, 2:]
    cache = first[CACHE]
    assert cache.get_seq_length() == ids.shape[1] - 1
    for new_only in (False, True):
        torch.set_rng_state(state)
        text = model.generate(ids[:, -1:] if new_only else ids, **{CACHE: cache.snapshot()}, **rest)
        assert torch.equal(text[:, 2 - NEW :], wanted)


def test_the_second_turn_of_a_batch_whose_rows_ended_apart(model):
    """Padding lies in the middle then. On the cache of the first turn, which read it as tokens, that is refused."""
    ids, mask = SHAPES["left-padded"].padded()
    settings = {**NO_EOS, "max_new_tokens": 8, "do_sample": False}
    ending = {**settings, "eos_token_id": list(range(3, 20)), "return_dict_in_generate": True}
    first = model.generate(ids, attention_mask=mask, **ending)
    said = (first.sequences[:, ids.shape[1] :] != 0).long()
    assert said.sum(1).unique().numel() > 1
    turn = torch.stack([tokens(4, row) for row in range(3)])
    both, both_mask = torch.cat([first.sequences, turn], 1), torch.cat([mask, said, torch.ones_like(turn)], 1)
    rows = [text[real.bool()] for text, real in zip(both, both_mask, strict=True)]
    assert torch.equal(model.generate(both, attention_mask=both_mask, **settings)[:, -8:], greedy(model, rows, 8))
    with pytest.raises(ValueError, match="rows ended before others"):
        model.generate(both, attention_mask=both_mask, **{CACHE: first[CACHE]}, **settings)


CHUNKS = pairwise(
    FAMILIES, ["one", "left-padded", "chunk-plus-1"], ["dynamic", "continued", "new-ids-only"], [1, 7, 64, 500]
)


@pytest.mark.parametrize("model, name, kind, chunk", CHUNKS, indirect=["model"])
def test_prefill_in_chunks(model, name, kind, chunk):
    """Any chunk size, a cache that already holds a part, and the ids it lacks alone, too."""
    shape, seen = SHAPES[name], []
    inputs = shape.inputs(model)
    ids, mask = shape.padded()
    if kind != "dynamic":
        inputs[CACHE] = cache_of_first_half(model, shape, 1)
    if kind == "new-ids-only":
        inputs |= {"input_ids": ids[:, ids.shape[1] // 2 :], "attention_mask": mask}
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    text = model.generate(**inputs, prefill_chunk_size=chunk, **NO_EOS, do_sample=False)
    hook.remove()
    assert torch.equal(text[:, -NEW:], expected(model, shape, "greedy"))
    new = ids.shape[1] - (0 if kind == "dynamic" else ids.shape[1] // 2)
    prefill = seen[: 1 - NEW]
    assert sum(prefill) == new and max(prefill) == min(chunk, new) and len(prefill) == -(-new // chunk)


ASSISTED = pairwise(
    FAMILIES,
    ["one", "padded", "one-token", "chunk", "repetitive"],
    ["dynamic", "own", "chunks"],
    ["drafter", "llama", "itself", "prompt-lookup", "early-exit"],
)


@pytest.mark.parametrize("model, name, kind, mode", ASSISTED, indirect=["model"])
def test_assisted_decoding(model, name, kind, mode):
    """Faults 36, 37: whoever drafts, the text is that of greedy decoding."""
    row = tokens(6, 1).repeat(5) if name == "repetitive" else tokens({"one-token": 1, "chunk": 64}.get(name, 21), 4)
    ids, mask = row[None], torch.ones(1, len(row), dtype=torch.long)
    if name == "padded":
        ids, mask = torch.nn.functional.pad(ids, (4, 0)), torch.nn.functional.pad(mask, (4, 0))
    settings = {
        "drafter": {"assistant_model": small_model("k", True, seed=2)},
        "llama": {"assistant_model": foreign_model()},
        "itself": {"assistant_model": model},
        "prompt-lookup": {"prompt_lookup_num_tokens": 4},
        "early-exit": {"assistant_early_exit": 1},
    }[mode]
    settings |= {"dynamic": {}, "own": {CACHE: HybridCache(model.config)}, "chunks": {"prefill_chunk_size": 5}}[kind]
    text = model.generate(ids, attention_mask=mask, **NO_EOS, do_sample=False, **settings)
    assert torch.equal(text[:, -NEW:], greedy(model, [row]))


def test_an_early_exit_runs_the_first_layers_only(model):
    """The draft stops after the given layers, and the model is whole afterwards."""
    ran = []
    hooks = [layer.register_forward_hook(lambda *_, i=i: ran.append(i)) for i, layer in enumerate(model.model.layers)]
    model.generate(tokens(9, 0)[None], assistant_early_exit=1, **NO_EOS, do_sample=False)
    for hook in hooks:
        hook.remove()
    last = len(model.model.layers) - 1
    assert ran.count(0) > ran.count(last) > 0
    assert model.config.num_hidden_layers == last + 1


def test_our_model_drafts_for_another(model):
    llama, ids = foreign_model(), tokens(12, 0)[None]
    assert torch.equal(
        llama.generate(ids, assistant_model=model, **NO_EOS, do_sample=False),
        llama.generate(ids, **NO_EOS, do_sample=False),
    )


def test_sampling_with_a_drafter_follows_the_seed(model):
    """The draws of the draft and of the model repeat bit for bit."""
    drafter, ids = small_model("k", True, seed=2), tokens(12, 0)[None]

    def draw(seed):
        torch.manual_seed(seed)
        return model.generate(ids, assistant_model=drafter, **NO_EOS, **SAMPLING)

    assert torch.equal(draw(0), draw(0))
    assert len({tuple(draw(seed)[0].tolist()) for seed in range(5)}) > 1


PROCESSORS = {
    "repetition_penalty": {"repetition_penalty": 1.7},
    "no_repeat_ngram": {"no_repeat_ngram_size": 1},
    "bad_words": {"bad_words_ids": [[i] for i in range(3, 30)]},
    "suppress": {"suppress_tokens": list(range(30, 60))},
    "sequence_bias": {"sequence_bias": [[[9], 5.0], [[9, 10], 20.0]]},
    "forced_eos": {"forced_eos_token_id": 2, "eos_token_id": 2},
    "min_new_tokens": {"min_new_tokens": 4, "eos_token_id": list(range(3, 50))},
    "eos": {"eos_token_id": list(range(3, 20))},
    "length_penalty_by_step": {"exponential_decay_length_penalty": (2, 1.5), "eos_token_id": list(range(3, 30))},
    "only_some": {"prefix_allowed_tokens_fn": lambda row, ids: list(range(20, 30))},
    "temperature": {**SAMPLING, "temperature": 0.7, "top_p": 0.9, "top_k": 20},
    "min_p": {**SAMPLING, "min_p": 0.2, "typical_p": 0.95},
    "renormalised": {**SAMPLING, "repetition_penalty": 1.2, "renormalize_logits": True},
}


@functools.cache
def unprocessed(model, num_beams):
    ids, mask = SHAPES["left-padded"].padded()
    settings = {**NO_EOS, "max_new_tokens": 7, "do_sample": False, "num_beams": num_beams}
    with naive_forward(model):
        return model.generate(ids, attention_mask=mask, use_cache=False, **settings)


@pytest.mark.one_release
@pytest.mark.parametrize("model, name, num_beams", pairwise(FAMILIES, PROCESSORS, [1, BEAMS]), indirect=["model"])
def test_logits_processors(model, name, num_beams):
    """What works on the scores works on those of the row alone; some rows of a batch end before others."""
    settings = {**NO_EOS, "max_new_tokens": 7, "do_sample": False, "num_beams": num_beams, **PROCESSORS[name]}
    ids, mask = SHAPES["left-padded"].padded()
    torch.manual_seed(5)
    text = model.generate(ids, attention_mask=mask, **settings)
    with naive_forward(model):
        torch.manual_seed(5)
        assert torch.equal(text, model.generate(ids, attention_mask=mask, use_cache=False, **settings))
    plain = unprocessed(model, num_beams)
    assert text.shape != plain.shape or not torch.equal(text, plain), "the setting acts at all"


ENDS = pairwise(FAMILIES, [False, True, "never"], [-1.0, 0.0, 2.0])


@pytest.mark.one_release
@pytest.mark.parametrize("model, early_stopping, length_penalty", ENDS, indirect=["model"])
def test_beams_that_end(model, early_stopping, length_penalty):
    """Beams leave at different steps, so the rows of the cache are reordered and repeated in every way."""
    settings = {**NO_EOS, "max_new_tokens": 9, "num_beams": 4, "num_return_sequences": 4, "do_sample": False}
    settings |= {
        "eos_token_id": list(range(3, 15)),
        "length_penalty": length_penalty,
        "early_stopping": early_stopping,
    }
    ids, mask = SHAPES["left-padded"].padded()
    with naive_forward(model):
        wanted = model.generate(ids, attention_mask=mask, use_cache=False, **settings)
    assert torch.equal(model.generate(ids, attention_mask=mask, **settings), wanted)


@pytest.fixture(scope="module")
def tokenizer():
    """Every id is one letter; stop strings want a to f among them."""
    letters = {chr(ord("0") + i): i for i in range(VOCABULARY)}
    made = Tokenizer(models.BPE(letters, merges=[]))
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="0", eos_token="2")


def test_stop_strings_and_criteria(model, tokenizer):
    """Rows stop where their own text has the string or a criterion says so, and the others go on."""
    shape = SHAPES["left-padded"]
    ids, mask = shape.padded()
    full = greedy(model, shape.rows(), 8)
    stop = tokenizer.decode(full[0, 1:3])
    ends = [text.find(stop) + 2 if stop in text else 8 for text in tokenizer.batch_decode(full)]
    assert ends[0] <= 3 and max(ends) == 8
    wanted = full.masked_fill(torch.arange(8) >= torch.tensor(ends)[:, None], 0)
    settings = {**NO_EOS, "max_new_tokens": 8, "do_sample": False, "attention_mask": mask}
    settings["eos_token_id"] = VOCABULARY  # never made; without one transformers lets a stopped row go on
    text = model.generate(ids, stop_strings=[stop], tokenizer=tokenizer, **settings)
    assert torch.equal(text[:, -8:], wanted)

    class SecondRowAfterThree(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.tensor([False, input_ids.shape[1] >= ids.shape[1] + 3, False])

    text = model.generate(ids, stopping_criteria=[SecondRowAfterThree()], **settings)
    wanted = full.clone()
    wanted[1, 3:] = 0
    assert torch.equal(text[:, -8:], wanted)
    assert torch.equal(model.generate(ids, max_time=0.0, **settings)[:, ids.shape[1] :], full[:, :1])


@pytest.mark.parametrize("assisted", [False, True], ids=["plain", "assisted"])
def test_streamers(model, tokenizer, assisted):
    """What is streamed is the prompt and then the text, in order; beams cannot be streamed."""
    row, pieces = tokens(9, 0), []
    wanted = greedy(model, [row])[0]

    class Collect(BaseStreamer):
        def put(self, value):
            pieces.append(value.flatten())

        def end(self):
            pieces.append(None)

    settings = {**NO_EOS, "do_sample": False} | ({"prompt_lookup_num_tokens": 3} if assisted else {})
    model.generate(row[None], streamer=Collect(), **settings)
    assert pieces.pop() is None and torch.equal(torch.cat(pieces), torch.cat([row, wanted]))
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    model.generate(row[None], streamer=streamer, **settings)
    assert "".join(streamer) == tokenizer.decode(wanted)
    if not assisted:
        with pytest.raises(ValueError, match="beam search"):
            model.generate(row[None], streamer=Collect(), num_beams=2, **settings)


def test_text_generation_pipeline(model, tokenizer):
    """The pipeline pads a batch by itself."""
    rows = [tokens(5, 1), tokens(11, 2)]
    tokenizer.padding_side = "left"
    run = pipeline("text-generation", model=model, tokenizer=tokenizer, batch_size=2)
    texts = run(tokenizer.batch_decode(rows), return_full_text=False, **NO_EOS, do_sample=False)
    wanted = tokenizer.batch_decode(greedy(model, rows), skip_special_tokens=True)
    assert [text[0]["generated_text"] for text in texts] == wanted


def test_classifier_free_guidance(model):
    """Its second forward keeps a cache of its own."""
    settings = {**NO_EOS, "do_sample": False, "guidance_scale": 1.5}
    for negative in ({}, {"negative_prompt_ids": tokens(5, 9)[None]}):
        row = unconditional = tokens(12, 0)
        start, unconditional = len(row), negative["negative_prompt_ids"][0] if negative else row[-1:]
        for _ in range(NEW):
            with_prompt, without = alone(model, [row, unconditional]).log_softmax(-1)
            best = (1.5 * (with_prompt - without) + without).argmax()[None]
            row, unconditional = torch.cat([row, best]), torch.cat([unconditional, best])
        text = model.generate(tokens(12, 0)[None], **negative, **settings)
        assert torch.equal(text[0, start:], row[start:])


@pytest.mark.parametrize("mode", ["greedy", "sample", "beams"])
def test_what_can_be_returned(model, mode):
    """Scores, logits, hidden states and attentions of every step are those of one forward over the whole text."""
    ids, mask = SHAPES["left-padded"].padded()
    settings = {**NO_EOS, **MODES[mode][1], "return_dict_in_generate": True, "output_attentions": True}
    settings |= {"output_scores": True, "output_logits": True, "output_hidden_states": True}
    torch.manual_seed(3)
    output = model.generate(ids, attention_mask=mask, **settings)
    assert len(output.scores) == len(output.logits) == len(output.hidden_states) == len(output.attentions) == NEW
    text_config = model.config
    assert len(output.hidden_states[0]) == text_config.num_hidden_layers + 1
    assert len(output.attentions[0]) == text_config.layer_types.count("full_attention")
    if mode == "beams":
        paths = model.compute_transition_scores(output.sequences, output.scores, output.beam_indices)
        torch.testing.assert_close(paths.sum(1) / NEW, output.sequences_scores, atol=1e-4, rtol=1e-4)
        return
    width = ids.shape[1]
    for row, real in enumerate(mask):
        start = int(width - real.sum())
        with torch.no_grad():
            whole = model(
                output.sequences[row : row + 1, start:-1],
                output_hidden_states=True,
                output_attentions=True,
                use_cache=False,
            )
        logits = torch.stack([step[row] for step in output.logits])
        torch.testing.assert_close(logits, whole.logits[0, -NEW:], atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(torch.stack([step[row] for step in output.scores]), logits)
        for layer, states in enumerate(whole.hidden_states):
            got = torch.cat([step[layer][row] for step in output.hidden_states])[start:]
            torch.testing.assert_close(got, states[0], atol=1e-3, rtol=1e-3)
        for layer, weights in enumerate(whole.attentions):
            for step, got in enumerate(output.attentions):
                last = width - start + step - 1
                torch.testing.assert_close(
                    got[layer][row, :, -1, start:], weights[0, :, last, : last + 1], atol=1e-4, rtol=1e-3
                )


@pytest.mark.parametrize("seed", range(6))
def test_batch_composition_never_changes_greedy_text(model, seed):
    """Fault 31: random batches and padding, a row that is there twice: each text is that of the row alone."""
    generator = torch.Generator().manual_seed(seed)
    count = int(torch.randint(2, 6, (1,), generator=generator))
    rows = [tokens(int(torch.randint(1, 90, (1,), generator=generator)), 100 * seed + i) for i in range(count)]
    rows.append(rows[0])
    extra = int(torch.randint(0, 70, (1,), generator=generator))
    width = max(map(len, rows)) + extra  # columns that are padding in every row, too
    ids, mask = (torch.zeros(len(rows), width, dtype=torch.long) for _ in range(2))
    for row, text in enumerate(rows):
        ids[row, width - len(text) :], mask[row, width - len(text) :] = text, 1
    settings = {**NO_EOS, "max_new_tokens": 8, "do_sample": False}
    together = model.generate(ids, attention_mask=mask, **settings)[:, -8:]
    assert torch.equal(together, greedy(model, rows, 8))


@pytest.mark.parametrize(
    "settings, sentence",
    [
        ({"penalty_alpha": 0.6, "top_k": 4}, "Contrastive Search requires"),
        ({"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}, "Group Beam Search requires"),
        ({"num_beams": 4, "force_words_ids": [[7]]}, "Constrained Beam Search requires"),
        ({"dola_layers": "low"}, "Dola Generation requires"),
        ({"use_mtp": True}, "num_mtp_layers"),
        ({"prompt_lookup_num_tokens": 3, "use_cache": False}, "cache"),
        ({"prefill_chunk_size": 4, "use_cache": False}, "without a cache"),
        ({"inputs_embeds": True, "prefill_chunk_size": 4}, "prefill_chunk_size splits input_ids"),
        ({"inputs_embeds": True, "prompt_lookup_num_tokens": 4}, "starts from input_ids"),
        ({"position_ids": torch.arange(12)[None] % 6}, "packed documents cannot share a cache"),
        ({"position_ids": torch.arange(12)[None] % 6, "prefill_chunk_size": 5}, "cannot continue a cache"),
        ({"cu_seq_lens_q": torch.tensor([0, 6, 12])}, "packed documents cannot share a cache"),
        ({"unknown": 1}, "not used by the model"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_generate_refuses(model, settings, sentence):
    """Modes that transformers moved out of its package, and inputs that would give another text without a word."""
    ids = tokens(12, 0)[None]
    if "inputs_embeds" in settings:
        settings = {**settings, "inputs_embeds": model.get_input_embeddings()(ids).detach()}
    with pytest.raises((ValueError, RuntimeError), match=sentence):
        model.generate(ids, **NO_EOS, **settings)


@torch.no_grad()
def test_embeddings_of_all_tokens_continue_a_cache(model):
    """As with ids; the new ones alone are refused, of which transformers would cut off as many as the cache holds."""
    ids, cache = tokens(12, 0)[None], HybridCache(model.config)
    model(ids[:, :9], **{CACHE: cache})
    embeds, mask = model.get_input_embeddings()(ids), torch.ones_like(ids)
    settings = {**NO_EOS, "do_sample": False, "attention_mask": mask}
    with pytest.raises(ValueError, match="inputs_embeds"):
        model.generate(inputs_embeds=embeds[:, 9:], **settings, **{CACHE: cache.snapshot()})
    text = model.generate(inputs_embeds=embeds, **settings, **{CACHE: cache})
    assert torch.equal(text[:, -NEW:], greedy(model, [ids[0]]))


def test_a_mask_of_another_length_is_refused(model):
    """Neither all ids so far nor the new ones only: transformers would cut the prompt in the wrong place."""
    shape = SHAPES["one"]
    ids = shape.padded()[0]
    for columns in (ids.shape[1] - 1, ids.shape[1] + 1):
        with pytest.raises(ValueError, match="the mask of all tokens"):
            cache = cache_of_first_half(model, shape, 1)
            model.generate(ids, attention_mask=torch.ones(1, columns).long(), **{CACHE: cache}, **NO_EOS)


def test_custom_loops_and_the_start_token(model):
    """A callable as `custom_generate`, and a text that starts from nothing but the start token."""

    def reversed_preference(model, input_ids, stopping_criteria, **kwargs):
        assert "generation_config" in kwargs
        while not stopping_criteria(input_ids, None).all():
            logits = model(input_ids, use_cache=False).logits[:, -1]
            input_ids = torch.cat([input_ids, logits.argmin(-1, keepdim=True)], dim=1)
        return input_ids

    assert "custom_generate" in inspect.signature(model.generate).parameters
    text = model.generate(tokens(5, 0)[None], custom_generate=reversed_preference, **NO_EOS)
    assert text.shape == (1, 5 + NEW) and text[0, 5] == alone(model, [tokens(5, 0)])[0].argmin()
    start = torch.tensor([model.config.bos_token_id])
    assert torch.equal(model.generate(**NO_EOS, do_sample=False)[:, 1:], greedy(model, [start]))
