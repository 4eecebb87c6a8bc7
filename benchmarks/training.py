"""Training steps of a 0.5B dense and a 1.5B MoE model beside transformers' native `kimi_linear`, with the same weights.

    python benchmarks/training.py [--only dense] [--no-peer] [--out benchmarks/results/training.jsonl]
    python benchmarks/training.py --captured [--only MoE]    # a captured step beside the same step as it is
    python benchmarks/training.py --tiny --device cpu        # the same code on models of a few layers; writes nothing

Kimi-Linear's layers (3 KDA, 1 MLA, no mix over depth, no latent experts, no low-rank query), which both classes have;
random bfloat16 weights, written once and read by both. A step is forward, loss of all tokens, backward and fused AdamW
on one row of 8192 tokens, with and without gradient checkpointing. The native class runs flash-linear-attention's KDA
where that is installed (every line names what it ran), and transformers' grouped matrix product for experts. The two
take turns in one process, four steps in a row each, without waiting for the GPU in between, as in a training loop that
does not log every step; medians of CUDA events. Memory is the most that is allocated in a step, weights,
gradients and optimizer state included, without the other model's. The roofline is 6 operations a token and weight used
over the rate of a large matrix product; recomputation is not counted. Every line has both losses of the first step.

With `--captured` both sides are this package's, ours with forward and backward as a CUDA graph (`CapturedStep`). Lines
then say which share of a step the GPU works, its kernels' times as a profiler sees them over the step's own without
one, how many kernels that are, whether the losses on the same weights are equal to the bit and how far gradients are
apart, what a capture takes and the memory that a graph keeps. Kernels of both, side by side, are printed.
"""

import argparse
import collections
import datetime
import gc
import importlib.util
import inspect
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent))

import kimi_k3
from kimi_k3.training import CapturedStep

RESULTS = Path(__file__).parent / "results" / "training.jsonl"
LENGTH, TURNS, WARMUP, IN_A_ROW, PROFILED = 8192, 5, 1, 4, 3
LAYERS = {"full_attn_layers": [4, 8, 12, 16], "kda_layers": [i for i in range(1, 17) if i % 4], "head_dim": 128}
SHARED = {
    "vocab_size": 32768, "num_hidden_layers": 16, "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "hidden_act": "silu", "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
DENSE = {
    **SHARED, "hidden_size": 1536, "intermediate_size": 3584, "num_attention_heads": 12, "num_key_value_heads": 12,
    "linear_attn_config": {**LAYERS, "num_heads": 12, "short_conv_kernel_size": 4}, "first_k_dense_replace": 16,
    "num_experts": 8, "num_experts_per_token": 2, "num_shared_experts": 1, "moe_intermediate_size": 256,
}  # fmt: skip
MOE = {
    **SHARED, "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8, "num_key_value_heads": 8,
    "linear_attn_config": {**LAYERS, "num_heads": 8, "short_conv_kernel_size": 4}, "first_k_dense_replace": 1,
    "num_experts": 64, "num_experts_per_token": 8, "num_shared_experts": 1, "moe_intermediate_size": 448,
    "routed_scaling_factor": 2.446,
}  # fmt: skip
MODELS = {"dense 0.5B": DENSE, "MoE 1.5B": MOE}


def tiny(config):
    """The same model with four layers and small sizes."""
    layers = {"full_attn_layers": [4], "kda_layers": [1, 2, 3], "head_dim": 16, "num_heads": 2}
    return {
        **config, "vocab_size": 512, "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 96,
        "num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8, "v_head_dim": 16, "linear_attn_config": {**layers, "short_conv_kernel_size": 4},
        "num_experts": 8, "num_experts_per_token": 2, "moe_intermediate_size": 32,
        "first_k_dense_replace": min(config["first_k_dense_replace"], 4),
    }  # fmt: skip


def write_model(config, folder, device):
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = kimi_k3.KimiK3ForCausalLM(kimi_k3.KimiK3TextConfig.from_dict(dict(config)))
    finally:
        torch.set_default_dtype(before)
    model.save_pretrained(folder)
    return weights_used(model)


def weights_used(model):
    """(all weights, those that a token is multiplied by: no embedding, top-k of the routed experts)."""
    config, total, used = model.config, 0, 0
    for name, weight in model.named_parameters():
        total += weight.numel()
        if ".experts." in name:
            used += weight.numel() * config.num_experts_per_token / config.num_experts
        elif "embed_tokens" not in name:
            used += weight.numel()
    return total, used


class Side:
    """One class with its weights and optimizer, trained on one row of random tokens."""

    def __init__(self, cls, folder, options):
        self.device = options.device
        self.model = cls.from_pretrained(folder, dtype=torch.bfloat16).to(self.device).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(3, self.model.config.vocab_size, (1, options.length), generator=generator)
        self.ids = self.ids.to(self.device)

    def checkpointing(self, wanted):
        if wanted:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            self.model.gradient_checkpointing_disable()

    def backward(self):
        loss = self.model(input_ids=self.ids, labels=self.ids, use_cache=False).loss
        loss.backward()
        return loss.detach()

    def step(self):
        loss = self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    def milliseconds(self):
        """Of a step, several in a row."""
        if self.device != "cuda":
            started = time.perf_counter()
            self.step()
            return 1e3 * (time.perf_counter() - started)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for _ in range(IN_A_ROW):
            self.step()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / IN_A_ROW

    def held(self):
        """Bytes of weights and optimizer state."""
        state = [value for values in self.optimizer.state.values() for value in values.values()]
        return sum(tensor.nbytes for tensor in [*self.model.parameters(), *self.model.buffers(), *state])

    def peak(self, others):
        """The most bytes of a step, without those of other models."""
        if self.device != "cuda":
            return 0
        torch.cuda.reset_peak_memory_stats()
        self.step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - others


class CapturedSide(Side):
    """The same with forward and backward as a graph."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.captured = CapturedStep(self.model)

    def backward(self):
        return self.captured(input_ids=self.ids, labels=self.ids)


STEPS = {"ours": CapturedSide, "peer": Side}


def native():
    from transformers.models.kimi_linear import KimiLinearForCausalLM

    return KimiLinearForCausalLM


def native_kernels():
    """The packages whose KDA and convolution the native class runs; torch where they are not installed."""
    from transformers.models.kimi_linear import modeling_kimi_linear as modeling

    chosen = []
    for function in (modeling.chunk_kimi_delta_attention, modeling.causal_conv1d_fn):
        package = inspect.getclosurevars(function).nonlocals["implementation"].__module__.partition(".")[0]
        chosen.append("torch" if package == "transformers" else package)
    return f"KDA of {chosen[0]}, convolution of {chosen[1]}"


def cases(name, config, options, wanted):
    """Yields (case, ours ms, peer ms, roofline ms, extra fields)."""
    names = {False: f"train {name} T={options.length}", True: f"train {name} T={options.length}, checkpointing"}
    if not any(map(wanted, names.values())):
        return
    with tempfile.TemporaryDirectory() as folder:
        total, used = write_model(config, folder, options.device)
        sides = {"ours": Side(kimi_k3.KimiK3ForCausalLM, folder, options)}
        if options.peer:
            sides["peer"] = Side(native(), folder, options)
    extra = {"parameters": total, "parameters_used": round(used)}
    for who, side in sides.items():
        side.checkpointing(False)
        extra[f"{who}_first_loss"] = round(side.step().item(), 4)
    for checkpointed, case in names.items():
        if not wanted(case):
            continue
        for side in sides.values():
            side.checkpointing(checkpointed)
        times = {who: [] for who in sides}
        for turn in range(WARMUP + options.turns):
            for who, side in sides.items():
                elapsed = side.milliseconds()
                if turn >= WARMUP:
                    times[who].append(elapsed)
        ms = {who: statistics.median(found) for who, found in times.items()}
        found = dict(extra)
        for who, side in sides.items():
            others = sum(other.held() for other in sides.values() if other is not side)
            found[f"{who}_extra_bytes"] = side.peak(others)
            found[f"{who}_tokens_per_s"] = round(1e3 * options.length / ms[who])
        least = 6 * used * options.length / options.flops if options.flops else 0.0
        yield case, ms["ours"], ms.get("peer"), least, found
    del sides, side
    gc.collect()
    if options.device == "cuda":
        torch.cuda.empty_cache()


def kernels_of(side):
    """name -> (milliseconds in a step, calls) of the kernels and copies of one, as a profiler sees them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(PROFILED):
            side.step()
        torch.cuda.synchronize()
    found = collections.defaultdict(lambda: (0.0, 0.0))
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            ms, calls = found[event.name]
            found[event.name] = ms + event.device_time_total / 1e3 / PROFILED, calls + 1 / PROFILED
    return found


def print_kernels(ours, peer):
    """The ten kernels that take longest, and the ten whose times differ most, side by side."""
    names = sorted({*ours, *peer}, key=lambda name: -max(ours[name], peer[name])[0])
    apart = sorted(names, key=lambda name: -abs(ours[name][0] - peer[name][0]))
    for title, chosen in ("by time", names[:10]), ("by difference", apart[:10]):
        print(f"kernels {title}: captured ms, calls; as it is ms, calls")
        for name in chosen:
            (ms, calls), (peer_ms, peer_calls) = ours[name], peer[name]
            print(f"  {ms:8.3f} {calls:6.0f}  {peer_ms:8.3f} {peer_calls:6.0f}  {name[:110]}", flush=True)


def differences(side):
    """On the same weights: whether the captured loss is that of the step as it is, and how far gradients are apart, and
    as far as two steps as they are, which add in any order in places; relative, of the parameter where it is most."""

    def passed(backward):
        loss = backward()
        grads = {name: weight.grad.clone() for name, weight in side.model.named_parameters() if weight.grad is not None}
        side.optimizer.zero_grad(set_to_none=True)
        return loss, grads

    def apart(one, other):
        most = {name: ((grad - other[name]).norm() / grad.norm().clamp_min(1e-30)).item() for name, grad in one.items()}
        name = max(most, key=most.get)
        return [name, float(f"{most[name]:.2g}")]

    loss, grads = passed(super(CapturedSide, side).backward)
    again = passed(super(CapturedSide, side).backward)
    captured = passed(side.backward)
    return {
        "losses_are_equal": loss.item() == captured[0].item(),
        "gradients_apart": apart(grads, captured[1]),
        "gradients_apart_as_it_is": apart(grads, again[1]),
    }


def first_steps(side):
    """Losses of the first three steps, seconds of the second, and bytes that the process keeps more after it."""
    losses, on_gpu = [side.step().item()], side.device == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
    before, started = torch.cuda.memory_reserved() if on_gpu else 0, time.perf_counter()
    losses.append(side.step().item())
    seconds = time.perf_counter() - started
    if on_gpu:
        torch.cuda.empty_cache()
    kept = torch.cuda.memory_reserved() - before if on_gpu else 0
    return [*losses, side.step().item()], seconds, kept


def captured_cases(name, config, options, wanted):
    """Yields (case, captured ms, eager ms, roofline ms, extra fields)."""
    case = f"captured step, {name} T={options.length}"
    if not wanted(case):
        return
    with tempfile.TemporaryDirectory() as folder:
        total, used = write_model(config, folder, options.device)
        sides = {kind: side(kimi_k3.KimiK3ForCausalLM, folder, options) for kind, side in STEPS.items()}
    losses, seconds, kept = zip(*map(first_steps, sides.values()), strict=True)
    print(f"losses of the first steps: captured {losses[0]}, as it is {losses[1]}", flush=True)
    extra = {"parameters": total, "parameters_used": round(used), **differences(sides["ours"])}
    extra |= {"ours_first_loss": round(losses[0][0], 4), "capture_s": round(seconds[0], 2), "graph_bytes": kept[0]}
    times = {who: [] for who in sides}
    for turn in range(WARMUP + options.turns):
        for who, side in sides.items():
            elapsed = side.milliseconds()
            if turn >= WARMUP:
                times[who].append(elapsed)
    ms = {who: statistics.median(found) for who, found in times.items()}
    kernels = {who: kernels_of(side) for who, side in sides.items()} if options.device == "cuda" else {}
    for who, found in kernels.items():
        working, calls = map(sum, zip(*found.values(), strict=True))
        extra |= {f"{who}_gpu_share": round(working / ms[who], 3), f"{who}_kernels": round(calls)}
    if kernels:
        print_kernels(**kernels)
    extra |= {f"{who}_tokens_per_s": round(1e3 * options.length / ms[who]) for who in sides}
    least = 6 * used * options.length / options.flops if options.flops else 0.0
    yield case, ms["ours"], ms["peer"], least, extra


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name contains this")
    parser.add_argument("--no-peer", dest="peer", action="store_false", help="time this package alone")
    parser.add_argument("--captured", action="store_true", help="time a captured step beside the same as it is")
    parser.add_argument("--tiny", action="store_true", help="four layers of width 64, 256 tokens; nothing is written")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=TURNS, help="timed turns (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="lines are appended to this file")
    options = parser.parse_args()
    if options.device == "cpu" and not options.tiny:
        parser.error("on a CPU only --tiny ends in reasonable time")
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("benchmarks/training.py times a GPU, and torch sees none here: --tiny --device cpu tries the code")
    if options.tiny:
        options.length, options.turns, options.out = min(options.length, 256), min(options.turns, 2), Path("/dev/null")
    from kda import facts, record

    if options.device == "cuda":
        from layers import flops_per_ms

        options.flops = flops_per_ms()
        shared = {**facts(), "matmul_tflop_per_s": round(options.flops / 1e9), "steps_in_a_row": IN_A_ROW}
    else:
        options.flops = None
        shared = {"gpu": None, "versions": f"torch {torch.__version__}", "date": datetime.date.today().isoformat()}
    shared["versions"] += f", transformers {transformers.__version__}"
    run, whose = cases, f"transformers kimi_linear ({native_kernels()})" if options.peer else None
    if options.captured:
        run, whose, options.peer = captured_cases, "the same step as it is", False
    if options.peer and importlib.util.find_spec("fla"):
        shared["versions"] += f", fla {importlib.import_module('fla').__version__}"
    print(json.dumps(shared), flush=True)
    options.out.parent.mkdir(exist_ok=True)
    for name, config in MODELS.items():
        config = tiny(config) if options.tiny else config
        for case, ours, peer, least, extra in run(name, config, options, lambda text: options.only in text):
            record(options.out, case, ours, whose, peer, least, extra, shared, digits=2)


if __name__ == "__main__":
    main()
