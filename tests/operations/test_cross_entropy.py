"""Cross entropy in chunks: as an operation, and as the loss of a model (`loss_chunk`)."""

import math

import pytest
import torch
import torch.nn.functional as F
from transformers import Trainer, TrainingArguments

from kimi_k3 import KimiK3ForCausalLM, KimiK3TextConfig
from kimi_k3.kernels.cross_entropy import chunked_cross_entropy
from rounding import EXACT, error

pytestmark = pytest.mark.one_release


class Watch(torch.utils._python_dispatch.TorchDispatchMode):
    """Shapes of all tensors that are made inside."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.shapes.extend(tuple(t.shape) for t in (out if isinstance(out, tuple) else (out,)) if torch.is_tensor(t))
        return out


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunked_cross_entropy_equals_torch(chunk):
    torch.manual_seed(0)
    hidden, weight = torch.randn(23, 16, dtype=torch.float64), torch.randn(50, 16, dtype=torch.float64)
    targets = torch.randint(50, (23,))
    targets[[0, 9, 22]] = -100
    ours, theirs = ([t.clone().requires_grad_() for t in (hidden, weight)] for _ in range(2))
    loss = chunked_cross_entropy(*ours, targets, chunk)
    expected = F.cross_entropy(theirs[0] @ theirs[1].T, targets, reduction="sum")
    (loss / 3).backward(), (expected / 3).backward()
    torch.testing.assert_close(loss, expected, **EXACT)
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, reference.grad, **EXACT)


def test_what_has_no_cross_entropy_is_refused():
    hidden, weight = torch.randn(4, 8, requires_grad=True), torch.randn(10, 8)
    for wrong in (-1, 10):
        with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
            chunked_cross_entropy(hidden, weight, torch.tensor([1, wrong, 2, -100]))
    for chunk in (0, -1, 2.0):
        with pytest.raises(ValueError, match=f"at least 1, not {chunk}"):
            chunked_cross_entropy(hidden, weight, torch.tensor([1, 3, 2, -100]), chunk)
    for count in (2, 3, 6):  # in chunks of 2 nothing else would fail
        with pytest.raises(ValueError, match=f"{count} labels do not fit 4 tokens"):
            chunked_cross_entropy(hidden, weight, torch.ones(count, dtype=torch.long), 2)
    loss = chunked_cross_entropy(hidden, weight, torch.tensor([1, 3, 2, -100]))
    (slope,) = torch.autograd.grad(loss.square(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()


def test_logits_of_all_tokens_are_never_made():
    """No tensor of T x V elements is allocated, forward or backward."""
    tokens, vocabulary = 256, 512
    hidden = torch.randn(tokens, 8, requires_grad=True)
    weight = torch.randn(vocabulary, 8, requires_grad=True)
    with Watch() as watch:
        chunked_cross_entropy(hidden, weight, torch.randint(vocabulary, (tokens,)), 32).backward()
    assert max(map(math.prod, watch.shapes)) <= 32 * vocabulary


# --- as the loss of a model ------------------------------------------------------------------------------------------


def small(data_dir, **options):
    model = KimiK3ForCausalLM.from_pretrained(data_dir / "k3_dense_flat", dtype=torch.float32).double().train()
    for name, value in options.items():
        setattr(model, name, value)
    return model


@pytest.mark.parametrize("chunk", [1, 5, 1000])
@pytest.mark.parametrize("how", ["mean", "items", "shifted", "ignored"])
def test_loss_and_gradients_are_those_of_all_logits(data_dir, chunk, how):
    torch.manual_seed(0)
    ids = torch.randint(3, 160, (2, 9))
    labels = ids.clone()
    if how != "ignored":
        labels[0, :4] = -100
    options = {
        "mean": {},
        "items": {"num_items_in_batch": torch.tensor(40)},
        "ignored": {"ignore_index": int(labels[1, 3])},
        "shifted": {"shift_labels": F.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()},
    }[how]
    found = []
    for size in (None, chunk):
        model = small(data_dir, loss_chunk=size)
        output = model(ids, labels=labels, use_cache=False, **options)
        assert (output.logits is None) == (size is not None)
        output.loss.backward()
        found.append((output.loss.detach(), [p.grad for p in model.parameters()]))
    torch.testing.assert_close(found[1][0], found[0][0].double(), rtol=2**-20, atol=0)  # transformers' is in float32
    for ours, expected in zip(found[1][1], found[0][1], strict=True):
        assert error(ours, expected) < 2**-20


@pytest.mark.parametrize("options", [{}, {"num_items_in_batch": torch.tensor(0)}])
def test_a_batch_without_targets_moves_no_weight(data_dir, options):
    """Its mean is not a number, as it is with all logits, but its gradients are zero."""
    ids = torch.randint(3, 160, (1, 6))
    for size in (None, 4):
        model = small(data_dir, loss_chunk=size)
        loss = model(ids, labels=torch.full_like(ids, -100), use_cache=False, **options).loss
        loss.backward()
        assert loss.isnan() and model.lm_head.weight.grad.abs().max() == 0
        assert all(p.grad is None or p.grad.abs().max() == 0 for p in model.parameters())


def test_evaluation_keeps_its_logits(data_dir):
    ids = torch.randint(3, 160, (1, 6))
    model = small(data_dir, loss_chunk=4).eval()
    assert model(ids, labels=ids).logits.shape == (1, 6, model.config.vocab_size)
    assert model.train()(ids).logits.shape == (1, 6, model.config.vocab_size)  # without labels there is no loss


def test_a_model_never_makes_the_logits_of_all_tokens(data_dir):
    config = KimiK3TextConfig.from_pretrained(data_dir / "k3_dense_flat", vocab_size=1009)
    model = KimiK3ForCausalLM(config).train()
    model.loss_chunk = 4
    ids = torch.randint(3, 160, (1, 96))
    with Watch() as watch:
        model(ids, labels=ids, use_cache=False).loss.backward()
    rows = {math.prod(shape[:-1]) for shape in watch.shapes if shape[-1:] == (config.vocab_size,)}
    assert 4 in rows and max(rows) == config.hidden_size  # the head's weight as it is multiplied


@pytest.mark.parametrize("what", ["adapter", "hook"])
def test_a_head_that_is_more_than_its_weight_is_refused(data_dir, what):
    peft = pytest.importorskip("peft")
    adapted = model = small(data_dir, loss_chunk=4)
    if what == "adapter":
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["lm_head"])).train()
    else:
        model.lm_head.register_forward_hook(lambda module, args, output: output * 0.5)
    ids = torch.randint(3, 160, (1, 6))
    with pytest.raises(ValueError, match=r"reads the weight of lm_head alone.*set loss_chunk to None"):
        adapted(input_ids=ids, labels=ids, use_cache=False)


def test_the_trainer_takes_the_same_steps(data_dir, tmp_path):
    torch.manual_seed(0)
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(3, 160, (8, 7))]
    losses = []
    for chunk in (None, 3):
        arguments = TrainingArguments(
            tmp_path, max_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=2, logging_steps=1,
            report_to=[], use_cpu=True, save_strategy="no", seed=0,
        )  # fmt: skip
        trainer = Trainer(small(data_dir, loss_chunk=chunk), arguments, train_dataset=rows)
        trainer.train()
        losses.append([line["loss"] for line in trainer.state.log_history if "loss" in line])
    assert len(losses[0]) == 2 and losses[0][0] != losses[0][1]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
