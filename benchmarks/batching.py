"""Many requests at once beside one after another, beside the forwards that they need, and beside a peer.

    python benchmarks/batching.py [--requests 256] [--running 64] [--prompts 200 4000] [--answers 64 512] [--out FILE]

On a GPU a slice of Kimi-Linear's width in bfloat16 (`benchmarks/generate.py`), on a CPU the small checkpoint in
float32. All requests are there from the start. `share`: the forwards of the run, run again alone (the same sequences,
counts and lengths, steps by their graphs), over the time that the run took. `one after another`: `generate` of every
fourth request, over their share of the new tokens, over the same. Time to the first token: requests that come at
random, 80 % as many a second as the run ended, counted from when each comes. A dry step is one that found the device
with nothing left to do.

The peer is transformers' continuous batching of a dense Llama of the same width, depth and dtype, with the same
requests, as many at a time and as many tokens a step: its share is the time of its forwards, from a run that waits for
each, over that of a run that does not.
"""

import argparse
import json
import random
import statistics
import sys
import threading
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from generate import KIMI_LINEAR, build
from host_facts import host_facts
from transformers import ContinuousBatchingConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation.continuous_batching import continuous_api

import kimi_k3
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


def engine_of(model, prompts, answers, running: int, step_tokens: int) -> Recorded:
    tokens = running * (max(map(len, prompts)) + max(answers) + 64)
    return Recorded(model, sequences=running, tokens=tokens, step_tokens=step_tokens, chunk=step_tokens, waiting=None)


def request_of(prompt, new: int, **options) -> Request:
    return Request(prompt, new, Sampler(Sampling(temperature=0), prompt, frozenset()), **options)


def many(engine, prompts, answers) -> float:
    """Seconds in which an engine answers them all."""
    ended, engine.forwards = [], []
    start = synchronize(engine.model.device)
    for prompt, new in zip(prompts, answers, strict=True):
        engine.submit(request_of(prompt, new, done=ended.append))
    while engine.requests:
        engine.step()
    taken = synchronize(engine.model.device) - start
    if wrong := [request.error for request in ended if request.error is not None]:
        raise wrong[0]
    return taken


def alone(engine) -> float:
    """Seconds of the same forwards without an engine around them."""
    model, pool, total, draw = engine.model, engine.pool, 0.0, random.Random(1)
    for group in engine.forwards:
        sequences = [pool.open() for _ in group]
        for sequence, (fed, count) in zip(sequences, group, strict=True):
            pool.grow(sequence, fed + count)
            sequence.length = fed
        counts = [count for _, count in group]
        tokens = [[draw.randrange(3, 1000) for _ in range(count)] for count in counts]  # other experts for each
        start = synchronize(model.device)
        if max(counts) == 1:
            engine._forwards.step(sequences, [token for [token] in tokens])
        else:
            engine._forwards.prefill(sequences, tokens)
        total += synchronize(model.device) - start
        for sequence in sequences:
            pool.close(sequence)
    return total


def waits_at(engine, rate: float, prompts, answers) -> list[float]:
    """Seconds to the first token of requests that come at random, so many a second."""
    draw, waits, ended, all_told = random.Random(2), [], [], threading.Event()
    engine.start()
    for prompt, new in zip(prompts, answers, strict=True):
        time.sleep(draw.expovariate(rate))
        request, come = request_of(prompt, new), time.perf_counter()

        def take(choice, request=request, come=come):
            if len(request.new) == 1:
                waits.append(time.perf_counter() - come)

        def done(request):
            ended.append(request)
            if len(ended) == len(prompts):
                all_told.set()

        request.take, request.done = take, done
        engine.submit(request)
    all_told.wait()
    engine.stop()
    return waits


def peer_of(width: int, layers: int, heads: int, inner: int, vocabulary: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads, head_dim=128,
    )  # fmt: skip
    return build(LlamaForCausalLM, config)


def peer_seconds(model, prompts, answers, running: int, step_tokens: int, waits: bool) -> tuple[float, float]:
    """Seconds in which transformers' manager answers them all, and, if it `waits` for each, of its forwards."""
    config = ContinuousBatchingConfig(max_requests_per_batch=running, max_batch_tokens=step_tokens)
    if waits:
        config.use_async_batching = False
    forward, seconds = continuous_api.ContinuousBatchProcessor._generation_step, [0.0]

    def waited(self, model):
        start = synchronize(model.device)
        forward(self, model)
        seconds[0] += synchronize(model.device) - start

    generation = model.generation_config
    generation.do_sample, generation.eos_token_id, generation.pad_token_id = False, None, 0
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=config, block=True, timeout=5
    ) as manager:
        if waits:
            continuous_api.ContinuousBatchProcessor._generation_step = waited
        try:
            start = synchronize(model.device)
            for prompt, new in zip(prompts, answers, strict=True):
                manager.add_request(prompt, max_new_tokens=new, eos_token_id=-1)
            told = 0
            while told < len(prompts):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    if result.error is not None:
                        raise RuntimeError(result.error)
                    told += 1
                elif result is None and not manager.is_running():
                    raise RuntimeError("the peer's thread has ended")
            return synchronize(model.device) - start, seconds[0]
        finally:
            continuous_api.ContinuousBatchProcessor._generation_step = forward


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


def peer_share(options, prompts, answers) -> tuple[float, float]:
    """Seconds that the peer took, and its share."""
    sizes = (KIMI_LINEAR[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    model = peer_of(*sizes, KIMI_LINEAR["intermediate_size"], KIMI_LINEAR["vocab_size"])
    arguments = model, prompts, answers, options.running, options.step_tokens
    peer_seconds(model, prompts[:8], [8] * 8, options.running, options.step_tokens, False)
    _, forwards = peer_seconds(*arguments, True)
    taken, _ = peer_seconds(*arguments, False)
    return taken, forwards / taken


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--running", type=int, default=64)
    parser.add_argument("--step-tokens", type=int, default=8192, help="fed in one step at most")
    parser.add_argument("--prompts", type=int, nargs=2, default=(200, 4000), help="tokens, from and to")
    parser.add_argument("--answers", type=int, nargs=2, default=(64, 512), help="tokens, from and to")
    parser.add_argument("--cut-prefills", action="store_true", help="captured prefills too")
    parser.add_argument("--no-peer", action="store_true", help="time this package alone")
    parser.add_argument("--every", type=int, default=4, help="time one request in so many alone; 0: none")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if torch.cuda.is_available():
        name, gpu = "kimi_linear slice", torch.cuda.get_device_name()
        model = build(kimi_k3.KimiK3ForCausalLM, kimi_k3.KimiK3TextConfig.from_dict(dict(KIMI_LINEAR)))
    else:
        name, gpu, options.no_peer = "small checkpoint", None, True
        model = kimi_k3.KimiK3ForCausalLM.from_pretrained(ROOT / "checkpoints" / "small", dtype=torch.float32)
    draw = random.Random(0)
    prompts = [
        [draw.randrange(3, 1000) for _ in range(draw.randint(*options.prompts))] for _ in range(options.requests)
    ]
    answers = [draw.randint(*options.answers) for _ in prompts]
    facts = host_facts(gpu)
    case = f"{name}, {options.requests} requests, {options.running} at a time"
    case += ", cut prefills" if options.cut_prefills else ""

    def tell(words: str, value: float, unit: str) -> None:
        write(options.out, {"case": f"{case}: {words}", "value": value, "unit": unit, **facts})

    engine = engine_of(model, prompts, answers, options.running, options.step_tokens)
    engine._forwards.cuts_prefills = options.cut_prefills
    many(engine, prompts, answers)  # compiles, and captures every size
    engine.steps = engine.dry_steps = 0
    taken = many(engine, prompts, answers)
    facts_of_run = {
        "case": case, "ours_ms": round(taken * 1e3, 1), "roofline_ms": None,
        "new_tokens_per_s": round(sum(answers) / taken), "prompt_tokens": sum(map(len, prompts)),
        "steps": engine.steps, "dry_steps": engine.dry_steps, "peer": None, "peer_ms": None, **facts,
    }  # fmt: skip
    tell("steps whose host time is hidden", round(1 - engine.dry_steps / engine.steps, 3), "share")
    forwards = alone(engine)
    tell("its forwards alone over the time taken", round(forwards / taken, 3), "share")
    waits = waits_at(engine, 0.8 * len(prompts) / taken, prompts, answers)
    percentile = statistics.quantiles(waits, n=100) if len(waits) > 1 else waits * 99
    tell("to the first token at 80 % of this load, p50", round(percentile[49] * 1e3), "ms")
    tell("to the first token at 80 % of this load, p99", round(percentile[98] * 1e3), "ms")
    if every := options.every:
        share = sum(answers[::every]) / sum(answers)
        sequential = one_after_another(model, prompts[::every], answers[::every]) / share
        facts_of_run |= {"peer": "one after another", "peer_ms": round(sequential * 1e3, 1)}
        tell("one after another over it", round(sequential / taken, 2), "x")
    write(options.out, facts_of_run)
    if not options.no_peer:
        del engine, model
        torch.cuda.empty_cache()
        theirs, share = peer_share(options, prompts, answers)
        tell("peer's forwards alone over the time that it took", round(share, 3), "share")
        tell("peer's time", round(theirs * 1e3, 1), "ms")


if __name__ == "__main__":
    main()
