"""Captured training steps: losses, gradients and weights of them without a graph; on a GPU for real.

Without a GPU a graph is a stand-in that runs the captured function again on the very tensors it was captured with, and
writes losses and new gradients to where they were after the first run, as a replay does.
"""

import json
import logging

import pytest
import torch
from transformers import Trainer, TrainingArguments, masking_utils
from transformers.utils import import_utils

import tiny
from byte_model import byte_tokenizer
from kimi_k3.training import (
    CapturedStep,
    CapturedTraining,
    QKClip,
    QuantileBalancer,
    QuantileBalancerCallback,
    captured,
)

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
# Kernels of a GPU that count the tokens of experts on the device take bfloat16 alone.
DTYPES = {"dense": torch.float32, "moe": torch.bfloat16 if ON_GPU else torch.float32}
MODELS = {"dense": tiny.DENSE, "moe": {}}


class StandIn:
    """A graph that is run in Python; a capture computes nothing."""

    state = ()  # tensors that the captured function writes, beside gradients

    def __init__(self, model, inputs, run, memory):
        self._model, self._inputs, self._run = model, inputs, run
        self.parameters = [x for x in model.parameters() if x.requires_grad]
        self.before = [x.grad for x in self.parameters]
        kept = [x for x in (*self.state, *self.before) if x is not None]
        values = [x.clone() for x in kept]
        self.outputs = run(**inputs).fill_(torch.nan)
        self.after = [x.grad for x in self.parameters]
        for grad, was in zip(self.after, self.before, strict=True):
            if grad is not was:
                grad.fill_(torch.nan)
        for x, value in zip(kept, values, strict=True):
            x.copy_(value)

    def replay(self):
        held = [x.grad for x in self.parameters]
        for x, grad in zip(self.parameters, self.before, strict=True):
            x.grad = grad
        loss = self._run(**self._inputs)
        self.outputs.copy_(loss)
        for x, into, grad in zip(self.parameters, self.after, held, strict=True):
            if into is not None and x.grad is not into:
                into.copy_(x.grad)
            x.grad = grad


class Captures:
    """Counts captures and replays."""

    def __init__(self, monkeypatch):
        self.captured, self.replayed = 0, 0
        graph = captured.Graph if ON_GPU else StandIn

        class Counted(graph):
            def __init__(counted, *arguments):
                super().__init__(*arguments)
                self.captured += 1

            def replay(counted):
                super().replay()
                self.replayed += 1

        monkeypatch.setattr(captured, "Graph", Counted)
        if not ON_GPU:
            monkeypatch.setattr(captured, "has_graphs", lambda device: True)
            monkeypatch.setattr(captured, "GraphMemory", lambda device: None)


@pytest.fixture
def captures(monkeypatch):
    return Captures(monkeypatch)


def build(kind="dense", seed=0, **changes):
    few = {"num_experts": 4, "num_experts_per_token": 2}
    model = tiny.model("kmk", seed, **few | MODELS[kind] | changes)
    return model.to(DEVICE, DTYPES[kind]).train()


def tokens(rows=2, length=24, seed=0):
    return torch.randint(3, tiny.VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


class Plain:
    """A loop without graphs, on a model of its own."""

    def __init__(self, model):
        self.model = model

    def __call__(self, **batch):
        batch = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in batch.items()}
        loss = self.model(use_cache=False, **batch).loss
        loss.backward()
        return loss.detach()


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def trained(model, step, batches, micro=1, observe=lambda at: None):
    """Losses of every call and, after every `micro` calls, a step at a learning rate of its own."""
    optimizer, losses = optimizer_of(model), []
    for at, batch in enumerate(batches, start=1):
        losses.append(step(**batch))
        if at % micro == 0:
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 / at
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        observe(at)
    return torch.stack(losses), model.state_dict()


def assert_same(got, expected):
    """To the bit: the same kernels on the same values."""
    assert torch.equal(got[0], expected[0]) and got[0].isfinite().all()
    for name, x in expected[1].items():
        assert torch.equal(got[1][name], x), name


def messages(caplog):
    return [record.message for record in caplog.records if "without a CUDA graph" in record.message]


def plain_batches(count, **shape):
    return [{"input_ids": ids, "labels": ids} for ids in (tokens(seed=seed, **shape) for seed in range(count))]


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("kind", MODELS)
def test_losses_and_weights_are_those_without_graphs(captures, kind, micro):
    """Over steps of other texts and learning rates, with gradients that add up over calls."""
    batches, (model, other) = plain_batches(8), (build(kind), build(kind))
    assert_same(trained(model, CapturedStep(model), batches, micro), trained(other, Plain(other), batches, micro))
    # of eight calls the first of a kind runs as it is, and those that add to gradients that no graph wrote
    assert (captures.captured, captures.replayed) == ((1, 7) if micro == 1 else (2, 5))


def test_batches_of_several_shapes_write_to_the_same_gradients(captures):
    """The first graph brings the gradients; graphs of other shapes write to these, and add to what others wrote."""
    few, many = plain_batches(8), plain_batches(8, rows=1, length=31)
    batches = [few[0], many[0], few[1], many[1], few[2], many[2], few[3], many[3], many[4], few[4], many[5], few[5]]
    model, other = build(), build()
    for micro in (1, 2):
        step = CapturedStep(model)
        assert_same(trained(model, step, batches, micro), trained(other, Plain(other), batches, micro))
    # for micro 2 one of each shape that begins, and one that adds: the other comes to gradients of a graph only once
    assert captures.captured == 2 + 3


def test_balancing_and_clipping_of_logits_are_captured_with_their_hooks(captures, monkeypatch):
    def observed(run):
        model = build("moe")
        balancer, clip, seen = QuantileBalancer(model), QKClip(model, threshold=0.02), []
        monkeypatch.setattr(StandIn, "state", (balancer._counts, clip._largest))
        found = trained(model, run(model), plain_batches(5), 1, lambda _: seen.extend((balancer.step(), clip.step())))
        return found, seen

    (got, seen), (expected, expected_seen) = observed(CapturedStep), observed(Plain)
    assert_same(got, expected)
    assert all(map(torch.equal, seen, expected_seen)) and captures.replayed == 4
    assert min(x.max() for x in seen[1::2]) > 0.02  # heads were shrunk


def test_a_run_on_text_is_captured(captures, monkeypatch, tmp_path):
    """Its rows are filled up to a few shapes; padding changes no loss, gradient, load or largest logit."""
    text_run = pytest.importorskip("kimi_k3.training.text_run", reason="runs on text need datasets")
    texts = [" ".join(["the cat sat on a mat"] * (1 + seed % 5)) + f" {seed}" for seed in range(60)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    metrics = []
    for graphs in (True, False):
        model = build("moe", vocab_size=257, eos_token_id=0, bos_token_id=None, pad_token_id=None)
        # In float64, at a rate that moves nothing by as much as a rounding: sums of padded rows are in another order.
        model.to(torch.float32 if ON_GPU else torch.float64)
        run = text_run.TextRun([str(tmp_path / "text.jsonl")], 5, 130, 2, 1e-13, 0, False)
        with monkeypatch.context() as patch:
            training = text_run.TextTraining(model, byte_tokenizer(), run, tmp_path / str(graphs), 100, graphs)
            patch.setattr(StandIn, "state", (training.balancer._counts, training.clip._largest))
            training.train()
        log = (tmp_path / str(graphs) / "metrics.jsonl").read_text().splitlines()
        metrics.append([json.loads(line) for line in log])
    close = {"rel": 5e-2} if ON_GPU else {"rel": 1e-9}  # a GPU computes in bfloat16, in other orders for other shapes
    for got, expected in zip(*metrics, strict=True):
        del got["seconds"], expected["seconds"]
        assert got == pytest.approx(expected, **close)
    assert captures.replayed > 3


class CapturedTrainer(CapturedTraining, Trainer):
    pass


def collate(rows):
    ids = torch.stack(rows)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


@pytest.mark.parametrize("accumulation, mixed", [(1, False), (2, True)], ids=["each", "two-passes-mixed-precision"])
def test_a_trainer_is_captured_and_resumed(captures, monkeypatch, tmp_path, accumulation, mixed):
    """Its losses, norms, loads and weights are those of a plain one, and of one that went on from a checkpoint."""

    def train(trainer_class, folder, resume=None, seed=0):
        model, balancing = build("moe", seed), QuantileBalancerCallback()
        model = model.float() if mixed else model
        monkeypatch.setattr(StandIn, "state", property(lambda _: [balancing.balancer._counts]))
        arguments = TrainingArguments(
            str(tmp_path / folder), per_device_train_batch_size=2, gradient_accumulation_steps=accumulation,
            max_steps=8, save_steps=4, logging_steps=1, learning_rate=1e-2, max_grad_norm=0.5, seed=1,
            use_cpu=not ON_GPU, report_to=[], disable_tqdm=True, bf16=mixed,
        )  # fmt: skip
        trainer = trainer_class(
            model, arguments, train_dataset=list(tokens(40)), data_collator=collate, callbacks=[balancing]
        )
        trainer.train(resume_from_checkpoint=resume and str(tmp_path / resume))
        log = [[x[name] for name in ("loss", "grad_norm", "router_max_load")] for x in trainer.state.log_history[:-1]]
        return torch.tensor(log), model.state_dict()

    expected = train(Trainer, "plain")
    assert captures.captured == 0
    assert_same(train(CapturedTrainer, "captured"), expected)
    # Twice: the first checkpoint writes class and dtype into the configuration, which decides what a forward computes.
    assert (captures.captured, captures.replayed) == ((2, 6) if accumulation == 1 else (4, 10))
    log, weights = train(CapturedTrainer, "resumed", "captured/checkpoint-4", seed=7)
    assert_same((log, weights), expected)


def test_what_changes_between_steps_is_captured_anew(captures):
    """Moved and frozen weights, a setting, an adapter's place, what is watched; loaded values are read by the graph."""
    model, other = build(), build()
    step, plain, (batch,) = CapturedStep(model), Plain(other), plain_batches(1)

    def moved(model):
        layer = model.model.layers[0].self_attn.o_proj
        layer.weight = torch.nn.Parameter(layer.weight.detach() * -1.5)

    def frozen(model):
        model.lm_head.requires_grad_(False)

    def set_otherwise(model):
        model.model.norm.eps = 0.3

    def replaced(model):
        model.model.layers[1].mlp = torch.nn.Sequential(model.model.layers[1].mlp, torch.nn.Tanh())

    def loaded(model):
        model.load_state_dict({name: x * 1.25 for name, x in model.state_dict().items()})

    def watched(model):
        QKClip(model)

    step(**batch)
    model.zero_grad()
    for change, is_new in ((moved, 1), (frozen, 1), (set_otherwise, 1), (replaced, 1), (loaded, 0), (watched, 1)):
        captures.captured = 0
        for each in (model, other):
            change(each)
        for _ in range(3):
            assert torch.equal(step(**batch), plain(**batch))
            for (name, x), y in zip(model.named_parameters(), other.parameters(), strict=True):
                assert (x.grad is None) == (y.grad is None) and (x.grad is None or torch.equal(x.grad, y.grad)), name
            for each in (model, other):
                each.zero_grad()
        assert captures.captured == is_new, change.__name__


def hooked(model):
    model.model.norm.register_forward_hook(lambda *_: None)


def hooked_backward(model):
    model.model.norm.register_full_backward_hook(lambda *_: None)


def hooked_weight(model):
    model.lm_head.weight.register_post_accumulate_grad_hook(lambda _: None)


def checkpointed(model):
    model.gradient_checkpointing_enable({"use_reentrant": False})


def checkpointed_alike(model):
    model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (hooked, "model.norm has a hook"),
        (hooked_backward, "model.norm has"),
        (hooked_weight, "a parameter has a hook"),
        (checkpointed, "'preserve_rng_state': False"),
        (checkpointed_alike, None),
    ],
)
def test_what_cannot_be_captured_says_why_once(captures, caplog, change, reason):
    model, other = build(), build()
    for each in (model, other):
        change(each)
    with caplog.at_level(logging.WARNING):
        assert_same(
            trained(model, CapturedStep(model), plain_batches(4)), trained(other, Plain(other), plain_batches(4))
        )
    assert bool(captures.replayed) == (reason is None)
    assert [reason in message for message in messages(caplog)] == [True] * (reason is not None)


def test_a_step_that_fails_to_be_captured_or_waits_runs_as_it_is(captures, monkeypatch, caplog):
    batches, waits = plain_batches(6), lambda place, call: (call(), ["here.py, line 3"])

    def fails(*_):
        raise RuntimeError("not while capturing")

    for name, value, reason in (
        ("Graph", fails, "RuntimeError: not while capturing"),
        ("waiting", waits, "here.py, line 3"),
        ("MOST_GRAPHS", 0, "more than 0 shapes"),
    ):
        caplog.clear()
        model, other = build(), build()
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
            patch.setattr(captured, name, value)
            assert_same(trained(model, CapturedStep(model), batches, 2), trained(other, Plain(other), batches, 2))
        assert [reason in message for message in messages(caplog)] == [True]
    assert captures.replayed == 0


def test_attention_that_is_captured_has_no_mask_where_causality_is_all(monkeypatch):
    """With a mask of T^2 numbers torch leaves its flash kernels: a captured step took 1.4 times as long on a GPU."""
    # Of these transformers makes a mask: older releases while a graph is captured, newer ones while one is exported.
    monkeypatch.setattr(import_utils, "is_cuda_stream_capturing", lambda: True)
    monkeypatch.setattr(masking_utils, "is_torchdynamo_exporting", lambda: True, raising=False)
    attention, masks = torch.nn.functional.scaled_dot_product_attention, []

    def seen(*arguments, attn_mask=None, **options):
        masks.append(attn_mask)
        return attention(*arguments, attn_mask=attn_mask, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", seen)
    model, ids = build(), tokens().to(DEVICE)
    for use_cache in (False, True):
        model(ids, use_cache=use_cache)
    assert masks == [None, None]
    model(ids, attention_mask=torch.ones_like(ids).index_fill(1, torch.tensor([0], device=DEVICE), 0))
    assert masks[2] is not None
