"""Ctrl-C and SIGTERM end `kimi-k3 serve` with a line and an exit code: real processes and real signals."""

import functools
import http.client
import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

from byte_model import save_checkpoint
from kimi_k3 import __main__ as cli
from kimi_k3.serving import batching, engine, server, stopping
from waiting import run_script, until

pytestmark = [pytest.mark.one_release, pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")]


class Process:
    """`kimi-k3 serve` in a process whose steps wait for `before_a_step`, with half a second for a stop."""

    def __init__(self, folder: Path, name: str, before_a_step):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.log = folder / f"{name}.log"
        self.stepping, told = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            self._serve(folder, told, before_a_step)
        until(lambda: self._answers("/health"))

    def _serve(self, folder, told, before_a_step):
        for number in (1, 2):
            os.dup2(os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        forward = batching.BatchEngine._logits

        @functools.wraps(forward)
        def step(*args, **options):
            os.write(told, b".")
            before_a_step()
            return forward(*args, **options)

        batching.BatchEngine._logits = step
        server.Limits = functools.partial(server.Limits, stop_seconds=0.5)
        stopping.ANSWERS = engine.LAST_STEP = 0.5
        command = ["serve", str(folder / "model"), "--port", str(self.port), "--device", "cpu"]
        os._exit(cli.main(command))

    def _answers(self, path):
        try:
            link = http.client.HTTPConnection("127.0.0.1", self.port)
            link.request("GET", path)
            return link.getresponse().status == 200
        except OSError:
            return False

    def ask(self, **fields) -> http.client.HTTPConnection:
        link = http.client.HTTPConnection("127.0.0.1", self.port)
        body = {"model": "model", "prompt": "a", "max_tokens": 600, "temperature": 0, **fields}
        link.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        return link

    def signal(self, number):
        os.kill(self.pid, number)

    def end(self) -> dict:
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        lines = [line for line in self.log.read_text().splitlines() if line]
        begin = next(i for i, line in enumerate(lines) if line.startswith("model 'model' at http://127.0.0.1:"))
        return {"code": code, "lines": lines[begin + 1 :]}


def nobody_asks(folder):
    idle = Process(folder, "idle", int)
    idle.signal(signal.SIGTERM)
    return idle.end()


def more_than_the_time_left(folder):
    """Two requests, one of them waiting, and half of a third."""
    busy = Process(folder, "busy", functools.partial(time.sleep, 0.05))
    asked = [busy.ask(), busy.ask(stream=True)]
    streamed = asked[1].getresponse()
    half = socket.create_connection(("127.0.0.1", busy.port))
    half.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 100\r\n\r\n{")
    os.read(busy.stepping, 1)
    busy.signal(signal.SIGINT)
    answers = [asked[0].getresponse(), streamed]
    told = [(answer.status, answer.read().decode()) for answer in answers]
    try:
        left = half.recv(1)
    except ConnectionError:
        left = b""
    return {**busy.end(), "told": told, "left": left.decode()}


def a_step_that_does_not_end(folder, second=False):
    stuck = Process(folder, f"stuck{second}", threading.Event().wait)
    link = stuck.ask()
    os.read(stuck.stepping, 1)
    stuck.signal(signal.SIGINT)
    if second:
        until(lambda: "second Ctrl-C" in stuck.log.read_text())
        stuck.signal(signal.SIGINT)
    ended = stuck.end()
    link.close()
    return ended


def a_second_signal(folder):
    return a_step_that_does_not_end(folder, second=True)


if __name__ == "__main__":
    work = Path(sys.argv[1])
    scenarios = nobody_asks, more_than_the_time_left, a_step_that_does_not_end, a_second_signal
    print(json.dumps([scenario(work) for scenario in scenarios]))
    sys.exit()


def test_a_stop_is_a_line_and_an_exit_code(tmp_path):
    save_checkpoint(tmp_path / "model", num_experts=None)
    ran = run_script(__file__, tmp_path, capture_output=True, text=True, check=True)
    idle, busy, stuck, twice = json.loads(ran.stdout.splitlines()[-1])
    # the request by which the test saw that it runs may be under way still
    assert idle["code"] == 143 and idle["lines"][-1] == "kimi-k3 serve: interrupted; every request was answered"
    assert "Traceback" not in str(idle)

    notice = "kimi-k3 serve: requests under way have 0.5 seconds; a second Ctrl-C ends the server at once"
    late = "kimi-k3 serve: interrupted; requests that were not answered within 0.5 seconds, and broken off:"
    # the half may not have come yet
    assert busy["code"] == 130 and busy["lines"] in ([notice, f"{late} 2"], [notice, f"{late} 3"]), busy
    (whole, sentence), (streamed, events) = busy["told"]
    assert (whole, streamed) == (503, 200)
    assert "is shutting down" in sentence and "is shutting down" in events
    assert events.endswith("data: [DONE]\n\n") and busy["left"] == ""

    assert stuck == {"code": 130, "lines": [notice, f"{late} 1"]}
    unanswered = "kimi-k3 serve: interrupted; requests under way were not answered"
    assert twice == {"code": 130, "lines": [notice, unanswered]}
