"""A completions server in a thread, and a client of it."""

import json
import socket
import threading
from pathlib import Path

import httpx
import uvicorn
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoTokenizer

from kimi_k3.serving.connections import uvicorn_options
from kimi_k3.serving.prefix_cache import PrefixCache
from kimi_k3.serving.server import Limits, build_app
from kimi_k3.serving.stopping import CompletionServer
from waiting import PATIENCE, until

SMALL = Path(__file__).parents[1] / "checkpoints" / "small"
PROMPT = "The old house stood"


def limits(**changes):
    return Limits(**{"prompt_tokens": 600, "new_tokens": 200, "seconds": PATIENCE, "stop_seconds": PATIENCE, **changes})


class Running:
    """A server on a free port, in a thread."""

    def __init__(self, model, limits, tokenizer=None, **cache_options):
        self.model, self.tokenizer = model, tokenizer or AutoTokenizer.from_pretrained(SMALL)
        self.cache = PrefixCache(model, 1 << 28, block=16, every=512, **cache_options)
        app = build_app(self.cache, self.tokenizer, "small", limits)
        options = uvicorn.Config(app, **uvicorn_options(limits.connections))
        self.server = CompletionServer(options, app.state.engine, limits.stop_seconds)
        self.socket = socket.socket()
        self.socket.bind(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]}, daemon=True)
        self.thread.start()
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=PATIENCE)
        until(lambda: self.server.started)

    def ask(self, prompt=PROMPT, **fields):
        return self.client.post(
            "/v1/completions", json={"model": "small", "prompt": prompt, "temperature": 0, **fields}
        )

    def stream(self, prompt=PROMPT, **fields):
        """(text, all events) of a streamed answer."""
        body = {"model": "small", "prompt": prompt, "temperature": 0, "stream": True, **fields}
        with self.client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, response.read()
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert lines.pop() == "[DONE]"
        events = [json.loads(line) for line in lines]
        return "".join(c["text"] for event in events for c in event.get("choices", ())), events

    def metric(self, name, **labels):
        families = text_string_to_metric_families(self.client.get("/metrics").text)
        return sum(s.value for family in families for s in family.samples if s.name == name
                   and labels.items() <= s.labels.items())  # fmt: skip

    def stop(self):
        self.client.close()
        self.server.should_exit = True
        self.thread.join(PATIENCE)
        self.socket.close()
        return not self.thread.is_alive()
