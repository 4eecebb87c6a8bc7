"""What a checkpoint folder holds, from headers alone: `kimi-k3 inspect`."""

import math
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from ..checkpoint_kimi_k3 import plain_name
from .source import (
    DTYPES,
    INDEX,
    ITEM_BYTES,
    expected_tensors,
    plain_tensors,
    read_config,
    read_index,
    read_json,
    stored_tensors,
    without_collector,
)


@dataclass
class Part:
    """The tensors of one part of the model."""

    tensors: int = 0
    parameters: int = 0
    nbytes: int = 0
    dtypes: Counter = field(default_factory=Counter)


@dataclass
class Inventory:
    """Attributes:
    parts: name of the part -> Part, in the order of the computation.
    tensors: how many plain tensors the folder holds.
    missing: what the configuration asks for and the folder lacks, as plain names.
    foreign: what the folder holds and the configuration has no place for, under the names in the files.
    misshapen: sentences about tensors of another shape or kind than the configuration asks for.
    absent: shards that the index names and the folder lacks.
    index_only: no shard is there; sizes are those that the configuration asks for.
    total_size: as the index says, or None.
    configured: there is a configuration; without one parts are known by names, and sizes and what is missing are not.
    """

    summary: list[str]
    parts: dict[str, Part]
    tensors: int
    missing: list[str]
    foreign: list[str]
    misshapen: list[str]
    absent: list[str]
    index_only: bool
    total_size: float | None
    configured: bool = True

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())


def part_of(name: str, layer_types: list[str]) -> str:
    """The part of the model that a plain name belongs to."""
    if name.startswith(("vision_tower.", "mm_projector.")):
        return "vision tower" if name.startswith("vision") else "projector"
    if not name.startswith("layers."):
        top = {"embed_tokens.weight": "embedding", "lm_head.weight": "head"}
        return top.get(name, "attention residuals" if "attn_res" in name else "norms")
    _, layer, module, *rest = name.split(".")
    if module == "self_attn":
        kda = int(layer) < len(layer_types) and layer_types[int(layer)] == "linear_attention"
        return "KDA attention" if kda else "MLA attention"
    if "_res_" in module:
        return "attention residuals"
    if module == "mlp":
        return "dense MLP"
    if module == "block_sparse_moe":
        moe = {"experts": "routed experts", "shared_experts": "shared experts", "gate": "router"}
        return moe.get(rest[0], "latent projections")
    return "norms"


PARTS = (
    "embedding", "KDA attention", "MLA attention", "attention residuals", "norms", "dense MLP", "router",
    "routed experts", "shared experts", "latent projections", "head", "vision tower", "projector",
)  # fmt: skip


@without_collector()
def take_inventory(folder: Path) -> Inventory:
    """Read a folder's configuration, index and shard headers, and compare them.

    A folder with an index and without any shard is answered from the index: names are known, sizes are those that the
    configuration asks for, unknown without one. If only some shards are there, the tensors of the others are missing.

    Raises:
        ConversionError: if there is no configuration that can be read and more than an index, or a file is broken.
    """
    if not (folder / "config.json").is_file() and (index := read_index(folder)) is not None:
        if not any((folder / name).is_file() for name in set(index.values())):
            return _names_alone(folder, index)
    config = read_config(folder)
    text = config.get_text_config(decoder=True)
    expected = {plain_name(name): entry for name, entry in expected_tensors(config).items()}
    # read once: a configuration looks up every attribute in several tables, and there are half a million tensors
    experts, layer_types = text.num_experts or 0, text.layer_types
    total_size, index_only, absent, misshapen, foreign = None, False, [], [], []
    entries: dict[str, tuple] = {}
    index = read_index(folder)
    if index is not None:
        total_size = _total_size(folder)
        files = sorted(set(index.values()))
        absent = [name for name in files if not (folder / name).is_file()]
        index_only = absent == files
    if index_only:
        for original in index:
            name = plain_name(original)
            entries[name] = (original, *expected.get(name, ("U8", ())))
    else:
        present = {name: file for name, file in index.items() if file not in absent} if absent else index
        for stored in stored_tensors(folder, present):
            for name, part in plain_tensors(stored, experts):
                if name in entries:
                    foreign.append(f"{stored.name} (there already as {entries[name][0]})")
                    continue
                entries[name] = (stored.name, part.dtype, part.shape)
    parts = defaultdict(Part)
    for name, (original, dtype, shape) in entries.items():
        if name not in expected:
            foreign.append(original)
            continue
        wanted_dtype, wanted_shape = expected[name]
        if dtype not in DTYPES or (dtype == "U8") != (wanted_dtype == "U8"):
            misshapen.append(f"{original} is {dtype}, the configuration asks for {wanted_dtype}")
        elif shape != wanted_shape and not name.endswith(".A_log"):
            misshapen.append(f"{original} has shape {list(shape)}, the configuration asks for {list(wanted_shape)}")
        part = parts[part_of(name, layer_types)]
        part.tensors += 1
        part.nbytes += ITEM_BYTES[dtype] * math.prod(shape)
        part.parameters += _parameters(name, dtype, shape)
        part.dtypes[dtype] += 1
    return Inventory(
        summary=_summary(config, text),
        parts={name: parts[name] for name in PARTS if name in parts},
        tensors=len(entries),
        missing=[name for name in expected if name not in entries],
        foreign=foreign,
        misshapen=misshapen,
        absent=absent,
        index_only=index_only,
        total_size=total_size,
    )


def _total_size(folder: Path) -> float | None:
    metadata = read_json(folder / INDEX).get("metadata")
    total_size = metadata.get("total_size") if isinstance(metadata, dict) else None
    return total_size if isinstance(total_size, int | float) else None  # some tools write 1.56e12


def _names_alone(folder: Path, index: dict[str, str]) -> Inventory:
    names = {plain_name(original): original for original in index}
    kda = {int(name.split(".")[1]) for name in names if re.fullmatch(r"layers\.\d+\.self_attn\.A_log", name)}
    layers = range(max((int(m[1]) + 1 for m in map(re.compile(r"layers\.(\d+)\.").match, names) if m), default=0))
    layer_types = ["linear_attention" if layer in kda else "full_attention" for layer in layers]
    parts = defaultdict(Part)
    for name in names:
        whole = re.match(r"(?!layers\.)|layers\.\d+\.\w+\.\w", name)  # else no tensor of this family
        parts[part_of(name, layer_types) if whole else "norms"].tensors += 1
    return Inventory(
        summary=[
            "no config.json is here: parts are told by names, sizes are not known",
            f"{len(layers)} layers: {len(kda)} KDA, {len(layers) - len(kda)} others",
        ],
        parts={name: parts[name] for name in PARTS if name in parts},
        tensors=len(names),
        missing=[],
        foreign=[],
        misshapen=[],
        absent=sorted(set(index.values())),
        index_only=True,
        total_size=_total_size(folder),
        configured=False,
    )


def _parameters(name, dtype, shape):
    """Number of logical parameters: two in a packed byte, none in a scale."""
    if dtype == "U8":
        return 2 * math.prod(shape) if name.endswith("_packed") else 0
    return math.prod(shape)


def _summary(config, text) -> list[str]:
    kinds, feeds = Counter(text.layer_types), Counter(text.mlp_layer_types)
    lines = [
        f"{text.num_hidden_layers} layers: {kinds['linear_attention']} KDA, {kinds['full_attention']} MLA; "
        f"{feeds['dense']} dense, {feeds['sparse']} with experts",
        f"hidden size {text.hidden_size}, vocabulary {text.vocab_size}, {text.num_attention_heads} heads",
    ]
    if text.num_experts:
        width = text.routed_expert_hidden_size
        lines.append(
            f"{text.num_experts} routed experts ({'MXFP4' if text.expert_quantization else 'floating point'}), "
            f"{text.num_experts_per_token} a token, {text.num_shared_experts or 0} shared"
            + (f", latent width {width}" if width else "")
        )
    residual = text.attn_res_block_size
    lines.append(f"attention residuals in blocks of {residual}" if residual else "no attention residuals")
    lines.append(
        f"configuration: {'nested' if config is not text else 'flat'}, model_type {config.to_dict()['model_type']}"
    )
    return lines


def table(inventory: Inventory) -> str:
    """The inventory as text to print."""
    rows = [("part", "tensors", "parameters", "bytes", "dtypes")]
    for name, part in inventory.parts.items():
        dtypes = ", ".join(f"{dtype} x {count:,}" for dtype, count in part.dtypes.most_common())
        sizes = (f"{part.parameters:,}", f"{part.nbytes:,}") if inventory.configured else ("?", "?")
        rows.append((name, f"{part.tensors:,}", *sizes, dtypes))
    counts = [
        sum(getattr(part, kind) for part in inventory.parts.values()) for kind in ("tensors", "parameters", "nbytes")
    ]
    if not inventory.configured:
        size = "?" if inventory.total_size is None else f"{inventory.total_size:,}"
        rows.append(("sum", f"{counts[0]:,}", "?", size, "as the index says" if size != "?" else ""))
    else:
        rows.append(("sum", *(f"{count:,}" for count in counts), ""))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = [*inventory.summary, ""]
    for name, *numbers, dtypes in rows:
        cells = [name.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(numbers, widths[1:], strict=True))]
        lines.append("  ".join([*cells, dtypes]).rstrip())
    lines.append("")
    if not inventory.configured:
        return "\n".join(lines[:-1])
    if inventory.index_only:
        lines.append("only the index is here, no shard: sizes and dtypes are those that the configuration asks for")
    elif inventory.absent:
        lines.append(f"shards that are not here: {', '.join(inventory.absent)}")
    elif inventory.total_size is not None and inventory.total_size != inventory.nbytes and not inventory.foreign:
        lines.append(f"the index says total_size {inventory.total_size:,}, the tensors are {inventory.nbytes:,} bytes")
    for title, names in (("missing", inventory.missing), ("foreign", inventory.foreign)):
        lines.append(f"{title}: {len(names):,}" + "".join(f"\n  {name}" for name in names[:10]))
        if len(names) > 10:
            lines.append(f"  ... {len(names) - 10:,} more")
    lines += inventory.misshapen[:10]
    return "\n".join(lines)
