"""Router replay in trl's GRPO: the training forward takes the experts that the rollout's tokens went to.

A rollout and the training forward sum up the same logits in other orders, and where two experts score almost alike the
order decides which one a token goes to. Such a token has another log-probability in training than when it was sampled
(`docs/training.md` measures by how much). Only the choice is repeated: scores and gradients are those of training.
"""

import functools

import torch
from torch.nn.utils.rnn import pad_sequence
from trl import GRPOTrainer
from trl.models import unwrap_model_for_generation


class ReplayGRPOTrainer(GRPOTrainer):
    """trl's `GRPOTrainer`, whose arguments these are, for a Kimi K3 model that samples with its own `generate`.

    Raises:
        ValueError: for a rollout function, vLLM, tools or environments, whose rollouts come without routing.
    """

    def __init__(self, *args, **kwargs):
        if kwargs.get("rollout_func") is not None:
            raise ValueError("router replay has a rollout of its own: leave rollout_func out")
        super().__init__(*args, **{**kwargs, "rollout_func": _rollout})
        if self.use_vllm or self.tools or self.environments:
            raise ValueError("router replay needs the routing of every token: leave vLLM, tools and environments out")

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        routing = [torch.as_tensor(example.pop("routed_experts")) for example in inputs]
        prompts = batch["prompt_ids"].shape[1]
        columns = prompts + batch["completion_ids"].shape[1]
        # padding, and the last token of a text, which no step of the rollout was fed
        routed = torch.full((len(routing), columns, *routing[0].shape[1:]), -1, dtype=routing[0].dtype)
        for row, (experts, mask) in enumerate(zip(routing, batch["prompt_mask"], strict=True)):
            start = prompts - int(mask.sum())
            routed[row, start : start + len(experts)] = experts
        batch["routed_experts"] = routed.to(batch["prompt_ids"].device)
        if "old_per_token_logps" in batch:
            batch["old_per_token_logps"] = self._replayed(batch)
        return batch

    @torch.no_grad()
    def _replayed(self, batch):
        """Log-probabilities [B, C] of the completions, a training batch at a time."""
        ids, mask = (
            torch.cat([batch[f"prompt_{kind}"], batch[f"completion_{kind}"]], dim=1) for kind in ("ids", "mask")
        )
        size, completions = self.args.per_device_train_batch_size, batch["completion_ids"].shape[1]
        found = []
        for rows in torch.arange(len(ids), device=ids.device).split(size):
            model = functools.partial(self.model, routed_experts=batch["routed_experts"][rows])
            found.append(self._get_per_token_logps_and_entropies(model, ids[rows], mask[rows], completions)[0])
        return torch.cat(found)

    def _compute_loss(self, model, inputs):
        return super()._compute_loss(functools.partial(model, routed_experts=inputs["routed_experts"]), inputs)


def _rollout(prompts: list, trainer: ReplayGRPOTrainer) -> dict[str, list]:
    """Of every prompt its tokens, the completion's, and the experts [T, MoE layers, k] of all of them but the last."""
    prompt_ids = trainer._tokenize_prompts(prompts)[0]
    device, padding = trainer.accelerator.device, trainer.processing_class.pad_token_id
    rows = [torch.tensor(ids, device=device) for ids in prompt_ids]
    ids = pad_sequence(rows, batch_first=True, padding_value=padding, padding_side="left")
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left")
    with (
        unwrap_model_for_generation(
            trainer.model_wrapped,
            trainer.accelerator,
            gather_deepspeed3_params=trainer.args.ds3_gather_for_generation,
            generation_kwargs=trainer.generation_kwargs,
            gradient_checkpointing_kwargs=trainer.args.gradient_checkpointing_kwargs,
        ) as model,
        torch.no_grad(),
    ):
        output = model.generate(
            input_ids=ids,
            attention_mask=mask,
            generation_config=trainer.generation_config,
            output_routed_experts=True,
            return_dict_in_generate=True,
        )
    columns = ids.shape[1]
    ends = torch.tensor(trainer.eos_token_ids, device=device)
    completion_ids, routed = [], []
    for row, prompt in enumerate(prompt_ids):
        completion = output.sequences[row, columns:]
        at = torch.isin(completion, ends).nonzero()
        completion = completion[: int(at[0]) + 1] if len(at) else completion
        completion_ids.append(completion.tolist())
        routed.append(output.routed_experts[row, columns - len(prompt) : columns + len(completion)].cpu())
    # trl uses log-probabilities of a rollout with vLLM only
    return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": None, "routed_experts": routed}
