"""The texts of requests: what comes out of a `BatchEngine` as tokens is read as text, up to a stop text.

Job   one text to be continued   ->   Request   its tokens, in the batch
Piece of text, to the listener   <-   take      a token of it, in the engine's thread
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from transformers import TextStreamer

from .batching import BatchEngine, EngineFull
from .sampling import Choice, Sampler, Sampling
from .scheduler import Request
from .token_texts import TokenText, TokenTexts

STOPPING = "the server is shutting down"
LAST_STEP = 10  # seconds: a step that was begun is not interrupted


@dataclass
class Piece:
    """New text of a job, and the tokens that begin in it where their log-probabilities were asked for."""

    text: str
    tokens: list[TokenText] = field(default_factory=list)


@dataclass(eq=False)
class Job:
    """One text to be continued.

    Attributes:
        emit: takes each new `Piece`, and at the end None; called in the engine's thread. `finish` or `error` is set by
            then.
        stop: texts that end it and are not in it.
        deadline: `time.monotonic()` after which it ends with an error.
        priority: higher ones go first.
        echo: text that comes before its own in the answer.
        cache_salt: of the tenant, whose prefixes nobody else finds; empty for the common ones.
        prompt_log_probabilities: tell those of the prompt's tokens, and so many of the highest ones; None tells none.
        request: in the batch; its `scored` and `cached` are told of.
        finish: "stop" (end token or stop text) or "length".
    """

    ids: list[int]
    max_tokens: int
    sampling: Sampling
    stop: list[str]
    deadline: float
    emit: Callable[[Piece | None], None]
    priority: int = 0
    cache_salt: str = ""
    echo: str | None = None
    prompt_log_probabilities: int | None = None
    started: float = field(default_factory=time.monotonic)
    first: float | None = None
    tokens: int = 0
    finish: str | None = None
    error: BaseException | None = None
    request: Request | None = None


class _Text(TextStreamer):
    """Text of the new tokens, up to the first stop text; possible beginnings of one are held back."""

    def __init__(self, tokenizer, job: Job):
        super().__init__(tokenizer, skip_special_tokens=True)
        self.job, self.held, self.stopped, self.sent = job, "", False, len(job.echo or "")
        self.longest = max(map(len, job.stop), default=1)
        self.texts = None if job.sampling.log_probabilities is None else TokenTexts(tokenizer, self.sent)
        self.tokens: list[TokenText] = []  # that no piece has had yet

    def take(self, choice: Choice) -> bool:
        """A new token; True where the text ends."""
        job = self.job
        if job.first is None:
            job.first = time.monotonic()
        if not job.max_tokens:  # the prompt's own log-probabilities were wanted, and are there now
            return True
        job.tokens += 1
        if self.texts is not None:
            self.tokens.append(self.texts.add(choice))
        self.put(torch.tensor([choice.token]))
        return self.stopped

    def done(self, request: Request) -> None:
        """It has ended in the batch."""
        job = self.job
        try:
            if request.error is None:
                self.end()
                if not self.stopped:
                    self._send("", len(self.tokens))
                job.finish = "stop" if self.stopped else request.finish if job.max_tokens else "length"
            job.error = request.error
        except Exception as error:  # the listener must hear of its end whatever happened
            job.error = error
        finally:
            job.emit(None)

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
        self.sent += len(text)
        self._send(text, sum(token.offset < self.sent for token in self.tokens))

    def _send(self, text: str, tokens: int) -> None:
        if text or tokens:
            self.job.emit(Piece(text, self.tokens[:tokens]))
            self.tokens = self.tokens[tokens:]


class Engine:
    """Runs jobs in a batch.

    Args:
        batches: with a prefix cache; this engine starts and stops them, and closes it.
        max_waiting: jobs that may wait to begin. While fewer do, all of a request are taken.
    """

    def __init__(self, batches: BatchEngine, tokenizer, max_waiting: int):
        self.batches, self.tokenizer, self.max_waiting = batches, tokenizer, max_waiting
        ends = batches.model.generation_config.eos_token_id
        self.ends = frozenset([ends] if isinstance(ends, int) else ends or [])
        self.is_stopping = False
        self._submitting = threading.Lock()
        self._thread = batches.start()

    def submit(self, prompts: list[list[Job]]) -> None:
        """All of them or none.

        Args:
            prompts: the jobs of one request, those with one prompt together: it is computed once for them.

        Raises:
            EngineFull: too many wait, or the engine is stopping.
            ValueError: one of them can never run here.
        """
        with self._submitting:
            if self.is_stopping:
                raise EngineFull(STOPPING)
            if self.batches.waiting_requests >= self.max_waiting:
                raise EngineFull(f"{self.max_waiting} requests are waiting already: try again later")
            try:
                for jobs in prompts:
                    first, *siblings = map(self._request, jobs)
                    first.siblings = siblings
                    self.batches.submit(first)
            except BaseException:
                for jobs in prompts:
                    self.cancel(jobs)
                raise

    def _request(self, job: Job) -> Request:
        text = _Text(self.tokenizer, job)
        job.request = Request(
            job.ids,
            max(job.max_tokens, 1),
            Sampler(job.sampling, job.ids, self.ends),
            self.ends,
            priority=job.priority,
            deadline=job.deadline,
            cache_salt=job.cache_salt,
            take=text.take,
            done=text.done,
            prompt_log_probabilities=job.prompt_log_probabilities,
        )
        return job.request

    def cancel(self, jobs: list[Job]) -> None:
        """Nobody is listening any more: what they hold is given back before the next step."""
        for job in jobs:
            if job.request is not None:
                self.batches.cancel(job.request)

    @property
    def longest(self) -> float:
        """Tokens of a text that can run here, whatever else does."""
        pool = self.batches.pool
        return pool.pages * pool.page if pool.latents else float("inf")

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self, seconds: float) -> None:
        """Take no more jobs, finish those at hand within `seconds`, break off the rest and write the prefixes.

        A step that then goes on for `LAST_STEP` is left to the end of the process, and with it what was not written.
        """
        self.is_stopping = True
        self.batches.stop(seconds, abort=False)
        self.abort()
        self._thread.join(LAST_STEP)
        if not self.alive:
            self.batches.prefixes.cache.close()

    def abort(self) -> None:
        """Break off what runs, and refuse what waits."""
        self.is_stopping = True
        self.batches.abort()
