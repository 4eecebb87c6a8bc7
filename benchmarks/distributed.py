"""Several GPUs beside one, in one run: long prefill, tensor and expert parallelism, FSDP2 training.

    python benchmarks/distributed.py [--only context,tensor,experts,training] [--out results.jsonl]
    python benchmarks/distributed.py --tiny --device cpu     # two processes on a CPU: checks the script, times nothing

Starts one process a GPU through torchrun (or is started by it). Every process first times its own GPU alone, each in
another order, so that kernels are compiled side by side; those of process 0 are the "one GPU" of the results. Weights
are random: Kimi K3's width, 4 layers, 64 experts (`generate.py`), and for training a model of 0.4 B parameters. Its
batch a GPU stays the same: "one GPU" takes the tokens of all GPUs batch after batch. Milliseconds are medians of the
slowest process; the roofline is one GPU's time over the number of GPUs. `sent_bytes` are those that one process
sends, collectives taken as rings, and `formula_bytes` those of `docs/distributed.md` and `docs/parallel.md`.
"""

import argparse
import datetime
import gc
import json
import os
import subprocess
import sys
import traceback
from functools import partial
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

sys.path.insert(0, str(Path(__file__).parent))
from generate import K3
from kda import facts, record

from kimi_k3 import KimiK3TextConfig
from kimi_k3.parallel import context_parallel, fully_shard_by_dtype, shard
from kimi_k3.parallel.context import bytes_sent
from kimi_k3.parallel.wire import Wire
from parallel import decode_ms, formula, options_of, prefill_ms, random_model, timed_ms

RESULTS = Path(__file__).parent / "results" / "distributed.jsonl"
PARTS = ("context", "tensor", "experts", "training")
SMALL = {  # 0.4 B parameters, half of them in 16 experts
    "vocab_size": 32768, "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 8,
    "num_attention_heads": 10, "num_key_value_heads": 10, "q_lora_rank": 512, "kv_lora_rank": 256,
    "linear_attn_config": {**K3["linear_attn_config"], "full_attn_layers": [4, 8], "kda_layers": [1, 2, 3, 5, 6, 7],
                           "num_heads": 10},
    "num_experts": 16, "num_experts_per_token": 4, "num_shared_experts": 1, "moe_intermediate_size": 1024,
    "routed_expert_hidden_size": 640, "attn_res_block_size": 4,
}  # fmt: skip
TINY = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4,
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "num_experts": 8, "num_experts_per_token": 2, "moe_intermediate_size": 64, "routed_expert_hidden_size": 32,
}  # fmt: skip


class Sizes:
    """What is timed, at full size or tiny."""

    def __init__(self, tiny: bool):
        self.context, self.prefill, self.batch = (256, 64, 2) if tiny else (131072, 8192, 16)
        self.rows, self.length, self.steps = ((1,), 64, 2) if tiny else ((4, 12), 4096, 5)
        self.slice, self.small = (self._config(large, tiny) for large in (K3, {**K3, **SMALL}))

    @staticmethod
    def _config(values, tiny):
        heads = {"linear_attn_config": {**values["linear_attn_config"], "head_dim": 16, "num_heads": 4}}
        return KimiK3TextConfig.from_dict({**values, **TINY, **heads} if tiny else dict(values))


def free(device):
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def prompt(sizes, device):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, 256, (1, sizes.context), generator=generator).to(device)


@torch.no_grad()
def long_prefill(model, ids, whole: bool):
    """Logits of the last token [1, 1, V]; of this process's part the last token's."""
    if whole:
        return model(ids, use_cache=False, logits_to_keep=1).logits
    with context_parallel(model):
        return model(**shard({"input_ids": ids}), use_cache=False, logits_to_keep=1).logits


def peak_bytes(device) -> dict:
    return {"peak_bytes": torch.cuda.max_memory_allocated()} if device.type == "cuda" else {}


def one_slice(sizes, device, wanted) -> dict:
    """Times of the slice on this process's device alone, and the last logits of the long prompt."""
    model, found = random_model(sizes.slice, None, device), {}
    if {"tensor", "experts"} & wanted:
        found["prefill"] = prefill_ms(model, sizes.prefill)
        found["decode"] = decode_ms(model, sizes.batch)
    if "context" in wanted:
        ids = prompt(sizes, device)
        found["logits"] = long_prefill(model, ids, True).float().cpu()
        found["context"] = timed_ms(lambda: long_prefill(model, ids, True), device, 2, warmup=0)
        found["context_peak"] = peak_bytes(device)
    return found


def train_step(model, optimizer, rows, sizes, device):
    ids = torch.randint(3, 256, (rows, sizes.length), device=device)
    model(ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def training_ms(model, sizes, device, count=False):
    """Milliseconds of a step by its rows, and what a process sends in one."""
    optimizer, sent = torch.optim.AdamW(model.train().parameters(), lr=1e-4, fused=device.type == "cuda"), None
    for _ in range(2):
        train_step(model, optimizer, sizes.rows[0], sizes, device)
    if count:
        with Wire() as counted:
            train_step(model, optimizer, sizes.rows[0], sizes, device)
        sent = counted.total
    return {
        rows: timed_ms(partial(train_step, model, optimizer, rows, sizes, device), device, sizes.steps, warmup=2)
        for rows in sizes.rows
    }, sent


def small_model(sizes, device):
    return random_model(sizes.small, None, device)


def alone(sizes, device, wanted, rank) -> dict:
    """What one GPU takes, before the processes know one another."""

    def slices():
        return one_slice(sizes, device, wanted) if {"context", "tensor", "experts"} & wanted else {}

    def training():
        return {"training": training_ms(small_model(sizes, device), sizes, device)[0]} if "training" in wanted else {}

    found = {}
    for measure in (slices, training) if rank % 2 == 0 else (training, slices):
        found |= measure()
        free(device)
    return found


def context_case(sizes, device, one):
    model, ids = random_model(sizes.slice, None, device), prompt(sizes, device)
    world, rank = dist.get_world_size(), dist.get_rank()
    with Wire() as counted:
        logits = long_prefill(model, ids, False).float()
    last = logits.clone()
    dist.broadcast(last, world - 1)
    error = ((last.cpu() - one["logits"]).norm() / one["logits"].norm()).item()
    ours = timed_ms(lambda: long_prefill(model, ids, False), device, 2, warmup=0)
    parts = [part.shape[1] for part in ids.tensor_split(world, dim=1)]
    least = bytes_sent(model.config, parts, rank, 1, model.lm_head.weight.element_size())[0]
    extra = {"logits_error": float(f"{error:.2g}"), "one_gpu": one["context_peak"], **peak_bytes(device)}
    yield f"k3 slice context={world} prefill T={sizes.context}", ours, one["context"], counted.total, least, extra


def cut_case(sizes, device, one, exchange=None):
    """Heads and columns cut; with an `exchange` of tokens ("auto" is transformers' choice) whole experts spread."""
    world = dist.get_world_size()
    options = options_of(world, world if exchange else 1, 1, exchange)
    model = random_model(sizes.slice, options, device)
    ids = torch.randint(3, 100, (1, sizes.prefill), device=device, generator=torch.Generator(device).manual_seed(0))
    with Wire() as counted, torch.no_grad():
        model(ids, use_cache=False, logits_to_keep=1)
    least = formula(model.config, options, sizes.prefill, 2)
    name, extra = f"k3 slice {'experts' if exchange else 'tensor'}={world}", {"options": options, "by": counted.sent}
    ours = prefill_ms(model, sizes.prefill)
    how = f", {exchange}" if exchange == "all_to_all" else ""
    yield f"{name} prefill T={sizes.prefill}{how}", ours, one["prefill"], counted.total, least, extra
    if not how:  # its sizes go through the host, so no step is captured
        ours = decode_ms(model, sizes.batch)
        yield f"{name} decode B={sizes.batch}", ours, one["decode"], None, None, {}


def training_case(sizes, device, one):
    world, model = dist.get_world_size(), small_model(sizes, device)
    size = sum(p.nbytes for p in model.parameters())
    kept = sum(p.nbytes for n, p in model.named_parameters() if ".layers." not in n or p.dtype == torch.float32)
    fully_shard_by_dtype(model)
    times, sent = training_ms(model, sizes, device, count=True)
    # Weights are gathered forward and backward, `kept` ones once; gradients are dealt out.
    least = (world - 1) / world * (3 * size - kept)
    for rows, ours in times.items():
        tokens, alone_ms = rows * sizes.length, one["training"][rows]
        rates = {"tokens_per_s": round(world * tokens / ours * 1000), "one_gpu": round(tokens / alone_ms * 1000)}
        name = f"0.4B model FSDP2={world} step of {tokens} tokens a GPU"
        yield name, ours, alone_ms * world, sent, least, {"parameter_bytes": size, **rates}


def work(args):
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device(args.device, rank if args.device == "cuda" else None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    sizes, wanted = Sizes(args.tiny), set(args.only)
    one = alone(sizes, device, wanted, rank)
    limit = datetime.timedelta(seconds=args.timeout)
    if device.type == "cuda":
        dist.init_process_group("nccl", timeout=limit, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=limit)
    shared = {"gpus": world, "transformers": transformers.__version__}
    shared |= facts() if device.type == "cuda" else {"gpu": "none", "versions": f"torch {torch.__version__}"}
    makers = {
        "context": lambda: context_case(sizes, device, one),
        "tensor": lambda: cut_case(sizes, device, one),
        "experts": lambda: chain(*(cut_case(sizes, device, one, how) for how in ("auto", "all_to_all"))),
        "training": lambda: training_case(sizes, device, one),
    }
    failed = []
    for part in filter(wanted.__contains__, PARTS):
        free(device)
        try:
            for case, ours, peer, sent, least, extra in makers[part]():
                sums = {} if sent is None else {"sent_bytes": round(sent), "formula_bytes": round(least)}
                extra = {"speedup": round(peer / ours, 3), **sums, **extra}
                if rank == 0:
                    record(args.out, case, ours, "one GPU", peer, peer / world, extra, shared, digits=3)
                if args.tiny and sent is not None and abs(sent / least - 1) > 0.05:
                    raise AssertionError(f"{case} sends {sent:.0f} bytes, the formula says {least:.0f}")
        except Exception:  # the other parts are worth their time
            traceback.print_exc()
            failed.append(part)
    dist.barrier()
    dist.destroy_process_group()
    if failed:
        sys.exit(f"process {rank}: {', '.join(failed)} failed")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=lambda text: text.split(","), default=PARTS, metavar="PARTS",
                        help=f"some of {','.join(PARTS)}")  # fmt: skip
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--gpus", type=int, default=2, help="processes to start")
    parser.add_argument("--tiny", action="store_true", help="small shapes, and the bytes must be the formula's")
    parser.add_argument("--timeout", type=int, default=120, help="seconds that a process waits for another one")
    parser.add_argument("--out", type=Path, default=RESULTS, help="lines are appended to this file")
    args = parser.parse_args()
    if unknown := set(args.only) - set(PARTS):
        parser.error(f"--only {','.join(sorted(unknown))}: the parts are {','.join(PARTS)}")
    if args.device == "cuda" and torch.cuda.device_count() < args.gpus:
        sys.exit(
            f"this needs {args.gpus} GPUs and torch sees {torch.cuda.device_count()}: --tiny --device cpu tries it"
        )
    if "RANK" in os.environ:
        work(args)
        return
    args.out.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.gpus)]
    print(json.dumps({"command": [*command[1:], *sys.argv]}), flush=True)
    sys.exit(subprocess.run([*command, *sys.argv]).returncode)


if __name__ == "__main__":
    main()
