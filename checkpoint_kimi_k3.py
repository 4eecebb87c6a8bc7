"""From the released tensor layout to the parameters of the model and back.

Names in a checkpoint and in the model differ in three places only:

    language_model.<name>                        <name>, when a text-only class reads a multimodal file
    experts.{e}.w1, experts.{e}.w3               experts.gate_up_proj [E, 2M, D], the rows of w1 first
    experts.{e}.w2                               experts.down_proj [E, D, M]
    A_log [128] (heads, then zeros), [1,1,H,1]   A_log [H]

With packed experts the same holds for `.weight_packed` and `.weight_scale`. transformers applies the conversions while
it loads and reverses them while it saves; which ones a model needs is decided by its own config, so they are attached
to the model and not to transformers' global registry, where two copies of this file would overwrite each other.

A checkpoint with the names of the model in memory, as other tools write it, is read as well.

Every checkpoint is checked from its headers alone, before a byte of data is read: names, shapes and the pairing of
packed weights with their scales.
"""

import contextlib
import dataclasses
import inspect
import itertools
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import (
    ConversionOps,
    MergeModulelist,
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    revert_weight_conversion,
)

from .configuration_kimi_k3 import MXFP4_GROUP
from .kernels_kimi_k3 import mxfp4

# This module hooks into transformers' loader at two places. If a release moves them, say so at import: without the
# conversions a checkpoint would load as random weights with one warning.
_LOADER_ARGUMENTS = ["model", "state_dict", "checkpoint_files", "load_config"]
if list(inspect.signature(PreTrainedModel._load_pretrained_model).parameters)[:4] != _LOADER_ARGUMENTS:
    raise ImportError("this transformers release has changed its checkpoint loader; use one of 5.17 to 5.24")


# What a checkpoint of the family holds, in the words of safetensors and of torch: numbers, and bytes of packed experts.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U8": torch.uint8,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# The matrices of an expert that one parameter of all experts holds, in the order of its rows.
FUSED_EXPERTS = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}

SINGLE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"

_EXPERT_NUMBER = re.compile(r"\.experts\.(\d+)\.")
_FUSED_NAME = re.compile(r"^(.*\.experts)\.(gate_up_proj|down_proj)(_packed|_scale)?$")

# (name in the file, safetensors dtype, shape)
Stored = tuple[str, str, tuple[int, ...]]


def padded_heads(heads: int) -> int:
    """Length of `A_log` in a released file: the next power of two, at least 32 (96 heads are stored as 128)."""
    return max(32, 1 << (heads - 1).bit_length())


class HeadsFromFile(ConversionOps):
    """`A_log` of a file to [H]: [H], [1, 1, H, 1] and zero-padded [P] are accepted, a non-zero tail is an error.

    Args:
        file_shape: what came in and goes out again; None for that of the released checkpoints of its family.
    """

    def __init__(self, file_shape: tuple[int, ...] | None):
        self.file_shape = file_shape

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str],
        full_layer_name: str = "", model: Any = None, **kwargs: Any,
    ) -> dict[str, Any]:  # fmt: skip
        (tensors,) = input_dict.values()
        tensor = tensors[0] if isinstance(tensors, list) else tensors
        heads = model.config.get_text_config(decoder=True).linear_attn_config["num_heads"]
        tensor = tensor.flatten()
        if tensor.numel() < heads:
            raise ValueError(f"{full_layer_name} has {tensor.numel()} entries for {heads} heads")
        if tensor.device.type != "meta" and tensor[heads:].any():
            raise ValueError(
                f"{full_layer_name} has {tensor.numel()} entries for {heads} heads, and those after the heads are not "
                "zero: linear_attn_config.num_heads does not fit this checkpoint"
            )
        return {target_patterns[0]: tensor[:heads].clone()}

    @property
    def reverse_op(self) -> "HeadsToFile":
        return HeadsToFile(self.file_shape)


class HeadsToFile(ConversionOps):
    """The inverse of `HeadsFromFile`."""

    def __init__(self, file_shape: tuple[int, ...] | None):
        self.file_shape = file_shape

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], model: Any = None,
        **kwargs: Any,
    ) -> dict[str, Any]:  # fmt: skip
        (tensors,) = input_dict.values()
        tensor = tensors[0] if isinstance(tensors, list) else tensors
        shape = self.file_shape
        if shape is None:
            softplus = model.config.get_text_config(decoder=True).has_softplus_gate
            shape = (1, 1, tensor.numel(), 1) if softplus else (padded_heads(tensor.numel()),)
        padding = tensor.new_zeros(math.prod(shape) - tensor.numel())
        return {target_patterns[0]: torch.cat([tensor, padding]).view(shape)}


class StackExperts(MergeModulelist):
    """The tensors of every expert to one [E, rows, columns]; w1 and w3 follow each other in the rows.

    By its base class the loader knows that it collects experts, and reads only a process's own.
    """

    def convert(  # type: ignore[override]  # the base's is decorated
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Any]:
        matrices = [torch.stack(input_dict.pop(pattern)) for pattern in source_patterns]
        return {target_patterns[0]: matrices[0] if len(matrices) == 1 else torch.cat(matrices, dim=1)}

    @property
    def reverse_op(self) -> "UnstackExperts":
        return UnstackExperts()


class UnstackExperts(ConversionOps):
    """[E, rows, columns] to the tensors of every expert."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Any]:
        (tensors,) = input_dict.values()
        tensor = tensors[0] if isinstance(tensors, list) else tensors
        return {
            pattern.replace("*", str(expert)): matrix
            for pattern, part in zip(target_patterns, tensor.chunk(len(target_patterns), dim=1), strict=True)
            for expert, matrix in enumerate(part.unbind(0))
        }


class DequantizeExperts(MergeModulelist):
    """Packed experts of a file to one floating-point parameter [E, rows, columns], one tensor of the file at a time."""

    def convert(  # type: ignore[override]  # the base's is decorated
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str],
        full_layer_name: str = "", model: Any = None, **kwargs: Any,
    ) -> dict[str, Any]:  # fmt: skip
        dtype = model.get_parameter(full_layer_name).dtype
        # patterns come in pairs (packed, scale) for each matrix of an expert: w1, w3 or w2
        pairs = [
            (input_dict[p], input_dict[s]) for p, s in zip(source_patterns[::2], source_patterns[1::2], strict=True)
        ]

        # The loader has cast the bytes to the parameter's dtype; they are exact in every floating-point dtype.
        def decoded(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return mxfp4.dequantize_mxfp4(packed.to(torch.uint8), scale.to(torch.uint8), dtype)

        experts = [
            torch.cat([decoded(packed[e], scale[e]) for packed, scale in pairs], dim=-2)
            for e in range(len(pairs[0][0]))
        ]
        return {target_patterns[0]: torch.stack(experts).flatten(0, -3)}  # one tensor may hold all experts


def weight_conversions(
    config: PreTrainedConfig, expert_storage: str, a_log_shape: tuple[int, ...] | None = None
) -> list[WeightTransform]:
    """Conversions between the released layout and a model.

    Args:
        config: the model's config.
        expert_storage: `packed`, `float`, or `dequantize` (packed in the file, floating point in the model).
        a_log_shape: of `A_log` in the files, which saving writes again.
    """
    conversions: list[WeightTransform] = [
        WeightConverter(r"self_attn.A_log", "self_attn.A_log", operations=[HeadsFromFile(a_log_shape)])
    ]
    if not config.get_text_config(decoder=True).num_experts:
        return conversions
    for fused, matrices in FUSED_EXPERTS.items():
        if expert_storage == "dequantize":
            sources = [rf"\.experts.*.{w}.weight_{kind}" for w in matrices for kind in ("packed", "scale")]
            stacked = [rf"\.experts.{fused}_{kind}" for kind in ("packed", "scale")]  # as a model in memory names them
            for patterns in (sources, stacked):
                conversions.append(WeightConverter(patterns, rf"\.experts.{fused}", operations=[DequantizeExperts()]))
            continue
        for kind in ("_packed", "_scale") if expert_storage == "packed" else ("",):
            sources = [rf"\.experts.*.{w}.weight{kind}" for w in matrices]
            conversions.append(WeightConverter(sources, rf"\.experts.{fused}{kind}", operations=[StackExperts()]))
    return conversions


def released_tensors(model: PreTrainedModel) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Every tensor that saving the model writes: name -> (safetensors dtype, shape). Works on the meta device."""
    # `empty` and not `to`: a tensor that several processes share counts with its whole shape
    tensors = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in model.state_dict().items()}
    tensors = revert_weight_conversion(model, tensors)
    return {name: (_NAMES.get(t.dtype, str(t.dtype)), tuple(t.shape)) for name, t in tensors.items()}


def why_no_checkpoint(folder: Path) -> str:
    """The sentence for a folder without a config.json, which names the way on from an adapter."""
    adapter = folder / "adapter_config.json"
    if not adapter.is_file():
        return f"{folder} is not a checkpoint: it has no config.json"
    try:
        base = json.loads(adapter.read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, TypeError, KeyError):  # whatever is in it, the folder is no checkpoint
        base = None
    of = f" of {base}" if base else ""
    return (
        f"{folder} holds an adapter{of} and no model: give a folder with both in one, as "
        f"AutoPeftModelForCausalLM.from_pretrained({str(folder)!r}).merge_and_unload().save_pretrained(...) and the "
        "tokenizer's save_pretrained write it"
    )


def read_index(folder: Path) -> dict[str, str] | None:
    """Tensor name -> file name of a folder in shards; None without an index, or if the model is in one file.

    Raises:
        ValueError: for an index that cannot be read, that names anything but safetensors files of its folder, or beside
            which the folder has another model in one file.
    """
    path = folder / INDEX
    if not path.is_file():
        return None
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ValueError(f"{path} has no weight_map of tensor names to file names")
    files = set(weight_map.values())
    check_file_names(files)
    if SINGLE_FILE in files or not (folder / SINGLE_FILE).is_file():
        return weight_map
    if not any((folder / name).is_file() for name in files):
        return None  # left over from a model that was saved here before
    raise ValueError(
        f"{folder} holds two models, {SINGLE_FILE} and the shards of {INDEX}: move the one away that is not meant"
    )


@contextlib.contextmanager
def leaving_one_model(folder: Path) -> Iterator[None]:
    """Around saving into a folder: of one file and an index, the one that was there before and not written again goes.

    transformers removes former shards alone, and would then read the former single file.
    """

    def written() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in (folder / SINGLE_FILE, folder / INDEX) if path.is_file()}

    before = written()
    yield
    after = written()
    stale = [path for path, time in before.items() if after.get(path) == time]
    if len(after) == 2 and len(stale) == 1:
        stale[0].unlink(missing_ok=True)


def check_file_names(names: Iterable[str]) -> None:
    """Refuse names of an index that are not safetensors files of its folder: they could be any file of the machine.

    Raises:
        ValueError: names the first.
    """
    for name in sorted(names):
        if Path(name).name != name:
            raise ValueError(f"{INDEX} names {name!r}, which is not a file of the folder")
        if not name.endswith(".safetensors"):  # else it could make us unpickle a file that nobody asked for
            raise ValueError(f"{INDEX} names {name!r}, which is not a safetensors file")


def read_header(path: Path) -> tuple[dict[str, dict], int]:
    """The header of a safetensors file, and where its data begins.

    Returns:
        name -> {dtype, shape, data_offsets}, and the byte that the offsets count from.

    Raises:
        ValueError: for a file that is not safetensors or is cut off.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > size - 8:
            raise ValueError(f"{path} is cut off or is not a safetensors file")
        try:
            header = dict(json.loads(file.read(length)))
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"{path} is not a safetensors file: its header cannot be read") from error
    header.pop("__metadata__", None)
    for name, entry in header.items():
        if not _describes_tensor(entry):
            raise ValueError(f"{path} is not a safetensors file: its header does not describe {name}")
    data = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if 8 + length + data > size:
        raise ValueError(f"{path} is cut off: its header describes {8 + length + data} bytes, the file has {size}")
    return header, 8 + length


def _describes_tensor(entry: Any) -> bool:
    """Whether an entry of a header has a dtype, a shape and two offsets."""
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        return False
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    if not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2:
        return False
    return all(type(n) is int and n >= 0 for n in (*shape, *offsets))


def read_headers(files: Iterable[str | os.PathLike]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Names, dtypes and shapes of safetensors files, without their data.

    Raises:
        ValueError: for a file that is not safetensors, is cut off, or repeats a tensor of another file.
    """
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    origin: dict[str, str] = {}
    for path in map(Path, files):
        for name, entry in read_header(path)[0].items():
            if name in origin:
                raise ValueError(f"{name} is in {origin[name]} and in {path.name}")
            origin[name] = path.name
            tensors[name] = (entry["dtype"], tuple(entry["shape"]))
    return tensors


def unfused_experts(plain: str, name: str, shape: tuple[int, ...], experts: int) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of an expert's matrices in a tensor of all experts, as a model in memory names it.

    Args:
        plain, name: the tensor's plain name, and the one it has in the checkpoint.
        shape: [E, rows, columns].
        experts: E of the configuration.

    Returns:
        (plain name, shape) in the order of the rows; nothing for any other tensor.

    Raises:
        ValueError: for a shape that is not that of all experts.
    """
    match = _FUSED_NAME.match(plain)
    if match is None:
        return []
    prefix, fused, kind = match.groups()
    matrices = FUSED_EXPERTS[fused]
    if len(shape) != 3 or shape[0] != experts or shape[1] % len(matrices) or 0 in shape:
        raise ValueError(f"{name} has shape {list(shape)}, not [{experts}, rows, columns] of all experts")
    part = (shape[1] // len(matrices), shape[2])
    return [(f"{prefix}.{expert}.{w}.weight{kind or ''}", part) for expert in range(experts) for w in matrices]


def check_expert_count(config: PreTrainedConfig, names: Iterable[str]) -> None:
    """Refuse a configuration that asks for more experts than a checkpoint has, before names of them all are made.

    Args:
        names: of tensors, each expert apart; with tensors of all experts among them nothing is judged.

    Raises:
        ValueError: with the two numbers.
    """
    text: Any = config.get_text_config(decoder=True)
    asked = text.num_experts or 0
    # The rule of `mlp_layer_types`, without its list: this stands in front of a configuration of any number of layers.
    sparse = range(text.first_k_dense_replace, text.num_hidden_layers)
    if not any(layer % text.moe_layer_freq == 0 for layer in sparse[: text.moe_layer_freq]):
        return
    numbers = set()
    for name in names:
        if ".experts." not in name:
            continue
        if _FUSED_NAME.match(name):
            return
        if match := _EXPERT_NUMBER.search(name):
            numbers.add(match[1])
    held = len(numbers)
    if asked > held:
        raise ValueError(f"num_experts is {asked} in the configuration, and the checkpoint lacks all but {held}")


def plain_tensors(model: Any, tensors: Iterable[Stored], renamings: list[WeightRenaming]) -> dict[str, Stored]:
    """Plain name -> what a checkpoint holds of it; tensors of all experts come apart.

    Args:
        tensors: (name in the checkpoint, safetensors dtype, shape).
        renamings: applied to these names first (the user's `key_mapping`).

    Raises:
        ValueError: for a tensor that is there twice.
    """
    experts = model.config.get_text_config(decoder=True).num_experts or 0
    found: dict[str, Stored] = {}
    for name, dtype, shape in tensors:
        plain = plain_name(apply_renamings(name, renamings))
        for part, part_shape in unfused_experts(plain, name, shape, experts) or [(plain, shape)]:
            if part in found:
                raise ValueError(f"{name} and {found[part][0]} are the same tensor of the model")
            found[part] = (name, dtype, part_shape)
    return found


def check_headers(
    model: Any, found: Mapping[str, Stored], lacking: "Lacking", ignore_mismatched_sizes: bool = False
) -> None:
    """Refuse a checkpoint whose tensors are not those of the model, naming one, before its data is read.

    What is foreign is left to transformers' loading report.

    Args:
        found: what `plain_tensors` gave.

    Raises:
        ValueError: for a wrong shape or number format, a tensor that is missing and not announced as new, or experts
            stored in the other form.
    """
    if not lacking.new_tensors:
        check_expert_count(model.config, found)
    expected = {plain_name(name): (name, *entry) for name, entry in _expected(model).items()}
    if fused := next((entry[0] for plain, entry in found.items() if plain.endswith(".self_attn.conv1d.weight")), None):
        raise ValueError(
            f"{fused}: the checkpoint has the fused tensors of transformers' own class in memory; "
            "`kimi-k3 convert` writes it in the released layout"
        )
    check_tensors(found, expected, model.expert_storage, ignore_mismatched_sizes)
    lacking.refuse([entry[0] for plain, entry in expected.items() if plain not in found], set(found))


@dataclasses.dataclass(frozen=True)
class Wishes:
    """What `from_pretrained` was told, for the loader that it calls far below.

    Attributes:
        new_tensors: names of modules or parameters that a checkpoint may lack; True for any.
        packed: its experts must be packed (`Mxfp4Config()`).
    """

    new_tensors: Sequence[str] | bool = ()
    packed: bool = False


WISHES: ContextVar[Wishes] = ContextVar("wishes")


@dataclasses.dataclass
class Lacking:
    """The judgement on tensors that a model has and a checkpoint has not: announced as new, or refused.

    Attributes:
        model: gives the tied tensors, and the new ones that its class declares.
        new_tensors: names of modules or parameters; True for any.
        place: of the checkpoint, in words.
        index: tensor name -> file name of a folder in shards.
    """

    model: Any
    new_tensors: Sequence[str] | bool
    place: str
    index: Mapping[str, str]

    def refuse(self, missing: list[str], found: set[str] | None = None) -> None:
        """Raise ValueError for the first of `missing` that is no new one; `found` has the plain names that are there.

        Of tied tensors, one is enough.
        """
        if self.new_tensors is True:
            return
        announced = [plain_name(name) for name in (*type(self.model)._new_tensors, *(self.new_tensors or ()))]
        if found is not None:
            for one, other in self.model.all_tied_weights_keys.items():
                pair = {plain_name(one), plain_name(other)}
                announced += pair if pair & found else ()
        missing = [name for name in missing if not _is_within(plain_name(name), announced)]
        if not missing:
            return
        name, more = missing[0], f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        places = {plain_name(listed): file for listed, file in self.index.items()}
        file = places.get(plain_name(name))
        place = self.place if file is None else f"{file}, which its index names for it,"
        raise ValueError(
            f"{place} lacks {name}{more}, and the configuration asks for it: get the file again or mend the "
            f"configuration; to begin with random values, name it: from_pretrained(..., new_tensors=[{name!r}])"
        )


def _is_within(name: str, modules: Iterable[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def check_tensors(
    found: Mapping[str, Stored],
    expected: Mapping[str, Stored],
    expert_storage: str,
    ignore_mismatched_sizes: bool = False,
) -> None:
    """The judgement of `check_headers` on what is there: plain name -> (name as it stands, dtype, shape)."""
    packed = next((entry[0] for plain, entry in found.items() if plain.endswith(".w1.weight_packed")), None)
    floating = next(
        (entry[0] for plain, entry in found.items() if ".experts." in plain and plain.endswith("w1.weight")), None
    )
    if packed is not None and expert_storage == "float":
        raise ValueError(
            f"the checkpoint stores packed experts ({packed}), but the config has no quantization_config: add it, "
            "or pass dequantize=True with a config that has it"
        )
    if floating is not None and packed is None and expert_storage != "float":
        raise ValueError(
            f"the config has a quantization_config, but the checkpoint stores experts in floating point ({floating}): "
            "remove quantization_config from the config"
        )
    for plain, (name, dtype, shape) in expected.items():
        if plain not in found:
            continue
        original, file_dtype, file_shape = found[plain]
        if name.endswith("self_attn.A_log"):
            continue  # several shapes are valid; the conversion checks them
        if dtype == "U8" and file_dtype != "U8":
            raise ValueError(f"{original} is {file_dtype}, expected U8 (packed MXFP4)")
        if dtype != "U8" and file_dtype not in ("F64", "F32", "BF16", "F16"):
            raise ValueError(
                f"{original} is stored as {file_dtype}: only floating-point weights and packed MXFP4 experts are read"
            )
        if file_shape != shape and not ignore_mismatched_sizes:
            raise ValueError(f"{original} has shape {list(file_shape)}, the config asks for {list(shape)}")


def check_saves(model: Any) -> None:
    """Refuse to save a model that a folder would not bring back, because it or its configuration was changed.

    Of tensors that the configuration has no place for, only those inside the layers and of modules that it describes
    count: others were added by somebody who knows of them.

    Raises:
        ValueError: names the field or the tensor.
    """
    try:
        config = type(model.config).from_dict(model.config.to_dict())
    except (ValueError, TypeError) as error:
        raise ValueError(f"the configuration was changed, and the folder would not load: {error}") from error
    try:
        with torch.device("meta"):
            described = dict(_saved_tensors(type(model)(config)))
    except TypeError:  # a class of a user's that takes more than a configuration: nobody else can make it
        return
    tensors, modules = dict(_saved_tensors(model)), {name.rpartition(".")[0] for name in described}
    is_cut = bool(getattr(model, "_tp_size", None))  # experts of one process have its share of the sizes
    for name, tensor in tensors.items():
        if type(tensor).__name__ not in ("Parameter", "Tensor", "DTensor"):
            raise ValueError(
                f"{name} is a {type(tensor).__name__}, which cannot be written here: load the model with a "
                "quantization_config, which knows how"
            )
        if name not in described and (plain_name(name).startswith("layers.") or name.rpartition(".")[0] in modules):
            raise ValueError(
                f"the model has {name}, which its configuration has no place for, so the folder would not load: change "
                "the configuration as well"
            )
        if name in described and tensor.shape != described[name].shape and not is_cut:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}, its configuration asks for {list(described[name].shape)}, "
                "so the folder would not load: change the configuration as well"
            )
    if missing := next((name for name in described if name not in tensors), None):
        raise ValueError(
            f"the model lacks {missing}, which its configuration asks for, so the folder would not load: change the "
            "configuration as well"
        )


def _saved_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters of a model, one of those that are tied, and the buffers that are saved."""
    yield from model.named_parameters()
    for module_name, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{module_name}.{name}", buffer


def apply_renamings(name: str, renamings: list[WeightRenaming]) -> str:
    for renaming in renamings:
        name, _ = renaming.rename_source_key(name)
    return name


def plain_name(name: str) -> str:
    """A name that is the same in multimodal, text-only and headless files."""
    return name.removeprefix("language_model.").removeprefix("model.")


def _expected(model: Any) -> dict[str, tuple[str, tuple[int, ...]]]:
    if model.expert_storage != "dequantize":
        return released_tensors(model)
    expected = {}
    for name, tensor in model.state_dict().items():
        if not name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            expected[name] = (_NAMES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape))
            continue
        prefix, fused = name.rsplit(".", 1)
        experts, rows, columns = tensor.shape
        matrices = FUSED_EXPERTS[fused]
        for w, e in itertools.product(matrices, range(experts)):
            matrix = f"{prefix}.{e}.{w}.weight"
            expected[f"{matrix}_packed"] = ("U8", (rows // len(matrices), columns // 2))
            expected[f"{matrix}_scale"] = ("U8", (rows // len(matrices), columns // MXFP4_GROUP))
    return expected


# transformers' own kimi_linear saves the dense MLP of its first layers as if it were a MoE block.
NATIVE_DENSE_MLP = tuple(
    WeightRenaming(rf"\.block_sparse_moe\.{name}\.", rf".mlp.{name}.") for name in ("gate_proj", "up_proj", "down_proj")
)


# E8M0: 255 is no number, and 254 with the largest code (6) reaches beyond float32.
_FIRST_UNUSABLE_SCALE = 254


def count_unusable(name: str, tensor: torch.Tensor) -> int:
    """Values that are not finite, or, in a tensor of scales by its name, stand for values that are not."""
    if tensor.dtype == torch.uint8:
        return int((tensor >= _FIRST_UNUSABLE_SCALE).sum()) if name.endswith("_scale") else 0
    return tensor.numel() - int(torch.isfinite(tensor).sum())


def refuse_unusable_values(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError for the first of these tensors with values that are not finite; those on `meta` pass."""
    for name, tensor in tensors.items():
        if not tensor.is_meta and (count := count_unusable(name, tensor)):
            values = "scale bytes of 254 or 255" if tensor.dtype == torch.uint8 else "values that are not finite"
            raise ValueError(f"{name} has {count:,} {values} among {tensor.numel():,}: get the checkpoint again")


def load_adapter_tensors(
    model: Any, state_dict: dict[str, torch.Tensor] | None, checkpoint_files: list[str] | None,
    load_config: Any, expected_keys: list[str],
) -> tuple[Any, ...]:  # fmt: skip
    """transformers' `_load_pretrained_model` for the tensors of an adapter, trained on either kind of class."""
    mapping = list(load_config.weight_mapping or ())
    # as peft's own loading has it: the file names the vector, the model its one weight
    mapping.append(WeightRenaming(r"(\.lora_magnitude_vector\.[^.]+)$", r"\1.weight"))
    # 5.17 does not know what stands in the place of modules that are saved whole, and of tokens that are trained
    known = [entry.source_patterns for entry in mapping]
    adapter = next(reversed(model.peft_config))
    if getattr(model.peft_config[adapter], "alora_invocation_tokens", None):
        raise ValueError(
            "transformers does not look for the invocation tokens of an activated LoRA, so it would never act: load it "
            "with PeftModel.from_pretrained"
        )
    if getattr(model.peft_config[adapter], "peft_type", None) == "ADALORA" and model.peft_config[adapter].rank_pattern:
        raise ValueError(
            "transformers gives each part of an AdaLoRA adapter the rank that it began with, and training took some of "
            "it away: load it with PeftModel.from_pretrained"
        )
    for name, module in model.named_modules():
        names = module.adapter_state_dict_load_map(adapter) if hasattr(module, "adapter_state_dict_load_map") else {}
        renamings = [WeightRenaming(f"{name}.{source}", f"{name}.{target}") for source, target in names.items()]
        mapping += [entry for entry in renamings if entry.source_patterns not in known]
    if not hasattr(model, "language_model"):
        mapping.append(PrefixChange(prefix_to_remove="language_model"))
    load_config = dataclasses.replace(load_config, weight_mapping=mapping)
    return PreTrainedModel._load_pretrained_model(model, state_dict, checkpoint_files, load_config, expected_keys)


def load_checked(
    model: Any, state_dict: dict[str, torch.Tensor] | None, checkpoint_files: list[str] | None,
    load_config: Any, *args: Any, **kwargs: Any,
) -> tuple[tuple[Any, ...], tuple[int, ...] | None]:  # fmt: skip
    """transformers' `_load_pretrained_model` with our conversions, after the headers were checked.

    Returns:
        its result, and the shape in which the files hold the first `A_log` (None for that of the released family).
    """
    wishes = WISHES.get(Wishes())
    if wishes.packed and model.expert_storage == "float":
        raise ValueError(
            "Mxfp4Config() keeps packed experts, and this checkpoint stores them in floating point: pack them with "
            "`kimi-k3 convert --expert-dtype mxfp4`"
        )
    # What transformers collected is the user's `key_mapping`, the renamings of old formats, and a quantizer's own.
    quantizer, collected = load_config.hf_quantizer, load_config.weight_mapping or ()
    renamings = [entry for entry in collected if isinstance(entry, WeightRenaming)]
    of_quantizer = [entry for entry in collected if not isinstance(entry, WeightRenaming)] if quantizer else []
    renamings += NATIVE_DENSE_MLP
    a_log_shape = None
    index = (load_config.sharded_metadata or {}).get("weight_map", {})
    if state_dict is not None:
        place = "the state dict"
        tensors = ((name, _NAMES.get(t.dtype, str(t.dtype)), tuple(t.shape)) for name, t in state_dict.items())
    else:
        files = list(map(Path, checkpoint_files or ()))
        if other := next((file for file in files if file.suffix != ".safetensors"), None):
            raise ValueError(f"only safetensors files are read, not {other}: convert the checkpoint first")
        if not index:
            read_index(files[0].parent)  # refuses a second model
        check_file_names(set(index.values()))
        place = str(files[0] if len(files) == 1 else files[0].parent)
        tensors = ((name, *entry) for name, entry in read_headers(files).items())
    found = plain_tensors(model, tensors, renamings)
    lacking = Lacking(model, wishes.new_tensors, place, index)
    if quantizer is None:
        check_headers(model, found, lacking, load_config.ignore_mismatched_sizes)
    else:  # names, shapes and dtypes are its own but for the experts'; of others, what is missing shows after loading
        expected = {plain_name(name): name for name in _expected(model) if _EXPERT_NUMBER.search(name)}
        lacking.refuse([name for plain, name in expected.items() if plain not in found], set(found))
    in_memory = any(_FUSED_NAME.match(plain_name(name)) for name, *_ in found.values())
    if state_dict is None and not in_memory:
        a_log_shape = next((entry[2] for plain, entry in found.items() if plain.endswith(".self_attn.A_log")), None)
    if not hasattr(model, "language_model"):
        renamings.append(PrefixChange(prefix_to_remove="language_model"))
    conversions = weight_conversions(model.config, model.expert_storage)
    load_config = dataclasses.replace(load_config, weight_mapping=[*renamings, *conversions, *of_quantizer])
    result = PreTrainedModel._load_pretrained_model(model, state_dict, checkpoint_files, load_config, *args, **kwargs)
    for name, report in result[0].conversion_errors.items():
        if quantizer is not None:
            raise ValueError(
                f"{name} cannot be read as its quantizer stored it: get the folder again, or load it with the class "
                "that saved it"
            )
        # A traceback, the sentence, and one more line. transformers would log it and raise without naming the tensor.
        raise ValueError(f"{name} cannot be converted: {report.splitlines()[-2:][0]}")
    lacking.refuse(sorted(result[0].missing_keys), set(found))
    return result, a_log_shape
