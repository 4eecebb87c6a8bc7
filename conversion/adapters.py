"""LoRA adapters of other engines into the form that `kimi_k3.training` loads; the way out is `export_expert_loras`.

Engines with unfused experts adapt each matrix of each expert, `...experts.{e}.w1` (gate), `.w3` (up) and `.w2` (down),
with `lora_A.weight` [r, in] and `lora_B.weight` [out, r]. Ours are stacked over the experts, gate and up together:

    lora_gate_up_A [E, r, D]    lora_gate_up_B [E, 2M, r], gate rows first
    lora_down_A    [E, r, M]    lora_down_B    [E, D, r]

Gate and up share one factor A here. Where a file gives them two, both are kept, one above the other, and the rank
doubles; the update stays the same, since everything that is added is zero.
"""

import json
import os
import re
from pathlib import Path

import torch
import torch.nn.functional as F
from peft.utils.other import get_pattern_key
from safetensors.torch import load_file

from ..files_kimi_k3 import save_described
from .source import ConversionError, read_config, read_json

_EXPERT_FACTOR = re.compile(r"^(.*\.experts)\.(\d+)\.(w[123])\.lora_([AB])\.weight$")
_OF_AN_EXPERT = re.compile(r"\.experts\.\d+\.")
_EXPERT_MODULE = re.compile(r"experts(\\)?\.\d+(\\)?\.w[123]$")
_PREFIX = "base_model.model."


def import_expert_loras(source: str | os.PathLike, destination: str | os.PathLike, base: str | os.PathLike) -> None:
    """Rewrite an adapter for unfused experts as one that `PeftModel.from_pretrained` loads onto our model.

    Args:
        source: folder with `adapter_config.json` and `adapter_model.safetensors`, in peft's ordinary layout.
        destination: folder to make.
        base: folder of the model that the adapter belongs to; only its configuration is read.

    Raises:
        ConversionError: for an adapter without expert factors, with half a pair of factors, of a wrong shape, of
            another kind (DoRA), or whose matrices have different ranks or scales in one layer.
    """
    source, destination = Path(source), Path(destination)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        if not (source / name).is_file():
            raise ConversionError(f"{source} is not an adapter: it has no {name}")
    if destination.exists() and any(destination.iterdir()):
        raise ConversionError(f"{destination} is there already")
    config = read_json(source / "adapter_config.json")
    text_config = read_config(Path(base)).get_text_config(decoder=True)
    experts = text_config.num_experts or 0
    width = text_config.routed_expert_hidden_size or text_config.hidden_size
    sizes = {"w1": (text_config.moe_intermediate_size, width), "w2": (width, text_config.moe_intermediate_size)}
    sizes["w3"] = sizes["w1"]

    tensors, layers = {}, {}
    for name, tensor in load_file(source / "adapter_model.safetensors").items():
        if match := _EXPERT_FACTOR.match(name):
            prefix, expert, matrix, factor = match.groups()
            if int(expert) >= experts:
                raise ConversionError(f"{name}: the model in {base} has {experts} routed experts")
            layers.setdefault(prefix, {})[int(expert), matrix, factor] = tensor
        elif _OF_AN_EXPERT.search(name):
            raise ConversionError(f"{name} is not lora_A.weight or lora_B.weight of w1, w2 or w3: only those are read")
        else:
            tensors[name] = tensor
    if not layers:
        raise ConversionError(f"{source} adapts no routed expert: it needs no rewriting")

    patterns = {key: _without_experts(config.get(key)) for key in ("rank_pattern", "alpha_pattern")}
    for prefix, factors in layers.items():
        rank, alpha = _settings(prefix, factors, config, sizes)
        fused, widened = _fuse(factors, experts, rank, sizes)
        tensors.update({f"{prefix}.{name}": tensor for name, tensor in fused.items()})
        if widened:  # so that the scale, alpha / r or alpha / sqrt(r), stays
            rank, alpha = 2 * rank, alpha * (2**0.5 if config.get("use_rslora") else 2)
        module = prefix.removeprefix(_PREFIX)
        # first, and also where they equal the common values: the file's own patterns may name this layer
        patterns["rank_pattern"] = {module: rank, **patterns["rank_pattern"]}
        patterns["alpha_pattern"] = {module: alpha, **patterns["alpha_pattern"]}
    config |= patterns
    modules = {name.removeprefix(_PREFIX).partition(".lora_")[0] for name in tensors}
    parameters = tuple(f".{target.rpartition('.')[0]}" for target in config.get("target_parameters") or ())
    config["target_modules"] = sorted(name for name in modules if not f".{name}".endswith(parameters))

    destination.mkdir(parents=True, exist_ok=True)
    description = json.dumps(config, indent=2)
    save_described(tensors, destination / "adapter_model.safetensors", description, destination / "adapter_config.json")


def _without_experts(pattern: dict | None) -> dict:
    return {name: value for name, value in (pattern or {}).items() if not _EXPERT_MODULE.search(name)}


def _settings(prefix, factors, config, sizes) -> tuple[int, float]:
    """Rank and alpha that all adapted matrices of a layer have."""
    pairs = set()
    for expert, matrix, factor in sorted(factors):
        name = f"{prefix}.{expert}.{matrix}"
        if (expert, matrix, "B" if factor == "A" else "A") not in factors:
            raise ConversionError(f"{name} has lora_{factor} without its partner")
        if factor == "B":
            continue
        a, b = factors[expert, matrix, "A"], factors[expert, matrix, "B"]
        rows, columns = sizes[matrix]
        if a.shape[1:] != (columns,) or b.shape != (rows, a.shape[0]):
            raise ConversionError(
                f"{name} has lora_A {list(a.shape)} and lora_B {list(b.shape)}; the matrix is [{rows}, {columns}], so "
                f"[r, {columns}] and [{rows}, r] are needed"
            )
        alphas = config.get("alpha_pattern") or {}
        alpha = alphas.get(get_pattern_key(alphas, name.removeprefix(_PREFIX)), config["lora_alpha"])
        pairs.add((a.shape[0], alpha))
    if len(pairs) > 1:
        raise ConversionError(
            f"the matrices of {prefix} have different ranks or scales (r, alpha): {sorted(pairs)}; here one adapter of "
            "a layer has one of each"
        )
    return pairs.pop()


def _fuse(factors, experts, rank, sizes) -> tuple[dict[str, torch.Tensor], bool]:
    """The four stacked tensors of a layer, and whether the rank was doubled. Experts without an adapter get zeros."""

    like = next(iter(factors.values()))

    def stacked(matrix, factor):
        rows, columns = sizes[matrix]
        zeros = like.new_zeros((rank, columns) if factor == "A" else (rows, rank))
        return torch.stack([factors.get((expert, matrix, factor), zeros) for expert in range(experts)])

    (gate_a, gate_b), (up_a, up_b), (down_a, down_b) = (
        (stacked(matrix, "A"), stacked(matrix, "B")) for matrix in ("w1", "w3", "w2")
    )
    widened = not torch.equal(gate_a, up_a)
    if widened:  # the second half of the rank belongs to up alone: gate and down are zero there
        gate_a = torch.cat([gate_a, up_a], dim=1)
        gate_b, up_b = F.pad(gate_b, (0, rank)), F.pad(up_b, (rank, 0))
        down_a, down_b = F.pad(down_a, (0, 0, 0, rank)), F.pad(down_b, (0, rank))
    gate_up_b = torch.cat([gate_b, up_b], dim=1)
    fused = {"gate_up_A": gate_a, "gate_up_B": gate_up_b, "down_A": down_a, "down_B": down_b}
    return {f"lora_{name}": tensor for name, tensor in fused.items()}, widened
