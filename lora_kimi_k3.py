"""What peft must know of Kimi K3: adapters on the routed experts that stay low-rank, and refusals that change nothing.

peft's own way to adapt 3-D expert parameters (`target_parameters`) builds the update of all experts, [E, out, in], in
every forward, and needs floating-point weights. The layer here multiplies the tokens of an expert by its two factors
and leaves the weights alone, so MXFP4 experts stay packed:

    h = act(W_gate_up x + s B_gu (A_gu x));   y = W_down h + s B_d (A_d h)          for every expert, s = alpha / r

`adapters_kimi_k3.py` imports this file when peft is imported, and it teaches peft at its end: adapters load in any
process that has the model, and processes without adapters do not pay for the import of peft. A module named as a
target gets the layer here; a parameter that is named in `target_parameters` gets peft's own.
"""

import contextlib
import copy
import functools
import inspect
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .kernels_kimi_k3 import experts, mxfp4

try:  # transformers' check of a folder's code passes over the imports of a `try`: peft is not needed to load a model
    import peft
    from peft.tuners.adalora import AdaLoraLayer, AdaLoraModel
    from peft.tuners.lora import LoraConfig, LoraLayer, LoraModel
    from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer, check_adapters_to_merge, onload_layer
    from peft.utils import AuxiliaryTrainingWrapper, get_peft_model_state_dict, hotswap
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("adapters need peft: pip install 'kimi-k3[train]'", name=error.name) from error

WEIGHTS = ("gate_up", "down")


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

    def update_layer(self, adapter_name: str, r: int, lora_alpha: float, config: Any, **kwargs: Any) -> None:
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
            count, rows, columns = self._stored(weight)[0].shape
            columns *= 2 if self.packed else 1
            a = torch.empty(count, r, columns, dtype=dtype, device=base.device)
            b = torch.zeros(count, rows, r, dtype=dtype, device=base.device)
            if config.init_lora_weights == "gaussian":
                nn.init.normal_(a, std=1 / r)
            else:
                nn.init.uniform_(a, -(columns**-0.5), columns**-0.5)  # as nn.Linear is initialised
            if config.init_lora_weights is False:
                nn.init.uniform_(b, -(r**-0.5), r**-0.5)
            getattr(self, f"lora_{weight}_A")[adapter_name] = nn.Parameter(a)
            getattr(self, f"lora_{weight}_B")[adapter_name] = nn.Parameter(b)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def _stored(self, weight: str) -> list[torch.Tensor]:
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

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        adapter_names: list[str] | None = None,
    ) -> torch.Tensor:
        """As the base layer: [T, D], chosen experts [T, k] and their weights [T, k] -> [T, D]."""
        if adapter_names is not None:  # peft's argument for another adapter in each row
            raise ValueError("adapter_names: routed experts have one choice of adapters for all rows of a batch")
        if self.disable_adapters and self.merged:
            self.unmerge()
        if self.disable_adapters or self.merged or not self._acting():
            return self.base_layer(hidden_states, top_k_index, top_k_weights)
        base: Any = self.get_base_layer()
        gate_up, down = map(self._product, WEIGHTS)
        return experts.grouped_experts(
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
        linear = mxfp4.packed_linear if self.packed else F.linear

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
        self._refuse_merge(names, safe_merge)
        base = self.get_base_layer()
        if undoable and self._unmerged is None:
            self._unmerged = {key: value.clone() for key, value in base.state_dict().items()}
        for weight, expert, update in self._updates(names):
            parts = [tensor[expert] for tensor in self._stored(weight)]
            if self.packed:
                merged = mxfp4.quantize_mxfp4(mxfp4.dequantize_mxfp4(*parts, torch.float32) + update)
            else:
                merged = [parts[0].to(torch.promote_types(parts[0].dtype, torch.float32)) + update]
            for part, value in zip(parts, merged, strict=True):
                part.copy_(value)
        self.merged_adapters.extend(names)

    def rehearse_merge(self, safe_merge: bool, adapter_names: list[str] | None) -> None:
        """Raise what `merge` would, with nothing changed."""
        names = check_adapters_to_merge(self, adapter_names)
        known = self.lora_gate_up_A
        self._refuse_merge([name for name in names if name in known], safe_merge)  # type: ignore[operator]

    def _refuse_merge(self, names, safe_merge):
        if not (names and (safe_merge or self.packed)):
            return
        for weight, expert, update in self._updates(names):
            if not torch.isfinite(update).all():
                raise ValueError(f"the update of {weight} of expert {expert} by {names} is not finite")

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
    def unload_and_optionally_merge_module(
        self, merge: bool, safe_merge: bool, adapter_names: list[str] | None
    ) -> nn.Module:
        """The base layer, with the adapters merged into it if `merge`; called by peft, and not undone later."""
        if merge:
            self._merge(check_adapters_to_merge(self, adapter_names), safe_merge, undoable=False)
        return self.get_base_layer()


def is_ours(model: Any) -> bool:
    """Whether a Kimi K3 model is in `model`, by name: its class may come from this package or from a folder's code."""
    return any(type(module).__name__.startswith("KimiK3") for module in model.modules())


def _is_routed_experts(module: nn.Module) -> bool:
    return type(module).__name__ in ("KimiK3Experts", "KimiK3PackedExperts")


class _Frozen(nn.ParameterDict):
    """Parameters that stay frozen when they are cast.

    peft casts the ranks of AdaLoRA, by which it divides, to the dtype of the weights and stores the result, which as a
    new parameter would be trained; a saved adapter does not have them.
    """

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self[key].requires_grad_(False)


@contextlib.contextmanager
def unchanged_on_error(model: nn.Module) -> Iterator[None]:
    """Put the modules, parameters and flags of a model back as they were if the block raises."""
    modules = [(module, dict(module._modules), dict(module._parameters)) for module in model.modules()]
    trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]
    layers = [module for module, *_ in modules if isinstance(module, BaseTunerLayer)]
    adapters = [(layer, set(layer._all_available_adapter_names()), list(layer.active_adapters)) for layer in layers]
    try:
        yield
    except BaseException:
        for layer, names, active in adapters:
            for name in set(layer._all_available_adapter_names()) - names:
                layer.delete_adapter(name)
            layer.set_adapter(active)
        for module, children, parameters in modules:
            module._modules.clear()
            module._modules.update(children)
            module._parameters.clear()
            module._parameters.update(parameters)
        for parameter, flag in trained:
            parameter.requires_grad_(flag)
        for module, mode in modes:
            module.training = mode
        raise


def teach_peft() -> None:
    """Change what peft does with our models, once in a process; nothing changes for others.

    * Routed experts that are a target get `LoraExperts`.
    * An adapter that cannot be added, or whose file lacks a tensor or has others, is refused and leaves the model as it
      was.
    * A merge that one of the layers refuses leaves all of them as they were.
    * What would pass over the factors of the experts in silence is refused: `add_weighted_adapter`, hotswapping.
    * Prefix tuning and cartridges are refused: they train keys and values of attention, and KDA layers have none.
    * Replicated layers are refused: what kind a layer is of, the configuration says for each of them.
    * AdaLoRA: the rank by which it divides is not trained, and reading what training left of the ranks rounds nothing.
    """
    if getattr(LoraModel, "_knows_kimi_k3", False):
        return
    LoraModel._knows_kimi_k3 = True  # type: ignore[attr-defined]
    LoraModel._create_new_module = staticmethod(_with_experts(LoraModel._create_new_module))  # type: ignore[method-assign]
    BaseTuner.inject_adapter = _all_or_nothing(BaseTuner.inject_adapter)  # type: ignore[method-assign]
    BaseTuner.merge_adapter = _rehearsed(BaseTuner.merge_adapter)  # type: ignore[method-assign]
    unloading = _rehearsed(BaseTuner._unload_and_optionally_merge)
    BaseTuner._unload_and_optionally_merge = unloading  # type: ignore[method-assign]
    resizing = _keeping_float32(AdaLoraModel.resize_modules_by_rank_pattern)
    AdaLoraModel.resize_modules_by_rank_pattern = resizing  # type: ignore[method-assign]
    LoraModel.add_weighted_adapter = _without_experts(LoraModel.add_weighted_adapter)  # type: ignore[method-assign]
    hotswap.hotswap_adapter_from_state_dict = _not_hot(hotswap.hotswap_adapter_from_state_dict)
    hotswap.prepare_model_for_compiled_hotswap = _not_prepared(hotswap.prepare_model_for_compiled_hotswap)
    loading: Any = classmethod(_restoring(peft.PeftModel.from_pretrained.__func__))  # type: ignore[attr-defined]
    peft.PeftModel.from_pretrained = loading  # type: ignore[method-assign]
    peft.PeftModel.load_adapter = _whole(peft.PeftModel.load_adapter)  # type: ignore[method-assign]
    prompts = _without_prefixes(peft.PeftModel._setup_prompt_encoder)
    peft.PeftModel._setup_prompt_encoder = prompts  # type: ignore[method-assign]


def _with_experts(create):
    @functools.wraps(create)
    def _create_new_module(lora_config, adapter_name, target, **kwargs):
        parameter = kwargs.get("parameter_name")
        base = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
        if parameter is None and _is_routed_experts(target):
            return LoraExperts(target, adapter_name, config=lora_config, **kwargs)
        if parameter is not None and _is_routed_experts(base) and not getattr(base, parameter).is_floating_point():
            raise ValueError(
                f"target_parameters: {parameter} holds packed bytes, to which nothing can be added: name `experts` in "
                "target_modules, or load the model with dequantize=True"
            )
        return create(lora_config, adapter_name, target, **kwargs)

    return _create_new_module


def _all_or_nothing(inject):
    @functools.wraps(inject)
    def inject_adapter(self, model, adapter_name, *args, **kwargs):
        if not is_ours(model):
            return inject(self, model, adapter_name, *args, **kwargs)
        try:
            _refuse_packed_copies(model, self.peft_config[adapter_name])
            if getattr(self.peft_config[adapter_name], "layer_replication", None):
                raise ValueError(
                    "layer_replication would make layers of which linear_attn_config does not say whether they are KDA "
                    "or MLA: build the deeper model first, with a configuration of its own"
                )
            with unchanged_on_error(model):
                result = inject(self, model, adapter_name, *args, **kwargs)
        except BaseException:
            self.peft_config.pop(adapter_name, None)
            raise
        for module in model.modules():
            if isinstance(module, AdaLoraLayer):
                module.ranknum = _Frozen(module.ranknum)
        return result

    return inject_adapter


def _rehearsed(merge):
    signature = inspect.signature(merge)

    @functools.wraps(merge)
    def merge_all_or_none(self, *args, **kwargs):
        options = signature.bind(self, *args, **kwargs)
        options.apply_defaults()
        if is_ours(self.model) and options.arguments.get("merge", True):
            self._check_merge_allowed()
            _rehearse_merge(self.model, options.arguments["safe_merge"], options.arguments["adapter_names"])
        return merge(self, *args, **kwargs)

    return merge_all_or_none


def _rehearse_merge(model: nn.Module, safe_merge: bool, adapter_names: list[str] | None) -> None:
    """Merge a copy of each layer that has adapters, one at a time: peft merges a layer behind the other, and one that
    refuses would leave those before it merged."""
    for module in model.modules():
        if not isinstance(module, BaseTunerLayer):
            continue
        with warnings.catch_warnings(), onload_layer(module):
            warnings.simplefilter("ignore")  # peft's own about what is merged already come with the merge
            if isinstance(module, LoraExperts):
                module.rehearse_merge(safe_merge, adapter_names)
            else:
                copy.deepcopy(module).merge(safe_merge=safe_merge, adapter_names=adapter_names)


def _refuse_packed_copies(model: nn.Module, config: Any) -> None:
    """Raise ValueError for `modules_to_save` that cannot be trained."""
    saved = getattr(config, "modules_to_save", None) or ()
    for name, module in model.named_modules():
        packed = next((key for key, value in module.named_parameters() if not value.is_floating_point()), None)
        if packed is not None and name.rpartition(".")[-1] in saved:
            raise ValueError(
                f"modules_to_save: {name} holds packed bytes ({packed}), which do not train: load the model with "
                "dequantize=True"
            )


def _keeping_float32(resize):
    @functools.wraps(resize)
    def resize_modules_by_rank_pattern(self, rank_pattern, adapter_name):
        layers = [module for module in self.model.modules() if isinstance(module, AdaLoraLayer)]
        cast = any(
            layer.lora_A[adapter_name].dtype == torch.float32 for layer in layers if adapter_name in layer.lora_A
        )
        resize(self, rank_pattern, adapter_name)  # makes the factors anew, in the dtype of the weights
        if is_ours(self.model):
            self._cast_adapter_dtype(adapter_name, autocast_adapter_dtype=cast)

    return resize_modules_by_rank_pattern


def _expert_layers(model: nn.Module, adapter_names: list[str]) -> list[str]:
    """Those of the adapters that act on routed experts."""
    layers: list[Any] = [module for module in model.modules() if type(module).__name__ == "LoraExperts"]
    return [name for name in adapter_names if any(name in layer.lora_gate_up_A for layer in layers)]


def _without_experts(combine):
    @functools.wraps(combine)
    def add_weighted_adapter(self, adapters, *args, **kwargs):
        if concerned := _expert_layers(self, adapters):
            raise ValueError(
                f"add_weighted_adapter cannot combine adapters of routed experts ({', '.join(concerned)}): they act "
                "together with base_model.set_adapter([...]), weighted by set_scale of each layer"
            )
        return combine(self, adapters, *args, **kwargs)

    return add_weighted_adapter


def _not_hot(swap):
    @functools.wraps(swap)
    def hotswap_adapter_from_state_dict(model, state_dict, adapter_name, *args, **kwargs):
        if _expert_layers(model, [adapter_name]):
            raise ValueError(
                f"adapter {adapter_name!r} acts on routed experts, which cannot be swapped in place: load the other "
                "under a name of its own and choose it with set_adapter"
            )
        try:
            return swap(model, state_dict, adapter_name, *args, **kwargs)
        except KeyError as error:  # found before anything is swapped
            if not is_ours(model):
                raise
            raise ValueError(
                f"only the factors of LoRA are swapped in place, and the other adapter has {error}: load it under a "
                "name of its own and choose it with set_adapter"
            ) from error

    return hotswap_adapter_from_state_dict


def _not_prepared(prepare):
    @functools.wraps(prepare)
    def prepare_model_for_compiled_hotswap(model, *args, **kwargs):
        if any(type(module).__name__ == "LoraExperts" for module in model.modules()):
            raise ValueError(
                "adapters of routed experts cannot be swapped in place: load the other under a name of its own and "
                "choose it with set_adapter"
            )
        return prepare(model, *args, **kwargs)

    return prepare_model_for_compiled_hotswap


def _without_prefixes(setup):
    @functools.wraps(setup)
    def _setup_prompt_encoder(self, adapter_name, *args, **kwargs):
        kind = self.peft_config[adapter_name].peft_type
        if is_ours(self) and kind in (peft.PeftType.PREFIX_TUNING, peft.PeftType.CARTRIDGE):
            del self.peft_config[adapter_name]
            name = "prefix tuning" if kind == peft.PeftType.PREFIX_TUNING else "a cartridge"
            raise ValueError(
                f"{name} trains keys and values of attention, and most layers here have a recurrent state: use "
                "PromptTuningConfig or LoraConfig"
            )
        return setup(self, adapter_name, *args, **kwargs)

    return _setup_prompt_encoder


def _whole(load):
    @functools.wraps(load)
    def load_adapter(self, model_id, adapter_name, *args, **kwargs):
        if not is_ours(self):
            return load(self, model_id, adapter_name, *args, **kwargs)
        known = adapter_name in self.peft_config
        if not any(config.is_prompt_learning for config in self.peft_config.values()):
            renamed = getattr(self.get_base_model(), "_checkpoint_conversion_mapping", None)
            kwargs["key_mapping"] = kwargs.get("key_mapping") or renamed
        try:
            with unchanged_on_error(self):
                result = load(self, model_id, adapter_name, *args, **kwargs)
                refuse_missing(self, model_id, result.missing_keys, adapter_name)
                refuse_unplaced(self, model_id, result.unexpected_keys)
        except BaseException:
            if not known:
                self.peft_config.pop(adapter_name, None)
            raise
        return result

    return load_adapter


def _restoring(build):
    @functools.wraps(build)
    def from_pretrained(cls, model, *args, **kwargs):
        if not is_ours(model):
            return build(cls, model, *args, **kwargs)
        had_adapters = "peft_config" in vars(model)
        try:
            with unchanged_on_error(model):
                return build(cls, model, *args, **kwargs)
        except BaseException:
            if not had_adapters:
                vars(model).pop("peft_config", None)
            raise

    return from_pretrained


def refuse_missing(model: Any, place: Any, missing: list[str], adapter_name: str) -> None:
    """Raise ValueError for an adapter's file that lacks tensors which saving the adapter would write.

    peft would start them at random with a warning.
    """
    written = get_peft_model_state_dict(model, adapter_name=adapter_name)
    names = [name.replace(f".{adapter_name}", "", 1) for name in missing]
    names = [name for name in names if name in written or name.removesuffix(".weight") in written]
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise ValueError(
            f"the adapter in {place} lacks {names[0]}{more}, and its configuration asks for it on this model: get it "
            "again, or load it onto the model that it was trained on"
        )


def refuse_unplaced(model: nn.Module, place: Any, unexpected: Iterable[str]) -> None:
    """Raise ValueError for a tensor of an adapter's file that belongs to a layer which the model, or the adapter on it,
    has not.

    peft would leave it out without a word. What tuners keep for themselves beside their parameters may be left out.
    """
    for name in sorted(unexpected):
        module = model
        for part in name.split("."):
            if part not in module._modules:
                break
            module = module._modules[part]  # type: ignore[assignment]
        if ".layers." in f".{name}" and not isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            raise ValueError(
                f"the adapter in {place} has {name}, which has no place on this model: load it onto the model that it "
                "was trained on"
            )


def refuse_other_scale(there: Any, config: Any, place: Any, **options: Any) -> None:
    """Raise ValueError for an adapter that is to take the place of one with another scale.

    transformers swaps the factors alone.

    Args:
        there: the configuration of the adapter in the model.
        config: that of the other one; None for what is in its folder `place`, read with `options`.
    """
    config = config or peft.PeftConfig.from_pretrained(place, **options)
    if not (isinstance(config, LoraConfig) and isinstance(there, LoraConfig)):
        return
    scales = [each.lora_alpha / (each.r**0.5 if each.use_rslora else each.r) for each in (there, config)]
    patterns = [(each.rank_pattern, each.alpha_pattern) for each in (there, config)]
    if scales[0] != scales[1] or patterns[0] != patterns[1]:
        raise ValueError(
            f"the adapter in {place} has the scale {scales[1]:g} and the one that it would replace {scales[0]:g} "
            "(lora_alpha, r and their patterns), which hotswapping keeps: load it under a name of its own and choose "
            "it with set_adapter"
        )


teach_peft()
