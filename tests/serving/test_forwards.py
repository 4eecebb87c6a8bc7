"""Forwards of batches that are captured, and a host that is a step ahead of the device.

Without a GPU a graph is a stand-in that runs the captured forward again on the very table that it was captured with, so
that sizes, spare rows and reuse are those of a GPU.
"""

import copy
import logging

import pytest
import torch
from many_requests import PAGE, alone, answered, check_empty, check_unused, greedy, make, model, run, serving, text

import tiny
from kimi_k3 import graph_kimi_k3
from kimi_k3.serving import forwards
from kimi_k3.serving import pool as pool_module
from kimi_k3.serving.batching import BatchEngine
from kimi_k3.serving.forwards import rounded_pages, rounded_rows, rounded_tokens
from kimi_k3.serving.sampling import Sampler, Sampling, packed_mask
from kimi_k3.serving.scheduler import Request

pytestmark = pytest.mark.one_release


@pytest.fixture
def graphs(monkeypatch):
    """The graphs that were captured, each with the number of its replays."""
    made = []

    class StandIn:
        def __init__(self, forward, inputs, memory=None):
            self.forward, self.outputs, self.replays = forward, None, 0
            self.table = inputs["table"] if memory is None else inputs
            made.append(self)

        def replay(self, **arguments):
            logits = self.forward(self.table, **arguments)
            self.outputs = logits if self.outputs is None else self.outputs.copy_(logits)
            self.replays += 1

    monkeypatch.setattr(graph_kimi_k3, "Graph", StandIn)
    monkeypatch.setattr(forwards, "_CutGraph", StandIn)
    monkeypatch.setattr(forwards, "_Memory", lambda device: object())
    monkeypatch.setattr(forwards.Forwards, "cuts_prefills", True)
    monkeypatch.setattr(pool_module, "has_graphs", lambda device: True)
    return made


def engine_of(net=None, **options):
    return BatchEngine(net or model(), **{"sequences": 12, "tokens": 90 * PAGE, "page": PAGE, **options})


def test_sizes():
    assert [rounded_rows(rows) for rows in (1, 2, 3, 5, 8, 9, 17, 64)] == [1, 2, 4, 8, 8, 16, 24, 64]
    assert [rounded_pages(n) for n in (0, 1, 2, 3, 4, 5, 7, 9, 13, 71)] == [0, 1, 2, 3, 4, 6, 8, 12, 16, 96]
    assert [rounded_tokens(n) for n in (1, 64, 65, 500, 600, 2049, 3000)] == [64, 64, 128, 512, 640, 2304, 3072]


def test_texts_of_captured_steps(graphs):
    """Requests come and go, and every size is captured once. Nothing is left in flight."""
    engine = engine_of()
    asked = [greedy(text(3 + 5 * i % 17, i), 3 + 2 * i) for i in range(9)]
    for request in asked:
        engine.submit(request)
        engine.step()
    run(engine)
    assert [request.new for request in asked] == [alone(tuple(each.prompt), each.max_new_tokens) for each in asked]
    sizes = [tuple(graph.table.shape) for graph in graphs]
    assert len(set(sizes)) == len(sizes) and {size[0] for size in sizes if len(size) == 2} <= {1, 2, 4, 8, 12}
    assert any(len(size) == 1 and graph.replays for size, graph in zip(sizes, graphs, strict=True)), "prefills too"
    assert sum(graph.replays for graph in graphs) > engine.steps // 3
    assert not engine._asked and not engine._fed
    check_empty(engine.pool)
    captured = len(graphs)
    again = [greedy(each.prompt, each.max_new_tokens) for each in asked[:2]]
    for request in again:
        engine.submit(request)
    run(engine)
    assert [each.new for each in again] == [each.new for each in asked[:2]]
    assert {id(graph) for graph in graphs[:captured]} & {id(step.graph) for step in engine._forwards._sizes.values()}


def test_the_spare_slot_and_page_are_within_the_budget(graphs):
    pool = pool_module.StatePool(model(), 3, memory=1_000_000, page=PAGE)
    buffers = [*pool.latents.values(), *(buffer for state in pool.states.values() for buffer in state)]
    assert sum(buffer.nbytes for buffer in buffers) <= 1_000_000
    assert 1_000_000 - sum(buffer.nbytes for buffer in buffers) < pool.page_bytes


def test_a_model_that_changes_is_captured_anew_or_not_at_all(graphs, caplog):
    net = tiny.model("kmk", **tiny.NO_SPECIAL).double()
    engine = engine_of(net)

    asked = text(5)

    def expect():
        request = greedy(asked, 12)
        engine.submit(request)
        run(engine)
        ids = torch.tensor([asked])
        assert request.new == net.generate(ids, max_new_tokens=12, do_sample=False)[0, len(asked) :].tolist()

    expect()
    expect()
    known = len(graphs)
    expect()
    assert len(graphs) == known > 0
    with torch.no_grad():
        net.model.embed_tokens.weight += 0.5  # where it lies: the graphs read it
    expect()
    assert len(graphs) == known
    other = copy.deepcopy(net.model.layers[0])
    with torch.no_grad():
        other.input_layernorm.weight *= 1.5
    net.model.layers[0] = other
    expect()
    expect()
    assert len(graphs) > known
    known = len(graphs)
    handle = net.model.layers[0].register_forward_hook(lambda module, args, output: None)
    with caplog.at_level(logging.WARNING):
        expect()
        expect()
    assert len(graphs) == known
    assert [record.message for record in caplog.records if "without CUDA graphs" in record.message] == [
        "batches run without CUDA graphs: model.layers.0 has a hook, or a forward of its own, which "
        "a graph would not call"
    ]
    handle.remove()
    expect()
    assert len(graphs) > known


def test_a_capture_that_fails_is_said_once_and_costs_no_text(graphs, monkeypatch, caplog):
    def broken(*arguments):
        raise RuntimeError("operation not permitted")

    monkeypatch.setattr(graph_kimi_k3, "Graph", broken)
    engine = engine_of()
    asked = [greedy(text(4, i), 8) for i in range(3)]
    for request in asked:
        engine.submit(request)
    run(engine)
    assert [request.new for request in asked] == [alone(tuple(request.prompt), 8) for request in asked]
    assert ["operation not permitted" in record.message for record in caplog.records].count(True) == 1


RULES = [
    {"temperature": 0.9, "seed": 3},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 11, "seed": 4, "repetition_penalty": 1.3},
    {"temperature": 1.2, "seed": 5, "presence_penalty": 0.5, "frequency_penalty": 0.7, "min_new_tokens": 4},
    {"temperature": 0.7, "seed": 6, "log_probabilities": 2},
    {"temperature": 0.9, "seed": 7, "mask": lambda new: packed_mask(torch.arange(tiny.VOCABULARY) % 3 == len(new) % 3)},
]


def sampled(is_ahead):
    engine = engine_of()
    engine.is_ahead = is_ahead
    told, asked = [], []
    for i, rule in enumerate(RULES):
        prompt, heard = text(5 + i, i), []
        request = Request(prompt, 9, Sampler(Sampling(**rule), prompt, {5, 6}), frozenset({5, 6}), take=heard.append)
        told.append(heard)
        asked.append(request)
        engine.submit(request)
    run(engine)
    check_empty(engine.pool)
    return [(request.new, request.finish, choices) for request, choices in zip(asked, told, strict=True)]


def test_a_host_that_is_ahead_changes_no_choice(graphs):
    assert sampled(True) == sampled(False)


def test_an_end_is_seen_a_step_late_and_what_was_fed_behind_it_is_not_told(graphs):
    """Neither to the listener nor in `new`; a rule that fails ends its request alone."""
    engine = engine_of()
    expected = alone(tuple(text(6)), 12)
    end = expected[4]
    request, other, wrong = greedy(text(6), 12), greedy(text(6, 1), 12), greedy(text(6, 2), 12)
    request.ends, heard = frozenset({end}), []
    request.take = lambda choice: heard.append(choice.token)
    wrong.sampler = Sampler(Sampling(mask=lambda new: packed_mask(torch.full((tiny.VOCABULARY,), len(new) < 3))))
    for each in (request, other, wrong):
        engine.submit(each)
    run(engine)
    first = expected.index(end)
    assert request.new == heard == expected[: first + 1] and request.finish == "stop"
    assert other.new == alone(tuple(text(6, 1)), 12)
    assert "no token may come next" in str(wrong.error) and len(wrong.new) == 3
    check_empty(engine.pool)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_what_is_kept_of_texts_by_a_host_that_is_ahead(graphs, batch_invariant):
    """Turns that go on from the last one's text, behind an end token that was fed and behind one that was not."""
    cache = make()
    engine = serving(cache, batch_invariant=batch_invariant)
    assert engine.is_ahead
    for new in (3, 9, 14):
        first = answered(engine, text(22, new), new)
        second = answered(engine, [*first.prompt, *first.new, 7, 8], 6)
        assert second.cached >= len(first.prompt) + new - 1 - 12
        assert not batch_invariant or second.turn.exact
    stopped = greedy(text(30), 12)
    stopped.ends = frozenset({alone(tuple(text(30)), 12)[6]})
    engine.submit(stopped)
    run(engine)
    answered(engine, [*stopped.prompt, *stopped.new, 9], 5)
    check_unused(engine, cache)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures need a GPU")
@pytest.mark.parametrize("cuts_prefills", [False, True])
def test_texts_of_graphs_on_a_gpu(cuts_prefills):
    """In float32, with pages that the kernels read."""
    net = tiny.model("kmkkm", **tiny.NO_SPECIAL).to("cuda")
    engine = BatchEngine(net, sequences=12, tokens=90 * 64)
    engine._forwards.cuts_prefills = cuts_prefills
    asked = [greedy(text(3 + 13 * i % 71, i), 60 + 3 * i) for i in range(24)]
    for request in asked:
        engine.submit(request)
        engine.step()
    run(engine)
    for request in asked:
        ids = torch.tensor([request.prompt], device="cuda")
        expected = net.generate(ids, max_new_tokens=request.max_new_tokens, do_sample=False, disable_compile=True)
        assert request.new == expected[0, len(request.prompt) :].tolist()
    assert engine.is_ahead and sum(step.graph is not None for step in engine._forwards._sizes.values()) > 3
    check_empty(engine.pool)
