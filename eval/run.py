"""An evaluation: the plan, the file of results that a killed run continues, and what is written at the end.

Each line of `results.jsonl` is one question, with everything that decides whether it belongs to this run: the model's
fingerprint, the prompt's hash, seed and versions. Nothing in it depends on time, batches or the machine's load, so that
a continued file is byte for byte the uninterrupted one.
"""

import collections
import contextlib
import hashlib
import itertools
import json
import logging
import os
import platform
import re
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from tqdm import tqdm

from .. import __version__
from ..files_kimi_k3 import DamagedFile, load_record, save_record, sealed, unsealed, written_whole
from ..runs_kimi_k3 import keeping, lock, tokenizer_digest
from .haystack import Haystack
from .sizing import EvalError, Prompt, Tokens
from .suite import TASKS, Unit

logger = logging.getLogger(__name__)

RESULTS = "results.jsonl"
SUITE = 1  # raised when the prompts of a seed change
_THREADS = min(4, os.cpu_count() or 1)  # which make prompts; a tokenizer lets them run at the same time
_AMPLE = (4, 1024)  # a length of 4 times what one text needs and 1,024 more is enough for all texts of its task
_UNIT = ("task", "length", "at_depth", "sample")  # the fields of a line that name its text


@dataclass(frozen=True)
class Plan:
    """What is asked, in the order in which it is asked.

    Attributes:
        tasks: names in `TASKS`.
        lengths: tokens of a prompt.
        depths: number of places, from the start to the end, where tasks with one fact hide it.
        samples: texts of each task, length and depth; tasks without depths get as many texts as those with.
        seed: decides all of the texts.
    """

    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    depths: int = 5
    samples: int = 10
    seed: int = 0

    def __post_init__(self):
        unknown = [name for name in self.tasks if name not in TASKS]
        if unknown:
            raise EvalError(f"there is no task {unknown[0]!r}: choose from {', '.join(TASKS)}")
        for name in ("tasks", "lengths"):
            values = getattr(self, name)
            if not values:
                raise EvalError(f"no {name} were given")
            if len(set(values)) < len(values):
                raise EvalError(f"one of the {name} is given twice")
        if min(self.depths, self.samples, *self.lengths) < 1:
            raise EvalError("lengths, depths and samples must be at least 1")

    def grid(self) -> list[float]:
        return [0.5] if self.depths == 1 else [i / (self.depths - 1) for i in range(self.depths)]

    def units(self) -> list[Unit]:
        return [
            Unit(task, length, depth, sample)
            for length in sorted(self.lengths)
            for task in self.tasks
            for depth in (self.grid() if TASKS[task].by_depth else [None])
            for sample in range(self.samples if depth is not None else self.samples * self.depths)
        ]

    def check(self, haystack: Haystack, tokens: Tokens) -> None:
        """Refuse what a task cannot do, before a model is loaded.

        Raises:
            EvalError: for a length into which some text of a task does not fit.
        """
        tried, ample = set(), set()
        for unit in self.units():
            if (unit.task, unit.length) in ample:
                continue
            needed = unit.needs(self.seed, haystack, tokens)
            if needed > unit.length:
                raise unit.refusal(needed)
            # The needs of texts differ by a few sentences at most: near the limit each text is looked at.
            if unit.length >= _AMPLE[0] * needed + _AMPLE[1]:
                ample.add((unit.task, unit.length))
            if unit.task not in tried:
                unit.prompts(self.seed, haystack, tokens)
                tried.add(unit.task)


class Results:
    """The lines of a file of results.

    Args:
        file: of JSON lines; it and its folder are made if they are not there.
        identity: {name: value} that all lines must share.
        key: the fields that tell one line from the others.

    Raises:
        EvalError: for a folder that cannot be written, or that holds results of something else.
    """

    def __init__(self, file: Path, identity: dict, key: tuple[str, ...]):
        self.file, self.identity, self._key = file, identity, key
        touch(file)
        try:
            data = file.read_bytes()
            whole = data[: data.rfind(b"\n") + 1]  # a kill while writing leaves a part of a line
            if len(whole) < len(data):
                os.truncate(file, len(whole))
        except OSError as error:
            raise EvalError(f"{file.parent} cannot be written: {error.strerror}") from error
        self.done, self.lines, kept = set(), [], []
        written = whole.split(b"\n")[:-1]
        for line in written:
            with contextlib.suppress(ValueError):
                self.lines.append(unsealed(json.loads(line)))
                kept.append(line + b"\n")
        if written and not kept:
            self._set_aside(written)
            return
        for line in self.lines:
            other = [f"{name} {line.get(name)}" for name in identity if line.get(name) != identity[name]]
            if other:
                raise EvalError(f"{file.parent} holds results of another run ({', '.join(other)}): choose a new folder")
        counted = collections.Counter(map(self.key, self.lines))
        if twice := [key for key, times in counted.items() if times > 1]:
            raise EvalError(f"{file} holds {twice[0]} more than once: two processes wrote it, so choose a new folder")
        if len(kept) < len(written):
            logger.warning("%s: %d damaged lines are taken out and asked again", file, len(written) - len(kept))
            with written_whole(file) as aside:
                aside.write_bytes(b"".join(kept))
        self.done = set(counted)

    def _set_aside(self, written: list[bytes]) -> None:
        """Begin anew beside a file of which nothing can be used.

        Raises:
            EvalError: if its lines never had a checksum, as of another version or program.
        """
        if any(map(_never_sealed, written)):
            raise EvalError(f"{self.file} is not a file of results of this version: choose a new folder")
        aside = self.file.with_suffix(f".damaged{self.file.suffix}")
        os.replace(self.file, aside)
        touch(self.file)
        logger.warning("%s: every line is damaged; they are kept as %s, and all is asked again", self.file, aside.name)

    def key(self, line: dict) -> tuple:
        return tuple(line[name] for name in self._key)

    def kept(self) -> str:
        """What a run that ends here leaves, and how to go on."""
        return f"{self.file} keeps {self._way_on()}"

    def _way_on(self) -> str:
        return f"{len(self.lines)} results, and the same command goes on from there"

    def append(self, lines: list[dict]) -> None:
        """Write lines at once and to the disk, each with the identity and a checksum.

        Raises:
            EvalError: if they cannot be written, to a full disk for example.
        """
        lines = [{**line, **self.identity} for line in lines]
        try:
            with self.file.open("ab") as file:
                file.write("".join(json.dumps(sealed(line)) + "\n" for line in lines).encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise EvalError(
                f"{self.file} cannot be written any more ({error.strerror}): it keeps {self._way_on()}"
            ) from error
        self.lines += lines
        self.done |= {self.key(line) for line in lines}


def _never_sealed(line: bytes) -> bool:
    """Whether no damage makes this of a line of ours: a record without a checksum, or what looks like no record."""
    try:
        record = json.loads(line)
    except ValueError:
        return not (line.startswith(b"{") or line.endswith(b"}"))
    return not isinstance(record, dict) or "checksum" not in record


def touch(file: Path) -> None:
    """Make a file and its folder where they are missing.

    Raises:
        EvalError: if it cannot be written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("ab"):
            pass
    except OSError as error:
        raise EvalError(f"{file.parent} cannot be written: {error.strerror}") from error


def write_memory(folder: Path, memory: dict[int, dict]) -> dict[str, dict]:
    """Add what `ModelReader.memory` measured to `memory.json`, and return all lengths of the folder in their order."""
    file = folder / "memory.json"
    known = {}
    try:
        known = load_record(file) if file.exists() else {}
    except DamagedFile as error:
        logger.warning("%s: what earlier runs measured is left out", error)
    known |= {str(length): line for length, line in memory.items()}
    known = dict(sorted(known.items(), key=lambda item: int(item[0])))
    if known:
        save_record(known, file)
    return known


def versions() -> str:
    """Everything except the model that a result depends on, as one line."""
    return (
        f"kimi-k3 {__version__}, suite {SUITE}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, python {platform.python_version()}"
    )


def identity_of(reader, tokens: Tokens, haystack: Haystack, seed: int) -> dict:
    """What must be the same in all results of a folder."""
    return {
        "model": hashlib.sha256(reader.fingerprint().encode()).hexdigest()[:16],
        "tokenizer": tokenizer_digest(tokens.tokenizer)[:16],
        "seed": seed,
        "haystack": haystack.name,
        "versions": versions(),
    }


def evaluate(reader, tokens: Tokens, haystack: Haystack, plan: Plan, folder: Path) -> list[dict]:
    """Ask the questions that the folder has no answer to, and return the lines of this plan in its order.

    Args:
        reader: a `ModelReader`, `EndpointReader`, or anything with their three methods.

    Raises:
        EvalError: before anything is asked, for a folder that cannot be used; later, if the reader fails or a task
            cannot do a length (`Plan.check` tells this in advance). The answers until then are in the folder.
    """
    identity = identity_of(reader, tokens, haystack, plan.seed)
    with lock(folder, EvalError):
        results = Results(folder / RESULTS, identity, (*_UNIT, "question"))
        _answer_all(reader, tokens, haystack, plan, results)
    places = {astuple(unit): place for place, unit in enumerate(plan.units())}
    lines = [line for line in results.lines if results.key(line)[:-1] in places]
    return sorted(lines, key=lambda line: (places[results.key(line)[:-1]], line["question"]))


def _answer_all(reader, tokens, haystack, plan, results):
    units = plan.units()
    bar = tqdm(total=sum(unit.length for unit in units), desc="eval", unit="tok", unit_scale=True, mininterval=1.0)
    with keeping(results.kept), bar, contextlib.ExitStack() as stack:
        pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="prompts")
        stack.callback(pool.shutdown, cancel_futures=True)
        texts = _texts_ahead(units, plan.seed, haystack, tokens, results, pool, bar)
        # a unit that was cut off by a kill has fewer questions left, and is asked by itself
        for (task, length, count), alike in itertools.groupby(texts, lambda text: text.kind):
            bar.set_description(f"{task} {length}")
            while batch := list(itertools.islice(alike, reader.units_at_once(length, count))):
                prompts = [[text.prompts.result()[number] for number in text.missing] for text in batch]
                answers = reader.answers(TASKS[task], prompts)
                for text, *asked in zip(batch, prompts, answers, strict=True):
                    results.append([_line(text.unit, *each) for each in zip(text.missing, *asked, strict=True)])
                    bar.update(length)


class _Text(NamedTuple):
    """A unit that is not finished: the numbers of the questions that are missing, and its prompts."""

    unit: Unit
    missing: list[int]
    prompts: Future[list[Prompt]]

    @property
    def kind(self) -> tuple:
        """What texts that are asked together have in common."""
        return self.unit.task, self.unit.length, len(self.missing)


def _texts_ahead(units, seed, haystack, tokens, results, pool, bar):
    """The unfinished units. Threads make their prompts while the model reads earlier ones: 1M tokens take seconds."""
    texts = collections.deque()
    for unit in units:
        numbers = range(unit.questions(seed, haystack))
        missing = [number for number in numbers if (*astuple(unit), number) not in results.done]
        if not missing:
            bar.update(unit.length)
            continue
        texts.append(_Text(unit, missing, pool.submit(unit.prompts, seed, haystack, tokens)))
        if len(texts) == _THREADS:
            yield texts.popleft()
    yield from texts


def _line(unit, number, prompt, text):
    question = prompt.question
    ids = hashlib.sha256(b"".join(token.to_bytes(4, "little") for token in prompt.ids)).hexdigest()
    return {
        "task": unit.task,
        "length": unit.length,
        "at_depth": unit.depth,
        "sample": unit.sample,
        "question": number,
        "depth": question.depth,
        "prompt": ids[:16],
        "answers": list(question.answers),
        "output": text,
        "score": TASKS[unit.task].score(text, question.answers),
    }


def by_cell(lines: list[dict], *names: str) -> dict[tuple, list[dict]]:
    """The lines grouped by these fields, in the order in which they come."""
    cells = {}
    for line in lines:
        cells.setdefault(tuple(line[name] for name in names), []).append(line)
    return cells


def interval(scores: list[float]) -> tuple[float, float, float]:
    """(mean, low, high): Wilson's 95 % interval of independent scores from 0 to 1; wide enough for fractions too."""
    count, mean, z = len(scores), sum(scores) / len(scores), 1.959964
    middle = (mean + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * (mean * (1 - mean) / count + z * z / (4 * count * count)) ** 0.5
    return mean, min(max(middle - half, 0.0), mean), max(min(middle + half, 1.0), mean)


def summary(lines: list[dict]) -> list[dict]:
    """Mean and interval of every task and length, with one observation a text: its questions are not independent."""
    cells = []
    for (task, length), cell in by_cell(lines, "task", "length").items():
        texts = by_cell(cell, "at_depth", "sample").values()
        mean, low, high = interval([sum(line["score"] for line in text) / len(text) for text in texts])
        cells.append(
            {
                "task": task,
                "length": length,
                "score": mean,
                "low": low,
                "high": high,
                "texts": len(texts),
                "questions": len(cell),
                "chance": TASKS[task].chance,
            }
        )
    return cells


def parse_length(text: str) -> int:
    """Tokens: "4k" is 4,096 and "1m" 1,048,576."""
    scale = {"k": 1024, "m": 1024**2}.get(text[-1:].lower(), 1)
    digits = text if scale == 1 else text[:-1]
    if not re.fullmatch("0*[1-9][0-9]{0,17}", digits):
        raise EvalError(f"{text[:50]!r} is no length: write 4096, 4k or 1m")
    return int(digits) * scale


def short_length(length: int) -> str:
    for scale, letter in ((1024**2, "m"), (1024, "k")):
        if length % scale == 0:
            return f"{length // scale}{letter}"
    return str(length)
