"""What parallel modes move between processes: a counter of the bytes sent, and formulas to compare it with.

All numbers are bytes that one process sends, collectives taken as rings: an all-reduce of S bytes over n processes
sends 2 S (n - 1) / n of them, an all-gather to S bytes and an exchange of S bytes send S (n - 1) / n.
"""

import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..configuration_kimi_k3 import KimiK3TextConfig

# Routing weights, and what experts return, whatever the model's dtype.
FLOAT32_BYTES = 4


class Wire(TorchDispatchMode):
    """Inside `with Wire() as wire`, `wire.sent` counts bytes by operation; backward passes on the CPU included.

    Among all processes; what they tell one another as objects (`all_gather_object`) is not counted.
    """

    def __init__(self):
        super().__init__()
        self.sent: dict[str, float] = {}

    @property
    def total(self) -> float:
        return sum(self.sent.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:  # comes a second time, with the local tensors
            return NotImplemented
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func.__name__.split(".")[0].strip("_")
            if sent := self._bytes(name, args):
                self.sent[name] = self.sent.get(name, 0) + sent
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _bytes(name: str, args) -> float:
        ranks, first = dist.get_world_size(), args[0][0] if isinstance(args[0], list | tuple) else args[0]
        others = (ranks - 1) / ranks
        if name in ("allreduce", "all_reduce"):
            return 2 * others * first.nbytes
        if name == "all_gather_into_tensor":  # the part of this process
            return (ranks - 1) * first.nbytes
        if name in ("allgather_base", "reduce_scatter_tensor"):  # the whole
            return others * first.nbytes
        if name == "reduce_scatter_base":
            return others * args[1].nbytes
        if name == "all_to_all_single":
            rows, splits = first, args[2]
        elif name == "alltoall_base":
            rows, splits = args[1], args[4]
        elif name == "send" or (name == "broadcast" and args[2] == dist.get_rank()):
            return first.nbytes
        elif name in ("wait_tensor", "wrap_tensor_autograd", "recv", "broadcast", "barrier", "allgather"):
            return 0
        else:
            raise NotImplementedError(f"no rule for what {name} sends")
        if not splits:
            return others * rows.nbytes
        return rows.nbytes * (1 - splits[dist.get_rank()] / max(1, sum(splits)))


def all_reduced(ranks: int, size: float) -> float:
    return 2 * (ranks - 1) / ranks * size


def tensor_parallel_bytes(
    config: KimiK3TextConfig, ranks: int, tokens: int, kept: int, dtype_bytes: int, experts_apart: bool = False
) -> tuple[float, float]:
    """(forward, backward) under `tp_size=ranks`.

    Args:
        tokens: B T.
        kept: positions whose logits are made.
        dtype_bytes: of the model's dtype.
        experts_apart: the routed experts are spread over the processes; `expert_parallel_bytes` counts those.
    """
    stream, stored = tokens * config.hidden_size * dtype_bytes, dtype_bytes if config.has_softplus_gate else 4
    linear, latent = config.linear_attn_config, config.kv_lora_rank + config.qk_rope_head_dim
    forward, backward = stream, kept * config.hidden_size * dtype_bytes  # embedding; input of the head
    for attention, feed_forward in zip(config.layer_types, config.mlp_layer_types, strict=True):
        forward, backward = forward + stream, backward + stream
        if attention == "linear_attention":  # gradients of the parameters that every process holds whole
            low_rank = 1 if linear.get("use_full_rank_gate") else 2
            backward += low_rank * config.hidden_size * linear["head_dim"] * dtype_bytes
            backward += linear["head_dim"] * stored + linear["num_heads"] * 4
        else:
            backward += (config.hidden_size * latent + config.kv_lora_rank) * dtype_bytes
            backward += (config.q_lora_rank or 0) * (config.hidden_size + 1) * dtype_bytes
        if feed_forward == "dense" or config.num_shared_experts:
            forward, backward = forward + stream, backward + 2 * stream  # gate and up
        if feed_forward == "sparse" and not experts_apart:
            more = _expert_sums(config, tokens, dtype_bytes)
            forward, backward = forward + more[0], backward + more[1]
    logits = (ranks - 1) / ranks * kept * config.vocab_size * dtype_bytes
    return all_reduced(ranks, forward) + logits, all_reduced(ranks, backward)


def _expert_sums(config, tokens, dtype_bytes):
    width = config.routed_expert_hidden_size or config.hidden_size
    weights = tokens * config.num_experts_per_token * FLOAT32_BYTES
    return tokens * width * FLOAT32_BYTES, tokens * width * dtype_bytes + weights


def expert_parallel_bytes(
    config: KimiK3TextConfig, ranks: int, tokens: int, dtype_bytes: int, elsewhere: float | None = None
) -> tuple[float, float]:
    """(forward, backward) of the routed experts over `ranks` processes that hold the same tokens.

    Args:
        tokens: B T.
        dtype_bytes: of the model's dtype.
        elsewhere: None if every process takes all tokens and the results are summed
            (`ep_implementation="all_reduce"`). For
            `"all_to_all"`, how many pairs of token and expert a process sends away, summed over the layers, on average
            over the processes; tokens k (ranks - 1) / ranks^2 a layer when experts are chosen evenly.
    """
    layers = config.mlp_layer_types.count("sparse")
    if elsewhere is None:
        forward, backward = _expert_sums(config, tokens, dtype_bytes)
        return layers * all_reduced(ranks, forward), layers * all_reduced(ranks, backward)
    width = config.routed_expert_hidden_size or config.hidden_size
    others = layers * (ranks - 1) / ranks
    counts = others * config.num_experts * 8
    # There and back; then every process gets the results of the others' tokens, and backward their gradients.
    forward = elsewhere * width * (dtype_bytes + FLOAT32_BYTES) + counts + others * tokens * width * FLOAT32_BYTES
    backward = elsewhere * width * (dtype_bytes + FLOAT32_BYTES)
    backward += others * tokens * (width * dtype_bytes + config.num_experts_per_token * FLOAT32_BYTES)
    return forward, backward


def pipeline_bytes(config: KimiK3TextConfig, first_layer: int, tokens: int, dtype_bytes: int) -> int:
    """Forward, into the stage that begins with `first_layer`: the partial sum and the blocks finished before it."""
    blocks = 0 if config.attn_res_block_size is None else -(-first_layer // config.attn_res_block_size)
    return (1 + blocks) * tokens * config.hidden_size * dtype_bytes
