"""Per-head Muon (Kimi K3 report, p. 10-11), with AdamW for all but matrices, and QK-clip (Kimi K2, arXiv 2507.20534).

Muon replaces the momentum of a matrix by the nearest semi-orthogonal matrix, U V^T of its singular value decomposition,
through a few Newton-Schulz iterations. What counts as *a matrix* is decided here, by one function:

    KDA q_proj, k_proj, v_proj          every head                    [head_dim, hidden]
    MLA q_b_proj (or q_proj)            every head                    [nope + rope, rank]
    MLA kv_b_proj                       every head's keys and values  [nope, rank], [v, rank]
    experts gate_up_proj, down_proj     every expert, gate and up     [M, D], [M, D], [D, M]
    every other Linear and the router   the whole weight

torch.optim.Muon takes one 2-D parameter at a time; here the blocks of parameters of one shape are one batch. The
update of a block is that of torch.optim.Muon with `adjust_lr_fn="match_rms_adamw"` (the tests compare them), so
learning rate and weight decay are those that one would use with AdamW.
"""

import math
import re

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils.parametrize import ParametrizationList

from ..graph_kimi_k3 import capturable

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
EPS = 1e-7
MOST_AT_ONCE = 2**24  # elements of parameters whose steps are computed together: bounds the extra memory
# Modules whose parameters of two or more dimensions are tables, taps or vectors, not maps of one space to another.
_NO_MAP = ("Embedding", "Conv2d", "KimiK3ShortConvolution", "KimiK3PseudoQuery", "KimiK3PositionTable")


def muon_groups(model: nn.Module, weight_decay: float = 0.1) -> list[dict]:
    """Parameter groups for `PerHeadMuon`: every parameter that trains is in exactly one.

    Args:
        model: a Kimi K3 model; frozen parameters are left out.
        weight_decay: for matrices, embeddings and the head. Norms, biases, `A_log`, `dt_bias`, convolutions and the
            queries of the mix over depth are not decayed.

    Returns:
        groups with `algorithm` "muon" (one for each `blocks`, see below) or "adamw". `blocks` are the row counts of the
        matrices that repeat down the rows of a parameter, None for one matrix (or one for each index of a 3-D one).

    Raises:
        ValueError: for a parameter that no rule covers.
    """
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    groups, seen = {}, set()
    for prefix, module in model.named_modules():
        # A copy that an adapter trains whole (`modules_to_save`) stands in the place of the module that it copies.
        parent, _, own_name = re.sub(r"\.modules_to_save\.[^.]+", "", prefix).rpartition(".")
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            # All bases: sharding makes a subclass with another name.
            kinds, owner, key = {base.__name__ for base in type(module).__mro__}, module, name
            if isinstance(module, nn.Linear):
                owner, key = model.get_submodule(parent), own_name
            elif isinstance(module, ParametrizationList):  # the weight under a rounding or the like
                owner, key = model.get_submodule(parent.rpartition(".")[0]), own_name
            blocks_of = _blocks(owner)
            if parameter.ndim <= 1 or not kinds.isdisjoint(_NO_MAP):
                group = "adamw", None, weight_decay if "Embedding" in kinds else 0.0
            elif output is not None and parameter is output.weight:
                group = "adamw", None, weight_decay
            elif key in blocks_of or isinstance(module, nn.Linear):
                group = "muon", blocks_of.get(key), weight_decay
            else:
                raise ValueError(
                    f"no rule says how to optimize {prefix}.{name} {list(parameter.shape)} of "
                    f"{type(module).__name__}: freeze it, or put it into a group of its own"
                )
            groups.setdefault(group, []).append(parameter)
    return [
        {"params": params, "algorithm": algorithm, "blocks": blocks, "weight_decay": decay}
        for (algorithm, blocks, decay), params in sorted(groups.items(), key=lambda item: item[0][0], reverse=True)
    ]


def _blocks(module: nn.Module) -> dict[str, tuple[int, ...] | None]:
    """Names inside `module` -> row counts of the matrices that repeat down the rows of that parameter's weight."""
    # Recognised by their attributes and not by class: a folder's remote code is a second copy of the class.
    if hasattr(module, "A_log"):
        return dict.fromkeys(("q_proj", "k_proj", "v_proj"), (module.head_dim,))
    if hasattr(module, "kv_b_proj"):
        query = "q_b_proj" if hasattr(module, "q_b_proj") else "q_proj"
        return {query: (module.qk_dim,), "kv_b_proj": (module.nope_dim, module.v_dim)}
    if torch.is_tensor(getattr(module, "gate_up_proj", None)):
        width = module.gate_up_proj.shape[1] // 2
        return {"gate_up_proj": (width, width), "down_proj": None}
    if "e_score_correction_bias" in module._buffers:
        return {"weight": None}
    return {}


class PerHeadMuon(torch.optim.Optimizer):
    """Muon for the matrices and AdamW for the rest, as one optimizer that schedulers and `Trainer` can drive.

    Args:
        groups: those of `muon_groups(model)`.
        lr: of both algorithms; the update of a matrix is scaled to the size of AdamW's (arXiv 2502.16982, eq. 4).
        momentum: of Muon, with Nesterov's look-ahead.
        betas, eps: of AdamW.
        ns_steps: Newton-Schulz iterations.
    """

    def __init__(
        self,
        groups: list[dict],
        lr: float = 1e-3,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        ns_steps: int = 5,
    ):
        for group in groups:
            if "algorithm" not in group:
                raise ValueError("PerHeadMuon takes the groups of muon_groups(model), not bare parameters")
        super().__init__(groups, {"lr": lr, "momentum": momentum, "ns_steps": ns_steps})
        adamw = [group for group in self.param_groups if group["algorithm"] == "adamw"]
        self._adamw = torch.optim.AdamW(adamw, lr=lr, betas=betas, eps=eps) if adamw else None

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["algorithm"] == "muon":
                alike = {}
                for parameter in group["params"]:
                    if parameter.grad is None:
                        continue
                    if isinstance(parameter, DTensor):
                        self._update_sharded(parameter, group)
                    else:
                        kind = parameter.shape, parameter.dtype, parameter.device
                        alike.setdefault(kind, []).append(parameter)
                for (shape, *_), parameters in alike.items():
                    at_once = max(MOST_AT_ONCE // shape.numel(), 1)
                    for start in range(0, len(parameters), at_once):
                        self._update(parameters[start : start + at_once], group)
        if self._adamw is not None:
            # Both optimizers share one state and one list of groups: loading a state_dict puts new ones into `self`.
            self._adamw.param_groups = [group for group in self.param_groups if group["algorithm"] == "adamw"]
            self._adamw.state = self.state
            self._adamw.step()
        return loss

    def _momentum(self, parameter):
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad)
        return state["momentum_buffer"]

    def _update(self, parameters, group):
        """Update parameters of one shape, their matrices in one batch: on a GPU a small model waits for launches."""
        lr, grads = group["lr"], [parameter.grad for parameter in parameters]
        momenta = [self._momentum(parameter) for parameter in parameters]
        torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
        updates = torch._foreach_lerp(grads, momenta, group["momentum"])
        torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
        weights = zip(*(matrices(parameter, group["blocks"]) for parameter in parameters), strict=True)
        parts = zip(*(matrices(update, group["blocks"]) for update in updates), strict=True)
        for weight, part in zip(weights, parts, strict=True):
            step = orthogonalize(torch.cat(part), group["ns_steps"])
            scale = -lr * 0.2 * math.sqrt(max(step.shape[-2:]))
            torch._foreach_add_(weight, step.split([len(one) for one in weight]), alpha=scale)

    def _update_sharded(self, parameter, group):
        """Every process computes the whole step and keeps its part."""
        lr, grad = group["lr"], parameter.grad
        momentum = self._momentum(parameter).lerp_(grad, 1 - group["momentum"])
        whole = grad.lerp(momentum, group["momentum"]).full_tensor()
        parameter.mul_(1 - lr * group["weight_decay"])
        target = torch.zeros_like(whole, dtype=torch.float32)
        for weight, part in zip(matrices(target, group["blocks"]), matrices(whole, group["blocks"]), strict=True):
            weight.add_(orthogonalize(part, group["ns_steps"]), alpha=-lr * 0.2 * math.sqrt(max(part.shape[-2:])))
        mesh, placements = parameter.device_mesh, parameter.placements
        parameter.add_(distribute_tensor(target, mesh, placements, src_data_rank=None))


def matrices(parameter: torch.Tensor, blocks: tuple[int, ...] | None) -> tuple[torch.Tensor, ...]:
    """The matrices of a parameter as views [n, rows, columns], one for each row count in `blocks`."""
    if blocks is None:
        return (parameter if parameter.ndim == 3 else parameter[None],)
    return parameter.view(-1, sum(blocks), parameter.shape[-1]).split(blocks, dim=1)


def orthogonalize(matrix: torch.Tensor, steps: int) -> torch.Tensor:
    """[n, rows, columns] -> U S V^T of each in bfloat16, with S near 1 (the quintic iteration of torch.optim.Muon)."""
    a, b, c = NEWTON_SCHULZ
    x = matrix.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=EPS)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class QKClip:
    """Keeps the attention logits of MLA layers under a threshold by shrinking the weights of the heads that exceed it.

    After the optimizer's step, for every head with largest logit S > tau over the tokens since the last call and
    gamma = tau / S (Kimi K2, algorithm 1):

        q_nope, k_nope *= sqrt(gamma)        q_rope *= gamma        (the shared k_rope belongs to all heads)

    Measuring costs one more product of queries and keys a training forward. Recomputation under gradient checkpointing,
    evaluation and forwards that continue a cache are not measured; training forwards inside `context_parallel` and
    weights that are cut over processes are refused (ValueError).

    Args:
        model: a Kimi K3 model, or anything that holds one.
        threshold: tau.
    """

    ROWS = 512  # queries at a time: only [B, H, ROWS, T] logits are in memory at once

    def __init__(self, model: nn.Module, threshold: float = 100.0):
        self.threshold = threshold
        self.layers = [module for module in model.modules() if hasattr(module, "kv_b_proj")]
        if not self.layers:
            raise ValueError(f"{type(model).__name__} has no MLA layer")
        for layer in self.layers:
            for projection in (_query_projection(layer), layer.kv_b_proj):
                if type(projection) is not nn.Linear:
                    raise ValueError(f"QK-clip scales weights, which an adapter hides: {type(projection).__name__}")
                if isinstance(projection.weight, DTensor):
                    raise ValueError("QK-clip scales whole weights, and these are cut over processes")
        device = self.layers[0].kv_b_proj.weight.device
        self._largest = torch.full((len(self.layers), self.layers[0].num_heads), -torch.inf, device=device)
        self._handles = []
        for index, layer in enumerate(self.layers):
            self._handles += self._watch(index, layer)

    def close(self) -> None:
        """Stop measuring."""
        while self._handles:
            self._handles.pop().remove()

    def _watch(self, index, layer):
        seen = {}

        def keep(name):
            return capturable(lambda module, args, output: seen.__setitem__(name, output.detach()))

        @torch.no_grad()
        def measure(module, args, kwargs, output):
            recomputing = torch._C._current_graph_task_id() != -1  # inside a backward pass
            # a forward that continues a cache has keys of earlier tokens, or folds them into the query
            whole = "key_value" in seen and seen["key_value"].shape[1] == seen["query"].shape[1]
            if module.training and kwargs.get("context") is not None:
                raise ValueError("QK-clip measures whole rows, and these are cut over processes (context_parallel)")
            if module.training and whole and not recomputing:
                sequence = _sequences(kwargs.get("packing"), args[0].shape[:2], seen["query"].shape[:2])
                largest = self._largest_logits(module, **seen, sequence=sequence)
                torch.maximum(self._largest[index], largest.to(self._largest), out=self._largest[index])
            seen.clear()

        return [
            _query_projection(layer).register_forward_hook(keep("query")),
            layer.kv_a_proj_with_mqa.register_forward_hook(keep("latent")),
            layer.kv_b_proj.register_forward_hook(keep("key_value")),
            layer.register_forward_hook(capturable(measure), with_kwargs=True),
        ]

    def _largest_logits(self, layer, query, latent, key_value, sequence):
        """[H]: the largest logit of every head over the pairs that attend.

        The projections are [B, T, ...]; `sequence` [B, T] numbers the sequence of every token, -1 at padding, and is
        None where each row is one. Not the attention mask: its form is that of the attention implementation.
        """
        batch, length, _ = query.shape
        query = query.view(batch, length, layer.num_heads, layer.qk_dim).transpose(1, 2)
        key = key_value.view(batch, length, layer.num_heads, -1).transpose(1, 2)[..., : layer.nope_dim]
        shared = latent[:, None, :, layer.kv_rank :].expand(-1, layer.num_heads, -1, -1)
        key = torch.cat([key, shared], dim=-1)
        largest = query.new_full((layer.num_heads,), -torch.inf)
        for start in range(0, length, self.ROWS):
            rows = slice(start, start + self.ROWS)
            logits = query[:, :, rows] @ key.transpose(2, 3) * layer.scaling
            apart = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu(start + 1)
            if sequence is not None:
                asking = sequence[:, None, rows, None]
                apart = apart | (asking != sequence[:, None, None]) | (asking < 0)
            largest = torch.maximum(largest, logits.masked_fill_(apart, -torch.inf).amax(dim=(0, 2, 3)))
        return largest

    @torch.no_grad()
    def step(self) -> torch.Tensor:
        """Shrink the heads that exceeded the threshold, over all processes.

        Returns:
            [MLA layers, H] float32 on the CPU: the largest logits since the last call, -inf if there was no forward.
        """
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(self._largest, op=dist.ReduceOp.MAX)
        for layer, largest in zip(self.layers, self._largest, strict=True):
            # a head without positive logits has nothing to shrink
            gamma = (self.threshold / largest.clamp(min=self.threshold)).to(layer.kv_b_proj.weight.device)
            query = _query_projection(layer).weight.view(layer.num_heads, layer.qk_dim, -1)
            key_value = layer.kv_b_proj.weight.view(layer.num_heads, layer.nope_dim + layer.v_dim, -1)
            gamma = gamma.to(query.dtype)[:, None, None]
            query[:, : layer.nope_dim] *= gamma.sqrt()
            query[:, layer.nope_dim :] *= gamma
            key_value[:, : layer.nope_dim] *= gamma.sqrt()
        measured = self._largest.to("cpu", torch.float32, copy=True)
        self._largest.fill_(-torch.inf)
        return measured


def _sequences(packing, given, computed):
    """[B, T] number of the sequence of every token, -1 at padding; None where each row of the forward is one.

    Args:
        packing: of the forward, or None.
        given: (B, T) of the forward.
        computed: (B, T) of the projections; under flash kernels one row of the real tokens.
    """
    if packing is None:
        return None
    tokens = given.numel() if packing.order is None else len(packing.order)
    numbers = torch.repeat_interleave(packing.cu_seqlens.diff(), output_size=tokens)
    if packing.padding is not None:
        numbers = numbers.masked_fill(packing.padding.flatten(), -1)
    if given == computed and packing.order is not None:
        numbers = numbers.new_full((given.numel(),), -1).index_copy(0, packing.order, numbers)
    return numbers.view(computed)


def _query_projection(layer: nn.Module) -> nn.Module:
    return layer.q_b_proj if hasattr(layer, "q_b_proj") else layer.q_proj
