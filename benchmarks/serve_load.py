"""Many streaming clients against `kimi-k3 serve` with the small checkpoint, some of which go away.

    python benchmarks/serve_load.py [--clients 64] [--seconds 120]

Starts the server as a process of its own. Fails if an answer differs from that of the same request alone, if anything
but a 200 comes back, if a request is left behind, or if the server's memory keeps growing.
"""

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx

SMALL = Path(__file__).parent.parent / "checkpoints" / "small"
PROMPTS = [f"The old house stood {word} the" for word in ("near", "behind", "above", "before", "beside", "beyond")]
NEW = 12


def resident(process) -> int:
    """Bytes of memory that a process holds (Linux)."""
    return int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def answer(client, prompt, leave=False):
    """The streamed text; None for a client that leaves after the first event."""
    body = {"model": "small", "prompt": prompt, "temperature": 0, "max_tokens": NEW, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code}: {response.read().decode()}")
        text = ""
        for line in response.iter_lines():
            if leave:
                return None
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise RuntimeError(event["error"]["message"])
                text += event["choices"][0]["text"]
        return text


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=120)
    options = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = "import sys; from kimi_k3.__main__ import main; sys.exit(main())"
    command = [sys.executable, "-P", "-c", start, "serve", str(SMALL), "--port", str(port), "--device-bytes", "20M"]
    server = subprocess.Popen([*command, "--device", "cpu", "--dtype", "float32"])
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                httpx.get(address + "/health")
                break
            except httpx.ConnectError:
                time.sleep(0.1)
        with httpx.Client(base_url=address, timeout=120) as client:
            alone = {prompt: answer(client, prompt) for prompt in PROMPTS}
        counts, failures, memory, lock = {"answers": 0, "left": 0}, [], [], threading.Lock()
        ends = time.monotonic() + options.seconds

        def work(seed):
            choose = random.Random(seed)
            with httpx.Client(base_url=address, timeout=300) as client:
                while time.monotonic() < ends and not failures:
                    prompt, leave = choose.choice(PROMPTS), choose.random() < 0.1
                    try:
                        text = answer(client, prompt, leave)
                        if not leave and text != alone[prompt]:
                            raise RuntimeError(f"{text!r} instead of {alone[prompt]!r}")
                    except Exception as error:
                        failures.append(error)
                    with lock:
                        counts["left" if leave else "answers"] += 1

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(options.clients)]
        for thread in threads:
            thread.start()
        while time.monotonic() < ends:
            time.sleep(options.seconds / 12)
            memory.append(resident(server))
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        time.sleep(1)
        metrics = httpx.get(address + "/metrics").text
        assert "kimi_k3_waiting_requests 0.0" in metrics, metrics
        growth = memory[-1] / memory[len(memory) // 2] - 1
        print(f"{options.clients} clients, {options.seconds:g} s: {counts['answers']} equal answers")
        print(f"{counts['left']} clients left in the middle of one")
        print(f"server memory {memory[len(memory) // 2] / 1e6:.0f} MB half way, {memory[-1] / 1e6:.0f} MB at the end")
        assert growth < 0.02, f"the server's memory grew by {100 * growth:.1f}% in the second half"
    finally:
        server.send_signal(signal.SIGTERM)
        code = server.wait(60)
    print(f"the server ended with code {code}")


if __name__ == "__main__":
    main()
