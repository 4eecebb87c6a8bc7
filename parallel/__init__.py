"""One model on several processes: rows cut by position, FSDP2 in units of one dtype, the bytes that modes send.

What transformers' own parallel modes need from the model is in `distributed_kimi_k3.py`.
"""

from .context import context_parallel, gather_cache, prefill, shard
from .sharding import fully_shard_by_dtype

__all__ = ["context_parallel", "fully_shard_by_dtype", "gather_cache", "prefill", "shard"]
