"""Time to the first token of a second turn, through the prefix cache and without it, on the small checkpoint.

    python benchmarks/prefix_cache.py [--device cuda] [--slice] [--tokens 32768] [--out results.jsonl]

A turn of `--tokens` is answered with 32 new ones; the next turn adds 64 tokens. Cold, all of them run in one
forward. The logits must be those of a cold run that is split where the cache was, to the last bit. Also prints what the
cost model counts for the cold prefill, and the FLOP/s that follow. `--slice` takes four layers of Kimi K3's width
with random bfloat16 weights (`generate.py`) in place of the small checkpoint.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from host_facts import host_facts

from kimi_k3 import CACHE_ARGUMENT, HybridCache, KimiK3ForCausalLM, KimiK3TextConfig
from kimi_k3.costs.formulas import text_cost
from kimi_k3.serving.prefix_cache import PrefixCache

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "prefix_cache.jsonl"
ANSWER, ADDED = 32, 64


def first_token(run, device):
    """(seconds until the host knows the most likely next token, what `run` returned: logits first)."""
    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    results = run()
    results[0][0, -1].argmax().item()
    return time.perf_counter() - started, results


@torch.no_grad()
def cold(model, ids, splits=()):
    """(logits of the last token,) without the prefix cache, in forwards that end at `splits`."""
    cache, start = HybridCache(model.config), 0
    for end in splits or (ids.shape[1],):
        logits = model(ids[:, start:end], logits_to_keep=1, **{CACHE_ARGUMENT: cache}).logits
        start = end
    return (logits,)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--tokens", type=int, default=32768, help="of the first turn")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--slice", action="store_true", help="Kimi K3's width, four layers, random weights")
    parser.add_argument("--out", type=Path, default=RESULTS, help="lines are appended to this file")
    options = parser.parse_args()
    device = options.device
    if options.slice:  # here, because these scripts need Triton
        from generate import K3

        from parallel import random_model

        model, name = random_model(KimiK3TextConfig.from_dict(dict(K3)), None, torch.device(device)), "k3 slice, "
    else:
        name = ""
        model = KimiK3ForCausalLM.from_pretrained(ROOT / "checkpoints" / "small", dtype=torch.float32).to(device).eval()
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(3, 2048, (1, options.tokens), generator=generator).to(device)
    cold(model, prompt[:, :2048])  # first-call costs
    times = {"memory": [], "disk": [], "cold": []}
    with tempfile.TemporaryDirectory() as folder:

        def second_turn(cache):
            """(seconds, token ids, logits, `Prefilled`) of a second turn; the first one has been written."""
            added = torch.randint(3, 2048, (1, ADDED), generator=generator).to(device)
            ids = torch.cat([turn, added], dim=1)
            seconds, (logits, done) = first_token(lambda: cache.forward(ids), device)
            cache.flush()  # files written after the first token must not disturb the next measurement
            return seconds, ids, logits, done

        cache = PrefixCache(model, 4 << 30, folder=folder, disk_bytes=4 << 30)
        turn, _ = cache.generate(prompt, max_new_tokens=ANSWER, do_sample=False)
        cache.flush()
        second_turn(cache)  # first-call costs of a hit
        for _ in range(options.repeats):
            for where in ("memory", "disk"):  # each a different turn: the files of one do not help the other
                kept = cache if where == "memory" else PrefixCache(model, 4 << 30, folder=folder, disk_bytes=4 << 30)
                seconds, ids, logits, done = second_turn(kept)
                times[where].append(seconds)
                assert kept.stats()["hit_tokens"] >= options.tokens
                assert torch.equal(logits[:, -1:], cold(model, ids, done.splits)[0])
                seconds, _ = first_token(lambda ids=ids: cold(model, ids), device)
                times["cold"].append(seconds)
                if kept is not cache:
                    kept.close()
        cache.close()
    best = {where: min(found) for where, found in times.items()}
    flops = text_cost(model.config, dtype_bytes=model.dtype.itemsize).flops(turn.shape[1] + ADDED)
    print(f"cost model: {flops / 1e9:.1f} GFLOP cold, so {flops / best['cold'] / 1e9:.1f} GFLOP/s")
    gpu = torch.cuda.get_device_name() if device == "cuda" else None
    with options.out.open("a") as file:
        for where in ("memory", "disk"):
            line = {
                "case": f"{name}second turn after {options.tokens:,} tokens, prefix in {where}, {gpu or 'CPU'}",
                "ours_ms": round(best[where] * 1e3, 2),
                "peer": "no prefix cache",
                "peer_ms": round(best["cold"] * 1e3, 2),
                "roofline_ms": None,
                **host_facts(gpu),
                "counted_flops": flops,
            }
            file.write(json.dumps(line) + "\n")
            print(f"{line['case']}: {line['ours_ms']} ms, cold {line['peer_ms']} ms, {best['cold'] / best[where]:.1f}x")


if __name__ == "__main__":
    main()
