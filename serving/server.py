"""OpenAI-style completions over HTTP, for evaluation and development: `kimi-k3 serve MODEL`.

POST /v1/completions (with `stream` too), GET /v1/models, /health and /metrics (Prometheus). Every request starts from
the longest kept prefix of its prompt. What cannot work is answered with a 4xx and a sentence in OpenAI's error form.
"""

import asyncio
import contextlib
import json
import time
import uuid
from dataclasses import dataclass
from typing import Annotated, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from .engine import Engine, EngineFull, Job
from .prefix_cache import PrefixCache


@dataclass(frozen=True)
class Limits:
    """Tokens of a prompt and of an answer, seconds of a request (waiting included), waiting requests, bytes of a body,
    and the seconds that a stop leaves for requests under way."""

    prompt_tokens: int
    new_tokens: int
    seconds: float = 300
    waiting: int = 256
    body_bytes: int = 32 << 20
    stop_seconds: float = 30


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool = False


class CompletionRequest(BaseModel):
    """The fields of OpenAI's completions that are implemented; any other one is refused by name."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str
    prompt: str | list[int]
    max_tokens: Annotated[int, Field(ge=1)] = 16
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    n: Literal[1] = 1
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stop: str | Annotated[list[str], Field(max_length=4)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None  # vLLM's field


def error_body(status: int, message: str) -> dict:
    kind = "invalid_request_error" if status < 500 else "server_error"
    message = message.encode("utf-8", "replace").decode("utf-8")  # half a character of the request is no JSON
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def refusal(status: int, message: str) -> JSONResponse:
    return JSONResponse(error_body(status, message), status)


class SmallBody:
    """Refuses a request whose body is larger than the limit, before all of it is read."""

    def __init__(self, app, limit: int):
        self.app, self.limit = app, limit

    async def __call__(self, scope, receive, send):
        size = 0

        async def counted():
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self.limit:
                raise HTTPException(413, f"the request has more than {self.limit:,} bytes")
            return message

        await self.app(scope, counted, send)


class Metrics:
    """Prometheus counters of one server."""

    def __init__(self, engine: Engine):
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("kimi_k3_requests", "requests by outcome", ["outcome"], registry=registry)
        self.prompt = Counter("kimi_k3_prompt_tokens", "tokens of prompts", registry=registry)
        self.cached = Counter("kimi_k3_cached_tokens", "of those, found in the prefix cache", registry=registry)
        self.new = Counter("kimi_k3_generated_tokens", "new tokens", registry=registry)
        self.first = Histogram("kimi_k3_first_token_seconds", "from arrival to the first token", registry=registry)
        waiting = Gauge("kimi_k3_waiting_requests", "requests in the queue", registry=registry)
        waiting.set_function(lambda: engine.waiting)
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
    metrics = Metrics(engine)
    created = int(time.time())

    @contextlib.asynccontextmanager
    async def lifespan(app):
        yield
        await asyncio.to_thread(engine.stop, limits.stop_seconds)

    app = FastAPI(title="kimi-k3", lifespan=lifespan)
    app.add_middleware(SmallBody, limit=limits.body_bytes)

    @app.exception_handler(RequestValidationError)
    async def wrong_request(request, error):
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"] if part != "body")
        if first["type"] == "json_invalid":
            return refusal(400, "the body is not JSON")
        if first["type"] == "extra_forbidden":
            return refusal(400, f"{field} is not supported here")
        return refusal(400, f"{field or 'the body'}: {first['msg']}")

    @app.exception_handler(HTTPException)
    async def wrong_place(request, error):
        return refusal(error.status_code, str(error.detail))

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
        ids = await asyncio.to_thread(_prompt_ids, asked, tokenizer, cache, name, limits)
        loop, pieces = asyncio.get_running_loop(), asyncio.Queue()

        def tell(piece):  # in the engine's thread; a closed loop has no listener left
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(pieces.put_nowait, piece)

        job = Job(
            ids, asked.max_tokens, asked.temperature, asked.top_p, asked.seed,
            [asked.stop] if isinstance(asked.stop, str) else [text for text in asked.stop or [] if text],
            time.monotonic() + limits.seconds, tell, asked.cache_salt or "",
        )  # fmt: skip
        try:
            engine.submit(job)
        except EngineFull as error:
            return refusal(429, str(error))
        answer = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time())}
        answer["model"] = name
        if asked.stream:
            with_usage = asked.stream_options is not None and asked.stream_options.include_usage
            events = _events(job, pieces, answer, with_usage, limits, metrics)
            return StreamingResponse(events, media_type="text/event-stream")
        text = await _whole_text(job, pieces, request)
        if text is None:
            metrics.count(job, "cancelled")
            return Response(status_code=499)
        failure = _failure(job, limits)
        metrics.count(job, "failed" if failure else "finished")
        if failure:
            raise failure
        return {**answer, "choices": [_choice(text, job.finish)], "usage": _usage(job)}

    return app


def _prompt_ids(asked, tokenizer, cache, name, limits) -> list[int]:
    """
    Raises:
        HTTPException: for a request that cannot work, with the sentence of the refusal.
    """
    if asked.model != name:
        raise HTTPException(404, f"there is no model {asked.model!r} here, only {name!r}")
    ids, config = asked.prompt, cache.model.config.get_text_config(decoder=True)
    if isinstance(ids, str):
        try:
            ids.encode("utf-8")
        except UnicodeEncodeError:
            raise HTTPException(400, "prompt: the text has half of a surrogate pair") from None
        ids = tokenizer(ids, verbose=False).input_ids
    if not ids:
        raise HTTPException(400, "the prompt is empty")
    if not all(0 <= token < config.vocab_size for token in ids):
        raise HTTPException(400, f"prompt: token ids are numbers from 0 to {config.vocab_size - 1}")
    if len(ids) > limits.prompt_tokens:
        raise HTTPException(400, f"the prompt has {len(ids):,} tokens, and {limits.prompt_tokens:,} are allowed")
    if asked.max_tokens > limits.new_tokens:
        raise HTTPException(400, f"max_tokens is {asked.max_tokens:,}, and {limits.new_tokens:,} are allowed")
    if len(ids) + asked.max_tokens > config.max_position_embeddings:
        counted = f"{len(ids):,} tokens of the prompt and {asked.max_tokens:,} new ones"
        longest = f"the {config.max_position_embeddings:,} that the model reads"
        raise HTTPException(400, f"{counted} are more than {longest}")
    return ids


def _choice(text: str, finish: str | None) -> dict:
    return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}


def _usage(job: Job) -> dict:
    return {
        "prompt_tokens": len(job.ids),
        "completion_tokens": job.tokens,
        "total_tokens": len(job.ids) + job.tokens,
        "prompt_tokens_details": {"cached_tokens": job.cached},
    }


def _failure(job: Job, limits: Limits) -> HTTPException | None:
    if isinstance(job.error, TimeoutError):
        return HTTPException(504, f"the request took longer than {limits.seconds:g} seconds")
    if isinstance(job.error, EngineFull):
        return HTTPException(503, str(job.error))
    if isinstance(job.error, OSError):  # whose text may name files
        return HTTPException(500, f"generation failed: {job.error.strerror or 'an error of the file system'}")
    return HTTPException(500, f"generation failed: {job.error}") if job.error else None


async def _whole_text(job: Job, pieces: asyncio.Queue, request: Request) -> str | None:
    """The whole answer; None when the client goes away, which also breaks off the job."""
    answer = []
    try:
        while not await request.is_disconnected():
            with contextlib.suppress(TimeoutError):
                piece = await asyncio.wait_for(pieces.get(), 0.5)
                if piece is None:
                    return "".join(answer)
                answer.append(piece)
    finally:
        job.cancelled.set()


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
