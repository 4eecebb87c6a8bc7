"""Plain `generate` by captured steps: the text, caches and buffers of it without them.

Without a GPU a graph is a stand-in that runs the captured forward again on the very tensors it was captured with, so
that buffers, growth, reuse and returned caches are those of a GPU.
"""

import contextlib
import copy
import gc
import io
import logging
import threading
import weakref

import pytest
import torch
from transformers import AutoModelForCausalLM, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

import tiny
from kimi_k3 import CACHE_ARGUMENT as CACHE
from kimi_k3 import HybridCache, generation_kimi_k3, graph_kimi_k3
from kimi_k3.serving.prefix_cache import PrefixCache
from pairwise import pairwise

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
# Captured steps read the cache in another split of the sums than a growing cache's.
CLOSE = {"atol": 1e-4, "rtol": 1e-4}
NEW, PROMPT = 12, 9


class StandIn:
    """A graph that is run in Python: `replay` fills the `outputs` of the first replay."""

    def __init__(self, model, inputs):
        self._model, self._inputs, self.outputs = weakref.ref(model), inputs, None

    def replay(self):
        outputs = self._model()(**self._inputs)
        if self.outputs is None:
            with torch.inference_mode(False):
                self.outputs = type(outputs)(**{**outputs, "logits": outputs.logits.clone()})
        else:
            self.outputs.logits.copy_(outputs.logits)


class Captures:
    """Counts captures and replays."""

    def __init__(self, monkeypatch):
        self.captured, self.replayed = 0, 0
        graph = graph_kimi_k3.Graph if ON_GPU else StandIn

        class Counted(graph):
            def __init__(counted, *arguments):
                super().__init__(*arguments)
                self.captured += 1

            def replay(counted):
                super().replay()
                self.replayed += 1

        monkeypatch.setattr(graph_kimi_k3, "Graph", Counted)
        monkeypatch.setattr(graph_kimi_k3, "_kept", weakref.WeakKeyDictionary())
        monkeypatch.setattr(generation_kimi_k3, "has_graphs", lambda device: True)


@pytest.fixture
def captures(monkeypatch):
    return Captures(monkeypatch)


@pytest.fixture
def tight(monkeypatch):
    """Buffers with room for three more columns, so that a text outgrows them every fourth token."""
    monkeypatch.setattr(graph_kimi_k3, "room_for", lambda columns: columns + 3)


def load(data_dir, folder="k3_dense_flat"):
    model = AutoModelForCausalLM.from_pretrained(data_dir / folder, dtype=torch.float32)
    return model.to(DEVICE).eval()


FOLDERS = ["k3_tiny_mxfp4", "k3_dense_flat", "kimi_linear_flat"]


@pytest.fixture(scope="module", params=FOLDERS)
def every_model(request, data_dir):
    return load(data_dir, request.param)


@pytest.fixture
def model(data_dir):
    return load(data_dir)


def tokens(rows, length, seed=0, most=160):
    return torch.randint(3, most, (rows, length), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def mask_of(rows, padded):
    mask = torch.ones(rows, PROMPT, dtype=torch.long, device=DEVICE)
    if padded:
        mask[0, :4] = 0
    return mask


def generate(model, ids, new=NEW, seed=5, **options):
    torch.manual_seed(seed)
    settings = {"max_new_tokens": new, "eos_token_id": None, "do_sample": False, **options}
    return model.generate(ids, **settings)


def plain(model, ids, *arguments, **options):
    return generate(model, ids, *arguments, disable_compile=True, **options)


def with_cache(run, model, ids, *arguments, **options):
    """The text and the cache of a run."""
    output = run(model, ids, *arguments, return_dict_in_generate=True, **options)
    return output.sequences, output[CACHE]


def contents(cache):
    return [tensor.clone() for layer in cache.layers for tensor in layer.tensors()]


def assert_same_state(cache, other):
    assert cache.get_seq_length() == other.get_seq_length()
    for got, expected in zip(contents(cache), contents(other), strict=True):
        torch.testing.assert_close(got, expected, **CLOSE)


def messages(caplog):
    return [record.message for record in caplog.records if "without a CUDA graph" in record.message]


BATCHES = {"one": (1, False), "two": (2, False), "padded": (2, True)}
MODES = {"greedy": {}, "sampled": {"do_sample": True, "top_k": 20}}


@pytest.mark.parametrize("every_model, batch, mode", pairwise(FOLDERS, BATCHES, MODES), indirect=["every_model"])
def test_the_text_is_that_without_captured_steps(every_model, captures, batch, mode):
    (rows, padded), how = BATCHES[batch], MODES[mode]
    ids = tokens(rows, PROMPT)
    how = how | ({"attention_mask": mask_of(rows, padded)} if padded else {})
    expected = plain(every_model, ids, **how)
    assert captures.captured == 0
    assert torch.equal(generate(every_model, ids, **how), expected)
    again = tokens(rows, PROMPT, seed=1)
    assert torch.equal(generate(every_model, again, **how), plain(every_model, again, **how))
    # greedy and sampled calls share a step; the first call's first one runs as it is
    assert captures.captured <= 1 and captures.replayed >= 2 * (NEW - 1) - 1


@pytest.mark.one_release
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_buffers_grow_with_the_text(every_model, captures, tight, padded):
    ids, mask = tokens(2, PROMPT), mask_of(2, padded)
    expected, reference = with_cache(plain, every_model, ids, attention_mask=mask)
    text, cache = with_cache(generate, every_model, ids, attention_mask=mask)
    assert torch.equal(text, expected)
    assert captures.captured == 3  # room for 4 steps each, of which the first is not replayed
    assert_same_state(cache, reference)
    assert (cache.real is None) == (not padded) and (not padded or torch.equal(cache.real, reference.real))


@pytest.mark.one_release
def test_room_grows_by_half_at_most():
    capacities = [graph_kimi_k3.room_for(columns) for columns in range(1, 10000)]
    assert all(room >= n + graph_kimi_k3.SPARE for n, room in enumerate(capacities, start=1))
    assert all(room <= 1.5 * (n + graph_kimi_k3.SPARE) for n, room in enumerate(capacities, start=1))


@pytest.mark.one_release
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_turns_on_a_returned_cache(every_model, captures, padded):
    """Its latents are where they were: nothing is captured or copied anew."""
    ids, mask = tokens(2, PROMPT), mask_of(2, padded)
    text, cache = with_cache(generate, every_model, ids, attention_mask=mask)
    buffers = [layer.buffer for layer in cache.layers if hasattr(layer, "buffer")]
    for turn in range(3):
        text = torch.cat([text, tokens(2, 5, seed=turn + 1)], dim=1)
        mask = torch.nn.functional.pad(mask, (0, text.shape[1] - mask.shape[1]), value=1)
        expected = plain(every_model, text, attention_mask=mask)
        text = generate(every_model, text, attention_mask=mask, **{CACHE: cache})
        assert torch.equal(text, expected)
    assert captures.captured <= 1
    assert all(a is b for a, b in zip(buffers, [x.buffer for x in cache.layers if hasattr(x, "buffer")], strict=True))


@pytest.mark.one_release
def test_a_first_cache_that_is_still_in_use(every_model, captures):
    """The second call gets buffers of its own; the third takes those of a cache that is gone."""
    ids, others = tokens(1, PROMPT), tokens(1, PROMPT, seed=1)
    text, first = with_cache(generate, every_model, ids)
    _, reference = with_cache(plain, every_model, ids)
    captures.captured = 0
    assert torch.equal(generate(every_model, others), plain(every_model, others))
    assert captures.captured == 1
    assert_same_state(first, reference)
    more = torch.cat([text, tokens(1, 3)], dim=1)
    assert torch.equal(generate(every_model, more, **{CACHE: first}), plain(every_model, more))
    for seed in range(3):
        others = tokens(1, PROMPT, seed)
        assert torch.equal(with_cache(generate, every_model, others)[0], plain(every_model, others))
    assert captures.captured == 1


@pytest.mark.one_release
@torch.no_grad()
def test_a_returned_cache_can_do_what_it_could(model, captures, tmp_path):
    ids, turn = tokens(2, PROMPT), tokens(2, 4, seed=1)

    def caches():
        text, reference = with_cache(plain, model, ids)
        again, cache = with_cache(generate, model, ids)
        assert torch.equal(text, again)
        return cache, reference

    def logits(cache, of=turn):
        return model(of, **{CACHE: cache}).logits

    cache, reference = caches()
    assert cache.nbytes == reference.nbytes and cache.batch_size == 2
    copied, kept = copy.deepcopy(cache), cache.snapshot()
    assert_same_state(copied, reference)
    cache.save(tmp_path / "cache.safetensors", model)
    assert_same_state(HybridCache.load(tmp_path / "cache.safetensors", model), reference)
    torch.testing.assert_close(logits(cache), logits(reference), **CLOSE)
    cache.restore(kept)
    assert_same_state(cache, copied)

    cache, reference = caches()
    for each in (cache, reference):
        each.activate_past_recording()
        logits(each)
        each.crop(-3)
    assert_same_state(cache, reference)
    cache, reference = caches()
    for each in (cache, reference):
        each.reorder_cache(torch.tensor([1, 0], device=DEVICE))
        each.batch_repeat_interleave(2)
    torch.testing.assert_close(logits(cache, tokens(4, 3)), logits(reference, tokens(4, 3)), **CLOSE)
    cache, reference = caches()
    kept = contents(cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    torch.testing.assert_close(logits(cache), model(turn).logits, **CLOSE)
    assert all(map(torch.equal, kept, contents(caches()[0])))


class Watcher(StoppingCriteria):
    """Calls a function after every token."""

    def __init__(self, function):
        self.function, self.seen = function, 0

    def __call__(self, input_ids, scores, **kwargs):
        self.seen += 1
        stop = self.function(self.seen)
        return torch.full((len(input_ids),), bool(stop), device=input_ids.device)


@pytest.mark.one_release
def test_snapshots_in_the_middle(model, captures):
    """A fork that is taken between two steps stays what it was, and can go on by itself."""
    ids, cache, reference = tokens(1, PROMPT), *(HybridCache(model.config) for _ in range(2))
    forks, expected = [], []
    watch = Watcher(lambda seen: forks.append(cache.snapshot()) if seen in (2, 5, 6) else None)
    text = generate(model, ids, stopping_criteria=[watch], **{CACHE: cache})
    watch = Watcher(lambda seen: expected.append(reference.snapshot()) if seen in (2, 5, 6) else None)
    assert torch.equal(text, plain(model, ids, stopping_criteria=[watch], **{CACHE: reference}))
    for fork, other in zip(forks, expected, strict=True):
        assert_same_state(fork, other)
        stands = fork.get_seq_length()
        assert torch.equal(generate(model, text[:, : stands + 1], 20 - stands, **{CACHE: fork}), text[:, :21])
    assert_same_state(cache, reference)


@pytest.mark.one_release
def test_states_kept_at_columns_that_steps_pass(model, captures):
    ids, cache, reference = tokens(1, PROMPT), *(HybridCache(model.config) for _ in range(2))
    for run, each in ((generate, cache), (plain, reference)):
        each.keep_states([PROMPT + 1, PROMPT + 4])
        run(model, ids, **{CACHE: each})
    for column in (PROMPT + 1, PROMPT + 4):
        assert_same_state(cache.snapshot(column), reference.snapshot(column))


class Stop(Exception):
    pass


@pytest.mark.one_release
@pytest.mark.parametrize(
    "every_model, at, how", pairwise(FOLDERS, [1, 2, 6], ["stops", "raises"]), indirect=["every_model"]
)
def test_a_break_in_the_middle(every_model, captures, at, how):
    """The cache is that of the tokens fed so far and goes on from there; the next call finds the buffers free."""
    ids, cache, reference = tokens(1, PROMPT), *(HybridCache(every_model.config) for _ in range(2))

    def breaks(seen):
        if seen == at and how == "raises":
            raise Stop
        return seen == at

    for run, each in ((generate, cache), (plain, reference)):
        with pytest.raises(Stop) if how == "raises" else contextlib.nullcontext():
            run(every_model, ids, stopping_criteria=[Watcher(breaks)], **{CACHE: each})
    assert_same_state(cache, reference)
    text = plain(every_model, ids)[:, : PROMPT + at]
    assert torch.equal(generate(every_model, text, **{CACHE: cache}), plain(every_model, text))
    captures.captured = 0
    del cache
    generate(every_model, ids)
    assert captures.captured <= 1


@pytest.mark.one_release
@pytest.mark.parametrize("layers", ["kmk", "mkm", "kk", "mm"])
def test_an_interrupt_inside_a_step_is_seen(captures, monkeypatch, layers):
    model = tiny.model(layers, **tiny.NO_SPECIAL).to(DEVICE)
    ids, cache = tokens(1, PROMPT, most=tiny.VOCABULARY), HybridCache(model.config)
    generate(model, ids)

    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(graph_kimi_k3.Graph, "replay", interrupted)
    with pytest.raises(KeyboardInterrupt):
        generate(model, ids, **{CACHE: cache})
    with pytest.raises(ValueError, match="broken off"):
        model(ids, **{CACHE: cache})


def test_tokens_are_streamed_and_stop_at_eos(every_model, captures):
    class Streamed(BaseStreamer):
        def __init__(self):
            self.got = []

        def put(self, value):
            self.got += value.flatten().tolist()

        def end(self):
            self.got.append("end")

    ids = tokens(1, PROMPT)
    eos = int(plain(every_model, ids)[0, PROMPT + 5])
    streams = [Streamed(), Streamed()]
    texts = [
        run(every_model, ids, eos_token_id=eos, pad_token_id=0, streamer=stream)
        for run, stream in zip((plain, generate), streams, strict=True)
    ]
    assert torch.equal(*texts) and streams[0].got == streams[1].got and streams[1].got[-1] == "end"
    rows = tokens(3, PROMPT)
    settings = {"eos_token_id": [eos, int(plain(every_model, rows)[1, PROMPT + 2])], "pad_token_id": 0}
    assert torch.equal(generate(every_model, rows, **settings), plain(every_model, rows, **settings))


def test_scores_and_logits_stay_what_they_were(model, captures):
    """`generate` collects them over the steps, which all write the same logits."""
    ids, options = tokens(2, PROMPT), {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    got, expected = generate(model, ids, **options), plain(model, ids, **options)
    torch.testing.assert_close(got.logits, expected.logits, **CLOSE)
    torch.testing.assert_close(got.scores, expected.scores, **CLOSE)
    assert captures.replayed == NEW - 2


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_the_loop_makes_nothing_longer_that_steps_do_not_read(model, captures, monkeypatch, padded):
    ids, seen = tokens(2, PROMPT), []
    step = graph_kimi_k3.CapturedSteps.__call__
    monkeypatch.setattr(
        graph_kimi_k3.CapturedSteps, "__call__", lambda self, **inputs: seen.append({*inputs}) or step(self, **inputs)
    )
    how = {"attention_mask": mask_of(2, padded), "position_ids": torch.arange(PROMPT, device=DEVICE).repeat(2, 1)}
    assert torch.equal(generate(model, ids, **how), plain(model, ids, **how))
    assert all("position_ids" not in names and ("attention_mask" in names) == padded for names in seen) and seen


def test_a_prompt_in_chunks_and_embeddings(model, captures):
    ids = tokens(2, PROMPT)
    embeds = model.get_input_embeddings()(ids).detach()
    expected = plain(model, ids)
    assert torch.equal(generate(model, ids, prefill_chunk_size=4), expected)
    assert torch.equal(generate(model, None, inputs_embeds=embeds), expected[:, PROMPT:])
    assert captures.replayed == 2 * (NEW - 1) - 1


@pytest.mark.one_release
def test_a_batch_of_another_size_and_back(model, captures):
    for rows in (1, 3, 1, 3):
        ids = tokens(rows, PROMPT)
        assert torch.equal(generate(model, ids), plain(model, ids))
    assert captures.captured == 2


@pytest.mark.one_release
def test_room_that_was_reserved(model, captures, tight):
    cache = HybridCache(model.config)
    cache.reserve(100)
    generate(model, tokens(1, PROMPT), **{CACHE: cache})
    assert captures.captured == 1


@pytest.mark.one_release
def test_a_view_of_the_latents_outlives_its_cache(model, captures):
    ids = tokens(1, PROMPT)
    _, cache = with_cache(generate, model, ids)
    views = [layer.latents for layer in cache.layers if hasattr(layer, "latents")]
    kept = [view.clone() for view in views]
    del cache
    gc.collect()
    generate(model, tokens(1, PROMPT, seed=1))
    assert all(map(torch.equal, views, kept))


@pytest.mark.one_release
def test_buffers_of_which_only_views_are_left_are_let_go(model, captures):
    _, cache = with_cache(generate, model, tokens(1, PROMPT))
    views = [layer.latents for layer in cache.layers if hasattr(layer, "latents")]
    first = weakref.ref(graph_kimi_k3._kept[model]._steps[0])
    for gone in (False, True):
        if gone:
            del cache
        generate(model, tokens(1, PROMPT, seed=1))
        gc.collect()
        assert (first() is None) == gone
    assert views and captures.captured == 2


@pytest.mark.one_release
def test_a_copy_of_the_latents_leaves_the_buffers_free(model, captures, tmp_path):
    for seed in range(4):
        _, cache = with_cache(generate, model, tokens(1, PROMPT, seed))
        cache.save(tmp_path / "cache.safetensors", model)
        del cache
    assert captures.captured == len(graph_kimi_k3._kept[model]._steps) == 1


@pytest.mark.one_release
@torch.no_grad()
def test_buffers_of_another_dtype_are_captured_anew(model, captures):
    generate(model, tokens(1, PROMPT))
    (step,) = graph_kimi_k3._kept[model]._steps
    for state, stays in ((torch.float32, True), (torch.bfloat16, False)):
        cache = HybridCache(model.config)
        model(tokens(1, PROMPT), **{CACHE: cache})
        for layer in cache.layers:
            if hasattr(layer, "recording"):
                layer.state = layer.state._replace(recurrent=layer.state.recurrent.to(state))
        assert step.graph is not None and step.warm
        step.take(cache)
        assert (step.graph is not None) == step.warm == stays
        step._let_go()


@pytest.mark.one_release
def test_a_hit_of_the_prefix_cache_is_exact(model, captures):
    """Its generation takes no captured steps: a cold run that is split like it gives the same bits."""
    ids = tokens(1, 40)
    prefixes = PrefixCache(model, 1 << 30, block=16, every=32)
    text, _ = prefixes.generate(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    more = torch.cat([text, tokens(1, 5, seed=1)], dim=1)
    logits, done = prefixes.forward(more)
    assert done.hit == 40 + NEW - 1
    cache, start = HybridCache(model.config), 0
    with torch.no_grad():
        for end in done.splits:
            cold = model(more[:, start:end], logits_to_keep=1, **{CACHE: cache}).logits
            start = end
    assert torch.equal(logits, cold)
    assert captures.captured == captures.replayed == 0
    prefixes.close()


def test_other_modes_run_as_they_are(model, captures):
    ids = tokens(1, PROMPT)
    for how in (
        {"num_beams": 2},
        {"prompt_lookup_num_tokens": 3},
        {"use_cache": False},
        {"cache_implementation": "offloaded"},
        {"disable_compile": True},
    ):
        settings = {name: x for name, x in how.items() if name != "disable_compile"}
        assert torch.equal(generate(model, ids, **how), plain(model, ids, **settings))
    assert captures.captured == captures.replayed == 0


@pytest.mark.skipif(ON_GPU, reason="there a graph is captured")
def test_nothing_is_captured_on_a_cpu(model, monkeypatch):
    monkeypatch.setattr(graph_kimi_k3.CapturedSteps, "__init__", None)
    ids = tokens(1, PROMPT)
    assert torch.equal(generate(model, ids)[:, :PROMPT], ids)  # and no step was made, which would fail


@pytest.mark.one_release
def test_a_moved_parameter_or_a_changed_module_is_captured_anew(model, captures):
    ids = tokens(1, PROMPT)
    linear = model.model.layers[0].self_attn.o_proj

    def moved():
        linear.weight = torch.nn.Parameter(linear.weight.detach() * -1.5)

    def replaced():
        model.model.layers[0].self_attn.o_proj = torch.nn.Sequential(linear, torch.nn.Tanh())

    def set_otherwise():
        model.model.norm.eps = 0.3

    def trained():
        with torch.no_grad():
            linear.weight.mul_(-2)

    generate(model, ids)
    for change, captured in ((moved, 1), (replaced, 1), (set_otherwise, 1), (trained, 0), (lambda: None, 0)):
        captures.captured = 0
        change()
        assert torch.equal(generate(model, ids), plain(model, ids))
        assert captures.captured == captured


@pytest.mark.parametrize("where", ["model", "layer", "every module"])
def test_hooks_are_called(model, captures, caplog, where):
    ids, calls = tokens(1, PROMPT), []
    generate(model, ids)

    def hook(module, *_):
        if where != "every module" or module is model:
            calls.append(1)

    if where == "every module":
        handle = torch.nn.modules.module.register_module_forward_hook(hook)
    else:
        handle = (model if where == "model" else model.model.layers[1]).register_forward_pre_hook(hook)
    expected = plain(model, ids)
    calls.clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert torch.equal(generate(model, ids), expected)
    assert len(calls) == 2 * NEW and len(messages(caplog)) == 1 and "hook" in messages(caplog)[0]
    handle.remove()
    captures.replayed = 0
    generate(model, ids)
    assert captures.replayed >= NEW - 2


def test_what_a_graph_would_pass_by(model):
    """Forwards that were put on modules: by the user, by tools that shard or offload, by torch.compile."""
    layer = model.model.layers[1]
    assert graph_kimi_k3.examined(model)[1] is None
    with torch.autocast(DEVICE):
        assert "autocast" in graph_kimi_k3.examined(model)[1]
    layer.forward = layer.forward
    assert "model.layers.1 has" in graph_kimi_k3.examined(model)[1]
    del layer.forward
    model.model.norm.compile(backend="eager")
    assert "model.norm has" in graph_kimi_k3.examined(model)[1]


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "hidden states"),
        ({"recording": True}, "records its tokens"),
        ({"fails": True}, "OSError: no graph"),
    ],
    ids=["hidden states", "recording", "failing"],
)
def test_what_cannot_be_captured_says_why_once(model, captures, monkeypatch, caplog, how, reason):
    ids, options = tokens(1, PROMPT), {**how}
    if options.pop("fails", False):

        def fails(*_):
            raise OSError("no graph")

        monkeypatch.setattr(graph_kimi_k3, "Graph", fails)

    def run(call):
        each = dict(options)
        if each.pop("recording", False):
            each[CACHE] = HybridCache(model.config)
            each[CACHE].activate_past_recording()
        output = call(model, ids, **each)
        return output if isinstance(output, torch.Tensor) else output.sequences

    expected = run(plain)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert torch.equal(run(generate), expected)
    assert [reason in message for message in messages(caplog)] == [True]
    assert captures.replayed == 0


@pytest.mark.parametrize("attention", ["flash_attention_2", "flex_attention"])
def test_attention_that_cannot_read_buffers_says_so_before_the_first_step(
    model, captures, monkeypatch, caplog, attention
):
    ids = tokens(1, PROMPT)
    expected, steps = plain(model, ids), []
    # Of the kernel only the name; the forward of the loop is that of sdpa.
    monkeypatch.setattr(graph_kimi_k3.DecodingStep, "__init__", lambda *_: steps.append(1))
    call = graph_kimi_k3.CapturedSteps._reason

    def named(self, rest):
        with monkeypatch.context() as patch:
            patch.setattr(model.config, "_attn_implementation", attention)
            return call(self, rest)

    monkeypatch.setattr(graph_kimi_k3.CapturedSteps, "_reason", named)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(generate(model, ids), expected)
    assert [f"attn_implementation={attention!r}" in message for message in messages(caplog)] == [True] and not steps
    assert "static" not in messages(caplog)[0]


def test_a_class_that_feeds_steps_in_its_own_way_runs_as_it_is(data_dir, captures):
    model = load(data_dir)

    class Own(type(model)):
        def _update_model_kwargs_for_generation(self, *arguments, **options):
            return super()._update_model_kwargs_for_generation(*arguments, **options)

    model.__class__ = Own
    generate(model, tokens(1, PROMPT))
    assert captures.captured == 0


@pytest.mark.one_release
def test_a_forward_that_fails_on_the_buffers_runs_as_it_is(model, captures, monkeypatch, caplog):
    ids = tokens(1, PROMPT)
    expected, calls = plain(model, ids), []

    def fails(*_):
        calls.append(1)
        raise RuntimeError("no room")

    monkeypatch.setattr(graph_kimi_k3, "watched", fails)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(generate(model, ids), expected)
        assert torch.equal(generate(model, ids), expected)
    assert len(calls) == 1 and messages(caplog) == [
        "the decoding step runs without a CUDA graph: RuntimeError: no room"
    ]


@pytest.mark.one_release
@pytest.mark.parametrize("where", ["__init__", "take", "run"])
def test_no_memory_for_buffers(model, captures, monkeypatch, caplog, where):
    """The text goes on without them, and the next call tries again."""
    ids = tokens(1, PROMPT)
    expected = plain(model, ids)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(graph_kimi_k3.DecodingStep, where, lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError))
        assert torch.equal(generate(model, ids), expected)
    assert ["no memory" in message for message in messages(caplog)] == [True]
    assert not graph_kimi_k3._kept[model]._steps
    assert torch.equal(generate(model, ids), expected) and captures.captured == 1


@pytest.mark.one_release
def test_buffers_live_as_long_as_the_model_and_beside_it(data_dir, captures):
    model, ids = load(data_dir), tokens(1, PROMPT)
    generate(model, ids)
    assert len(graph_kimi_k3._kept[model]._steps) == 1
    copied, file = copy.deepcopy(model), io.BytesIO()
    assert copied not in graph_kimi_k3._kept
    torch.save(model.state_dict(), file)
    assert torch.equal(generate(copied, ids), plain(model, ids))
    model.release_decoding_buffers()
    assert not graph_kimi_k3._kept[model]._steps
    captures.captured = 0
    generate(model, ids)
    assert captures.captured == 1
    step = weakref.ref(graph_kimi_k3._kept[model]._steps[0])
    del model
    gc.collect()
    assert step() is None


@pytest.mark.one_release
def test_no_more_steps_are_kept_than_fit(model, captures, monkeypatch):
    for rows in range(1, 8):
        generate(model, tokens(rows, PROMPT), 3)
    kept = graph_kimi_k3._kept[model]._steps
    assert [step.rows for step in kept] == [3, 4, 5, 6, 7]
    monkeypatch.setattr(graph_kimi_k3, "KEPT_BYTES", kept[-1].nbytes)
    generate(model, tokens(1, PROMPT), 3)
    assert [step.rows for step in graph_kimi_k3._kept[model]._steps] == [7, 1]


@pytest.mark.one_release
def test_inference_mode_and_back(model, captures):
    ids = tokens(1, PROMPT)
    expected = plain(model, ids)
    with torch.inference_mode():
        text, cache = with_cache(generate, model, ids)
    assert torch.equal(text, expected)
    assert torch.equal(generate(model, ids), expected)
    more = torch.cat([text, tokens(1, 3)], dim=1)
    assert torch.equal(generate(model, more, **{CACHE: cache}), plain(model, more))
    model(more[:, -2:], **{CACHE: cache}).logits.sum().backward()
    model.zero_grad()


@pytest.mark.one_release
def test_threads_do_not_share_buffers(model, captures):
    texts = {seed: tokens(1, PROMPT, seed) for seed in range(3)}
    expected = {seed: plain(model, ids, 40) for seed, ids in texts.items()}
    got, failures = {seed: [] for seed in texts}, []

    def work(seed):
        try:
            for _ in range(3):
                got[seed].append(model.generate(texts[seed], max_new_tokens=40, do_sample=False, eos_token_id=None))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert all(torch.equal(text, expected[seed]) for seed, found in got.items() for text in found)


@pytest.mark.one_release
def test_a_call_inside_a_call(model, captures):
    ids, inner = tokens(1, PROMPT), []
    watch = Watcher(lambda seen: inner.append(generate(model, ids)) if seen == 4 else None)
    assert torch.equal(generate(model, ids, stopping_criteria=[watch]), plain(model, ids))
    assert torch.equal(inner[0], plain(model, ids))
