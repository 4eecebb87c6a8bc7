"""transformers' native `kimi_linear` against this package on the CPU: the same weights, prefill and decode.

    python benchmarks/kimi_linear_cpu.py [--lengths 4096 8192] [--decode-tokens 64] [--repeats 2]

An 8-layer model (hidden 512, 8 heads of 64, 16 experts top-4, random weights) is written once and read by both classes.
Every measurement runs in a process of its own, ours and the peer's in turn, so that peak memory belongs to one case
and a busy machine hits both. Extra peak memory is the rise of the resident set during the prefill. Absolute times
depend on the machine: read the ratios. Lines are appended to benchmarks/results/kimi_linear_cpu.jsonl.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from host_facts import host_facts

RESULTS = Path(__file__).parent / "results" / "kimi_linear_cpu.jsonl"
PEER = "transformers kimi_linear"
CONFIG = {
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": None,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "linear_attn_config": {
        "full_attn_layers": [4, 8],
        "kda_layers": [1, 2, 3, 5, 6, 7],
        "head_dim": 64,
        "num_heads": 8,
        "short_conv_kernel_size": 4,
    },
    "hidden_act": "silu",
    "first_k_dense_replace": 1,
    "num_experts": 16,
    "num_experts_per_token": 4,
    "num_shared_experts": 1,
    "moe_intermediate_size": 256,
    "routed_scaling_factor": 2.446,
    "max_position_embeddings": 16384,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def write_model(folder):
    """Random weights in the released layout, which both classes read."""
    import kimi_k3

    torch.manual_seed(0)
    kimi_k3.KimiK3ForCausalLM(kimi_k3.KimiK3TextConfig.from_dict(dict(CONFIG))).save_pretrained(folder)


def load(which, folder):
    if which == "native":
        from transformers.models.kimi_linear import KimiLinearForCausalLM as Model
    else:
        from kimi_k3 import KimiK3ForCausalLM as Model
    return Model.from_pretrained(folder, dtype=torch.float32).eval()


def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@torch.no_grad()
def measure(which, folder, length, decode_tokens):
    """One prefill of `length` tokens and greedy decoding after it; milliseconds, bytes and the tokens."""
    model = load(which, folder)
    ids = torch.randint(3, CONFIG["vocab_size"], (1, length), generator=torch.Generator().manual_seed(1))
    model(ids[:, :128], logits_to_keep=1)  # first-call costs
    before = peak_bytes()
    started = time.perf_counter()
    output = model(ids, logits_to_keep=1, use_cache=True)
    prefill = time.perf_counter() - started
    extra = peak_bytes() - before
    steps, chosen = [], []
    name = "cache" if "cache" in output else "past_key_values"
    for _ in range(decode_tokens):
        token = output.logits[:, -1:].argmax(-1)
        chosen.append(token.item())
        started = time.perf_counter()
        output = model(token, use_cache=True, **{name: output[name]})
        steps.append(time.perf_counter() - started)
    return {
        "prefill_ms": prefill * 1e3,
        "extra_bytes": extra,
        "decode_ms": statistics.median(steps) * 1e3 if steps else None,
        "tokens": chosen,
    }


def in_a_process_of_its_own(which, folder, length, decode_tokens):
    command = [sys.executable, "-P", __file__, "--worker", which, str(folder), str(length), str(decode_tokens)]
    output = subprocess.run(command, capture_output=True, text=True)
    if output.returncode:
        raise RuntimeError(f"{which} failed at T={length}:\n{output.stderr[-2000:]}")
    return json.loads(output.stdout.splitlines()[-1])


def record(case, ours, peer, **extra):
    line = {
        "case": case,
        "ours_ms": round(ours, 2),
        "peer": PEER,
        "peer_ms": round(peer, 2),
        "roofline_ms": None,
        **host_facts(),
        **extra,
    }
    with RESULTS.open("a") as file:
        file.write(json.dumps(line) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--decode-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        which, folder, length, decode_tokens = options.worker
        print(json.dumps(measure(which, folder, int(length), int(decode_tokens))))
        return
    print(f"{'case':28}{'ours':>12}{'native':>12}{'faster':>9}{'extra memory':>24}{'of native':>11}")
    with tempfile.TemporaryDirectory() as folder:
        write_model(folder)
        for length in options.lengths:
            runs = {"ours": [], "native": []}
            for _ in range(options.repeats):
                for which, done in runs.items():
                    done.append(in_a_process_of_its_own(which, folder, length, options.decode_tokens))
            best = {
                which: {key: min(run[key] for run in done) for key in ("prefill_ms", "decode_ms", "extra_bytes")}
                for which, done in runs.items()
            }
            ours, native = best["ours"], best["native"]
            agree = runs["ours"][0]["tokens"] == runs["native"][0]["tokens"]
            case = f"kimi_linear cpu prefill T={length}"
            memory = {"ours_extra_bytes": ours["extra_bytes"], "peer_extra_bytes": native["extra_bytes"]}
            record(case, ours["prefill_ms"], native["prefill_ms"], same_greedy_tokens=agree, **memory)
            print(
                f"{case:28}{ours['prefill_ms']:9.0f} ms{native['prefill_ms']:9.0f} ms"
                f"{native['prefill_ms'] / ours['prefill_ms']:8.1f}x"
                f"{ours['extra_bytes'] / 1e9:10.2f} /{native['extra_bytes'] / 1e9:8.2f} GB"
                f"{ours['extra_bytes'] / native['extra_bytes']:11.2f}"
            )
            case = f"kimi_linear cpu decode T={length}"
            record(case, ours["decode_ms"], native["decode_ms"], same_greedy_tokens=agree)
            print(
                f"{case:28}{ours['decode_ms']:9.1f} ms{native['decode_ms']:9.1f} ms"
                f"{native['decode_ms'] / ours['decode_ms']:8.1f}x   same greedy tokens: {agree}"
            )


if __name__ == "__main__":
    main()
