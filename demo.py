"""Demo: the small trained checkpoint writes prose, then answers questions about a long document, all on the CPU.

    python demo.py [CHECKPOINT] [--tokens N] [--seed S]

The document is real text that the checkpoint was not trained on, with a made-up fact about each of three people in it.
It is read into the cache once; every question continues from a copy of the cache.
"""

import argparse
import random
import re
import sys
import time
from pathlib import Path

import torch

from kimi_k3 import CACHE_ARGUMENT, HybridCache
from kimi_k3.cli.common import (
    Parser,
    UsageError,
    add_debug,
    encode,
    load_model,
    load_tokenizer,
    number,
    read_config,
    run_or_explain,
)
from kimi_k3.cli.generate import check_length, generate_text, report, speed

SMALL = Path(__file__).parent / "checkpoints" / "small"
OPENING = "The old house stood at the end of the lane, and every evening"
# No fact of the training was about these three.
NAMES = ("Cordelia", "Leopold", "Rowena")
DEPTHS = (0.1, 0.5, 0.9)
QUESTION = "\nQuestion: What is the secret number of {name}?\nAnswer:"
ANSWER_TOKENS = 12


def insert_fact(text: str, fact: str, depth: float) -> str:
    """`text` with the fact put in after the first sentence that ends at or behind `depth` (0 start, 1 end)."""
    sentence_end = re.compile(r"[.!?]\s").search(text, int(depth * len(text)))
    at = sentence_end.end() if sentence_end else len(text)
    return f"{text[:at]}{fact} {text[at:]}".strip()


def heading(text: str) -> None:
    print(f"\n{text}\n{'-' * len(text)}")


def run(args: argparse.Namespace) -> None:
    config = read_config(args.checkpoint)
    sample = args.checkpoint / "sample.txt"
    if not sample.is_file():
        raise UsageError(f"{sample} is missing: the long document is made from it")
    tokenizer = load_tokenizer(args.checkpoint)

    rng = random.Random(args.seed)
    document = tokenizer.decode(encode(tokenizer, sample.read_text(encoding="utf-8"))[0, : args.tokens])
    secrets = {name: str(rng.randrange(10_000, 100_000)) for name in NAMES}
    for name, depth in reversed(list(zip(NAMES, DEPTHS, strict=True))):  # last first: depths stay as they are
        document = insert_fact(document, f"The secret number of {name} is {secrets[name]}.", depth)
    document = encode(tokenizer, document)
    # A question starts with a line break, where the tokenizer splits anyway: its ids can be appended.
    questions = {name: encode(tokenizer, QUESTION.format(name=name), add_special_tokens=False) for name in NAMES}
    longest = document.shape[1] + max(question.shape[1] for question in questions.values())
    check_length(config, longest, ANSWER_TOKENS)
    model = load_model(args.checkpoint, torch.device("cpu"))

    heading("A continuation")
    print(OPENING, end="", flush=True)
    prose = generate_text(model, tokenizer, encode(tokenizer, OPENING), max_new_tokens=80)
    print(f"\n{report(model, prose)}")

    heading(f"Three facts in a document of {document.shape[1]:,} tokens")
    memory = HybridCache(config)
    started = time.perf_counter()
    with torch.no_grad():
        model(document, use_cache=True, logits_to_keep=1, **{CACHE_ARGUMENT: memory})
    print(speed("read", document.shape[1], time.perf_counter() - started))
    for (name, question), depth in zip(questions.items(), DEPTHS, strict=True):
        answer = generate_text(
            model,
            tokenizer,
            torch.cat([document, question], dim=1),
            max_new_tokens=ANSWER_TOKENS,
            cache=memory.snapshot(),
            stream=False,
        )
        answered = re.search(r"\d+", answer.text)
        answered = answered.group() if answered else answer.text.strip().partition("\n")[0]
        verdict = "right" if answered == secrets[name] else "wrong"
        print(f"{name:<8} told at {depth:.0%} of the text   expected {secrets[name]}   answered {answered}   {verdict}")

    heading("The last question, with the document in the cache")
    print(report(model, answer))


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="demo.py", description="Run the small checkpoint: prose, then questions about a document.")
    parser.add_argument("checkpoint", type=Path, nargs="?", default=SMALL, help="default: %(default)s")
    parser.add_argument(
        "--tokens",
        type=number(int, lambda n: n >= 1, "must be a whole number of at least 1"),
        default=3000,
        help="length of the real text (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="draws the secret numbers (default: %(default)s)")
    add_debug(parser)
    return run_or_explain(parser.prog, run, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
