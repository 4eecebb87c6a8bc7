"""LoRA for Kimi K3 with peft: which modules to adapt, and the way out to engines with unfused experts.

The layer on routed experts is `LoraExperts` in `lora_kimi_k3.py`, which peft uses wherever they are a target.
"""

import json
from pathlib import Path

from peft import PeftModel
from peft.utils import get_peft_model_state_dict
from torch import nn

from ..files_kimi_k3 import save_described

_VISION = ("vision_tower.", "mm_projector.")


def lora_targets(
    model: nn.Module,
    attention: bool | None = None,
    dense: bool | None = None,
    experts: bool | None = None,
    shared: bool | None = None,
    latent: bool | None = None,
    router: bool | None = False,
    vision: bool | None = False,
) -> dict:
    """Arguments of `LoraConfig` that adapt exactly the chosen parts: `LoraConfig(r=8, **lora_targets(model))`.

    A part that is True must exist; a part that is None is taken where the model has it.

    Args:
        model: a Kimi K3 model, with or without adapters.
        attention: every projection of the KDA and MLA layers.
        dense: gate, up and down of the MLP layers without experts.
        experts: all routed experts, gate, up and down of each.
        shared: gate, up and down of the shared experts.
        latent: the projections into and out of the experts' latent width.
        router: the router's weight. Off by default, because it moves tokens to experts that have not seen them.
        vision: every Linear of the vision tower and the projector. Off by default, because text does not reach them.

    Returns:
        `task_type`, `target_modules` (full names) and, with the router, `target_parameters`.

    Raises:
        ValueError: if a part that is True, or everything together, matches nothing.
    """
    chosen = {
        "attention": (attention, lambda parent, name: parent.endswith(".self_attn")),
        "dense": (dense, lambda parent, name: parent.endswith(".mlp") and not parent.startswith(_VISION)),
        "experts": (experts, lambda parent, name: parent.endswith(".block_sparse_moe") and name == "experts"),
        "shared": (shared, lambda parent, name: parent.endswith(".shared_experts")),
        "latent": (latent, lambda parent, name: name in ("routed_expert_down_proj", "routed_expert_up_proj")),
        "router": (router, lambda parent, name: parent.endswith(".block_sparse_moe") and name == "gate"),
        "vision": (vision, lambda parent, name: parent.startswith(_VISION)),
    }
    model = model.get_base_model() if isinstance(model, PeftModel) else model
    matched = {part: [] for part in chosen}
    for full_name, module in model.named_modules():
        full_name = full_name.removeprefix("language_model.")  # so that a text-only class takes the adapter as well
        parent, _, name = full_name.rpartition(".")
        linear = getattr(module, "base_layer", module)  # below an existing adapter
        for part, (adapted, belongs) in chosen.items():
            fits = isinstance(linear, nn.Linear) or part in ("experts", "router")
            if adapted is not False and fits and belongs(parent, name):
                matched[part].append(full_name)
    for part, (adapted, _) in chosen.items():
        if adapted and not matched[part]:
            raise ValueError(f"{type(model).__name__} has nothing to adapt for {part}=True")
    routers = matched.pop("router")
    modules = [name for names in matched.values() for name in names]
    if not modules and not routers:
        raise ValueError(f"nothing of {type(model).__name__} is chosen for adaptation")
    targets = {"task_type": "CAUSAL_LM", "target_modules": modules}
    if routers:
        targets["target_parameters"] = [f"{name}.weight" for name in routers]
    return targets


def export_expert_loras(model: PeftModel, folder: str | Path, adapter_name: str = "default") -> None:
    """Write an adapter with one LoRA for each matrix of each expert, as engines with unfused experts read it.

    `...experts.lora_gate_up_A` [E, r, D] and the like become, for every expert e and in peft's ordinary layout,
    `...experts.{e}.w1` (gate), `.w3` (up) and `.w2` (down) `.lora_A.weight` [r, in] and `.lora_B.weight` [out, r]. The
    gate and the up matrix have the same factor A. The rest of the adapter is written as it is.

    Args:
        model: the one with the adapter.
        folder: gets `adapter_model.safetensors` and `adapter_config.json`.
        adapter_name: of the adapter to write.
    """
    config = model.peft_config[adapter_name].to_dict()
    exported = {}
    for name, tensor in get_peft_model_state_dict(model, adapter_name=adapter_name).items():
        prefix, _, kind = name.rpartition(".lora_")
        if kind not in ("gate_up_A", "gate_up_B", "down_A", "down_B"):
            exported[name] = tensor.contiguous()
            continue
        weight, _, factor = kind.rpartition("_")
        matrices = ("w1", "w3") if weight == "gate_up" else ("w2",)
        layer = model.get_submodule(prefix)
        for expert, of_expert in enumerate(tensor):
            parts = of_expert.chunk(len(matrices)) if factor == "B" else [of_expert] * len(matrices)
            for matrix, part in zip(matrices, parts, strict=True):
                exported[f"{prefix}.{expert}.{matrix}.lora_{factor}.weight"] = part.clone().contiguous()
                # a pattern of the configuration names the experts of a layer, not each of their matrices
                for patterns, common, value in (
                    ("rank_pattern", "r", layer.r[adapter_name]),
                    ("alpha_pattern", "lora_alpha", layer.lora_alpha[adapter_name]),
                ):
                    if value != config[common]:
                        full_name = f"{prefix}.{expert}.{matrix}".removeprefix("base_model.model.")
                        config[patterns] = {full_name: value, **(config[patterns] or {})}
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config["inference_mode"] = True
    modules = {name.removeprefix("base_model.model.").partition(".lora_")[0] for name in exported}
    parameters = tuple(f".{target.rpartition('.')[0]}" for target in config["target_parameters"] or ())
    config["target_modules"] = sorted(name for name in modules if not f".{name}".endswith(parameters))
    description = json.dumps(config, indent=2, default=sorted)
    save_described(exported, folder / "adapter_model.safetensors", description, folder / "adapter_config.json")
