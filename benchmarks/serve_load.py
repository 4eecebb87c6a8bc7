"""Many clients of every kind against `kimi-k3 serve` with the small checkpoint.

    python benchmarks/serve_load.py [--clients 64] [--seconds 300]

Starts the server as a process of its own. Clients stream or wait for their texts, ask for one or several behind one or
several prompts, greedy or drawn by a seed, leave in the middle, or send what cannot work. Counted are texts that differ
from those of the same request alone, answers that should not have come, slots and pages that are missing when all is
over, and the growth of the server's memory from the first minute (of a shorter run: from half of it) to the end.
"""

import argparse
import collections
import contextlib
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

SMALL = Path(__file__).parent.parent / "checkpoints" / "small"
PROMPTS = [f"The old house stood {word} the" for word in ("near", "behind", "above", "before", "beside", "beyond")]
ASKED = [
    *({"prompt": prompt, "temperature": 0} for prompt in PROMPTS),
    *({"prompt": prompt, "temperature": 0, "logprobs": 2, "echo": True} for prompt in PROMPTS[:2]),
    {"prompt": PROMPTS[:3], "temperature": 0},
    {"prompt": PROMPTS[0], "n": 3, "seed": 7, "top_p": 0.9},
    {"prompt": " ".join(PROMPTS * 20), "temperature": 0, "frequency_penalty": 0.5},
]
BAD = [
    {"prompt": ""}, {"prompt": [99999]}, {"prompt": "a", "n": 0}, {"prompt": "a", "suffix": "b"}, {},
    {"prompt": "a" * 9999999},
    {"prompt": "a", "max_tokens": 10**9}, {"prompt": "a", "logit_bias": {"x": 1}}, {"prompt": [[1], []]},
]  # fmt: skip
GAUGES = ("running_requests", "waiting_requests", "free_slots", "free_pages")


def resident(process) -> int:
    """Bytes of memory that a process holds (Linux)."""
    return int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def gauges(address) -> list[float]:
    families = text_string_to_metric_families(httpx.get(address + "/metrics", timeout=60).text)
    found = {sample.name: sample.value for family in families for sample in family.samples}
    return [found[f"kimi_k3_{name}"] for name in GAUGES]


def body(asked, stream) -> dict:
    return {"model": "small", "max_tokens": 12, "stream": stream, **asked}


def texts(client, asked, stream) -> list[str]:
    """Of all choices; a RuntimeError for an answer that is none."""
    if not stream:
        response = client.post("/v1/completions", json=body(asked, False))
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code}: {response.text}")
        return [choice["text"] for choice in response.json()["choices"]]
    found = collections.defaultdict(str)
    with client.stream("POST", "/v1/completions", json=body(asked, True)) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code}: {response.read().decode()}")
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise RuntimeError(event["error"]["message"])
                for choice in event["choices"]:
                    found[choice["index"]] += choice["text"]
    return [found[index] for index in sorted(found)]


def leave(client, choose) -> None:
    """Ask, and go away before the answer or in its middle."""
    asked, stream = choose.choice(ASKED), choose.random() < 0.7
    with contextlib.suppress(httpx.TimeoutException):
        if not stream:
            client.post("/v1/completions", json=body(asked, False), timeout=choose.uniform(0.001, 0.5))
            return
        with client.stream("POST", "/v1/completions", json=body(asked, True)) as response:
            for _, _ in zip(range(choose.randrange(4)), response.iter_lines(), strict=False):
                pass


class Load:
    """Clients at work, and what they counted."""

    def __init__(self, address, alone, seconds):
        self.address, self.alone, self.end = address, alone, time.monotonic() + seconds
        self.counts, self.faults, self.lock = collections.Counter(), [], threading.Lock()

    def work(self, seed):
        choose = random.Random(seed)
        while time.monotonic() < self.end:
            with httpx.Client(base_url=self.address, timeout=300) as client:
                for _ in range(20):
                    if time.monotonic() < self.end:
                        self.one(client, choose)

    def one(self, client, choose):
        kind = choose.choices(("texts", "left", "refused"), (0.75, 0.15, 0.1))[0]
        fault = None
        try:
            if kind == "left":
                leave(client, choose)
            elif kind == "refused":
                status = client.post("/v1/completions", json=body(choose.choice(BAD), False)).status_code
                fault = None if status in (400, 413) else f"a request that cannot work was answered {status}"
            else:
                which, stream = choose.randrange(len(ASKED)), choose.random() < 0.6
                found = texts(client, ASKED[which], stream)
                fault = None if found == self.alone[which] else f"{found} instead of {self.alone[which]}"
        except Exception as error:
            fault = f"{kind}: {error!r}"
        with self.lock:
            self.counts[kind] += 1
            if fault is not None:
                self.faults.append(fault)


def run(server, address, clients, seconds) -> bool:
    """Whether nothing was found; prints what was."""
    with httpx.Client(base_url=address, timeout=300) as client:
        alone = [texts(client, asked, False) for asked in ASKED]
    before, begin, memory = gauges(address), time.monotonic(), []
    load = Load(address, alone, seconds)
    threads = [threading.Thread(target=load.work, args=(seed,)) for seed in range(clients)]
    for thread in threads:
        thread.start()
    while (now := time.monotonic()) < load.end:
        memory.append((now - begin, resident(server)))
        time.sleep(1)
    for thread in threads:
        thread.join()
    last = time.monotonic() + 60
    while (after := gauges(address)) != before and time.monotonic() < last:
        time.sleep(0.5)
    middle = min(60, seconds / 2)
    early = statistics.median(size for at, size in memory if middle <= at < middle + 10)
    late = statistics.median(size for at, size in memory if at >= seconds - 10)
    growth, counts = late / early - 1, load.counts
    print(f"{clients} clients, {seconds:g} s: {counts['texts']} requests with right texts or faults, {counts['left']} "
          f"clients that left, {counts['refused']} requests that cannot work")  # fmt: skip
    print(f"{len(load.faults)} faults", *load.faults[:5], sep="\n  ")
    print(
        "in use at the end: "
        + ", ".join(f"{n} {a:g} (before: {b:g})" for n, a, b in zip(GAUGES, after, before, strict=True))
    )
    print(f"memory {early / 1e6:.0f} MB behind {middle:g} s, {late / 1e6:.0f} MB at the end: {100 * growth:+.1f}%")
    return not load.faults and after == before and growth < 0.01


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=300)
    options = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = "import sys; from kimi_k3.__main__ import main; sys.exit(main())"
    command = [sys.executable, "-P", "-c", start, "serve", str(SMALL), "--port", str(port), "--device-bytes", "20M"]
    server = subprocess.Popen([*command, "--device", "cpu", "--dtype", "float32", "--max-running", "32"])
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(1200):
            with contextlib.suppress(httpx.ConnectError):
                httpx.get(address + "/ready")
                break
            time.sleep(0.1)
        is_right = run(server, address, options.clients, options.seconds)
    finally:
        server.send_signal(signal.SIGTERM)
        code = server.wait(60)
    print(f"the server ended with code {code}")
    sys.exit(not is_right)


if __name__ == "__main__":
    main()
