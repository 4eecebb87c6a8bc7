"""How a Kimi K3 is cut for several processes: the parallel styles that transformers lacks, and what they refuse.

`KimiK3TextConfig.base_model_tp_plan` and its siblings name a style for every weight; `docs/distributed.md` has the
table. transformers' own styles serve the embedding, the MLPs, the experts and the head. In an attention layer more than
the linear maps has to be cut: convolutions, decay and kernels work on a process's own heads, and the absorbed form of
MLA reads a weight directly. So the layer as a whole runs on local tensors, and exchanges once: its output forward, the
gradient of its input backward.

Pipelines: transformers gives every process its own layers and reads no other weights, but passes one tensor between
two of them. Attention Residuals pass the finished blocks too, so the forward is ours.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel
from transformers.distributed.pipeline_parallel import PipelineIdentityLayer
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_kimi_k3 import MXFP4_GROUP
from .layers_kimi_k3 import run_layers
from .packing_kimi_k3 import causal_mask, find_packing

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
if dist.is_available():
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor


def complete_gradient(x: torch.Tensor, mesh: "DeviceMesh") -> torch.Tensor:
    """x, the same on every process, for a computation of which each does a part: backward sums their gradients."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


def sum_over_processes(x: torch.Tensor, mesh: "DeviceMesh") -> torch.Tensor:
    """The sum of all processes' parts; backward, each gets the whole gradient. In place without autograd."""
    if torch.is_grad_enabled() and x.requires_grad:
        return (
            DTensor.from_local(x, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()]).to_local()
        )
    x = x.contiguous()
    dist.all_reduce(x, group=mesh.get_group())
    return x


@contextlib.contextmanager
def local_parameters(module: nn.Module, mesh: "DeviceMesh") -> Iterator[None]:
    """Inside, the parameters of `module` and its children are this process's parts, as plain tensors.

    One that every process holds whole gets the sum of their gradients, and of `A_log` [heads] the own heads are there.
    """
    replaced: list[tuple[dict[str, Any], str, nn.Parameter]] = []
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is None:
                continue
            local = parameter.to_local() if isinstance(parameter, DTensor) else complete_gradient(parameter, mesh)
            if name == "A_log":
                local = local.chunk(mesh.size())[mesh.get_local_rank()]
            if local is not parameter:
                replaced.append((child._parameters, name, parameter))
                # A view of the parameter, or what becomes its gradient: no parameter, and not to be made one.
                child._parameters[name] = local  # type: ignore[assignment]
    try:
        yield
    finally:
        for parameters, name, parameter in replaced:
            parameters[name] = parameter


class Part(TensorParallelLayer):
    """A parameter of which every process holds a part along one dimension; the forward is left as it is.

    Args:
        dim: of [out, in] weights 0 for the rows, whose outputs are a process's own, -1 for the columns; None: whole.
    """

    def __init__(self, dim: int | None):
        self.dim = dim

    def shard_param(self, module: nn.Module, param: str, mesh: "DeviceMesh") -> None:
        whole = module.get_parameter(param)
        if self.dim is not None:
            part = distribute_tensor(whole, mesh, [Shard(self.dim % whole.dim())], src_data_rank=None)
            module._parameters[param] = nn.Parameter(part, requires_grad=whole.requires_grad)

    def install_forward(self, module: nn.Module, mesh: "DeviceMesh") -> nn.Module:
        return module


class OwnHeads(TensorParallelLayer):
    """A KDA or MLA layer on a process's own heads: recurrent states are cut with them, latents are whole everywhere."""

    def shard_param(self, module: nn.Module, param: str, mesh: "DeviceMesh") -> None:
        # `A_log` stays whole: files pad it in several ways, so that a part of the file is not a part of the heads.
        if param != "A_log":
            Part(0).shard_param(module, param, mesh)

    def install_forward(self, module: Any, mesh: "DeviceMesh") -> nn.Module:
        module.num_heads //= mesh.size()
        whole_forward = module.forward

        def forward(hidden_states, **kwargs):
            with local_parameters(module, mesh):
                output = whole_forward(complete_gradient(hidden_states, mesh), **kwargs)
            if isinstance(output, torch.Tensor):
                return sum_over_processes(output, mesh)
            output, weights = output
            if weights is not None:  # [B, heads, T, S]
                weights = DTensor.from_local(weights.contiguous(), mesh, [Shard(1)], run_check=False).full_tensor()
            return sum_over_processes(output, mesh), weights

        module.forward = forward
        return module


class OwnExperts(TensorParallelLayer):
    """Expert parallelism where transformers leaves the exchange to a router of its own form (5.17 and 5.18).

    Every process has all tokens, computes those of its own experts, and the sums are added. Tokens of other experts
    are numbered past the last one, with a weight of zero.
    """

    def install_forward(self, module: Any, mesh: "DeviceMesh") -> nn.Module:
        whole_forward, experts = module.forward, module.num_experts

        def forward(hidden_states, top_k_index, top_k_weights):
            elsewhere = top_k_index // experts != mesh.get_local_rank()
            weights = complete_gradient(top_k_weights, mesh).masked_fill(elsewhere, 0.0)
            own = torch.where(elsewhere, experts, top_k_index % experts)
            with local_parameters(module, mesh):
                return sum_over_processes(whole_forward(complete_gradient(hidden_states, mesh), own, weights), mesh)

        module.forward = forward
        return module


if dist.is_available():
    styles: Any = ALL_PARALLEL_STYLES  # annotated as a table of functions, though transformers' own are none
    styles.register("kimi_k3_rows", Part(0))
    styles.register("kimi_k3_columns", Part(-1))
    styles.register("kimi_k3_whole", Part(None))
    styles.register("kimi_k3_heads", OwnHeads())
    if "ep_dispatch_experts" not in styles:
        styles.register("ep_dispatch_experts", OwnExperts())


def _only_experts(distributed_config: Any) -> bool:
    if hasattr(distributed_config, "ep_size"):
        return distributed_config.tp_plan == {}
    return distributed_config.enable_expert_parallel


def without_tensor_parallelism(model: PreTrainedModel, distributed_config: Any) -> Any:
    """`enable_expert_parallel` alone: the releases that make an empty `tp_plan` of it refuse that as a missing one."""
    if not hasattr(distributed_config, "ep_size") or not _only_experts(distributed_config):
        return distributed_config
    model._tp_plan = dict.fromkeys(model._tp_plan or (), "kimi_k3_whole")
    return dataclasses.replace(distributed_config, tp_plan=None)


def check_fit(model: PreTrainedModel, distributed_config: Any) -> None:
    """Refuse a number of processes that does not divide the sizes it cuts, before a weight is read.

    Args:
        model: before it is cut, perhaps on the meta device.
        distributed_config: transformers' `DistributedConfig`, whose fields differ between releases.

    Raises:
        ValueError: with every misfit and its numbers.
    """
    config, ranks = model.config.get_text_config(decoder=True), distributed_config.tp_size or 1
    expert_ranks = getattr(distributed_config, "ep_size", ranks if distributed_config.enable_expert_parallel else 1)
    cuts = []
    if ranks > 1 and not _only_experts(distributed_config):
        kinds, feed_forward = set(config.layer_types), set(config.mlp_layer_types)
        if "linear_attention" in kinds:
            cuts.append(("linear_attn_config.num_heads", config.linear_attn_config["num_heads"], ranks, 1))
        if "full_attention" in kinds:
            cuts.append(("num_attention_heads", config.num_attention_heads, ranks, 1))
        if "dense" in feed_forward:
            cuts.append(("intermediate_size", config.intermediate_size, ranks, 1))
        if "sparse" in feed_forward and expert_ranks == 1:
            group = 1 if model.expert_storage == "float" else MXFP4_GROUP
            cuts.append(("moe_intermediate_size", config.moe_intermediate_size, ranks, group))
        if "sparse" in feed_forward and config.num_shared_experts:
            width = config.num_shared_experts * config.moe_intermediate_size
            cuts.append(("num_shared_experts * moe_intermediate_size", width, ranks, 1))
    if expert_ranks > 1:
        cuts.append(("num_experts", config.num_experts or 0, expert_ranks, 1))
    misfits = [
        f"{name} is {size}, which {count} processes cannot share"
        + (f" in whole MXFP4 groups of {unit}" if unit > 1 else " evenly")
        for name, size, count, unit in cuts
        if size == 0 or size % (count * unit)
    ]
    stages = distributed_config.pp_size or 1
    if stages > config.num_hidden_layers:
        misfits.append(f"num_hidden_layers is {config.num_hidden_layers}, too few for {stages} pipeline stages")
    if misfits:
        raise ValueError("; ".join(misfits) + ": use another number of processes")
    if stages > 1 and ranks > 1:  # transformers looks up the layers of all stages on each of them
        raise ValueError(f"tp_size={ranks} and pp_size={stages} cannot go together: choose one")
    if getattr(distributed_config, "dp_size", distributed_config.fsdp_size or 1) > 1:
        raise ValueError(
            "fsdp_size and dp_replicate_size would cut A_log as it lies in the file, where it is padded: load the "
            "model whole, then shard it with accelerate or kimi_k3.parallel.fully_shard_by_dtype"
        )
    if stages > 1 and not hasattr(model, "lm_head"):
        raise ValueError(f"{type(model).__name__} cannot be cut into pipeline stages: load the KimiK3ForCausalLM in it")


class PipelinePart(nn.Module):
    """One stage of a pipeline, for `torch.distributed.pipelining` or by hand.

    Args:
        model: a `KimiK3ForCausalLM` that was loaded with `DistributedConfig(pp_size=...)`.
    """

    def __init__(self, model: Any):
        super().__init__()
        self.model = model
        self.layers = [layer for layer in model.model.layers if not isinstance(layer, PipelineIdentityLayer)]
        self.dtype = self.layers[0].input_layernorm.weight.dtype

    @property
    def streams(self) -> int:
        """Tensors [B, T, hidden] that enter: the partial sum and the blocks that are finished before these layers."""
        block_size, first = self.layers[0].block_size, self.layers[0].layer_idx
        return 1 if block_size is None else 1 + -(-first // block_size)

    def forward(
        self,
        *streams: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cu_seq_lens_q: torch.Tensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """
        Args:
            streams: ids [B, T] for the first stage, for others what the one before returned.
            attention_mask, position_ids, cu_seq_lens_q, logits_to_keep: as of the whole model.

        Returns:
            (partial sum, *finished blocks), each [B, T, hidden]; of the last stage logits [B, T, vocabulary].
        """
        backbone, stage = self.model.model, self.model._pp_stage
        partial, *blocks = (backbone.embed_tokens(streams[0]),) if stage.pp_is_first_stage else streams
        packing = find_packing(attention_mask, position_ids, cu_seq_lens_q, partial, None)
        mask = causal_mask(backbone.config, partial, attention_mask, None, packing)
        partial, finished = run_layers(self.layers, partial, blocks, attention_mask=mask, packing=packing)
        if not stage.pp_is_last_stage:
            return (partial, *finished)
        positions = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return self.model.lm_head(backbone.output_norm(partial, *finished)[:, positions])


def pipeline_forward(model: Any) -> Callable[..., CausalLMOutputWithPast]:
    """The forward of a model of which this process has one stage: all call it with the same ids, all get the logits.

    For evaluation; gradients stop at the stage, so training goes through `torch.distributed.pipelining`.
    """
    part, stage = PipelinePart(model), model._pp_stage
    through = ("attention_mask", "position_ids", "logits_to_keep")

    @functools.wraps(model.forward)
    def forward(input_ids=None, use_cache=None, return_dict=None, **kwargs):
        if model.training and torch.is_grad_enabled():
            raise RuntimeError(
                "gradients stop at a stage here: train with a PipelineStage of torch.distributed.pipelining on "
                "PipelinePart(model)"
            )
        options = {name: kwargs.pop(name) for name in through if kwargs.get(name) is not None}
        refused = [name for name, value in kwargs.items() if value is not None and value is not False]
        if input_ids is None or refused or use_cache:
            refused = refused or ["use_cache" if use_cache else "inputs_embeds"]
            raise NotImplementedError(
                f"pipeline stages take input_ids, {', '.join(through)} and use_cache=False, not {', '.join(refused)}"
            )
        where = {"device": input_ids.device, "dtype": part.dtype}
        shape = (*input_ids.shape, model.config.hidden_size)
        streams = [input_ids]
        with torch.no_grad():
            if not stage.pp_is_first_stage:
                streams = [stage.communicate("recv_forward", shape=shape, **where) for _ in range(part.streams)]
            output = part(*streams, **options)
            if not stage.pp_is_last_stage:
                for stream in output:
                    stage.communicate("send_forward", tensor=stream, **where)
            output = stage.broadcast_from_last(output if stage.pp_is_last_stage else None, **where)
        return CausalLMOutputWithPast(logits=output)

    return forward
