"""Sessions of agentic traffic as JSONL, and a generator of such sessions.

One line is one session: `{"session": name, "shared": tokens, "turns": [[new, output, pause], ...]}`. A turn's input is
everything before it (inputs and answers) plus `new` tokens, its answer has `output` tokens, and `pause` seconds pass
before the next one, while tools run. The first `shared` tokens of the first turn are the same in all sessions (system
prompt, tools).
"""

import itertools
import json
import random
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

from ..files_kimi_k3 import written_whole

# Medians published for coding agents: input and output tokens of a turn, turns of a session.
INPUT, OUTPUT, TURNS = 142_000, 444, 65
SHARED = 8192
LONGEST = 900_000  # a session ends before the context of the model is full


@dataclass(frozen=True)
class Session:
    session: str
    shared: int
    turns: tuple[tuple[int, int, float], ...]

    def inputs(self) -> list[int]:
        """Input tokens of every turn."""
        texts = itertools.accumulate(new + output for new, output, _ in self.turns)
        return [text - output for text, (_, output, _) in zip(texts, self.turns, strict=True)]


def generate(sessions: int, seed: int = 0) -> list[Session]:
    """Sessions whose medians over all turns are `INPUT` and `OUTPUT`, and whose median number of turns is `TURNS`.

    Turns, new tokens, output and pauses are log-normal (sigma 0.5, 1, 0.8 and 1; the median pause is 4 seconds: an
    assumption, the trace's pauses are not published). New tokens are scaled until the median input is met.
    """
    if sessions < 1:
        raise ValueError("a trace needs a session at least")
    draw = random.Random(seed)

    def spread(sigma, count):
        return [draw.lognormvariate(0, sigma) for _ in range(count)]

    lengths = spread(0.5, sessions)
    middle = statistics.median(lengths)
    counts = [max(1, round(TURNS * length / middle)) for length in lengths]
    outputs = spread(0.8, sum(counts))
    middle = statistics.median(outputs)
    outputs = iter(max(1, round(OUTPUT * output / middle)) for output in outputs)
    raw = [
        [(new, next(outputs), round(4 * pause, 3)) for new, pause in zip(spread(1.0, n), spread(1.0, n), strict=True)]
        for n in counts
    ]

    def scaled(factor):
        found = []
        for i, turns in enumerate(raw):
            kept, context = [], 0
            for at, (new, output, pause) in enumerate(turns):
                new = max(1, round(new * factor)) + (SHARED if at == 0 else 0)
                if context + new + output > LONGEST:
                    break
                kept.append((new, output, pause))
                context += new + output
            found.append(Session(f"s{i:05d}", SHARED, tuple(kept) or ((SHARED + 1, 1, 0.0),)))
        return found

    low, high = 1.0, 100_000.0
    for _ in range(40):  # the median input grows with the factor
        middle = (low + high) / 2
        low, high = (middle, high) if medians(scaled(middle))["input"] < INPUT else (low, middle)
    return scaled(high)


def medians(sessions: list[Session]) -> dict[str, float]:
    return {
        "input": statistics.median(tokens for session in sessions for tokens in session.inputs()),
        "output": statistics.median(output for session in sessions for _, output, _ in session.turns),
        "turns": statistics.median(len(session.turns) for session in sessions),
    }


def write(path: Path, sessions: list[Session]) -> None:
    with written_whole(path) as aside:
        aside.write_text("".join(json.dumps(asdict(session)) + "\n" for session in sessions), encoding="utf-8")


def read(path: Path) -> list[Session]:
    """The sessions of a file.

    Raises:
        ValueError: for a line that is not a session; the sentence names file and line.
    """
    found = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        try:
            data = json.loads(line)
            turns = tuple((new, output, float(pause)) for new, output, pause in data["turns"])
            session = Session(str(data["session"]), data.get("shared", 0), turns)
            counts = [session.shared + 1, *(count for new, output, _ in turns for count in (new, output))]
            if not turns or not all(type(count) is int and count >= 1 for count in counts):
                raise ValueError("token counts are whole numbers of at least 1")
            if session.shared > turns[0][0] or not all(0 <= pause < float("inf") for *_, pause in turns):
                raise ValueError("shared is at most the first turn's new tokens, and pauses are seconds")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path}, line {number} is no session: {error}") from error
        found.append(session)
    if not found:
        raise ValueError(f"{path} holds no session")
    return found


def smaller(sessions: list[Session], scale: int) -> list[Session]:
    """The same sessions with every token count divided by `scale`, at least 1."""

    def less(tokens):
        return max(1, round(tokens / scale))

    return [
        Session(
            session.session,
            session.shared // scale,
            tuple((less(new), less(output), pause) for new, output, pause in session.turns),
        )
        for session in sessions
    ]
