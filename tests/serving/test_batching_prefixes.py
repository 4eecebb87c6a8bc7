"""The prefix cache inside the engine, and several answers to one prompt: texts stay those that each gets alone."""

import contextlib
import threading
import time
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st
from many_requests import (
    PAGE,
    alone,
    answered,
    check_empty,
    check_unused,
    feed,
    greedy,
    make,
    model,
    run,
    serving,
    text,
)  # fmt: skip

import tiny
from kimi_k3.serving import batching
from kimi_k3.serving.batching import BatchEngine
from kimi_k3.serving.pool import StatePool
from waiting import PATIENCE, until

pytestmark = pytest.mark.one_release
STATE_BYTES = 3 * (5 * 8 * 8 + 3 * 3 * 40) * 8


@contextlib.contextmanager
def seen():
    """The logits of every choice, by what chooses."""
    found, ask = {}, batching.ask

    def chosen(logits, samplers):
        for row, sampler in zip(logits, samplers, strict=True):
            found.setdefault(id(sampler), []).append(row)
        return ask(logits, samplers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batching, "ask", chosen)
        yield found


def check_bits(request, logits, net):
    """The logits are those of a run without any cache that is split where the request says, to the last bit."""
    pool, tokens = StatePool(net, 1, tokens=request.length, page=5), request.prompt + request.new
    sequence, rows = pool.open(), {}
    assert request.turn.exact and request.turn.splits[-1] == len(tokens) - 1
    pool.grow(sequence, len(tokens))
    for start, end in pairwise([0, *request.turn.splits]):
        rows[end] = feed(net, pool, [sequence], [tokens[start:end]])[0]
    for i, row in enumerate(logits[id(request.sampler)]):
        assert torch.equal(row, rows[len(request.prompt) + i]), i


# --- hits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_what_is_kept(batch_invariant):
    """At multiples of `every`, before the last token of a prompt, at the end of an answer, and where texts part."""
    cache = make()
    engine = serving(cache, batch_invariant=batch_invariant, chunk=7)
    first = answered(engine, text(30))
    assert (first.cached, first.turn.exact) == (0, batch_invariant)
    turn = first.prompt + first.new
    assert answered(engine, turn[:32]).cached == 29
    assert answered(engine, turn + text(5, 1)).cached == 32, "the last token of an answer is never fed"
    assert answered(engine, text(30)).cached == 29, "the last token of a prompt always is"
    assert answered(engine, text(30)[:20]).cached == 12
    assert [answered(engine, text(30)[:22] + text(9, seed)).cached for seed in (2, 3)] == [19, 20]
    assert answered(engine, text(30), cache_salt="mine").cached == 0
    assert answered(engine, text(1, 9)).cached == 0
    stats = cache.stats()
    assert (stats["lookups"], stats["hits"], stats["hit_tokens"]) == (9, 6, 29 + 32 + 29 + 12 + 19 + 20)
    check_unused(engine, cache)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_hit_has_the_bits_of_a_cold_run(dtype):
    net = tiny.model("kmkkm", **tiny.NO_SPECIAL).to(dtype)
    cache = make(net)
    engine = serving(cache, batch_invariant=True, chunk=7)
    turn, cached = [], []
    for more in (text(30, 1), text(11, 2), text(8, 3)):
        request, other = greedy(turn + more, 4), greedy(turn[:17] + text(9, len(turn)), 3)
        with seen() as logits:
            for each in (request, other):
                engine.submit(each)
            run(engine)
        check_bits(request, logits, net)
        check_bits(other, logits, net)
        turn, cached = request.prompt + request.new, [*cached, request.cached]
    assert cached == [0, 33, 48]
    check_unused(engine, cache)


def test_kinds_do_not_mix():
    """What depends on a batch is never taken for what does not, nor an engine's forwards for the model's."""
    cache, ids = make(), torch.tensor([text(30)])
    together = serving(cache)
    answered(together, text(30))
    one_by_one = serving(cache, batch_invariant=True)
    request = answered(one_by_one, text(30))
    assert request.cached == 0 and request.turn.exact
    assert answered(serving(cache, batch_invariant=True, chunk=8), text(30)).cached == 0, "split elsewhere"
    assert answered(one_by_one, text(30)).cached == 29
    assert answered(together, text(30)).cached == 29
    _, done = cache.forward(ids)
    assert done.hit == 29 and not done.exact
    cache.clear()
    _, done = cache.forward(ids)
    assert done.exact and answered(together, text(30)).cached == 29


@pytest.mark.parametrize("host_bytes", [0, 1 << 30], ids=["computed again", "saved"])
def test_what_gave_way_is_kept(host_bytes):
    cache = make()
    engine = serving(cache, tokens=6 * PAGE, host_bytes=host_bytes)
    requests = [greedy(text(20, seed), 12) for seed in range(2)]
    for request in requests:
        engine.submit(request)
    run(engine)
    assert engine.scheduler.evictions and bool(engine.scheduler.recomputations) == (not host_bytes)
    assert [answered(engine, each.prompt + each.new).cached for each in requests] == [31, 31]
    check_unused(engine, cache)


@pytest.mark.parametrize("is_there", [False, True], ids=["nothing is kept", "kept by another"])
def test_a_text_is_computed_again_as_it_was(is_there):
    """Its first tokens came from forwards that ended where a hit did: it is split there again when the hit is gone,
    does not take what was split otherwise, and is not kept under a name that says otherwise."""
    cache = make()
    engine, other = (serving(cache, batch_invariant=True, chunk=7) for _ in range(2))
    answered(engine, text(30)[:10])
    request, later = greedy(text(30), 6), greedy(text(30), 2)
    with seen() as logits:
        engine.submit(request)
        while len(request.new) < 2:
            engine.step()
        assert request.cached == 9
        engine.scheduler.release(request)
        cache.clear()
        if is_there:
            answered(other, text(30))
        run(engine)
        engine.submit(later)
        run(engine)
    check_bits(request, logits, model())
    check_bits(later, logits, model())
    assert request.new == alone(tuple(request.prompt), 6) and 9 in request.turn.splits
    check_unused(engine, cache)


REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 2),  # which text
        st.integers(1, 26),  # so many of its tokens
        st.integers(0, 6),  # and others behind them
        st.integers(1, 4),  # new ones
        st.integers(0, 9),  # the step before which it comes
        st.integers(-1, 1),  # priority
        st.none() | st.integers(0, 3),  # cancelled behind so many tokens
        st.integers(0, 2),  # siblings
    ),
    min_size=1,
    max_size=6,
)


@settings(
    max_examples=10, phases=[Phase.generate], deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(
    asked=REQUESTS,
    states=st.sampled_from([0, 3, 8, 1000]),
    pages=st.integers(6, 14),
    sequences=st.integers(1, 4),
    step_tokens=st.integers(1, 24),
    chunk=st.integers(1, 16),
    host_bytes=st.sampled_from([0, 0, 60_000, 1 << 30]),
    batch_invariant=st.booleans(),
)
def test_every_text_is_the_one_it_would_get_alone(asked, states, pages, batch_invariant, **options):
    cache = make(device_bytes=states * STATE_BYTES)
    engine = serving(cache, tokens=pages * PAGE, batch_invariant=batch_invariant, **options)
    coming, everyone, ended = {}, [], []
    for which, length, more, new, step, priority, leaves, siblings in asked:
        prompt = text(26, which)[:length] + text(more, 9 + more)
        group = [greedy(prompt, new + i, priority=priority, done=ended.append) for i in range(1 + siblings)]
        coming.setdefault(step, []).append(group)
        group[0].siblings = group[1:]
        if leaves is not None:
            group[0].take = lambda choice, it=group[0], n=leaves: len(it.new) == n and engine.cancel(it)
        everyone += [(request, leaves if request is group[0] else None) for request in group]
    with seen() as logits:
        for step in range(max(coming) + 1):
            for group in coming.get(step, []):
                engine.submit(group[0])
                if (group[0], 0) in everyone:
                    engine.cancel(group[0])
            engine.step()
        run(engine)
    assert len(ended) == len(everyone)
    for request, leaves in everyone:
        assert request.error is None
        expected = alone(tuple(request.prompt), request.max_new_tokens)
        cut = leaves is not None and leaves < len(expected)
        assert (request.new, request.finish) == ((expected[:leaves], "cancelled") if cut else (expected, "length"))
        if batch_invariant and not cut:
            check_bits(request, logits, model())
    check_unused(engine, cache)
    if states == 1000:
        finished = [request.prompt for request, leaves in everyone if leaves is None]
        assert all(answered(engine, prompt).cached == len(prompt) - 1 for prompt in finished)
    event(f"evictions: {engine.scheduler.evictions > 0}, computed again: {engine.scheduler.recomputations > 0}")
    event(f"hits: {cache.stats()['hits'] > 0}, evicted: {cache.stats()['tiers']['device']['evicted_bytes'] > 0}")


# --- from below the device -------------------------------------------------------------------------------------------


@pytest.fixture
def blocked(tmp_path, monkeypatch):
    """An engine in its thread, whose cache has two texts on the disk and reads the first when `gate` is set."""
    with contextlib.closing(make(folder=tmp_path, disk_bytes=1 << 30)) as cache:
        engine = serving(cache)
        for seed in range(2):
            answered(engine, text(30, seed))
    cache = make(folder=tmp_path, disk_bytes=1 << 30)
    cache.gate, read, first = threading.Event(), cache.disk.read, []

    def waits(part):
        if not first:
            first.append(threading.get_ident())
        if first[0] == threading.get_ident():
            assert cache.gate.wait(PATIENCE)
        return read(part)

    monkeypatch.setattr(cache.disk, "read", waits)
    engine = serving(cache)
    engine.start()
    yield engine, cache, first
    cache.gate.set()
    engine.stop()
    cache.close()
    check_unused(engine, cache)


def test_reading_holds_up_nobody_else(blocked):
    engine, cache, first = blocked
    slow, fast = greedy(text(30), 3), greedy(text(30, 1), 3)
    ended = [threading.Event(), threading.Event()]
    slow.done, fast.done = (lambda _, one=one: one.set() for one in ended)
    engine.submit(slow)
    until(lambda: first)
    engine.submit(fast)
    assert ended[1].wait(PATIENCE) and fast.new == alone(tuple(fast.prompt), 3) and fast.cached == 29
    assert not ended[0].is_set() and slow.fed == 0
    cache.gate.set()
    assert ended[0].wait(PATIENCE) and slow.new == alone(tuple(slow.prompt), 3) and slow.cached == 29


@pytest.mark.parametrize("how", ["cancelled", "late", "stopped"])
def test_who_waits_for_a_reading_can_leave(blocked, how):
    engine, _, first = blocked
    request, ended = greedy(text(30), 3), threading.Event()
    request.done = lambda _: ended.set()
    request.deadline = time.monotonic() + 1 if how == "late" else float("inf")
    engine.submit(request)
    until(lambda: first or ended.is_set())
    if how == "cancelled":
        engine.cancel(request)
    if how == "stopped":
        engine.stop(0)
    assert ended.wait(PATIENCE) and request.new == []
    assert request.finish == "cancelled" or isinstance(request.error, (TimeoutError, batching.EngineFull))
    check_empty(engine.pool)


# --- what goes wrong -------------------------------------------------------------------------------------------------


def test_a_lookup_that_fails_costs_its_request(monkeypatch):
    cache = make()
    engine = serving(cache)
    answered(engine, text(30))
    bad, good = greedy(text(30), 3), greedy(text(20, 1), 3)
    with monkeypatch.context() as patch:
        patch.setattr(cache, "_read", lambda *part: 1 / 0)
        engine.submit(bad)
        run(engine)
    engine.submit(good)
    run(engine)
    assert isinstance(bad.error, ZeroDivisionError) and bad.new == [] and good.new == alone(tuple(good.prompt), 3)
    check_unused(engine, cache)
    cache.close()
    with pytest.raises(RuntimeError, match="the prefix cache is closed"):
        answered(engine, text(30))
    check_unused(engine, cache)


def test_what_cannot_be_kept_costs_no_text(monkeypatch, caplog):
    cache = make()
    engine = serving(cache)
    with monkeypatch.context() as patch:
        patch.setattr(cache, "_state", lambda *args: 1 / 0)
        answered(engine, text(30))
    assert "is kept no further" in caplog.text
    check_unused(engine, cache)
    assert answered(engine, text(30)).cached == 0 and answered(engine, text(30)).cached == 29


def test_a_forward_that_fails_keeps_nothing_of_it(monkeypatch):
    cache = make()
    engine = serving(cache)
    requests = [greedy(text(30, seed), 3) for seed in range(2)]
    for request in requests:
        engine.submit(request)
    calls = []

    def fails(*args):
        calls.append(args)
        if len(calls) in (3, 4):  # both together, then the first of them alone
            raise RuntimeError("no memory")
        return forward(*args)

    forward = BatchEngine._logits
    monkeypatch.setattr(BatchEngine, "_logits", fails)
    run(engine)
    assert str(requests[0].error) == "no memory" and requests[1].new == alone(tuple(requests[1].prompt), 3)
    check_unused(engine, cache)
    assert answered(engine, text(30)).cached == 24 and answered(engine, text(30, 1)).cached == 29


def test_a_cache_of_another_model_is_refused():
    with pytest.raises(ValueError, match="of another model"):
        BatchEngine(tiny.model("kmkkm").double(), tokens=64, prefix_cache=make())


# --- several answers to a prompt -------------------------------------------------------------------------------------


def family(prompt, *lengths, **options):
    first, *others = (greedy(prompt, new, **options) for new in lengths)
    first.siblings = others
    return first, *others


@pytest.mark.parametrize("cache", [None, make], ids=["alone", "cached"])
def test_answers_share_the_prompt(cache):
    cache = cache and cache()
    engine = BatchEngine(model(), sequences=3, tokens=6 * PAGE, page=PAGE, prefix_cache=cache)
    requests = family(text(3 * PAGE + 2), 4, 2, 6)
    engine.submit(requests[0])
    used = []
    while engine.requests:
        engine.step()
        used.append(engine.pool.pages - engine.pool.free_pages)
    assert [each.new for each in requests] == [alone(tuple(each.prompt), each.max_new_tokens) for each in requests]
    assert engine.fed_tokens == 3 * PAGE + 2 + 3 + 1 + 5 and max(used) == 6, "three pages are shared"
    assert not engine.scheduler.evictions
    check_empty(engine.pool)
    if cache is not None:
        check_unused(engine, cache)
        turn = requests[2].prompt + requests[2].new
        assert answered(engine, turn).cached == len(turn) - 1


def test_an_answer_without_memory_waits():
    engine = BatchEngine(model(), sequences=2, tokens=8 * PAGE, page=PAGE)
    requests = family(text(2 * PAGE), 3, 4, 5)
    engine.submit(requests[0])
    run(engine)
    assert [each.new for each in requests] == [alone(tuple(each.prompt), each.max_new_tokens) for each in requests]
    assert engine.fed_tokens == 2 * PAGE + 2 + 3 + 2 * PAGE + 4, "one is fed the prompt itself"
    check_empty(engine.pool)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_one_that_leaves_takes_nobody_with_it(which):
    engine = BatchEngine(model(), tokens=20 * PAGE, page=PAGE, chunk=10)
    requests = family(text(25), 3, 4, 5)
    engine.submit(requests[0])
    engine.step()
    engine.cancel(requests[which])
    run(engine)
    for i, each in enumerate(requests):
        assert each.new == ([] if i == which else alone(tuple(each.prompt), each.max_new_tokens))
    assert requests[which].finish == "cancelled"
    check_empty(engine.pool)


def test_answers_to_another_prompt_are_refused():
    engine = BatchEngine(model(), tokens=4 * PAGE, page=PAGE, waiting=2)
    for change in ({"prompt": text(5, 1)}, {"cache_salt": "other"}):
        first, other = family(text(5), 2, 2)
        for name, value in change.items():
            setattr(other, name, value)
        with pytest.raises(ValueError, match="answers to one prompt"):
            engine.submit(first)
    with pytest.raises(batching.EngineFull, match="no more than 2 requests"):
        engine.submit(family(text(5), 2, 2, 2)[0])
    assert not engine.requests
