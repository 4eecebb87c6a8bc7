"""The tables and the picture of `kimi-k3 cost`: configurations read, `formulas.py` evaluated."""

import math
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ..configuration_kimi_k3 import KimiK3TextConfig
from .formulas import (
    GPUS,
    GQA,
    MLA,
    Counted,
    Experts,
    ModelCost,
    Node,
    all_to_all_bytes,
    communication_ratio,
    text_cost,
    without_recurrence,
)

CONTEXTS = [4096, 32768, 131072, 262144, 1048576]
# Attributes that change what a layer caches and have no formula here.
_UNKNOWN = ("num_kv_shared_layers", "layers_block_type", "hybrid_override_pattern", "attention_chunk_size")


def read_cost(path: Path) -> ModelCost:
    """The cost model of a checkpoint folder or of a `config.json`; reads no weights and runs no code of the folder.

    Raises:
        ValueError: for a configuration that has no formula here, with the reason.
    """
    if not path.exists():
        raise ValueError(f"there is no configuration {path}")
    if path.is_dir() and not (path / "config.json").is_file():
        raise ValueError(f"{path} has no config.json")
    named = path.absolute().parent if path.name == "config.json" else path.absolute()
    name = named.stem if named.suffix == ".json" else named.name
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # which of them a wrong file raises differs between releases
        raise ValueError(f"{path} cannot be read: {str(error).strip().partition(chr(10))[0]}") from error
    return cost_of(config, name)


def cost_of(config, name: str, dtype_bytes: int = 2) -> ModelCost:
    """The cost model of a transformers configuration with KDA, MLA or grouped-query attention."""
    text = config.get_text_config(decoder=True)
    if isinstance(text, KimiK3TextConfig):
        return text_cost(text, name, dtype_bytes)
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * getattr(text, "num_hidden_layers", 0)
    odd = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    odd += [key for key in _UNKNOWN if getattr(text, key, None)]
    heads = getattr(text, "num_attention_heads", None)
    if odd or not kinds or not heads or config.is_encoder_decoder:
        reason = ", ".join(odd) or "no decoder of attention layers"
        raise ValueError(f"{name} ({text.model_type}) has no formulas here: {reason}")
    if getattr(text, "kv_lora_rank", None):
        layer = MLA(
            text.hidden_size, heads, text.qk_nope_head_dim, text.qk_rope_head_dim, text.v_head_dim, text.kv_lora_rank,
            text.q_lora_rank or 0, False, dtype_bytes,
        )  # fmt: skip
        layers = {"full_attention": layer}
    else:
        size = getattr(text, "head_dim", None) or text.hidden_size // heads
        shape = text.hidden_size, heads, getattr(text, "num_key_value_heads", None) or heads, size
        window = getattr(text, "sliding_window", None) or 0
        in_all_layers = "layer_types" not in text.to_dict() and getattr(text, "use_sliding_window", True)
        layers = {
            "full_attention": GQA(*shape, window if in_all_layers else 0, dtype_bytes),
            "sliding_attention": GQA(*shape, window, dtype_bytes),
        }
    tied = bool(text.tie_word_embeddings)
    return ModelCost(
        name, text.hidden_size, text.vocab_size, tied, dtype_bytes, tuple(layers[kind] for kind in kinds),
        (_counted(text, dtype_bytes),),
    )  # fmt: skip


def _counted(text, dtype_bytes: int) -> Counted:
    """Parameters of a model on the meta device, embedding and head aside; routed experts are named `experts`."""
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(text)
    except Exception as error:
        raise ValueError(f"transformers cannot build {text.model_type}: {error}") from error
    tables = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    experts = next((getattr(text, key) for key in ("num_local_experts", "n_routed_experts", "num_experts")
                    if getattr(text, key, None)), 0)  # fmt: skip
    chosen = getattr(text, "num_experts_per_tok", 0) if experts else 0
    everything = matrices = routed = 0
    for parameter_name, parameter in model.named_parameters():
        if id(parameter) in tables:
            continue
        count = parameter.numel()
        everything += count
        if ".experts." in parameter_name:
            routed += count
        elif parameter.dim() > 1:
            matrices += count
    if routed and not chosen:
        raise ValueError(f"{text.model_type} has routed experts, but num_experts_per_tok is missing")
    matrices += routed * chosen // experts if routed else 0
    size = dtype_bytes
    return Counted(everything, matrices, everything * size, routed * size, experts if routed else 0, chosen)


# --- tables ----------------------------------------------------------------------------------------------------------


def table(head: list[str], rows: list[list]) -> str:
    """A Markdown table, numbers to the right."""
    align = ["---" if i == 0 else "---:" for i in range(len(head))]
    lines = [head, align, *[[str(cell) for cell in row] for row in rows]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def scaled(value: float, unit: str = "") -> str:
    """Three digits and a decimal prefix."""
    power = min(max(math.floor(math.log10(abs(value)) / 3), 0), 5) if value else 0
    return f"{value / 1000**power:.3g} {['', 'k', 'M', 'G', 'T', 'P'][power]}{unit}".strip()


def parameter_table(cost: ModelCost) -> str:
    rows = [[name, *map(scaled, counts[:2]), scaled(counts[2], "B")] for name, counts in cost.parts().items()]
    total = cost.totals()
    rows.append(["all", *map(scaled, total[:2]), scaled(total[2], "B")])
    return table([cost.name, "parameters", "active a token", "bytes"], rows)


def work_table(cost: ModelCost, context: int) -> str:
    """FLOPs and bytes by kind: a prefill of `context` tokens, and one decode step behind them."""
    rows = []
    for kind in dict.fromkeys(layer.kind for layer in cost.attention):
        layers = [layer for layer in cost.attention if layer.kind == kind]
        rows.append([
            f"{kind}, attention ({len(layers)})",
            scaled(sum(layer.attention_flops(context, 0) for layer in layers)),
            scaled(sum(layer.attention_flops(1, context) for layer in layers)),
            scaled(sum(layer.decode_bytes(context) for layer in layers), "B"),
            scaled(sum(layer.cache_bytes(context) for layer in layers), "B"),
        ])  # fmt: skip
    attention = [sum(layer.attention_flops(*at) for layer in cost.attention) for at in ((context, 0), (1, context))]
    flops = cost.flops(context), cost.flops(1, context)
    weights = scaled(cost.read_weight_bytes(1), "B")
    rows.append(["weights", *(scaled(a - b) for a, b in zip(flops, attention, strict=True)), weights, ""])
    rows.append(["all", *map(scaled, flops), "", scaled(cost.cache_bytes(context), "B")])
    head = [f"{cost.name}, {context:,} tokens", "prefill FLOPs", "decode FLOPs", "decode bytes read", "cache"]
    return table(head, rows)


def cache_table(costs: list[ModelCost], node: Node) -> str:
    """Cache of one sequence, and KV throughput (cache over prefill time) in parentheses."""
    rows = [
        [f"{n:,}", *(f"{scaled(c.cache_bytes(n), 'B')} ({scaled(node.kv_throughput(c, n), 'B/s')})" for c in costs)]
        for n in CONTEXTS
    ]
    first, *others = costs
    for other in others:
        tokens = first.break_even(other)
        context = f"{tokens:,.0f} tokens" if math.isfinite(tokens) else "never"
        rows.append([f"break-even with {other.name}", context, *[""] * len(others)])
    return table(["context", *(cost.name for cost in costs)], rows)


def node_table(cost: ModelCost, node: Node, gpu: str, session: int) -> str:
    whole = Node(node.gpu, node.gpus, by_heads=False)
    rows = [
        ["weights", scaled(cost.totals()[2], "B")],
        ["memory", scaled(node.gpus * node.gpu.memory, "B")],
        [f"tokens of cache, split by heads, in sessions of {session:,}", f"{node.cache_capacity(cost, session):,}"],
        ["tokens of cache, split by sequences", f"{whole.cache_capacity(cost, session):,}"],
        ["prefill of one session, at least", f"{node.prefill_seconds(cost, session):.2f} s"],
        ["decode step of one session, at least", f"{1e3 * node.decode_seconds(cost, [session]):.2f} ms"],
    ]
    experts = next((layer for layer in cost.feed_forward if isinstance(layer, Experts)), None)
    if experts:
        rows += [
            ["T_comm / T_comp, bfloat16", f"{communication_ratio(experts, node.gpu, node.gpus):.3f}"],
            ["all-to-all a layer and GPU, 8,192 tokens", scaled(all_to_all_bytes(8192, experts, node.gpus), "B")],
        ]
    return table([f"{cost.name} on {node.gpus} x {gpu}", ""], rows)


def report(costs: list[ModelCost], gpu: str, gpus: int, context: int) -> str:
    """Everything that `kimi-k3 cost` prints; the others are compared with the first model."""
    node = Node(GPUS[gpu], gpus)
    compared = list(costs)
    if {"KDA", "MLA"} <= {layer.kind for layer in costs[0].attention}:
        compared.insert(1, without_recurrence(costs[0]))
    parts = [*map(parameter_table, costs), *(work_table(cost, context) for cost in costs)]
    parts += [cache_table(compared, node), *(node_table(cost, node, gpu, context) for cost in costs)]
    return "\n".join(parts)


def draw(costs: list[ModelCost], gpu: str, gpus: int, path: Path) -> None:
    """Cache of a sequence and KV throughput against context, one line a model."""
    from matplotlib.figure import Figure

    node = Node(GPUS[gpu], gpus)
    contexts = [2**power for power in range(10, 21)]
    figure = Figure(figsize=(11, 4.2), layout="tight")
    left, right = figure.subplots(1, 2)
    for cost in costs:
        left.loglog(contexts, [cost.cache_bytes(n) / 1e9 for n in contexts], marker=".", label=cost.name)
        right.semilogx(contexts, [node.kv_throughput(cost, n) / 1e9 for n in contexts], marker=".", label=cost.name)
    left.set_ylabel("cache of one sequence, GB")
    right.set_ylabel(f"cache / prefill time on {gpus} x {gpu}, GB/s")
    right.set_yscale("log")
    for axes in (left, right):
        axes.set_xlabel("context, tokens")
        axes.grid(alpha=0.3)
    left.legend()
    figure.savefig(path, dpi=110)
