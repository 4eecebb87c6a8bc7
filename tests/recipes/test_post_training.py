"""trl's trainers on a tiny model, through the recipe that docs/training.md shows."""

import functools
import math

import pytest
import torch
from transformers import AutoTokenizer

import tiny
from kimi_k3.recipes import post_training

trl = pytest.importorskip("trl")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model with packed experts, of the small checkpoint's vocabulary."""
    folder = tmp_path_factory.mktemp("tiny")
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    tokenizer = AutoTokenizer.from_pretrained(post_training.SMALL)
    assert special == {name: getattr(tokenizer, name) for name in special}
    tiny.model("km", vocab_size=2048, initializer_range=0.1, **tiny.PACKED, **special).save_pretrained(folder)
    return folder


# What a batch costs while the model and its reference are one: every preference is even.
EVEN = {"dpo": math.log(2), "kto": 0.5}


@pytest.mark.parametrize("kind", post_training.KINDS)
def test_every_trainer_runs(kind, folder):
    """Three steps lower the loss of the first batch; of GRPO, whose loss says nothing, they move the model."""
    trainer = post_training.trainer_of(kind, folder, steps=3)
    trainer.args.learning_rate = 1e-3
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    losses = []
    batch = next(iter(trainer.get_train_dataloader()))
    for train in (lambda: None, trainer.train):
        train()
        if not kind.startswith("grpo"):
            with torch.no_grad():
                losses.append(trainer.compute_loss(trainer.model, dict(batch)).item())
    values = post_training.curve(trainer, post_training.KINDS[kind][1])
    assert len(values) == 3 and all(map(math.isfinite, values))
    assert any(not torch.equal(p, before[name]) for name, p in trainer.model.named_parameters() if name in before)
    if losses:
        assert losses[1] < losses[0]
    if kind in EVEN:
        assert losses[0] == pytest.approx(EVEN[kind], abs=1e-5)


def test_a_training_step_takes_the_routing_of_its_rollout(folder):
    """What training computes does not depend on what its routers would choose; log-probabilities of the policy before
    the step, which trl computes for a second iteration, are replayed too."""
    tokenizer = AutoTokenizer.from_pretrained(post_training.SMALL)
    trainer = post_training.grpo_replay(str(folder), tokenizer, 2)
    trainer.num_iterations = 2
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    routed, completions = batch["routed_experts"], batch["completion_mask"]
    assert batch["prompt_mask"].sum(1).unique().numel() > 1, "prompts of several lengths"
    fed = torch.cat([batch["prompt_mask"], completions], dim=1).bool()
    last = torch.arange(fed.shape[1]) == fed.shape[1] - 1
    free = (routed < 0).all(-1).all(-1)
    assert torch.equal(free, ~fed | last), "padding, and what no step was fed"
    model = trainer.model
    old = batch["old_per_token_logps"]
    assert torch.equal(old[completions.bool()], trainer._replayed(batch)[completions.bool()])
    for layer in model.model.layers:
        if hasattr(layer, "block_sparse_moe"):
            layer.block_sparse_moe.gate.e_score_correction_bias.normal_()
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    logps = functools.partial(trainer._get_per_token_logps_and_entropies, input_ids=ids, attention_mask=fed.long())
    with torch.no_grad():
        unlike = logps(model, logits_to_keep=completions.shape[1])[0]
    real = completions.bool()
    torch.testing.assert_close(trainer._replayed(batch)[real], old[real], rtol=0, atol=1e-5)
    assert (unlike[real] - old[real]).abs().max() > 1e-3


def test_rollouts_without_routing_are_refused(folder):
    tokenizer = AutoTokenizer.from_pretrained(post_training.SMALL)
    with pytest.raises(ValueError, match="a rollout of its own"):
        trainer = functools.partial(post_training.ReplayGRPOTrainer, rollout_func=lambda prompts, trainer: {})
        post_training.grpo(str(folder), tokenizer, 2, trainer)
