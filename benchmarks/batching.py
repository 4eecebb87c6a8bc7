"""Many requests at once beside one after another, and beside the forwards that they need.

    python benchmarks/batching.py [--requests 256] [--running 64] [--prompts 200 4000] [--answers 64 512] [--out FILE]

On a GPU a slice of Kimi-Linear's width in bfloat16 (`benchmarks/generate.py`), on a CPU the small checkpoint in
float32. All requests are there from the start. `share`: the forwards of the run, run again alone (the same sequences,
counts and lengths), over the time that the run took. `one after another`: `generate` of every request, as it comes,
over the same. Seconds to the first token are counted from the step in which a request gets its slot.
"""

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from generate import KIMI_LINEAR, build
from host_facts import host_facts

import kimi_k3
from kimi_k3.serving.batch import Batch, next_logits
from kimi_k3.serving.batching import BatchEngine
from kimi_k3.serving.sampling import Sampler, Sampling
from kimi_k3.serving.scheduler import Request

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "batching.jsonl"


class Recorded(BatchEngine):
    """An engine that notes what each of its forwards fed, and to how long texts."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.forwards: list[list[tuple[int, int]]] = []  # (tokens before, new tokens) of every request

    def _run(self, group):
        self.forwards.append([(request.fed, count) for request, count in group])
        super()._run(group)


def synchronize(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def many(model, prompts, answers, running: int):
    """Seconds of the run, its forwards, and of every request the seconds to its first token behind a free slot."""
    engine = Recorded(model, sequences=running, tokens=running * (max(map(len, prompts)) + max(answers) + 64))
    begun: dict[int, float] = {}
    waits, ended = [], []
    enter = engine.prefixes.enter

    def entered(request):
        begun.setdefault(request.number, time.perf_counter())
        enter(request)

    engine.prefixes.enter = entered
    start = synchronize(model.device)
    for prompt, new in zip(prompts, answers, strict=True):
        request = Request(prompt, new, Sampler(Sampling(temperature=0), prompt, frozenset()))

        def take(choice, request=request):
            if len(request.new) == 1:
                waits.append(time.perf_counter() - begun[request.number])

        request.take = take
        request.done = ended.append
        engine.submit(request)
    while engine.requests:
        engine.step()
    if wrong := [request.error for request in ended if request.error is not None]:
        raise wrong[0]
    return synchronize(model.device) - start, engine, waits


def alone(model, engine) -> float:
    """Seconds of the same forwards without an engine around them."""
    pool, total, draw = engine.pool, 0.0, random.Random(1)
    for group in engine.forwards:
        sequences = [pool.open() for _ in group]
        for sequence, (fed, count) in zip(sequences, group, strict=True):
            pool.grow(sequence, fed + count)
            sequence.length = fed
        counts = [count for _, count in group]
        tokens = [[draw.randrange(3, 1000) for _ in range(count)] for count in counts]  # other experts for each
        batch = Batch(pool, sequences, counts)
        start = synchronize(model.device)
        next_logits(model, tokens, batch)
        total += synchronize(model.device) - start
        for sequence in sequences:
            pool.close(sequence)
    return total


def one_after_another(model, prompts, answers) -> float:
    start = synchronize(model.device)
    for prompt, new in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt], device=model.device)
        model.generate(ids, max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)
    return synchronize(model.device) - start


def write(file: Path, line: dict) -> None:
    print(line, flush=True)
    with file.open("a") as lines:
        lines.write(json.dumps(line) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--running", type=int, default=64)
    parser.add_argument("--prompts", type=int, nargs=2, default=(200, 4000), help="tokens, from and to")
    parser.add_argument("--answers", type=int, nargs=2, default=(64, 512), help="tokens, from and to")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if torch.cuda.is_available():
        name, gpu = "kimi_linear slice", torch.cuda.get_device_name()
        model = build(kimi_k3.KimiK3ForCausalLM, kimi_k3.KimiK3TextConfig(**KIMI_LINEAR))
    else:
        name, gpu = "small checkpoint", None
        model = kimi_k3.KimiK3ForCausalLM.from_pretrained(ROOT / "checkpoints" / "small", dtype=torch.float32)
    draw = random.Random(0)
    prompts = [
        [draw.randrange(3, 1000) for _ in range(draw.randint(*options.prompts))] for _ in range(options.requests)
    ]
    answers = [draw.randint(*options.answers) for _ in prompts]
    many(model, prompts[:2], answers[:2], options.running)  # compiles
    taken, engine, waits = many(model, prompts, answers, options.running)
    share = alone(model, engine) / taken
    sequential = one_after_another(model, prompts, answers)
    facts = host_facts(gpu)
    case = f"{name}, {options.requests} requests, {options.running} at a time"
    new = sum(answers)
    write(options.out, {
        "case": case, "ours_ms": round(taken * 1e3, 1),
        "peer": "one after another", "peer_ms": round(sequential * 1e3, 1),
        "roofline_ms": None, "new_tokens_per_s": round(new / taken), "prompt_tokens": sum(map(len, prompts)),
        "steps": engine.steps, **facts,
    })  # fmt: skip
    percentile = statistics.quantiles(waits, n=100) if len(waits) > 1 else waits * 99
    for value, unit, words in (
        (round(share, 3), "share", "its forwards alone over the time taken"),
        (round(sequential / taken, 2), "x", "one after another over it"),
        (round(percentile[49] * 1e3), "ms", "to the first token, p50"),
        (round(percentile[98] * 1e3), "ms", "to the first token, p99"),
    ):
        write(options.out, {"case": f"{case}: {words}", "value": value, "unit": unit, **facts})


if __name__ == "__main__":
    main()
