"""A trace played against the real prefix cache, on a model that is small enough; and the tables and pictures of both
kinds of replay."""

import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm
from transformers.generation import BaseStreamer

from .cost import ModelCost, Node
from .cost_report import scaled, table
from .prefix_cache import PrefixCache
from .simulation import Result, Simulation
from .trace import INPUT, Session


class FirstToken(BaseStreamer):
    """Notes when the first new token is there."""

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

    Texts are random tokens, the shared ones the same in all sessions. Answers are greedy and have the trace's length.
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
            answer = cache.generate(
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


# --- simulated -------------------------------------------------------------------------------------------------------


def simulate(
    cost: ModelCost,
    node: Node,
    sessions: list[Session],
    concurrencies: list[int],
    tiers: dict[str, tuple[float, float]],
    minutes: float,
    **options,
) -> dict[str, list[Result]]:
    """One curve for every pair of host and SSD bytes in `tiers`, a point for every concurrency,
    each measured for so many simulated minutes after half as many of warm-up."""
    curves: dict[str, list[Result]] = {name: [] for name in tiers}
    with tqdm(total=len(tiers) * len(concurrencies), desc="simulating", unit="run", leave=False) as bar:
        for name, (host, ssd) in tiers.items():
            for concurrency in concurrencies:
                run = Simulation(cost, node, sessions, concurrency, host, ssd, **options)
                curves[name].append(run.run(30 * minutes, 60 * minutes))
                bar.update()
    return curves


def simulated_table(curves: dict[str, list[Result]]) -> str:
    rows = [
        [
            name, r.concurrency, f"{r.output_rate:,.0f}", f"{100 * r.hit_rate:.1f}%", f"{r.first_token_median:.2f} s",
            f"{r.first_token_p90:.2f} s",
            ", ".join(f"{tier} {scaled(w, 'B')} / {scaled(read, 'B')}" for tier, (w, read) in r.moved.items()) or "-",
        ]
        for name, results in curves.items()
        for r in results
    ]  # fmt: skip
    head = ["cache in", "sessions", "output tokens/s", "hit rate", "first token, median", "90%", "written / read below"]
    return table(head, rows)


def draw(curves: dict[str, list[Result]], knee: float, title: str, path: Path) -> None:
    """Throughput, hit rate and time to the first token against concurrency; a line where the budget runs out."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 3, figsize=(14, 4.2))
    shown = [
        ("output tokens/s", lambda r: r.output_rate),
        ("hit rate, % of input tokens", lambda r: 100 * r.hit_rate),
        ("time to first token, median, s", lambda r: r.first_token_median),
    ]
    for axes, (label, value) in zip(panels, shown, strict=True):
        for name, results in curves.items():
            axes.plot([r.concurrency for r in results], [value(r) for r in results], marker=".", label=name)
        axes.axvline(knee, color="grey", linestyle="--", label=f"GPU budget / median session: {knee:.0f}")
        axes.set(xlabel="sessions at a time", ylabel=label, xscale="log")
        axes.grid(alpha=0.3)
    panels[2].set_yscale("log")
    panels[0].legend(fontsize=8)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def knee(cost: ModelCost, node: Node) -> float:
    """Concurrency at which sessions of the published median input fill the node."""
    return node.cache_capacity(cost, INPUT) / INPUT
