"""A node that serves sessions, as a discrete-event simulation: times from the cost model, event loop from simpy.

One engine runs steps, each a chunk of one prompt and one token of every session that is answering (continuous batching
with chunked prefill). A session keeps its cache between turns where there is room: GPU memory, then host memory, then
SSD; the least recently used one moves down first, and out at the end. A turn that finds nothing starts from the shared
prefix, whose cache always stays. Loading from below runs beside the engine, on a link of its own for each tier.

Left out: communication between GPUs, launches, and states at other boundaries than a turn's end.
"""

import functools
import random
import statistics
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import simpy

from .formulas import ModelCost, Node
from .trace import Session

CHUNK = 8192  # prompt tokens of one step
QUANTUM = 16  # decode steps simulated at once while no prompt waits
PCIE = 64e9  # bytes/s a GPU and direction, PCIe 5 x16
SSD = 7e9  # bytes/s of one drive, one a GPU


@dataclass
class Store:
    """One tier: whole sessions, the least recently used first, and the bytes they take (`size_of` their tokens)."""

    name: str
    capacity: float
    size_of: Callable[[int], int]
    bandwidth: float | None = None  # and no link: of the GPUs
    link: simpy.Resource | None = None
    sessions: OrderedDict = field(default_factory=OrderedDict)
    used: float = 0.0
    read: float = 0.0
    written: float = 0.0

    def put(self, owner, tokens: int) -> None:
        self.sessions[owner] = tokens
        self.used += self.size_of(tokens)

    def take(self, owner) -> int | None:
        """Tokens of a session, which then does not lie here; None where it did not before."""
        tokens = self.sessions.pop(owner, None)
        self.used -= 0 if tokens is None else self.size_of(tokens)
        return tokens

    def take_oldest(self) -> tuple[object, int]:
        """(owner, tokens) of the session that was not used for longest."""
        owner = next(iter(self.sessions))
        return owner, self.take(owner)


@dataclass
class Turn:
    """A request under way."""

    owner: object
    input: int
    output: int
    arrived: float
    known: int
    finished: simpy.Event
    done: int = 0
    decoded: int = 0
    first: float | None = None


@dataclass
class Result:
    """What one run of the simulation measured after its warm-up.

    `hit_rate` is restored input tokens over all input tokens; `moved` are bytes to and from each lower tier.
    """

    concurrency: int
    output_rate: float
    hit_rate: float
    first_token_median: float
    first_token_p90: float
    moved: dict[str, tuple[float, float]]


class Simulation:
    """`concurrency` users play sessions of the trace one after another, each from a random turn on.

    Args:
        host_bytes, ssd_bytes: of the lower tiers; 0 leaves a tier out.
    """

    def __init__(
        self,
        cost: ModelCost,
        node: Node,
        sessions: list[Session],
        concurrency: int,
        host_bytes: float = 0,
        ssd_bytes: float = 0,
        write_through: bool = False,
        seed: int = 0,
    ):
        if any(getattr(layer, "window", 0) for layer in cost.attention):
            raise ValueError(f"{cost.name} has sliding windows, whose cache the simulation does not follow")
        self.cost, self.node, self.sessions, self.concurrency = cost, node, sessions, concurrency
        self.write_through, self.random = write_through, random.Random(seed)
        # computed once, as every step asks for it
        self.state_bytes = cost.state_bytes()
        self.token_bytes = node.held_bytes(cost, 2) - node.held_bytes(cost, 1)
        self.decode_flops = cost.flops(1, 1), cost.flops(1, 2) - cost.flops(1, 1)  # linear in the context
        self.weight_bytes = functools.cache(cost.read_weight_bytes)
        self.env = simpy.Environment()
        # its `sessions` are those between two turns; `used` counts those that run as well
        self.gpus = Store(
            "GPUs", node.gpus * node.gpu.memory - cost.totals()[2], functools.partial(node.held_bytes, cost)
        )
        lower = (("host", host_bytes, PCIE), ("ssd", ssd_bytes, SSD))
        self.stores = [
            Store(name, size, cost.cache_bytes, bandwidth * node.gpus, simpy.Resource(self.env))
            for name, size, bandwidth in lower
            if size
        ]
        longest = max(session.inputs()[-1] + session.turns[-1][1] for session in sessions)
        if self.gpus.size_of(longest) > self.gpus.capacity:
            raise ValueError(
                f"the longest session of {longest:,} tokens does not fit beside the weights of {cost.name} on "
                f"{node.gpus} GPUs: {self.gpus.size_of(longest):.3g} of {max(self.gpus.capacity, 0):.3g} bytes"
            )
        self.waiting: list[Turn] = []
        self.prompts: list[Turn] = []
        self.answering: list[Turn] = []
        self.wake = self.env.event()
        self.finished: list[Turn] = []

    # --- users ---------------------------------------------------------------------------------------------------

    def _user(self, number: int):
        first = True
        while True:
            session = self.random.choice(self.sessions)
            start = self.random.randrange(len(session.turns)) if first else 0
            yield self.env.timeout(self.random.uniform(0, 60) if first else 0)
            owner, inputs = object(), session.inputs()
            for tokens, (_, output, pause) in list(zip(inputs, session.turns, strict=True))[start:]:
                turn = Turn(owner, tokens, output, self.env.now, session.shared, self.env.event())
                self.waiting.append(turn)
                self._nudge()
                yield turn.finished
                self.finished.append(turn)
                yield self.env.timeout(pause)
            for store in (self.gpus, *self.stores):
                store.take(owner)
            first = False

    # --- room ----------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Start waiting turns in order, as long as the cache of the first one in the queue finds room."""
        gpus = self.gpus
        while self.waiting:
            turn = self.waiting[0]
            need, cached = gpus.size_of(turn.input + turn.output), gpus.take(turn.owner)
            while gpus.used + need > gpus.capacity and gpus.sessions:
                self._move_down(*gpus.take_oldest())
            if gpus.used + need > gpus.capacity:
                if cached is not None:
                    gpus.put(turn.owner, cached)
                    gpus.sessions.move_to_end(turn.owner, last=False)
                return
            gpus.used += need
            self.waiting.pop(0)
            store = next((store for store in self.stores if turn.owner in store.sessions), None)
            if cached is not None:
                self._prompt(turn, cached)
            elif store is None:
                self._prompt(turn, turn.known)
            else:
                store.sessions.move_to_end(turn.owner)
                self.env.process(self._load(turn, store, store.sessions[turn.owner]))

    def _load(self, turn: Turn, store: Store, tokens: int):
        """Load the copy that was there when the turn was admitted, even if it moves farther down meanwhile."""
        size = store.size_of(tokens)
        store.read += size
        with store.link.request() as link:
            yield link
            yield self.env.timeout(size / store.bandwidth)
        self._prompt(turn, tokens)

    def _prompt(self, turn: Turn, known: int) -> None:
        turn.known = turn.done = known
        self.prompts.append(turn)
        self._nudge()

    def _move_down(self, owner, tokens: int, level: int = 0) -> None:
        """Keep a session in the tier below; sessions that it replaces move on. What lies there is not written again."""
        if level == len(self.stores):
            return
        store = self.stores[level]
        size, before = store.size_of(tokens), store.take(owner)
        if size > store.capacity:
            self._move_down(owner, tokens, level + 1)
            return
        while store.used + size > store.capacity:
            self._move_down(*store.take_oldest(), level + 1)
        store.put(owner, tokens)
        if before != tokens:  # of latents only the new ones are written; the state is always new
            store.written += size - max(store.size_of(before or 0) - self.state_bytes, 0)

    # --- the engine ----------------------------------------------------------------------------------------------

    def _nudge(self) -> None:
        if not self.wake.triggered:
            self.wake.succeed()

    def _engine(self):
        while True:
            self._admit()
            if not self.prompts and not self.answering:
                self.wake = self.env.event()
                yield self.wake
                continue
            turn = self.prompts[0] if self.prompts else None
            chunk = min(CHUNK, turn.input - turn.done) if turn else 0
            steps = 1 if turn else min(QUANTUM, *(t.output - t.decoded for t in self.answering))
            yield self.env.timeout(steps * self._step_seconds(turn, chunk))
            for other in self.answering:
                other.decoded += steps
            if turn:
                turn.done += chunk
                if turn.done >= turn.input:  # its last position gives the first token
                    self.prompts.pop(0)
                    turn.first, turn.decoded = self.env.now, 1
                    self.answering.append(turn)
            for other in [t for t in self.answering if t.decoded >= t.output]:
                self.answering.remove(other)
                tokens = other.input + other.output
                self.gpus.sessions[other.owner] = tokens  # whose bytes are counted since it was admitted
                if self.write_through:
                    self._move_down(other.owner, tokens)
                other.finished.succeed()

    def _step_seconds(self, turn: Turn | None, chunk: int) -> float:
        batch = len(self.answering)
        flops = latents = 0.0
        if batch:
            contexts = sum(t.input + t.decoded for t in self.answering)
            first, slope = self.decode_flops
            flops += batch * first + slope * (contexts - batch)
            latents += self.token_bytes * contexts
        if chunk:
            flops += self.cost.flops(chunk, turn.done)
            latents += self.token_bytes * (turn.done + chunk)
        states = 2 * self.state_bytes * (batch + bool(chunk))
        return self.node.seconds(flops, self.weight_bytes(batch + chunk) + latents + states)

    def run(self, warm_up: float, seconds: float) -> Result:
        """Simulate `warm_up` and then `seconds`, which are measured."""
        for number in range(self.concurrency):
            self.env.process(self._user(number))
        self.env.process(self._engine())
        self.env.run(until=warm_up)
        before = {store.name: (store.written, store.read) for store in self.stores}
        self.finished.clear()
        self.env.run(until=warm_up + seconds)
        done = self.finished
        waits = sorted(turn.first - turn.arrived for turn in done)
        return Result(
            concurrency=self.concurrency,
            output_rate=sum(turn.output for turn in done) / seconds,
            hit_rate=sum(min(turn.known, turn.input) for turn in done) / max(sum(turn.input for turn in done), 1),
            first_token_median=statistics.median(waits) if waits else float("inf"),
            first_token_p90=waits[int(0.9 * (len(waits) - 1))] if waits else float("inf"),
            moved={
                store.name: (store.written - before[store.name][0], store.read - before[store.name][1])
                for store in self.stores
            },
        )
