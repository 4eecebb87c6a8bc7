"""Measures the small checkpoint: bits per byte of held-out text, and recall of a hidden number by length of the text.

python training/small_eval.py --data .data --checkpoint checkpoints/small
"""

import argparse
import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F

from kimi_k3.training.small_data import Corpus, recall_questions
from kimi_k3.training.small_model import rounding_once

TOKENS_AT_ONCE = 32_768
# name in the report: facts of one kind in the text, one of which is asked for
RECALL_TASKS = {"recall_only_fact": 1, "recall_among_three": 3}


def autocast(device):
    """bfloat16 on a GPU; the CPU computes in the weights' own type."""
    return torch.autocast("cuda", dtype=torch.bfloat16, enabled=device.type == "cuda")


@torch.no_grad()
def predict(model, ids):
    """Yields (rows, logits [.., T, vocab] of the next tokens) for chunks of ids [rows, T] that fit into memory."""
    device = next(model.parameters()).device
    for rows in ids.to(device).split(max(TOKENS_AT_ONCE // ids.shape[1], 1)):
        with autocast(device):
            yield rows, model(input_ids=rows, use_cache=False).logits.float()


def bits_per_byte(model, corpus, context, most_windows=None):
    """{package: bits per byte, "all": over the whole text}. Windows do not overlap; their first token is not scored.

    With `most_windows`, only so many windows of each source, evenly spaced.
    """
    results, total_bits, total_bytes = {}, 0.0, 0
    byte_lengths = torch.from_numpy(corpus.byte_lengths).to(next(model.parameters()).device)
    for package, stream in corpus.streams.items():
        count = max(len(stream) // context, 1)
        windows = torch.from_numpy(stream[: count * context].astype("int64")).view(count, -1)
        if most_windows and count > most_windows:
            windows = windows[torch.linspace(0, count - 1, most_windows).long()]
        bits, seen = 0.0, 0
        for rows, logits in predict(model, windows):
            targets = rows[:, 1:]
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten(), reduction="none")
            lengths = byte_lengths[targets.flatten()]
            bits += loss[lengths > 0].double().sum().item() / math.log(2)
            seen += lengths.sum().item()
        results[package] = bits / seen
        total_bits, total_bytes = total_bits + bits, total_bytes + seen
    return {**results, "all": total_bits / total_bytes}


def recall(model, corpus, context, count, told, seed=1):
    """Questions about one of `told` facts: {"accuracy": share right in every digit, "by_depth": by fifth of the text}.

    The predicted digits are compared under teacher forcing; all of them right is what greedy decoding would write.
    """
    ids, answers, depths = recall_questions(corpus, context, count, told, seed)
    right = []
    for rows, logits in predict(model, ids):
        width = answers.shape[1]
        right.append((logits[:, -width - 1 : -1].argmax(-1) == rows[:, -width:]).all(-1))
    right = torch.cat(right).double().cpu()
    fifths = (depths * 5).long()
    by_depth = [right[fifths == fifth].mean().item() for fifth in range(5) if (fifths == fifth).any()]
    return {"accuracy": right.mean().item(), "by_depth": by_depth}


def evaluate(model, corpus, contexts, count, bits_context=1024, most_windows=None):
    """All measurements as a dict that JSON can hold; leaves the model in the mode it was in."""
    was_training = model.training
    model.eval()
    longest = min(len(stream) for stream in corpus.streams.values()) - 1
    with rounding_once(model):
        results = {
            "bits_per_byte": bits_per_byte(model, corpus, min(bits_context, longest), most_windows),
            **{
                name: {str(length): recall(model, corpus, length, count, told) for length in contexts}
                for name, told in RECALL_TASKS.items()
            },
        }
    model.train(was_training)
    return results


def main():
    from transformers import AutoTokenizer

    from kimi_k3 import KimiK3ForCausalLM

    parser = argparse.ArgumentParser(description="Evaluate the small checkpoint.")
    parser.add_argument("--data", type=Path, required=True, help="folder with valid.txt and corpus.json")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--contexts", type=int, nargs="*", default=[1024, 2048], help="lengths for recall")
    parser.add_argument("--count", type=int, default=50, help="questions at each length")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.checkpoint)
    model = KimiK3ForCausalLM.from_pretrained(arguments.checkpoint, dtype="auto").to(arguments.device)
    corpus = Corpus(arguments.data, "valid", tokenizer)
    print(json.dumps(evaluate(model, corpus, arguments.contexts, arguments.count), indent=1))


if __name__ == "__main__":
    main()
