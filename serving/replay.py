"""Plays a trace against the real engine and prefix cache, with a small model."""

import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from tqdm import tqdm

from ..costs.report import scaled, table
from ..costs.trace import Session
from .batching import BatchEngine
from .prefix_cache import PrefixCache
from .sampling import Choice, Sampler
from .scheduler import Request

PAGE = 64


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


@dataclass
class _User:
    """A session on its way: its text so far, and the turns that follow."""

    session: Session
    texts: "_Texts"
    at: int = 0
    text: list[int] = field(default_factory=list)

    def turn(self) -> Request:
        new, output, _ = self.session.turns[self.at]
        if self.at == 0:
            self.text, new = self.texts("shared", self.session.shared), new - self.session.shared
        self.text = [*self.text, *self.texts(f"{self.session.session} {self.at}", new)]
        self.at += 1
        return Request(self.text, output, Sampler(prompt=self.text))

    def has_turns(self, request: Request) -> bool:
        """Whether turns follow the one whose answer has come."""
        self.text = [*request.prompt, *request.new]
        return self.at < len(self.session.turns)


@dataclass
class _Texts:
    """Random tokens by name."""

    seed: int
    low: int
    high: int

    def __call__(self, name: str, count: int) -> list[int]:
        draw = random.Random(f"{self.seed} {name}")
        return [draw.randrange(self.low, self.high) for _ in range(count)]


class _Player:
    """Keeps `concurrency` sessions going in an engine; a session's next turn is asked when its answer is whole."""

    def __init__(self, engine: BatchEngine, users: Iterator[_User], concurrency: int, turns: int):
        self.engine, self.users, self.concurrency, self.turns = engine, users, concurrency, turns
        self.waiting: list[_User] = []  # whose next turn can be asked
        self.asked = self.playing = 0
        self.waits: list[float] = []
        self.finished: list[Request] = []

    def step(self) -> bool:
        """Ask what can be asked and run a step; False when nothing is left to do."""
        while self.asked < self.turns and (user := self._next()) is not None:
            self._ask(user)
        if not self.engine.requests:
            return False
        self.engine.step()
        return True

    def _next(self) -> _User | None:
        if self.waiting:
            return self.waiting.pop(0)
        user = next(self.users, None) if self.playing < self.concurrency else None
        self.playing += user is not None
        return user

    def _ask(self, user: _User) -> None:
        request, asked = user.turn(), time.perf_counter()

        def take(choice: Choice) -> None:
            if len(request.new) == 1:
                self.waits.append(time.perf_counter() - asked)

        def done(request: Request) -> None:
            self.finished.append(request)
            if user.has_turns(request):
                self.waiting.append(user)
            else:
                self.playing -= 1

        request.take, request.done = take, done
        self.asked += 1
        self.engine.submit(request)


def replay(cache: PrefixCache, sessions: list[Session], concurrency: int, turns: int, seed: int = 0) -> Replayed:
    """Play `turns` turns of `concurrency` sessions at a time, all in one engine, without their pauses.

    Texts are random tokens; the shared ones are the same in all sessions. Answers are greedy and as long as in the
    trace.

    Raises:
        Exception: what ended a turn before its answer was whole.
    """
    model, vocabulary = cache.model, cache.model.config.get_text_config(decoder=True).vocab_size
    texts = _Texts(seed, min(3, vocabulary - 1), vocabulary)
    longest = max(session.inputs()[-1] + session.turns[-1][1] for session in sessions)
    room = concurrency * -(-longest // PAGE) * PAGE
    engine = BatchEngine(model, sequences=concurrency, tokens=room, page=PAGE, prefix_cache=cache)
    player = _Player(engine, (_User(session, texts) for session in sessions), concurrency, turns)
    started, before = time.perf_counter(), cache.stats()
    with tqdm(total=turns, desc=f"{concurrency} sessions", unit="turn", leave=False) as bar:
        while player.step():
            bar.update(len(player.finished) - bar.n)
    cache.flush()
    seconds, after = time.perf_counter() - started, cache.stats()
    for request in player.finished:
        if request.error is not None:
            raise request.error

    def change(counter):
        return {name: tier[counter] - before["tiers"][name][counter] for name, tier in after["tiers"].items()}

    asked = sum(len(request.prompt) for request in player.finished)
    return Replayed(
        concurrency=concurrency,
        turns=len(player.finished),
        output_rate=sum(len(request.new) for request in player.finished) / seconds,
        hit_rate=sum(request.cached for request in player.finished) / max(asked, 1),
        first_token_median=statistics.median(player.waits),
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
