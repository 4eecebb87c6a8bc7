"""What tests of several processes share."""

from collections.abc import Callable

import torch.distributed as dist


def by_one(compute: Callable):
    """What `compute()` returns in the first process of the group, for all of them; tensors on the CPU, no graphs."""
    found = [compute() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    return found[0]
