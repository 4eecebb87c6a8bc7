"""Simulated replays of a trace at several concurrencies, and their table and picture."""

import itertools
from pathlib import Path

from tqdm import tqdm

from .formulas import ModelCost, Node
from .report import scaled, table
from .simulation import Result, Simulation
from .trace import INPUT, Session


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
    each measured for `minutes` simulated minutes, after half as many of warm-up."""
    curves: dict[str, list[Result]] = {name: [] for name in tiers}
    runs = list(itertools.product(tiers, concurrencies))
    for name, concurrency in tqdm(runs, desc="simulating", unit="run", leave=False):
        run = Simulation(cost, node, sessions, concurrency, *tiers[name], **options)
        curves[name].append(run.run(30 * minutes, 60 * minutes))
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
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4.2), layout="tight")
    panels = figure.subplots(1, 3)
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
    figure.savefig(path, dpi=110)


def knee(cost: ModelCost, node: Node) -> float:
    """Concurrency at which sessions of the published median input fill the node."""
    return node.cache_capacity(cost, INPUT) / INPUT
