"""Whole forwards on a GPU: decoding steps at context 1024 and prefills, of two slices of real models.

    python benchmarks/generate.py [--only "kimi_linear slice decode"] [--no-peer] [--out results.jsonl]

Random bfloat16 weights. `k3 slice`: Kimi K3's width, 4 layers (3 KDA, 1 MLA, the first one dense), 64 experts top-16;
beside it this package's torch path (KIMI_K3_TRITON=0) step by step. `kimi_linear slice`: Kimi-Linear-48B's width, 8
layers, 256 experts top-8; beside it transformers' native class on a dynamic cache, which runs flash-linear-attention's
kernels where that is installed. Ours decodes on a static cache, captured as `generate` does. Medians of CUDA events; a
step is the whole forward with its logits. The roofline is the bytes of the weights that a step reads (experts: those
hit) or the operations of the prefill over the rates of a copy and of a large matrix product, measured in the same run.
"""

import argparse
import gc
import importlib.util
import json
import statistics
import sys
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent))
from kda import copy_bytes_per_ms, facts, record
from layers import flops_per_ms

import kimi_k3
from kimi_k3.graph_kimi_k3 import CapturedForward
from kimi_k3.kernels import dispatch

RESULTS = Path(__file__).parent / "results" / "generate.jsonl"
CONTEXT, STEPS = 1024, 24
K3 = {
    "vocab_size": 163840, "hidden_size": 7168, "intermediate_size": 33792, "num_hidden_layers": 4,
    "num_attention_heads": 96, "num_key_value_heads": 96, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "mla_use_output_gate": True,
    "linear_attn_config": {
        "full_attn_layers": [4], "kda_layers": [1, 2, 3], "head_dim": 128, "num_heads": 96,
        "short_conv_kernel_size": 4, "gate_lower_bound": -5.0, "use_full_rank_gate": True,
    },
    "hidden_act": "situ", "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0, "attn_res_block_size": 12,
    "first_k_dense_replace": 1, "num_experts": 64, "num_experts_per_token": 16, "num_shared_experts": 2,
    "moe_intermediate_size": 3072, "routed_expert_hidden_size": 3584, "latent_moe_use_norm": True,
}  # fmt: skip
KIMI_LINEAR = {
    "vocab_size": 163840, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 8,
    "num_attention_heads": 32, "num_key_value_heads": 32, "q_lora_rank": None, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "linear_attn_config": {
        "full_attn_layers": [4, 8], "kda_layers": [1, 2, 3, 5, 6, 7], "head_dim": 128, "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "hidden_act": "silu", "first_k_dense_replace": 1, "num_experts": 256, "num_experts_per_token": 8,
    "num_shared_experts": 1, "moe_intermediate_size": 1024, "routed_scaling_factor": 2.446,
}  # fmt: skip


def build(cls, config):
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            return cls(config).eval()
    finally:
        torch.set_default_dtype(before)


def event_ms(function, repeats: int, warmup: int = 2) -> float:
    """Median milliseconds between CUDA events around a call, host time included."""
    times = []
    for i in range(warmup + repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        if i >= warmup:
            times.append(start.elapsed_time(end))
    return statistics.median(times)


def prefill(model, ids):
    return model(ids, use_cache=True, logits_to_keep=1)


def cache_of(output):
    return next(output[name] for name in ("cache", "past_key_values") if output.get(name) is not None)


def decode_ms(model, batch: int, captured: bool, steps: int = STEPS) -> float:
    ids = torch.randint(3, 1000, (batch, CONTEXT), device="cuda")
    if captured:
        cache = kimi_k3.HybridCache(model.config, max_length=CONTEXT + 2 * steps)
        model(ids, logits_to_keep=1, **{kimi_k3.CACHE_ARGUMENT: cache})
        forward, name = CapturedForward(model), kimi_k3.CACHE_ARGUMENT
    else:
        output = prefill(model, ids)
        cache, forward = cache_of(output), model
        name = "cache" if "cache" in output else "past_key_values"
    token = ids[:, :1].contiguous()
    return event_ms(lambda: forward(input_ids=token, use_cache=True, **{name: cache}), steps, warmup=4)


def prefill_ms(model, length: int, repeats: int) -> tuple[float, int]:
    ids = torch.randint(3, 1000, (1, length), device="cuda")
    prefill(model, ids)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    prefill(model, ids)
    extra = torch.cuda.max_memory_allocated() - before
    return event_ms(lambda: prefill(model, ids), repeats, warmup=0), extra


def weight_bytes(model) -> tuple[float, float]:
    """Bytes of all weights but the embedding's and the routed experts', and of one routed expert of every layer."""
    experts = sum(p.nbytes for n, p in model.named_parameters() if ".experts." in n) / model.config.num_experts
    rest = sum(p.nbytes for n, p in model.named_parameters() if ".experts." not in n and "embed_tokens" not in n)
    return rest, experts


def without_triton(measure, *arguments, **options):
    dispatch.use_triton = False
    try:
        return measure(*arguments, **options)
    finally:
        dispatch.use_triton = True


def cases(slice_name, config, wanted, with_peer, bandwidth, flops):
    names = [f"{slice_name} {kind}" for kind in ("decode B=1", "decode B=16", "prefill T=2048", "prefill T=8192")]
    if not any(map(wanted, names)):
        return
    model = build(kimi_k3.KimiK3ForCausalLM, kimi_k3.KimiK3TextConfig.from_dict(dict(config)))
    peer = model
    if with_peer and config is KIMI_LINEAR:
        from transformers.models.kimi_linear import KimiLinearConfig, KimiLinearForCausalLM

        peer = build(KimiLinearForCausalLM, KimiLinearConfig(**config))
    rest, expert = weight_bytes(model)
    experts, top_k = config["num_experts"], config["num_experts_per_token"]

    for name in filter(wanted, names):
        number = int(name.split("=")[1])
        extra = {}
        if "decode" in name:
            ours = decode_ms(model, number, captured=True)
            theirs = without_triton(decode_ms, peer, number, captured=False, steps=8) if with_peer else None
            hit = experts * (1 - (1 - top_k / experts) ** number)
            least = (rest + hit * expert) / bandwidth
        else:
            ours, extra["ours_extra_bytes"] = prefill_ms(model, number, 5)
            theirs = None
            if with_peer:
                theirs, extra["peer_extra_bytes"] = without_triton(prefill_ms, peer, number, 3)
            least = number * (rest + top_k * expert - model.lm_head.weight.nbytes) / flops  # 2 bytes, 2 operations
        yield name, ours, theirs, least, extra
    del model, peer
    gc.collect()
    torch.cuda.empty_cache()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name contains this")
    parser.add_argument("--no-peer", action="store_true", help="time this package alone")
    parser.add_argument("--out", type=Path, default=RESULTS, help="lines are appended to this file")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/generate.py times GPU forwards, and torch sees no GPU here")
    bandwidth, flops = copy_bytes_per_ms(), flops_per_ms()
    shared = {**facts(), "copy_tb_per_s": round(bandwidth / 1e9, 2), "matmul_tflop_per_s": round(flops / 1e9)}
    shared["versions"] += f", transformers {transformers.__version__}"
    print(json.dumps(shared), flush=True)
    args.out.parent.mkdir(exist_ok=True)
    fla = "with fla" if importlib.util.find_spec("fla") else "without fla"
    slices = {
        "k3 slice": (K3, "this package without Triton"),
        "kimi_linear slice": (KIMI_LINEAR, f"transformers {fla}"),
    }
    with torch.no_grad():
        for name, (config, whose) in slices.items():
            for case, ours, peer, least, extra in cases(
                name, config, lambda text: args.only in text, not args.no_peer, bandwidth, flops
            ):
                record(args.out, case, ours, whose, peer, least, extra, shared, digits=3)


if __name__ == "__main__":
    main()
