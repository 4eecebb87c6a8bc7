"""OpenAI's completions and chat completions over HTTP: `kimi-k3 serve MODEL`.

POST /v1/completions and /v1/chat/completions (with `stream` too), GET /v1/models, /health, /ready and /metrics
(Prometheus). Many requests run at once (`batching.py`). What cannot work is answered with a 4xx and a sentence in
OpenAI's error form.
"""

import asyncio
import contextlib
import functools
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response, StreamingResponse
from starlette.exceptions import HTTPException

from .answers import Chat, Completions, usage
from .batching import BatchEngine, EngineFull
from .connections import ConnectionLimits
from .engine import STOPPING, Engine, Job, Piece
from .metrics import Metrics
from .middleware import Door, WholeBody, error_body, refusal
from .prompts import PromptError, PromptReader, TooMany
from .protocol import MOST_CHOICES, ChatRequest, CompletionRequest

OTHER_FIELDS = 64 << 10  # bytes of a request beside its prompt
RETRY = {"retry-after": "1"}  # seconds, in which some of the texts that run have ended


@dataclass(frozen=True)
class Limits:
    """Tokens of a prompt and of an answer, seconds of a request (waiting included), waiting texts, bytes of a body
    and of all bodies at once, connections, and the seconds that a stop leaves for requests under way.

    A body may have fewer bytes than `body_bytes` where the longest prompt needs fewer. One that is no larger than its
    share of `all_body_bytes`, if every connection had one, is read whatever others sent: so bodies may be twice that.
    """

    prompt_tokens: int
    new_tokens: int
    seconds: float = 300
    waiting: int = 256
    body_bytes: int = 32 << 20
    all_body_bytes: int = 256 << 20
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
    stop_seconds: float = 30


def build_app(batches: BatchEngine, tokenizer, name: str, limits: Limits, api_key: str | None = None) -> FastAPI:
    """The application, which starts the engine of many requests; its shutdown finishes those under way and closes the
    engine's prefix cache. `app.state.engine` is the engine of texts."""
    engine = Engine(batches, tokenizer, limits.waiting)
    reader = PromptReader(tokenizer, limits.prompt_tokens, limits.waiting)
    service = _Service(engine, reader, name, limits)
    created = int(time.time())

    @contextlib.asynccontextmanager
    async def lifespan(app):
        yield
        await asyncio.to_thread(engine.stop, limits.stop_seconds)

    app = FastAPI(title="kimi-k3", lifespan=lifespan)
    app.state.engine = engine
    # a character is up to six bytes of JSON, a token id up to twelve with what is around it
    needed = max(6 * reader.most_bytes, 12 * limits.prompt_tokens) + OTHER_FIELDS
    most, seconds = min(limits.body_bytes, needed), limits.connections.body_seconds
    always = limits.all_body_bytes // limits.connections.connections
    app.add_middleware(WholeBody, most=most, most_kept=limits.all_body_bytes, always=always, seconds=seconds)
    app.add_middleware(Door, api_key=api_key)
    app.add_exception_handler(RequestValidationError, _wrong_request)
    app.add_exception_handler(HTTPException, _wrong_place)

    @app.get("/health")
    async def health():
        return {"status": "ok"} if engine.alive else refusal(503, "the engine has stopped")

    @app.get("/ready")
    async def ready():
        return refusal(503, STOPPING) if engine.is_stopping or not engine.alive else {"status": "ready"}

    @app.get("/v1/models")
    async def models():
        return {"object": "list", "data": [{"id": name, "object": "model", "created": created, "owned_by": "local"}]}

    @app.get("/metrics")
    async def metrics():
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.post("/v1/completions")
    async def completions(asked: CompletionRequest, request: Request):
        return await service.answer(asked, Completions(asked, tokenizer), request)

    @app.post("/v1/chat/completions")
    async def chat_completions(asked: ChatRequest, request: Request):
        return await service.answer(asked, Chat(asked, tokenizer), request)

    return app


async def _wrong_request(request, error):
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"] if part != "body")
    if first["type"] == "json_invalid":
        return refusal(400, "the body is not JSON")
    if first["type"] == "extra_forbidden":
        return refusal(400, f"{field} is not supported here")
    if first["type"] == "not_supported":
        return refusal(400, f"{field} {first['msg']}")
    return refusal(400, f"{field or 'the body'}: {first['msg']}")


async def _wrong_place(request, error):
    return refusal(error.status_code, str(error.detail), error.headers)


@dataclass
class _Prompt:
    ids: list[int]
    max_tokens: int
    echo: str | None


class _Texts:
    """The jobs of one request, by prompt, and the queue of their pieces.

    Attributes:
        outcome: "finished", "failed", or "cancelled" as long as it is neither.
    """

    def __init__(self):
        self.outcome = "cancelled"
        self._loop, self._pieces = asyncio.get_running_loop(), asyncio.Queue()
        self.prompts: list[list[Job]] = []

    @property
    def jobs(self) -> list[Job]:
        """By index."""
        return [job for jobs in self.prompts for job in jobs]

    def tell(self, index: int, piece: Piece | None) -> None:
        """In the engine's thread; a closed loop has no listener left."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._pieces.put_nowait, (index, piece))

    async def pieces(self) -> AsyncIterator[tuple[int, Piece | None]]:
        """(index, piece) until all jobs have ended; the end of a job is None."""
        left = len(self.jobs)
        while left:
            index, piece = await self._pieces.get()
            left -= piece is None
            yield index, piece

    async def whole(self) -> list[list[Piece]]:
        found: list[list[Piece]] = [[] for _ in self.jobs]
        async for index, piece in self.pieces():
            if piece is not None:
                found[index].append(piece)
        return found


class _Service:
    """Answers requests for texts."""

    def __init__(self, engine: Engine, reader: PromptReader, name: str, limits: Limits):
        self.engine, self.reader, self.name, self.limits = engine, reader, name, limits
        self.metrics = Metrics(engine, reader)
        self.config = engine.batches.model.config.get_text_config(decoder=True)

    async def answer(self, asked: CompletionRequest | ChatRequest, form: Completions | Chat, request: Request):
        deadline, gone = time.monotonic() + self.limits.seconds, asyncio.create_task(_departure(request))
        try:
            prompts = await _unless(gone, self._prompts(asked, deadline))
            if prompts is None:
                self.metrics.count([], "cancelled")
                return Response(status_code=499)
            texts = self._submitted(asked, prompts, deadline)
            answer = {"id": form.prefix + request.state.request_id, "created": int(time.time()), "model": self.name}
            if asked.stream:
                with_usage = asked.stream_options is not None and asked.stream_options.include_usage
                events = self._events(texts, form, {**answer, "object": form.part_kind}, with_usage)
                return _Stream(events, functools.partial(self._ended, texts))
            try:
                found = await _unless(gone, texts.whole())
                failure = self._failure(texts.jobs)
                if found is not None:
                    texts.outcome = "failed" if failure else "finished"
            finally:
                self._ended(texts)
        finally:
            gone.cancel()
        if found is None:
            return Response(status_code=499)
        if failure:
            raise failure
        choices = [form.whole(i, job, pieces) for i, (job, pieces) in enumerate(zip(texts.jobs, found, strict=True))]
        return {**answer, "object": form.whole_kind, "choices": choices, "usage": usage(texts.prompts)}

    async def _prompts(self, asked: CompletionRequest | ChatRequest, deadline: float) -> list[_Prompt]:
        """
        Raises:
            HTTPException: for a request that cannot work, with the sentence of the refusal.
        """
        if asked.model != self.name:
            raise HTTPException(404, f"there is no model {asked.model!r} here, only {self.name!r}")
        try:
            if isinstance(asked, ChatRequest):
                ids = await self.reader.chat_ids([message.plain() for message in asked.messages], deadline)
                return [_Prompt(ids, self._checked(ids, asked.most_tokens), None)]
            if not asked.max_tokens and not asked.echo:
                raise HTTPException(400, "max_tokens is 0, which asks for nothing: set echo, or ask for a token")
            if (texts := len(asked.prompts) * asked.n) > MOST_CHOICES:
                raise HTTPException(400, f"prompt and n ask for {texts:,} texts, and {MOST_CHOICES} are allowed")
            found = []
            for prompt in asked.prompts:
                ids = await self.reader.ids(prompt, deadline) if isinstance(prompt, str) else prompt
                most, echo = self._checked(ids, asked.max_tokens), prompt
                if not isinstance(prompt, str) and asked.echo:
                    echo = self.reader.tokenizer.decode(ids)
                found.append(_Prompt(ids, most, echo if asked.echo else None))
            return found
        except PromptError as error:
            raise HTTPException(400, str(error)) from None
        except TooMany:
            sentence = f"{self.limits.waiting} prompts are waiting already: try again later"
            raise HTTPException(429, sentence, RETRY) from None
        except TimeoutError:
            raise self._too_late() from None

    def _checked(self, ids: list[int], new: int | None) -> int:
        """The number of new tokens, which is what may follow where it is None; an `HTTPException` for a prompt that
        cannot be continued by so many."""
        config, limits = self.config, self.limits
        if not ids:
            raise HTTPException(400, "the prompt is empty")
        if len(ids) > limits.prompt_tokens:
            raise HTTPException(400, f"the prompt has {len(ids):,} tokens, and {limits.prompt_tokens:,} are allowed")
        if not all(0 <= token < config.vocab_size for token in ids):
            raise HTTPException(400, f"prompt: token ids are numbers from 0 to {config.vocab_size - 1}")
        if new is None:
            new = max(min(limits.new_tokens, min(config.max_position_embeddings, self.engine.longest) - len(ids)), 1)
        if new > limits.new_tokens:
            raise HTTPException(400, f"max_tokens is {new:,}, and {limits.new_tokens:,} are allowed")
        if len(ids) + new > config.max_position_embeddings:
            counted = f"{len(ids):,} tokens of the prompt and {new:,} new ones"
            longest = f"the {config.max_position_embeddings:,} that the model reads"
            raise HTTPException(400, f"{counted} are more than {longest}")
        return new

    def _submitted(self, asked, prompts: list[_Prompt], deadline: float) -> _Texts:
        """The texts that were begun; an `HTTPException` where no more are taken."""
        texts = _Texts()
        for prompt in prompts:
            jobs = []
            for choice in range(asked.n):
                index = len(texts.prompts) * asked.n + choice
                job = Job(
                    prompt.ids,
                    prompt.max_tokens,
                    asked.sampling(choice, asked.log_probabilities),
                    asked.stop or [],
                    deadline,
                    functools.partial(texts.tell, index),
                    priority=-asked.priority,
                    cache_salt=asked.cache_salt or "",
                    echo=prompt.echo,
                    prompt_log_probabilities=None if prompt.echo is None else asked.log_probabilities,
                )
                jobs.append(job)
            texts.prompts.append(jobs)
        try:
            self.engine.submit(texts.prompts)
        except EngineFull as error:
            raise HTTPException(503 if self.engine.is_stopping else 429, str(error), RETRY) from None
        except ValueError as error:
            raise HTTPException(400, str(error)) from None
        return texts

    def _too_late(self) -> HTTPException:
        return HTTPException(504, f"the request took longer than {self.limits.seconds:g} seconds")

    def _failure(self, jobs: list[Job]) -> HTTPException | None:
        error = next((job.error for job in jobs if job.error is not None), None)
        if isinstance(error, TimeoutError):
            return self._too_late()
        if isinstance(error, EngineFull):
            return HTTPException(503, str(error), RETRY)
        if isinstance(error, OSError):  # whose text may name files
            return HTTPException(500, f"generation failed: {error.strerror or 'an error of the file system'}")
        return None if error is None else HTTPException(500, f"generation failed: {error}")

    async def _events(self, texts: _Texts, form: Completions | Chat, answer: dict, with_usage: bool):
        """Server-sent events."""
        begun: set[int] = set()
        async for index, piece in texts.pieces():
            job = texts.jobs[index]
            if job.error is not None:
                break
            choices = [] if index in begun else form.first(index, job)
            begun.add(index)
            choices.append(form.last(index, job) if piece is None else form.part(index, piece))
            for choice in choices:
                yield _event({**answer, "choices": [choice]})
        failure = self._failure(texts.jobs)
        texts.outcome = "failed" if failure else "finished"
        if failure:
            yield _event(error_body(failure.status_code, failure.detail))
        elif with_usage:
            yield _event({**answer, "choices": [], "usage": usage(texts.prompts)})
        yield "data: [DONE]\n\n"

    def _ended(self, texts: _Texts) -> None:
        """Whether they were told whole, or nobody listens any more."""
        self.engine.cancel(texts.jobs)
        self.metrics.count(texts.prompts, texts.outcome)


class _Stream(StreamingResponse):
    """Events, whose end is told of whatever ends them, also where the client leaves before the first."""

    def __init__(self, events: AsyncIterator[str], ended: Callable[[], None]):
        super().__init__(events, media_type="text/event-stream")
        self.ended = ended

    async def __call__(self, scope, receive, send):
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.ended()


async def _departure(request: Request) -> None:
    """Returns when the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _unless(gone: asyncio.Task, work: Coroutine):
    """What `work` returns or raises; None when the client goes first, for whom it is then broken off."""
    running = asyncio.create_task(work)
    try:
        await asyncio.wait({running, gone}, return_when=asyncio.FIRST_COMPLETED)
        return running.result() if running.done() else None
    finally:
        running.cancel()


def _event(data: dict) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"
