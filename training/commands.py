"""`kimi-k3 train`: arguments, and what is run."""

import argparse
from pathlib import Path

import torch

from .. import KimiK3ForCausalLM, KimiK3TextConfig
from ..cli.common import (
    UsageError,
    add_seed,
    at_least_one,
    choose_device,
    explained,
    load_model,
    load_tokenizer,
    needing,
    number,
    read_config,
)
from ..runs_kimi_k3 import keeping


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", type=Path, metavar="MODEL", help="folder with config and tokenizer, and the weights")
    add("data", type=Path, nargs="+", metavar="DATA", help=".txt, .jsonl or .parquet files of one kind")
    add("--out", type=Path, required=True, metavar="RUN", help="run folder; one that exists is continued")
    add("--from-scratch", action="store_true", help="new weights: only config and tokenizer are read")
    add("--steps", type=at_least_one, required=True, metavar="N", help="optimizer steps")
    add("--context", type=at_least_one, default=1024, metavar="N", help="tokens a row (default: 1024)")
    add("--rows", type=at_least_one, default=16, metavar="N", help="rows a step (default: 16)")
    rate = number(float, lambda rate: 0 < rate < float("inf"), "must be a number above 0")
    add("--rate", type=rate, default=1e-3, metavar="R", help="peak learning rate (default: %(default)s)")
    add("--split-long", action="store_true", help="cut documents that are longer than the context")
    add("--gradient-checkpointing", action="store_true", help="recompute layers in backward: less memory")
    add("--captured", action="store_true", help="on a GPU, replay forward and backward as CUDA graphs (new: see docs)")
    add("--save-every", type=at_least_one, default=100, metavar="N", help="steps (default: 100)")
    add_seed(parser, "default: %(default)s", 2**32, "must be a whole number of at least 0, below 2^32")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: a GPU if any")


def run_train(args: argparse.Namespace) -> None:
    """Train on packed local text; the run folder gets state, metrics, a curve and the finished model."""
    with needing("training", "train"):
        from .text_data import DataError
        from .text_run import TextRun, TextTraining
    if args.out.exists() and not args.out.is_dir():
        raise UsageError(f"--out {args.out} is a file: name a folder for the run")
    device = choose_device(args.device)
    config = read_config(args.model)
    limit = config.max_position_embeddings
    if args.context > limit:
        raise UsageError(f"--context {args.context} is more than the model's max_position_embeddings, {limit}")
    tokenizer = load_tokenizer(args.model)
    files = [str(file) for file in args.data]
    run = TextRun(files, args.steps, args.context, args.rows, args.rate, args.seed, args.split_long, args.from_scratch)
    with explained(DataError, FloatingPointError):
        with keeping(f"{args.out} is as it was, and the same command goes on from there"):
            model = trained_model(args, config, device)
            training = TextTraining(model, tokenizer, run, args.out, args.save_every, args.captured)
        with keeping(training.kept):
            training.train()


def trained_model(args: argparse.Namespace, config: KimiK3TextConfig, device: torch.device) -> KimiK3ForCausalLM:
    """The model that a run begins with, in float32."""
    torch.manual_seed(args.seed)
    if args.from_scratch:
        config.expert_quantization = None
        model = KimiK3ForCausalLM(config).to(device)
    else:
        packed = config.expert_quantization is not None
        model = load_model(args.model, device, "float32", dequantize=packed)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    return model


# name: (help, declares the arguments, runs)
COMMANDS = {"train": ("train a model on local text", add_train_arguments, run_train)}
