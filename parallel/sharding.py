"""FSDP2 for a model whose float32 parameters stand beside bfloat16 ones.

`fully_shard` casts and reduces the parameters of a unit alike, so those that train in one unit have one dtype. A KDA
layer keeps `A_log`, `dt_bias`, the convolutions and the output norm in float32 beside bfloat16 projections, and an
adapter is float32 beside the weights that it adapts. Here each kind becomes a unit of its own, below the layer's.
"""

import dataclasses
from collections import Counter

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard
from transformers.utils import logging

logger = logging.get_logger(__name__)


def fully_shard_by_dtype(model: nn.Module, mp_policy=None, **options) -> nn.Module:
    """Shard a causal language model over the processes of a mesh, every decoder layer and its odd dtypes as units.

    accelerate and `Trainer` leave an already sharded model as it is, so this comes before
    `accelerator.prepare(model, optimizer)` or `Trainer(model)`, with fsdp_version 2 and mixed_precision "no".

    Args:
        model: `KimiK3ForCausalLM`, with or without an adapter, on the device of this process, with the same weights on
            every process.
        mp_policy: a `torch.distributed.fsdp.MixedPrecisionPolicy`. Its `param_dtype` is not applied to what the model
            always keeps in float32: float32 weights then train as they do beside bfloat16 ones.
        **options: of `torch.distributed.fsdp.fully_shard` (mesh, offload_policy, reshard_after_forward).

    Returns:
        the model, sharded in place; make the optimizer after this call.

    Raises:
        ValueError: if the model has no decoder layer, or packed experts that `param_dtype` would cast.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    layers = [m for m in model.modules() if any(c.__name__ == "KimiK3DecoderLayer" for c in type(m).__mro__)]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no decoder layer of Kimi K3 to shard")
    policy = mp_policy or MixedPrecisionPolicy()
    mesh = options.get("mesh")
    processes = dist.get_world_size() if mesh is None else mesh.shape[-1]
    if (empty := _left_empty(model, processes)) and dist.get_rank() == 0:
        logger.warning(
            f"{len(empty)} parameters, {empty[0]} first, are too short to give each of {processes} processes a part: "
            "accelerate takes them for one when a checkpoint saves the optimizer. Pass save_only_model=True to the "
            "Trainer, or save with torch.distributed.checkpoint"
        )
    options.setdefault("shard_placement_fn", lambda parameter: _without_empty_parts(parameter, processes))
    exempt = set()
    if policy.param_dtype is not None:
        if not all(p.is_floating_point() for p in model.parameters()):
            raise ValueError("param_dtype would cast packed experts: load with dequantize=True, or without mp_policy")
        strict = {name for m in model.modules() for name in getattr(m, "_keep_in_fp32_modules_strict", None) or ()}
        exempt = {p for name, p in model.named_parameters() if strict.intersection(name.split("."))}

    def kind(module):
        """(dtype, whether it is exempt from the policy) of the parameters that a module holds itself.

        None without, and for frozen ones: they have no gradient to reduce and fit any unit.
        """
        own = module.parameters(recurse=False)
        return next(((p.dtype, p in exempt) for p in own if p.requires_grad or p in exempt), None)

    sizes = Counter()
    for parameter in model.parameters():
        sizes[parameter.dtype, parameter in exempt] += parameter.numel() * parameter.is_floating_point()
    common = max(sizes, key=sizes.__getitem__)
    sharded: set[nn.Parameter] = set()

    def unit(modules, kind=common, **more):
        modules = [module for module in modules if not sharded.issuperset(module.parameters())]
        if modules:
            own = dataclasses.replace(policy, param_dtype=None) if kind[1] else policy
            fully_shard(modules, mp_policy=own, **{**options, **more})
            sharded.update(parameter for module in modules for parameter in module.parameters())

    for layer in layers:
        odd = [module for module in layer.modules() if kind(module) not in (None, common)]
        for module in odd:
            below = [child for child in module.modules() if child is not module and kind(child) is not None]
            if below:  # the other kinds below it first; the rest is of one kind
                for other in dict.fromkeys(map(kind, below)):
                    if other != kind(module):
                        unit([child for child in below if kind(child) == other], other)
                unit([module], kind(module))
        for other in dict.fromkeys(map(kind, odd)):
            # Some of these are called for their weight alone, which is read after the call.
            unit([module for module in odd if kind(module) == other], other, reshard_after_forward=False)
        unit([layer])
    unit([model])
    # Sharding renames the classes; accelerate looks for these names although it has nothing left to wrap.
    for module in model.modules():
        if getattr(type(module), "_no_split_modules", None):
            module._no_split_modules = sorted({type(layer).__name__ for layer in layers})
    return model


def _has_empty_part(length: int, processes: int) -> bool:
    """Whether a dimension cut as `torch.chunk` does it leaves the last process nothing."""
    return -(-length // processes) * (processes - 1) >= length


def _without_empty_parts(parameter: nn.Parameter, processes: int) -> Shard | None:
    """The dimension along which every process gets a part of the parameter; None, the first one, if there is none.

    Of a query [1, hidden] the first process would get all. accelerate tells the parameters of an optimizer apart by the
    addresses of their parts, and empty ones have none: it would take all of them for one, and saving the optimizer
    would wait for states that are not there. FSDP2 cuts other dimensions than the first into equal parts only.
    """
    if not _has_empty_part(len(parameter), processes):
        return None
    return next((Shard(i) for i in range(1, parameter.ndim) if parameter.shape[i] % processes == 0), None)


def _left_empty(model: nn.Module, processes: int) -> list[str]:
    """Names of the parameters that train and of which a process gets nothing all the same."""
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    return [
        name
        for name, parameter in trained
        if _has_empty_part(len(parameter), processes) and _without_empty_parts(parameter, processes) is None
    ]
