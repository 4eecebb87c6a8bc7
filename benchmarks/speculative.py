"""Greedy decoding of the small checkpoint with a trained draft against plain greedy decoding, token for token equal.

    python training/dspark.py --text FILE... --out DRAFT
    python benchmarks/speculative.py --draft DRAFT [--dequantize] [--tokens 128]

Plain decoding is a loop over forwards with a cache, without what `generate` does around it.
"""

import argparse
import datetime
import json
import platform
import sys
import time
from pathlib import Path

import torch
import transformers
from transformers import AutoTokenizer

from kimi_k3 import CACHE_ARGUMENT, HybridCache, KimiK3ForCausalLM
from kimi_k3.serving.dspark import DSparkDraft
from kimi_k3.serving.speculative import speculative_generate

ROOT = Path(__file__).parent.parent
PROMPTS = [
    "The Congress of the United States has",
    "Our relations with foreign powers continue to be",
    "The report of the Secretary of the Treasury will show",
    "It is with great satisfaction that I",
    "She had been a friend and companion such as few possessed",
    "The old house stood near the",
]


@torch.no_grad()
def plain(model, ids, count):
    cache = HybridCache(model.config)
    new = ids
    for _ in range(count):
        new = model(new, logits_to_keep=1, **{CACHE_ARGUMENT: cache}).logits[:, -1].argmax(-1, keepdim=True)
        ids = torch.cat([ids, new], dim=1)
    return ids


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draft", type=Path, required=True, help="folder that training/dspark.py wrote")
    parser.add_argument("--dequantize", action="store_true", help="unpack the MXFP4 experts when loading")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    folder = ROOT / "checkpoints" / "small"
    model = KimiK3ForCausalLM.from_pretrained(folder, dtype=torch.float32, dequantize=options.dequantize).eval()
    draft = DSparkDraft.load(options.draft, model)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    total = {"plain": 0.0, "speculative": 0.0}
    rounds = drafted = accepted = 0
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        best = {name: float("inf") for name in total}
        for _ in range(options.repeats):
            started = time.perf_counter()
            expected = plain(model, ids, options.tokens)
            middle = time.perf_counter()
            result = speculative_generate(model, draft, ids, options.tokens)
            ended = time.perf_counter()
            assert torch.equal(result.ids, expected), prompt
            best["plain"] = min(best["plain"], middle - started)
            best["speculative"] = min(best["speculative"], ended - middle)
        for name in total:
            total[name] += best[name]
        rounds, drafted, accepted = rounds + result.rounds, drafted + result.drafted, accepted + result.accepted
    count = len(PROMPTS) * options.tokens
    line = {
        "case": f"greedy decoding with a draft, a token, {'float' if options.dequantize else 'packed'} experts, CPU",
        "ours_ms": round(1e3 * total["speculative"] / count, 2),
        "peer": "plain greedy",
        "peer_ms": round(1e3 * total["plain"] / count, 2),
        "roofline_ms": None,
        "gpu": None,
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}, "
        f"python {platform.python_version()}",
        "command": " ".join(["python benchmarks/speculative.py", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cpu_threads": torch.get_num_threads(),
        "tokens_a_round": round(accepted / rounds + 1, 3),
        "accepted_share": round(accepted / drafted, 3),
    }
    with (ROOT / "benchmarks" / "results" / "speculative.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(f"{line['ours_ms']} ms a token, plain {line['peer_ms']} ms, {line['peer_ms'] / line['ours_ms']:.2f}x")
    print(f"{line['tokens_a_round']} tokens a round, {100 * line['accepted_share']:.0f}% of {drafted} drafted accepted")


if __name__ == "__main__":
    main()
