"""Time to the first token of a second turn, through the prefix cache and without it, on the small checkpoint.

    python benchmarks/prefix_cache.py [--device cuda] [--tokens 32768]

A turn of so many tokens is answered with 32 new ones; the next turn adds 64 tokens. Cold, all of them run in one
forward. Prints also what the cost model counts for the cold prefill and the FLOP/s that this makes.
"""

import argparse
import datetime
import json
import platform
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers

from kimi_k3 import CACHE_ARGUMENT, HybridCache, KimiK3ForCausalLM
from kimi_k3.serving.cost import text_cost
from kimi_k3.serving.prefix_cache import PrefixCache

ROOT = Path(__file__).parent.parent
ANSWER, ADDED = 32, 64


def first_token(run, device):
    """(seconds until the most likely next token is known on the host, that token)."""
    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    token = run()[0, -1].argmax().item()
    return time.perf_counter() - started, token


@torch.no_grad()
def cold(model, ids):
    return model(ids, logits_to_keep=1, **{CACHE_ARGUMENT: HybridCache(model.config)}).logits


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--tokens", type=int, default=32768, help="of the first turn")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    device = options.device
    model = KimiK3ForCausalLM.from_pretrained(ROOT / "checkpoints" / "small", dtype=torch.float32).to(device).eval()
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(3, 2048, (1, options.tokens), generator=generator).to(device)
    cold(model, prompt[:, :2048])  # first-call costs
    times = {"memory": [], "disk": [], "cold": []}
    with tempfile.TemporaryDirectory() as folder:
        cache = PrefixCache(model, 4 << 30, folder=folder, disk_bytes=4 << 30)
        turn = cache.generate(prompt, max_new_tokens=ANSWER, do_sample=False)
        cache.flush()
        for _ in range(options.repeats):
            for name in (
                "memory",
                "disk",
            ):  # each with another turn: what one leaves on the disk is no help to the other
                added = torch.randint(3, 2048, (1, ADDED), generator=generator).to(device)
                ids = torch.cat([turn, added], dim=1)
                kept = cache if name == "memory" else PrefixCache(model, 4 << 30, folder=folder, disk_bytes=4 << 30)
                seconds, token = first_token(lambda ids=ids, kept=kept: kept.forward(ids)[0], device)
                times[name].append(seconds)
                assert kept.stats()["hit_tokens"] >= options.tokens
                seconds, expected = first_token(lambda ids=ids: cold(model, ids), device)
                times["cold"].append(seconds)
                assert token == expected
                if kept is not cache:
                    kept.close()
        cache.close()
    best = {name: min(found) for name, found in times.items()}
    flops = text_cost(model.config, dtype_bytes=4).flops(turn.shape[1] + ADDED)
    print(f"cost model: {flops / 1e9:.1f} GFLOP cold, so {flops / best['cold'] / 1e9:.1f} GFLOP/s")
    results = ROOT / "benchmarks" / "results" / "prefix_cache.jsonl"
    gpu = torch.cuda.get_device_name() if device == "cuda" else None
    with results.open("a") as file:
        for name in ("memory", "disk"):
            line = {
                "case": f"second turn after {options.tokens:,} tokens, prefix in {name}, {gpu or 'CPU'}",
                "ours_ms": round(best[name] * 1e3, 2),
                "peer": "no prefix cache",
                "peer_ms": round(best["cold"] * 1e3, 2),
                "roofline_ms": None,
                "gpu": gpu,
                "versions": f"torch {torch.__version__}, transformers {transformers.__version__}, "
                f"python {platform.python_version()}",
                "command": " ".join(["python benchmarks/prefix_cache.py", *sys.argv[1:]]),
                "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
                "cpu_threads": torch.get_num_threads(),
                "counted_flops": flops,
            }
            file.write(json.dumps(line) + "\n")
            print(f"{line['case']}: {line['ours_ms']} ms, cold {line['peer_ms']} ms, {best['cold'] / best[name]:.1f}x")


if __name__ == "__main__":
    main()
