"""Measures the small checkpoint: bits per byte of held-out text, and recall by length and by number of keys.

python recipes/small/measure.py --data .data --checkpoint checkpoints/small
"""

import json
import math
import random
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

from kimi_k3.cli.common import Parser, add_debug, broken, choose_device, load_model, load_tokenizer, run_or_explain
from kimi_k3.eval import TASKS, ModelReader, Tokens, open_haystack
from kimi_k3.eval.suite import Unit
from kimi_k3.eval.words import NEEDLE
from kimi_k3.recipes.small.data import Corpus
from kimi_k3.recipes.small.episodes import END, Script

TOKENS_AT_ONCE = 65_536
# name in the report: task of the recall suite
RECALL_TASKS = {"recall_only_fact": "fact", "recall_among_three": "fact_among_three", "recall_multikey": "multikey"}
KEYS = (1, 3, 10, 30)  # needles in a text, for recall by number of keys
ASKED = 10  # at most this number of needles in a text


@torch.no_grad()
def predict(model, ids):
    """Yields (rows, logits [.., T, vocab] of the next tokens) for chunks of ids [rows, T] that fit into memory."""
    device = next(model.parameters()).device
    for rows in ids.to(device).split(max(TOKENS_AT_ONCE // ids.shape[1], 1)):
        yield rows, model(input_ids=rows, use_cache=False).logits


def bits_per_byte(model, corpus, context, most_windows=None):
    """{package: bits per byte, "all": over the whole text}. Windows do not overlap; their first token is not scored.

    With `most_windows`, at most that many windows of each source, evenly spaced.
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
            loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), targets.flatten(), reduction="none")
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


def needles_row(rng, corpus, length, keys):
    """(ids [length], [question of every token, -1 outside of answers]): needles in held-out text, then questions.

    Keys are two words that occur in no training episode; values are numbers of seven digits.
    """
    vocabulary = corpus.vocabulary
    values = {key: vocabulary.draw(rng, "seven_digits") for key in vocabulary.distinct(rng, "two_words", keys)}
    facts = [NEEDLE.format(kind="number", key=key, value=value) for key, value in values.items()]
    ids, questions = [], []
    for question, key in enumerate(rng.sample(list(values), min(keys, ASKED))):
        script = Script()
        script.say(
            f"\nWhat is the special magic number for {key} mentioned in the provided text? "
            f"The special magic number for {key} mentioned in the provided text is"
        )
        script.answer(f" {values[key]}.{END}")
        more, weights = script.encode(corpus.backend)
        ids += more
        questions += [question if weight else -1 for weight in weights]
    text = corpus.document(rng, length - len(ids), facts, sorted(rng.random() for _ in facts))
    return text + ids, [-1] * len(text) + questions


def recall_by_keys(model, corpus, length, keys, texts, seed=1):
    """Share of the questions answered without a mistake: {"exact": share, "questions": their number}.

    The text is read once with the right answers behind their questions; an answer counts if every one of its tokens is
    the most probable one, which is when greedy decoding would have written it.
    """
    rng = random.Random(f"{seed}/{length}/{keys}")
    rows = [needles_row(rng, corpus, length, keys) for _ in range(texts)]
    ids = torch.tensor([row for row, _ in rows])
    asked = torch.tensor([questions for _, questions in rows])[:, 1:]
    right = torch.cat([logits[:, :-1].argmax(-1).eq(part[:, 1:]).cpu() for part, logits in predict(model, ids)])
    exact = [
        right[row][asked[row] == question].all().item()
        for row in range(texts)
        for question in range(int(asked[row].max()) + 1)
    ]
    return {"exact": sum(exact) / len(exact), "questions": len(exact)}


def evaluate(model, corpus, lengths, texts, bits_context=1024, most_windows=None):
    """Bits per byte, and recall by number of keys at each length; the model stays in the mode that it was in."""
    was_training = model.training
    model.eval()
    longest = min(len(stream) for stream in corpus.streams.values()) - 1
    results = {
        "bits_per_byte": bits_per_byte(model, corpus, min(bits_context, longest), most_windows),
        "recall_by_keys": {
            str(length): {str(keys): recall_by_keys(model, corpus, length, keys, texts) for keys in fitting(length)}
            for length in lengths
        },
    }
    model.train(was_training)
    return results


def fitting(length):
    """The numbers of keys whose needles and questions fit into `length` tokens."""
    return [keys for keys in KEYS if 60 * keys + 110 * min(keys, ASKED) <= length]


def evaluate_suite(model, corpus, lengths, count):
    """Tasks of the recall suite, answered by generation: {name: {length: result of `recall`}}."""
    return {
        name: {str(length): recall(model, corpus, length, count, task) for length in lengths}
        for name, task in RECALL_TASKS.items()
    }


def main(argv=None):
    parser = Parser(description="Evaluate the small checkpoint.")
    parser.add_argument("--data", type=Path, required=True, help="folder with valid.txt and corpus.json")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--contexts", type=int, nargs="*", default=[1024, 2048], help="lengths for recall")
    parser.add_argument("--count", type=int, default=20, help="texts at each length and number of keys")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add_debug(parser)
    return run_or_explain(parser.prog, run, parser.parse_args(argv))


def run(arguments):
    device, tokenizer = choose_device(arguments.device), load_tokenizer(arguments.checkpoint)
    with broken(f"the text in {arguments.data} cannot be used"):
        corpus = Corpus(arguments.data, "valid", tokenizer)
    model = load_model(arguments.checkpoint, device)
    results = evaluate(model, corpus, arguments.contexts, arguments.count)
    results |= evaluate_suite(model, corpus, arguments.contexts, arguments.count)
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    sys.exit(main())
