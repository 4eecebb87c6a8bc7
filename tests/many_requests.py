"""A small float64 model for tests of many requests at once, its texts, and how an engine and a prefix cache are driven
by hand.

In float64 the roundings by which the sums of a batch differ from those of one row decide no token.
"""

import functools

import torch

import tiny
from kimi_k3.serving.batching import BatchEngine
from kimi_k3.serving.forwards import Forwards
from kimi_k3.serving.pool import StatePool
from kimi_k3.serving.prefix_cache import PrefixCache
from kimi_k3.serving.sampling import Sampler, Sampling
from kimi_k3.serving.scheduler import Request

PAGE = 8
BLOCK, EVERY = 4, 12  # of prefix caches


@functools.cache
def model():
    return tiny.model("kmkkm", **tiny.NO_SPECIAL).double()


def text(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, tiny.VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@functools.cache
def alone(prompt: tuple[int, ...], new: int) -> list[int]:
    ids = torch.tensor([prompt])
    return model().generate(ids, max_new_tokens=new, do_sample=False)[0, len(prompt) :].tolist()


def greedy(prompt, new, **options) -> Request:
    return Request(list(prompt), new, Sampler(Sampling(temperature=0), list(prompt), frozenset()), **options)


def run(engine: BatchEngine) -> None:
    while engine.requests:
        engine.step()


def feed(net, pool: StatePool, sequences, tokens: list[list[int]]) -> torch.Tensor:
    """One forward as an engine makes it: the logits behind the last token of each."""
    forwards = Forwards(net, pool)
    if all(len(new) == 1 for new in tokens):
        return forwards.step(sequences, [token for [token] in tokens])
    return forwards.prefill(sequences, tokens)


def check_empty(pool: StatePool) -> None:
    assert pool.free_slots == pool.sequences and pool.free_pages == pool.pages
    assert not pool._holders


def make(net=None, **options) -> PrefixCache:
    return PrefixCache(net or model(), **{"device_bytes": 1 << 30, "block": BLOCK, "every": EVERY, **options})


def serving(cache, **options) -> BatchEngine:
    return BatchEngine(cache.model, prefix_cache=cache, **{"tokens": 40 * PAGE, "page": PAGE, **options})


def answered(engine, prompt, new=3, **options):
    request = greedy(prompt, new, **options)
    engine.submit(request)
    run(engine)
    if request.error is not None:
        raise request.error
    assert request.new == alone(tuple(prompt), new)
    return request


def check_unused(engine, cache):
    """Nothing is pinned, and all memory is free."""
    assert not cache.index.root.pins and not any(segment.pins for segment in cache.index.segments.values())
    check_empty(engine.pool)
