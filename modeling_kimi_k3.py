"""Kimi K3 models: loading and saving, the text backbone, and the classes with a head for tokens.

The layers are in `layers_kimi_k3.py`, their operations in `kernels/`; `docs/design.md` draws the data flow.

transformers reads the text of this file to learn what a model supports. The routed experts are decorated with
`@use_experts_implementation` (in `layers_kimi_k3.py`), so `set_experts_implementation` works.
"""

import copy
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.core_model_loading import WeightTransform
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import can_return_tuple, logging
from transformers.utils.generic import is_flash_attention_requested
from transformers.utils.output_capturing import OutputRecorder

from .adapters_kimi_k3 import teach_peft_when_imported
from .cache_kimi_k3 import STATIC_ATTENTION, HybridCache, RefusedForward
from .cache_layers_kimi_k3 import STATIC_AUTOGRAD
from .checkpoint_kimi_k3 import (
    WISHES,
    Wishes,
    check_saves,
    leaving_one_model,
    load_adapter_tensors,
    load_checked,
    refuse_unusable_values,
    weight_conversions,
)
from .configuration_kimi_k3 import KimiK3Config, KimiK3TextConfig
from .distributed_kimi_k3 import check_fit, pipeline_forward, without_tensor_parallelism
from .generation_kimi_k3 import (
    CACHE_ARGUMENT,
    KimiK3CausalLMOutput,
    KimiK3GenerationMixin,
    KimiK3ModelOutput,
    one_cache,
)
from .images_kimi_k3 import KimiK3ImageMixin, refuse_images
from .kernels_kimi_k3 import attn_res, cross_entropy, mxfp4
from .layers_kimi_k3 import (
    KimiK3DecoderLayer,
    KimiK3DeltaAttention,
    KimiK3DepthRMSNorm,
    KimiK3Experts,
    KimiK3PackedExperts,
    KimiK3PseudoQuery,
    KimiK3RMSNorm,
    KimiK3ShortConvolution,
    KimiK3TopkRouter,
    Mask,
    run_layers,
)
from .packing_kimi_k3 import Packing, StepPacking, causal_mask, check_mask, find_packing, packed_offsets
from .remote_code_kimi_k3 import auto_map, copy_code
from .routing_kimi_k3 import checked_routing
from .vision_kimi_k3 import KimiK3Projector, KimiK3VisionTower

logger = logging.get_logger(__name__)
teach_peft_when_imported()


def _without_mxfp4_config(kwargs: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Arguments of `from_pretrained` with transformers' `Mxfp4Config` in our own words, and whether it was there.

    Its quantizer knows other experts than ours.
    """
    section = kwargs.get("quantization_config")
    options = section if isinstance(section, dict) else getattr(section, "__dict__", {})
    if options.get("quant_method") != "mxfp4":
        return kwargs, False
    if options.get("modules_to_not_convert"):
        raise ValueError("Mxfp4Config(modules_to_not_convert=...): routed experts are packed, all of them or none")
    kwargs = {name: value for name, value in kwargs.items() if name != "quantization_config"}
    if options.get("dequantize"):
        return {**kwargs, "dequantize": True}, False
    return kwargs, True


class KimiK3PreTrainedModel(PreTrainedModel):
    config: KimiK3TextConfig | KimiK3Config
    config_class: type[PreTrainedConfig] = KimiK3TextConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["KimiK3DecoderLayer"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = False
    _can_compile_fullgraph = True
    # What the forward collects itself; declared for tools that ask.
    _can_record_outputs = {"router_logits": OutputRecorder(KimiK3TopkRouter, index=0)}
    _skip_keys_device_placement = ["past_key_values", "cache"]
    # float32 in the file and in memory, whatever dtype is asked for; the constructor adds those of the bounded gate
    _keep_in_fp32_modules_strict = ["A_log", "dt_bias"]
    _fp32_of_bounded_gate = ["q_conv1d", "k_conv1d", "v_conv1d", "o_norm", "e_score_correction_bias"]
    # peft renames the tensors of an adapter by it, so that text-only and multimodal classes read each other's.
    _checkpoint_conversion_mapping = {r"^language_model\.": ""}
    # Modules or parameters that a class brings and a checkpoint of the family may lack: the head of a new task.
    _new_tensors: tuple[str, ...] = ()

    def __init__(self, config: KimiK3TextConfig | KimiK3Config, *inputs: Any, dequantize: bool = False, **kwargs: Any):
        if dequantize:
            config = copy.deepcopy(config)  # the caller's config still describes the packed checkpoint
        text_config = config.get_text_config(decoder=True)
        self.expert_storage = "float" if text_config.expert_quantization is None else "packed"
        if dequantize and self.expert_storage == "packed":
            self.expert_storage = "dequantize"
            text_config.expert_quantization = None
        super().__init__(config, *inputs, **kwargs)
        if not text_config.has_softplus_gate:
            self._keep_in_fp32_modules_strict = [*self._keep_in_fp32_modules_strict, *self._fp32_of_bounded_gate]
        self._weight_conversions = self._conversions()

    def _conversions(self, a_log_file_shape: tuple[int, ...] | None = None) -> list[WeightTransform]:
        """What saving reverses: a model whose experts were dequantized is saved in floating point."""
        storage = "float" if self.expert_storage == "dequantize" else self.expert_storage
        return weight_conversions(self.config, storage, a_log_shape=a_log_file_shape)

    def get_correct_experts_implementation(self, requested_experts: str | None) -> str:
        # Our own grouped path by default; transformers would pick grouped_mm, which has no packed experts.
        if self.config.get_text_config(decoder=True).expert_quantization is not None:
            if requested_experts not in (None, "eager"):
                raise ValueError(
                    f"experts_implementation={requested_experts!r} cannot read packed MXFP4 experts; "
                    "load with dequantize=True to use it"
                )
        return super().get_correct_experts_implementation(requested_experts or "eager")

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        # Other registered functions (paged ones, a user's) would not be given the masks that they need.
        flash = is_flash_attention_requested(requested_attention_implementation=requested_attention)
        if (
            requested_attention is not None
            and requested_attention not in ("eager", "sdpa", "flex_attention")
            and (not flash or requested_attention.startswith("paged|"))
        ):
            raise ValueError(
                f"Specified `attn_implementation=\"{requested_attention}\"` is not supported: use 'eager', 'sdpa', "
                "'flash_attention_2' or 'flex_attention'"
            )
        return super().get_correct_attn_implementation(requested_attention, is_init_check)

    def requires_grad_(self, requires_grad: bool = True) -> "KimiK3PreTrainedModel":
        """As in torch, but packed bytes stay as they are: they have no gradient."""
        for parameter in self.parameters():
            if parameter.is_floating_point():
                parameter.requires_grad_(requires_grad)
        return self

    @classmethod
    def maybe_distribute_model(cls, model: Any, distributed_config: Any, mesh: Any) -> Any:
        """transformers' step between building a model and loading it, after the sizes were checked."""
        if mesh is not None:
            check_fit(model, distributed_config)
            distributed_config = without_tensor_parallelism(model, distributed_config)
        model = super().maybe_distribute_model(model, distributed_config, mesh)
        if getattr(model, "_pp_stage", None) is not None:
            model.forward = pipeline_forward(model)
        return model

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike | None,
        *args: Any,
        new_tensors: Sequence[str] | bool = (),
        check_finite: bool = False,
        **kwargs: Any,
    ) -> Any:
        """transformers' `from_pretrained`, which here refuses a checkpoint that lacks a tensor of the model.

        Args:
            new_tensors: names of modules or parameters that may be missing and then begin with random values, beside
                those that the class declares in `_new_tensors`; True for any.
            check_finite: read all values in memory and refuse those that are not finite, scales of packed experts
                included.
            kwargs: as in transformers, and `dequantize=True`, which `quantization_config=Mxfp4Config(dequantize=True)`
                says as well.

        Raises:
            ValueError: names the first tensor that is missing, does not fit (before any data is read) or is not finite.
        """
        kwargs, packed = _without_mxfp4_config(kwargs)
        said = WISHES.set(Wishes(new_tensors, packed))
        try:
            result = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        finally:
            WISHES.reset(said)
        if check_finite:
            refuse_unusable_values((result[0] if isinstance(result, tuple) else result).state_dict())
        return result

    @staticmethod
    def _load_pretrained_model(model, state_dict, checkpoint_files, load_config, *args, **kwargs):
        if model._hf_peft_config_loaded:  # of an adapter, which is in place already
            return load_adapter_tensors(model, state_dict, checkpoint_files, load_config, *args, **kwargs)
        result, a_log_shape = load_checked(model, state_dict, checkpoint_files, load_config, *args, **kwargs)
        # Saving reverses the model's own conversions, not those that happened to be used (and never the prefix).
        model._weight_conversions = model._conversions(a_log_shape)
        return result

    def load_adapter(
        self, peft_model_id: str | None = None, adapter_name: str | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """As in transformers; an adapter that cannot be loaded whole is refused and leaves the model as it was.

        Raises:
            ValueError: names the first tensor of the adapter that is missing, or the scale of one that would take the
                place of an adapter with another scale (`hotswap=True`).
        """
        from .lora_kimi_k3 import refuse_missing, refuse_other_scale, refuse_unplaced, unchanged_on_error

        adapter_name = adapter_name or "default"
        had_adapters = self._hf_peft_config_loaded
        known = had_adapters and adapter_name in self.peft_config
        in_place = kwargs.get("hotswap", "auto")
        if known and (getattr(self, "_hotswap_enabled", False) if in_place == "auto" else in_place):
            options = kwargs.get("adapter_kwargs") or {}
            refuse_other_scale(self.peft_config[adapter_name], kwargs.get("peft_config"), peft_model_id, **options)
        try:
            with unchanged_on_error(self):
                report = super().load_adapter(peft_model_id, adapter_name, *args, **kwargs)
                place = peft_model_id or "the state dict"
                refuse_missing(self, place, sorted(report.missing_keys), adapter_name)
                refuse_unplaced(self, place, report.unexpected_keys)
        except BaseException:
            self._hf_peft_config_loaded = had_adapters
            if not known:
                getattr(self, "peft_config", {}).pop(adapter_name, None)
            raise
        return report

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As in torch; tensors named and shaped as in a saved folder, which `Trainer` reads to resume, are converted.

        Without this they would be refused, or with strict=False skipped: a file has one tensor an expert, say.
        """
        own = self.state_dict()
        if any(name not in own or tensor.shape != own[name].shape for name, tensor in state_dict.items()):
            loaded: Any = type(self).from_pretrained(
                None,
                state_dict=dict(state_dict),
                config=copy.deepcopy(self.config),
                dtype=self.dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                new_tensors=True,
            )
            read, report = loaded
            if not (report["missing_keys"] or report["unexpected_keys"] or report["mismatched_keys"]):
                state_dict = read.state_dict()
            elif any(re.search(r"\.experts\.\d+\.", name) for name in state_dict):
                raise ValueError(
                    "load_state_dict reads a saved folder whole, and here a part of it is missing: save with one shard "
                    "(max_shard_size), or load with from_pretrained"
                )
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def save_pretrained(
        self, save_directory: str | os.PathLike, *args: Any, push_to_hub: bool = False, **kwargs: Any
    ) -> None:
        """transformers' `save_pretrained`, and beside the weights the code that reads them, `kernels/` included."""
        if push_to_hub:
            raise ValueError(
                "save_pretrained(push_to_hub=True) would upload before the code files are in place; "
                "use model.push_to_hub(repo_id)"
            )
        if getattr(self, "_pp_stage", None) is not None:
            raise NotImplementedError(
                "a pipeline stage holds its own layers only, so its folder would lack the others: load the tensors of "
                "all stages' state_dict() into a whole model and save that"
            )
        if not self._hf_peft_config_loaded and (Path(save_directory) / "adapter_config.json").is_file():
            raise ValueError(
                f"{save_directory} has an adapter (adapter_config.json), which would act on this model when it is "
                "loaded: save to another folder, or move the adapter away"
            )
        # A state dict that is passed, an adapter and quantised weights are not what the parameters here are.
        quantised = getattr(self, "hf_quantizer", None) is not None
        if kwargs.get("state_dict") is None and not self._hf_peft_config_loaded and not quantised:
            check_saves(self)
        self.config.auto_map, self.config._named_as_in_file = auto_map(self), False
        with leaving_one_model(Path(save_directory)):
            super().save_pretrained(save_directory, *args, **kwargs)
        if self.should_save_on_this_rank(True):
            copy_code(Path(save_directory))
        self.barrier_after_gathered_checkpoint_save(getattr(self.config, "distributed_config", None))

    @torch.no_grad()
    def _init_weights(self, module):
        std = self.config.get_text_config(decoder=True).initializer_range
        super()._init_weights(module)
        if isinstance(module, KimiK3DeltaAttention):
            if module.lower_bound is None:
                init.copy_(module.A_log, torch.empty_like(module.A_log).uniform_(1.0, 16.0).log())
            else:
                # exp(A_log) scales the argument of the sigmoid: larger values would saturate channels from the start
                init.zeros_(module.A_log)
            # dt is log-uniform in [0.001, 0.1], dt_bias its inverse softplus (as in Mamba-2 and Gated DeltaNet)
            dt = torch.empty_like(module.dt_bias).uniform_(math.log(1e-3), math.log(1e-1)).exp()
            init.copy_(module.dt_bias, dt + torch.log(-torch.expm1(-dt)))
        elif isinstance(module, KimiK3ShortConvolution):
            bound = module.weight.shape[-1] ** -0.5
            init.uniform_(module.weight, -bound, bound)
        elif isinstance(module, KimiK3TopkRouter):
            init.normal_(module.weight, mean=0.0, std=std)
            init.zeros_(module.e_score_correction_bias)
        elif isinstance(module, KimiK3Experts):
            init.normal_(module.gate_up_proj, mean=0.0, std=std)
            init.normal_(module.down_proj, mean=0.0, std=std)
        elif isinstance(module, KimiK3PackedExperts):
            for name in ("gate_up_proj", "down_proj"):
                packed, scale = getattr(module, f"{name}_packed"), getattr(module, f"{name}_scale")
                if packed.is_meta:  # offloaded: nothing to fill here
                    continue
                shape = (*packed.shape[:-1], packed.shape[-1] * 2)
                weight = torch.empty(shape, dtype=torch.float32, device=packed.device).normal_(0.0, std)
                for parameter, data in zip((packed, scale), mxfp4.quantize_mxfp4(weight), strict=True):
                    init.copy_(parameter, data)
        elif isinstance(module, KimiK3PseudoQuery):
            init.zeros_(module.weight)  # Attention Residuals start as a plain average over depth (arXiv 2603.15031)


class KimiK3Model(KimiK3PreTrainedModel):
    """The text backbone: embedding, decoder layers, the output mix over depth and the final norm."""

    config: KimiK3TextConfig
    layers: Sequence[KimiK3DecoderLayer]
    _keys_to_ignore_on_load_unexpected = [
        r"^(language_model\.)?lm_head\.",
        r"^score\.",
        r"^vision_tower\.",
        r"^mm_projector\.",
    ]

    def __init__(self, config: KimiK3TextConfig, dequantize: bool = False):
        super().__init__(config, dequantize=dequantize)
        config = self.config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=None)
        layers = nn.ModuleList(KimiK3DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.layers = layers  # type: ignore[assignment]  # torch's annotation of a ModuleList does not say of what
        self.norm = KimiK3RMSNorm(config.hidden_size, config.rms_norm_eps)
        if config.attn_res_block_size is not None:
            self.output_attn_res_norm = KimiK3DepthRMSNorm(config.hidden_size)
            self.output_attn_res_proj = KimiK3PseudoQuery(config.hidden_size)
        self.gradient_checkpointing = False
        # Set to True to have a forward raise where it first stops being finite (costs one synchronisation).
        self.check_finite = False
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: HybridCache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        output_router_logits: bool | None = None,
        output_routed_experts: bool = False,
        routed_experts: torch.Tensor | None = None,
        cache: HybridCache | None = None,
        context: Any = None,
        packing: Packing | StepPacking | None = None,
        **kwargs: Any,
    ) -> MoeModelOutputWithPast:
        """
        Args:
            input_ids: [B, T], or `inputs_embeds` [B, T, hidden].
            attention_mask: [B, S] of the S columns seen so far, this forward's T last; 0 marks padding, anywhere. With
                a static cache also [B, max_length], one column for each place.
            position_ids: [B, T]; the model has no positions, they only show where packed documents start.
            cache, past_key_values: two names of one argument.
            context: reaches the tokens of these rows on other processes; `context_parallel` passes it.
            packing: where documents and padding lie, in place of `attention_mask` and `position_ids`, of which the
                host reads values: `fixed_packing` makes one of a shape.
            commit (in kwargs): whether the tokens count as fed when this returns; a model with a head behind it passes
                False, and commits the cache itself.
            output_routed_experts: whether the result has `routed_experts` [B, T, MoE layers, experts a token] int64.
            routed_experts: such a tensor of an earlier forward, of any integers: the routers take these experts, and
                weigh them by their own scores. -1 in all places of a token and layer leaves the choice to the router.
            output_hidden_states: entry l is the stream that layer l reads (the mix over depth; the embedding for
                l = 0), the last entry is the normed output.
        """
        refuse_images(kwargs)
        cache, commit = one_cache(cache, past_key_values), kwargs.pop("commit", True)
        embeds = self._embedded(input_ids, inputs_embeds)
        use_cache = self.config.use_cache if use_cache is None else use_cache
        check_mask(attention_mask, embeds.shape[1])
        layers = self.layers[: self.config.num_hidden_layers]  # lowered while a draft exits early
        wants_routers = bool(output_routed_experts or output_router_logits)
        routed_experts = checked_routing(routed_experts, wants_routers, embeds, layers, self.config)
        packing = find_packing(attention_mask, position_ids, packed_offsets(kwargs), embeds, cache, packing)
        cache = self._cache_to_fill(cache, packing, embeds, use_cache)
        if cache is not None:
            is_linear = [layer.is_linear for layer in self.layers]
            cache.begin(embeds, attention_mask, isinstance(packing, Packing), is_linear, self.config.num_hidden_layers)
        output_attentions = self.config.output_attentions if output_attentions is None else output_attentions
        in_blocks = packing is None and self._reads_in_blocks(cache, embeds, output_attentions)
        mask = None if in_blocks else self._attention_mask(embeds, attention_mask, cache, packing, output_attentions)

        asked = {"hidden_states": output_hidden_states, "attentions": output_attentions}
        asked |= {"router_logits": output_router_logits, "routed_experts": output_routed_experts}
        wanted = {name: getattr(self.config, f"output_{name}") if x is None else x for name, x in asked.items()}
        collected: dict[str, tuple[torch.Tensor, ...]] = {name: () for name, is_wanted in wanted.items() if is_wanted}
        finite = [torch.isfinite(embeds).all()] if self.check_finite else None

        def observe(stream, **values):
            for name in collected:
                if values[name] is not None:
                    collected[name] += (values[name],)
            if finite is not None:
                finite.append(torch.isfinite(stream).all())

        stream, blocks = run_layers(
            layers,
            embeds,
            observe=observe,
            routed_experts=routed_experts,
            attention_mask=mask,
            cache=cache,
            packing=packing,
            context=context,
            need_weights=output_attentions,
            in_blocks=in_blocks,
            **kwargs,
        )
        hidden_states = self.output_norm(stream, *blocks)
        if finite is not None:
            finite.append(torch.isfinite(hidden_states).all())
            self._raise_where_not_finite(torch.stack([flag.to(finite[0].device) for flag in finite]).tolist())
        if "hidden_states" in collected:
            collected["hidden_states"] += (hidden_states,)
        results: dict[str, Any] = {CACHE_ARGUMENT: cache, **collected}
        if output_routed_experts:
            chosen = torch.stack([experts.to(embeds.device) for experts in collected["routed_experts"]], dim=1)
            results["routed_experts"] = chosen.unflatten(0, embeds.shape[:2])
        if commit and cache is not None:
            cache.commit()
        return KimiK3ModelOutput(last_hidden_state=hidden_states, **results)

    def _embedded(self, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None) -> torch.Tensor:
        """What enters the first layer, [B, T, hidden]."""
        if (input_ids is None) == (inputs_embeds is None):
            raise RefusedForward("pass exactly one of input_ids and inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if inputs_embeds.dim() != 3 or inputs_embeds.shape[:2].numel() == 0:
            entered, form = (inputs_embeds, "[B, T, hidden]") if input_ids is None else (input_ids, "[B, T]")
            raise RefusedForward(f"the input has shape {tuple(entered.shape)}, expected {form} with a token at least")
        return inputs_embeds

    def _cache_to_fill(
        self,
        cache: HybridCache | None,
        packing: Packing | StepPacking | None,
        embeds: torch.Tensor,
        use_cache: bool | None,
    ) -> HybridCache | None:
        """The caller's cache, or a new one; None where a forward is to build none, or cannot."""
        if not use_cache:
            if cache is not None and int(cache.get_seq_length()) > 0:
                raise RefusedForward(
                    "use_cache=False would ignore the tokens in the cache that was given: leave one of them out"
                )
            return None
        packed = packing is not None and packing.documents is not None
        if packed and cache is not None:
            raise RefusedForward("packed documents cannot share a cache: it holds one state for each row")
        if self.gradient_checkpointing and self.training:
            if cache is not None:
                raise RefusedForward(
                    "gradient checkpointing recomputes the forward, so it cannot go with a cache: call model.eval() "
                    "before generate"
                )
            logger.warning_once("gradient checkpointing recomputes the forward, so no cache is built")
            return None
        if cache is not None and cache.is_compileable and self.config._attn_implementation not in STATIC_ATTENTION:
            raise RefusedForward(
                f"attn_implementation={self.config._attn_implementation!r} cannot read the part of a static cache "
                "that is filled: use 'sdpa' with it"
            )
        if cache is not None and cache.is_compileable and torch.is_grad_enabled():
            weights = self.layers[0].self_attn.parameters()
            if embeds.requires_grad or any(weight.requires_grad for weight in weights):
                raise RefusedForward(STATIC_AUTOGRAD)  # as a layer would, after others were fed
        return HybridCache(self.config) if cache is None and not packed else cache

    def _attention_mask(
        self,
        embeds: torch.Tensor,
        attention_mask: torch.Tensor | None,
        cache: HybridCache | None,
        packing: Packing | StepPacking | None,
        need_weights: bool,
    ) -> Mask:
        """The mask of MLA layers in the form of the attention implementation."""
        if attention_mask is not None and cache is not None:  # a static cache's mask has columns for later tokens
            attention_mask = attention_mask[:, : cache.get_mask_sizes(embeds.shape[1], 0)[0]]
        config = self.config
        if need_weights and config._attn_implementation != "eager":
            logger.warning_once("attention weights were asked for: attention runs eagerly in such a forward")
            if config._attn_implementation != "sdpa":
                config = copy.copy(config)
                config._attn_implementation = "sdpa"  # eager attention needs the mask itself
        return causal_mask(config, embeds, attention_mask, cache, packing)

    def _reads_in_blocks(self, cache: HybridCache | None, embeds: torch.Tensor, need_weights: bool) -> bool:
        """Whether MLA layers read the cache in blocks of keys: a chunk of tokens behind others, without padding."""
        return (
            cache is not None
            and not (cache.is_compileable or cache.padded or need_weights or torch.compiler.is_compiling())
            and 0 < cache.get_seq_length()
            and embeds.shape[1] > 1
            and self.config._attn_implementation == "sdpa"
            and not torch.is_grad_enabled()
        )

    def output_norm(self, partial: torch.Tensor, *blocks: torch.Tensor) -> torch.Tensor:
        """What the head reads, [B, T, hidden]: the output mix over depth (the stream without it), normed.

        Its sources are held as the inputs of layers. Under gradient checkpointing they are all that is held: the mix
        runs again in backward, as those in layers do.
        """
        if self.config.attn_res_block_size is None:
            return self.norm(partial)
        if self.gradient_checkpointing and self.training and partial.requires_grad:
            return self._gradient_checkpointing_func(self._mixed_norm, partial, *blocks)
        return self._mixed_norm(partial, *blocks)

    def _mixed_norm(self, partial, *blocks):
        norm, proj = self.output_attn_res_norm(), self.output_attn_res_proj()
        sources = [source.to(norm.device) for source in (*blocks, partial)]  # each lies where its layer ran
        mixed = attn_res.attn_res_mix(sources, norm, proj.to(norm.device), self.config.rms_norm_eps)
        return self.norm(mixed)

    def _raise_where_not_finite(self, finite: list[bool]) -> None:
        """`finite` says it of the embedding, of the stream after every layer, and of the normed output."""
        if all(finite):
            return
        first = finite.index(False)
        kinds = ["KDA" if layer.is_linear else "MLA" for layer in self.layers]
        places = ["the embedding", *(f"layer {i} ({kind})" for i, kind in enumerate(kinds)), "the output norm"]
        raise FloatingPointError(f"not finite any more after {places[first]}")


class _WithHead(KimiK3GenerationMixin, KimiK3PreTrainedModel):
    """What the classes with a language-model head share."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """List the class, one that a user or FSDP2 derives too, among those whose labels are shifted.

        transformers' Trainer knows them by name: to others `label_smoothing_factor` gives the loss of every token
        against itself. Pipelines and model cards ask the same list, which copies of this code in a process share.
        """
        super().__init_subclass__(**kwargs)
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.update({cls.__name__: cls.__name__})

    @property
    def check_finite(self) -> bool:
        """Whether a forward raises FloatingPointError and names the first layer after which it is not finite."""
        model: Any = self.base_model
        return model.check_finite

    @check_finite.setter
    def check_finite(self, value: bool) -> None:
        model: Any = self.base_model
        model.check_finite = value


class KimiK3ForCausalLM(_WithHead):
    """The text model with its language-model head; reads the text part of a multimodal checkpoint too."""

    config: KimiK3TextConfig

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _pp_plan: Any = {"lm_head": (["last_hidden_state"], ["logits"])}
    _keys_to_ignore_on_load_unexpected = [r"^vision_tower\.", r"^mm_projector\."]

    def __init__(self, config: KimiK3TextConfig, dequantize: bool = False):
        super().__init__(config, dequantize=dequantize)
        config = self.config
        self.model = KimiK3Model(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        # Tokens: with labels, a training forward then makes its loss this many at a time and returns no logits.
        self.loss_chunk: int | None = None
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: HybridCache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        output_routed_experts: bool = False,
        routed_experts: torch.Tensor | None = None,
        cache: HybridCache | None = None,
        **kwargs: Any,
    ) -> MoeCausalLMOutputWithPast:
        """
        Args:
            labels: [B, T], -100 is ignored; shifted inside. With `loss_chunk` set, in training, `logits` of the result
                is None: [T, V] is never in memory.
            logits_to_keep: number of last positions (0: all), or a 1-D tensor of positions.

        The other arguments are those of `KimiK3Model.forward`.
        """
        commit = kwargs.pop("commit", True)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_routed_experts=output_routed_experts,
            routed_experts=routed_experts,
            cache=cache,
            commit=False,
            **kwargs,
        )
        logits: torch.Tensor | None = None
        loss: torch.Tensor | None = None
        if self.loss_chunk is not None and self.training and labels is not None:
            hidden = outputs.last_hidden_state
            loss = cross_entropy.causal_lm_loss(hidden, self.lm_head, labels, self.loss_chunk, **kwargs)
        else:
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.lm_head(outputs.last_hidden_state[:, kept])
        results = [each for each in (logits, loss) if each is not None]
        if self.model.check_finite and not all(torch.isfinite(each).all() for each in results):
            raise FloatingPointError("not finite any more after lm_head")
        if labels is not None and loss is None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        if commit and outputs.cache is not None:
            outputs.cache.commit()
        return KimiK3CausalLMOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            router_logits=outputs.router_logits,
            routed_experts=outputs.routed_experts,
            **{CACHE_ARGUMENT: outputs.cache},
        )


class KimiK3ForConditionalGeneration(KimiK3ImageMixin, _WithHead):
    """The class that the released checkpoint names: text and images. Without a `vision_config` it reads text only."""

    config: KimiK3Config
    config_class = KimiK3Config
    base_model_prefix = "language_model"
    input_modalities = ["image", "text"]
    _checkpoint_conversion_mapping = {r"^(?=model\.|lm_head\.)": "language_model."}

    def __init__(self, config: KimiK3Config, dequantize: bool = False):
        super().__init__(config, dequantize=dequantize)
        text: Any = self.config.text_config  # no dicts: the configuration has made classes of them
        vision: Any = self.config.vision_config
        if vision is not None:
            self.vision_tower = KimiK3VisionTower(vision)
            self.mm_projector = KimiK3Projector(vision)
        self.language_model = KimiK3ForCausalLM(text)
        self.post_init()

    @property
    def base_model(self) -> nn.Module:
        """The backbone without a head, which trl asks for; `base_model_prefix` is the name of the one with a head."""
        return self.language_model.model

    def get_output_embeddings(self) -> nn.Module:
        return self.language_model.get_output_embeddings()

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.language_model.set_output_embeddings(value)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: HybridCache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        output_routed_experts: bool = False,
        routed_experts: torch.Tensor | None = None,
        cache: HybridCache | None = None,
        pixel_values: torch.Tensor | None = None,
        grid_thws: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> MoeCausalLMOutputWithPast:
        """
        Args:
            pixel_values: [N, 3, p, p], patches of all images in the order of their places in `input_ids`, row by row.
            grid_thws: [n, 3], frames, rows and columns of patches of each image.

        The other arguments and the result are those of `KimiK3ForCausalLM.forward`. Ids with one placeholder for each
        image grow by the images' tokens, and what comes back has as many columns (`docs/vision.md`).

        Raises:
            ValueError: if images, their grids and placeholders do not fit, with the numbers.
        """
        cache, commit = one_cache(cache, past_key_values), kwargs.pop("commit", True)
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
            "labels": labels,
        }
        outputs = self.language_model(
            **self._text_inputs(pixel_values, grid_thws, cache, inputs, kwargs),
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            output_routed_experts=output_routed_experts,
            routed_experts=routed_experts,
            cache=cache,
            commit=False,
            return_dict=True,
            **kwargs,
        )
        if commit and outputs.cache is not None:
            outputs.cache.commit()
        return outputs


# By model type too, as lm-eval asks the list.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.update(
    {each.config_class.model_type: each.__name__ for each in (KimiK3ForCausalLM, KimiK3ForConditionalGeneration)}
)


__all__ = [
    "CACHE_ARGUMENT",
    "KimiK3ForCausalLM",
    "KimiK3ForConditionalGeneration",
    "KimiK3Model",
    "KimiK3PreTrainedModel",
]
