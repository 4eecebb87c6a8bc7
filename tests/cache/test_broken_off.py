"""Forwards that fail, anywhere: the cache takes no other until it is restored or reset, and is right from then on."""

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import CompileConfig

import tiny
from kimi_k3 import CACHE_ARGUMENT as CACHE
from kimi_k3 import (
    HybridCache,
    KimiK3Config,
    KimiK3ForConditionalGeneration,
    KimiK3ForSequenceClassification,
    KimiK3ForTokenClassification,
    generation_kimi_k3,
)
from kimi_k3.cache_kimi_k3 import RefusedForward
from rounding import EXACT

LAYERS = "kmk"


@pytest.fixture(scope="module")
def model():
    return tiny.model(LAYERS).double()


def tokens(length, seed=0):
    return torch.randint(3, tiny.VOCABULARY, (1, length), generator=torch.Generator().manual_seed(seed))


class Broken(Exception):
    """What fails in these tests."""


def stop(*args, **kwargs):
    raise Broken


@contextlib.contextmanager
def failing(module, behind):
    """Inside, a forward fails where it comes to a module, or behind it."""
    hook = module.register_forward_hook(stop) if behind else module.register_forward_pre_hook(stop)
    try:
        yield
    finally:
        hook.remove()


def places(model):
    """Before and behind every module; behind the model itself the forward has returned."""
    modules = dict(model.named_modules())
    return [(name, modules[name], behind) for name in modules for behind in (False, True) if name or not behind]


@pytest.mark.one_release
@pytest.mark.parametrize("max_length", [None, 20], ids=["growing", "static"])
@torch.no_grad()
def test_a_forward_that_failed_anywhere_is_not_repeated_on_its_cache(model, max_length):
    """In the head too, when every layer has the tokens: fed again, they would count twice."""
    ids, new, cache = tokens(7), tokens(3, 1), HybridCache(model.config, max_length=max_length)
    model(ids, **{CACHE: cache})
    snapshot = cache.snapshot()
    right = model(new, **{CACHE: cache}).logits
    repeated, refused = set(), set()
    for name, part, behind in places(model):
        cache.restore(snapshot)
        with contextlib.suppress(Broken):
            with failing(part, behind):
                model(new, **{CACHE: cache})
            continue  # its parameters are read, itself is not called
        try:
            assert torch.equal(model(new, **{CACHE: cache}).logits, right)
            repeated.add(name)
        except ValueError as error:
            assert "broken off" in str(error) and "cache.reset()" in str(error)
            refused.add(name)
    assert repeated == {"", "model", "model.embed_tokens"}  # nothing was fed yet
    assert {"model", "model.norm", "model.layers.0.input_layernorm", "lm_head"} <= refused and len(refused) > 30
    for refusal in (cache.snapshot, lambda: cache.crop(0), lambda: cache.save("nowhere", model)):
        with pytest.raises(ValueError, match="broken off"):
            refusal()
    with pytest.raises(ValueError, match="broken off"):
        model.generate(torch.cat([ids, new], dim=1), max_new_tokens=2, **{CACHE: cache})
    cache.restore(snapshot)
    assert torch.equal(model(new, **{CACHE: cache}).logits, right)
    with pytest.raises(Broken), failing(model.lm_head, True):
        model(new, **{CACHE: cache})
    cache.reset()
    model(ids, **{CACHE: cache})
    assert torch.equal(model(new, **{CACHE: cache}).logits, right)


@torch.no_grad()
def test_the_outermost_forward_is_the_one_that_counts(model):
    """The backbone alone, a model around the head, and whoever has a head of its own."""
    ids, backbone, cache = tokens(4), model.model, HybridCache(model.config)
    backbone(ids, **{CACHE: cache})
    backbone(ids, commit=False, **{CACHE: cache})
    with pytest.raises(ValueError, match="broken off"):
        backbone(ids, **{CACHE: cache})
    cache.commit()
    hidden = backbone(ids, **{CACHE: cache}).last_hidden_state
    torch.testing.assert_close(hidden, backbone(ids.repeat(1, 3)).last_hidden_state[:, 8:], **EXACT)

    whole = KimiK3ForConditionalGeneration(KimiK3Config(text_config=model.config, vision_config=None)).eval()
    cache = HybridCache(whole.config)
    for part, behind in ((whole.language_model.lm_head, False), (whole.language_model, True)):
        with pytest.raises(Broken), failing(part, behind):
            whole(ids, **{CACHE: cache})
        with pytest.raises(ValueError, match="broken off"):
            whole(ids, **{CACHE: cache})
        cache.reset()
        whole(ids, **{CACHE: cache})
        assert isinstance(whole(ids, return_dict=False, **{CACHE: cache}), tuple)  # a second one on it


@pytest.mark.parametrize("kind", [KimiK3ForSequenceClassification, KimiK3ForTokenClassification])
@torch.no_grad()
def test_a_head_for_labels_counts_too(kind):
    model, ids = kind(tiny.config("km", num_labels=3)).eval(), tokens(4)
    cache = HybridCache(model.config)
    with pytest.raises(Broken), failing(model.score, True):
        model(ids, **{CACHE: cache})
    with pytest.raises(ValueError, match="broken off"):
        model(ids, **{CACHE: cache})
    cache.reset()
    model(ids, **{CACHE: cache})
    again = model(ids, **{CACHE: cache}).logits
    torch.testing.assert_close(again, model(ids.repeat(1, 2)).logits[:, -again.shape[1] :].view_as(again))
    made = model(ids, use_cache=True).get(CACHE)
    assert (made is None) == (kind is KimiK3ForTokenClassification) and (made is None or made.is_whole)


@pytest.mark.parametrize("fullgraph", [False, True])
@torch.no_grad()
def test_a_compiled_forward_that_fails_is_noted_and_one_that_is_refused_is_not(fullgraph):
    """It notes on the cache what it did only when it has run. Of one whole graph Dynamo hands on the sentence alone.

    After two numbers of rows a graph is for any number of them.
    """
    torch._dynamo.reset()
    model = tiny.model("k", **tiny.DENSE)
    cache, prompt, new = HybridCache(model.config, max_length=9), tokens(3).repeat(2, 1), tokens(2, 1).repeat(2, 1)
    step = model.get_compiled_call(CompileConfig(backend="eager", fullgraph=fullgraph, mode=None))
    step(input_ids=prompt, **{CACHE: cache})
    refused = {"the cache holds 2 rows": {"input_ids": new[:1]}}
    if fullgraph:  # where graphs may break, each of these compiles parts anew
        refused["attention_mask must be 2-D"] = {"input_ids": new, "attention_mask": torch.ones(2, 1, 2, 5)}
    for said, wrong in refused.items():
        with pytest.raises(torch._dynamo.exc.Unsupported if fullgraph else RefusedForward, match=said):
            step(**wrong, **{CACHE: cache})
        assert cache.is_whole and cache.get_seq_length() == 3, said
    right = model(torch.cat([prompt, new], dim=1)).logits[:, 3:]
    torch.testing.assert_close((step if fullgraph else model)(input_ids=new, **{CACHE: cache}).logits, right)
    with pytest.raises(Broken):
        generation_kimi_k3._marking(stop)(input_ids=new, **{CACHE: cache})
    with pytest.raises(ValueError, match="broken off"):
        model(new, **{CACHE: cache})


CHANGES = {
    "batch_select_indices": lambda cache: cache.batch_select_indices(torch.tensor([1, 0])),
    "batch_repeat_interleave": lambda cache: cache.batch_repeat_interleave(2),
    "reset": lambda cache: cache.reset(),
    "crop": lambda cache: cache.crop(-2),  # refused by a static cache
    "restored": lambda cache: cache.restore(cache.snapshot()),  # of a static cache, in its buffers
}


@pytest.mark.parametrize(
    ("change", "max_length"),
    [(name, None) for name in CHANGES if name != "restored"] + [(name, 20) for name in CHANGES if name != "crop"],
)
@torch.no_grad()
def test_a_change_that_is_broken_off_between_two_layers_is_noted(model, change, max_length, monkeypatch):
    """Layers of other rows, or at other tokens, do not belong together; a forward would not see it."""
    ids, new, cache = (
        tokens(7).repeat(2, 1),
        tokens(3, 1).repeat(2, 1),
        HybridCache(model.config, max_length=max_length),
    )
    if max_length is None:
        cache.activate_past_recording()
    model(ids, **{CACHE: cache})
    snapshot = cache.snapshot()
    right = model(new, **{CACHE: cache}).logits
    for i in range(len(LAYERS)):
        cache.restore(snapshot)
        with monkeypatch.context() as patch, pytest.raises(Broken):
            patch.setattr(cache.layers[i], change, stop)
            CHANGES[change](cache)
        for refused in (lambda: model(new, **{CACHE: cache}), cache.snapshot, lambda: cache.save("nowhere", model)):
            with pytest.raises(ValueError, match="broken off"):
                refused()
    cache.restore(snapshot)
    assert torch.equal(model(new, **{CACHE: cache}).logits, right)


@torch.no_grad()
def test_layers_that_do_not_belong_together_are_not_saved(model, tmp_path):
    """As after a forward that left layers out, or under the name of another model."""
    cache = HybridCache(model.config)
    model(tokens(4), **{CACHE: cache})
    model.config.num_hidden_layers = 2
    try:
        model(tokens(2), **{CACHE: cache})
    finally:
        model.config.num_hidden_layers = len(LAYERS)
    with pytest.raises(ValueError, match="stand at different tokens"):
        cache.save(tmp_path / "cache", model)
    cache.reset()
    model(tokens(4), **{CACHE: cache})
    for layers in ("km", "kmkk", "kmm"):
        with pytest.raises(ValueError, match="belongs to a model with other layers"):
            cache.save(tmp_path / "cache", tiny.model(layers))
    assert not list(tmp_path.iterdir())


@torch.no_grad()
def test_rows_that_are_not_there_change_nothing(model):
    cache = HybridCache(model.config)
    model(tokens(4), **{CACHE: cache})
    for refused in (
        lambda: cache.batch_select_indices(torch.tensor([1])),
        lambda: cache.batch_select_indices(torch.tensor([True])),
        lambda: cache.batch_repeat_interleave(-1),
    ):
        with pytest.raises((IndexError, RuntimeError)):
            refused()
        assert cache.is_whole and cache.batch_size == 1


PLACES = [(name, behind) for name, _, behind in places(tiny.model(LAYERS))]
STEPS = st.one_of(
    st.tuples(st.just("feed"), st.integers(1, 5)),
    st.tuples(st.just("fail"), st.integers(0, len(PLACES) - 1), st.integers(1, 5)),
    st.tuples(st.sampled_from(["snapshot", "restore", "reset", "generate"]), st.just(0)),
    st.tuples(st.just("crop"), st.integers(0, 4)),
)


@pytest.mark.one_release
@settings(max_examples=12, deadline=None, derandomize=True)
@given(steps=st.lists(STEPS, min_size=6, max_size=14))
@torch.no_grad()
def test_random_failures_leave_a_right_cache_or_a_refusal(model, steps):
    """A plain list of what was fed goes along; whatever the cache answers is what that text alone gives."""
    cache, text, broken, seed = HybridCache(model.config), [], False, 0
    cache.activate_past_recording()
    kept = None
    for kind, *numbers in steps:
        seed += 1
        new = tokens(numbers[-1] or 2, seed)
        with pytest.raises(ValueError, match="broken off") if broken and kind not in (
            "fail", "restore", "reset"
        ) else contextlib.nullcontext():  # fmt: skip
            if kind == "feed":
                got = model(new, **{CACHE: cache}).logits
                text += new[0].tolist()
                torch.testing.assert_close(got, model(torch.tensor([text])).logits[:, -new.shape[1] :], **EXACT)
            elif kind == "generate":
                ids = torch.tensor([[*text, *new[0].tolist()]])
                out = model.generate(ids, max_new_tokens=2, do_sample=False, **{CACHE: cache})
                assert torch.equal(out, model.generate(ids, max_new_tokens=2, do_sample=False))
                text = out[0, : int(cache.get_seq_length())].tolist()
            elif kind == "snapshot":
                kept = cache.snapshot(), list(text)
            elif kind == "crop":
                recorded = cache.layers[0].recording.columns
                count = min(numbers[0], recorded, len(text))
                cache.crop(-count)
                text = text[: len(text) - count]
        if kind == "fail":
            name, behind = PLACES[numbers[0]]
            try:
                with failing(model.get_submodule(name), behind):
                    model(new, **{CACHE: cache})
            except Broken:
                broken = broken or not cache.is_whole
                continue
            except ValueError:
                assert broken
                continue
            text += new[0].tolist()  # a module that is not called
        elif kind == "reset" or (kind == "restore" and kept is not None):
            broken = False
            if kind == "reset":
                cache.reset()
                text = []
            else:
                cache.restore(kept[0])
                text = list(kept[1])
        assert broken or int(cache.get_seq_length()) == len(text)
