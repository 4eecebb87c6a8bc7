"""What transformers' `generate` needs to know of Kimi K3: a `HybridCache` in every mode, under either of its names."""

import contextlib
import copy
import dataclasses
import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from transformers import GenerationConfig, GenerationMixin
from transformers.cache_utils import DynamicCache
from transformers.generation import ContinuousBatchingConfig, GenerateDecoderOnlyOutput
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast

from .cache_kimi_k3 import HybridCache, RefusedForward
from .graph_kimi_k3 import CapturedForward, CapturedSteps, can_capture, has_graphs, release_steps
from .routing_kimi_k3 import check_generation
from .warmup_kimi_k3 import warm_up_all, warm_up_once

# transformers 5.24 renamed `past_key_values` to `cache`; the field of the output says which one this release uses.
CACHE_ARGUMENT = (
    "cache" if "cache" in {f.name for f in dataclasses.fields(MoeModelOutputWithPast)} else "past_key_values"
)


class _BothCacheNames:
    """The newer releases' outputs answer to both names by themselves."""

    if CACHE_ARGUMENT == "past_key_values":
        past_key_values: HybridCache | None

        @property
        def cache(self) -> HybridCache | None:
            return self.past_key_values


@dataclasses.dataclass
class KimiK3ModelOutput(_BothCacheNames, MoeModelOutputWithPast):  # type: ignore[misc]  # one has the name as a property
    """transformers' output, and the experts [B, T, MoE layers, experts a token] that tokens went to, if asked for."""

    routed_experts: torch.LongTensor | None = None


@dataclasses.dataclass
class KimiK3CausalLMOutput(_BothCacheNames, MoeCausalLMOutputWithPast):  # type: ignore[misc]  # one has the name as a property
    """transformers' output, and the experts [B, T, MoE layers, experts a token] that tokens went to, if asked for."""

    routed_experts: torch.LongTensor | None = None


@dataclasses.dataclass
class KimiK3GenerateOutput(_BothCacheNames, GenerateDecoderOnlyOutput):  # type: ignore[misc]  # one has the name as a property
    """transformers' output of `generate`, and the experts of every token that was fed: [B, T, MoE layers, experts a
    token], all tokens but the last unless the call continued a cache."""

    routed_experts: torch.LongTensor | None = None


def one_cache(cache: Any, past_key_values: Any) -> HybridCache | None:
    if cache is not None and past_key_values is not None and cache is not past_key_values:
        raise ValueError("cache and past_key_values are two names of one argument, but two different caches were given")
    cache = past_key_values if cache is None else cache
    # By name: the installed package and a folder's remote code are two copies of one class in a process.
    if cache is not None and not any(base.__name__ == "HybridCache" for base in type(cache).__mro__):
        raise TypeError(
            f"{type(cache).__name__} has no place for recurrent states and latents: use HybridCache(model.config)"
        )
    return cache


def _marking(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled forward notes on its cache what it did only when it has run, so one that fails is noted here, unless
    it was refused before it began: by us, or by a trace of the one graph that it should have been."""

    def call(**inputs: Any) -> Any:
        try:
            return compiled(**inputs)
        except (RefusedForward, torch._dynamo.exc.Unsupported):
            raise
        except BaseException:
            if (cache := inputs.get(CACHE_ARGUMENT)) is not None:
                cache.is_whole = False
            raise

    return call


# What `generate(cache_implementation=...)` takes.
CACHE_IMPLEMENTATIONS = (None, "dynamic", "static", "offloaded")
# What a step of `generate` is given beside its token, if nothing else was asked for.
_OF_A_STEP = {CACHE_ARGUMENT, "attention_mask", "position_ids", "use_cache", "logits_to_keep"}
# Draft tokens of one round that a cache can take back; as many last columns of a prompt are recorded for it.
MOST_DRAFTED = 512


class KimiK3GenerationMixin(GenerationMixin):
    """What generation needs to know of a model whose cache is a `HybridCache`."""

    def get_compiled_call(self, compile_config: Any) -> Callable[..., Any]:
        """What `generate` calls for every token: on one CUDA GPU a captured graph of the forward.

        `generate(disable_compile=True)` runs the forward as it is, and a `compile_config` asks for torch.compile, which
        needs a static cache.
        """
        if isinstance(compile_config, CapturedSteps):  # `_sample` has chosen them
            return compile_config
        if compile_config is None and can_capture(self):
            return CapturedForward(self)
        return _marking(super().get_compiled_call(compile_config))  # type: ignore[misc]  # of PreTrainedModel

    def init_continuous_batching(
        self,
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: Any = None,
        workload_hints: Any = None,
    ) -> Any:
        """transformers' entry point of continuous batching, which `generate_batch` calls: a manager over slots of
        recurrent states and pages of latents (`serving/manager.py`). transformers' own knows keys and values only.

        Raises:
            ImportError: for a model loaded as remote code where the kimi-k3 package is not installed.
            ValueError: for settings of generation that are not supported, by name.
        """
        if (kept := getattr(self, "_cached_continuous_batching_manager", None)) is not None:
            return kept
        try:
            # By its name: what a folder ships as remote code has no `serving/`.
            manager = importlib.import_module("kimi_k3.serving.manager")
        except ImportError as error:
            raise ImportError("requests that come and go need the kimi-k3 package: pip install kimi-k3") from error
        return manager.KimiK3BatchingManager(
            self,
            generation_config or self.generation_config,
            continuous_batching_config or ContinuousBatchingConfig(),
            workload_hints,
        )

    def destroy_cached_continuous_batching_manager(self) -> None:
        """As in transformers."""
        if (kept := self.__dict__.pop("_cached_continuous_batching_manager", None)) is not None:
            kept.destroy()

    def _valid_auto_compile_criteria(self, model_kwargs: dict[str, Any], generation_config: GenerationConfig) -> bool:
        chosen = isinstance(generation_config.compile_config, CapturedSteps)
        return chosen or super()._valid_auto_compile_criteria(model_kwargs, generation_config)  # type: ignore[misc]

    def _sample(self, input_ids, logits_processor, stopping_criteria, generation_config, *args, **model_kwargs):
        """transformers' loop; on a growing cache it is given captured steps as what it would call compiled."""
        if model_kwargs.get("output_routed_experts"):
            return self._sample_routed(
                input_ids, logits_processor, stopping_criteria, generation_config, *args, **model_kwargs
            )
        steps = self._captured_steps(model_kwargs.get(CACHE_ARGUMENT), len(input_ids), generation_config)
        if steps is not None:
            generation_config = copy.copy(generation_config)
            generation_config.compile_config = steps
        with contextlib.closing(steps) if steps is not None else contextlib.nullcontext():
            return super()._sample(
                input_ids, logits_processor, stopping_criteria, generation_config, *args, **model_kwargs
            )

    def _sample_routed(self, input_ids, logits_processor, stopping_criteria, generation_config, *args, **model_kwargs):
        """transformers' loop, and what its forwards chose; a replayed graph would write over that."""
        generation_config = copy.copy(generation_config)
        generation_config.disable_compile = True
        forwards: list[torch.Tensor] = []
        cache = model_kwargs[CACHE_ARGUMENT]
        cached = int(cache.get_seq_length())
        output = super()._sample(
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            *args,
            **model_kwargs,
            routed_so_far=forwards,
        )
        fed = int(cache.get_seq_length()) - cached  # on some devices transformers takes a last step back
        return KimiK3GenerateOutput(**output, routed_experts=torch.cat(forwards, dim=1)[:, :fed])

    def _update_model_kwargs_for_generation(self, outputs, model_kwargs, *args, **kwargs):
        if "routed_so_far" in model_kwargs:
            model_kwargs["routed_so_far"].append(outputs.routed_experts)
        return super()._update_model_kwargs_for_generation(outputs, model_kwargs, *args, **kwargs)

    @functools.wraps(GenerationMixin.prepare_inputs_for_generation)  # transformers reads the signature
    def prepare_inputs_for_generation(
        self, input_ids: torch.Tensor, next_sequence_length: int | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """transformers' method; a plain step passes by its search for what other models need, 20 us on the host."""
        kwargs.pop("routed_so_far", None)
        cache = kwargs.get(CACHE_ARGUMENT)
        plain = next_sequence_length == 1 and kwargs.keys() <= _OF_A_STEP
        if not plain or cache is None or cache.is_compileable:
            inputs = super().prepare_inputs_for_generation(
                input_ids, next_sequence_length=next_sequence_length, **kwargs
            )
        else:
            inputs = {"input_ids": input_ids[:, -1:].contiguous(), **kwargs}
            if (positions := inputs.get("position_ids")) is not None:
                inputs["position_ids"] = positions[..., -1:].contiguous()
            inputs = {name: x for name, x in inputs.items() if x is not None}
        # peft stands around this call for its learned prompts, and knows the cache by the older name: without it, it
        # would put them in front of every token.
        if "prepare_inputs_for_generation" in vars(self) and cache is not None:
            inputs["past_key_values"] = cache
        return inputs

    def _captured_steps(self, cache: Any, rows: int, generation_config: GenerationConfig) -> CapturedSteps | None:
        """None where the forward runs as it is, or a static cache's steps are captured."""
        if generation_config.disable_compile or generation_config.compile_config is not None:
            return None
        # Another copy of this code in the process may be another version.
        if not isinstance(cache, HybridCache) or cache.is_compileable or any(layer.offloaded for layer in cache.layers):
            return None
        # The caches of drafts record. A class, or an instance, that feeds steps in its own way may feed padding.
        own = (self.prepare_inputs_for_generation, self._update_model_kwargs_for_generation)
        mixin = KimiK3GenerationMixin
        usual = [mixin.prepare_inputs_for_generation, mixin._update_model_kwargs_for_generation]
        if generation_config.is_assistant or [getattr(method, "__func__", None) for method in own] != usual:
            return None
        model: Any = self  # this is mixed into one
        return CapturedSteps(model, cache, CACHE_ARGUMENT, rows) if has_graphs(model.device) else None

    def release_decoding_buffers(self) -> None:
        """Free the buffers and graphs that `generate` keeps on a GPU for its next call; that one makes them anew."""
        release_steps(self)

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
    ):
        other = "past_key_values" if CACHE_ARGUMENT == "cache" else "cache"
        if model_kwargs.get(other) is not None:
            model_kwargs[CACHE_ARGUMENT] = model_kwargs.pop(other)
        given, implementation = model_kwargs.get(CACHE_ARGUMENT), generation_config.cache_implementation
        if implementation not in CACHE_IMPLEMENTATIONS:
            raise ValueError(
                f"cache_implementation={implementation!r} is not supported, recurrent states and latents live in "
                f"HybridCache: use one of {', '.join(map(repr, CACHE_IMPLEMENTATIONS[1:]))}, or leave it out"
            )
        check_generation(generation_config, model_kwargs, generation_mode)
        if given is None:  # transformers decides whether there is a cache, its kind is ours
            generation_config.cache_implementation = None
        super()._prepare_cache_for_generation(
            generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )
        generation_config.cache_implementation = implementation
        if given is None and isinstance(model_kwargs.get(CACHE_ARGUMENT), DynamicCache):
            places = max(max_cache_length, generation_config.max_cache_len or 0) if implementation == "static" else None
            cache = HybridCache(self.config, max_length=places, offload=implementation == "offloaded")
            model_kwargs[CACHE_ARGUMENT] = cache
            if generation_config.is_assistant:
                cache.activate_past_recording()

        drafts = model_kwargs.get(CACHE_ARGUMENT)
        if generation_config.is_assistant and drafts is not None:  # a round's draft may be taken back whole
            drafts.keep_recorded(MOST_DRAFTED)

    @staticmethod
    def create_masks_for_generate(
        config: Any, inputs_embeds: Any, attention_mask: torch.Tensor | None, cache: Any = None,
        past_key_values: Any = None, **kwargs: Any,
    ) -> torch.Tensor | None:  # fmt: skip
        """For static caches, before a forward that may be compiled: [B, S] -> [B, max_length], zeros at unused places.

        A call of transformers' generation, which would otherwise make the 4-D mask that KDA layers cannot read.
        """
        cache = past_key_values if cache is None else cache
        if attention_mask is None:
            return None
        return F.pad(attention_mask, (0, cache.get_max_length() - attention_mask.shape[1]))

    def _assisted_decoding(self, input_ids, *args, **kwargs):
        if kwargs.get("inputs_embeds") is not None:
            # transformers would verify the first draft against a forward that did not see it
            raise ValueError("assisted decoding starts from input_ids: leave inputs_embeds, and images, out")
        cache = kwargs.get(CACHE_ARGUMENT)
        if cache is not None:
            if cache.get_seq_length() > 0:
                raise ValueError("assisted decoding cannot continue a cache: transformers would feed its tokens again")
            cache.keep_recorded(MOST_DRAFTED)
        return super()._assisted_decoding(input_ids, *args, **kwargs)

    def warmup(
        self,
        batch_sizes: Sequence[int] = (1,),
        prompt_lengths: Sequence[int] = (1024,),
        training: bool = False,
        progress: bool = True,
    ) -> list[str]:
        """Compile what this model's kernels need on its GPU, many at a time, so that no later forward waits for it.

        The first `generate` does it for its own batch by itself. Kernels differ between a prompt and a step, between
        padded batches and plain ones, with the number of rows that an expert gets, and from 32,768 tokens a row on;
        they do not between lengths otherwise. What is compiled lies in Triton's cache folder (`docs/kernels.md`).

        Args:
            batch_sizes: rows of the batches to come; of more than one, padded ones too.
            prompt_lengths: tokens of a row, each with each batch size.
            training: compile a training step of the first batch size and the longest length as well.
            progress: draw a bar.

        Returns:
            the names of the kernels compiled, or loaded from the cache.

        Raises:
            RuntimeError: where no kernels run, or where hooks would see the zeros that are fed, with the reason.
        """
        return warm_up_all(self, batch_sizes, prompt_lengths, training, progress)

    def _prefill(self, input_ids, generation_config, model_kwargs, *args, **kwargs):
        held, only_new = self._check_prompt(input_ids, generation_config, model_kwargs)
        embeds = model_kwargs.get("inputs_embeds")
        prompt = input_ids if embeds is None else embeds
        warm_up_once(self, *prompt.shape[:2], model_kwargs.get("attention_mask"))
        if generation_config.prefill_chunk_size is not None and model_kwargs.get(CACHE_ARGUMENT) is not None:
            input_ids = self._feed_chunks(input_ids, generation_config, model_kwargs, held, only_new)
            generation_config = copy.copy(generation_config)
            generation_config.prefill_chunk_size = None
        outputs = super()._prefill(input_ids, generation_config, model_kwargs, *args, **kwargs)
        if isinstance(generation_config.compile_config, CapturedSteps):
            generation_config.compile_config.drop_unread(model_kwargs)
        return outputs

    def _check_prompt(
        self, input_ids: torch.Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]
    ) -> tuple[int, bool]:
        """-> how many tokens the cache holds, and whether the ids are those behind them alone."""
        cache, embeds = model_kwargs.get(CACHE_ARGUMENT), model_kwargs.get("inputs_embeds")
        mask, chunk = model_kwargs.get("attention_mask"), generation_config.prefill_chunk_size
        if isinstance(cache, HybridCache):
            cache.check_whole()
        if embeds is not None and chunk is not None:
            raise ValueError("prefill_chunk_size splits input_ids: leave it out with inputs_embeds and images")
        if embeds is not None and cache is not None and (held := int(cache.get_seq_length())) > 0:
            columns = embeds.shape[1] if mask is None else mask.shape[1]
            if columns != embeds.shape[1] or columns <= held:
                raise ValueError(
                    f"the cache holds {held} tokens and inputs_embeds of {embeds.shape[1]} came: with inputs_embeds "
                    "generate needs those of all tokens and a mask of as many columns, at least one token of them new"
                )
        if cache is None or embeds is not None:
            return 0, False
        held, given = int(cache.get_seq_length()), input_ids.shape[1]
        # the newest transformers drops a mask of ones and remembers its length
        columns = mask.shape[1] if mask is not None else getattr(generation_config, "_mask_length", given)
        only_new = held > 0 and columns == held + given
        if held and not only_new and (columns != given or given <= held):
            raise ValueError(
                f"the cache holds {held} tokens and {given} ids came with a mask of {columns} columns: generate needs "
                "the mask of all tokens, and the ids of all of them with at least one new one, or of the new ones only"
            )
        return held, only_new

    def _feed_chunks(
        self,
        input_ids: torch.Tensor,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        held: int,
        only_new: bool,
    ) -> torch.Tensor:
        """All but the last chunk: the oldest transformers forgets what a cache holds when it splits a prompt itself.

        Returns:
            the ids that the rest of the prefill is given.
        """
        model: Any = self
        mask, chunk = model_kwargs.get("attention_mask"), generation_config.prefill_chunk_size
        new = input_ids if only_new else input_ids[:, held:]
        fed = (new.shape[1] - 1) // chunk * chunk
        for start in range(0, fed, chunk):
            seen = held + start + chunk
            part = {**model_kwargs, "attention_mask": None if mask is None else mask[:, :seen]}
            if (positions := model_kwargs.get("position_ids")) is not None:
                part["position_ids"] = positions[..., seen - chunk : seen]
            outputs = model(**model.prepare_inputs_for_generation(new[:, start : start + chunk], **part))
            if "routed_so_far" in model_kwargs:
                model_kwargs["routed_so_far"].append(outputs.routed_experts)
        return new[:, fed:] if only_new else input_ids
