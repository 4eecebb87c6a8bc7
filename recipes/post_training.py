"""Post-training of the small checkpoint with trl: a short run of each trainer on a CPU (results in docs/training.md).

    python recipes/post_training.py sft reward grpo-replay    # some of KINDS; without a name all of them

A run prints a row of the table there. The text is `checkpoints/small/sample.txt`, cut into sentences: true ones are to
be preferred to ones whose words are shuffled, and GRPO is rewarded for short words.
"""

import argparse
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import datasets
import torch
import trl
from peft import LoraConfig
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PrinterCallback,
    Trainer,
)

import kimi_k3
from kimi_k3.cli.common import Parser, add_debug, run_or_explain
from kimi_k3.training import ReplayGRPOTrainer, lora_targets

SMALL = Path(kimi_k3.__file__).parent / "checkpoints" / "small"


def sentences(least: int = 40, most: int = 160) -> list[str]:
    """Of the sample text, in its order; lengths in characters."""
    text = re.sub(r"\s+", " ", (SMALL / "sample.txt").read_text(encoding="utf-8"))
    return [part for part in re.split(r"(?<=[.!?]) ", text) if least <= len(part) <= most]


def preferences(seed: int = 0) -> datasets.Dataset:
    """Beginnings of sentences, how they go on, and the same with its words shuffled."""
    chance, rows = random.Random(seed), []
    for sentence in sentences():
        words = sentence.split(" ")
        rest = words[3:]
        shuffled = chance.sample(rest, len(rest))
        prompt = " ".join(words[:3])
        rows.append({"prompt": prompt, "chosen": f" {' '.join(rest)}", "rejected": f" {' '.join(shuffled)}"})
    return datasets.Dataset.from_list(rows)


def settings(config: type, steps: int, **changes):
    """What all runs share, as a config of trl's."""
    shared = {
        "max_steps": steps, "per_device_train_batch_size": 8, "learning_rate": 3e-4, "lr_scheduler_type": "constant",
        "logging_steps": 1, "report_to": [], "use_cpu": True, "bf16": False, "save_strategy": "no",
        "disable_tqdm": True, "seed": 0, "gradient_checkpointing": False,
    }  # fmt: skip
    return config(tempfile.mkdtemp(), **{**shared, **changes})


def causal(folder: str):
    """In float32, with the experts unpacked, because all of it trains."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, dequantize=True)


def sft(folder, tokenizer, steps, **changes) -> Trainer:
    """Rows of whole sentences, which the model keeps apart."""
    changes = {"packing": True, "max_length": 256, "per_device_train_batch_size": 2, **changes}
    args = settings(trl.SFTConfig, steps, **changes)
    data = datasets.Dataset.from_dict({"text": sentences()})
    return trl.SFTTrainer(causal(folder), args=args, train_dataset=data, processing_class=tokenizer)


def sft_padding_free(folder, tokenizer, steps) -> Trainer:
    """Every batch is one row of whole sentences."""
    return sft(
        folder, tokenizer, steps, packing=False, padding_free=True, max_length=None, per_device_train_batch_size=8
    )


def sft_adapters(folder, tokenizer, steps) -> Trainer:
    """On packed experts, which stay as they are."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    args = settings(
        trl.SFTConfig, steps, max_length=256, per_device_train_batch_size=2, packing=True, learning_rate=2e-3
    )
    data = datasets.Dataset.from_dict({"text": sentences()})
    adapters = LoraConfig(r=8, **lora_targets(model))
    return trl.SFTTrainer(model, args=args, train_dataset=data, processing_class=tokenizer, peft_config=adapters)


def dpo(folder, tokenizer, steps) -> Trainer:
    args = settings(trl.DPOConfig, steps, max_length=128, learning_rate=1e-4)
    return trl.DPOTrainer(
        causal(folder), causal(folder), args=args, train_dataset=preferences(), processing_class=tokenizer
    )


def kto(folder, tokenizer, steps) -> Trainer:
    """Of every sentence either the true form or the shuffled one."""
    rows = [
        {"prompt": row["prompt"], "completion": row["rejected" if odd % 2 else "chosen"], "label": not odd % 2}
        for odd, row in enumerate(preferences())
    ]
    args = settings(trl.KTOConfig, steps, max_length=128, learning_rate=1e-4)
    data = datasets.Dataset.from_list(rows)
    return trl.KTOTrainer(causal(folder), causal(folder), args=args, train_dataset=data, processing_class=tokenizer)


def reward(folder, tokenizer, steps) -> Trainer:
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32, dequantize=True, num_labels=1
    )
    args = settings(trl.RewardConfig, steps, max_length=128, learning_rate=1e-4)
    return trl.RewardTrainer(model, args=args, train_dataset=preferences(), processing_class=tokenizer)


def short_words(completions: list[str], **_) -> list[float]:
    """Share of the words of at most three letters."""
    words = [re.findall(r"[A-Za-z]+", completion) for completion in completions]
    return [sum(len(word) <= 3 for word in each) / max(len(each), 1) for each in words]


def grpo(folder, tokenizer, steps, trainer: type = trl.GRPOTrainer) -> Trainer:
    args = settings(
        trl.GRPOConfig, steps, per_device_train_batch_size=16, num_generations=8, max_completion_length=24, beta=0.0
    )
    data = preferences().select_columns(["prompt"])
    return trainer(causal(folder), short_words, args=args, train_dataset=data, processing_class=tokenizer)


def grpo_replay(folder, tokenizer, steps) -> Trainer:
    return grpo(folder, tokenizer, steps, ReplayGRPOTrainer)


# name -> the trainer, the number of its log that tells how it went, steps
KINDS: dict[str, tuple[Callable[..., Trainer], str, int]] = {
    "sft": (sft, "loss", 40),
    "sft-padding-free": (sft_padding_free, "loss", 40),
    "sft-adapters": (sft_adapters, "loss", 40),
    "dpo": (dpo, "loss", 30),
    "kto": (kto, "loss", 30),
    "reward": (reward, "loss", 30),
    "grpo": (grpo, "reward", 30),
    "grpo-replay": (grpo_replay, "reward", 30),
}


def curve(trainer: Trainer, key: str) -> list[float]:
    """A number of the log, a value a step."""
    return [float(entry[key]) for entry in trainer.state.log_history if key in entry]


def trainer_of(kind: str, folder: str | Path = SMALL, steps: int | None = None) -> Trainer:
    """A trainer that is ready to run."""
    build, _, usual = KINDS[kind]
    torch.manual_seed(0)
    trainer = build(str(folder), AutoTokenizer.from_pretrained(SMALL), steps or usual)
    trainer.remove_callback(PrinterCallback)  # prints a line a step
    return trainer


def main(argv: list[str] | None = None) -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", choices=[[], *KINDS], metavar="KIND", help=f"{', '.join(KINDS)}; or all")
    parser.add_argument("--model", default=SMALL, help="folder of a checkpoint (default: the small one)")
    parser.add_argument("--steps", type=int, help="instead of the usual number")
    add_debug(parser)
    return run_or_explain(parser.prog, run, parser.parse_args(argv))


def run(args: argparse.Namespace) -> None:
    for kind in args.kinds or KINDS:
        began = time.perf_counter()
        trainer, key = trainer_of(kind, args.model, args.steps), KINDS[kind][1]
        trainer.train()
        values = curve(trainer, key)
        first, last = (sum(part) / len(part) for part in (values[:5], values[-5:]))
        seconds = time.perf_counter() - began
        print(f"| `{kind}` | {key} | {first:.3f} | {last:.3f} | {len(values)} | {seconds:.0f} s |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
