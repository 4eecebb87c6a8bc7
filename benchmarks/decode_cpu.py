"""Decoding of the small checkpoint on the CPU: packed experts, float ones, and llama.cpp on the same folder.

    pip install kimi-k3[gguf]
    KIMI_K3_LLAMA_CPP=.../vendor/llama.cpp python benchmarks/decode_cpu.py [--threads 1] [--tokens 64] [--rounds 7]

Plain greedy `generate` in float32 and llama.cpp's server in this process, one after another in every round, on the same
threads. A token costs (the time of `tokens` + 1 new ones less that of one) / `tokens`, the median of the rounds; a step
is the same without `generate`, forwards alone. Time of the processor counts where others use it too, and only with one
thread: threads that wait for each other are busy. llama.cpp reads the folder as its own converter writes it: experts
as MXFP4, everything else as float32 (`tests/conversion/test_gguf.py` says where the converter comes from; without it
this package is measured alone). Read the ratios: absolute times depend on the machine. Lines are appended to
benchmarks/results/decode_cpu.jsonl.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).parent))

from host_facts import host_facts

from kimi_k3 import CACHE_ARGUMENT, HybridCache, KimiK3ForCausalLM
from kimi_k3.conversion import convert

ROOT = Path(__file__).parent.parent
SMALL = ROOT / "checkpoints" / "small"
RESULTS = ROOT / "benchmarks" / "results" / "decode_cpu.jsonl"
PROMPT = (
    "On the ocean the pride of our naval arms had been amply supported. A second frigate has indeed fallen into the "
    "hands of the enemy, but the loss is hidden in the blaze of heroism with which she was defended. Captain Porter, "
    "who"
)
Generate = Callable[[int], str]  # number of tokens -> the greedy continuation of this many


def ours(model: KimiK3ForCausalLM, tokenizer: Any, ids: torch.Tensor) -> Generate:
    def run(count: int) -> str:
        mask = torch.ones_like(ids)
        text = model.generate(
            ids, attention_mask=mask, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        return tokenizer.decode(text[0, ids.shape[1] :])

    return run


def forwards(model: KimiK3ForCausalLM, tokenizer: Any, ids: torch.Tensor) -> Generate:
    """The same by forwards with a cache and nothing else."""

    @torch.no_grad()
    def run(count: int) -> str:
        cache, new, chosen = HybridCache(model.config), ids, []
        for _ in range(count):
            new = model(new, logits_to_keep=1, **{CACHE_ARGUMENT: cache}).logits[:, -1].argmax(-1, keepdim=True)
            chosen.append(int(new))
        return tokenizer.decode(chosen)

    return run


def llama_cpp(ids: torch.Tensor, threads: int, folder: Path) -> Generate:
    """The same by llama.cpp's server, called without a socket; the GGUF is written into `folder`."""
    import xllamacpp

    sys.path.insert(0, str(ROOT / "tests" / "conversion"))
    from test_gguf import to_gguf

    convert(SMALL, folder / "model")
    params = xllamacpp.CommonParams()
    params.model.path = str(to_gguf(folder / "model"))
    params.n_ctx, params.n_parallel, params.warmup = 1024, 1, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)

    greedy = {"samplers": ["top_k"], "top_k": 1, "ignore_eos": True, "cache_prompt": False}

    def run(count: int) -> str:
        request = {"prompt": ids[0].tolist(), "n_predict": count, **greedy}
        return server.handle_completions(request)["choices"][0]["text"]

    return run


def measure(run: Generate, tokens: int) -> tuple[float, float]:
    """Milliseconds a token, and milliseconds of the processor that it took."""

    at = [(time.perf_counter(), time.process_time())]
    for count in (1, tokens + 1):
        run(count)
        at.append((time.perf_counter(), time.process_time()))
    wall, busy = (1e3 * (end - 2 * middle + start) / tokens for start, middle, end in zip(*at, strict=True))
    return wall, busy


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(SMALL)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    runs = {}
    for name in ("packed", "float"):
        model = KimiK3ForCausalLM.from_pretrained(SMALL, dtype=torch.float32, dequantize=name == "float").eval()
        runs[name], runs[f"{name} forwards"] = ours(model, tokenizer, ids), forwards(model, tokenizer, ids)
    with tempfile.TemporaryDirectory() as folder:
        if os.environ.get("KIMI_K3_LLAMA_CPP"):
            runs["llama.cpp"] = llama_cpp(ids, options.threads, Path(folder))
        texts = {name: run(options.tokens + 1) for name, run in runs.items()}  # and first-call costs
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
        for _ in range(options.rounds):
            for name, run in runs.items():
                found[name].append(measure(run, options.tokens))
    medians = {name: [statistics.median(x) for x in zip(*times, strict=True)] for name, times in found.items()}
    ms, cpu_ms = ({name: round(both[i], 3) for name, both in medians.items()} for i in range(2))
    for name, peer in (("float", "float experts"), ("llama.cpp", "llama.cpp, the same folder as GGUF")):
        if name not in runs:
            print("KIMI_K3_LLAMA_CPP does not name llama.cpp's source folder: not compared with it")
            continue
        line = {
            "case": f"small checkpoint decode, packed experts, over {name}, CPU",
            "ours_ms": ms["packed"],
            "peer": peer,
            "peer_ms": ms[name],
            "roofline_ms": None,
            **host_facts(),
            "same_greedy_text": texts["packed"] == texts[name],
            "ours_cpu_ms": cpu_ms["packed"],
            "peer_cpu_ms": cpu_ms[name],
        }
        if name == "float":
            line |= {"ours_step_ms": ms["packed forwards"], "peer_step_ms": ms["float forwards"]}
        with RESULTS.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(
            f"{line['case']}, {options.threads} threads: {line['ours_ms']:.2f} ms a token, {peer} {line['peer_ms']:.2f}"
            f" ms, {line['peer_ms'] / line['ours_ms']:.2f}x as fast, by time of the processor "
            f"{line['peer_cpu_ms'] / line['ours_cpu_ms']:.2f}x; same text: {line['same_greedy_text']}"
        )


if __name__ == "__main__":
    main()
