"""The requests of an engine in its prefix cache: where each starts, and what is kept of it.

    enter      it got its first memory: the longest kept prefix of its text is looked up; what lies below the device is
               read in a thread of the cache, while others run
    collect    before a step: what was read is copied to the slot and the pages, and the request runs from there
    fed        behind a forward: at a boundary the tokens since the last one are kept
    leave      it ends, or will be computed again: what was fed is kept, and nothing of it is pinned any more
    rest       it lies in host memory; `resume`: it runs on

How a segment of a batch is rounded depends on the company, so it is of another kind than one of `PrefixCache.forward`
(`prefix_index.py`), and with `batch_invariant` of a third, of which every run split in the same way gives the bits.
"""

import hashlib
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch

from . import batch
from .pool import Saved, Sequence, StatePool
from .prefix_cache import PrefixCache
from .prefix_index import TOGETHER, Segment, alone
from .prefix_store import Lookup, Turn
from .scheduler import Request

logger = logging.getLogger(__name__)


@dataclass
class _Source:
    """What a sequence has, for `Turn.keep`."""

    pool: StatePool
    sequence: Sequence

    def latents(self, start: int, end: int) -> list[torch.Tensor]:
        places = self.pool.places(self.sequence, start, end) if self.pool.latents else None
        return [buffer[places] for buffer in self.pool.latents.values()]

    def states(self) -> dict[int, list[torch.Tensor]]:
        slot = self.sequence.slot
        return {i: [buffer[slot][None].clone() for buffer in state] for i, state in self.pool.states.items()}


class RequestPrefixes:
    """
    Args:
        cache: of the model whose states are in the pool; None keeps nothing.
        chunk: if every forward has one request, what their ends are multiples of.
        is_read: called, in any thread, when a request that was being read can run on.
    """

    def __init__(self, cache: PrefixCache | None, pool: StatePool, chunk: int | None, is_read: Callable[[], None]):
        self.cache, self.pool, self.is_read, self.is_alone = cache, pool, is_read, chunk is not None
        code = hashlib.sha256(Path(batch.__file__).read_bytes()).digest()[:8]
        self.kind = TOGETHER if chunk is None else alone(chunk, code)

    def enter(self, request: Request) -> None:
        """The request has a sequence with room for its text. Unless it is `reading` now, it can run. What goes wrong
        is its `error`."""
        if self.cache is None or request.prompt_log_probabilities is not None:
            return
        text = numpy.array(request.prompt + request.new, dtype=numpy.int64)
        try:
            self.cache.check()
            salt, again = request.cache_salt, request.turn
            worth = self.cache.worth(text, salt) if again is None else again.worth
            asked = Lookup(text, len(text) - 1, salt, worth, self.kind, self._accepts(request))
            turn = self.cache.begin_near(asked)
            if turn is not None:
                self._start(request, turn)
            else:
                request.reading = self.cache.begin_later(asked)
                request.reading.add_done_callback(lambda _: self.is_read())
        except Exception as error:  # of one request, which must not end the others
            request.error = error
            self.is_read()

    def collect(self, requests: Iterable[Request]) -> bool:
        """Let those run whose prefix was read; whether there were any."""
        read = [request for request in requests if request.reading is not None and request.reading.done()]
        for request in read:
            future, request.reading = request.reading, None
            try:
                self._start(request, future.result())
            except Exception as error:
                request.error = error
        return bool(read)

    def fed(self, request: Request) -> None:
        """A forward ended at `request.fed`."""
        if request.turn is not None:
            request.turn.splits.append(request.fed)
            if request.fed in request.boundaries:
                self._keep(request)

    def fork(self, request: Request, sibling: Request) -> None:
        """Another answer goes on where `request` stands, or, without a sequence, will be computed as it was."""
        sibling.cached = request.cached
        if request.turn is not None:
            sibling.turn = request.turn.fork()
            if sibling.sequence is None:
                sibling.course = self._course(sibling)
                sibling.turn.close()

    def rest(self, request: Request) -> None:
        if request.turn is not None:
            request.turn.rest()

    def resume(self, request: Request) -> None:
        if request.turn is not None:
            request.turn.resume()

    def leave(self, request: Request, is_whole: bool) -> None:
        """The request gives back its sequence; `is_whole`: whose states are those behind its last token."""
        if request.reading is not None:
            if not request.reading.cancel():
                request.reading.add_done_callback(_close)
            request.reading = None
        elif request.turn is not None:
            if is_whole and request.sequence is not None:
                self._keep(request)
            if request.new:
                request.course = self._course(request)
            request.turn.close()

    def _start(self, request: Request, turn: Turn) -> None:
        before, request.turn = request.turn, turn
        request.boundaries = self.cache.boundaries(turn, len(request.prompt) - 1)
        request.stops = request.boundaries
        if before is None:
            request.cached = turn.hit
            self.cache.count(turn, len(request.prompt))
        elif request.course:
            request.stops = request.course
        if turn.hit:
            states, rows = turn.take()
            latents = dict(zip(self.pool.latents, rows, strict=True))
            self.pool.restore(Saved(turn.hit, states, latents), request.sequence)

    def _course(self, request: Request) -> list[int]:
        """The longer of what is known and of what was run now, which began like it."""
        return max(request.course, request.turn.splits, key=len) if self.is_alone else []

    def _accepts(self, request: Request) -> Callable[[Segment], bool]:
        """Which segments a request may start behind. In a batch: any. Else those whose bits it would compute itself:
        of one kind, and, if it is computed again, split as it was."""
        if not self.is_alone:
            return lambda segment: True
        course = request.course

        def accepts(segment: Segment) -> bool:
            if any(part.forward != self.kind for part in segment.chain()):
                return False
            own = segment.splits()
            return not course or own == course[: len(own)]

        return accepts

    def _keep(self, request: Request) -> None:
        """What was fed since the last boundary: a part of the prompt, or what followed its last but one token."""
        turn = request.turn
        if request.fed <= turn.kept:
            return
        is_answer = turn.kept >= len(request.prompt) - 1
        tokens = request.tokens(turn.kept, request.fed)
        try:
            turn.keep(tokens, _Source(self.pool, request.sequence), steps=is_answer)
        except Exception:  # for want of memory; the text does not need it
            logger.exception("prefix cache: a text is kept no further")
            turn.close()


def _close(future: "Future[Turn]") -> None:
    if not future.cancelled() and future.exception() is None:
        future.result().close()
