"""Quantile Balancing against a plain computation from its definition, and what may not change its result."""

import sys

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import Trainer, TrainingArguments

import tiny
from kimi_k3 import KimiK3ForCausalLM
from kimi_k3.training import QuantileBalancer, QuantileBalancerCallback, balancing
from waiting import run_script

EXPERTS, TOP_K, BINS = 16, 3, 1000


def build(seed=0, skew=0.0, layers="kkkm", **changes):
    """A float64 model (rounding cannot move a token over the border of a bin) whose routers prefer some experts."""
    torch.manual_seed(seed)
    settings = {"num_experts": EXPERTS, "num_experts_per_token": TOP_K, **changes}
    model = KimiK3ForCausalLM(tiny.config(layers, hidden_size=33, **settings)).double().train()
    with torch.no_grad():
        for router in routers(model):
            router.weight.normal_(std=0.3)
            router.weight += skew * torch.linspace(-1, 1, EXPERTS, dtype=torch.float64)[:, None]
        model.model.embed_tokens.weight.normal_().add_(1.0)  # a direction that all tokens share, for the skew to act on
    return model


def routers(model):
    return [layer.block_sparse_moe.gate for layer in model.model.layers if hasattr(layer, "block_sparse_moe")]


def biases(model):
    return torch.stack([router.e_score_correction_bias for router in routers(model)])


def tokens(rows, length, seed=1):
    return torch.randint(3, 64, (rows, length), generator=torch.Generator().manual_seed(seed))


def scores_of(model, ids):
    """Router scores [layers][tokens, E] as the model reports them."""
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False, output_router_logits=True).router_logits
    if model.config.moe_router_activation_func == "softmax":
        return [layer.softmax(-1).numpy() for layer in logits]
    return [1 / (1 + np.exp(-layer.numpy())) for layer in logits]


def margins_of(scores, bias):
    cutoff = np.sort(scores + bias, axis=-1)[:, -(TOP_K + 1)]
    return cutoff[:, None] - scores


def start_from(model, seed=3, scale=0.1):
    generator = torch.Generator().manual_seed(seed)
    for router in routers(model):
        bias = torch.randn(EXPERTS, generator=generator, dtype=torch.float64) * scale
        router.e_score_correction_bias.copy_(bias - bias.mean())


@pytest.mark.one_release
@pytest.mark.parametrize("activation", ["sigmoid", "softmax"])
def test_the_bias_is_the_quantile_of_the_margins(activation):
    """The published estimator, evaluated one expert at a time, and within a bin of the quantile by sorting."""
    model = build(moe_router_activation_func=activation)
    start_from(model)
    old = biases(model).numpy().copy()
    ids = tokens(4, 50)
    expected = scores_of(model, ids)
    balancer = QuantileBalancer(model)
    model(input_ids=ids, use_cache=False)
    balancer.step()
    for layer, scores in enumerate(expected):
        margins = margins_of(scores, old[layer])
        low, high = old[layer].min() - 1, old[layer].max() + 1
        width = (high - low) / BINS
        count = len(scores)
        fair = count * TOP_K / EXPERTS
        by_histogram, by_sorting = [], []
        for column in margins.T:
            counts, _ = np.histogram(column, bins=BINS, range=(low, high))
            seen = 0
            for number, inside in enumerate(counts):
                if seen + inside >= np.ceil(fair):
                    by_histogram.append(low + (number + np.clip((fair - seen) / inside, 0, 1)) * width)
                    break
                seen += inside
            by_sorting.append(np.sort(column)[int(np.ceil(fair)) - 1])
        assert np.abs(np.array(by_histogram) - by_sorting).max() <= width
        new = biases(model)[layer].numpy()
        np.testing.assert_allclose(new, by_histogram - np.mean(by_histogram), atol=1e-12)
        assert abs(new.mean()) < 1e-12


@pytest.mark.one_release
def test_the_mean_stays_and_ema_keeps_a_share_of_the_old_bias():
    models = [build(), build()]
    for model, ema in zip(models, (0.0, 0.75), strict=True):
        start_from(model)
        old = biases(model).clone()
        balancer = QuantileBalancer(model, ema=ema)
        model(input_ids=tokens(2, 40), use_cache=False)
        balancer.step()
    torch.testing.assert_close(biases(models[1]), 0.75 * old + 0.25 * biases(models[0]))


def chosen_loads(model, ids):
    """Load of the fullest expert over the mean, by running the routers' own choice."""
    worst = []
    handles = [
        router.register_forward_hook(
            lambda _, __, out: worst.append(torch.bincount(out[1].flatten(), minlength=EXPERTS).double())
        )
        for router in routers(model)
    ]
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return torch.stack([loads.max() / loads.mean() for loads in worst])


@pytest.mark.one_release
def test_a_skewed_router_is_balanced_and_the_load_reported():
    model = build(skew=0.03)
    ids = tokens(32, 64)
    first = chosen_loads(model, ids)
    assert first.max() > 3
    balancer = QuantileBalancer(model)
    for _ in range(15):
        before = chosen_loads(model.eval(), ids)
        model.train()(input_ids=ids, use_cache=False)
        torch.testing.assert_close(balancer.step(), before.float())
    assert chosen_loads(model, ids).max() < 1.1


@pytest.mark.one_release
@pytest.mark.parametrize("balanced", [True, False])
def test_fifty_steps_of_training_on_skewed_data(balanced):
    """Under 1.1 with Quantile Balancing; without it above 3, for which fewer steps do.

    The last steps are large, so that chance hides neither.
    """
    steps = 50 if balanced else 20
    model = build(skew=0.03, vocab_size=2048, layers="mmm")  # what is balanced is behind any attention
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    balancer = QuantileBalancer(model)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(3, 2048, (120 if balanced and step >= 47 else 16, 64), generator=generator)
        model(ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if balanced:
            load = balancer.step().max()
    if balanced:
        assert load < 1.1
    else:
        assert chosen_loads(model.eval(), ids).max() > 3


def stepped(model, *forwards, **options):
    balancer = QuantileBalancer(model, **options)
    for inputs in forwards:
        model(use_cache=False, **inputs)
    loads = balancer.step()
    balancer.close()
    return biases(model).clone(), loads


@pytest.mark.one_release
def test_the_split_into_micro_batches_does_not_matter():
    ids = tokens(7, 30)
    whole = stepped(build(), {"input_ids": ids})
    parts = stepped(build(), *({"input_ids": part} for part in ids.split([1, 4, 2])))
    assert torch.equal(whole[0], parts[0]) and torch.equal(whole[1], parts[1])


@pytest.mark.one_release
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_not_counted(side):
    lengths = (9, 17, 30)
    documents = [tokens(1, length, length) for length in lengths]
    ids, mask = torch.full((3, 30), 2), torch.zeros(3, 30, dtype=torch.long)
    for row, document in enumerate(documents):
        places = slice(30 - document.shape[1], None) if side == "left" else slice(document.shape[1])
        ids[row, places], mask[row, places] = document[0], 1
    alone = stepped(build(), *({"input_ids": document} for document in documents))
    padded = stepped(build(), {"input_ids": ids, "attention_mask": mask})
    torch.testing.assert_close(padded, alone, atol=1e-9, rtol=0)
    with_pads_as_tokens = stepped(build(), {"input_ids": ids})
    assert (with_pads_as_tokens[0] - alone[0]).abs().max() > 1e-3


def test_packed_documents_count_as_if_alone():
    documents = [tokens(1, length, length) for length in (9, 17, 30)]
    alone = stepped(build(), *({"input_ids": document} for document in documents))
    positions = torch.cat([torch.arange(document.shape[1]) for document in documents])[None]
    packed = stepped(build(), {"input_ids": torch.cat(documents, dim=1), "position_ids": positions})
    torch.testing.assert_close(packed, alone, atol=1e-9, rtol=0)


@pytest.mark.one_release
def test_evaluation_is_not_counted_and_changes_nothing():
    expected = stepped(build(), {"input_ids": tokens(2, 30)})
    model = build()
    balancer = QuantileBalancer(model)
    model.eval()(input_ids=tokens(2, 40, seed=9))
    model.generate(tokens(1, 5), max_new_tokens=3, do_sample=False)
    assert not biases(model).any()
    model.train()(input_ids=tokens(2, 30), use_cache=False)
    assert torch.equal(balancer.step(), expected[1])
    assert torch.equal(biases(model), expected[0])


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputed_forward_is_counted_once(reentrant):
    """A second count with other scores would shift the quantile; with equal scores it would double the loads."""
    counts = []
    for checkpointing in (False, True):
        model = build()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        balancer = QuantileBalancer(model)
        ids = tokens(2, 30)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        counts.append(balancer._counts.clone())
    assert torch.equal(*counts)


@pytest.mark.one_release
def test_the_bias_is_no_parameter():
    """Fault 105: no gradient, not in an optimizer. Fault 104: training and evaluation choose the same experts."""
    model = build(skew=0.03)
    assert not any("e_score_correction_bias" in name for name, _ in model.named_parameters())
    ids = tokens(4, 30)
    stepped(model, {"input_ids": ids})
    torch.testing.assert_close(chosen_loads(model.train(), ids), chosen_loads(model.eval(), ids), atol=0, rtol=0)


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_router_that_runs_is_balanced(when):
    """Of an adapter that trains the router whole: its copy, and not the frozen one, which the reference passes of
    preference training run."""
    plain, model, ids = build(skew=0.03), build(skew=0.03), tokens(8, 40)
    alone = QuantileBalancer(plain)
    balancer = QuantileBalancer(model) if when == "before" else None
    options = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["gate"], task_type="CAUSAL_LM")
    adapted = get_peft_model(model, options).train()
    balancer = balancer or QuantileBalancer(adapted)
    for _ in range(3):
        plain(input_ids=ids, use_cache=False)
        adapted(input_ids=ids, use_cache=False)
        with adapted.disable_adapter(), torch.no_grad():
            adapted(input_ids=ids.flip(1), use_cache=False)
        torch.testing.assert_close(balancer.step(), alone.step())
    wrappers = routers(adapted.get_base_model())
    moved = torch.stack([wrapper.modules_to_save["default"].e_score_correction_bias for wrapper in wrappers])
    torch.testing.assert_close(moved, biases(plain), rtol=0, atol=1e-12)
    assert moved.any() and not any(wrapper.original_module.e_score_correction_bias.any() for wrapper in wrappers)


@pytest.mark.parametrize("whole", [True, False], ids=["routers-whole", "routers-of-the-base"])
def test_an_adapter_holds_the_biases_of_its_own_routers_alone(whole, tmp_path, monkeypatch):
    """What is loaded is what was trained, or a warning had said that it would not be."""
    said = []
    monkeypatch.setattr(balancing.logger, "warning_once", said.append)
    options = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["gate"] if whole else None)
    adapted, ids = get_peft_model(build(skew=0.03), options).train(), tokens(8, 40)
    balancer = QuantileBalancer(adapted)
    adapted(input_ids=ids, use_cache=False)
    balancer.step()
    adapted.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(build(skew=0.03), tmp_path)
    with torch.no_grad():
        same = torch.equal(*(model.eval()(input_ids=ids).logits for model in (adapted, again)))
    assert same == whole and ["modules_to_save=['gate']" in text for text in said] == ([] if whole else [True])


@pytest.mark.one_release
def test_what_cannot_be_balanced_is_refused():
    dense = build(num_experts=None, routed_expert_hidden_size=None)
    with pytest.raises(ValueError, match="no MoE layer"):
        QuantileBalancer(dense)
    grouped = build(num_expert_group=4, topk_group=2, use_grouped_topk=True)
    with pytest.raises(ValueError, match="2 of 4 groups"):
        QuantileBalancer(grouped)
    with pytest.raises(ValueError, match="ema"):
        QuantileBalancer(build(), ema=1.0)
    model = build()
    balancer = QuantileBalancer(model)
    model.eval()(input_ids=tokens(1, 8))
    with pytest.raises(RuntimeError, match="training mode"):
        balancer.step()


@pytest.mark.one_release
def test_a_forward_that_is_not_finite_is_left_to_the_loss():
    """Whoever trains sees the loss; an index out of range would speak first, and end a process on a GPU."""
    model = build()
    balancer = QuantileBalancer(model)
    with torch.no_grad():
        model.model.embed_tokens.weight[5] = float("nan")
    ids = torch.full((1, 6), 5)
    assert model(input_ids=ids, labels=ids, use_cache=False).loss.isnan()
    balancer.step()
    assert biases(model).isfinite().all()


@pytest.mark.one_release
def test_two_processes_equal_one(tmp_path):
    run_script(__file__, tmp_path, check=True)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    model = build(skew=0.03)
    balancer = QuantileBalancer(model)
    for step in range(3):
        model(input_ids=tokens(6, 30, seed=step), use_cache=False)
        loads = balancer.step()
    assert torch.equal(first[0], biases(model)) and torch.equal(first[1], loads)


def one_of_two_processes(rank, folder):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    model = build(skew=0.03)
    balancer = QuantileBalancer(model)
    for step in range(3):
        for part in tokens(6, 30, seed=step).split([1, 2, 3])[rank::2]:  # uneven shares and micro-batches
            model(input_ids=part, use_cache=False)
        loads = balancer.step()
    torch.save((biases(model), loads), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        ids = tokens(1, 32, seed=index)[0]
        return {"input_ids": ids, "labels": ids}


def test_with_the_trainer(tmp_path):
    model = build(skew=0.03).float()
    arguments = TrainingArguments(
        tmp_path,
        max_steps=16,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=1e-4,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=8,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    callback = QuantileBalancerCallback()
    trainer = Trainer(model, arguments, train_dataset=Rows(), eval_dataset=Rows(), callbacks=[callback])
    trainer.train()
    logged = [entry["router_max_load"] for entry in trainer.state.log_history if "router_max_load" in entry]
    assert len(logged) == 16
    assert logged[-1] < 1.7 < 2.5 < logged[0]
    assert not any(module._forward_hooks for module in model.modules()), "recording ends with the training"


if __name__ == "__main__":
    fork = torch.multiprocessing.get_context("fork")  # what is imported is there already
    started = [fork.Process(target=one_of_two_processes, args=(rank, sys.argv[1])) for rank in range(2)]
    for process in started:
        process.start()
    for process in started:
        process.join()
    assert [process.exitcode for process in started] == [0, 0]
