"""Which requests run in the next step, and what gives way to them. No tensor is touched here but through the pool.

A request has a text (prompt and new tokens) of which some tokens were fed. One that has all but its last token in the
pool decodes; one that lacks more, because it is new or was evicted, is prefilled, in chunks.

    waiting    nothing in the pool
    running    a sequence in the pool: prefill, then decoding
    evicted    its sequence lies in host memory, or its tokens are fed again; it waits at its old place in the order

Requests are served in one order: by number of arrival, where each unit of priority is worth `HEAD_START` arrivals. So
nobody waits for ever, and whatever gives way comes later in the order than what it gives way to: the first request
always runs on.
"""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from .pool import Saved, Sequence, StatePool
from .prefix_store import Turn
from .sampling import Choice, Sampler
from .scoring import Scored

HEAD_START = 64


@dataclass(eq=False)
class Request:
    """One text to be continued.

    Attributes:
        prompt: token ids.
        max_new_tokens: at most so many follow.
        sampler: how the next tokens are chosen.
        ends: tokens that end the text.
        priority: higher ones go first; 0 for the most.
        deadline: `time.monotonic()` behind which it ends with a `TimeoutError`.
        take: called with every new token, in the engine's thread; True ends the text there.
        done: called once at the end, when `finish` or `error` is set.
        finish: "stop" (an end token, or `take` said so), "length" or "cancelled".
        new: token ids that followed, an end token included.
        pending: how many more the device has chosen, which the host does not know yet.
        fed: tokens of prompt and new ones whose states and latents are in `sequence` or `saved`.
        cache_salt: whose prefixes it uses: what was kept under one salt is found under no other, nor without one.
        cached: tokens of the prompt that the prefix cache restored.
        prompt_log_probabilities: tell those of the prompt's tokens, and so many of the highest ones; None tells none.
            All of such a prompt is computed, whatever the prefix cache has of it.
        scored: what was told, by places in the prompt; the first token has nothing before it, and none.
        siblings: further answers to the same prompt, which is prefilled once; they are submitted with this request.
        leader: the request that prefills for this one.
        is_alone: runs in forwards of its own.
        stops: tokens behind which a chunk has to end.
        boundaries: those of them up to which the prefix cache keeps it.
        course: where its forwards ended up to the last one by which a token was chosen; where company must decide no
            bit, it is computed again in the same way.
        turn: in the prefix cache; `turn.splits` and `turn.exact` say how it was computed.
        reading: what it waits for of the prefix cache.
    """

    prompt: list[int]
    max_new_tokens: int
    sampler: Sampler
    ends: frozenset[int] = frozenset()
    priority: int = 0
    deadline: float = float("inf")
    take: Callable[[Choice], bool | None] = lambda choice: None
    done: Callable[["Request"], None] = lambda request: None
    number: int = 0
    is_cancelled: bool = False
    is_alone: bool = False
    finish: str | None = None
    error: BaseException | None = None
    new: list[int] = field(default_factory=list)
    pending: int = 0
    cache_salt: str = ""
    cached: int = 0
    prompt_log_probabilities: int | None = None
    scored: dict[int, Choice] = field(default_factory=dict)
    siblings: list["Request"] = field(default_factory=list)
    leader: "Request | None" = None
    stops: list[int] = field(default_factory=list)
    boundaries: list[int] = field(default_factory=list)
    course: list[int] = field(default_factory=list)
    turn: Turn | None = None
    reading: "Future[Turn] | None" = None
    sequence: Sequence | None = None
    saved: Saved | None = None

    @property
    def fed(self) -> int:
        kept = self.sequence or self.saved
        return kept.length if kept else 0

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.new) + self.pending

    @property
    def has_ended(self) -> bool:
        return self.finish is not None or self.error is not None

    @property
    def is_full(self) -> bool:
        """All of its tokens are chosen, if some are not known yet."""
        return len(self.new) + self.pending >= self.max_new_tokens

    def tokens(self, start: int, end: int) -> list[int]:
        """Of prompt and new tokens, as far as the host knows them."""
        if start >= len(self.prompt):
            return self.new[start - len(self.prompt) : end - len(self.prompt)]
        return (self.prompt + self.new[: max(end - len(self.prompt), 0)])[start:end]

    @property
    def is_waiting(self) -> bool:
        """Nothing of it has run, or all that has was given up."""
        return self.sequence is None and self.saved is None and not self.new

    def to_score(self, count: int) -> Scored | None:
        """What the next `count` tokens are to tell of the prompt's."""
        targets = self.prompt[self.fed + 1 : self.fed + 1 + count]
        if self.prompt_log_probabilities is None or not targets:
            return None
        return Scored(self.fed + 1, targets, self.prompt_log_probabilities)

    @property
    def place(self) -> tuple[int, int]:
        """In the order in which requests are served."""
        return self.number - HEAD_START * self.priority, self.number


class Prefixes(Protocol):
    """What is told of requests that get and give back memory (`prefix_requests.py`)."""

    def enter(self, request: Request) -> None:
        """It has a sequence without tokens, with room for its text."""

    def rest(self, request: Request) -> None:
        """It is saved in host memory."""

    def resume(self, request: Request) -> None:
        """It is back from there."""

    def leave(self, request: Request, is_whole: bool) -> None:
        """It will give back its sequence."""


@dataclass
class Step:
    """What runs: requests with one token to feed, and others with the number of tokens of their next chunk."""

    decoding: list[Request] = field(default_factory=list)
    chunks: list[tuple[Request, int]] = field(default_factory=list)


class Scheduler:
    """The requests of one pool.

    Args:
        step_tokens: fed in one step at most; decoding requests come before the chunks of prompts.
        chunk: tokens that one request is fed in a step at most.
        one_split: feed every text in one way whatever else runs, also when it is computed again: its prompt in chunks
            that end at multiples of `chunk`, what follows token by token. The last chunk of a step then counts in full.
        host_bytes: of evicted sequences in host memory; what finds no room there is computed again.
        prefixes: may fill the first memory of a request.
    """

    def __init__(
        self,
        pool: StatePool,
        step_tokens: int,
        chunk: int,
        one_split: bool,
        host_bytes: int,
        prefixes: Prefixes,
    ):
        self.pool, self.step_tokens, self.chunk, self.one_split = pool, step_tokens, chunk, one_split
        self.host_bytes, self.prefixes = host_bytes, prefixes
        self.requests: list[Request] = []  # in order
        self.evictions = self.recomputations = 0
        self._numbers = 0

    def refusal(self, request: Request) -> str | None:
        """Why a request can never run, None where it can."""
        longest = len(request.prompt) + request.max_new_tokens
        if self.pool.pages_of(longest) > self.pool.pages:
            room = self.pool.pages * self.pool.page
            return (
                f"{len(request.prompt):,} tokens and {request.max_new_tokens:,} new ones are more than the {room:,} "
                "that all requests may have together: give more memory, or ask for fewer"
            )
        return None

    def add(self, request: Request) -> None:
        """
        Raises:
            ValueError: for a request that the pool can never hold.
        """
        if (refusal := self.refusal(request)) is not None:
            raise ValueError(refusal)
        self._numbers += 1
        request.number = self._numbers
        self.requests.append(request)
        self.requests.sort(key=lambda request: request.place)

    def remove(self, request: Request, is_whole: bool = True) -> None:
        """Forget a request and give back what it holds. The first of its siblings that wait for it takes its place."""
        self.requests.remove(request)
        self.release(request, is_whole)
        if request.leader is not None:
            request.leader.siblings.remove(request)
        if request.siblings:
            first, *others = request.siblings
            first.leader, first.siblings, request.siblings = None, others, []
            for other in others:
                other.leader = first

    def release(self, request: Request, is_whole: bool = True) -> None:
        """Give back what a request holds; `is_whole`: its states are those behind the last token that it was fed."""
        are_known = request.fed <= len(request.prompt) + len(request.new)
        self.prefixes.leave(request, is_whole and are_known)
        if request.sequence is not None:
            self.pool.close(request.sequence)
        request.sequence = request.saved = None

    def ended(self) -> Iterable[Request]:
        """Requests that were cancelled or are too late, with `finish` or `error` set."""
        for request in list(self.requests):
            if request.is_cancelled:
                request.finish = "cancelled"
            elif time.monotonic() > request.deadline:
                request.error = TimeoutError("the request has reached its deadline")
            elif request.error is None:
                continue
            yield request

    def plan(self) -> Step:
        """The next step; the pool has room for all of it."""
        step, left = Step(), self.step_tokens
        for request in list(self.requests):
            is_ready = request.sequence is not None and request.reading is None and request.error is None
            if left > 0 and request.fed == request.length - 1 and is_ready and not request.is_full:
                if self._make_room(request, request.length, step):
                    step.decoding.append(request)
                    left -= 1
        for request in list(self.requests):
            if left <= 0:
                break
            if request in step.decoding or request.leader is not None or request.is_full:
                continue
            if request.pending or not self._bring_in(request, step):
                break  # nobody overtakes the one for which room is being made
            if request.reading is not None or request.error is not None:
                continue
            step.chunks.append((request, self._count(request, left)))
            left -= step.chunks[-1][1]
        return step

    def _count(self, request: Request, left: int) -> int:
        """Tokens of the next chunk."""
        stop = next((stop for stop in request.stops if stop > request.fed), request.length) - request.fed
        if not self.one_split:
            return min(request.length - request.fed, self.chunk, left, stop)
        behind = request.fed - len(request.prompt)
        return 1 if behind >= 0 else min(-behind, self.chunk - request.fed % self.chunk, stop)

    def _bring_in(self, request: Request, step: Step) -> bool:
        """Give a request a sequence, and pages for all of its text: once begun, a prefill is not stopped by others."""
        is_new = request.sequence is None and request.saved is None
        if request.sequence is None:
            if not self._free(1, self.pool.missing_pages(None, request.length), request, step):
                return False
            if request.saved is not None:
                request.sequence, request.saved = self.pool.load(request.saved), None
                self.prefixes.resume(request)
            else:
                request.sequence = self.pool.open()
        if not self._make_room(request, request.length, step):
            return False
        if is_new:
            self.prefixes.enter(request)
        return True

    def _make_room(self, request: Request, tokens: int, step: Step) -> bool:
        """Pages for so many tokens, of requests further behind where there are none; else it waits as it is, and one
        that decodes is evicted itself, so that what it holds serves those before it."""
        if self._free(0, self.pool.missing_pages(request.sequence, tokens), request, step):
            self.pool.grow(request.sequence, tokens)
            return True
        if request.fed == request.length - 1:
            self._evict(request)
        return False

    def _free(self, slots: int, pages: int, request: Request, step: Step) -> bool:
        """Let so much memory be free, if it takes requests behind this one to give way, the last one first; nobody does
        where all of them would not be enough."""
        pool = self.pool
        if pool.free_slots >= slots and pool.free_pages >= pages:
            return True
        place = self.requests.index(request) + 1
        behind = [each for each in self.requests[place:] if each.sequence is not None]
        kept, held = ({page for each in group if each.sequence for page in each.sequence.pages}
                      for group in (self.requests[:place], behind))  # fmt: skip
        if pool.free_slots + len(behind) < slots or pool.free_pages + len(held - kept) < pages:
            return False
        while pool.free_slots < slots or pool.free_pages < pages:
            last = behind.pop()
            if last in step.decoding:
                step.decoding.remove(last)
            self._evict(last)
        return True

    def _evict(self, request: Request) -> None:
        """To host memory where there is room, exactly; otherwise its tokens will be fed again."""
        self.evictions += 1
        kept = sum(other.saved.nbytes for other in self.requests if other.saved is not None)
        pool, sequence = self.pool, request.sequence
        needed = pool.state_bytes + sequence.length * (pool.page_bytes // pool.page)
        saved = pool.save(sequence) if sequence.length and kept + needed <= self.host_bytes else None
        if saved is None:
            self.recomputations += 1
            self.release(request)
            return
        self.prefixes.rest(request)
        pool.close(sequence)
        request.sequence, request.saved = None, saved
