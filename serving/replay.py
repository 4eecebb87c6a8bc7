"""Plays a trace against the real prefix cache, with a small model."""

import random
import statistics
import time
from dataclasses import dataclass

import torch
from tqdm import tqdm
from transformers.generation import BaseStreamer

from ..costs.report import scaled, table
from ..costs.trace import Session
from .prefix_cache import PrefixCache


class FirstToken(BaseStreamer):
    """Notes the time of the first new token."""

    def __init__(self):
        self.calls, self.time = 0, None

    def put(self, value):
        self.calls += 1
        if self.calls == 2:  # the prompt comes first
            self.time = time.perf_counter()

    def end(self):
        pass


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

    queue = iter(sessions)
    playing: list[dict] = []
    waits, answered, started = [], 0, time.perf_counter()
    before = cache.stats()
    with tqdm(total=turns, desc=f"{concurrency} sessions", unit="turn", leave=False) as bar:
        done = 0
        while done < turns:
            while len(playing) < concurrency and (session := next(queue, None)) is not None:
                playing.append({"session": session, "ids": text("shared", session.shared), "turn": 0})
            if not playing:
                break
            user = playing.pop(0)
            session, at = user["session"], user["turn"]
            new, output, _ = session.turns[at]
            new -= session.shared if at == 0 else 0
            ids = [*user["ids"], *text(f"{session.session} {at}", new)]
            first, asked = FirstToken(), time.perf_counter()
            answer, _ = cache.generate(
                torch.tensor([ids], device=model.device),
                max_new_tokens=output,
                min_new_tokens=output,
                do_sample=False,
                streamer=first,
            )
            waits.append(first.time - asked)
            answered += output
            done += 1
            bar.update()
            user["ids"], user["turn"] = answer[0].tolist(), at + 1
            if user["turn"] < len(session.turns):
                playing.append(user)
    cache.flush()
    seconds, after = time.perf_counter() - started, cache.stats()

    def change(what):
        return {name: tier[what] - before["tiers"][name][what] for name, tier in after["tiers"].items()}

    hits, computed = (after[name] - before[name] for name in ("hit_tokens", "computed_tokens"))
    return Replayed(
        concurrency=concurrency,
        turns=done,
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
