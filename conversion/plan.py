"""What a conversion writes: the target's configuration, and its shards down to the byte.

A plan is made from headers alone, and is the same for the same source and target: that lets a killed conversion
continue.
"""

import copy
import json
import math
import re
from dataclasses import dataclass, field

from ..checkpoint_kimi_k3 import FUSED_EXPERTS, plain_name
from ..configuration_kimi_k3 import MXFP4_FORMAT, MXFP4_GROUP, KimiK3Config, KimiK3TextConfig
from .source import (
    DTYPES,
    FUSED_CONVOLUTIONS,
    VISION,
    Checkpoint,
    ConversionError,
    Stored,
    expected_tensors,
    matrices,
    shape_of,
    without_collector,
)

LAYOUTS = ("released", "flat", "native")
EXPERTS = {"bf16": "BF16", "fp32": "F32", "mxfp4": "U8"}

# The released model's section; which linears are packed is told by the tensors, not by these patterns.
MXFP4_SECTION = {
    "config_groups": {
        "group_0": {
            "format": MXFP4_FORMAT,
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": MXFP4_GROUP,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "scale_dtype": "torch.uint8",
                "strategy": "group",
                "symmetric": True,
                "type": "float",
                "zp_dtype": None,
            },
        }
    },
    "format": MXFP4_FORMAT,
    "global_compression_ratio": None,
    "ignore": [
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
        "re:.*lm_head.*",
        "re:.*vision_tower.*",
        "re:.*mm_projector.*",
    ],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}


@dataclass(frozen=True)
class Target:
    """The form to convert into.

    Args:
        layout: `released`, `flat` or `native` (docs/conversion.md).
        expert_dtype: storage of the routed experts: `mxfp4`, `bf16`, `fp32`; None leaves it as it is.
        text_only: leave vision tower and projector out.
        layers: keep the decoder layers [first, last], counted from 0; None keeps all.
        experts: how many routed experts of a layer to keep, from the first on; None keeps all.
        shard_size: largest shard in bytes; a larger tensor gets a shard of its own.
    """

    layout: str = "released"
    expert_dtype: str | None = None
    text_only: bool = False
    layers: tuple[int, int] | None = None
    experts: int | None = None
    shard_size: int = 5_000_000_000


@dataclass(frozen=True, slots=True)
class Step:
    """One piece of work: `kind` of `parts` makes the bytes of one tensor's range, or of two (codes and scales).

    `label` is the plain name of the tensor that is worked on, `nbytes` how many bytes come out.

    copy     parts (tensor,)          -> its bytes
    cast     parts (tensor,)          -> the same values in the target's dtype
    decode   parts (packed, scale)    -> values in the target's dtype
    pack     parts (tensor,)          -> codes, scales
    """

    kind: str
    label: str
    parts: tuple[Stored, ...]
    places: tuple[tuple[str, int], ...]  # (target tensor, byte in it), one for each result
    nbytes: int


@dataclass
class Shard:
    """One file: its tensors with dtype and shape, and the steps that make their bytes."""

    tensors: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    name: str = ""

    @property
    def nbytes(self) -> int:
        return sum(map(_nbytes, self.tensors.values()))

    def layout(self) -> tuple[bytes, dict[str, int]]:
        """The bytes before the data, and where in the file each tensor begins; as `save_file` orders them."""
        header, offset = {"__metadata__": {"format": "pt"}}, 0
        order = sorted(self.tensors, key=lambda name: (-DTYPES[self.tensors[name][0]].itemsize, name))
        for name in order:
            dtype, shape = self.tensors[name]
            end = offset + _nbytes((dtype, shape))
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        start = 8 + len(text)
        begins = {name: start + header[name]["data_offsets"][0] for name in order}
        return len(text).to_bytes(8, "little") + text, begins


@dataclass
class Plan:
    """`config` is what config.json will hold; None: the source's file as it is."""

    config: dict | None
    shards: list[Shard]

    @property
    def total_size(self) -> int:
        return sum(shard.nbytes for shard in self.shards)

    def index(self) -> dict:
        weight_map = {name: shard.name for shard in self.shards for name in shard.tensors}
        return {"metadata": {"total_size": self.total_size}, "weight_map": dict(sorted(weight_map.items()))}


def _nbytes(entry: tuple[str, tuple[int, ...]]) -> int:
    return DTYPES[entry[0]].itemsize * math.prod(entry[1])


@without_collector()
def make_plan(source: Checkpoint, target: Target) -> Plan:
    """Everything that converting `source` into `target` will do.

    Raises:
        ConversionError: for a target that this model does not fit, with the reason.
    """
    if target.layout not in LAYOUTS:
        raise ConversionError(f"layout {target.layout!r} is not one of {', '.join(LAYOUTS)}")
    if target.expert_dtype not in (None, *EXPERTS):
        raise ConversionError(f"expert_dtype {target.expert_dtype!r} is not one of {', '.join(EXPERTS)}")
    if target.shard_size < 1:
        raise ConversionError(f"the shard size must be positive, not {target.shard_size}")
    text = _text_config(source.text_config, target)
    if target.layout == "native" and (reasons := _native_misfits(source.config, text, target)):
        raise ConversionError(f"transformers' kimi_linear has no place for {', '.join(reasons)}")
    config = _wrapped(source.config, text, target)
    tensors = _chosen(source, target)
    shards = _split(_groups(tensors, config, target), target.shard_size)
    return Plan(_written(source, config, target), shards)


# --- configuration ---------------------------------------------------------------------------------------------------


def _text_config(source: KimiK3TextConfig, target: Target) -> KimiK3TextConfig:
    """The text configuration of the target, checked by its class."""
    values = source.to_dict()
    if target.expert_dtype is not None and not source.num_experts:
        raise ConversionError(f"--expert-dtype {target.expert_dtype}: this model has no routed experts")
    if target.expert_dtype == "mxfp4":
        values["quantization_config"] = source.expert_quantization or copy.deepcopy(MXFP4_SECTION)
    elif target.expert_dtype is not None:
        values.pop("quantization_config", None)
    if target.layers is not None:
        values.update(_fewer_layers(source, *target.layers))
    if target.experts is not None:
        values.update(_fewer_experts(source, target.experts))
        if not any(kind == "sparse" for kind in source.mlp_layer_types):
            raise ConversionError("--experts: no layer of this model has routed experts")
    try:
        text = KimiK3TextConfig.from_dict(values)
    except ValueError as error:
        raise ConversionError(f"the target cannot be configured: {error}") from error
    first, last = target.layers or (0, source.num_hidden_layers - 1)
    for kind in ("layer_types", "mlp_layer_types"):
        if getattr(text, kind) != getattr(source, kind)[first : last + 1]:
            raise ConversionError(
                f"--layers {first}-{last}: {kind} of these layers cannot be written with first_k_dense_replace and "
                "moe_layer_freq; begin at layer 0"
            )
    return text


def _fewer_layers(source: KimiK3TextConfig, first: int, last: int) -> dict:
    count = source.num_hidden_layers
    if not 0 <= first <= last < count:
        raise ConversionError(f"--layers {first}-{last}: the model has layers 0 to {count - 1}")
    block = source.attn_res_block_size
    if block and first % block:
        raise ConversionError(
            f"--layers {first}-{last}: blocks of Attention Residuals are {block} layers, so the first layer must be a "
            f"multiple of {block}, for instance {first - first % block}"
        )
    linear = dict(source.linear_attn_config)
    for name in ("kda_layers", "full_attn_layers"):  # counted from 1
        linear[name] = [i - first for i in linear[name] if first < i <= last + 1]
    kinds = source.mlp_layer_types[first : last + 1]
    dense = kinds.index("sparse") if "sparse" in kinds else len(kinds)
    return {"num_hidden_layers": last - first + 1, "linear_attn_config": linear, "first_k_dense_replace": dense}


def _fewer_experts(source: KimiK3TextConfig, count: int) -> dict:
    if not source.num_experts or not 1 <= count <= source.num_experts:
        raise ConversionError(f"--experts {count}: the model has {source.num_experts or 0} routed experts")
    if count < source.num_experts_per_token:
        raise ConversionError(f"--experts {count}: a token uses {source.num_experts_per_token} experts")
    if (source.num_expert_group or 1) > 1 and count != source.num_experts:
        raise ConversionError(
            f"--experts {count}: the experts are chosen in {source.num_expert_group} groups, and the first {count} are "
            "not a part of every group"
        )
    return {"num_experts": count}


def _native_misfits(config, text: KimiK3TextConfig, target: Target) -> list[str]:
    """What transformers' own class would ignore or refuse of this model."""
    sparse = "sparse" in text.mlp_layer_types
    misfits = {
        "a vision tower (--text-only leaves it out)": getattr(config, "vision_config", None) and not target.text_only,
        "Attention Residuals (attn_res_block_size)": text.attn_res_block_size,
        "latent experts (routed_expert_hidden_size)": sparse and text.routed_expert_hidden_size,
        "the bounded decay gate (gate_lower_bound)": text.gate_lower_bound is not None,
        "a full-rank output gate (use_full_rank_gate)": text.linear_attn_config.get("use_full_rank_gate"),
        "an output gate of MLA (mla_use_output_gate)": text.mla_use_output_gate,
        f"hidden_act {text.hidden_act!r}": text.hidden_act != "silu",
        "packed experts (--expert-dtype bf16 decodes them)": text.expert_quantization is not None,
        "experts without shared ones (num_shared_experts)": sparse and not text.num_shared_experts,
        f"moe_router_activation_func {text.moe_router_activation_func!r}": sparse
        and text.moe_router_activation_func != "sigmoid",
    }
    return [reason for reason, applies in misfits.items() if applies]


def _wrapped(source, text: KimiK3TextConfig, target: Target):
    """The whole configuration of the target: nested for the released layout of K3, flat otherwise."""
    nested = isinstance(source, KimiK3Config)
    released_nested = target.layout == "released" and not text.has_softplus_gate
    if not released_nested:
        if nested and source.vision_config is not None and not target.text_only:
            raise ConversionError("this target is flat and holds text only: --text-only leaves the vision tower out")
        return text
    if nested:
        values = source.to_dict() | {"text_config": text.to_dict()}
        values.pop("quantization_config", None)
        if target.text_only:
            values.pop("vision_config", None)
    else:
        values = {"text_config": text.to_dict(), "vision_config": None, "dtype": _dtype(source)}
        for name in ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings"):
            values[name] = getattr(text, name)
    try:
        return KimiK3Config.from_dict(values)
    except ValueError as error:
        raise ConversionError(f"the target cannot be configured: {error}") from error


def _dtype(config):
    dtype = getattr(config, "dtype", None) or config.get_text_config(decoder=True).dtype or "bfloat16"
    return str(dtype).removeprefix("torch.")


def _written(source: Checkpoint, config, target: Target) -> dict | None:
    if target.layout != "native" and config.to_dict() == source.config.to_dict():
        return None
    values = config.to_diff_dict()
    values["dtype"] = _dtype(source.config)
    values.pop("auto_map", None)  # names classes of the folder that it came from
    if isinstance(config, KimiK3Config):
        values["architectures"] = ["KimiK3ForConditionalGeneration"]
    else:  # the family with the softplus gate has the name by which other engines know it
        values["architectures"] = ["KimiLinearForCausalLM" if config.has_softplus_gate else "KimiK3ForCausalLM"]
    if target.layout == "native":
        values |= {"layer_types": config.layer_types, "mlp_layer_types": config.mlp_layer_types}
        values |= {"model_max_length": config.max_position_embeddings}
    return values


# --- tensors ---------------------------------------------------------------------------------------------------------

_LAYER = re.compile(r"^layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.(w[123])\.weight(_packed|_scale)?$")


def _chosen(source: Checkpoint, target: Target) -> dict[str, Stored]:
    """The source's tensors that go into the target, under the target's layer numbers."""
    first, last = target.layers or (0, source.text_config.num_hidden_layers - 1)
    left_out = VISION if target.text_only or target.layout != "released" else ()
    experts = target.experts
    chosen = {}
    for name, stored in source.tensors.items():
        if name.startswith(left_out):
            continue
        if match := _LAYER.match(name):
            layer = int(match[1])
            if not first <= layer <= last:
                continue
            name = f"layers.{layer - first}.{name[match.end() :]}"
        if experts is not None:
            if (match := _EXPERT.search(name)) and int(match[1]) >= experts:
                continue
            if name.endswith((".gate.weight", ".gate.e_score_correction_bias")):
                stored = stored.rows(0, experts)
        chosen[name] = stored
    return chosen


def _groups(tensors: dict[str, Stored], config, target: Target) -> list[Shard]:
    """Tensors that one shard must hold together with the steps that make them, in the order of their names."""
    native = target.layout == "native"
    released = {} if native else expected_tensors(config)
    expected = {plain_name(name): (name, shape) for name, (_, shape) in released.items()}
    groups: dict[str, Shard] = {}
    for name, parts in matrices(tensors).items():
        shape, dtype = shape_of(parts), parts[0].dtype
        expert = _EXPERT.search(name)
        if expert and target.expert_dtype:
            dtype = EXPERTS[target.expert_dtype]
        if dtype == "U8":
            names = expected[f"{name}_packed"][0], expected[f"{name}_scale"][0]
            groups[names[0]] = _packed(names, name, parts, shape)
            continue
        # `A_log` may be longer than its heads: the rest of the file is zeros where nothing is written
        full_name, whole, part = _native_place(name, shape, config.num_experts) if native else (*expected[name], 0)
        group = groups.setdefault(full_name, Shard({full_name: (dtype, whole)}))
        if group.tensors[full_name] != (dtype, whole):
            what = "experts" if expert else "convolution"
            raise ConversionError(f"{parts[0].name} has another dtype than the {what} that it is fused with")
        kind = "decode" if len(parts) == 2 else "copy" if parts[0].dtype == dtype else "cast"
        size = _nbytes((dtype, shape))
        group.steps.append(Step(kind, name, parts, ((full_name, part * size),), size))
    return [groups[name] for name in sorted(groups, key=_natural)]


def _natural(name: str) -> list:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _packed(names, label, parts, shape) -> Shard:
    """Codes and scales of one matrix of an expert."""
    rows, columns = shape
    entries = dict(zip(names, [("U8", (rows, columns // 2)), ("U8", (rows, columns // MXFP4_GROUP))], strict=True))
    if len(parts) == 1:
        places = tuple((name, 0) for name in names)
        return Shard(entries, [Step("pack", label, parts, places, sum(map(_nbytes, entries.values())))])
    copies = [Step("copy", label, (part,), ((name, 0),), part.nbytes) for name, part in zip(names, parts, strict=True)]
    return Shard(entries, copies)


_NATIVE_GATE = re.compile(r"\.self_attn\.(f_a_proj|f_b_proj|dt_bias|A_log)")


def _native_place(name: str, shape: tuple[int, ...], experts: int | None) -> tuple[str, tuple[int, ...], int]:
    """Where transformers' class has a plain tensor: the name and shape of the whole, and which part of it this is."""
    full_name = name if name.startswith("lm_head.") else f"model.{name}"
    full_name = full_name.replace(".block_sparse_moe.", ".mlp.")
    full_name = _NATIVE_GATE.sub(r".self_attn.forget_gate.\1", full_name)
    if match := _EXPERT.search(full_name):
        weight, fused = next((weight, fused) for weight, fused in FUSED_EXPERTS.items() if match[2] in fused)
        whole = (experts, shape[0] * len(fused), shape[1])
        return (
            full_name[: match.start()] + f".experts.{weight}",
            whole,
            int(match[1]) * len(fused) + fused.index(match[2]),
        )
    for i, part in enumerate(FUSED_CONVOLUTIONS):
        if full_name.endswith(f".self_attn.{part}.weight"):
            return full_name.replace(part, "conv1d"), (3 * shape[0], *shape[1:]), i
    return full_name, (1, 1, shape[0], 1) if full_name.endswith(".A_log") else shape, 0


def _split(groups: list[Shard], shard_size: int) -> list[Shard]:
    shards, size = [Shard()], 0
    for group in groups:
        if size and size + group.nbytes > shard_size:
            shards.append(Shard())
            size = 0
        shards[-1].tensors.update(group.tensors)
        shards[-1].steps.extend(group.steps)
        size += group.nbytes
    for number, shard in enumerate(shards, 1):
        shard.name = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
    return shards
