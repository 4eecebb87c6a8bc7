"""What a user gets who changes nothing: plain `generate` on a GPU beside the fastest way there is.

    python benchmarks/defaults.py [--only "k3 slice"] [--out results.jsonl]

A token of plain `generate` costs (time for 257 new tokens - time for 1) / 256, after 1,024 tokens, greedy, with a token
that ends a text (which never comes). The slices are those of `benchmarks/generate.py`, in bfloat16. Beside it, in the
same run: the captured step alone (the peer: replays on a static cache, as `benchmarks/generate.py` times it), and in
`extra` the same loop with `cache_implementation="static"` and without graphs (`disable_compile=True`), and what the
first call takes when kernels are compiled already. Medians of calls, the host's clock around a synchronised device.
Of small checkpoints in float32: whether plain, static and without graphs write the same greedy text.

Then what a process pays first: `generate` with an empty Triton cache, each in a process of its own, beside kernels
compiled where they are met (imports and weights are not counted); and a forward under `torch.compile` beside eager, of
four layers of the MoE model of `benchmarks/training.py`, with the seconds that the first call compiles.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parent))
from generate import CONTEXT, K3, KIMI_LINEAR, build, decode_ms, event_ms, weight_bytes
from host_facts import host_facts
from kda import copy_bytes_per_ms, record

import kimi_k3
from kimi_k3 import generation_kimi_k3
from training import MOE

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "defaults.jsonl"
NEW, REPEATS = 257, 5
STATIC, AS_IT_IS = {"cache_implementation": "static"}, {"disable_compile": True}
GOLDEN = ("k3_tiny_mxfp4", "k3_dense_flat", "kimi_linear_flat")


def seconds(model, ids, new: int, **options) -> float:
    """Of one call that writes `new` tokens."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    text = model.generate(ids, max_new_tokens=new, do_sample=False, pad_token_id=0, **options)
    torch.cuda.synchronize()
    if text.shape[1] != ids.shape[1] + new:
        raise RuntimeError(f"a text of {text.shape[1] - ids.shape[1]} tokens instead of {new}: it met the end token")
    return time.perf_counter() - start


def token_ms(model, ids, new: int = NEW, repeats: int = REPEATS, **options) -> float:
    """Milliseconds of a token behind the first, the prompt taken off."""
    seconds(model, ids, new, **options)
    long = statistics.median(seconds(model, ids, new, **options) for _ in range(repeats))
    short = statistics.median(seconds(model, ids, 1, **options) for _ in range(repeats))
    return (long - short) / (new - 1) * 1e3


def absent_token(model, ids) -> int:
    """An end token that the greedy text does not hold."""
    text = model.generate(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0, **AS_IT_IS)
    return next(token for token in range(3, 10_000) if not (text == token).any())


def measured(model, batch: int) -> tuple[float, float, dict[str, float]]:
    """Milliseconds of a token by plain `generate` and of the captured step alone, and the others."""
    ids = torch.randint(3, 1000, (batch, CONTEXT), device="cuda")
    options = {"eos_token_id": absent_token(model, ids)}
    model.release_decoding_buffers()
    first = (seconds(model, ids, NEW, **options) - seconds(model, ids, 1, **options)) * 1e3
    plain = token_ms(model, ids, **options)
    others = {
        "static_ms": token_ms(model, ids, **options, **STATIC),
        "without_graphs_ms": token_ms(model, ids, new=33, repeats=3, **options, **AS_IT_IS),
        "first_call_extra_ms": first - plain * (NEW - 1),
    }
    model.release_decoding_buffers()
    return plain, decode_ms(model, batch, captured=True), others


def report(out: Path, case: str, model, batch: int, least: float, shared: dict) -> None:
    plain, alone, others = measured(model, batch)
    extra = {name: round(value, 3) for name, value in others.items()}
    extra |= {"over_step": round(plain / alone, 3), "tokens_per_s": round(batch / plain * 1e3)}
    record(out, case, plain, "the captured step alone", alone, least, extra, shared, digits=3)


def slices(wanted, out: Path, bandwidth: float, shared: dict) -> None:
    for name, config in (("k3 slice", K3), ("kimi_linear slice", KIMI_LINEAR)):
        cases = {batch: f"{name} plain generate B={batch}" for batch in (1, 16)}
        if not any(map(wanted, cases.values())):
            continue
        model = build(kimi_k3.KimiK3ForCausalLM, kimi_k3.KimiK3TextConfig.from_dict(dict(config)))
        rest, expert = weight_bytes(model)
        experts, top_k = config["num_experts"], config["num_experts_per_token"]
        for batch, case in cases.items():
            if wanted(case):
                hit = experts * (1 - (1 - top_k / experts) ** batch)
                report(out, case, model, batch, (rest + hit * expert) / bandwidth, shared)
        del model
        gc.collect()
        torch.cuda.empty_cache()


def small_model():
    return AutoModelForCausalLM.from_pretrained(ROOT / "checkpoints" / "small", dtype=torch.bfloat16).cuda().eval()


def small_checkpoint(wanted, out: Path, bandwidth: float, shared: dict) -> None:
    case = "small checkpoint plain generate B=1"
    if wanted(case):
        model = small_model()
        bytes_of_all = sum(p.nbytes for p in model.parameters())
        report(out, case, model, 1, bytes_of_all / bandwidth, shared)


def first_generate(name: str, ahead: bool) -> None:
    """Print the seconds of a process's first text, of 64 new tokens after a prompt."""
    if not ahead:
        generation_kimi_k3.warm_up_once = lambda *_: None
    if name == "small checkpoint":
        model = small_model()
    else:
        config = {"k3 slice": K3, "kimi_linear slice": KIMI_LINEAR}[name]
        model = build(kimi_k3.KimiK3ForCausalLM, kimi_k3.KimiK3TextConfig.from_dict(dict(config)))
    ids = torch.randint(3, 1000, (1, CONTEXT), device="cuda")
    print(seconds(model, ids, 64, eos_token_id=None))


def first_calls(wanted, out: Path, shared: dict) -> None:
    for name in ("k3 slice", "small checkpoint"):
        case = f"{name} first generate, empty Triton cache"
        if not wanted(case):
            continue
        taken = []
        for ahead in (True, False):
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, __file__, "--first-generate", name, *([] if ahead else ["--one-by-one"])]
                environment = {**os.environ, "TRITON_CACHE_DIR": folder}
                done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            taken.append(float(done.stdout.split()[-1]) * 1e3)
        record(out, case, taken[0], "kernels one by one", taken[1], 0.0, {}, shared, digits=0)


def compiled_forwards(wanted, out: Path, shared: dict) -> None:
    layers = {**MOE["linear_attn_config"], "full_attn_layers": [4], "kda_layers": [1, 2, 3]}
    config = {**MOE, "num_hidden_layers": 4, "linear_attn_config": layers}
    model = build(kimi_k3.KimiK3ForCausalLM, kimi_k3.KimiK3TextConfig.from_dict(config))
    for tokens in (512, 2048):
        case = f"4 layers compiled forward T={tokens}"
        if not wanted(case):
            continue
        ids = torch.randint(3, 1000, (1, tokens), device="cuda")

        def forward(run, ids=ids):
            return run(ids, use_cache=False, logits_to_keep=1).logits

        eager = event_ms(lambda forward=forward: forward(model), 30, warmup=5)
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, dynamic=False)
        start = time.perf_counter()
        text = forward(compiled)
        torch.cuda.synchronize()
        took = time.perf_counter() - start
        ours = event_ms(lambda forward=forward, compiled=compiled: forward(compiled), 30, warmup=5)
        expected = forward(model).double()
        error = ((text.double() - expected).norm() / expected.norm()).item()
        extra = {"compiling_s": round(took, 1), "error": float(f"{error:.1e}")}
        record(out, case, ours, "eager", eager, 0.0, extra, shared, digits=3)


def greedy_texts(folders, out: Path, shared: dict) -> None:
    """Of a row alone and of a padded batch, whether all three ways write the same."""
    texts = {}
    for folder in folders:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda().eval()
        vocabulary = model.config.get_text_config(decoder=True).vocab_size
        torch.manual_seed(0)
        for rows in (1, 3):
            ids = torch.randint(3, vocabulary, (rows, 50), device="cuda")
            mask = torch.ones_like(ids)
            mask[0, : 7 * (rows - 1)] = 0
            settings = {"attention_mask": mask, "max_new_tokens": 100, "do_sample": False, "eos_token_id": None}
            without = model.generate(ids, **settings, **AS_IT_IS)
            found = [model.generate(ids, **settings, **how) for how in ({}, {}, STATIC)]
            texts[f"{folder.name} B={rows}"] = all(torch.equal(text, without) for text in found)
        del model
    line = {"case": "greedy text plain = static = without graphs", "equal": texts, **shared}
    print(json.dumps(line), flush=True)
    with out.open("a") as lines:
        lines.write(json.dumps(line) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name contains this")
    parser.add_argument("--out", type=Path, default=RESULTS, help="lines are appended to this file")
    parser.add_argument("--first-generate", metavar="MODEL", help="print what the first text of a process takes")
    parser.add_argument("--one-by-one", action="store_true", help="with it, kernels are compiled where they are met")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/defaults.py times GPU forwards, and torch sees no GPU here")
    if args.first_generate:
        first_generate(args.first_generate, not args.one_by_one)
        return
    bandwidth = copy_bytes_per_ms()
    shared = {**host_facts(torch.cuda.get_device_name()), "copy_tb_per_s": round(bandwidth / 1e9, 2)}
    print(json.dumps(shared), flush=True)
    args.out.parent.mkdir(exist_ok=True)

    def wanted(case):
        return args.only in case

    first_calls(wanted, args.out, shared)
    with torch.no_grad():
        compiled_forwards(wanted, args.out, shared)
        slices(wanted, args.out, bandwidth, shared)
        small_checkpoint(wanted, args.out, bandwidth, shared)
        if wanted("greedy text"):
            golden = [ROOT / "tests" / "data" / name for name in GOLDEN]
            greedy_texts([*golden, ROOT / "checkpoints" / "small"], args.out, shared)


if __name__ == "__main__":
    main()
