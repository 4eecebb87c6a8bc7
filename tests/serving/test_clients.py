"""Clients that are slow, silent, huge, malformed or gone, and honest ones beside them whose texts stay right.

Everything is asked over real connections, so that it holds for any engine behind the server.
"""

import asyncio
import contextlib
import itertools
import json
import random
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.exceptions import HTTPException
from transformers import AutoTokenizer

from kimi_k3 import KimiK3ForCausalLM
from kimi_k3.serving.connections import ConnectionLimits
from kimi_k3.serving.server import WholeBody
from running_server import PROMPT, SMALL, Running, limits
from waiting import PATIENCE, until

pytestmark = pytest.mark.one_release
PROMPTS = [f"{PROMPT} {word}" for word in ("near", "behind", "above", "before")]


@pytest.fixture(scope="module")
def model():
    return KimiK3ForCausalLM.from_pretrained(SMALL, dtype=torch.float32)


@pytest.fixture(scope="module")
def running(model):
    server = Running(model, limits())
    yield server
    assert server.stop()


def connect(server) -> socket.socket:
    link = socket.create_connection(("127.0.0.1", server.port))
    link.settimeout(PATIENCE)
    return link


def request(body: bytes, length: int | None = None, path="/v1/completions") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: "
    return f"{head}{len(body) if length is None else length}\r\n\r\n".encode() + body


def asking(prompt=PROMPT, **fields) -> bytes:
    return request(json.dumps({"model": "small", "prompt": prompt, "temperature": 0, **fields}).encode())


def rest(link) -> bytes:
    """What the server sends until it closes the connection."""
    parts = []
    try:
        while part := link.recv(1 << 16):
            parts.append(part)
    except ConnectionError:
        pass
    link.close()
    return b"".join(parts)


def message(response) -> str:
    return response.json()["error"]["message"]


# --- parameters ------------------------------------------------------------------------------------------------------

NEUTRAL = [
    ("presence_penalty", 0), ("frequency_penalty", 0.0), ("best_of", 1), ("echo", False), ("logprobs", None),
    ("logit_bias", {}), ("logit_bias", None), ("suffix", None), ("n", 1), ("n", None), ("stop", None), ("stop", []),
    ("seed", None), ("temperature", None), ("max_tokens", None), ("top_p", None), ("top_k", -1), ("top_k", 0),
    ("repetition_penalty", 1.0), ("min_p", 0), ("stream", None), ("stream_options", None), ("user", "u"),
    ("ignore_eos", False), ("skip_special_tokens", True), ("priority", 0), ("echo", None), ("min_p", None),
]  # fmt: skip
REFUSED = [
    ("presence_penalty", 2.5), ("best_of", 2), ("echo", 1), ("logprobs", 21), ("logprobs", True),
    ("logit_bias", {"5": 101}), ("logit_bias", {"x": 1}), ("logit_bias", {"-1": 1}), ("logit_bias", {"5000": 1}),
    ("suffix", "x"), ("n", True), ("n", 129), ("top_k", -2), ("repetition_penalty", 0), ("min_p", 1.5),
    ("frequency_penalty", -3), ("priority", 101), ("ignore_eos", True),
    ("ignore_eos", 0), ("skip_special_tokens", False), ("max_completion_tokens", 5), ("temperature", 1e-30),
    ("temperature", 1e-7), ("temperature", 1e300), ("top_p", -0.0), ("stop", ""), ("stop", ["a", ""]),
    ("stop", "x" * 1001), ("stop", ["a"] * 5), ("seed", 2**63), ("seed", -1), ("stream_options", {"x": 1}),
    ("max_tokens", 10**30),
]  # fmt: skip


def test_parameters_that_ask_for_nothing_are_taken_and_others_refused_by_name(running):
    first, second = dict(NEUTRAL), dict(reversed(NEUTRAL))  # of two values for a field, one each
    for fields in (first, second):
        answer = running.ask(**({"max_tokens": 2} | fields))
        assert answer.status_code == 200, answer.text
    for name, value in REFUSED:
        answer = running.ask(**({"max_tokens": 2} | {name: value}))
        assert answer.status_code == 400 and message(answer).startswith(name), (name, value, message(answer))


# --- large prompts ---------------------------------------------------------------------------------------------------


class Watched:
    """The tokenizer, which notes the texts that it is given, and reads those with `held` in them when it may."""

    def __init__(self, held="never in a text"):
        self.tokenizer, self.held = AutoTokenizer.from_pretrained(SMALL), held
        self.may_read, self.texts = threading.Event(), []

    def __call__(self, text, **options):
        self.texts.append(text)
        if self.held in text:
            self.may_read.wait(PATIENCE)
        return self.tokenizer(text, **options)

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)


def waiting(server) -> float:
    return server.metric("kimi_k3_waiting_requests")


def sent(server, data: bytes) -> socket.socket:
    """A connection over which these bytes went."""
    link = connect(server)
    link.sendall(data)
    return link


def test_large_prompts_are_refused_before_they_are_read(model):
    """Four of 21 MB at once, and one that a body may have but no prompt of that many tokens."""
    server = Running(model, limits(), tokenizer=Watched())
    huge = json.dumps({"model": "small", "prompt": "the old house " * (24 << 16), "max_tokens": 1}).encode()
    longest = 600 * max(len(token.encode()) for token in server.tokenizer.get_vocab())
    with ThreadPoolExecutor(4) as pool:
        options = {"content": huge, "headers": {"content-type": "application/json"}}
        answers = list(pool.map(lambda _: server.client.post("/v1/completions", **options), range(4)))
    assert [(answer.status_code, "bytes" in message(answer)) for answer in answers] == [(413, True)] * 4
    answer = server.ask("x" * (longest + 1))
    assert answer.status_code == 400 and f"{longest + 1:,} bytes" in message(answer)
    assert server.tokenizer.texts == []
    assert server.ask("x" * longest).status_code == 400
    assert len(server.tokenizer.texts) == 1
    assert server.stop()


def test_large_texts_are_read_one_at_a_time(model):
    """While one is being read, a short one passes it, a second large one waits, a third is one too many. Who leaves the
    queue makes room in it at once."""
    server = Running(model, limits(prompt_tokens=20_000, waiting=1), tokenizer=Watched("large"))
    expected = server.ask(max_tokens=4).json()["choices"][0]["text"]
    large = "large " * 12_000
    first = sent(server, asking(large))
    until(lambda: large in server.tokenizer.texts)
    second = sent(server, asking(large))
    until(lambda: waiting(server) == 1)
    refused = server.ask(large)
    assert refused.status_code == 429 and "1 prompts are waiting" in message(refused)
    assert server.ask(max_tokens=4).json()["choices"][0]["text"] == expected
    second.close()
    until(lambda: waiting(server) == 0)
    third = sent(server, asking(large))
    until(lambda: waiting(server) == 1)
    server.tokenizer.may_read.set()
    assert all(b"than the 8,192 that the model reads" in rest(link) for link in (first, third))
    assert server.tokenizer.texts.count(large) == 2, "the second client had left before its text was read"
    assert server.stop()


def test_a_text_that_is_not_read_in_time_is_answered_in_time(model):
    """And one that waits behind it is never read."""
    server = Running(model, limits(prompt_tokens=20_000, seconds=0.2), tokenizer=Watched("large"))
    links = [sent(server, asking("large " * 12_000)) for _ in range(2)]
    assert all(b" 504 " in rest(link) for link in links)
    server.tokenizer.may_read.set()
    assert len(server.tokenizer.texts) <= 1  # 0 where the machine was so busy that the first one did not begin either
    assert server.stop()


# --- connections -----------------------------------------------------------------------------------------------------


def held_connections(server) -> int:
    """Without the one of the server's own client."""
    return len(server.server.server_state.connections) - 1


def dripping(link, data: bytes) -> bytes:
    """What a client gets who sends a byte now and then and does not end by itself."""
    link.setblocking(False)
    received = []
    for byte in itertools.cycle(data):
        try:
            link.send(bytes([byte]))
            received.append(link.recv(1 << 16))
        except BlockingIOError:
            pass
        except ConnectionError:
            break
        if received and received[-1] == b"":
            break
        time.sleep(0.01)
    link.close()
    return b"".join(received)


def test_slow_and_silent_connections_end(model):
    short = ConnectionLimits(header_bytes=4096, header_seconds=0.3, body_seconds=0.3, stalled_seconds=0.3)
    server = Running(model, limits(connections=short))
    server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # so that the answers below fill it
    expected = server.ask(max_tokens=4).json()["choices"][0]["text"]
    assert rest(connect(server)) == b""
    assert rest(sent(server, b"POST /v1/comp")) == b""
    assert dripping(connect(server), b"x") == b""
    assert b" 408 " in rest(sent(server, request(b"{", length=100)))
    assert b" 408 " in dripping(sent(server, request(b"{", length=10_000)), b" ")
    assert b" 413 " in rest(sent(server, request(b"{", length=1 << 40)))
    assert b" 405 " in rest(sent(server, request(b"{", length=100, path="/health")))
    assert b" 400 " in rest(sent(server, b"GET / HTTP/1.1\r\na: " + b"x" * 5000))
    # answers that nobody takes, of one connection
    unread = sent(server, b"GET /metrics HTTP/1.1\r\nhost: a\r\n\r\n" * 100)
    with contextlib.suppress(ConnectionError):
        unread.recv(1)  # it was taken
    until(lambda: held_connections(server) == 0)
    unread.close()
    assert server.ask(max_tokens=4).json()["choices"][0]["text"] == expected
    assert server.stop()


@contextlib.contextmanager
def held_forwards(model):
    """Inside, forwards wait; gives an event that is set when one does."""
    entered, may_run = threading.Event(), threading.Event()

    def hold(*args):
        entered.set()
        may_run.wait(PATIENCE)

    handle = model.get_input_embeddings().register_forward_pre_hook(hold)
    try:
        yield entered
    finally:
        may_run.set()
        handle.remove()


def test_connections_are_counted_and_those_that_ask_for_nothing_give_way(model):
    """Whoever holds all of them and sends nothing, or bodies that do not end, keeps nobody out."""
    server = Running(model, limits(connections=ConnectionLimits(connections=3, header_seconds=PATIENCE)))
    idle = [connect(server), sent(server, b"POST /v1/comp"), sent(server, request(b"{", length=100))]
    until(lambda: held_connections(server) == 2)
    with held_forwards(model) as entered:
        asked = [sent(server, asking(max_tokens=1))]
        assert rest(idle[0]) == b"" and entered.wait(PATIENCE)  # the one that had waited longest gave way
        asked += [sent(server, asking(max_tokens=1)) for _ in range(2)]
        assert rest(idle[1]) == rest(idle[2]) == b""
        refused = rest(connect(server))
        assert b" 503 " in refused and b"too many connections" in refused
    assert all(b" 200 " in rest(link) for link in asked)
    assert server.stop()


def test_bodies_are_counted_together(model):
    server = Running(model, limits(all_body_bytes=1000))
    assert server.ask(max_tokens=1).status_code == 200
    halves = []

    def is_full() -> bool:
        # a half that comes while the body before it is still counted is itself refused: then another one is sent
        halves.append(sent(server, request(b"{" * 980, length=1000)))
        return server.ask(max_tokens=1).status_code == 503

    until(is_full)
    for half in halves:
        half.close()
    until(lambda: server.ask(max_tokens=1).status_code == 200)
    assert server.stop()


def test_a_body_is_forgotten_before_its_answer_is_whole_and_a_small_one_is_never_one_too_many():
    """A client's next body may be here while the application still tidies up behind the answer."""
    counted, answered, tidies_up = [], asyncio.Event(), [True]

    async def app(scope, receive, send):
        while (await receive())["more_body"]:
            pass
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        await send({"type": "http.response.body", "body": b"b"})
        if tidies_up:
            await asyncio.Event().wait()

    async def body_of(size):
        parts = iter([{"body": b"x" * size, "more_body": True}, {"body": b"", "more_body": False}])

        async def receive():
            return next(parts)

        await whole({"type": "http", "headers": []}, receive, send)

    async def send(message):
        counted.append(whole.kept)
        if message.get("body") == b"b":
            answered.set()

    async def requests():
        first = asyncio.create_task(body_of(60))
        await answered.wait()
        assert counted == [60, 60, 0]
        first.cancel()
        await asyncio.wait([first])
        assert whole.kept == 0
        tidies_up.clear()
        whole.kept = 100  # of others
        with pytest.raises(HTTPException, match="as much as it can keep"):
            await body_of(11)
        await body_of(10)
        assert whole.kept == 100

    whole = WholeBody(app, most=100, most_kept=100, always=10, seconds=PATIENCE)
    asyncio.run(requests())


def test_a_client_that_leaves_the_queue_makes_room_at_once(model):
    server = Running(model, limits(waiting=1))
    expected = server.ask(max_tokens=2).json()["choices"][0]["text"]
    with held_forwards(model) as entered:
        first = sent(server, asking(max_tokens=2))
        assert entered.wait(PATIENCE)
        for options in ({}, {"stream": True}):
            leaving = sent(server, asking(max_tokens=2, **options))
            until(lambda: waiting(server) == 1)
            assert server.ask().status_code == 429
            leaving.close()
            until(lambda: waiting(server) == 0)
        last = sent(server, asking(max_tokens=2))
        until(lambda: waiting(server) == 1)
    assert all(json.dumps(expected).encode() in rest(link) for link in (first, last))
    assert server.stop()


# --- any clients at once ---------------------------------------------------------------------------------------------


def cut(server, draw):
    """A request of which a part is missing, and which waits for it."""
    data = asking()
    return sent(server, data[: draw.randrange(len(data))])


def changed(server, draw):
    """A request with bytes that are not what they were; answered, and not with an error of the server's."""
    data = bytearray(asking(max_tokens=2))
    for _ in range(draw.randrange(1, 6)):
        data[draw.randrange(len(data))] = draw.randrange(256)
    link = sent(server, bytes(data))
    link.shutdown(socket.SHUT_WR)
    assert b" 500 " not in rest(link)


def odd_body(server, draw):
    bodies = (b"", b"[" * 60_000, b'{"a":' * 10_000, b"1" * 5000, b"\xff" * 99, b"null", b'{"model": NaN}')
    link = sent(server, request(draw.choice(bodies)))
    answer = rest(link)
    assert b" 400 " in answer and b'"error"' in answer


def noise(server, draw):
    link = sent(server, draw.randbytes(draw.randrange(1, 9000)))
    link.shutdown(socket.SHUT_WR)
    rest(link)


def huge(server, draw):
    link = sent(server, request(b"x" * (1 << 20), length=draw.choice((1 << 21, 1 << 60))))
    return link


def large_prompt(server, draw):
    assert b" 4" in rest(sent(server, asking("a" * draw.randrange(3000, 1 << 20))))[:16]


def gone(server, draw):
    """Leaves at any time: before, while, or after it is answered; sometimes as if its machine had died."""
    link = sent(server, asking(max_tokens=30, stream=draw.random() < 0.5))
    link.settimeout(draw.choice((0.001, 0.05)))
    try:
        link.recv(draw.randrange(1, 500))
    except TimeoutError:
        pass
    if draw.random() < 0.5:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    link.close()


def unread(server, draw):
    return sent(server, asking(max_tokens=5, stream=True))


def many_texts(server, draw):
    """Leaves in the middle of a stream of several texts behind each of several prompts."""
    link = sent(server, asking(PROMPTS, n=draw.randrange(1, 4), max_tokens=20, logprobs=2, echo=True, stream=True))
    link.recv(draw.randrange(1, 5000))
    link.close()


ODD = (cut, changed, odd_body, noise, huge, large_prompt, gone, unread, many_texts)


@pytest.fixture(scope="module")
def alone(running):
    """What every honest client is answered when nobody else is there."""
    return {prompt: running.ask(prompt, max_tokens=3).json()["choices"][0]["text"] for prompt in PROMPTS}


@settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(ODD), min_size=1, max_size=8), st.integers(0, 2**32))
def test_honest_texts_stay_right_beside_any_clients(running, alone, clients, seed):
    with ThreadPoolExecutor(len(clients) + 4) as pool:
        odd = [pool.submit(client, running, random.Random(seed + i)) for i, client in enumerate(clients)]
        whole = [pool.submit(running.ask, prompt, max_tokens=3) for prompt in PROMPTS[:2]]
        streamed = [pool.submit(running.stream, prompt, max_tokens=3) for prompt in PROMPTS[2:]]
        texts = [answer.result().json()["choices"][0]["text"] for answer in whole]
        texts += [answer.result()[0] for answer in streamed]
        links = [link for client in odd if (link := client.result()) is not None]
    assert texts == list(alone.values())
    for link in links:
        link.close()
    until(lambda: waiting(running) == 0)
    until(running.is_idle)
    until(lambda: not running.cache.index.root.pins)
