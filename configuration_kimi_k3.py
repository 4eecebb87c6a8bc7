"""Configurations of Kimi K3: the multimodal wrapper, the text model and the vision tower.

Facts a reader needs:

* The defaults are the released model's. A *file* (a dict that is read) is another matter: a key that a file leaves
  out means that the feature is absent, because flat text-only checkpoints (Kimi-Linear-48B, small dense K3 models)
  know nothing of the keys of K3. `from_dict` applies that rule, the constructor does not.
* The released file says `model_type: kimi_linear` inside `text_config`. transformers maps that name to a class of its
  own that ignores every K3 field, so in memory our text config is called `kimi_k3_text`; written back it is
  `kimi_linear` again.
* `quantization_config` (MXFP4 experts) lives in `KimiK3TextConfig.expert_quantization` in memory, because transformers
  hands any model whose config shows `quantization_config` to a quantizer of its own, which needs `compressed-tensors`
  and unpacks the experts. It is written back under its official key and place. A section of another quantizer
  (bitsandbytes, torchao) keeps the key; that of packed experts beside it is then called `expert_quantization`.
* Layer lists in `linear_attn_config` count from 1.
"""

import copy
import itertools
import math
import os
import reprlib
from dataclasses import field
from typing import Any, ClassVar

import transformers
from packaging.version import Version
from transformers import PreTrainedConfig

MINIMUM_TRANSFORMERS, NEXT_MAJOR = "5.17.0", "6"
if not Version(MINIMUM_TRANSFORMERS) <= Version(Version(transformers.__version__).base_version) < Version(NEXT_MAJOR):
    raise ImportError(
        f"kimi-k3 supports transformers >={MINIMUM_TRANSFORMERS},<{NEXT_MAJOR}, but {transformers.__version__} is "
        f"installed: pip install 'transformers>={MINIMUM_TRANSFORMERS},<{NEXT_MAJOR}'"
    )

# How routed experts are packed: neighbouring input columns under one scale, as `kernels/mxfp4.py` decodes them.
MXFP4_FORMAT, MXFP4_GROUP = "mxfp4-pack-quantized", 32

# 1-indexed, as in the file: 23 x [KDA, KDA, KDA, MLA], then one more MLA.
_RELEASED_MLA_LAYERS = [*range(4, 93, 4), 93]
_RELEASED_LINEAR_ATTN = {
    "full_attn_layers": _RELEASED_MLA_LAYERS,
    "gate_lower_bound": -5.0,
    "head_dim": 128,
    "kda_layers": [i for i in range(1, 94) if i not in _RELEASED_MLA_LAYERS],
    "num_heads": 96,
    "short_conv_kernel_size": 4,
    "use_full_rank_gate": True,
}

# The meaning of a file that does not mention the key.
_ABSENT_IN_FILE = {
    "activation_situ_beta": None,
    "activation_situ_linear_beta": None,
    "attn_res_block_size": None,
    "first_k_dense_replace": 0,
    "hidden_act": "silu",
    "latent_moe_use_norm": False,
    "mla_use_output_gate": False,
    "num_experts": None,
    "num_experts_per_token": None,
    "num_shared_experts": None,
    "q_lora_rank": None,
    "routed_expert_hidden_size": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

# Keys that none of our computations read. They are kept only to be written back as they were.
_CARRIED_KEYS = ("head_dim", "rope_scaling", "rope_theta", "model_max_length")

# Written by transformers' own kimi_linear beside the keys from which they follow; properties here.
_DERIVED_KEYS = ("layer_types", "mlp_layer_types")

# What text configs in files call their class, transformers' own that ignores K3's fields; whoever looks a class up by
# name (trl, `transformers serve`) would take that one.
_NAME_IN_FILE, _NAME = "KimiLinearForCausalLM", "KimiK3ForCausalLM"

# Sizes and counts: the smallest value that works, and whether null (the feature is absent) is one too.
_SIZES = {
    "vocab_size": (1, False),
    "hidden_size": (1, False),
    "intermediate_size": (1, False),
    "num_hidden_layers": (1, False),
    "num_attention_heads": (1, False),
    "q_lora_rank": (1, True),
    "kv_lora_rank": (1, False),
    "qk_nope_head_dim": (1, False),
    "qk_rope_head_dim": (0, False),
    "v_head_dim": (1, False),
    "attn_res_block_size": (1, True),
    "first_k_dense_replace": (0, False),
    "moe_layer_freq": (1, False),
    "num_experts": (0, True),
    "num_shared_experts": (0, True),
    "routed_expert_hidden_size": (1, True),
    "num_expert_group": (0, True),
    "topk_group": (0, True),
}

_LINEAR_ATTN_KEYS = set(_RELEASED_LINEAR_ATTN)
_ACTIVATIONS = ("situ", "silu")
_ROUTER_ACTIVATIONS = ("sigmoid", "softmax")


_FLAGS = (
    "mla_use_nope", "mla_use_output_gate", "latent_moe_use_norm", "moe_renormalize", "use_grouped_topk",
    "tie_word_embeddings", "use_cache", "output_router_logits",
)  # fmt: skip


# Values in messages: a file could hold one of any length.
_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80
_short.maxlist = 10
_shown = _short.repr


def _is_of_others(section: Any) -> bool:
    """Whether a `quantization_config` is that of a quantizer of transformers, and not of packed experts."""
    is_dict = isinstance(section, dict)
    method = section.get("quant_method") if is_dict else getattr(section, "quant_method", None)
    return method is not None and method not in ("compressed-tensors", "mxfp4")


def _check_packing(section: Any) -> None:
    """Refuse a `quantization_config` of compressed-tensors that is not about packed MXFP4 experts."""
    if not isinstance(section, dict):
        raise ValueError(f"quantization_config must be a dict, got {_shown(section)}")
    if section.get("format") != MXFP4_FORMAT:
        raise ValueError(
            f"quantization_config.format {_shown(section.get('format'))} is not implemented: of compressed-tensors' "
            f"formats routed experts in {MXFP4_FORMAT!r} are read; take the model before it was quantised, or "
            "decompress it with the library that wrote it"
        )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


class _FileConfig(PreTrainedConfig):
    """A configuration whose files other engines read too."""

    def __post_init__(self, **kwargs):
        kwargs.pop("model_type", None)
        # Read without asking by who looks for a folder's code (trl); of a folder without code it is empty.
        self.auto_map = kwargs.pop("auto_map", None) or {}
        super().__post_init__(**kwargs)

    def to_dict(self) -> dict[str, Any]:
        output = super().to_dict()
        if not output.get("auto_map"):
            output.pop("auto_map", None)
        # what transformers adds in memory must not reach a file that other engines read
        for key in ("_attn_implementation", "_experts_implementation", "output_attentions", "per_layer_config"):
            if output.get(key) in (None, False):
                output.pop(key, None)
        return output

    def to_diff_dict(self) -> dict[str, Any]:
        """What `save_pretrained` writes: all keys, for a value equal to our default is still needed by readers whose
        default differs; but not where this machine had loaded the config from."""
        output = self.to_dict()
        output.pop("_name_or_path", None)
        for part in ("text_config", "vision_config"):
            if "_name_or_path" in output.get(part, {}):
                output[part]["_name_or_path"] = ""
        return output


class KimiK3TextConfig(_FileConfig):
    """Configuration of the text model: KDA and gated MLA layers, Attention Residuals, latent experts.

    Every argument is a key of the released `text_config`; see the module docstring for what a missing key means.

    Args:
        linear_attn_config (`dict`): `kda_layers` and `full_attn_layers` (1-indexed, together every layer exactly once),
            `num_heads` and `head_dim` of KDA, `short_conv_kernel_size`, `gate_lower_bound` (a negative number selects
            the bounded decay gate, None the softplus gate of Kimi-Linear) and `use_full_rank_gate` (output gate by one
            full matrix or by a low-rank pair).
        attn_res_block_size (`int`, *optional*): decoder layers in a block of Attention Residuals; None is the ordinary
            residual stream.
        routed_expert_hidden_size (`int`, *optional*): width of the latent that routed experts work in; None is the
            full width.
        num_experts (`int`, *optional*): routed experts in a MoE layer; None or 0 makes every layer dense.
        moe_router_activation_func (`str`): what makes the scores of experts of the router's logits, `sigmoid` (each
            expert alone) or `softmax` (over all experts); `moe_renormalize` and `routed_scaling_factor` make the
            weights of the scores.
        first_k_dense_replace (`int`): number of leading layers that are dense.
        activation_situ_beta, activation_situ_linear_beta (`float`, *optional*): caps of SiTU-GLU on the gate and on the
            up branch. The first is required by `hidden_act="situ"`; None for the second leaves the up branch uncapped.
        quantization_config (`dict`, *optional*): the released `compressed-tensors` section. Routed experts are then
            held as packed MXFP4.

    Raises:
        ValueError: for a configuration that cannot work; the sentence names the field.
    """

    model_type = "kimi_k3_text"
    base_config_key = "text_config"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "cache"]
    attribute_map: ClassVar[dict[str, str]] = {
        "num_experts_per_tok": "num_experts_per_token",
        "num_local_experts": "num_experts",
        "n_routed_experts": "num_experts",
        "n_shared_experts": "num_shared_experts",
        "norm_topk_prob": "moe_renormalize",
        "n_group": "num_expert_group",
        "decoder_sparse_step": "moe_layer_freq",
    }

    vocab_size: int = 163840
    hidden_size: int = 7168
    intermediate_size: int = 33792
    num_hidden_layers: int = 93
    num_attention_heads: int = 96
    num_key_value_heads: int | None = 96
    q_lora_rank: int | None = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    mla_use_nope: bool = True
    mla_use_output_gate: bool | None = True
    linear_attn_config: dict = field(default_factory=lambda: copy.deepcopy(_RELEASED_LINEAR_ATTN))
    attn_res_block_size: int | None = 12
    hidden_act: str = "situ"
    activation_situ_beta: float | None = 4.0
    activation_situ_linear_beta: float | None = 25.0
    first_k_dense_replace: int = 1
    moe_layer_freq: int = 1
    num_experts: int | None = 896
    num_experts_per_token: int | None = 16
    num_shared_experts: int | None = 2
    moe_intermediate_size: int | None = 3072
    routed_expert_hidden_size: int | None = 3584
    latent_moe_use_norm: bool | None = True
    moe_renormalize: bool = True
    moe_router_activation_func: str = "sigmoid"
    routed_scaling_factor: float = 1.0
    num_expert_group: int | None = 1
    topk_group: int | None = 1
    topk_method: str = "noaux_tc"
    use_grouped_topk: bool = True
    num_nextn_predict_layers: int = 0
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    max_position_embeddings: int = 1048576
    tie_word_embeddings: bool = False
    use_cache: bool = True
    output_router_logits: bool = False
    bos_token_id: int | None = 163584
    eos_token_id: int | list[int] | None = 163586
    pad_token_id: int | None = 163839

    def __post_init__(self, **kwargs):
        self.expert_quantization = kwargs.pop("expert_quantization", None)
        if (section := kwargs.pop("quantization_config", None)) is not None:
            if _is_of_others(section):
                kwargs["quantization_config"] = section
            else:
                self.expert_quantization = section
        self._carried = {key: kwargs.pop(key) for key in _CARRIED_KEYS if key in kwargs}
        self._carried.update(kwargs.pop("_carried", {}))
        # Written back as it was read, until a model writes its own name.
        self._named_as_in_file = kwargs.pop("_named_as_in_file", False) or self.architectures == [_NAME_IN_FILE]
        if self._named_as_in_file:
            self.architectures = [_NAME]
        derived = {key: kwargs.pop(key) for key in _DERIVED_KEYS if key in kwargs}
        if kwargs.get("attention_bias"):
            raise ValueError("attention_bias must be false: the projections of this model have no bias")
        if "model_max_length" in self._carried:
            self._read_model_max_length()
        # Read before the base class, which walks the config and asks for `layer_types`.
        self._validate_layers()
        super().__post_init__(**kwargs)
        self._validate()
        for key, value in derived.items():
            if value is not None and list(value) != getattr(self, key):
                raise ValueError(
                    f"{key} contradicts linear_attn_config, num_experts, first_k_dense_replace or moe_layer_freq, "
                    "which decide it: remove it"
                )

    @classmethod
    def get_config_dict(
        cls, pretrained_model_name_or_path: str | os.PathLike, **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        config_dict, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        if config_dict.get("text_config") is not None:
            # Some tools copy the quantization section to the top level; a quantizer of transformers has its own there.
            section, text = config_dict.get("quantization_config"), config_dict["text_config"]
            config_dict = {"quantization_config": section, **text}
            if section is not None and not _is_of_others(section):
                _check_packing(section)
            elif section is not None:
                config_dict |= {"quantization_config": section, "expert_quantization": text.get("quantization_config")}
        if config_dict.get("model_type") == "kimi_linear":
            config_dict = {**config_dict, "model_type": cls.model_type}
        return config_dict, kwargs

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> "KimiK3TextConfig":
        """Build from a file's dict: keys that it leaves out are absent features, not the released model's values."""
        if not isinstance(config_dict.get("linear_attn_config"), dict):
            raise ValueError(
                "linear_attn_config is missing from the text config: it lists the KDA and MLA layers and the KDA heads"
            )
        if config_dict.get("hidden_act") == "situ":
            for key in ("activation_situ_beta", "activation_situ_linear_beta"):
                if key not in config_dict:
                    raise ValueError(
                        f'hidden_act="situ" needs {key}, which the config leaves out; write a number'
                        + (", or null for an uncapped up branch" if key.endswith("linear_beta") else "")
                    )
        aliases = {cls.attribute_map.get(key, key) for key in config_dict}
        absent = {key: value for key, value in _ABSENT_IN_FILE.items() if key not in aliases}
        linear = {"gate_lower_bound": None, "use_full_rank_gate": False, **config_dict["linear_attn_config"]}
        return super().from_dict({**absent, **config_dict, "linear_attn_config": linear}, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        output = super().to_dict()
        output.update(output.pop("_carried", None) or {})
        quantization = output.pop("expert_quantization", None)
        if quantization is not None:  # under its official key, unless a quantizer of transformers has that
            output["expert_quantization" if output.get("quantization_config") else "quantization_config"] = quantization
        if output.pop("_named_as_in_file", False):
            output["architectures"] = [_NAME_IN_FILE]
        output["model_type"] = "kimi_linear"
        return output

    @property
    def layer_types(self) -> list[str]:
        """One of `linear_attention` (KDA) and `full_attention` (MLA) for each layer, counted from 0."""
        kda = set(self.linear_attn_config["kda_layers"])
        return ["linear_attention" if i + 1 in kda else "full_attention" for i in range(self.num_hidden_layers)]

    @property
    def mlp_layer_types(self) -> list[str]:
        """`dense` or `sparse` for each layer."""
        first, every = self.first_k_dense_replace, self.moe_layer_freq
        sparse = [bool(self.num_experts) and i >= first and i % every == 0 for i in range(self.num_hidden_layers)]
        return ["sparse" if is_sparse else "dense" for is_sparse in sparse]

    @property
    def head_dim(self) -> int:
        """Query and key size of an MLA head. The `head_dim` of released files is a meaningless class default."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def gate_lower_bound(self) -> float | None:
        return self.linear_attn_config.get("gate_lower_bound")

    @property
    def has_softplus_gate(self) -> bool:
        """Checkpoints with the softplus gate store convolutions, output norm and selection bias in the model's dtype;
        those with the bounded gate store them in float32."""
        return self.gate_lower_bound is None

    @property
    def base_model_tp_plan(self) -> dict[str, str]:
        """Style of every weight under tensor parallelism (`docs/distributed.md`); those of `kimi_k3_*` are ours."""
        names = ["input_layernorm", "post_attention_layernorm"]
        if self.attn_res_block_size is not None:
            names += ["self_attention_res_norm", "self_attention_res_proj", "mlp_res_norm", "mlp_res_proj"]
        attention: dict[str, str] = {}
        feed_forward: dict[str, str] = {}
        if "linear_attention" in self.layer_types:
            low_rank = () if self.linear_attn_config.get("use_full_rank_gate") else ("g_a_proj",)
            gate = "g_b_proj" if low_rank else "g_proj"
            convolutions = ("q_conv1d", "k_conv1d", "v_conv1d")
            rows = ("q_proj", "k_proj", "v_proj", *convolutions, "f_b_proj", "b_proj", gate)
            attention |= dict.fromkeys(rows, "kimi_k3_rows")
            attention |= dict.fromkeys(("f_a_proj", *low_rank, "o_norm"), "kimi_k3_whole")
        if "full_attention" in self.layer_types:
            query = ("q_proj",) if self.q_lora_rank is None else ("q_b_proj",)
            output_gate = ("g_proj",) if self.mla_use_output_gate else ()
            attention |= dict.fromkeys((*query, "kv_b_proj", *output_gate), "kimi_k3_rows")
            latent = () if self.q_lora_rank is None else ("q_a_proj", "q_a_layernorm")
            attention |= dict.fromkeys((*latent, "kv_a_proj_with_mqa", "kv_a_layernorm"), "kimi_k3_whole")
        attention["o_proj"] = "kimi_k3_columns"
        cut_mlp = {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}
        if "dense" in self.mlp_layer_types:
            feed_forward |= {f"mlp.{name}": style for name, style in cut_mlp.items()}
        if "sparse" in self.mlp_layer_types:
            moe = {"gate": "kimi_k3_whole", "experts": "moe_tp_experts"}
            for matrix in self._expert_parameters:
                moe[f"experts.{matrix}"] = "packed_colwise" if matrix.startswith("gate_up") else "rowwise"
            if self.routed_expert_hidden_size is not None:
                norm = ("routed_expert_norm",) if self.latent_moe_use_norm else ()
                moe |= dict.fromkeys(("routed_expert_down_proj", "routed_expert_up_proj", *norm), "kimi_k3_whole")
            if self.num_shared_experts:
                moe |= {f"shared_experts.{name}": style for name, style in cut_mlp.items()}
            feed_forward |= {f"block_sparse_moe.{name}": style for name, style in moe.items()}
        layer = {
            "self_attn": "kimi_k3_heads",
            **{f"self_attn.{name}": style for name, style in attention.items()},
            **feed_forward,
            **dict.fromkeys(names, "kimi_k3_whole"),
        }
        ends = ["norm"]
        if self.attn_res_block_size is not None:
            ends += ["output_attn_res_norm", "output_attn_res_proj"]
        return {
            "embed_tokens": "embedding_rowwise",
            **{f"layers.*.{name}": style for name, style in layer.items()},
            **dict.fromkeys(ends, "kimi_k3_whole"),
        }

    @base_model_tp_plan.setter
    def base_model_tp_plan(self, plan: dict[str, str]) -> None:
        # Older releases assign the plan again, with the embedding's entry, when embeddings are tied.
        if plan != self.base_model_tp_plan:
            raise AttributeError("base_model_tp_plan follows from the sizes: give another one to DistributedConfig")

    @property
    def base_model_ep_plan(self) -> dict[str, str] | None:  # type: ignore[override]  # transformers reads it only
        """Whole experts on every process; None without experts."""
        if "sparse" not in self.mlp_layer_types:
            return None
        experts = "layers.*.block_sparse_moe.experts"
        return {
            **{f"{experts}.{matrix}": "grouped_gemm" for matrix in self._expert_parameters},
            experts: "ep_dispatch_experts",
        }

    @property
    def base_model_pp_plan(self) -> dict[str, tuple[list[str], list[str]]]:  # type: ignore[override]  # as above
        """What enters and leaves each part of a pipeline; `blocks` are the sums of finished blocks (none at first)."""
        stream = ["partial", "blocks"] if self.attn_res_block_size is not None else ["partial"]
        plan: dict[str, tuple[list[str], list[str]]] = {
            "embed_tokens": (["input_ids"], ["partial"]),
            "layers": ([*stream, "attention_mask"], stream),
        }
        if self.attn_res_block_size is not None:
            plan["output_attn_res_norm"] = ([], ["norm_weight"])
            plan["output_attn_res_proj"] = ([], ["query"])
        plan["norm"] = (["partial"], ["last_hidden_state"])
        return plan

    @property
    def _expert_parameters(self) -> tuple[str, ...]:
        matrices = ("gate_up_proj", "down_proj")
        if self.expert_quantization is None:
            return matrices
        return tuple(f"{matrix}_{kind}" for matrix in matrices for kind in ("packed", "scale"))

    def _read_model_max_length(self):
        default = type(self).max_position_embeddings
        length = self._carried["model_max_length"]
        if self.max_position_embeddings == default:
            self.max_position_embeddings = length
        elif self.max_position_embeddings != length:
            raise ValueError(
                f"max_position_embeddings ({self.max_position_embeddings}) and model_max_length ({length}) differ; "
                "keep one"
            )

    def _validate_size(self, name: str) -> None:
        smallest, optional = _SIZES[name]
        value = getattr(self, name)
        if value is None and optional:
            return
        if not _is_count(value) or value < smallest:
            kind = "a positive integer" if smallest else "an integer that is not negative"
            raise ValueError(f"{name} must be {kind}{' or null' if optional else ''}, got {_shown(value)}")

    def _validate_layers(self):
        self._validate_size("num_hidden_layers")
        linear = self.linear_attn_config
        if not isinstance(linear, dict):
            raise ValueError(f"linear_attn_config must be a dict, got {type(linear).__name__}")
        missing = {"kda_layers", "full_attn_layers", "num_heads", "head_dim", "short_conv_kernel_size"} - set(linear)
        if missing:
            raise ValueError(f"linear_attn_config lacks {', '.join(sorted(missing))}")
        unknown = set(linear) - _LINEAR_ATTN_KEYS
        if unknown:
            raise ValueError(
                f"linear_attn_config has keys this model does not implement: {', '.join(sorted(unknown))[:100]} "
                "(KDA here has as many value heads as key heads, all of one size)"
            )
        for name in ("kda_layers", "full_attn_layers"):
            if not isinstance(linear[name], list | tuple) or not all(map(_is_count, linear[name])):
                value = _shown(linear[name])
                raise ValueError(f"linear_attn_config.{name} must be a list of layer numbers, got {value}")
        kda, mla = list(linear["kda_layers"]), list(linear["full_attn_layers"])
        if both := sorted(set(kda) & set(mla)):
            raise ValueError(f"linear_attn_config lists layers {_shown(both)} in kda_layers and in full_attn_layers")
        given, count = {*kda, *mla}, self.num_hidden_layers
        extra = sorted(i for i in given if not 1 <= i <= count)
        if extra or len(given) != count or len(kda) + len(mla) != count:
            # a count that no list of this length can name may be any number: only a few of what is left out are shown
            left_out = list(itertools.islice((i for i in range(1, count + 1) if i not in given), 11))
            raise ValueError(
                f"kda_layers and full_attn_layers of linear_attn_config must name each of the {count} layers once, "
                f"counted from 1: left out {_shown(left_out)}, out of range {_shown(extra)}, "
                f"{len(kda) + len(mla)} entries in all"
            )

    def _validate(self):
        linear = self.linear_attn_config
        for name in ("num_heads", "head_dim", "short_conv_kernel_size"):
            if not _is_count(linear[name]) or linear[name] < 1:
                raise ValueError(f"linear_attn_config.{name} must be a positive integer, got {_shown(linear[name])}")
        bound = linear.get("gate_lower_bound")
        if bound is not None and not (isinstance(bound, (int, float)) and _is_positive(-bound)):
            raise ValueError(
                f"linear_attn_config.gate_lower_bound must be a negative number (bounded gate) or null (softplus "
                f"gate), got {_shown(bound)}"
            )
        if not isinstance(linear.get("use_full_rank_gate", False), bool):
            raise ValueError("linear_attn_config.use_full_rank_gate must be true or false")
        for name in _SIZES:
            self._validate_size(name)
        for name in _FLAGS:
            if getattr(self, name) is not None and not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {_shown(getattr(self, name))}")
        for name in ("rms_norm_eps", "initializer_range", "routed_scaling_factor"):
            if not _is_positive(getattr(self, name)):
                raise ValueError(f"{name} must be a positive number, got {_shown(getattr(self, name))}")
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.num_key_value_heads != self.num_attention_heads:
            raise ValueError(
                f"num_key_value_heads ({self.num_key_value_heads}) must equal num_attention_heads "
                f"({self.num_attention_heads}): MLA shares one latent, it does not group heads"
            )
        if not self.mla_use_nope:
            raise ValueError("mla_use_nope must be true: the text model of Kimi K3 has no rotary embedding")
        if self.hidden_act not in _ACTIVATIONS:
            raise ValueError(f"hidden_act {_shown(self.hidden_act)} is not known; use one of {', '.join(_ACTIVATIONS)}")
        if self.hidden_act == "situ":
            beta, linear_beta = self.activation_situ_beta, self.activation_situ_linear_beta
            if not _is_positive(beta):
                raise ValueError(f'hidden_act="situ" needs activation_situ_beta, a positive number, got {_shown(beta)}')
            if linear_beta is not None and not _is_positive(linear_beta):
                value = _shown(linear_beta)
                raise ValueError(f"activation_situ_linear_beta must be a positive number or null, got {value}")
        if self.num_experts:
            self._validate_experts()
        if self.expert_quantization is not None:
            self._validate_quantization()

    def _validate_experts(self):
        for name in ("num_experts_per_token", "moe_intermediate_size"):
            value = getattr(self, name)
            if not _is_count(value) or value < 1:
                raise ValueError(
                    f"num_experts is {self.num_experts}, so {name} must be a positive integer, got {_shown(value)}"
                )
        if self.moe_router_activation_func not in _ROUTER_ACTIVATIONS:
            raise ValueError(
                f"moe_router_activation_func {_shown(self.moe_router_activation_func)} is not known; use one of "
                f"{', '.join(_ROUTER_ACTIVATIONS)}"
            )
        if self.topk_method != "noaux_tc":
            raise ValueError(f"topk_method {_shown(self.topk_method)} is not implemented; only 'noaux_tc' is")
        if self.latent_moe_use_norm and not self.routed_expert_hidden_size:
            raise ValueError("latent_moe_use_norm is true, so routed_expert_hidden_size (the latent width) is needed")
        groups, chosen = self.num_expert_group or 1, self.topk_group or 1
        if self.num_experts % groups:
            raise ValueError(f"num_experts ({self.num_experts}) does not divide into num_expert_group ({groups})")
        if chosen > groups:
            raise ValueError(f"topk_group ({chosen}) exceeds num_expert_group ({groups})")
        eligible = chosen * (self.num_experts // groups)
        if self.num_experts_per_token > eligible:
            raise ValueError(
                f"num_experts_per_token ({self.num_experts_per_token}) exceeds the {eligible} experts of topk_group "
                f"({chosen}) groups"
            )
        if groups > 1 and self.num_experts // groups < 2:
            raise ValueError("num_expert_group leaves groups of one expert; a group is scored by its two best experts")

    def _validate_quantization(self):
        _check_packing(self.expert_quantization)
        if not self.num_experts:
            raise ValueError("quantization_config packs routed experts, but num_experts is 0: remove one of the two")
        for name in ("routed_expert_hidden_size", "moe_intermediate_size"):
            size = getattr(self, name) or self.hidden_size
            if size % MXFP4_GROUP:
                raise ValueError(
                    f"{name} ({size}) must be a multiple of {MXFP4_GROUP}, the MXFP4 group, for packed experts"
                )


# Of a vision config: keys that choose among forms of which one is implemented.
_VISION_FORMS = {
    "activation_func": "gelu_pytorch_tanh",
    "merge_type": "sd2_tpool",
    "mlp_type": "mlp2",
    "mm_projector_type": "patchmergerv2",
    "norm_type": "rmsnorm",
    "pos_emb_interpolation_mode": "bilinear",
    "pos_emb_type": "divided_fixed",
    "projector_hidden_act": "gelu",
}


class KimiK3VisionConfig(_FileConfig):
    """Configuration of the vision tower (MoonViT-V2) and of the projector into the text width.

    Raises:
        ValueError: for a configuration that cannot work; the sentence names the field.
    """

    model_type = "kimi_k3_vision"
    base_config_key = "vision_config"

    activation_func: str = "gelu_pytorch_tanh"
    attn_bias: bool = False
    init_pos_emb_height: int = 64
    init_pos_emb_time: int = 4
    init_pos_emb_width: int = 64
    linear_bias: bool = False
    merge_kernel_size: list[int] = field(default_factory=lambda: [2, 2])
    merge_type: str = "sd2_tpool"
    mlp_type: str = "mlp2"
    mm_hidden_size: int = 1024
    mm_projector_type: str = "patchmergerv2"
    norm_type: str = "rmsnorm"
    patch_embed_proj_bias: bool = False
    patch_size: int = 14
    pos_emb_interpolation_mode: str = "bilinear"
    pos_emb_type: str = "divided_fixed"
    projector_hidden_act: str = "gelu"
    projector_ln_eps: float = 1e-5
    qkv_hidden_size: int = 1536
    text_hidden_size: int = 7168
    vt_hidden_size: int = 1024
    vt_intermediate_size: int = 4096
    vt_num_attention_heads: int = 12
    vt_num_hidden_layers: int = 27

    def __post_init__(self, **kwargs):
        # The released file asks for flash_attention_2; which kernel runs is the user's choice at load time.
        kwargs.pop("_attn_implementation", None)
        super().__post_init__(**kwargs)
        for name, only in _VISION_FORMS.items():
            if getattr(self, name) != only:
                raise ValueError(
                    f"vision_config.{name} {_shown(getattr(self, name))} is not implemented; only {only!r} is"
                )
        sides = self.merge_kernel_size
        if not isinstance(sides, list | tuple) or len(sides) != 2 or not all(_is_count(n) and n > 0 for n in sides):
            raise ValueError(f"vision_config.merge_kernel_size must be two positive numbers, got {_shown(sides)}")
        if self.qkv_hidden_size % self.vt_num_attention_heads:
            raise ValueError(
                f"qkv_hidden_size ({self.qkv_hidden_size}) does not divide into vt_num_attention_heads "
                f"({self.vt_num_attention_heads})"
            )
        if (self.qkv_hidden_size // self.vt_num_attention_heads) % 4:
            raise ValueError(
                f"qkv_hidden_size ({self.qkv_hidden_size}) / vt_num_attention_heads ({self.vt_num_attention_heads}) "
                "must be a multiple of 4: pairs of channels turn by column and row"
            )
        if self.mm_hidden_size != self.vt_hidden_size:
            raise ValueError(
                f"mm_hidden_size ({self.mm_hidden_size}), which the projector reads, must equal vt_hidden_size "
                f"({self.vt_hidden_size}), which the tower gives"
            )


class KimiK3Config(_FileConfig):
    """Configuration of the multimodal model, as `config.json` of the released checkpoint holds it.

    Args:
        text_config (`KimiK3TextConfig` or `dict`, *optional*): the text model. A dict is read like a file.
        vision_config (`KimiK3VisionConfig` or `dict`, *optional*): the vision tower. None with a `text_config` is a
            model without vision; `KimiK3Config()` alone is the released model, vision included.
    """

    model_type = "kimi_k3"
    sub_configs: ClassVar[dict] = {"text_config": KimiK3TextConfig, "vision_config": KimiK3VisionConfig}
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "cache"]

    text_config: KimiK3TextConfig | dict | None = None
    vision_config: KimiK3VisionConfig | dict | None = None
    ignore_index: int = -100
    image_placeholder: str = "<|kimi_image_placeholder|>"
    media_placeholder_token_id: int = 163605
    tie_word_embeddings: bool = False
    bos_token_id: int | None = 163584
    eos_token_id: int | list[int] | None = 163586
    pad_token_id: int | None = 163839

    def __post_init__(self, **kwargs):
        if self.text_config is None:
            if self.vision_config is None:
                self.vision_config = KimiK3VisionConfig()
            self.text_config = KimiK3TextConfig()
        for name in ("text_config", "vision_config"):
            if not isinstance(getattr(self, name), dict | PreTrainedConfig | None):
                raise ValueError(f"{name} must be a dict, got {_shown(getattr(self, name))}")
        if isinstance(self.text_config, dict):
            self.text_config = KimiK3TextConfig.from_dict(dict(self.text_config))
        if isinstance(self.vision_config, dict):
            self.vision_config = KimiK3VisionConfig(**self.vision_config)
        # Some tools copy the section to the top level, where transformers would act on it (module docstring).
        section = kwargs.get("quantization_config")
        if section is not None and not _is_of_others(section):
            del kwargs["quantization_config"]
            _check_packing(section)
            if self.text_config.expert_quantization is None:
                self.text_config.expert_quantization = section
                self.text_config._validate_quantization()
        super().__post_init__(**kwargs)
        if self.vision_config is not None and self.vision_config.text_hidden_size != self.text_config.hidden_size:
            raise ValueError(
                f"vision_config.text_hidden_size ({self.vision_config.text_hidden_size}) must equal "
                f"text_config.hidden_size ({self.text_config.hidden_size})"
            )
        if self.tie_word_embeddings != self.text_config.tie_word_embeddings:
            raise ValueError(
                f"tie_word_embeddings is {self.tie_word_embeddings} at the top and "
                f"{self.text_config.tie_word_embeddings} in text_config; make them equal"
            )

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> "KimiK3Config":
        if config_dict.get("text_config") is None and "hidden_size" in config_dict:
            raise ValueError("this is a flat text config: use KimiK3TextConfig and KimiK3ForCausalLM, or an Auto class")
        return super().from_dict(config_dict, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        output = super().to_dict()
        if output.get("vision_config") is None:
            output.pop("vision_config", None)
        return output


__all__ = ["KimiK3Config", "KimiK3TextConfig", "KimiK3VisionConfig"]
