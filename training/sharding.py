"""FSDP2 for a model whose float32 parameters stand beside bfloat16 ones.

`fully_shard` gathers the parameters of a unit in one buffer, so a unit has one dtype. A KDA layer keeps `A_log`,
`dt_bias`, the convolutions and the output norm in float32 beside bfloat16 projections; here they become units of their
own, below the layer's.
"""

from collections import Counter

import torch
from torch import nn


def fully_shard_by_dtype(model: nn.Module, **options) -> nn.Module:
    """Shard a causal language model over the processes of a mesh, every decoder layer and its odd dtypes as units.

    Args:
        model: `KimiK3ForCausalLM`, on the device of this process, with the same weights on every process.
        **options: of `torch.distributed.fsdp.fully_shard` (mesh, mp_policy, offload_policy, reshard_after_forward).

    Returns:
        the model, sharded in place; make the optimizer after this call.
    """
    from torch.distributed.fsdp import fully_shard

    sizes = Counter()
    for parameter in model.parameters():
        sizes[parameter.dtype] += parameter.numel()
    common = max((dtype for dtype in sizes if dtype.is_floating_point), key=sizes.__getitem__)
    sharded: set[nn.Parameter] = set()

    def unit(modules, **more):
        modules = [module for module in modules if not sharded.issuperset(module.parameters())]
        if modules:
            fully_shard(modules, **{**options, **more})
            sharded.update(parameter for module in modules for parameter in module.parameters())

    for layer in model.model.layers:
        for module in reversed(list(layer.modules())):  # a module comes after those inside it
            kinds = {parameter.dtype for parameter in module.parameters(recurse=False)}
            if kinds - {common}:
                inside = [child for child in module.modules() if child is not module]
                unit([child for child in inside if _dtype_of(child) == common])
                # Some of these are called for their weight alone, which is read after the call.
                unit([module], reshard_after_forward=False)
        unit([layer])
    unit([model])
    return model


def _dtype_of(module: nn.Module) -> torch.dtype | None:
    """dtype of the parameters that a module holds itself, None without."""
    return next((parameter.dtype for parameter in module.parameters(recurse=False)), None)
