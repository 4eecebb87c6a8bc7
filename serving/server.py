"""OpenAI-style completions over HTTP, for evaluation and development: `kimi-k3 serve MODEL`.

POST /v1/completions (with `stream` too), GET /v1/models, /health and /metrics (Prometheus). Every request starts from
the longest kept prefix of its prompt. What cannot work is answered with a 4xx and a sentence in OpenAI's error form.
"""

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator
from pydantic_core import PydanticCustomError
from starlette.exceptions import HTTPException

from ..cli.generate import LEAST_TEMPERATURE
from .connections import ConnectionLimits
from .engine import Engine, EngineFull, Job
from .prefix_cache import PrefixCache
from .prompts import PromptReader, TooMany

LONGEST_STOP = 1000  # characters
OTHER_FIELDS = 64 << 10  # bytes of a request beside its prompt


@dataclass(frozen=True)
class Limits:
    """Tokens of a prompt and of an answer, seconds of a request (waiting included), waiting requests, bytes of a body
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


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool = False


_ALIKE = {bool: (bool,), int: (int, float), dict: (dict,)}  # JSON's 0 and 0.0 are one number, false is none


def _only(*values) -> Any:
    """A field that is not implemented: null and `values`, which change nothing, are accepted from clients that always
    send it."""

    def check(value):
        if value is None or any(value == known and type(value) in _ALIKE[type(known)] for known in values):
            return None
        raise PydanticCustomError("not_supported", "is not supported here, only {values}", {"values": allowed})

    allowed = " and ".join(json.dumps(value) for value in (*values, None))
    return Annotated[Any, AfterValidator(check)]


def _refused(message: str) -> PydanticCustomError:
    return PydanticCustomError("refused", message)


class CompletionRequest(BaseModel):
    """The fields of OpenAI's completions that are implemented; others are refused by name unless they ask for nothing.

    null stands for the default.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str
    prompt: str | list[int]
    max_tokens: Annotated[int, Field(ge=1)] = 16
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stop: str | Annotated[list[str], Field(max_length=4)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None  # vLLM's field
    n: _only(1) = None
    best_of: _only(1) = None
    echo: _only(False) = None
    logprobs: _only() = None
    logit_bias: _only({}) = None
    suffix: _only() = None
    presence_penalty: _only(0) = None
    frequency_penalty: _only(0) = None
    repetition_penalty: _only(1) = None
    top_k: _only(-1, 0) = None
    min_p: _only(0) = None
    ignore_eos: _only(False) = None
    skip_special_tokens: _only(True) = None

    @field_validator("max_tokens", "temperature", "top_p", "stream", mode="before")
    @classmethod
    def _default(cls, value, info):
        return cls.model_fields[info.field_name].default if value is None else value

    @field_validator("temperature")
    @classmethod
    def _can_divide(cls, value):
        if 0 < value < LEAST_TEMPERATURE:
            raise _refused(f"must be 0, which is greedy, or at least {LEAST_TEMPERATURE:g}")
        return value

    @field_validator("stop")
    @classmethod
    def _can_stop(cls, value):
        texts = [value] if isinstance(value, str) else value or []
        if "" in texts:
            raise _refused("an empty text would end every answer before its first word")
        if any(len(text) > LONGEST_STOP for text in texts):
            raise _refused(f"a text to stop at has at most {LONGEST_STOP:,} characters")
        return texts


def error_body(status: int, message: str) -> dict:
    kind = "invalid_request_error" if status < 500 else "server_error"
    message = message.encode("utf-8", "replace").decode("utf-8")  # half a character of the request is no JSON
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def refusal(status: int, message: str, headers: dict | None = None) -> JSONResponse:
    return JSONResponse(error_body(status, message), status, headers)


class WholeBody:
    """Refuses a body that has more bytes than its limit, takes longer than its time, or is one too many to be kept.

    Args:
        most: bytes of a body.
        most_kept: bytes of the bodies of all requests that are not answered yet.
        always: bytes of a body that is never one too many, however much others sent.
        seconds: from a request's headers to the end of its body.
    """

    def __init__(self, app, most: int, most_kept: int, always: int, seconds: float):
        self.app, self.most, self.most_kept, self.always, self.seconds = app, most, most_kept, always, seconds
        self.kept = 0

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        size, whole, end = 0, False, time.monotonic() + self.seconds
        declared = dict(scope["headers"]).get(b"content-length", b"")

        async def limited():
            nonlocal size, whole
            if whole:  # what comes now is the departure of the client
                return await receive()
            # the rest of a body that is too large is read and forgotten, or the client would never see the answer
            if declared.isdigit() and int(declared) > self.most:
                raise self._too_large()
            try:
                async with asyncio.timeout(end - time.monotonic()):
                    message = await receive()
            except TimeoutError:
                sentence = f"the request was not whole after {self.seconds:g} seconds"
                raise HTTPException(408, sentence, {"connection": "close"}) from None
            size += (more := len(message.get("body", b"")))
            self.kept += more
            if size > self.most:
                raise self._too_large()
            if self.kept > self.most_kept and size > self.always:
                raise HTTPException(503, "the server is reading as much as it can keep: try again later")
            whole = not message.get("more_body", False)
            return message

        def forget():
            nonlocal size
            self.kept -= size
            size = 0

        async def forgetting(message):
            # before the client has the last byte: its next body may be here before the application has returned
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                forget()
            await send(message)

        try:
            await self.app(scope, limited, forgetting)
        finally:
            forget()

    def _too_large(self):
        return HTTPException(413, f"the request has more than {self.most:,} bytes")


class Metrics:
    """Prometheus counters of one server."""

    def __init__(self, engine: Engine, reader: PromptReader):
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("kimi_k3_requests", "requests by outcome", ["outcome"], registry=registry)
        self.prompt = Counter("kimi_k3_prompt_tokens", "tokens of prompts", registry=registry)
        self.cached = Counter("kimi_k3_cached_tokens", "of those, found in the prefix cache", registry=registry)
        self.new = Counter("kimi_k3_generated_tokens", "new tokens", registry=registry)
        self.first = Histogram("kimi_k3_first_token_seconds", "from arrival to the first token", registry=registry)
        waiting = Gauge("kimi_k3_waiting_requests", "requests in the queues", registry=registry)
        waiting.set_function(lambda: reader.waiting + engine.waiting)
        kept = Gauge("kimi_k3_prefix_cache_bytes", "bytes of kept prefixes", ["tier"], registry=registry)
        for tier in engine.cache.tiers:
            kept.labels(tier.name).set_function(lambda tier=tier: tier.used)

    def count(self, job: Job, outcome: str) -> None:
        self.requests.labels(outcome).inc()
        self.prompt.inc(len(job.ids))
        self.cached.inc(job.cached)
        self.new.inc(job.tokens)
        if job.first is not None:
            self.first.observe(job.first - job.started)


def build_app(cache: PrefixCache, tokenizer, name: str, limits: Limits) -> FastAPI:
    """The application; its shutdown finishes requests under way and closes the cache."""
    engine = Engine(cache, tokenizer, limits.waiting)
    reader = PromptReader(tokenizer, limits.prompt_tokens, limits.waiting)
    metrics = Metrics(engine, reader)
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

    @app.exception_handler(RequestValidationError)
    async def wrong_request(request, error):
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"] if part != "body")
        if first["type"] == "json_invalid":
            return refusal(400, "the body is not JSON")
        if first["type"] == "extra_forbidden":
            return refusal(400, f"{field} is not supported here")
        if first["type"] == "not_supported":
            return refusal(400, f"{field} {first['msg']}")
        return refusal(400, f"{field or 'the body'}: {first['msg']}")

    @app.exception_handler(HTTPException)
    async def wrong_place(request, error):
        return refusal(error.status_code, str(error.detail), error.headers)

    @app.get("/health")
    async def health():
        return {"status": "ok"} if engine.alive else refusal(503, "the engine has stopped")

    @app.get("/v1/models")
    async def models():
        return {"object": "list", "data": [{"id": name, "object": "model", "created": created, "owned_by": "local"}]}

    @app.get("/metrics")
    async def show_metrics():
        return Response(generate_latest(metrics.registry), media_type="text/plain; version=0.0.4")

    @app.post("/v1/completions")
    async def completions(asked: CompletionRequest, request: Request):
        deadline, gone = time.monotonic() + limits.seconds, asyncio.create_task(_departure(request))
        try:
            ids = await _unless(gone, _prompt_ids(asked, reader, cache, name, limits, deadline))
            if ids is None:
                metrics.requests.labels("cancelled").inc()
                return Response(status_code=499)
            job, pieces = _submitted(engine, asked, ids, deadline)
            answer = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time())}
            answer["model"] = name
            if asked.stream:
                with_usage = asked.stream_options is not None and asked.stream_options.include_usage
                events = _events(job, pieces, answer, with_usage, limits, metrics)
                return StreamingResponse(events, media_type="text/event-stream")
            try:
                text = await _unless(gone, _whole_text(pieces))
            finally:
                job.cancelled.set()
        finally:
            gone.cancel()
        if text is None:
            metrics.count(job, "cancelled")
            return Response(status_code=499)
        failure = _failure(job, limits)
        metrics.count(job, "failed" if failure else "finished")
        if failure:
            raise failure
        return {**answer, "choices": [_choice(text, job.finish)], "usage": _usage(job)}

    return app


async def _prompt_ids(asked, reader: PromptReader, cache, name, limits, deadline) -> list[int]:
    """
    Raises:
        HTTPException: for a request that cannot work, with the sentence of the refusal.
    """
    if asked.model != name:
        raise HTTPException(404, f"there is no model {asked.model!r} here, only {name!r}")
    if asked.max_tokens > limits.new_tokens:
        raise HTTPException(400, f"max_tokens is {asked.max_tokens:,}, and {limits.new_tokens:,} are allowed")
    ids, config = asked.prompt, cache.model.config.get_text_config(decoder=True)
    if isinstance(ids, str):
        ids = await _read(ids, reader, limits, deadline)
    if not ids:
        raise HTTPException(400, "the prompt is empty")
    if len(ids) > limits.prompt_tokens:
        raise HTTPException(400, f"the prompt has {len(ids):,} tokens, and {limits.prompt_tokens:,} are allowed")
    if not all(0 <= token < config.vocab_size for token in ids):
        raise HTTPException(400, f"prompt: token ids are numbers from 0 to {config.vocab_size - 1}")
    if len(ids) + asked.max_tokens > config.max_position_embeddings:
        counted = f"{len(ids):,} tokens of the prompt and {asked.max_tokens:,} new ones"
        longest = f"the {config.max_position_embeddings:,} that the model reads"
        raise HTTPException(400, f"{counted} are more than {longest}")
    return ids


async def _read(text: str, reader: PromptReader, limits: Limits, deadline: float) -> list[int]:
    """The token ids of a text, which costs nothing if it is too long whatever they are."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise HTTPException(400, "prompt: the text has half of a surrogate pair") from None
    if size > reader.most_bytes:
        counted = f"the prompt has {size:,} bytes, more than {limits.prompt_tokens:,} tokens can have"
        raise HTTPException(400, f"{counted}, and no more tokens are allowed")
    try:
        return await reader.ids(text, deadline)
    except TooMany:
        raise HTTPException(429, f"{limits.waiting} prompts are waiting already: try again later") from None
    except TimeoutError:
        raise _too_late(limits) from None


def _submitted(engine: Engine, asked: CompletionRequest, ids: list[int], deadline: float):
    """(the job, the queue of its pieces of text); an `HTTPException` where no more are taken."""
    loop, pieces = asyncio.get_running_loop(), asyncio.Queue()

    def tell(piece):  # in the engine's thread; a closed loop has no listener left
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(pieces.put_nowait, piece)

    sampling = asked.temperature, asked.top_p, asked.seed
    job = Job(ids, asked.max_tokens, *sampling, asked.stop or [], deadline, tell, asked.cache_salt or "")
    try:
        engine.submit(job)
    except EngineFull as error:
        raise HTTPException(429, str(error)) from None
    return job, pieces


def _choice(text: str, finish: str | None) -> dict:
    return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}


def _usage(job: Job) -> dict:
    return {
        "prompt_tokens": len(job.ids),
        "completion_tokens": job.tokens,
        "total_tokens": len(job.ids) + job.tokens,
        "prompt_tokens_details": {"cached_tokens": job.cached},
    }


def _too_late(limits: Limits) -> HTTPException:
    return HTTPException(504, f"the request took longer than {limits.seconds:g} seconds")


def _failure(job: Job, limits: Limits) -> HTTPException | None:
    if isinstance(job.error, TimeoutError):
        return _too_late(limits)
    if isinstance(job.error, EngineFull):
        return HTTPException(503, str(job.error))
    if isinstance(job.error, OSError):  # whose text may name files
        return HTTPException(500, f"generation failed: {job.error.strerror or 'an error of the file system'}")
    return HTTPException(500, f"generation failed: {job.error}") if job.error else None


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


async def _whole_text(pieces: asyncio.Queue) -> str:
    answer = []
    while (piece := await pieces.get()) is not None:
        answer.append(piece)
    return "".join(answer)


async def _events(job: Job, pieces: asyncio.Queue, answer: dict, with_usage: bool, limits: Limits, metrics: Metrics):
    """Server-sent events; when the client goes away, the generator ends, and with it the job."""
    outcome = "cancelled"
    try:
        while (piece := await pieces.get()) is not None:
            yield _event({**answer, "choices": [_choice(piece, None)]})
        failure = _failure(job, limits)
        outcome = "failed" if failure else "finished"
        if failure:
            yield _event(error_body(failure.status_code, failure.detail))
        else:
            yield _event({**answer, "choices": [_choice("", job.finish)]})
            if with_usage:
                yield _event({**answer, "choices": [], "usage": _usage(job)})
        yield "data: [DONE]\n\n"
    finally:
        job.cancelled.set()
        metrics.count(job, outcome)


def _event(data: dict) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"
