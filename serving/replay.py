"""Plays a trace against the real prefix cache, with a small model."""

import contextlib
import itertools
import random
import statistics
import time
from collections import deque
from dataclasses import dataclass

import torch
from tqdm import tqdm

from ..cli.generate import TimedStreamer
from ..costs.report import scaled, table
from ..costs.trace import Session
from .prefix_cache import PrefixCache


@dataclass
class Replayed:
    """What one replay measured. Seconds of the first token are medians over turns; moved bytes by tier."""

    concurrency: int
    turns: int
    output_rate: float
    hit_rate: float
    first_token_median: float
    written: dict[str, int]
    evicted: dict[str, int]


def replay(cache: PrefixCache, sessions: list[Session], concurrency: int, turns: int, seed: int = 0) -> Replayed:
    """Play `turns` turns of `concurrency` sessions at a time, one turn of each in rotation, without their pauses.

    Texts are random tokens; the shared ones are the same in all sessions. Answers are greedy and as long as in the
    trace.
    """
    model, vocabulary = cache.model, cache.model.config.get_text_config(decoder=True).vocab_size
    low = min(3, vocabulary - 1)

    def text(name, count):
        draw = random.Random(f"{seed} {name}")
        return [draw.randrange(low, vocabulary) for _ in range(count)]

    def play(session):
        """Yields (input ids, output tokens) of each turn, and is sent the text behind it."""
        ids = text("shared", session.shared)
        for at, (new, output, _) in enumerate(session.turns):
            added = text(f"{session.session} {at}", new if at else new - session.shared)
            ids = yield [*ids, *added], output

    queue, playing = map(play, sessions), deque()
    waits, answered, started, before = [], 0, time.perf_counter(), cache.stats()
    for _ in tqdm(range(turns), desc=f"{concurrency} sessions", unit="turn", leave=False):
        playing += [(user, next(user)) for user in itertools.islice(queue, concurrency - len(playing))]
        if not playing:
            break
        user, (ids, output) = playing.popleft()
        streamer, asked = TimedStreamer(), time.perf_counter()
        answer, _ = cache.generate(
            torch.tensor([ids], device=model.device),
            max_new_tokens=output,
            min_new_tokens=output,
            do_sample=False,
            streamer=streamer,
        )
        waits.append(streamer.times[1] - asked)  # the prompt is the first that it is given
        answered += output
        with contextlib.suppress(StopIteration):
            playing.append((user, user.send(answer[0].tolist())))
    cache.flush()
    seconds, after = time.perf_counter() - started, cache.stats()

    def change(counter):
        return {name: tier[counter] - before["tiers"][name][counter] for name, tier in after["tiers"].items()}

    hits, computed = (after[name] - before[name] for name in ("hit_tokens", "computed_tokens"))
    return Replayed(
        concurrency=concurrency,
        turns=len(waits),
        output_rate=answered / seconds,
        hit_rate=hits / max(hits + computed, 1),
        first_token_median=statistics.median(waits),
        written=change("written_bytes"),
        evicted=change("evicted_bytes"),
    )


def replayed_table(results: list[Replayed]) -> str:
    rows = [
        [
            r.concurrency, r.turns, f"{r.output_rate:.1f}", f"{100 * r.hit_rate:.1f}%",
            f"{1e3 * r.first_token_median:.0f} ms",
            ", ".join(f"{name} {scaled(size, 'B')}" for name, size in r.written.items()),
            ", ".join(f"{name} {scaled(size, 'B')}" for name, size in r.evicted.items()),
        ]
        for r in results
    ]  # fmt: skip
    return table(
        ["sessions", "turns", "output tokens/s", "hit rate", "first token, median", "written", "evicted"], rows
    )
