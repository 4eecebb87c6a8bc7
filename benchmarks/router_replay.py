"""How far log-probabilities of a training forward are from those of its rollout, with its routing and without.

Rewrites its table in docs/training.md. A rollout samples with a cache, from prompts that are padded on the left; the
training forward reads each whole text at once.

    python benchmarks/router_replay.py
"""

import argparse
import datetime
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

import kimi_k3

ROOT = Path(kimi_k3.__file__).parent
SMALL, PAGE = ROOT / "checkpoints" / "small", ROOT / "docs" / "training.md"
BEGIN, END = "<!-- written by benchmarks/router_replay.py -->\n", "<!-- end -->\n"
ROWS, LENGTHS, NEW_TOKENS = 16, (40, 100), 128


def prompts(tokenizer):
    """Pieces of the sample text, of several lengths."""
    ids = tokenizer((SMALL / "sample.txt").read_text(encoding="utf-8"))["input_ids"]
    lengths = [LENGTHS[0] + row * (LENGTHS[1] - LENGTHS[0]) // (ROWS - 1) for row in range(ROWS)]
    pieces = [{"input_ids": ids[row * LENGTHS[1] :][:length]} for row, length in enumerate(lengths)]
    return tokenizer.pad(pieces, padding_side="left", return_tensors="pt")


@torch.no_grad()
def differences(model, inputs):
    """Replayed or not -> (|difference| [B, NEW_TOKENS] of log-probabilities, share of routes that are others)."""
    torch.manual_seed(0)
    options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": True, "top_k": 0}
    rollout = model.generate(
        **inputs, **options, return_dict_in_generate=True, output_logits=True, output_routed_experts=True
    )
    ids = rollout.sequences
    new = ids[:, -NEW_TOKENS:, None]
    sampled = torch.stack(rollout.logits, dim=1).log_softmax(-1).gather(-1, new)[..., 0]
    mask = F.pad(inputs["attention_mask"], (0, NEW_TOKENS), value=1)
    routed = F.pad(rollout.routed_experts, (0, 0, 0, 0, 0, 1), value=-1)
    real = mask[:, :-1].bool()
    results = {}
    for replayed in (False, True):
        training = model(
            ids,
            attention_mask=mask,
            use_cache=False,
            output_routed_experts=True,
            routed_experts=routed if replayed else None,
        )
        found = training.logits[:, -NEW_TOKENS - 1 : -1].float().log_softmax(-1).gather(-1, new)[..., 0]
        chosen = training.routed_experts[:, :-1][real]
        kept = (chosen[..., None] == rollout.routed_experts[real][..., None, :]).any(-1).double().mean()
        results[replayed] = (found - sampled).abs(), 1 - kept.item()
    return results


def table(rows):
    lines = [
        "| numbers | routing | routes that are others | mean difference | 99 % are below | largest |\n",
        "|---|---|---|---|---|---|\n",
    ]
    for dtype, replayed, difference, others in rows:
        of = torch.quantile(difference.double().flatten(), 0.99)
        numbers = " | ".join(f"{value:.1e}" for value in (difference.mean(), of, difference.max()))
        routing = "replayed" if replayed else "free"
        lines.append(f"| {str(dtype).removeprefix('torch.')} | {routing} | {others:.2%} | {numbers} |\n")
    setting = (
        f"\nThe small checkpoint, {ROWS} prompts of {LENGTHS[0]} to {LENGTHS[1]} tokens, {NEW_TOKENS} new ones each at "
        f"temperature 1; CPU, torch {torch.__version__.partition('+')[0]}, {datetime.date.today()}, "
        "`python benchmarks/router_replay.py`.\n"
    )
    return "".join(lines) + setting


def main():
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    inputs, rows = prompts(AutoTokenizer.from_pretrained(SMALL)), []
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(SMALL, dtype=dtype, dequantize=True).eval()
        rows += [(dtype, replayed, *result) for replayed, result in differences(model, inputs).items()]
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(before + BEGIN + "\n" + table(rows) + "\n" + END + rest.partition(END)[2], encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    main()
