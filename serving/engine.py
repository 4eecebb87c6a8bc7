"""One thread that generates, a queue before it: requests run one after another through the prefix cache."""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from transformers import TextStreamer

from .prefix_cache import PrefixCache

LAST_STEP = 10  # seconds: a step that was begun is not interrupted


class EngineFull(Exception):
    """No more requests are taken: too many wait, or the server is going down."""


@dataclass
class Job:
    """One request.

    Attributes:
        emit: takes each new piece of text, and at the end None; called in the engine's thread. `finish` or `error` is
            set by then.
        deadline: `time.monotonic()` after which it ends with an error.
        cache_salt: of the tenant, whose prefixes nobody else finds; empty for the common ones.
        cancelled: nobody is listening any more.
        finish: "stop" (end token or stop text) or "length".
        cached: prompt tokens that the prefix cache restored.
    """

    ids: list[int]
    max_tokens: int
    temperature: float
    top_p: float
    seed: int | None
    stop: list[str]
    deadline: float
    emit: Callable[[str | None], None]
    cache_salt: str = ""
    cancelled: threading.Event = field(default_factory=threading.Event)
    started: float = field(default_factory=time.monotonic)
    first: float | None = None
    tokens: int = 0
    cached: int = 0
    finish: str | None = None
    error: Exception | None = None


class _Text(TextStreamer):
    """Text of the new tokens, up to the first stop text; possible beginnings of one are held back."""

    def __init__(self, tokenizer, job: Job):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.job, self.held, self.stopped = job, "", False
        self.longest = max(map(len, job.stop), default=1)

    def put(self, value):
        if not self.next_tokens_are_prompt:
            self.job.tokens += value.numel()
            if self.job.first is None:
                self.job.first = time.monotonic()
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False):
        if self.stopped:
            return
        self.held += text
        places = [place for place in map(self.held.find, self.job.stop) if place >= 0]
        if places:
            self.stopped, text, self.held = True, self.held[: min(places)], ""
        else:
            keep = 0 if stream_end else self.longest - 1
            text, self.held = self.held[: len(self.held) - keep], self.held[len(self.held) - keep :]
        if text:
            self.job.emit(text)


class Engine:
    """Runs jobs in the order in which they came.

    Args:
        max_waiting: jobs that may wait; another one raises `EngineFull`. Those that nobody listens to are dropped.
    """

    def __init__(self, cache: PrefixCache, tokenizer, max_waiting: int):
        self.cache, self.tokenizer = cache, tokenizer
        self._jobs: deque[Job] = deque()
        self._max_waiting, self._stopping = max_waiting, False
        self._changed = threading.Condition()  # guards the three
        self._aborting = threading.Event()
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        with self._changed:
            if self._stopping:
                raise EngineFull("the server is shutting down")
            self._jobs = deque(waiting for waiting in self._jobs if not waiting.cancelled.is_set())
            if len(self._jobs) >= self._max_waiting:
                raise EngineFull(f"{self._max_waiting} requests are waiting already: try again later")
            self._jobs.append(job)
            self._changed.notify()

    @property
    def waiting(self) -> int:
        with self._changed:
            return sum(not job.cancelled.is_set() for job in self._jobs)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self, seconds: float) -> None:
        """Take no more jobs, finish those at hand within `seconds`, break off the rest, write the prefixes.

        A step that then goes on for `LAST_STEP` is left to the end of the process, and with it what was not written.
        """
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if not self._aborting.is_set():
            self._thread.join(seconds)
        self.abort()
        self._thread.join(LAST_STEP)
        if not self.alive:
            self.cache.close()

    def abort(self) -> None:
        """Break off what runs, and refuse what waits."""
        self._aborting.set()

    def _next(self) -> Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._stopping)
            return self._jobs.popleft() if self._jobs else None

    def _work(self):
        while (job := self._next()) is not None:
            try:
                if self._aborting.is_set():
                    raise EngineFull("the server is shutting down")
                if time.monotonic() > job.deadline:
                    raise TimeoutError
                if not job.cancelled.is_set():
                    self._run(job)
            except Exception as error:  # one request must not end the thread that serves the others
                job.error = error
            finally:
                job.emit(None)

    def _run(self, job: Job) -> None:
        text = _Text(self.tokenizer, job)

        def interrupted(input_ids, scores, **kwargs):
            stop = job.cancelled.is_set() or text.stopped or self._aborting.is_set() or time.monotonic() > job.deadline
            return torch.full((1,), stop, dtype=torch.bool, device=input_ids.device)

        if job.seed is not None:
            torch.manual_seed(job.seed)
        # top_k=0 switches off the cut at 50 that generation defaults carry
        sampling = {"temperature": job.temperature, "top_p": job.top_p, "top_k": 0} if job.temperature > 0 else {}
        output, prefilled = self.cache.generate(
            torch.tensor([job.ids], device=self.cache.model.device),
            max_new_tokens=job.max_tokens,
            cache_salt=job.cache_salt,
            do_sample=job.temperature > 0,
            streamer=text,
            stopping_criteria=[interrupted],
            **sampling,
        )
        job.cached = prefilled.hit
        end = self.cache.model.generation_config.eos_token_id
        if text.stopped or int(output[0, -1]) in ([end] if isinstance(end, int) else end or []):
            job.finish = "stop"
        elif job.tokens >= job.max_tokens:
            job.finish = "length"
        elif self._aborting.is_set():
            raise EngineFull("the server is shutting down")
        elif not job.cancelled.is_set():
            raise TimeoutError
