"""Continuous batching: requests that come and go, and one step after another over those that run.

    step   1. requests that were cancelled or are too late end
           2. the scheduler names what runs: one token of every request that decodes, chunks of others' prompts
           3. one forward over the former , one over the latter (`forwards.py`)
           4. a next token is chosen for every request whose text is fed whole (`sampling.py`)

On a GPU the host is a step ahead: it starts the next step before it reads the tokens of this one, which stay on the
device. A text that turns out to have ended is fed one token too many then.

`BatchEngine.step` does one of them; `start` runs them in a thread. `docs/batching.md` draws who owns what.
"""

import contextlib
import logging
import math
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .forwards import UNKNOWN, Forwards
from .pool import StatePool
from .prefix_cache import PrefixCache
from .prefix_requests import RequestPrefixes
from .sampling import Asked, Choice, ask
from .scheduler import Request, Scheduler, Step
from .scoring import Scored
from .sent import sent

logger = logging.getLogger(__name__)


class EngineFull(Exception):
    """No more requests are taken: too many wait, or the engine is stopping."""


_STOPPING = "no more requests are taken: the engine is shutting down"


@dataclass
class _Asked:
    """Tokens that were asked for in a step: of the requests in their order, or why there will be none."""

    step: int
    requests: list[Request]
    tokens: Asked | Exception

    def told(self) -> list[tuple[Request, Choice | Exception]]:
        choices = [self.tokens] if isinstance(self.tokens, Exception) else self.tokens.choices()
        return [*zip(self.requests, choices, strict=True)]


class _Session:
    """What `start` began and `stop` ends."""

    thread: threading.Thread
    is_stopping = is_aborting = False


class BatchEngine:
    """Generates for many requests at once.

    Args:
        model: a Kimi K3 model with a language-model head, in evaluation mode, on one device.
        sequences: requests that run at a time.
        memory: bytes of states and latents on the device at most.
        tokens: of all running requests together at most; without either, 65,536.
        step_tokens: fed in one step at most, so that long prompts do not hold up the others; None for 8,192 on a GPU,
            which fewer leave waiting for the host, and 2,048 elsewhere.
        chunk: of a prompt, fed in one step at most; None for half of `step_tokens`. With `batch_invariant` chunks end
            at its multiples, and the last one of a step may exceed `step_tokens`.
        host_bytes: of requests that gave way, in host memory.
        waiting: requests that may wait for memory at once; None for any number.
        batch_invariant: no bit of a request's logits depends on the others: every forward has one request, split in
            one way. Costs what batching saves.
        prefix_cache: of this model; requests start from the longest prefix that it keeps, and their texts are kept.

    Raises:
        ValueError: for a prefix cache of another model, and for a model that this cannot run.

    Attributes:
        is_ahead: steps start before the tokens of the last one are read.
        steps, fed_tokens: so far.
        dry_steps: how many of them found a device that had nothing left to do.

    Threads may `submit` and `cancel`. All callbacks of a request are called in the thread that steps.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        sequences: int = 64,
        memory: int | None = None,
        tokens: int | None = None,
        step_tokens: int | None = None,
        chunk: int | None = None,
        host_bytes: int = 0,
        waiting: int | None = 4096,
        page: int = 64,
        batch_invariant: bool = False,
        prefix_cache: PrefixCache | None = None,
    ):
        if prefix_cache is not None and prefix_cache.model is not model:
            raise ValueError("the prefix cache is of another model: make one of this model")
        if (refusal := _refusal(model)) is not None:
            raise ValueError(refusal)
        self.model, self.waiting, self.batch_invariant = model, waiting, batch_invariant
        if memory is None and tokens is None:
            tokens = 65536
        self.pool = StatePool(model, sequences, memory, tokens, page)
        step_tokens = step_tokens or (8192 if self.pool.spare else 2048)
        chunk = chunk or max(step_tokens // 2, 1)
        engine = weakref.ref(self)  # a cycle would keep the pool until the collector comes

        def is_read() -> None:
            if (alive := engine()) is not None:
                alive._notify()

        self.prefixes = RequestPrefixes(prefix_cache, self.pool, chunk if batch_invariant else None, is_read)
        self.scheduler = Scheduler(self.pool, step_tokens, chunk, batch_invariant, host_bytes, self.prefixes)
        self.is_ahead = bool(self.pool.spare)
        self.steps = self.fed_tokens = self.dry_steps = 0
        self._forwards = Forwards(model, self.pool)
        self._asked: list[_Asked] = []  # oldest first
        self._fed: list[Request] = []  # tokens that the host does not know yet
        self._is_changed = True  # or may be, the model
        self._changed = threading.Condition()  # guards what is new and all below
        self._new: list[Request] = []
        self._has_news = self._is_stepping = False
        self._pauses: list[int] = []  # threads that hold one
        self._is_reading = False  # and nothing else was to do in the last step
        self._session: _Session | None = None

    # --- from any thread -----------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """
        Raises:
            EngineFull: if no more requests are taken.
            ValueError: for a request that can never run here, with the reason.
        """
        if any((each.prompt, each.cache_salt) != (request.prompt, request.cache_salt) for each in request.siblings):
            raise ValueError("siblings are answers to one prompt: give them that of the first, and its cache_salt")
        everyone, vocabulary = [request, *request.siblings], self.model.config.get_text_config().vocab_size
        if not all(0 <= token < vocabulary for token in request.prompt):
            raise ValueError(f"the prompt's token ids are not all from 0 to {vocabulary - 1:,}")
        if request.saved is not None and not 0 < request.saved.length < len(request.prompt):
            raise ValueError("what was saved has to hold the prompt but its last token, or less")
        for each in everyone:
            if not each.prompt or each.max_new_tokens < 1:
                raise ValueError("a request has a prompt of one token at least, and asks for one at least")
            refusal = self.scheduler.refusal(each) or each.sampler.sampling.refusal(vocabulary)
            if refusal is not None:
                raise ValueError(refusal)
        with self._changed:
            if self._session is not None and self._session.is_stopping:
                raise EngineFull(_STOPPING)
            if self.waiting is not None and self.waiting_requests + len(everyone) > self.waiting:
                raise EngineFull(f"no more than {self.waiting} requests may wait at once: try again later")
            for sibling in request.siblings:
                sibling.leader = request
            self._new += everyone
        self._notify()

    def cancel(self, request: Request) -> None:
        """End a request before the next step; its `done` is called then."""
        request.is_cancelled = True
        self._notify()

    def _notify(self) -> None:
        """There is something to do."""
        with self._changed:
            self._has_news = True
            self._changed.notify()

    @property
    def requests(self) -> int:
        """Of all that have not ended."""
        return len(self._new) + len(self.scheduler.requests)

    @property
    def waiting_requests(self) -> int:
        """Of those, how many have not begun and are still wanted."""
        with self._changed:
            there = [*self._new, *self.scheduler.requests]
        return sum(request.is_waiting and not request.is_cancelled for request in there)

    def start(self) -> threading.Thread:
        """Step in a thread, whenever there is something to do; again after `stop`, too."""
        with self._changed:
            if self._session is None or not self._session.thread.is_alive():
                self._session = _Session()
                self._session.thread = threading.Thread(
                    target=self._work, args=(self._session,), name="batch engine", daemon=True
                )
                self._session.thread.start()
            return self._session.thread

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, no step runs; the next one waits. Several threads may pause at once, and one more than once.

        Raises:
            RuntimeError: in a callback of a request, which is a part of a step.
        """
        with self._changed:
            if self._session is not None and self._session.thread is threading.current_thread():
                raise RuntimeError("a callback of a request cannot pause the step that it is a part of")
            self._pauses.append(threading.get_ident())
            self._changed.wait_for(lambda: not self._is_stepping)
            self._is_changed = True
        try:
            yield
        finally:
            with self._changed:
                self._pauses.remove(threading.get_ident())
                self._changed.notify_all()

    def stop(self, seconds: float | None = None, abort: bool = True) -> None:
        """Take no more requests, finish those at hand within `seconds`, and break off the rest with `EngineFull`, or
        without `abort` leave them to the thread.

        Raises:
            RuntimeError: in a pause of this thread, in which nothing can finish.
        """
        with self._changed:
            session = self._session
            if threading.get_ident() in self._pauses:
                raise RuntimeError("the engine is paused by this thread, so that no request can end: leave the pause")
            if session is None:
                return
            session.is_stopping = True
        self._notify()
        session.thread.join(seconds)
        if abort and session.thread.is_alive():
            self.abort()
            session.thread.join()

    def abort(self) -> None:
        """Take no more requests, and end all that are there with `EngineFull` in place of the next step."""
        with self._changed:
            if self._session is not None:
                self._session.is_stopping = self._session.is_aborting = True
        self._notify()

    def _wait(self, session: "_Session") -> None:
        """Until there is something to do: a request comes or leaves, was read or reaches its deadline."""

        def is_awake() -> bool:
            return self._has_news or (not self._is_reading if self.requests else session.is_stopping)

        deadline = min((request.deadline for request in self.scheduler.requests), default=float("inf"))
        seconds = min(max(deadline - time.monotonic(), 0), threading.TIMEOUT_MAX)
        with self._changed:
            self._changed.wait_for(is_awake, seconds)
            self._has_news = False

    def _work(self, session: "_Session") -> None:
        while True:
            self._wait(session)
            if not self.requests:
                if session.is_stopping:
                    return
                continue
            if session.is_aborting:
                self._end_all(EngineFull(_STOPPING))
                continue
            try:
                self.step()
            except Exception as error:  # nobody shall wait for a thread that has ended
                self._end_all(error)

    @contextlib.contextmanager
    def _unpaused(self) -> Iterator[None]:
        """Once nobody pauses; whoever pauses waits for the end of it."""
        with self._changed:
            self._changed.wait_for(lambda: not self._pauses)
            self._is_stepping = True
        try:
            yield
        finally:
            with self._changed:
                self._is_stepping = False
                self._changed.notify_all()

    # --- in the thread that steps --------------------------------------------------------------------------------

    def step(self) -> None:
        """One step."""
        with self._unpaused():
            if self._is_changed:
                self._forwards.examine()
            self._admit()
            if any(request.pending and request.sampler.sampling.mask for request in self.scheduler.requests):
                self._settle()  # what may come next depends on the last token
            ended = list(self.scheduler.ended())
            for request in ended:
                self._end(request)
            was_read = self.prefixes.collect(self.scheduler.requests)
            plan = self.scheduler.plan()
            is_idle = not (plan.decoding or plan.chunks)
            self._run_all(plan)
            is_last = is_idle or bool(self._pauses) or not self.is_ahead
            self._settle(math.inf if is_last else self.steps)
            if not self.scheduler.requests:
                self._asked, self._fed = [], []
            is_reading = any(request.reading is not None for request in self.scheduler.requests)
            self._is_reading = is_reading and is_idle and not (ended or was_read)
            self._is_changed = not self.requests
        self.steps += 1

    def _run_all(self, plan: Step) -> None:
        last = self._asked[-1].tokens if self._asked else None
        for group in ([(request, 1) for request in plan.decoding], plan.chunks):
            alone = [each for each in group if each[0].is_alone or self.batch_invariant]
            together = [each for each in group if each not in alone]
            for requests in filter(None, (together, *([each] for each in alone))):
                self._run(requests)
                if isinstance(last, Asked):
                    self.dry_steps += last.have_come()
                last = None

    def _admit(self) -> None:
        with self._changed:
            new, self._new = self._new, []
            for request in new:
                self.scheduler.add(request)

    def _run(self, group: list[tuple[Request, int]]) -> None:
        """Feed requests so many tokens each, and ask for the next token of those that are fed whole."""
        requests = [request for request, _ in group]
        try:
            scored = [request.to_score(count) for request, count in group]
            logits = self._logits(group, scored)
        except Exception as error:
            self._broken_off(requests, error)
            return
        self.fed_tokens += sum(count for _, count in group)
        for request, told in zip(requests, scored, strict=True):
            if told is not None:
                request.scored |= {told.start + i: choice for i, choice in enumerate(told.choices)}
        for request in requests:
            request.is_alone = False  # what failed beside it did not fail here
            if request.pending:
                self._fed.append(request)
            else:
                self.prefixes.fed(request)
        whole = [(i, request) for i, request in enumerate(requests) if request.fed == request.length]
        rows = [(i, each) for i, request in whole for each in (request, *request.siblings)]
        for _, request in whole:
            self._fork(request)
        if rows:
            places = sent([i for i, _ in rows], logits.device)
            self._ask(logits.index_select(0, places), [each for _, each in rows])
        if not self.is_ahead:
            self._settle()

    def _logits(self, group: list[tuple[Request, int]], scored: list[Scored | None]) -> torch.Tensor:
        """Behind the last token of each, [N, vocabulary]."""
        sequences = [request.sequence for request, _ in group]
        if all(count == 1 for _, count in group) and not any(scored):
            last = [(request.tokens(request.fed, request.fed + 1) or [UNKNOWN])[0] for request, _ in group]
            return self._forwards.step(sequences, last)
        tokens = [request.tokens(request.fed, request.fed + count) for request, count in group]
        return self._forwards.prefill(sequences, tokens, scored)

    def _ask(self, logits: torch.Tensor, requests: list[Request]) -> None:
        """For the next tokens of requests, by logits [N, vocabulary]."""
        try:
            asked: Asked | Exception = ask(logits, [request.sampler for request in requests])
        except Exception as error:  # of one of their rules
            if len(requests) > 1:
                for i, request in enumerate(requests):
                    self._ask(logits[i : i + 1], [request])
                return
            asked = error
        else:
            places = [(i, request.sequence.slot) for i, request in enumerate(requests) if request.sequence is not None]
            if places:
                rows, slots = (sent(numbers, logits.device) for numbers in zip(*places, strict=True))
                self.pool.tokens.index_copy_(0, slots, asked.tokens[rows])
            for i, request in enumerate(requests):
                request.sampler.expect(asked.tokens[i : i + 1])
        for request in requests:
            request.pending += 1
        self._asked.append(_Asked(self.steps, requests, asked))

    def _settle(self, before: float = math.inf) -> None:
        """Tell requests of the tokens that were asked for in steps before this one."""
        while self._asked and (step := self._asked[0].step) < before:
            ready = [asked for asked in self._asked if asked.step == step]
            self._asked = self._asked[len(ready) :]
            told = [(request, choice) for asked in ready for request, choice in asked.told()]
            told = [each for each in told if not (each[0].has_ended or each[0].is_cancelled)]
            for request, choice in told:
                request.pending -= 1
                if isinstance(choice, Choice):
                    request.new.append(choice.token)
                    request.sampler.note(choice.token)
                else:
                    request.error = choice
            fed, self._fed = self._fed, []  # in the next step: the host knows these tokens now
            for request in fed:
                if not request.has_ended:
                    self.prefixes.fed(request)
            for request, choice in told:
                self._take(request, choice)

    def _fork(self, request: Request) -> None:
        """The prompt is fed: the other answers to it go on from here. One that finds no memory waits for its turn and
        is then computed by itself."""
        siblings, request.siblings = request.siblings, []
        for sibling in siblings:
            sibling.leader, sibling.sequence = None, self.pool.fork(request.sequence)
            sibling.scored = request.scored
            self.prefixes.fork(request, sibling)

    def _take(self, request: Request, choice: Choice | Exception) -> None:
        if isinstance(choice, Exception):
            self._end(request)
            return
        is_enough = None
        try:
            is_enough = request.take(choice)
        except Exception as error:  # of one listener, which must not end the others
            request.error = error
            self._end(request)
            return
        if choice.token in request.ends or is_enough:
            request.finish = "stop"
        elif len(request.new) == request.max_new_tokens:
            request.finish = "length"
        if request.finish is not None:
            self._end(request)

    def _broken_off(self, requests: list[Request], error: Exception) -> None:
        """A forward failed somewhere. What its requests hold is lost; each is computed again without the others, and
        one that fails alone ends with the error."""
        self._settle()
        for request in requests:
            if request.has_ended:
                continue
            if len(requests) == 1:
                request.error = error
                self._end(request, is_whole=False)
            else:
                self.scheduler.release(request, is_whole=False)
                request.is_alone = True

    def _end(self, request: Request, is_whole: bool = True) -> None:
        self.scheduler.remove(request, is_whole)
        try:
            request.done(request)
        except Exception:  # of a listener that has gone, which must not end the others
            logger.exception("a request's `done` failed")

    def _end_all(self, error: Exception) -> None:
        with self._unpaused():
            self._admit()
            for request in list(self.scheduler.requests):
                request.error = error
                self._end(request)
            self._asked, self._fed = [], []


def _refusal(model: torch.nn.Module) -> str | None:
    """Why batches cannot run on a model, None where they can."""
    if not hasattr(model.base_model, "embed_tokens") or model.get_output_embeddings() is None:
        return f"{type(model).__name__} is no Kimi K3 model with a head: give the one inside (peft: get_base_model())"
    if model.training:
        return "the model is in training mode: call model.eval() first"
    if getattr(model, "_device_mesh", None) is not None:
        return "the model is cut over processes, which would each step on a clock of their own: load it whole"
    if model.config._attn_implementation == "flex_attention":
        return "flex_attention takes no masks of a batch: model.set_attn_implementation('sdpa')"
    return None
