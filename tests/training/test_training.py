"""Training as a user runs it: seeds, gradients, `Trainer` with both kinds of collator and resuming, embeddings."""

import copy

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening, Trainer, TrainingArguments
from transformers.utils import logging

import tiny
from kimi_k3 import layers_kimi_k3
from kimi_k3.kernels import experts as experts_op
from kimi_k3.training import lora_targets
from rounding import EXACT

VARIANTS = {
    "k3": {},
    "kimi-linear": tiny.KIMI_LINEAR,
    "dense": tiny.DENSE,
    "no-attn-res": {"attn_res_block_size": None},
    "tied": {"tie_word_embeddings": True},
}


# A token takes all of them: the order of a sum can then not decide which experts learn from it.
EVERY_EXPERT = {"num_experts": 4, "num_experts_per_token": 4}


def build(seed=0, **changes):
    few = {"num_experts": 4, "num_experts_per_token": 2}  # every expert gets tokens
    settings = {**few, "attn_res_block_size": 1, "initializer_range": 0.1, **changes}
    return tiny.model("kmk", seed, **settings).train()


def tokens(rows, length, seed=0):
    return torch.randint(3, tiny.VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.one_release
@pytest.mark.parametrize("variant, checkpointing", [(name, name in ("k3", "kimi-linear")) for name in VARIANTS])
def test_seeds_reproduce_bit_for_bit(variant, checkpointing):
    """Fault 15: two runs of a seed have the same losses and weights to the last bit, another seed has others."""

    def run(seed):
        model = build(seed, **VARIANTS[variant]).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
        for _ in range(2):
            ids = torch.randint(3, tiny.VOCABULARY, (2, 70))
            losses.append(model(ids, labels=ids).loss)
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.stack(losses), model.state_dict()

    (losses, weights), (same, same_weights), (others, _) = run(0), run(0), run(1)
    assert torch.equal(losses, same) and not torch.equal(losses, others)
    assert all(torch.equal(weights[name], same_weights[name]) for name in weights)


@pytest.mark.one_release
def test_an_idle_expert_has_a_zero_gradient_and_the_bias_none():
    """Faults 98, 105: no rank waits for a gradient; the selection bias is no parameter and no step moves it."""
    model, ids = build().train(), tokens(2, 30)
    routers = [module for name, module in model.named_modules() if name.endswith("block_sparse_moe.gate")]
    for router in routers:
        router.e_score_correction_bias[1] = -9.0
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(ids, labels=ids).loss.backward()
    assert routers
    for layer in model.model.layers:
        if not hasattr(layer, "block_sparse_moe"):
            continue
        for parameter in layer.block_sparse_moe.experts.parameters():
            assert (parameter.grad[1] == 0).all()
            assert all(parameter.grad[expert].abs().sum() > 0 for expert in (0, 2, 3))
    optimizer.step()
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for router in routers:
        bias = router.e_score_correction_bias
        assert id(bias) not in held and not bias.requires_grad and bias.tolist() == [0.0, -9.0, 0.0, 0.0]


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_the_experts_implementation_is_reported_and_used(implementation, monkeypatch):
    """Fault 107: what the config says is what runs."""
    model, calls = build().eval(), []
    grouped = experts_op.grouped_experts
    monkeypatch.setattr(experts_op, "grouped_experts", lambda *args: calls.append(1) or grouped(*args))
    model.set_experts_implementation(implementation)
    assert model.config._experts_implementation == implementation
    model(tokens(1, 8))
    assert bool(calls) == (implementation == "eager")


def test_experts_that_train_on_a_gpu_have_the_same_gradients(monkeypatch):
    """What `groups_on_device` takes on a GPU runs on the CPU as well: loss and every gradient are the reference's."""
    grads = []
    for on_device in (False, True):
        model, used = build(), []
        sorted_experts = experts_op.sorted_experts
        monkeypatch.setattr(experts_op, "groups_on_device", lambda *args, on_device=on_device: on_device)
        monkeypatch.setattr(experts_op, "sorted_experts", lambda *args: used.append(1) or sorted_experts(*args))  # noqa: B023
        model(tokens(2, 16), labels=tokens(2, 16)).loss.backward()
        assert bool(used) == on_device
        grads.append({name: weight.grad for name, weight in model.named_parameters()})
        monkeypatch.undo()
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, atol=1e-6, rtol=1e-4, msg=name)


def test_experts_of_another_process_add_nothing_in_training_on_a_gpu(monkeypatch):
    """Their pairs are in no group of the product, which leaves what it does not compute as it was."""
    monkeypatch.setattr(experts_op, "groups_on_device", lambda *args: True)
    experts = build(initializer_range=1.0).model.layers[1].block_sparse_moe.experts
    x, ids, weights = torch.randn(9, 32, requires_grad=True), torch.rand(9, 4).topk(2).indices, torch.rand(9, 2)
    whole, parts, matrices = experts(x, ids, weights), [], (experts.gate_up_proj.data, experts.down_proj.data)
    experts.num_experts = 2  # as the styles of expert parallelism do, ours and those of newer releases
    if hasattr(experts, "_is_expert_parallel"):
        experts._is_expert_parallel = True
    for rank in range(2):
        experts.gate_up_proj, experts.down_proj = (torch.nn.Parameter(m[2 * rank : 2 * rank + 2]) for m in matrices)
        elsewhere = ids // 2 != rank
        dirty = [torch.full((18, size), float("nan")) for size in (24, 32, 48) for _ in range(50)]
        del dirty  # memory that the product gets
        parts.append(experts(x, torch.where(elsewhere, 2, ids % 2), weights.masked_fill(elsewhere, 0.0)))
    torch.testing.assert_close(sum(parts), whole, rtol=1e-5, atol=1e-5)
    (expected,), (got,) = torch.autograd.grad(whole.sum(), x), torch.autograd.grad(sum(parts).sum(), x)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.one_release
@torch.no_grad()
def test_parts_of_experts_are_not_rounded_before_they_are_added(monkeypatch):
    """Tensor parallelism sums what every process makes of its part of the width, in float32 (docs/distributed.md)."""
    monkeypatch.setattr(experts_op, "groups_on_device", lambda *args: True)
    experts = build(initializer_range=1.0, moe_intermediate_size=16).bfloat16().model.layers[1].block_sparse_moe.experts
    inputs = torch.randn(9, 32).bfloat16(), torch.rand(9, 4).topk(2).indices, torch.rand(9, 2)
    whole, total = experts(*inputs), 0
    gate_up, down = experts.gate_up_proj.unflatten(1, (2, 2, 8)), experts.down_proj.unflatten(2, (2, 8))
    for part in range(2):
        experts.gate_up_proj = torch.nn.Parameter(gate_up[:, :, part].flatten(1, 2))
        experts.down_proj = torch.nn.Parameter(down[:, :, part].contiguous())
        found = experts(*inputs)
        assert found.dtype == torch.float32 and not torch.equal(found, found.bfloat16().float())
        total = total + found
    assert whole.dtype == torch.bfloat16
    assert (total - whole).norm() < 2**-7 * whole.norm()


@pytest.mark.one_release
@torch.no_grad()
def test_forced_routing_takes_the_flips_of_near_ties_away():
    """Fault 102: router logits are reported, flips happen where their margin is small, and routing can be forced."""
    exact = build(initializer_range=0.3).double().eval()
    rounded = build(initializer_range=0.3).eval()
    for parameter in rounded.model.layers[0].parameters():  # a model that is a little off, as one in half precision
        parameter.copy_(parameter.bfloat16())
    rounded, ids = rounded.double(), tokens(4, 100)
    wanted, got = (model(ids, output_router_logits=True) for model in (exact, rounded))
    flips, forced = 0, []
    for logits, others in zip(wanted.router_logits, got.router_logits, strict=True):
        scores, other_scores = torch.sigmoid(logits), torch.sigmoid(others)
        best = scores.topk(3).values
        chosen, other = (x.topk(2).indices.sort(-1).values for x in (scores, other_scores))
        flipped = (chosen != other).any(-1)
        flips += int(flipped.sum())
        assert ((best[:, 1] - best[:, 2])[flipped] < 0.05).all(), "margins of what flipped"
        forced.append(chosen)
    assert flips > 0

    def force(router, args, output):
        logits, _, _ = output
        chosen = forced.pop(0)
        weights = torch.sigmoid(logits).gather(-1, chosen)
        return logits, chosen, weights / weights.sum(-1, keepdim=True)

    for layer in rounded.model.layers:
        if hasattr(layer, "block_sparse_moe"):
            layer.block_sparse_moe.gate.register_forward_hook(force)
    error, free_error = ((x - wanted.logits).square().mean().sqrt() for x in (rounded(ids).logits, got.logits))
    assert error < 0.7 * free_error


DATA = [{"input_ids": tokens(1, n, n)[0].tolist()} for n in (5, 17, 9, 70, 12, 30, 7, 8)]


def pad(rows):
    width = max(len(row["input_ids"]) for row in rows)
    fill = lambda row, first, value: [*first, *[value] * (width - len(first))]  # noqa: E731
    return {
        "input_ids": torch.tensor([fill(row, row["input_ids"], 0) for row in rows]),
        "attention_mask": torch.tensor([fill(row, [1] * len(row["input_ids"]), 0) for row in rows]),
        "labels": torch.tensor([fill(row, row["input_ids"], -100) for row in rows]),
    }


COLLATORS = {
    "padded": pad,
    "position-ids": DataCollatorWithFlattening(),
    "everything": DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True),
}


def train(model, folder, collator, resume=None, **changes):
    arguments = TrainingArguments(
        str(folder), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=4, save_steps=2,
        logging_steps=1, learning_rate=1e-2, seed=1, use_cpu=True, report_to=[], disable_tqdm=True, **changes,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=DATA, data_collator=COLLATORS[collator])
    trainer.train(resume_from_checkpoint=resume)
    return torch.tensor([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])


ONE_RELEASE = [pytest.param(variant, marks=pytest.mark.one_release) for variant in ("kimi-linear", "dense")]


CHECKPOINTED = {"gradient_checkpointing": True}
ALONE = [(name, {}) for name in COLLATORS if name != "padded"] + [("padded", CHECKPOINTED)]
TOGETHER = [("everything", CHECKPOINTED)]


@pytest.mark.parametrize(
    "variant, ways",
    [
        pytest.param("k3", ALONE, id="k3"),
        *(pytest.param(name, TOGETHER, id=name, marks=pytest.mark.one_release) for name in ("kimi-linear", "dense")),
    ],
)
def test_trainer_padded_and_packed(variant, ways, tmp_path):
    """Faults 53, 54, 96: padding, packing and checkpointing train the same model, step by step."""
    runs = []
    for collator, changes in [("padded", {}), *ways]:
        model = build(**{**EVERY_EXPERT, **VARIANTS[variant]}).double()
        losses = train(model, tmp_path / f"{len(runs)}", collator, save_strategy="no", **changes)
        runs.append((losses, model.state_dict()))
    losses, weights = runs[0]
    assert losses[-1] < losses[0]
    for other, other_weights in runs[1:]:
        torch.testing.assert_close(other, losses, atol=0, rtol=2**-21)  # float32 at the end, summed in another order
        for name, weight in weights.items():
            torch.testing.assert_close(other_weights[name], weight, atol=1e-8, rtol=0, msg=name)


@pytest.mark.parametrize("variant", ["k3", "tied", *ONE_RELEASE])
def test_trainer_resumes_bit_for_bit(variant, tmp_path):
    """Fault 27: a run that goes on from a saved step ends where the uninterrupted one does, experts included."""
    whole, resumed = build(**VARIANTS[variant]), build(7, **VARIANTS[variant])
    losses = train(whole, tmp_path, "padded")
    again = train(resumed, tmp_path, "padded", resume=str(tmp_path / "checkpoint-2"))
    assert torch.equal(again, losses)
    for (name, weight), other in zip(whole.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(weight, other), name


def test_load_state_dict_reads_files_whole_or_not_at_all(tmp_path):
    """A saved folder's tensors are converted; a part of them would leave experts as they were, so it is refused."""
    model, other = build(), build(1)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    other.load_state_dict(saved)
    assert all(torch.equal(x, y) for x, y in zip(model.state_dict().values(), other.state_dict().values(), strict=True))
    untouched, before = build(1), build(1).state_dict()
    for lacking in ("experts.1.", "layers.2.", "norm"):
        part = {name: tensor for name, tensor in saved.items() if lacking not in name}
        with pytest.raises(ValueError, match="reads a saved folder whole"):
            untouched.load_state_dict(part, strict=False)
    assert all(torch.equal(x, before[name]) for name, x in untouched.state_dict().items())
    with pytest.raises(RuntimeError, match="Unexpected key"):
        untouched.load_state_dict({**untouched.state_dict(), "unknown": torch.zeros(1)})
    assert untouched.load_state_dict({}, strict=False).missing_keys


@pytest.mark.parametrize("size", [48, 80])
@pytest.mark.parametrize("variant", ["k3", "tied"])
def test_resized_embeddings(variant, size, tmp_path):
    """More or fewer tokens: both embeddings follow, tied ones stay one tensor, and saving keeps all of it."""
    model, ids = build(**VARIANTS[variant]).eval(), tokens(2, 12) % 48
    before = model(ids).logits
    model.resize_token_embeddings(size, mean_resizing=False)
    assert model.config.vocab_size == model.get_input_embeddings().weight.shape[0] == size
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == (variant == "tied")
    after = model(ids, labels=ids)
    kept = min(size, tiny.VOCABULARY)
    torch.testing.assert_close(after.logits[..., :kept], before[..., :kept])
    assert after.logits.shape[-1] == size and torch.isfinite(after.loss)
    text = model.generate(ids, max_new_tokens=6, do_sample=False)
    assert torch.equal(text, model.generate(ids, max_new_tokens=6, do_sample=False, use_cache=False))
    model.save_pretrained(tmp_path)
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) == (variant != "tied")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == (variant == "tied")
    assert torch.equal(loaded(ids).logits, after.logits)
    assert torch.equal(loaded.generate(ids, max_new_tokens=6, do_sample=False), text)
    loaded.train()(ids, labels=ids).loss.backward()
    assert loaded.get_input_embeddings().weight.grad.abs().sum() > 0
    assert (loaded.lm_head.weight.grad is loaded.model.embed_tokens.weight.grad) == (variant == "tied")


@pytest.mark.one_release
@pytest.mark.portable
@settings(max_examples=14, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(data=st.data())
def test_random_packings_equal_each_document_alone(data):
    """Faults 53, 55, 58: random documents in random rows, with gaps, described in any way, whole or checkpointed."""
    variant = data.draw(st.sampled_from(["k3", "kimi-linear", "dense", "no-attn-res"]))
    model = build(**VARIANTS[variant]).double().eval()
    model.set_attn_implementation(data.draw(st.sampled_from(["sdpa", "eager"])))
    if data.draw(st.booleans()):
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
    described = data.draw(st.sampled_from(["position_ids", "cu_seq_lens_q", "seq_idx"]))
    rows = data.draw(st.integers(1, 3)) if described == "position_ids" else 1
    lengths = [data.draw(st.lists(st.integers(1, 70), min_size=1, max_size=3)) for _ in range(rows)]
    gaps = described == "position_ids" and data.draw(st.booleans())
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    width = max(map(sum, lengths)) + (int(torch.randint(1, 9, (1,), generator=generator)) if gaps else 0)
    if not gaps and len({sum(row) for row in lengths}) > 1:
        gaps = True
    ids = torch.randint(3, tiny.VOCABULARY, (rows, width), generator=generator)
    mask, positions, places = torch.zeros_like(ids), torch.zeros_like(ids), []
    for row, documents in enumerate(lengths):
        columns = torch.randperm(width, generator=generator)[: sum(documents)].sort().values
        mask[row, columns] = 1
        positions[row, columns] = torch.cat([torch.arange(n) for n in documents])
        places += [(row, part) for part in columns.split(documents)]
    arguments = {
        "position_ids": {"position_ids": positions},
        "cu_seq_lens_q": {"cu_seq_lens_q": torch.tensor([0, *lengths[0]]).cumsum(0)},
        "seq_idx": {"seq_idx": torch.arange(len(lengths[0])).repeat_interleave(torch.tensor(lengths[0]))[None]},
    }[described]
    if gaps:
        arguments["attention_mask"] = mask
    embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
    logits = model(inputs_embeds=embeds, use_cache=False, **arguments).logits
    weight = torch.randn(logits.shape, generator=generator, dtype=logits.dtype) * mask[..., None]
    (logits * weight).sum().backward()
    for row, columns in places:
        alone = embeds.detach()[row : row + 1, columns].requires_grad_()
        expected = model(inputs_embeds=alone, use_cache=False).logits
        (expected * weight[row : row + 1, columns]).sum().backward()
        torch.testing.assert_close(logits[row, columns], expected[0], **EXACT)
        torch.testing.assert_close(embeds.grad[row, columns], alone.grad[0], **EXACT)


def test_generating_while_checkpointing_wants_eval():
    """transformers would take the cache away from each layer: a text without states."""
    model, ids = build().train(), tokens(1, 9)
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with pytest.raises(ValueError, match=r"call model.eval\(\) before generate"):
        model.generate(ids, max_new_tokens=4, do_sample=False)
    assert torch.equal(model.eval().generate(ids, max_new_tokens=4, do_sample=False), expected)


def test_adapters_resume(tmp_path):
    """LoRA on every linear layer through `Trainer`, stopped and resumed, packed documents: bit for bit."""

    def adapted(seed):
        base = build()
        torch.manual_seed(seed)
        return get_peft_model(base, LoraConfig(target_modules="all-linear", r=2))

    whole, resumed = adapted(1), adapted(2)
    losses = train(whole, tmp_path, "position-ids")
    again = train(resumed, tmp_path, "position-ids", resume=str(tmp_path / "checkpoint-2"))
    assert torch.equal(losses, again)
    for (name, weight), other in zip(whole.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(weight, other), name


def test_frozen_packed_experts_are_told_of_once(monkeypatch):
    """Everything but them learns, which no loss shows. Nobody is surprised with an adapter, or where nothing trains."""
    told, ids = [], tokens(1, 9)
    monkeypatch.setattr(layers_kimi_k3.logger, "warning", told.append)
    logging.warning_once.cache_clear()
    packed = build(**tiny.PACKED)

    def step(model):
        model(input_ids=ids, labels=ids, use_cache=False)
        return told

    with torch.no_grad():
        assert not step(packed)
    assert not step(packed.eval()) and not step(build())
    for options in (lora_targets(packed), lora_targets(packed, ["attention"])):
        adapted = get_peft_model(copy.deepcopy(packed), LoraConfig(r=2, **options))
        assert not step(adapted.train())
    frozen = copy.deepcopy(packed).requires_grad_(False)
    frozen.lm_head.requires_grad_(True)
    assert not step(frozen.train())
    for _ in range(2):
        assert len(step(packed.train())) == 1
    assert "dequantize=True" in told[0] and "lora_targets" in told[0]
