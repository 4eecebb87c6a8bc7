"""`kimi-k3 warmup`: compile what a checkpoint's kernels need on this machine's GPU, from its configuration alone."""

import argparse
import sys
import time
from pathlib import Path

import torch

from .. import KimiK3ForCausalLM, KimiK3TextConfig
from ..kernels_kimi_k3 import ahead
from .common import UsageError, at_least_one, explained, read_config

DTYPES = ("bfloat16", "float16", "float32")


def one_of_every_kind(config: KimiK3TextConfig) -> KimiK3TextConfig:
    """The configuration of a model of few layers that launches the same kernels: a layer of every kind, and as many
    blocks of Attention Residuals, because a mix of as many sources is a kernel of its own."""
    if config.moe_layer_freq != 1:
        return config
    kinds = list(zip(config.layer_types, config.mlp_layer_types, strict=True))
    layers = sorted({kind: i for i, kind in reversed(list(enumerate(kinds)))}.values())
    block = config.attn_res_block_size
    blocks = 1 if block is None else -(-len(kinds) // block)
    layers += [layers[-1]] * (blocks - len(layers))
    numbers = {
        name: [n for n, i in enumerate(layers, 1) if config.layer_types[i] == kind]
        for name, kind in (("kda_layers", "linear_attention"), ("full_attn_layers", "full_attention"))
    }
    values = {
        "num_hidden_layers": len(layers),
        "linear_attn_config": {**config.linear_attn_config, **numbers},
        "first_k_dense_replace": sum(config.mlp_layer_types[i] == "dense" for i in layers),
        "attn_res_block_size": None if block is None else -(-len(layers) // blocks),
        "vocab_size": 256,  # embedding and head have no kernels of ours
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }
    return KimiK3TextConfig.from_dict({**config.to_dict(), **values})


def unfilled_model(config: KimiK3TextConfig, dtype: torch.dtype, device: torch.device) -> KimiK3ForCausalLM:
    """A model whose weights are what lay in the memory before."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            model = KimiK3ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return model.to_empty(device=device).eval()


def add_warmup_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", type=Path, metavar="MODEL", help="checkpoint folder, of which the configuration is read")
    add("--batch-size", type=at_least_one, nargs="+", default=[1], metavar="N", help="rows (default: 1)")
    add("--prompt", type=at_least_one, nargs="+", default=[1024], metavar="T", help="tokens of a row (default: 1024)")
    add("--training", action="store_true", help="a training step as well")
    add("--dtype", choices=DTYPES, help="of the weights (default: the configuration's)")


def run_warmup(args: argparse.Namespace) -> None:
    config = read_config(args.model)
    if not torch.cuda.is_available():
        raise UsageError("kernels are compiled for the GPU of the machine, and torch sees none here")
    dtype = getattr(torch, args.dtype) if args.dtype else config.dtype or torch.bfloat16
    start = time.perf_counter()
    with explained(RuntimeError):
        model = unfilled_model(one_of_every_kind(config), dtype, torch.device("cuda"))
        names = model.warmup(args.batch_size, args.prompt, args.training, progress=sys.stderr.isatty())
    print(f"{len(names)} kernels in {time.perf_counter() - start:.1f} s, kept in {ahead.cache_folder()}")


COMMANDS = {"warmup": ("compile the kernels of a checkpoint ahead", add_warmup_arguments, run_warmup)}
