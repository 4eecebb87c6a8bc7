"""Many requests at once: every text is the one that `generate` gives alone, whoever comes, goes or gives way.

In float64: there the roundings by which the sums of a batch differ from those of one row decide no token.
"""

import functools
import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st
from many_requests import PAGE, alone, check_empty, feed, greedy, model, run, text

import tiny
from kimi_k3.serving import scheduler
from kimi_k3.serving.batching import BatchEngine, EngineFull
from kimi_k3.serving.pool import StatePool
from kimi_k3.serving.sampling import Sampler, Sampling, packed_mask
from waiting import PATIENCE

pytestmark = pytest.mark.one_release


# --- one forward -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", [{}, tiny.KIMI_LINEAR | tiny.DENSE], ids=["k3", "kimi_linear"])
def test_logits_are_those_of_the_whole_text(family, attention):
    """Prefills of several texts, chunks behind others, a step of all, chunks of one token beside longer ones."""
    net = tiny.model("kmkkm", **tiny.NO_SPECIAL, **family).double()
    net.set_attn_implementation(attention)
    pool = StatePool(net, 3, tokens=120, page=PAGE)
    texts, sequences = [text(n, n) for n in (4, 33, 18)], [pool.open() for _ in range(3)]
    for group in ({0: 3}, {1: 20, 2: 5}, {2: 1, 1: 9}, {0: 1, 1: 1, 2: 1}, {2: 9}, {1: 2, 2: 1}):
        chosen, counts = [sequences[i] for i in group], list(group.values())
        new = [texts[i][sequences[i].length :][:count] for i, count in group.items()]
        assert all(pool.grow(each, each.length + count) for each, count in zip(chosen, counts, strict=True))
        logits = feed(net, pool, chosen, new)
        for i, row in zip(group, logits, strict=True):
            with torch.no_grad():
                expected = net(torch.tensor([texts[i][: sequences[i].length]])).logits[0, -1]
            torch.testing.assert_close(row, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("host_bytes", [0, 1 << 30])
def test_log_probabilities_of_prompts_are_those_of_a_plain_forward(host_bytes):
    """Fed in chunks, beside others that are not asked, with requests that give way and are computed again."""
    sizes = {"sequences": 3, "tokens": 9 * PAGE, "page": PAGE, "step_tokens": 11, "chunk": 5}
    engine = BatchEngine(model(), host_bytes=host_bytes, **sizes)
    asked = [greedy(text(n, n), 9, prompt_log_probabilities=top) for n, top in ((33, 2), (1, 3), (18, 0), (12, None))]
    for i, request in enumerate(asked):
        request.priority = -i
        engine.submit(request)
    first = greedy(text(3 * PAGE), 20, priority=2)
    for _ in range(5):
        engine.step()
    engine.submit(first)
    run(engine)
    assert engine.scheduler.evictions > 0
    for request in asked[:3]:
        prompt, count = request.prompt, request.prompt_log_probabilities
        expected = model()(torch.tensor([prompt])).logits[0].log_softmax(-1)
        assert [*sorted(request.scored)] == [*range(1, len(prompt))]
        for place, choice in request.scored.items():
            row = expected[place - 1]
            assert choice.token == prompt[place]
            assert choice.log_probability == pytest.approx(row[choice.token].item(), abs=1e-10)
            assert [token for token, _ in choice.top] == row.topk(count).indices.tolist()
            assert [value for _, value in choice.top] == pytest.approx(row.topk(count).values.tolist(), abs=1e-10)
    assert asked[3].scored == {} and all(each.new == alone(tuple(each.prompt), 9) for each in asked)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_hook_on_keys_and_values_does_not_change_a_step(attention):
    """It keeps the absorbed form away, and the mask of a batch has to be one that is added to scores."""
    net = tiny.model("mk", **tiny.NO_SPECIAL).double()
    net.set_attn_implementation(attention)
    net.model.layers[0].self_attn.kv_b_proj.register_forward_hook(lambda module, args, output: output + 0)
    pool, texts = StatePool(net, 2, tokens=80, page=PAGE), [text(13, 1), text(21, 2)]
    sequences = [pool.open() for _ in texts]
    for sequence, tokens in zip(sequences, texts, strict=True):
        pool.grow(sequence, len(tokens))
        feed(net, pool, [sequence], [tokens[:-2]])
    for group in (sequences, sequences[:1], sequences[1:]):
        chosen = [texts[sequences.index(each)] for each in group]
        rows = feed(net, pool, group, [[tokens[each.length]] for each, tokens in zip(group, chosen, strict=True)])
        for row, each, tokens in zip(rows, group, chosen, strict=True):
            with torch.no_grad():
                expected = net(torch.tensor([tokens[: each.length]])).logits[0, -1]
            torch.testing.assert_close(row, expected, rtol=0, atol=1e-10)


# --- the pool --------------------------------------------------------------------------------------------------------


def fed(pool, tokens):
    sequence = pool.open()
    pool.grow(sequence, len(tokens))
    feed(model(), pool, [sequence], [tokens])
    return sequence


def next_of(pool, sequence, token):
    assert pool.grow(sequence, sequence.length + 1)
    return feed(model(), pool, [sequence], [[token]])[0]


def test_copies_go_on_as_the_sequence_does():
    """A fork, which shares pages, a copy in host memory and one in a cache, each with another continuation."""
    pool, tokens = StatePool(model(), 4, tokens=8 * PAGE, page=PAGE), text(2 * PAGE + 3)
    sequence = fed(pool, tokens)
    forked, saved, cache = pool.fork(sequence), pool.save(sequence), pool.read(sequence)
    assert pool.pages - pool.free_pages == 4, "two pages are shared, the third is each one's own"
    assert saved.nbytes == pool.state_bytes + len(tokens) * pool.page_bytes // PAGE
    loaded, written = pool.load(saved), pool.open()
    assert not pool.write(cache, written) and written.pages == [], "one page is left"
    pool.close(forked)
    assert not pool.write(cache, written), "it gave back its own page alone"
    twin = pool.fork(sequence)
    pool.close(sequence)
    for token, each in enumerate((twin, loaded)):
        row = next_of(pool, each, token)
        torch.testing.assert_close(row, model()(torch.tensor([[*tokens, token]])).logits[0, -1], rtol=0, atol=1e-10)
    pool.close(loaded)
    assert pool.write(cache, written)
    row = next_of(pool, written, 5)
    for other in (
        model()(torch.tensor([[5]]), cache=cache).logits[0, -1],
        model()(torch.tensor([[*tokens, 5]])).logits[0, -1],
    ):
        torch.testing.assert_close(row, other, rtol=0, atol=1e-10)
    pool.close(written)
    pool.close(twin)
    check_empty(pool)


def test_room_is_refused_with_nothing_changed():
    pool = StatePool(model(), 2, tokens=3 * PAGE, page=PAGE)
    first, second = pool.open(), pool.open()
    assert pool.open() is None and pool.fork(first) is None
    assert pool.grow(first, 2 * PAGE) and not pool.grow(second, PAGE + 1)
    assert second.pages == [] and pool.free_pages == 1
    pool.close(first)
    assert pool.grow(second, 3 * PAGE) and not pool.grow(second, 3 * PAGE + 1)
    pool.close(second)
    check_empty(pool)


def test_memory_that_holds_no_token_is_refused():
    pool = StatePool(model(), 1, tokens=1, page=PAGE)
    needed = 3 * pool.state_bytes + pool.page_bytes
    assert StatePool(model(), 3, memory=needed, page=PAGE).pages == 1
    with pytest.raises(ValueError, match="hold no token beside 3 states"):
        StatePool(model(), 3, memory=needed - 1, page=PAGE)


# --- any company -----------------------------------------------------------------------------------------------------

REQUESTS = st.lists(
    st.tuples(
        st.integers(1, 24),  # tokens of the prompt
        st.integers(1, 5),  # new ones
        st.integers(0, 9),  # the step before which it comes
        st.integers(-1, 1),  # priority
        st.none() | st.integers(0, 4),  # cancelled behind so many tokens
    ),
    min_size=1,
    max_size=6,
)


@settings(
    max_examples=12, phases=[Phase.generate], deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(
    asked=REQUESTS,
    sequences=st.integers(1, 4),
    pages=st.integers(5, 12),
    step_tokens=st.integers(1, 24),
    chunk=st.integers(1, 16),
    host_bytes=st.sampled_from([0, 60_000, 1 << 30]),
    batch_invariant=st.booleans(),
    is_ahead=st.booleans(),
)
def test_every_text_is_the_one_it_would_get_alone(asked, pages, is_ahead, **options):
    engine = BatchEngine(model(), tokens=pages * PAGE, page=PAGE, **options)
    engine.is_ahead = is_ahead
    coming = {}
    for i, (length, new, step, priority, leaves) in enumerate(asked):
        request = greedy(text(length, i), new, priority=priority)
        request.done = lambda request: ended.append(request)
        if leaves is not None:
            request.take = functools.partial(leave, engine, request, leaves)
        coming.setdefault(step, []).append((request, leaves))
    ended, everyone = [], [each for group in coming.values() for each in group]
    for step in range(max(coming) + 1):
        for request, leaves in coming.get(step, []):
            engine.submit(request)
            if leaves == 0:
                engine.cancel(request)
        engine.step()
    run(engine)
    assert len(ended) == len(everyone) and {id(each) for each in ended} == {id(each) for each, _ in everyone}
    for request, leaves in everyone:
        assert request.error is None
        expected = alone(tuple(request.prompt), request.max_new_tokens)
        if leaves is None or leaves >= len(expected):
            assert (request.new, request.finish) == (expected, "length")
        else:
            assert (request.new, request.finish) == (expected[:leaves], "cancelled")
    check_empty(engine.pool)
    event(f"evictions: {engine.scheduler.evictions > 0}, computed again: {engine.scheduler.recomputations > 0}")


def leave(engine, request, after, choice):
    if len(request.new) == after:
        engine.cancel(request)


def test_nobody_is_overtaken_for_ever_and_the_first_runs_on():
    """A text that needs nearly all pages comes among short ones that keep coming."""
    engine = BatchEngine(model(), sequences=3, tokens=6 * PAGE, page=PAGE, step_tokens=16, chunk=8)
    large, finished = greedy(text(5 * PAGE), 4), []
    for i in range(20):
        request = large if i == 3 else greedy(text(6, i), 5)
        request.done = finished.append
        engine.submit(request)
        engine.step()
    run(engine)
    assert large.new == alone(tuple(large.prompt), 4)
    assert finished.index(large) < 12


def test_a_higher_priority_goes_first_but_not_for_ever(monkeypatch):
    monkeypatch.setattr(scheduler, "HEAD_START", 6)
    engine, finished = BatchEngine(model(), sequences=1, tokens=4 * PAGE, page=PAGE), []
    asked = [greedy(text(4, i), 1, priority=int(i > 0), done=finished.append) for i in range(10)]
    for request in asked:
        engine.submit(request)
    run(engine)
    assert [asked.index(each) for each in finished] == [1, 2, 3, 4, 5, 0, 6, 7, 8, 9]


# --- what goes wrong -------------------------------------------------------------------------------------------------


def test_a_forward_that_fails_costs_nobody_else_his_text():
    engine = BatchEngine(model(), sequences=4, tokens=20 * PAGE, page=PAGE)
    good, bad = [greedy(text(5, i), 6) for i in range(3)], greedy(text(5, 7), 6)
    for request in (*good, bad):
        engine.submit(request)
    slots = {}

    def fails(module, args, output):
        batch = slots["batch"]
        if bad.sequence is not None and bad.sequence.slot in batch.layers[3].rows and len(bad.new) == 3:
            raise RuntimeError("no memory")

    handles = [
        model()
        .model.layers[3]
        .register_forward_pre_hook(lambda module, args, kwargs: slots.update(batch=kwargs["cache"]), with_kwargs=True),
        model().model.layers[3].register_forward_hook(fails),
    ]
    try:
        run(engine)
    finally:
        for handle in handles:
            handle.remove()
    assert str(bad.error) == "no memory" and bad.new == alone(tuple(bad.prompt), 6)[:3]
    assert [request.new for request in good] == [alone(tuple(request.prompt), 6) for request in good]
    check_empty(engine.pool)


def test_a_deadline_and_a_departure_end_a_prefill_between_chunks():
    engine = BatchEngine(model(), sequences=2, tokens=20 * PAGE, page=PAGE, chunk=5)
    late, left = greedy(text(40), 3), greedy(text(40, 1), 3)
    for request in (late, left):
        engine.submit(request)
    for _ in range(2):
        engine.step()
    late.deadline = 0.0
    engine.cancel(left)
    run(engine)
    assert isinstance(late.error, TimeoutError) and left.finish == "cancelled" and engine.fed_tokens == 20
    check_empty(engine.pool)


def test_requests_that_cannot_work_are_refused():
    engine = BatchEngine(model(), sequences=2, tokens=2 * PAGE, page=PAGE)
    with pytest.raises(ValueError, match="12 tokens and 5 new ones are more than the 16"):
        engine.submit(greedy(text(12), 5))
    for prompt, new in (([], 3), ([4], 0)):
        with pytest.raises(ValueError, match="one token at least"):
            engine.submit(greedy(prompt, new))
    late = greedy(text(3), 3, deadline=0.0)
    engine.submit(late)
    run(engine)
    assert isinstance(late.error, TimeoutError) and late.new == []
    check_empty(engine.pool)


def test_what_one_request_does_wrong_ends_it_alone():
    """Its callbacks raise, or its rule allows no token."""
    engine, told = BatchEngine(model(), sequences=4, tokens=20 * PAGE, page=PAGE), []
    good, gone, banned = greedy(text(5), 4, done=told.append), greedy(text(6), 4), greedy(text(7), 4)
    gone.take = gone.done = lambda *args: 1 / 0
    banned.sampler = Sampler(Sampling(mask=lambda new: packed_mask(torch.zeros(tiny.VOCABULARY, dtype=torch.bool))))
    for request in (gone, banned, good):
        engine.submit(request)
    run(engine)
    assert told == [good] and good.new == alone(tuple(good.prompt), 4)
    assert isinstance(gone.error, ZeroDivisionError) and len(gone.new) == 1
    assert "no token may come next" in str(banned.error) and banned.new == []
    check_empty(engine.pool)


def test_as_many_requests_wait_as_may():
    """Siblings count each, and what is cancelled no longer."""
    engine = BatchEngine(model(), sequences=1, tokens=20 * PAGE, page=PAGE, waiting=3)
    first, *siblings = [greedy(text(4), 2) for _ in range(3)]
    first.siblings = siblings
    engine.submit(first)
    for _ in range(2):
        with pytest.raises(EngineFull, match="no more than 3 requests may wait at once"):
            engine.submit(greedy(text(5), 1))
    engine.cancel(siblings[1])
    engine.submit(greedy(text(5), 1))
    run(engine)
    check_empty(engine.pool)


def test_a_stop_waits_for_the_thread_that_it_breaks_off():
    engine, entered, may_go = BatchEngine(model(), tokens=20 * PAGE, page=PAGE), threading.Event(), threading.Event()
    thread, request = engine.start(), greedy(text(4), 100)
    request.take = lambda choice: entered.set() or not may_go.wait(PATIENCE)
    engine.submit(request)
    assert entered.wait(PATIENCE)
    threading.Timer(0.5, may_go.set).start()
    engine.stop(0)
    assert may_go.is_set() and not thread.is_alive() and isinstance(request.error, EngineFull)


def pauses(engine) -> bool:
    with engine.paused():
        return True


def test_pauses_stops_and_new_sessions():
    """Pauses nest and may be those of several threads; nobody stops what he pauses; what stopped can start again."""
    engine, ended = BatchEngine(model(), sequences=2, tokens=20 * PAGE, page=PAGE), queue.Queue()
    engine.start()
    with engine.paused(), engine.paused():
        request = greedy(text(4), 3, done=ended.put)
        engine.submit(request)
        with ThreadPoolExecutor(1) as other:
            assert other.submit(pauses, engine).result(), "two threads pause at once"
        with pytest.raises(RuntimeError, match="leave the pause"):
            engine.stop()
        assert request.new == [] and ended.empty()
    assert ended.get(timeout=PATIENCE).new == alone(tuple(request.prompt), 3)
    for _ in range(2):
        engine.stop()
        with pytest.raises(EngineFull, match="is shutting down"):
            engine.submit(greedy(text(4), 1))
        engine.start()
        engine.submit(greedy(text(4), 3, done=ended.put))
        assert ended.get(timeout=PATIENCE).finish == "length"
    entered, may_go = threading.Event(), threading.Event()
    late = greedy(text(4), 100, done=ended.put)
    late.take = lambda choice: entered.set() or not may_go.wait(PATIENCE)
    engine.submit(late)
    assert entered.wait(PATIENCE)
    engine.stop(0, abort=False)  # which leaves it to the thread
    engine.abort()
    may_go.set()
    assert isinstance(ended.get(timeout=PATIENCE).error, EngineFull) and late.finish is None
    engine.stop()
    check_empty(engine.pool)
