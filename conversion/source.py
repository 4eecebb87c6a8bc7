"""A checkpoint folder as plain tensors that have not been read.

Four forms of one model come apart into the same tensors, by their headers alone:

    released            language_model.model.layers.1...experts.0.w1.weight_packed, A_log zero-padded or [1, 1, H, 1]
    flat                the same without the prefix
    native              transformers' `kimi_linear` in memory: fused experts and convolutions, `forget_gate`
    ours, in memory     experts.gate_up_proj [E, 2M, D] and experts.down_proj [E, D, M], packed or not

All forms store rows one after the other, so each plain tensor is one contiguous range of bytes.
"""

import contextlib
import gc
import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers.modeling_utils import local_torch_dtype

from .. import checkpoint_kimi_k3
from ..checkpoint_kimi_k3 import (
    DTYPES,
    INDEX,
    NATIVE_DENSE_MLP,
    apply_renamings,
    check_expert_count,
    check_tensors,
    plain_name,
    read_header,
    released_tensors,
    unfused_experts,
    why_no_checkpoint,
)
from ..configuration_kimi_k3 import KimiK3Config, KimiK3TextConfig
from ..modeling_kimi_k3 import KimiK3ForCausalLM, KimiK3ForConditionalGeneration


class ConversionError(ValueError):
    """A checkpoint or a request that cannot be converted; the text names the tensor, file or option."""


@contextlib.contextmanager
def without_collector():
    """Python's cycle collector off: it would walk half a million tensors again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


# Bytes of a number; the other types of safetensors are known by size alone, for tensors that are left out.
ITEM_BYTES = {name: dtype.itemsize for name, dtype in DTYPES.items()} | dict(
    I64=8, U64=8, C64=8, I32=4, U32=4, I16=2, U16=2, I8=1, BOOL=1, F8_E4M3=1, F8_E5M2=1
)
FUSED_CONVOLUTIONS = ("q_conv1d", "k_conv1d", "v_conv1d")
VISION = ("vision_tower.", "mm_projector.")  # what plain names of tower and projector start with


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, [nbytes]."""
    return tensor.contiguous().flatten().view(torch.uint8)


class FileBytes:
    """Bytes of a file, opened at the first read."""

    def __init__(self, path: Path):
        self.path = path
        self._descriptor = None

    def read_into(self, view: memoryview, offset: int) -> None:
        if self._descriptor is None:
            # of two threads at once, one leaves a descriptor unused until the process ends: harmless
            self._descriptor = os.open(self.path, os.O_RDONLY)
        while view:
            count = os.preadv(self._descriptor, [view], offset)
            if not count:
                raise ConversionError(f"{self.path} became shorter while it was read")
            view, offset = view[count:], offset + count

    def __del__(self):
        if self._descriptor is not None:
            os.close(self._descriptor)


class TensorBytes:
    """Bytes of a tensor that `torch.load` has mapped into memory."""

    def __init__(self, path: Path, tensor: torch.Tensor):
        self.path = path
        self._bytes = memoryview(raw(tensor).numpy())

    def read_into(self, view: memoryview, offset: int) -> None:
        view[:] = self._bytes[offset : offset + len(view)]


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor that has not been read: one contiguous range of bytes.

    `name` is the tensor's name in the file; a fused one gives its name to every part.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    source: FileBytes | TensorBytes
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def row_bytes(self) -> int:
        """Bytes of one entry of the first dimension."""
        return math.prod(self.shape[1:]) * ITEM_BYTES[self.dtype]

    def rows(self, start: int, stop: int) -> "Stored":
        """The part [start, stop) of the first dimension."""
        return replace(self, shape=(stop - start, *self.shape[1:]), offset=self.offset + start * self.row_bytes)

    def view(self, shape: tuple[int, ...]) -> "Stored":
        """The first entries, in memory order, in another shape of at most as many."""
        return replace(self, shape=shape)

    def read(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Rows [start, stop), read now. A scalar counts as one row."""
        part = self if self.shape else self.view((1,))
        part = part.rows(start, part.shape[0] if stop is None else stop)
        tensor = torch.empty(part.shape, dtype=DTYPES[self.dtype])
        if tensor.numel():
            self.source.read_into(memoryview(raw(tensor).numpy()), part.offset)
        return tensor if self.shape else tensor[0]


def same_bytes(one: Stored, other: Stored, start: int, stop: int) -> bool:
    """Whether rows [start, stop) of two tensors are stored alike."""
    return torch.equal(raw(one.read(start, stop)), raw(other.read(start, stop)))


def matrices(tensors: dict[str, Stored]) -> dict[str, tuple[Stored, ...]]:
    """Plain name of every matrix -> the tensors that hold its values: one, or packed codes and their scales."""
    parts = {}
    for name, stored in tensors.items():
        if name.endswith(".weight_packed"):
            matrix = name.removesuffix("_packed")
            parts[matrix] = (stored, tensors[f"{matrix}_scale"])
        elif not name.endswith(".weight_scale"):
            parts[name] = (stored,)
    return parts


def shape_of(parts: tuple[Stored, ...]) -> tuple[int, ...]:
    """The shape of a matrix: two codes are packed in a byte."""
    shape = parts[0].shape
    return (*shape[:-1], shape[-1] * 2) if len(parts) == 2 else shape


@dataclass
class Checkpoint:
    """A folder whose tensors have been found and checked, and none of them read.

    Attributes:
        config: the configuration, nested or flat, as its class reads it.
        tensors: plain name -> Stored.
    """

    folder: Path
    config: KimiK3Config | KimiK3TextConfig
    tensors: dict[str, Stored]

    @property
    def text_config(self) -> KimiK3TextConfig:
        return self.config.get_text_config(decoder=True)


# --- configuration and what it asks for ------------------------------------------------------------------------------


def read_json(path: Path) -> dict:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConversionError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # the second for brackets in brackets in brackets
        raise ConversionError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConversionError(f"{path} must hold a JSON object")
    return value


def read_config(folder: Path) -> KimiK3Config | KimiK3TextConfig:
    """The configuration of a folder, nested or flat."""
    if not folder.is_dir():
        raise ConversionError(f"there is no checkpoint folder {folder}")
    if not (folder / "config.json").is_file():
        raise ConversionError(why_no_checkpoint(folder))
    values = read_json(folder / "config.json")
    try:
        if values.get("text_config") is not None:
            return KimiK3Config.from_pretrained(folder)
        return KimiK3TextConfig.from_pretrained(folder)
    except (OSError, ValueError, TypeError) as error:
        raise ConversionError(f"the configuration in {folder} cannot be used: {error}") from error


def expected_tensors(config: KimiK3Config | KimiK3TextConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Released name -> (dtype, shape) of every tensor of a bfloat16 model of this configuration, in its own layout."""
    model_class = KimiK3ForConditionalGeneration if isinstance(config, KimiK3Config) else KimiK3ForCausalLM
    with local_torch_dtype(torch.bfloat16), torch.device("meta"):
        tensors = released_tensors(model_class(config))
    if config.tie_word_embeddings:  # a file has one tensor for both
        tensors = {name: entry for name, entry in tensors.items() if plain_name(name) != "lm_head.weight"}
    return tensors


# --- files -----------------------------------------------------------------------------------------------------------


def read_index(folder: Path) -> dict[str, str] | None:
    """Tensor name -> file name of a folder in shards, as loading reads it; None if its model is in one file."""
    try:
        return checkpoint_kimi_k3.read_index(folder)
    except ValueError as error:
        raise ConversionError(str(error)) from error


def weight_files(folder: Path, index: dict[str, str] | None, allow_pickle: bool = False) -> list[Path]:
    """The files that hold a folder's weights.

    Raises:
        ConversionError: for a shard that is missing, or weights that only unpickling could read.
    """
    if index is not None:
        names = sorted(set(index.values()))
        for name in names:
            if not (folder / name).is_file():
                raise ConversionError(f"{folder} lacks the shard {name}, which {INDEX} names")
        return [folder / name for name in names]
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if stray := sorted(folder.glob("model-*.safetensors")):
        raise ConversionError(f"{folder} has shards ({stray[0].name}, ...) but no {INDEX}: it may be incomplete")
    # a trainer's folder has pytorch_model.bin beside an optimizer.pt
    pickled = sorted(folder.glob("pytorch_model*.bin")) or sorted([*folder.glob("*.pt"), *folder.glob("*.pth")])
    if not pickled:
        raise ConversionError(f"{folder} holds no weights: there is no model.safetensors and no {INDEX}")
    if not allow_pickle:
        raise ConversionError(
            f"{pickled[0].name} is a torch.save file, and unpickling runs whatever code such a file names: get the "
            "model as safetensors, or pass --weights-only to kimi-k3 convert: torch.load(weights_only=True) builds "
            "tensors and nothing else"
        )
    return pickled


def stored_tensors(folder: Path, index: dict[str, str] | None, allow_pickle: bool = False) -> list[Stored]:
    """Every tensor of a folder's weight files under its name there; headers only.

    Args:
        index: what `read_index` gave, or the part of it whose files are there.

    Raises:
        ConversionError: for a file that is cut off or broken, a tensor that is in two files, or an index that does not
            agree with the files.
    """
    tensors: dict[str, Stored] = {}
    for path in weight_files(folder, index, allow_pickle):
        for stored in read_pickle(path) if path.suffix != ".safetensors" else read_safetensors(path):
            if stored.name in tensors:
                raise ConversionError(f"{stored.name} is in {tensors[stored.name].source.path.name} and in {path.name}")
            tensors[stored.name] = stored
    for name, file in (index or {}).items():
        if name not in tensors or tensors[name].source.path.name != file:
            raise ConversionError(f"{INDEX} says that {name} is in {file}, but it is not")
    if index is not None and len(tensors) > len(index):
        stored = next(stored for name, stored in tensors.items() if name not in index)
        raise ConversionError(f"{stored.source.path.name} holds {stored.name}, which {INDEX} does not list")
    return list(tensors.values())


def read_safetensors(path: Path) -> Iterator[Stored]:
    try:
        header, start = read_header(path)
    except ValueError as error:
        raise ConversionError(str(error)) from error
    source, end = FileBytes(path), 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, stop = entry["data_offsets"]
        if entry["dtype"] not in ITEM_BYTES:
            raise ConversionError(f"{name} in {path.name} is stored as {entry['dtype']}, which is not known here")
        stored = Stored(name, entry["dtype"], tuple(entry["shape"]), source, start + begin)
        if begin != end or stop - begin != stored.nbytes:
            raise ConversionError(
                f"{name} in {path.name} has bytes {begin} to {stop}: its shape needs {stored.nbytes}, and the data "
                f"before it ends at {end}"
            )
        end = stop
        yield stored
    if start + end != path.stat().st_size:
        raise ConversionError(f"{path} has {path.stat().st_size:,} bytes, and its header describes {start + end:,}")


def read_pickle(path: Path) -> Iterator[Stored]:
    """Tensors of a `torch.save` file, mapped and not read; anything that is not a tensor is refused by torch."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # pickle errors, zip errors and old formats each have a type of their own
        reason = str(error).strip().partition("\n")[0]
        raise ConversionError(f"{path.name} cannot be read with weights_only=True: {reason}") from error
    names = {dtype: name for name, dtype in DTYPES.items()}
    for name, tensor in state.items() if isinstance(state, dict) else [("its content", state)]:
        if not isinstance(tensor, torch.Tensor) or tensor.dtype not in names:
            raise ConversionError(f"{name} in {path.name} is not a tensor of weights")
        yield Stored(name, names[tensor.dtype], tuple(tensor.shape), TensorBytes(path, tensor), 0)


# --- one form --------------------------------------------------------------------------------------------------------

_NATIVE_MOE = re.compile(r"^(layers\.\d+)\.mlp\.(gate|experts|shared_experts)\.")


def plain_tensors(stored: Stored, experts: int) -> Iterator[tuple[str, Stored]]:
    """The plain tensors that a tensor of any form consists of."""
    name = plain_name(stored.name).replace(".self_attn.forget_gate.", ".self_attn.")
    name = _NATIVE_MOE.sub(r"\1.block_sparse_moe.\2.", name)
    if name.endswith("_proj.weight") and ".block_sparse_moe." in name and ".experts." not in name:
        name = apply_renamings(name, NATIVE_DENSE_MLP)
    if name.endswith(".self_attn.conv1d.weight"):
        third, rest = divmod(stored.shape[0], 3)
        if rest:
            raise ConversionError(f"{stored.name} has {stored.shape[0]} rows, which are not those of q, k and v")
        for i, part in enumerate(FUSED_CONVOLUTIONS):
            yield name.replace("conv1d", part), stored.rows(i * third, (i + 1) * third)
    elif parts := _unfused(stored, name, experts):
        rows = parts[0][1][0]
        flat = stored.view((stored.shape[0] * stored.shape[1], stored.shape[2]))
        for i, (part, _) in enumerate(parts):
            yield part, flat.rows(i * rows, (i + 1) * rows)
    else:
        yield name, stored


def _unfused(stored, name, experts):
    try:
        return unfused_experts(name, stored.name, stored.shape, experts)
    except ValueError as error:
        raise ConversionError(str(error)) from error


@without_collector()
def open_checkpoint(folder: str | os.PathLike, allow_pickle: bool = False, drop_foreign: bool = False) -> Checkpoint:
    """Find and check every tensor of a folder; of the data only `A_log` and a tied head's copy are read.

    Args:
        folder: a local checkpoint of the K3 family in any form.
        allow_pickle: read `torch.save` files too, with `weights_only=True`.
        drop_foreign: leave out tensors that the configuration has no place for, instead of refusing them.

    Raises:
        ConversionError: names the tensor or file that is missing, cut off, foreign, duplicated or of a wrong kind.
    """
    folder = Path(folder)
    config = read_config(folder)
    text_config = config.get_text_config(decoder=True)
    experts = text_config.num_experts or 0
    tensors: dict[str, Stored] = {}
    for stored in stored_tensors(folder, read_index(folder), allow_pickle):
        for name, part in plain_tensors(stored, experts):
            if name in tensors:
                raise ConversionError(f"{stored.name} and {tensors[name].name} are the same tensor of the model")
            tensors[name] = part
    refuse_too_few_experts(folder, config, tensors)
    expected = {plain_name(name): (name, *entry) for name, entry in expected_tensors(config).items()}
    _drop_tied_head(tensors, expected)
    foreign = [name for name in tensors if name not in expected]
    described = {name: (part.name, part.dtype, part.shape) for name, part in tensors.items()}
    try:
        check_tensors(described, expected, "packed" if text_config.expert_quantization else "float")
    except ValueError as error:
        raise ConversionError(f"{folder}: {error}") from error
    if missing := [name for name in expected if name not in tensors]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ConversionError(f"{folder} lacks {expected[missing[0]][0]}{more}")
    if foreign and not drop_foreign:
        raise ConversionError(
            f"{folder} holds {tensors[foreign[0]].name}, which its configuration has no place for "
            f"({len(foreign)} such tensors): --drop-foreign leaves them out"
        )
    for name in foreign:
        del tensors[name]
    heads = text_config.linear_attn_config["num_heads"]
    for name in tensors:
        if name.endswith(".self_attn.A_log"):
            tensors[name] = _live_heads(tensors[name], heads)
    return Checkpoint(folder, config, tensors)


def refuse_too_few_experts(folder: Path, config: KimiK3Config | KimiK3TextConfig, names: Iterable[str]) -> None:
    """As `check_expert_count`, before the list of expected tensors is made."""
    try:
        check_expert_count(config, names)
    except ValueError as error:
        raise ConversionError(f"{folder}: {error}") from error


def _drop_tied_head(tensors, expected):
    """A head that the configuration ties to the embedding is left out, if it is the embedding."""
    head, embedding = tensors.get("lm_head.weight"), tensors.get("embed_tokens.weight")
    if head is None or embedding is None or "lm_head.weight" in expected:
        return
    alike = (head.dtype, head.shape) == (embedding.dtype, embedding.shape)
    rows = pieces(head.shape[0], max(1, PIECE // max(1, head.row_bytes)))
    if not alike or not all(same_bytes(head, embedding, start, stop) for start, stop in rows):
        raise ConversionError(
            f"tie_word_embeddings is true, but {head.name} differs from {embedding.name}: set it to false"
        )
    del tensors["lm_head.weight"]


def _live_heads(stored: Stored, heads: int) -> Stored:
    """`A_log` [H] of [H], zero-padded [P] or [1, 1, H, 1]."""
    count = math.prod(stored.shape)
    if stored.dtype == "U8" or stored.dtype not in DTYPES:
        raise ConversionError(f"{stored.name} is stored as {stored.dtype}, which is not a floating-point format")
    if count < heads:
        raise ConversionError(f"{stored.name} has {count} entries for {heads} heads")
    if stored.view((count,)).read(heads, count).any():
        raise ConversionError(
            f"{stored.name} has {count} entries for {heads} heads, and those after the heads are not zero: "
            "linear_attn_config.num_heads does not fit this checkpoint"
        )
    return stored.view((heads,))


PIECE = 8 << 20  # bytes that are read at once


def pieces(count: int, step: int) -> Iterator[tuple[int, int]]:
    """[0, count) in steps: (start, stop), ..."""
    for start in range(0, count, step):
        yield start, min(start + step, count)
