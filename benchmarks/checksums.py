"""What checksums cost: a training run and a second turn, with them and without, on the small checkpoint in float32.

    python benchmarks/checksums.py [--only training] [--threads 1] [--rounds 7]

Runs with and without alternate in this process; without, SHA-256 reads nothing and says the same of everything. Where
it does read, its bytes and its seconds are counted, and their share of that run is told: a difference of two runs is
known far less exactly. Absolute times depend on the machine; where others use it too, read the time of the processor.

* `training`: a run as `kimi-k3 train` does it, from the data to the saved model, rows of 1,024 tokens, one a step.
* `turn`: 64 tokens behind `--tokens`, up to the first new one. What was read before lies in memory or on the disk of a
  `PrefixCache`, or in the file of a `HybridCache`, whose loading is a part of the turn.

Lines are appended to benchmarks/results/checksums.jsonl.
"""

import argparse
import hashlib
import json
import statistics
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).parent))

from host_facts import host_facts

from kimi_k3 import CACHE_ARGUMENT, HybridCache, KimiK3ForCausalLM, files_kimi_k3
from kimi_k3.serving.prefix_cache import PrefixCache
from kimi_k3.training.text_run import TextRun, TextTraining

ROOT = Path(__file__).parent.parent
SMALL = ROOT / "checkpoints" / "small"
RESULTS = ROOT / "benchmarks" / "results" / "checksums.jsonl"
CONTEXT, ADDED = 1024, 64
BYTES = 1 << 30  # of a prefix cache
# Runs once inside of the clocks that it is given; the folder is that of all runs with checksums, or of all without.
Case = Callable[["Clocks", Path], None]


class Clocks:
    """Seconds of a run, and of SHA-256 in it."""

    def __init__(self):
        self.seconds = self.cpu_seconds = self.sum_seconds = 0.0
        self.sum_bytes = 0
        self._lock = threading.Lock()

    @contextmanager
    def running(self) -> Iterator[None]:
        self.sum_seconds, self.sum_bytes = 0.0, 0
        started = time.perf_counter(), time.process_time()
        yield
        self.seconds, self.cpu_seconds = time.perf_counter() - started[0], time.process_time() - started[1]

    def add(self, started: float, data) -> None:
        with self._lock:
            self.sum_seconds += time.perf_counter() - started
            self.sum_bytes += memoryview(data).nbytes


@contextmanager
def checksums(are_made: bool, clocks: Clocks) -> Iterator[None]:
    """Everything of the package that has a checksum gets it in `files_kimi_k3.py`."""

    class Counted:
        def __init__(self, data=b""):
            self._hash = hashlib.sha256()
            self.digest, self.hexdigest = self._hash.digest, self._hash.hexdigest
            self.update(data)

        def update(self, data):
            if are_made:
                started = time.perf_counter()
                self._hash.update(data)
                clocks.add(started, data)

    files_kimi_k3.hashlib = types.SimpleNamespace(sha256=Counted)
    try:
        yield
    finally:
        files_kimi_k3.hashlib = hashlib


def training_case(steps: int, save_every: int) -> Case:
    model = KimiK3ForCausalLM.from_pretrained(SMALL, dtype=torch.float32, dequantize=True)
    tokenizer = AutoTokenizer.from_pretrained(SMALL)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    run = TextRun([str(SMALL / "sample.txt")], steps, CONTEXT, rows=1, rate=1e-3, seed=0, split_long=True)

    def once(clocks, folder):
        model.load_state_dict(weights)
        with tempfile.TemporaryDirectory(dir=folder) as place, clocks.running():
            TextTraining(model, tokenizer, run, Path(place), save_every).train()

    return once


def turn_cases(tokens: int) -> dict[str, Case]:
    """A second turn, by where the first one lies."""
    model = KimiK3ForCausalLM.from_pretrained(SMALL, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)

    def ids(count):
        return torch.randint(3, model.config.vocab_size, (1, count), generator=generator)

    first, saved = ids(tokens), HybridCache(model.config)
    with torch.no_grad():
        model(first, logits_to_keep=1, **{CACHE_ARGUMENT: saved})
    kept = PrefixCache(model, BYTES)
    kept.forward(first)

    def turn(clocks, cache):
        text = torch.cat([first, ids(ADDED)], dim=1)
        with clocks.running():
            logits, done = cache.forward(text)
            logits[0, -1].argmax().item()
        assert done.hit >= tokens - 1

    def from_memory(clocks, folder):
        turn(clocks, kept)

    def from_disk(clocks, folder):
        place = folder / "prefixes"
        if not place.exists():
            writing = PrefixCache(model, BYTES, folder=place, disk_bytes=BYTES)
            writing.forward(first)
            writing.close()
        reading = PrefixCache(model, BYTES, folder=place, disk_bytes=BYTES)
        turn(clocks, reading)
        reading.close()

    @torch.no_grad()
    def from_file(clocks, folder):
        saved.save(folder / "saved", model)
        new = ids(ADDED)
        with clocks.running():
            cache = HybridCache.load(folder / "saved", model)
            model(new, logits_to_keep=1, **{CACHE_ARGUMENT: cache}).logits[0, -1].argmax().item()

    return {"prefix in memory": from_memory, "prefix on the disk": from_disk, "saved cache": from_file}


def measured(name: str, run: Case, rounds: int) -> dict:
    """A line of results."""
    clocks = {True: Clocks(), False: Clocks()}
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as with_, tempfile.TemporaryDirectory() as without:
        for number in range(rounds + 1):
            for are_made in (True, False) if number % 2 else (False, True):
                with checksums(are_made, clocks[are_made]):
                    run(clocks[are_made], Path(with_ if are_made else without))
            ours, peer = clocks[True], clocks[False]
            values = {
                "ours_ms": 1e3 * ours.seconds,
                "peer_ms": 1e3 * peer.seconds,
                "cpu_ratio": ours.cpu_seconds / peer.cpu_seconds,
                "sum_bytes": ours.sum_bytes,
                "sum_ms": 1e3 * ours.sum_seconds,
                "sum_share": ours.sum_seconds / ours.seconds,
            }
            for key, value in values.items() if number else ():  # the first round has first-call costs
                found.setdefault(key, []).append(value)
    middle = {key: statistics.median(values) for key, values in found.items()}
    ratios = sorted(found["cpu_ratio"])
    return {
        "case": name,
        "ours_ms": round(middle["ours_ms"], 2),
        "peer": "without checksums",
        "peer_ms": round(middle["peer_ms"], 2),
        "roofline_ms": None,
        **host_facts(),
        "rounds": rounds,
        "cpu_ratio": [round(ratio, 4) for ratio in (ratios[0], middle["cpu_ratio"], ratios[-1])],
        "sum_bytes": round(middle["sum_bytes"]),
        "sum_ms": round(middle["sum_ms"], 3),
        "sum_share": round(middle["sum_share"], 6),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("training", "turn"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3, help="of a training")
    parser.add_argument("--save-every", type=int, default=3, help="steps; the command's default is 100")
    parser.add_argument("--tokens", type=int, default=4096, help="of the first turn")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    cases: dict[str, Case] = {}
    if options.only != "turn":
        about = f"training of {options.steps} steps, saved every {options.save_every}"
        cases[f"small checkpoint, {about}, CPU"] = training_case(options.steps, options.save_every)
    if options.only != "training":
        for place, case in turn_cases(options.tokens).items():
            cases[f"small checkpoint, second turn after {options.tokens:,} tokens, {place}, checksums, CPU"] = case
    for name, case in cases.items():
        line = measured(name, case, options.rounds)
        with RESULTS.open("a") as file:
            file.write(json.dumps(line) + "\n")
        low, middle, high = line["cpu_ratio"]
        speed = f"{line['sum_bytes'] / line['sum_ms'] / 1e6:.2f} GB/s" if line["sum_ms"] else "nothing"
        print(
            f"{name}: {line['ours_ms']:,} ms, without {line['peer_ms']:,}; processor {middle} ({low} to {high}); "
            f"{line['sum_bytes']:,} bytes summed, {line['sum_ms']} ms of it ({line['sum_share']:.3%}), {speed}"
        )


if __name__ == "__main__":
    main()
