"""Router balance: Quantile Balancing (Kimi K3 report, p. 8-9, Algorithm 1 and appendices C, D).

A router chooses the top k of s + b, with s [E] the scores of a token, in [0, 1], and b the selection bias. After a
step over m tokens every expert's bias becomes the one with which its fair share of them, m k / E, would have chosen it:

    alpha_i = (k+1)-th largest of s_i + b          the first k are the routes taken
    r_ij    = alpha_i - s_ij                       the bias that puts expert j exactly at token i's cutoff
    b_j     = (k / E)-quantile over tokens of r_:j, minus the mean over experts

The quantile is read from a histogram of integer counts, so a step is the same however its tokens are split over
micro-batches and processes, and it costs one all-reduce.
"""

import torch
import torch.distributed as dist
from torch import nn
from transformers import TrainerCallback
from transformers.utils import logging

from ..graph_kimi_k3 import capturable
from ..kernels.router import expert_scores

logger = logging.get_logger(__name__)

BINS = 1000


class RouterRecorder:
    """Gives a rule the router scores of every training forward, once for each real token.

    Padding is left out, by the forward's packing; so are forwards in evaluation mode, and the recomputation
    under gradient checkpointing, which would count a token twice.

    Args:
        model: a Kimi K3 model, or anything that holds one.

    Attributes:
        is_capturable: of the class, whether all that `record` does are operations on tensors that stay where they are.
    """

    is_capturable = False

    def __init__(self, model: nn.Module):
        # Recognised by their attributes and not by class: a folder's remote code is a second copy of the class.
        layers = [layer for layer in model.modules() if hasattr(layer, "block_sparse_moe")]
        if not layers:
            raise ValueError(f"{type(model).__name__} has no MoE layer whose router could be balanced")
        # Those that run. An adapter that trains the router whole (`modules_to_save`) runs a copy of it.
        self.routers = [_routers(layer)[0] for layer in layers]
        config = self.routers[0].config
        groups = config.num_expert_group or 1
        if config.use_grouped_topk and groups != (config.topk_group or 1):
            raise ValueError(
                f"routing is limited to {config.topk_group} of {groups} groups of experts (num_expert_group, "
                "topk_group): balancing is defined for routing over all experts"
            )
        self.num_experts, self.top_k = config.num_experts, config.num_experts_per_token
        if self.top_k >= self.num_experts:
            raise ValueError(f"every token goes to all {self.num_experts} experts, so there is nothing to balance")
        self._handles = [
            layer.register_forward_hook(self._hook(index), with_kwargs=True) for index, layer in enumerate(layers)
        ]
        self._ran = list(self.routers)  # in the last forward, whoever ran it
        for index, layer in enumerate(layers):
            self._handles += [router.register_forward_hook(self._notice(index)) for router in _routers(layer)]

    def close(self) -> None:
        """Stop recording."""
        while self._handles:
            self._handles.pop().remove()

    def take(self, index: int, router: nn.Module) -> None:
        """From here on this router runs in MoE layer number `index`."""
        self.routers[index] = router

    def record(self, index: int, scores: torch.Tensor, counted: torch.Tensor | None) -> None:
        """Take in the scores [T, E] of MoE layer number `index`, where `counted` [T] is True; None: all of them."""
        raise NotImplementedError

    def _notice(self, index):
        def hook(router, args, output):
            self._ran[index] = router

        return capturable(hook)

    def _hook(self, index):
        @torch.no_grad()
        def hook(layer, args, kwargs, output):
            recomputing = torch._C._current_graph_task_id() != -1  # inside a backward pass
            # Without its adapter a model runs for comparison, as the reference of preference training.
            refers = getattr(layer.block_sparse_moe.gate, "disable_adapters", False)
            if not layer.training or recomputing or refers:
                return
            if self._ran[index] is not self.routers[index]:
                self.take(index, self._ran[index])
            logits, packing = output[3], kwargs.get("packing")
            real, padding = getattr(packing, "order", None), getattr(packing, "padding", None)
            scores = expert_scores(logits if real is None else logits[real], self.routers[index].activation)
            self.record(index, scores, None if padding is None else ~padding.flatten())

        return capturable(hook) if self.is_capturable else hook


def _routers(layer: nn.Module) -> list[nn.Module]:
    """The modules with a selection bias: one, or below an adapter's wrapper the frozen one and then its copies."""
    return [m for m in layer.block_sparse_moe.gate.modules() if "e_score_correction_bias" in m._buffers]


class QuantileBalancer(RouterRecorder):
    """Balances the experts of a model; call `step()` once after every optimizer step.

    Nothing but the selection biases changes, and only in `step()`: inference with a trained model uses the last ones.
    They are part of the checkpoint and the whole state of the balancer between steps. Every process of a distributed
    run computes the same biases.

    Args:
        model: a Kimi K3 model, or anything that holds one.
        ema: share of the old bias that a step keeps, in [0, 1); 0 is the published rule.
    """

    is_capturable = True

    def __init__(self, model: nn.Module, ema: float = 0.0):
        if not 0 <= ema < 1:
            raise ValueError(f"ema must be at least 0 and below 1, not {ema}")
        super().__init__(model)
        gates = [layer.block_sparse_moe.gate for layer in model.modules() if hasattr(layer, "block_sparse_moe")]
        if getattr(model, "peft_config", None) and not all(hasattr(gate, "modules_to_save") for gate in gates):
            logger.warning_once(
                "the selection biases that balancing moves are those of the base model, and the adapter's folder does "
                "not hold them: LoraConfig(..., modules_to_save=['gate']) trains routers whole and saves them with it"
            )
        self.ema = ema
        # [layers, E, BINS + 1]: the histogram of the margins, then how often the expert was chosen, in one tensor so
        # that one all-reduce sums both.
        self._counts = torch.zeros(
            len(self.routers),
            self.num_experts,
            BINS + 1,
            dtype=torch.int32,
            device=self.routers[0].e_score_correction_bias.device,
        )

    def take(self, index: int, router: nn.Module) -> None:
        super().take(index, router)
        self._counts[index].zero_()

    def record(self, index: int, scores: torch.Tensor, counted: torch.Tensor | None) -> None:
        bias = self.routers[index].e_score_correction_bias.to(scores.dtype)
        best = (scores + bias).topk(self.top_k + 1, dim=-1)
        low, width = _bins(bias)
        margins = best.values[:, -1:] - scores
        # clamped as integers: a score that is not a number must not become an index out of range here, but be
        # reported by the caller's own check of the loss
        bins = ((margins - low) / width).floor_().long().clamp_(0, BINS - 1).T
        counts = self._counts[index]
        ones = counts.new_ones(len(scores)) if counted is None else counted.to(counts)
        counts.scatter_add_(1, bins.to(counts.device), ones.expand(bins.shape))
        # not by `bincount`, for which the host waits
        chosen = best.indices[:, : self.top_k].T.to(counts.device)
        counts[:, BINS].scatter_add_(0, chosen.flatten(), ones.repeat(self.top_k))

    @torch.no_grad()
    def step(self) -> torch.Tensor:
        """Move the selection biases by what was recorded since the last call, over all processes.

        Returns:
            [MoE layers] float32 on the CPU: load of the fullest expert over the mean load, before the move.

        Raises:
            RuntimeError: if no process recorded a token.
        """
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(self._counts)
        loads = self._counts[..., BINS]
        worst = (loads.amax(-1) / loads.double().mean(-1)).float().cpu()
        if worst.isnan().all():
            raise RuntimeError("no training forward was recorded since the last step: is the model in training mode?")
        biases = torch.stack([router.e_score_correction_bias.to(loads.device) for router in self.routers])
        moved = self._quantiles(self._counts[..., :BINS], biases)
        moved = moved - moved.mean(-1, keepdim=True)
        for router, bias in zip(self.routers, self.ema * biases + (1 - self.ema) * moved, strict=True):
            router.e_score_correction_bias.copy_(bias)
        self._counts.zero_()
        return worst

    def _quantiles(self, histograms: torch.Tensor, biases: torch.Tensor) -> torch.Tensor:
        """The (k / E)-quantiles [layers, E] of every expert's margins, linear within a bin.

        Args:
            histograms: [layers, E, BINS] of the margins.
            biases: [layers, E], under which they were counted.
        """
        low, width = _bins(biases)
        cumulative = histograms.cumsum(-1, dtype=torch.int64)
        routes = cumulative[:, :1, -1:] * self.top_k  # [layers, 1, 1]
        reached = -(-routes).div(self.num_experts, rounding_mode="floor")
        index = (cumulative < reached).sum(-1, keepdim=True)  # the first bin in which the count reaches the target
        inside = histograms.gather(-1, index).double()
        before = cumulative.gather(-1, index) - inside
        share = ((routes.double() / self.num_experts - before) / inside).clamp(0, 1)
        return low.double() + (index + share)[..., 0] * width.double()


def _bins(bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Lower end and width of the bins [..., 1]: a cutoff lies in [min b, max b + 1], a score in [0, 1]."""
    bias = bias.to(torch.promote_types(bias.dtype, torch.float32))
    low, high = bias.amin(-1, keepdim=True) - 1, bias.amax(-1, keepdim=True) + 1
    return low, (high - low) / BINS


class QuantileBalancerCallback(TrainerCallback):
    """Balances the experts during a `Trainer` run and adds `router_max_load` to the Trainer's log.

    `router_max_load` is the load of the fullest expert over the mean load, in the worst layer of the last step.

    Args:
        ema: as in `QuantileBalancer`.
    """

    def __init__(self, ema: float = 0.0):
        self.ema = ema
        self.balancer = None
        self.max_load = None

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.balancer = QuantileBalancer(model, self.ema)

    def on_step_end(self, args, state, control, **kwargs):
        self.max_load = self.balancer.step().max().item()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.balancer is None or self.max_load is None or "loss" not in logs:
            return
        logs["router_max_load"] = self.max_load
        state.log_history[-1]["router_max_load"] = self.max_load  # the Trainer has already made its copy

    def on_train_end(self, args, state, control, **kwargs):
        self.balancer.close()
        self.balancer = None
