"""What is kept only when it is asked for a second time."""

import pytest
import torch
from many_requests import PAGE, alone, answered, check_unused, greedy, make, run, serving, text

from kimi_k3.serving.prefix_index import AskedPrefixes, PrefixIndex

pytestmark = pytest.mark.one_release


def test_the_second_time_is_kept():
    """In whole blocks of 4; the first time takes no room, neither a prompt nor its answer."""
    cache = make(admission="second")
    ids = torch.tensor([text(30)])
    for hit in (0, 0, 28, 28):
        _, done = cache.forward(ids)
        assert done.hit == hit and done.exact
    cache.generate(torch.tensor([text(30, 1)]), max_new_tokens=4)
    assert cache.stats()["tiers"]["device"]["parts"] == 2 * 3, "states behind 12, 24 and 28 tokens of one text"
    assert not cache.index.root.pins


def test_where_texts_part():
    """The second text that begins like another shows the place, the third starts there; each salt for itself."""
    cache = make(admission="second", every=400)
    engine = serving(cache)
    hits = [
        [answered(engine, text(22) + text(8, seed), cache_salt=salt).cached for seed in (1, 2, 3)] for salt in ("", "x")
    ]
    assert hits == [[0, 0, 20]] * 2
    check_unused(engine, cache)


def test_a_request_that_is_computed_again_was_asked_for_once():
    cache = make(admission="second")
    engine = serving(cache, tokens=6 * PAGE)
    requests = [greedy(text(20, seed), 12) for seed in range(2)]
    for request in requests:
        engine.submit(request)
    run(engine)
    assert [each.new for each in requests] == [alone(tuple(each.prompt), 12) for each in requests]
    assert engine.scheduler.recomputations and not cache.stats()["segments"]


def test_no_more_is_remembered_than_the_limit():
    root = PrefixIndex("00" * 32, 4).root
    asked = AskedPrefixes(4, 5)
    assert asked.ask(text(13), root) == 0 and len(asked) == 3
    assert asked.ask(text(13)[:9] + text(20, 1), root) == 8 and len(asked) == 5
    assert asked.ask(text(13), root) == 8, "of the one that was asked for before, the longest was forgotten first"
    assert AskedPrefixes(4, 5).ask(text(13), root) == 0


def test_another_rule_is_refused():
    with pytest.raises(ValueError, match="'first' or 'second', but got 'third'"):
        make(admission="third")
