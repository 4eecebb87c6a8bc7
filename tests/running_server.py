"""A server of completions and chats in a thread, and a client of it."""

import json
import socket
import threading
from pathlib import Path

import httpx
import uvicorn
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoTokenizer

from kimi_k3.serving.batching import BatchEngine
from kimi_k3.serving.connections import uvicorn_options
from kimi_k3.serving.prefix_cache import PrefixCache
from kimi_k3.serving.server import Limits, build_app
from kimi_k3.serving.stopping import CompletionServer
from waiting import PATIENCE, until

SMALL = Path(__file__).parents[1] / "checkpoints" / "small"
PROMPT = "The old house stood"
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'robot' %}{{ raise_exception('no role ' + message.role) }}{% endif %}"
    "<{{ message.role }}> {{ message.content }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)  # fmt: skip
TALK = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Who lives in the house?"}]


def chat_tokenizer():
    """Of the small checkpoint, with a template for chats."""
    tokenizer = AutoTokenizer.from_pretrained(SMALL)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def limits(**changes):
    return Limits(**{"prompt_tokens": 600, "new_tokens": 200, "seconds": PATIENCE, "stop_seconds": PATIENCE, **changes})


class Running:
    """A server on a free port, in a thread.

    Args:
        batch: options of its `BatchEngine`.
        cache_options: of its `PrefixCache`.
    """

    def __init__(self, model, limits, tokenizer=None, api_key=None, batch=None, **cache_options):
        self.model, self.tokenizer = model, tokenizer or AutoTokenizer.from_pretrained(SMALL)
        self.cache = PrefixCache(model, 1 << 28, block=16, every=512, **cache_options)
        self.batches = BatchEngine(model, prefix_cache=self.cache, **(batch or {}))
        app = build_app(self.batches, self.tokenizer, "small", limits, api_key)
        options = uvicorn.Config(app, **uvicorn_options(limits.connections))
        self.server = CompletionServer(options, app.state.engine, limits.stop_seconds)
        self.socket = socket.socket()
        self.socket.bind(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]}, daemon=True)
        self.thread.start()
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}".encode()}
        self.client = httpx.Client(base_url=self.address, timeout=PATIENCE, headers=headers)
        until(lambda: self.server.started)

    def ask(self, prompt=PROMPT, **fields):
        return self.client.post(
            "/v1/completions", json={"model": "small", "prompt": prompt, "temperature": 0, **fields}
        )

    def chat(self, messages, **fields):
        body = json.dumps({"model": "small", "messages": messages, "temperature": 0, **fields})
        headers = {"content-type": "application/json"}
        return self.client.post("/v1/chat/completions", content=body, headers=headers)

    def stream(self, prompt=PROMPT, **fields):
        """(text, all events) of a streamed answer."""
        events = self.events("/v1/completions", prompt=prompt, **fields)
        return "".join(c["text"] for event in events for c in event.get("choices", ())), events

    def events(self, path, **fields):
        body = {"model": "small", "temperature": 0, "stream": True, **fields}
        with self.client.stream("POST", path, json=body) as response:
            assert response.status_code == 200, response.read()
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]

    def metric(self, name, **labels):
        families = text_string_to_metric_families(self.client.get("/metrics").text)
        return sum(s.value for family in families for s in family.samples if s.name == name
                   and labels.items() <= s.labels.items())  # fmt: skip

    def is_idle(self):
        """Nothing runs or waits, and all slots and pages are given back."""
        pool = self.batches.pool
        return not self.batches.requests and (pool.free_slots, pool.free_pages) == (pool.sequences, pool.pages)

    def stop(self):
        self.client.close()
        self.server.should_exit = True
        self.thread.join(PATIENCE)
        self.socket.close()
        return not self.thread.is_alive()
