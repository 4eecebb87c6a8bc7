"""LoRA for Kimi K3 with peft: which modules to adapt, and adapters on the routed experts that stay low-rank.

peft's own way to adapt 3-D expert parameters (`target_parameters`) builds the update of all experts, [E, out, in], in
every forward, and needs floating-point weights. The layer here multiplies the tokens of an expert by its two factors
and leaves the weights alone, so MXFP4 experts stay packed:

    h = act(W_gate_up x + s B_gu (A_gu x));   y = W_down h + s B_d (A_d h)          for every expert, s = alpha / r

Importing this module makes peft use it: `LoraConfig`, `get_peft_model`, `PeftModel.from_pretrained` and what is built
on them work as with any model.
"""

import functools
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraLayer, LoraModel
from peft.tuners.tuners_utils import check_adapters_to_merge
from peft.utils import get_peft_model_state_dict
from safetensors.torch import save_file
from torch import nn

from ..kernels.experts import grouped_experts
from ..kernels.mxfp4 import dequantize_mxfp4, packed_linear, quantize_mxfp4

WEIGHTS = ("gate_up", "down")


def lora_targets(
    model: nn.Module,
    attention: bool | None = None,
    dense: bool | None = None,
    experts: bool | None = None,
    shared: bool | None = None,
    latent: bool | None = None,
    router: bool | None = False,
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

    Returns:
        `task_type`, `target_modules` (full names) and, with the router, `target_parameters`.

    Raises:
        ValueError: if a part that is True, or everything together, matches nothing.
    """
    chosen = {
        "attention": (attention, lambda parent, name: parent.endswith(".self_attn")),
        "dense": (dense, lambda parent, name: parent.endswith(".mlp")),
        "experts": (experts, lambda parent, name: parent.endswith(".block_sparse_moe") and name == "experts"),
        "shared": (shared, lambda parent, name: parent.endswith(".shared_experts")),
        "latent": (latent, lambda parent, name: name in ("routed_expert_down_proj", "routed_expert_up_proj")),
        "router": (router, lambda parent, name: parent.endswith(".block_sparse_moe") and name == "gate"),
    }
    model = model.get_base_model() if isinstance(model, PeftModel) else model
    matched = {part: [] for part in chosen}
    for full_name, module in model.named_modules():
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


class LoraExperts(nn.Module, LoraLayer):
    """Adapters on all routed experts of a layer, around `KimiK3Experts` or `KimiK3PackedExperts`.

    Per adapter four tensors, the expert first as in the base weights [E, out, in]:

        lora_gate_up_A [E, r, D]    lora_gate_up_B [E, 2M, r], gate rows first
        lora_down_A    [E, r, M]    lora_down_B    [E, D, r]
    """

    adapter_layer_names = tuple(f"lora_{weight}_{factor}" for weight in WEIGHTS for factor in "AB")

    def __init__(self, base_layer, adapter_name, config, r=0, lora_alpha=1, **kwargs):
        super().__init__()
        LoraLayer.__init__(self, base_layer, **kwargs)
        self.packed = hasattr(base_layer, "gate_up_proj_packed")
        for name in self.adapter_layer_names:
            setattr(self, name, nn.ParameterDict())
        self._active_adapter = adapter_name
        self._unmerged = None  # the base weights while adapters are merged into them
        self.update_layer(adapter_name, r, lora_alpha, config)

    def _get_in_out_features(self, module):
        return None, None  # two pairs of them

    def update_layer(self, adapter_name, r, lora_alpha, config, **kwargs):
        """Add an adapter; called by peft."""
        if r <= 0:
            raise ValueError(f"r must be positive, not {r}")
        if config.lora_bias:
            raise ValueError("lora_bias=True: routed experts have no bias")
        if config.init_lora_weights not in (True, False, "gaussian"):
            raise ValueError(f"init_lora_weights={config.init_lora_weights!r} is not implemented for routed experts")
        self.resolve_lora_variant(config=config)  # refuses DoRA and the other variants
        self.r[adapter_name], self.lora_alpha[adapter_name] = r, lora_alpha
        self.scaling[adapter_name] = lora_alpha / (r**0.5 if config.use_rslora else r)
        self.use_rslora[adapter_name], self.use_dora[adapter_name] = config.use_rslora, False
        self.lora_bias[adapter_name] = False
        self.lora_dropout[adapter_name] = nn.Dropout(config.lora_dropout) if config.lora_dropout > 0 else nn.Identity()
        base = next(self.get_base_layer().parameters())
        dtype = base.dtype if base.is_floating_point() else torch.float32
        for weight in WEIGHTS:
            experts, rows, columns = self._stored(weight)[0].shape
            columns *= 2 if self.packed else 1
            a = torch.empty(experts, r, columns, dtype=dtype, device=base.device)
            b = torch.zeros(experts, rows, r, dtype=dtype, device=base.device)
            if config.init_lora_weights == "gaussian":
                nn.init.normal_(a, std=1 / r)
            else:
                nn.init.uniform_(a, -(columns**-0.5), columns**-0.5)  # as nn.Linear is initialised
            if config.init_lora_weights is False:
                nn.init.uniform_(b, -(r**-0.5), r**-0.5)
            getattr(self, f"lora_{weight}_A")[adapter_name] = nn.Parameter(a)
            getattr(self, f"lora_{weight}_B")[adapter_name] = nn.Parameter(b)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def _stored(self, weight) -> list[torch.Tensor]:
        """What the base layer stores of the weights [E, out, in]: themselves, or their codes and scales."""
        kinds = ("_packed", "_scale") if self.packed else ("",)
        return [getattr(self.get_base_layer(), f"{weight}_proj{kind}") for kind in kinds]

    def _factors(self, weight, name):
        """A [E, r, in] and B [E, out, r] of an adapter."""
        return getattr(self, f"lora_{weight}_A")[name], getattr(self, f"lora_{weight}_B")[name]

    def _acting(self):
        return [name for name in self.active_adapters if name in self.lora_gate_up_A]

    def scale_layer(self, scale: float) -> None:
        """Multiply the scale of the active adapters."""
        for name in self._acting():
            self.scaling[name] *= scale

    def unscale_layer(self, scale: float | None = None) -> None:
        """Divide the scale of the active adapters; None restores that of their configuration."""
        for name in self._acting():
            if scale is None:
                self.set_scale(name, 1)
            else:
                self.scaling[name] /= scale

    def forward(self, hidden_states, top_k_index, top_k_weights, adapter_names: list[str] | None = None):
        """As the base layer: [T, D], chosen experts [T, k] and their weights [T, k] -> [T, D]."""
        if adapter_names is not None:  # peft's argument for another adapter in each row
            raise ValueError("adapter_names: routed experts have one choice of adapters for all rows of a batch")
        if self.disable_adapters and self.merged:
            self.unmerge()
        if self.disable_adapters or self.merged or not self._acting():
            return self.base_layer(hidden_states, top_k_index, top_k_weights)
        base = self.get_base_layer()
        gate_up, down = map(self._product, WEIGHTS)
        return grouped_experts(
            hidden_states,
            top_k_index,
            top_k_weights,
            base.num_experts,
            lambda expert: (functools.partial(gate_up, expert), functools.partial(down, expert)),
            base._apply_gate,
            lambda rows, product: product(rows),
        )

    def _product(self, weight):
        """(expert, rows [n, in]) -> [n, out]: the base weight and the factors of every active adapter."""
        # unbind once: indexing the parameter for every expert would make a full-size gradient for each of them
        stored = [tensor.unbind(0) for tensor in self._stored(weight)]
        factors = [
            (*(factor.unbind(0) for factor in self._factors(weight, name)), self.lora_dropout[name], self.scaling[name])
            for name in self._acting()
        ]
        linear = packed_linear if self.packed else F.linear

        def product(expert, rows):
            result = linear(rows, *(tensor[expert] for tensor in stored))
            total = result
            for a, b, dropout, scaling in factors:
                wide = dropout(self._cast_input_dtype(rows, a[expert].dtype))
                total = total + F.linear(F.linear(wide, a[expert]), b[expert]) * scaling
            return total.to(result.dtype)

        return product

    @torch.no_grad()
    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add the adapters to the base weights, expert by expert; packed ones are rounded to MXFP4 again.

        The base weights are kept beside them for `unmerge`, which restores them to the last bit.
        """
        self._merge(check_adapters_to_merge(self, adapter_names), safe_merge, undoable=True)

    def _merge(self, names, safe_merge, undoable):
        names = [name for name in names if name in self.lora_gate_up_A]
        if not names:
            return
        if safe_merge or self.packed:  # before anything is changed
            for weight, expert, update in self._updates(names):
                if not torch.isfinite(update).all():
                    raise ValueError(f"the update of {weight} of expert {expert} by {names} is not finite")
        base = self.get_base_layer()
        if undoable and self._unmerged is None:
            self._unmerged = {key: value.clone() for key, value in base.state_dict().items()}
        for weight, expert, update in self._updates(names):
            parts = [tensor[expert] for tensor in self._stored(weight)]
            if self.packed:
                merged = quantize_mxfp4(dequantize_mxfp4(*parts, torch.float32) + update)
            else:
                merged = [parts[0].to(torch.promote_types(parts[0].dtype, torch.float32)) + update]
            for part, value in zip(parts, merged, strict=True):
                part.copy_(value)
        self.merged_adapters.extend(names)

    def _updates(self, names):
        """Yields (weight, expert, the sum of its adapters' updates [out, in] in float32, or wider)."""
        for weight in WEIGHTS:
            factors = []
            for name in names:
                a, b = self._factors(weight, name)
                wide = torch.promote_types(a.dtype, torch.float32)
                factors.append((a.to(wide), b.to(wide), self.scaling[name]))
            for expert in range(self.get_base_layer().num_experts):
                yield weight, expert, sum(b[expert] @ a[expert] * scaling for a, b, scaling in factors)

    @torch.no_grad()
    def unmerge(self) -> None:
        """Put the base weights back as they were."""
        if self._unmerged is not None:
            self.get_base_layer().load_state_dict(self._unmerged)
        self._unmerged = None
        self.merged_adapters.clear()

    @torch.no_grad()
    def unload_and_optionally_merge_module(self, merge: bool, safe_merge: bool, adapter_names: list[str] | None):
        """The base layer, with the adapters merged into it if `merge`; called by peft, and not undone later."""
        if merge:
            self._merge(check_adapters_to_merge(self, adapter_names), safe_merge, undoable=False)
        return self.get_base_layer()


class _AnyExperts(type):
    """isinstance by name: the package's classes and their copies in a checkpoint's folder."""

    def __instancecheck__(cls, module):
        return type(module).__name__ in ("KimiK3Experts", "KimiK3PackedExperts")


class RoutedExperts(metaclass=_AnyExperts):
    """What `LoraExperts` is for, in peft's table of layers."""


def _teach_peft():
    """Put our layer into the table of every LoraConfig, those that are read from a file included.

    peft has the table for this purpose, but each config starts with an empty one and none is saved. What peft would
    skip silently, because it looks for factors under other names, is refused.
    """
    original = LoraConfig.__post_init__

    @functools.wraps(original)
    def __post_init__(config):
        original(config)
        config._register_custom_module({RoutedExperts: LoraExperts})

    LoraConfig.__post_init__ = __post_init__
    combine = LoraModel.add_weighted_adapter

    @functools.wraps(combine)
    def add_weighted_adapter(self, adapters, *args, **kwargs):
        layers = [module for module in self.modules() if isinstance(module, LoraExperts)]
        if concerned := [name for name in adapters if any(name in layer.lora_gate_up_A for layer in layers)]:
            raise ValueError(
                f"add_weighted_adapter cannot combine adapters of routed experts ({', '.join(concerned)}): they act "
                "together with base_model.set_adapter([...]), weighted by set_scale of each layer"
            )
        return combine(self, adapters, *args, **kwargs)

    LoraModel.add_weighted_adapter = add_weighted_adapter


_teach_peft()


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
    save_file(exported, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config["inference_mode"] = True
    config["target_modules"] = sorted(
        {name.removeprefix("base_model.model.").partition(".lora_")[0] for name in exported}
        - {target.rpartition(".")[0] for target in config["target_parameters"] or ()}
    )
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2, default=sorted) + "\n")
