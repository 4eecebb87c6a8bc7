"""Measures the small checkpoint: bits per byte of held-out text, and recall of a hidden number by length of the text.

python training/small_eval.py --data .data --checkpoint checkpoints/small
"""

import argparse
import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F

from kimi_k3.eval import TASKS, ModelReader, Tokens, open_haystack
from kimi_k3.eval.suite import Unit
from kimi_k3.training.small_data import Corpus
from kimi_k3.training.small_model import rounding_once

TOKENS_AT_ONCE = 32_768
# name in the report: task of the recall suite
RECALL_TASKS = {"recall_only_fact": "fact", "recall_among_three": "fact_among_three"}


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


def recall(model, corpus, context, count, task, seed=1):
    """`count` questions of a task in held-out text: {"accuracy": share answered, "by_depth": by fifth of the text}."""
    tokens = Tokens(corpus.tokenizer)
    haystack = open_haystack([str(corpus.file)], tokens)
    depths = [(i + 0.5) / count if TASKS[task].by_depth else None for i in range(count)]
    texts = [Unit(task, context, depth, i).prompts(seed, haystack, tokens) for i, depth in enumerate(depths)]
    texts = texts[: -(-count // len(texts[0]))]
    reader = ModelReader(model, tokens)
    at_once = reader.units_at_once(context, len(texts[0]))
    fifths = [[] for _ in range(5)]
    with autocast(model.device):
        for first in range(0, len(texts), at_once):
            batch = texts[first : first + at_once]
            for prompts, answers in zip(batch, reader.answers(TASKS[task], batch), strict=True):
                for prompt, answer in zip(prompts, answers, strict=True):
                    score = TASKS[task].score(answer, prompt.question.answers)
                    fifths[min(int(prompt.question.depth * 5), 4)].append(score)
    scores = [score for fifth in fifths for score in fifth]
    return {
        "accuracy": sum(scores) / len(scores),
        "by_depth": [sum(fifth) / len(fifth) for fifth in fifths if fifth],
    }


def evaluate(model, corpus, contexts, count, bits_context=1024, most_windows=None):
    """All measurements as a dict that JSON can hold; leaves the model in the mode it was in."""
    was_training = model.training
    model.eval()
    longest = min(len(stream) for stream in corpus.streams.values()) - 1
    with rounding_once(model):
        results = {
            "bits_per_byte": bits_per_byte(model, corpus, min(bits_context, longest), most_windows),
            **{
                name: {str(length): recall(model, corpus, length, count, task) for length in contexts}
                for name, task in RECALL_TASKS.items()
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
