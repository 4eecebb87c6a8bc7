"""What a checkpoint folder holds, from headers alone: `kimi-k3 inspect`."""

import math
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from ..checkpoint_kimi_k3 import DTYPES, plain_name
from .source import (
    INDEX,
    ITEM_BYTES,
    VISION,
    expected_tensors,
    plain_tensors,
    read_config,
    read_index,
    read_json,
    refuse_too_few_experts,
    stored_tensors,
    without_collector,
)

PARTS = (
    "embedding", "KDA attention", "MLA attention", "attention residuals", "norms", "dense MLP", "router",
    "routed experts", "shared experts", "latent projections", "head", "vision tower", "projector",
)  # fmt: skip


@dataclass
class Part:
    """The tensors of one part of the model."""

    tensors: int = 0
    parameters: int = 0
    nbytes: int = 0
    dtypes: Counter = field(default_factory=Counter)

    def add(self, name: str, dtype: str, shape: tuple[int, ...]) -> None:
        """Count a tensor. Its parameters are the logical ones: two in a packed byte, none in a scale."""
        size = math.prod(shape)
        self.tensors += 1
        self.parameters += size if dtype != "U8" else 2 * size if name.endswith("_packed") else 0
        self.nbytes += ITEM_BYTES[dtype] * size
        self.dtypes[dtype] += 1


@dataclass
class Inventory:
    """Attributes:
    parts: name of every part that a model can have -> Part, in the order of the computation.
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
    absent: list[str]
    index_only: bool
    total_size: float | None
    configured: bool = True
    parts: dict[str, Part] = field(default_factory=lambda: {name: Part() for name in PARTS})
    tensors: int = 0
    missing: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())


def part_of(name: str, kda_layers: set[int]) -> str:
    """The part of the model that a plain name belongs to."""
    if name.startswith(VISION):
        return "vision tower" if name.startswith("vision") else "projector"
    if not name.startswith("layers."):
        top = {"embed_tokens.weight": "embedding", "lm_head.weight": "head"}
        return top.get(name, "attention residuals" if "attn_res" in name else "norms")
    _, layer, module, *rest = name.split(".")
    if module == "self_attn":
        return "KDA attention" if int(layer) in kda_layers else "MLA attention"
    if "_res_" in module:
        return "attention residuals"
    if module == "mlp":
        return "dense MLP"
    if module == "block_sparse_moe":
        moe = {"experts": "routed experts", "shared_experts": "shared experts", "gate": "router"}
        return moe.get(rest[0], "latent projections")
    return "norms"


@without_collector()
def take_inventory(folder: Path) -> Inventory:
    """Read a folder's configuration, index and shard headers, and compare them.

    A folder with an index and without any shard is answered from the index: names are known, sizes are those that the
    configuration asks for, unknown without one. If only some shards are there, the tensors of the others are missing.

    Raises:
        ConversionError: if there is no configuration that can be read and more than an index, or a file is broken.
    """
    index = read_index(folder)
    files = sorted(set(index.values())) if index is not None else []
    absent = [name for name in files if not (folder / name).is_file()]
    index_only = index is not None and absent == files
    total_size = _total_size(folder) if index is not None else None
    if index_only and not (folder / "config.json").is_file():
        return _names_alone(index, absent, total_size)
    config = read_config(folder)
    text = config.get_text_config(decoder=True)
    if absent:
        refuse_too_few_experts(folder, config, map(plain_name, index))
    inventory = Inventory(_summary(config, text), absent, index_only, total_size)
    entries: dict[str, tuple] = {}
    if not index_only:
        # read once: a configuration looks up every attribute in several tables, and there are half a million tensors
        experts = text.num_experts or 0
        present = {name: file for name, file in index.items() if file not in absent} if absent else index
        for stored in stored_tensors(folder, present):
            for name, part in plain_tensors(stored, experts):
                if name in entries:
                    inventory.foreign.append(f"{stored.name} (there already as {entries[name][0]})")
                    continue
                entries[name] = (stored.name, part.dtype, part.shape)
    if not absent:
        refuse_too_few_experts(folder, config, entries)
    expected = {plain_name(name): entry for name, entry in expected_tensors(config).items()}
    if index_only:
        for original in index:
            name = plain_name(original)
            entries[name] = (original, *expected.get(name, ("U8", ())))
    inventory.tensors = len(entries)
    inventory.missing = [name for name in expected if name not in entries]
    kda_layers = {layer for layer, kind in enumerate(text.layer_types) if kind == "linear_attention"}
    for name, (original, dtype, shape) in entries.items():
        if name not in expected:
            inventory.foreign.append(original)
            continue
        right_dtype, right_shape = expected[name]
        if dtype not in DTYPES or (dtype == "U8") != (right_dtype == "U8"):
            inventory.misshapen.append(f"{original} is {dtype}, the configuration asks for {right_dtype}")
        elif shape != right_shape and not name.endswith(".A_log"):
            sizes = f"{list(shape)}, the configuration asks for {list(right_shape)}"
            inventory.misshapen.append(f"{original} has shape {sizes}")
        inventory.parts[part_of(name, kda_layers)].add(name, dtype, shape)
    return inventory


def _total_size(folder: Path) -> float | None:
    metadata = read_json(folder / INDEX).get("metadata")
    total_size = metadata.get("total_size") if isinstance(metadata, dict) else None
    return total_size if isinstance(total_size, int | float) else None  # some tools write 1.56e12


def _names_alone(index: dict[str, str], absent: list[str], total_size: float | None) -> Inventory:
    names = {plain_name(original) for original in index}
    kda_layers = {int(name.split(".")[1]) for name in names if re.fullmatch(r"layers\.\d+\.self_attn\.A_log", name)}
    numbers = [int(match[1]) for name in names if (match := re.match(r"layers\.(\d+)\.", name))]
    layers = max(numbers, default=-1) + 1
    summary = [
        "no config.json is here: parts are told by names, sizes are not known",
        f"{layers} layers: {len(kda_layers)} KDA, {layers - len(kda_layers)} others",
    ]
    inventory = Inventory(summary, absent, True, total_size, configured=False, tensors=len(names))
    for name in names:
        whole = re.match(r"(?!layers\.)|layers\.\d+\.\w+\.\w", name)  # else no tensor of this family
        inventory.parts[part_of(name, kda_layers) if whole else "norms"].tensors += 1
    return inventory


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
    parts = {name: part for name, part in inventory.parts.items() if part.tensors}
    rows = [("part", "tensors", "parameters", "bytes", "dtypes")]
    for name, part in parts.items():
        dtypes = ", ".join(f"{dtype} x {count:,}" for dtype, count in part.dtypes.most_common())
        sizes = (f"{part.parameters:,}", f"{part.nbytes:,}") if inventory.configured else ("?", "?")
        rows.append((name, f"{part.tensors:,}", *sizes, dtypes))
    tensors, parameters = sum(part.tensors for part in parts.values()), sum(part.parameters for part in parts.values())
    if inventory.configured:
        rows.append(("sum", f"{tensors:,}", f"{parameters:,}", f"{inventory.nbytes:,}", ""))
    elif inventory.total_size is None:
        rows.append(("sum", f"{tensors:,}", "?", "?", ""))
    else:
        rows.append(("sum", f"{tensors:,}", "?", f"{inventory.total_size:,}", "as the index says"))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = [*inventory.summary, ""]
    for name, *numbers, dtypes in rows:
        cells = [name.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(numbers, widths[1:], strict=True))]
        lines.append("  ".join([*cells, dtypes]).rstrip())
    if not inventory.configured:
        return "\n".join(lines)
    lines.append("")
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
