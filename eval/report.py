"""Pictures and a page of an evaluation: accuracy by length, recall by depth and length, a table with intervals."""

import base64
import dataclasses
import html
import json
from pathlib import Path

from .run import by_cell, short_length, summary
from .suite import TASKS

BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#666666"  # distinct to colour-blind readers and in grey
COLUMNS = 3
DEPTH_BINS = 5


@dataclasses.dataclass(frozen=True)
class Mark:
    """A length that is marked in the pictures, and what it is."""

    length: int
    what: str

    def __str__(self):
        return f"{self.what} {short_length(self.length)}"


def panels_of(count: int, height: float):
    """A figure that no window shows and its first `count` axes, `COLUMNS` in a row."""
    from matplotlib.figure import Figure

    columns = min(COLUMNS, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(3.6 * columns + 0.6, height * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for unused in axes.flat[count:]:
        unused.remove()
    return figure, list(axes.flat[:count])


def length_axis(axes, lengths: list[int]) -> None:
    """Lengths from left to right, doubling in equal steps, and a grid."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [short_length(length) for length in lengths])
    axes.minorticks_off()
    axes.grid(alpha=0.25)


def draw_by_length(cells: list[dict], mark: Mark | None, picture: Path) -> None:
    """One panel a task: the score over the length with its 95 % interval, chance where it shows, the marked length."""
    tasks = by_cell(cells, "task")
    figure, panels = panels_of(len(tasks), 2.5)
    lengths = sorted({cell["length"] for cell in cells})
    for axes, ((task,), points) in zip(panels, tasks.items(), strict=True):
        at = [point["length"] for point in points]
        scores = [100 * point["score"] for point in points]
        below = [100 * (point["score"] - point["low"]) for point in points]
        above = [100 * (point["high"] - point["score"]) for point in points]
        axes.errorbar(at, scores, [below, above], color=BLUE, marker="o", markersize=5, capsize=3, linewidth=1.8)
        if points[0]["chance"] > 0.005:
            axes.axhline(100 * points[0]["chance"], color=GREY, linestyle=":", label="chance")
        if mark:
            label = str(mark) if axes is panels[0] else None  # in one legend
            axes.axvline(mark.length, color=ORANGE, linestyle="--", linewidth=1.2, label=label)
        length_axis(axes, lengths)
        ends = [*lengths, mark.length] if mark else lengths
        axes.set_xlim(min(ends) / 1.3, max(ends) * 1.3)
        axes.set_ylim(-4, 104)
        axes.set_yticks([0, 25, 50, 75, 100])
        axes.set_title(f"{task}\n{TASKS[task].about}", fontsize=9)
        if axes.get_legend_handles_labels()[1]:
            axes.legend(fontsize=7, loc="lower right")
    figure.supxlabel("tokens of the prompt", fontsize=10)
    figure.supylabel("score, %", fontsize=10)
    figure.savefig(picture, dpi=110)


def draw_by_depth(lines: list[dict], mark: Mark | None, picture: Path) -> bool:
    """One heat map a task whose facts have a depth: its score in each cell; False where no task has any."""
    tasks = by_cell([line for line in lines if line["depth"] is not None], "task")
    if not tasks:
        return False
    figure, panels = panels_of(len(tasks), 2.7)
    image, note = None, ""
    for axes, ((task,), answers) in zip(panels, tasks.items(), strict=True):
        lengths = sorted({line["length"] for line in answers})
        image = _heat_map(axes, answers, lengths)
        if mark and lengths[0] <= mark.length < lengths[-1]:
            edge = sum(length <= mark.length for length in lengths) - 0.5
            axes.axvline(edge, color="white", linewidth=3)
            axes.axvline(edge, color=ORANGE, linewidth=1.5, linestyle="--")
            note = f"; dashed: {mark}"
        axes.set_title(task, fontsize=9)
    figure.supxlabel(f"tokens of the prompt{note}", fontsize=10)
    figure.supylabel("depth of the fact, % of the text", fontsize=10)
    figure.colorbar(image, ax=panels, label="score, % (white: not asked)", shrink=0.8, aspect=30)
    figure.savefig(picture, dpi=110)
    return True


def _heat_map(axes, lines, lengths):
    """Rows are the depths that were asked for or, where they were drawn, fifths of the text."""
    asked = all(line["at_depth"] is not None for line in lines)
    if asked:
        rows = sorted({line["at_depth"] for line in lines})
        labels = [f"{100 * row:.0f}" for row in rows]
    else:
        rows = list(range(DEPTH_BINS))
        labels = [f"{100 * row // DEPTH_BINS}-{100 * (row + 1) // DEPTH_BINS}" for row in rows]

    def row_of(line):
        return rows.index(line["at_depth"]) if asked else min(int(line["depth"] * DEPTH_BINS), DEPTH_BINS - 1)

    grid = [[[] for _ in lengths] for _ in rows]
    for line in lines:
        grid[row_of(line)][lengths.index(line["length"])].append(line["score"])
    means = [[100 * sum(cell) / len(cell) if cell else float("nan") for cell in row] for row in grid]
    image = axes.imshow(means, cmap="cividis", vmin=0, vmax=100, aspect="auto")
    for y, row in enumerate(means):
        for x, value in enumerate(row):
            if value == value:
                axes.text(x, y, f"{value:.0f}", ha="center", va="center", fontsize=8, color="k" if value > 55 else "w")
    axes.set_xticks(range(len(lengths)), [short_length(length) for length in lengths])
    axes.set_yticks(range(len(rows)), labels)
    return image


_PAGE = """<!DOCTYPE html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 75em; margin: 2em auto; padding: 0 1em; color: #222 }}
img {{ max-width: 100% }} table {{ border-collapse: collapse }} small {{ color: #555 }}
th, td {{ padding: .25em .8em; border-bottom: 1px solid #ddd; text-align: right }} td:first-child {{ text-align: left }}
</style>
<h1>{title}</h1>
<p>{facts}</p>
{pictures}
<h2>All cells</h2>
<table><tr>{columns}</tr>
{rows}
</table>
<p><small>The interval is Wilson's with one observation a text: the questions of one text are not independent.</small>
</html>
"""


_COLUMNS = ("task", "in RULER", "tokens", "score", "95 % interval", "texts", "questions")


def _row(cell):
    yield from (cell["task"], TASKS[cell["task"]].ruler or "", f"{cell['length']:,}", f"{100 * cell['score']:.1f} %")
    yield from (f"{100 * cell['low']:.1f} to {100 * cell['high']:.1f}", cell["texts"], cell["questions"])


def write_report(lines: list[dict], folder: Path, title: str, mark: Mark | None) -> Path:
    """Write `summary.json`, `by_length.png`, `by_depth.png` and the page with all of them; returns the page's path."""
    cells = summary(lines)
    (folder / "summary.json").write_text(json.dumps(cells, indent=1) + "\n")
    pictures = [("Score by length", folder / "by_length.png"), ("Recall by depth and length", folder / "by_depth.png")]
    draw_by_length(cells, mark, pictures[0][1])
    if not draw_by_depth(lines, mark, pictures[1][1]):
        pictures.pop()
    first = lines[0]
    facts = f"Model {first['model']}, seed {first['seed']}, haystack {first['haystack']}; {first['versions']}."
    rows = "\n".join("<tr>" + "".join(f"<td>{value}</td>" for value in _row(cell)) + "</tr>" for cell in cells)
    columns = "".join(f"<th>{name}</th>" for name in _COLUMNS)
    images = "\n".join(
        f'<h2>{name}</h2>\n<img alt="{name}" src="data:image/png;base64,'
        f'{base64.b64encode(file.read_bytes()).decode()}">'
        for name, file in pictures
    )
    page = folder / "report.html"
    page.write_text(
        _PAGE.format(title=html.escape(title), facts=html.escape(facts), pictures=images, columns=columns, rows=rows),
        encoding="utf-8",
    )
    return page


def table(cells: list[dict]) -> str:
    """The cells as lines for a terminal."""
    lines = [f"{'task':<18}{'tokens':>10}{'score':>9}   95 % interval   texts"]
    for cell in cells:
        lines.append(
            f"{cell['task']:<18}{cell['length']:>10,}{100 * cell['score']:>8.1f}%"
            f"   {100 * cell['low']:5.1f} to {100 * cell['high']:5.1f}{cell['texts']:>8}"
        )
    return "\n".join(lines)
