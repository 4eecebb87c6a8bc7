"""A small float64 model for tests of the prefix cache, and what a run through the cache has to equal."""

import torch

import tiny
from kimi_k3 import CACHE_ARGUMENT as CACHE
from kimi_k3 import HybridCache
from kimi_k3.serving.prefix_cache import PrefixCache
from rounding import EXACT

BLOCK, EVERY = 4, 12


def small_model(seed=0):
    """KDA, MLA, KDA in float64, as small as the layers allow."""
    settings = {"vocab_size": 32, "q_lora_rank": None, "max_position_embeddings": 4096, "initializer_range": 0.3}
    return tiny.model("kmk", seed, **settings, **tiny.DENSE, **tiny.NO_SPECIAL).double()


MODEL = small_model()
STATE_BYTES = 2 * (5 * 8 * 8 + 3 * 3 * 40) * 8
TOKEN_BYTES = (20 + 14) * 8 + 8


def row(tokens):
    return torch.tensor([tokens])


def tokens(length, seed=0):
    return torch.randint(1, 32, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def cold(ids, splits, model=MODEL):
    """Logits of all positions of a run without any cache but its own, split at the given boundaries."""
    cache, logits, start = HybridCache(model.config), [], 0
    for end in splits:
        logits.append(model(row(ids[start:end]), **{CACHE: cache}).logits)
        start = end
    return torch.cat(logits, dim=1)


def check(cache, ids, model=MODEL):
    """Run through the cache; equal to the last bit to a cold run with the splits that it names, and close to one
    without splits. Returns how many tokens were restored."""
    got, done = cache.forward(row(ids), keep_logits=True)
    assert done.splits[-1] == len(ids) == done.cache.get_seq_length()
    assert done.hit == 0 or done.hit in done.splits
    assert torch.equal(got, cold(ids, done.splits, model)[:, done.hit :])
    torch.testing.assert_close(got, cold(ids, [len(ids)], model)[:, done.hit :], **EXACT)
    return done.hit


def make(**options):
    return PrefixCache(MODEL, **{"device_bytes": 1 << 30, "block": BLOCK, "every": EVERY, **options})
