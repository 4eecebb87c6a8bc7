"""Trains the tokenizer of the small checkpoint: byte-level BPE with 2048 entries.

Words are split like GPT-2's, and every digit is a token of its own, so a number can be copied digit by digit. These are
the two pre-tokenizers of SmolLM, which GGUF runtimes know under the name `smollm`. Nothing is normalised and no control
token is added, so decoding returns exactly the text that was encoded.

    python recipes/small/tokenizer.py --data .data      # reads .data/train.txt, writes the folder .data/tokenizer
"""

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from kimi_k3.cli.common import Parser, add_debug, broken, run_or_explain

VOCAB_SIZE = 2048
BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"  # ids 0, 1, 2
MAX_LENGTH = 8192


def train_tokenizer(texts):
    """Learns the merges from an iterable of texts; returns a PreTrainedTokenizerFast."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def save_tokenizer(tokenizer, folder):
    """Like `save_pretrained`, under the class name that transformers 4 knows as well (transformers 5 has a new one)."""
    tokenizer.save_pretrained(folder)
    path = Path(folder) / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config = {key: value for key, value in config.items() if key not in ("backend", "is_local", "local_files_only")}
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def main(argv=None):
    parser = Parser(description="Train the tokenizer of the small checkpoint.")
    parser.add_argument("--data", type=Path, required=True, help="folder with train.txt")
    parser.add_argument("--out", type=Path, help="folder for the tokenizer; default: DATA/tokenizer")
    add_debug(parser)
    return run_or_explain(parser.prog, run, parser.parse_args(argv))


def run(arguments):
    with broken(f"the text in {arguments.data} cannot be used"):
        text = (arguments.data / "train.txt").read_text(encoding="utf-8")
    tokenizer = train_tokenizer(text.split("\f"))
    save_tokenizer(tokenizer, arguments.out or arguments.data / "tokenizer")
    tokens = len(tokenizer.backend_tokenizer.encode(text).ids)
    print(f"{len(tokenizer)} entries; train.txt is {tokens:,} tokens, {len(text) / tokens:.3f} characters each")


if __name__ == "__main__":
    sys.exit(main())
