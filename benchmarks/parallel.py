"""A model cut over processes: time of a prefill and of a decoding step, and what a prefill sends against the formula.

    torchrun --nproc-per-node 2 benchmarks/parallel.py FOLDER --tp 2
    torchrun --nproc-per-node 2 benchmarks/parallel.py --tp 2 --ep 2 --tokens 8192 --batch 16
    python benchmarks/parallel.py --tokens 8192 --batch 16    # on one device

Without FOLDER the weights are random: Kimi K3's width, 4 layers, 64 experts, bfloat16 or with --packed MXFP4 experts.
Times are medians of the slowest process; decoding runs on a static cache, captured where the device has graphs.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from transformers.distributed import DistributedConfig

sys.path.insert(0, str(Path(__file__).parent))
from generate import K3

from kimi_k3 import CACHE_ARGUMENT, HybridCache, KimiK3ForCausalLM, KimiK3TextConfig
from kimi_k3.graph_kimi_k3 import CapturedForward, can_capture
from kimi_k3.parallel import wire

WARMUP = 4  # a captured step: made, watched, captured, replayed
MXFP4 = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}


def options_of(tp: int, ep: int, pp: int, exchange: str) -> dict | None:
    """Arguments of `DistributedConfig`; None for one process. Older releases spread experts and cut nothing else."""
    if tp * pp == 1:
        return None
    options = {"tp_size": tp, "pp_size": pp}
    fields = DistributedConfig.__dataclass_fields__
    if ep > 1 and "ep_size" in fields:
        options |= {"ep_size": ep} | ({"ep_implementation": exchange} if "ep_implementation" in fields else {})
    elif ep > 1:
        options["enable_expert_parallel"] = True
    return options


@torch.no_grad()
def random_model(config: KimiK3TextConfig, options: dict | None, device: torch.device) -> KimiK3ForCausalLM:
    """A bfloat16 model of which every process makes only its own part."""
    cut, mesh = None, None
    if options is not None:
        cut, _, mesh = KimiK3ForCausalLM.prepare_distribute_model(DistributedConfig(**options))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model = KimiK3ForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)
    if mesh is not None:
        model = KimiK3ForCausalLM.maybe_distribute_model(model, cut, mesh)
    model.to_empty(device=device)
    for index, (name, tensor) in enumerate([*model.named_parameters(), *model.named_buffers()]):
        torch.manual_seed(index)  # weights that every process holds whole are the same on all of them
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if local.dtype == torch.uint8:
            local.random_(118, 124) if name.endswith("_scale") else local.random_(0, 256)
        elif tensor.dim() == 1:
            local.fill_(float(name.endswith("weight")))
        else:
            local.normal_(0, 0.02)
    return model


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()


def timed_ms(function, device: torch.device, repeats: int, warmup: int = WARMUP) -> float:
    """Median milliseconds of a call; of the slowest process where several work together."""
    times = []
    for _ in range(warmup + repeats):
        if dist.is_initialized():
            dist.barrier()
        synchronize(device)
        start = time.perf_counter()
        function()
        synchronize(device)
        times.append(1000 * (time.perf_counter() - start))
    slowest = torch.tensor(statistics.median(times[warmup:]), device=device)
    if dist.is_initialized():
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


@torch.no_grad()
def prefill_ms(model: nn.Module, tokens: int, repeats: int = 5) -> float:
    ids = torch.randint(3, 100, (1, tokens), device=model.device, generator=seeded(model.device))
    return timed_ms(lambda: model(ids, use_cache=False, logits_to_keep=1), model.device, repeats)


@torch.no_grad()
def decode_ms(model: nn.Module, batch: int, context: int = 1024, steps: int = 24) -> float:
    ids = torch.randint(3, 100, (batch, context), device=model.device, generator=seeded(model.device))
    cache = HybridCache(model.config, max_length=context + steps + WARMUP)
    model(ids, logits_to_keep=1, **{CACHE_ARGUMENT: cache})
    forward, token = CapturedForward(model) if can_capture(model) else model, ids[:, :1].contiguous()
    return timed_ms(lambda: forward(input_ids=token, use_cache=True, **{CACHE_ARGUMENT: cache}), model.device, steps)


def seeded(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(0)


@torch.no_grad()
def sent_by_prefill(model: nn.Module, tokens: int) -> float:
    ids = torch.randint(3, 100, (1, tokens), device=model.device, generator=seeded(model.device))
    with wire.Wire() as counted:
        model(ids, use_cache=False, logits_to_keep=1)
    return counted.total


def formula(config: KimiK3TextConfig, options: dict, tokens: int, dtype_bytes: int) -> float | None:
    """What a prefill should send under tensor and expert parallelism; pairs that are sent away only on average."""
    ranks, total = options["tp_size"], 0.0
    apart = options.get("ep_size", 1) > 1 or "enable_expert_parallel" in options
    if options["pp_size"] > 1:
        return None
    if "enable_expert_parallel" not in options:
        total += wire.tensor_parallel_bytes(config, ranks, tokens, 1, dtype_bytes, apart)[0]
    if apart:
        pairs = None
        if "ep_size" in options and options.get("ep_implementation", "all_to_all") == "all_to_all":
            layers = config.mlp_layer_types.count("sparse")
            pairs = layers * tokens * config.num_experts_per_token * (ranks - 1) / ranks**2
        total += wire.expert_parallel_bytes(config, ranks, tokens, dtype_bytes, pairs)[0]
    return total


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", help="checkpoint; without one, random weights")
    parser.add_argument("--tp", type=int, default=1, help="processes that share heads, columns and experts")
    parser.add_argument("--ep", type=int, default=1, help="--tp again, to give whole experts to the processes")
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages")
    parser.add_argument("--exchange", choices=("all_reduce", "all_to_all"), default="all_reduce", help="under --ep")
    parser.add_argument("--packed", action="store_true", help="MXFP4 experts (without FOLDER)")
    parser.add_argument("--tokens", type=int, default=2048, help="of the prefill")
    parser.add_argument("--batch", type=int, default=1, help="rows of a decoding step")
    args = parser.parse_args()
    if args.ep not in (1, args.tp):
        parser.error(f"--ep {args.ep} must be 1 or --tp, {args.tp}")
    options = options_of(args.tp, args.ep, args.pp, args.exchange)
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    if device.type != "cpu":
        device = torch.device(device.type, int(os.environ.get("LOCAL_RANK", 0)))
        torch.accelerator.set_device_index(device.index)
    if args.folder:
        cut = None if options is None else DistributedConfig(**options)
        model = KimiK3ForCausalLM.from_pretrained(args.folder, distributed_config=cut)
        model = model.to(device) if cut is None else model
    else:
        config = KimiK3TextConfig.from_dict({**K3, "quantization_config": MXFP4 if args.packed else None})
        model = random_model(config, options, device)
    line = {"processes": options or "one", "tokens": args.tokens, "prefill_ms": prefill_ms(model, args.tokens)}
    if args.pp == 1:
        line |= {"batch": args.batch, "decode_ms": decode_ms(model, args.batch)}
    if options is not None:
        line |= {"prefill_bytes_sent": sent_by_prefill(model, args.tokens)}
        line["formula"] = (
            formula(model.config, options, args.tokens, model.lm_head.weight.element_size()) if args.pp == 1 else None
        )
    if not dist.is_initialized() or dist.get_rank() == 0:
        line["device"] = torch.cuda.get_device_name() if device.type == "cuda" else device.type
        print(json.dumps(line))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
