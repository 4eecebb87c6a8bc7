"""What a context costs: time to first token, decoding time and cache of a hybrid, beside a model of full attention.

The peer has the same configuration with MLA in every layer, which is what the Kimi Linear report compares with. Both
have random weights: what is measured does not depend on them. They run in turn in one process.
"""

import copy
import dataclasses
import hashlib
import json
import time
from pathlib import Path

import torch
from tqdm import tqdm

from .. import CACHE_ARGUMENT, HybridCache, KimiK3ForCausalLM, KimiK3TextConfig
from ..graph_kimi_k3 import CapturedForward, can_capture
from ..runs_kimi_k3 import keeping, lock
from .memory import PeakMemory
from .report import BLUE, ORANGE, length_axis, panels_of
from .run import Results, short_length, versions
from .sizing import EvalError

HYBRID, FULL = "hybrid", "full attention"
# Seconds. The first prefill of a length may compile a kernel, which must not be counted: shorter prefills run twice,
# and the second one counts.
COMPILING = 10.0


@dataclasses.dataclass(frozen=True)
class CostPlan:
    """What is measured: `lengths` tokens of `rows` sequences at once, read in chunks, then `steps` tokens decoded."""

    lengths: tuple[int, ...]
    rows: int = 1
    steps: int = 32
    chunk: int = 4096


def full_attention(config: KimiK3TextConfig) -> KimiK3TextConfig:
    """The same model with MLA in the place of every KDA layer."""
    config = copy.deepcopy(config)
    layers = list(range(1, config.num_hidden_layers + 1))
    config.linear_attn_config = {**config.linear_attn_config, "kda_layers": [], "full_attn_layers": layers}
    return config


def random_model(config: KimiK3TextConfig, device: torch.device, dtype: torch.dtype) -> KimiK3ForCausalLM:
    """A model of the configuration with random weights, its experts not packed."""
    config = copy.deepcopy(config)
    config.expert_quantization = None
    torch.manual_seed(0)
    return KimiK3ForCausalLM(config).to(dtype).to(device).eval()


def measure(config: KimiK3TextConfig, plan: CostPlan, folder: Path, device: torch.device, dtype: torch.dtype) -> list:
    """Measure what is missing in the folder's `cost.jsonl`; returns all of its lines, a dict for each length and model.

    Raises:
        EvalError: for a folder that cannot be written, or that holds another model, machine or plan.
    """
    machine = f"CPU, {torch.get_num_threads()} thread(s)"
    if device.type == "cuda":
        machine = torch.cuda.get_device_name(device)
    settings = json.dumps([config.to_dict(), plan.rows, plan.steps, plan.chunk], sort_keys=True, default=str)
    identity = {
        "model": hashlib.sha256(settings.encode()).hexdigest()[:16],
        "dtype": str(dtype).removeprefix("torch."),
        "machine": machine,
        "versions": versions(),
    }
    with lock(folder, EvalError):
        results = Results(folder / "cost.jsonl", identity, ("length", "attention"))
        with keeping(results.kept):
            _measure_missing(config, plan, results, device, dtype)
    return sorted(results.lines, key=lambda line: (line["length"], line["attention"] != HYBRID))


def _measure_missing(config, plan, results, device, dtype):
    todo = [length for length in sorted(plan.lengths) if (length, FULL) not in results.done]
    if todo:
        configs = {HYBRID: config, FULL: full_attention(config)}
        models = {kind: random_model(config, device, dtype) for kind, config in configs.items()}
        _both(models, plan, min(2 * plan.chunk, todo[0]))  # first-call costs
    for length in tqdm(todo, desc="cost", unit="length"):
        lines = [{**line, "rows": plan.rows} for line in _both(models, plan, length)]
        results.append([line for line in lines if results.key(line) not in results.done])


@torch.no_grad()
def _both(models, plan, length):
    """The lines of one length: the prefills one after the other, then the steps in turn, so that load hits both models.

    On a GPU a step is one captured graph, as in `generate(cache_implementation="static")`.
    """
    lines, running, forwards = {}, {}, dict(models)
    for kind, model in models.items():
        token, cache, measured = _prefill(model, plan, length)
        if model.device.type != "cpu" and measured["first_token_s"] < COMPILING:
            token, cache, measured = _prefill(model, plan, length)
        lines[kind] = {"length": length, "attention": kind, "cache_bytes": cache.nbytes, **measured}
        if can_capture(model):
            cache, forwards[kind] = _static(model, cache, length + plan.steps), CapturedForward(model)
        running[kind] = token, cache, []
    for _ in range(plan.steps):
        for kind, (token, cache, steps) in running.items():
            started = _now(token.device)
            token = _forward(forwards[kind], token, cache)
            steps.append(_now(token.device) - started)
            running[kind] = token, cache, steps
    for kind, (_, _, steps) in running.items():
        lines[kind]["decode_ms"] = round(1e3 * min(steps), 4)  # the step that load on the machine touched least
    return list(lines.values())


def _forward(model, ids, cache):
    """[rows, T] -> the next tokens [rows, 1]; the cache is filled in place."""
    return model(input_ids=ids, use_cache=True, logits_to_keep=1, **{CACHE_ARGUMENT: cache}).logits[:, -1:].argmax(-1)


def _static(model, cache, places):
    """A static cache with room for `places` tokens, at the boundary of a filled one."""
    static = HybridCache(model.config, max_length=places)
    for layer, filled in zip(static.layers, cache.layers, strict=True):
        layer.take(filled)
    return static


def _prefill(model, plan, length):
    """(next tokens [rows, 1], cache, {seconds and, on a GPU, bytes as `PeakMemory.line` names them})."""
    device, cache = model.device, HybridCache(model.config)
    cache.reserve(length + plan.steps)
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(model.config.vocab_size, (plan.rows, length), generator=generator).to(device)
    memory = PeakMemory(model)
    memory.start()
    started = _now(device)
    for part in ids.split(plan.chunk, dim=1):
        with memory.forward():
            token = _forward(model, part, cache)
    first = _now(device) - started
    return token, cache, {"first_token_s": round(first, 4), **memory.line(cache.nbytes)}


def _now(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def draw(lines: list[dict], picture: Path) -> None:
    """Three panels over the length: time to first token, time a decoded token, bytes of the cache; both models."""
    quantities = (
        ("first_token_s", 1, "time to first token, s", "log"),
        ("decode_ms", 1, "decoding, ms a token", "linear"),
        ("cache_bytes", 1e-6, "cache, MB", "log"),
    )
    figure, panels = panels_of(len(quantities), 3.2)
    lengths = sorted({line["length"] for line in lines})
    for axes, (name, scale, label, kind) in zip(panels, quantities, strict=True):
        for attention, color, marker in ((HYBRID, BLUE, "o"), (FULL, ORANGE, "s")):
            points = [(line["length"], line[name] * scale) for line in lines if line["attention"] == attention]
            style = "-" if attention == HYBRID else "--"
            axes.plot(*zip(*points, strict=True), color=color, marker=marker, linestyle=style, label=attention)
        last = {line["attention"]: line[name] for line in lines if line["length"] == lengths[-1]}
        ratio = last[FULL] / last[HYBRID]
        axes.set_title(f"{label}\nfull / hybrid at {short_length(lengths[-1])}: {ratio:.2f}", fontsize=9)
        if kind == "log":
            axes.set_yscale("log", base=2)
            axes.yaxis.set_major_formatter("{x:g}")
        else:
            axes.set_ylim(bottom=0)
        length_axis(axes, lengths)
        axes.legend(fontsize=8)
    first = lines[0]
    figure.supxlabel(f"tokens of context, {first['rows']} at once; {first['machine']}, {first['dtype']}", fontsize=9)
    figure.savefig(picture, dpi=110)


def table(lines: list[dict]) -> str:
    """The measurements as lines for a terminal."""
    head = f"{'tokens':>10}  {'attention':<15}{'first token':>12}{'decode':>11}{'cache':>13}"
    text = [head + ("   peak / (weights + cache + chunk)" if "peak_bytes" in lines[0] else "")]
    for line in lines:
        times = f"{line['first_token_s']:>10.2f} s{line['decode_ms']:>8.2f} ms{line['cache_bytes'] / 1e6:>10.2f} MB"
        bound = ""
        if "peak_bytes" in line:
            bound = f"   {line['peak_bytes'] / 1e9:.3f} GB, {line['peak_ratio']:.2f}"
        text.append(f"{line['length']:>10,}  {line['attention']:<15}{times}{bound}")
    return "\n".join(text)
