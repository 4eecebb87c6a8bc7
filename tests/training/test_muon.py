"""Per-head Muon against torch.optim.Muon on each matrix alone, the grouping of parameters, and QK-clip."""

import copy

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.utils import parametrize
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import tiny
from kimi_k3 import CACHE_ARGUMENT, KimiK3ForCausalLM
from kimi_k3.packing_kimi_k3 import fixed_packing
from kimi_k3.training import PerHeadMuon, QKClip, muon_groups
from kimi_k3.training.qat import mxfp4


@pytest.fixture
def model(data_dir):
    torch.manual_seed(0)
    config = KimiK3ForCausalLM.config_class.from_pretrained(data_dir / "k3_tiny_mxfp4")
    config.expert_quantization = None
    return KimiK3ForCausalLM(config).train()


def tokens(rows, length, seed=1, vocabulary=160):
    return torch.randint(3, vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed))


def backward(model, seed=1):
    ids = tokens(2, 24, seed, model.config.vocab_size)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.item()


def by_name(model, groups):
    """name -> (algorithm, blocks, weight decay)"""
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = {}
    for group in groups:
        for parameter in group["params"]:
            assert names[parameter] not in found, "in two groups"
            found[names[parameter]] = (group["algorithm"], group["blocks"], group["weight_decay"])
    return found


@pytest.mark.one_release
def test_copies_that_an_adapter_trains_have_the_blocks_of_their_originals(model):
    names = ["q_proj", "kv_b_proj", "o_proj", "gate"]
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["k_proj"], modules_to_save=names))
    found = {name: group for name, group in by_name(adapted, muon_groups(adapted)).items() if "lora_" not in name}
    expected = {"q_proj": (16,), "kv_b_proj": (16, 16), "o_proj": None, "gate": None}
    assert len(found) > 8 and {name.split(".modules_to_save.")[0].rpartition(".")[2] for name in found} == set(names)
    for name, (algorithm, blocks, _) in found.items():
        part = name.split(".modules_to_save.")[0].rpartition(".")[2]
        assert (algorithm, blocks) == ("muon", expected[part]), name


@pytest.mark.one_release
def test_every_parameter_has_its_group(model):
    found = by_name(model, muon_groups(model, weight_decay=0.1))
    assert set(found) == {name for name, _ in model.named_parameters()}
    layers = "model.layers."
    whole, plain = ("muon", None, 0.1), ("adamw", None, 0.0)
    expected = {
        f"{layers}0.self_attn.q_proj.weight": ("muon", (16,), 0.1),
        f"{layers}0.self_attn.k_proj.weight": ("muon", (16,), 0.1),
        f"{layers}0.self_attn.v_proj.weight": ("muon", (16,), 0.1),
        f"{layers}0.self_attn.o_proj.weight": whole,
        f"{layers}0.self_attn.f_a_proj.weight": whole,
        f"{layers}0.self_attn.b_proj.weight": whole,
        f"{layers}0.self_attn.q_conv1d.weight": plain,
        f"{layers}0.self_attn.A_log": plain,
        f"{layers}0.self_attn.dt_bias": plain,
        f"{layers}0.self_attn.o_norm.weight": plain,
        f"{layers}0.mlp.gate_proj.weight": whole,
        f"{layers}0.mlp_res_proj.weight": plain,
        f"{layers}0.mlp_res_norm.weight": plain,
        f"{layers}3.self_attn.q_a_proj.weight": whole,
        f"{layers}3.self_attn.q_b_proj.weight": ("muon", (24,), 0.1),
        f"{layers}3.self_attn.kv_a_proj_with_mqa.weight": whole,
        f"{layers}3.self_attn.kv_b_proj.weight": ("muon", (16, 16), 0.1),
        f"{layers}3.block_sparse_moe.gate.weight": whole,
        f"{layers}3.block_sparse_moe.experts.gate_up_proj": ("muon", (32, 32), 0.1),
        f"{layers}3.block_sparse_moe.experts.down_proj": whole,
        f"{layers}3.block_sparse_moe.routed_expert_up_proj.weight": whole,
        f"{layers}3.block_sparse_moe.shared_experts.up_proj.weight": whole,
        "model.embed_tokens.weight": ("adamw", None, 0.1),
        "lm_head.weight": ("adamw", None, 0.1),
        "model.norm.weight": plain,
    }
    assert {name: found[name] for name in expected} == expected


@pytest.mark.one_release
@pytest.mark.parametrize("folder", ["kimi_linear_flat", "k3_dense_flat"])
def test_the_other_families_are_covered(folder, data_dir):
    model = AutoModelForCausalLM.from_pretrained(data_dir / folder, dtype=torch.float32)
    found = by_name(model, muon_groups(model))
    assert set(found) == {name for name, _ in model.named_parameters()}


@pytest.mark.one_release
def test_packed_and_frozen_parameters_are_left_out(data_dir):
    model = AutoModelForCausalLM.from_pretrained(data_dir / "k3_tiny_mxfp4", dtype=torch.float32)
    model.get_output_embeddings().weight.requires_grad_(False)
    found = by_name(model, muon_groups(model))
    assert len(found) > 100 and not any("lm_head" in name for name in found)
    assert not any("experts.gate_up" in name for name in found)


class Rounded(nn.Module):
    def forward(self, weight):
        return mxfp4(weight)


@pytest.mark.one_release
def test_weights_under_a_rounding_keep_their_rule(model):
    plain = by_name(model, muon_groups(model))
    for layer in model.model.layers[1:]:
        for name in ("gate_up_proj", "down_proj"):
            parametrize.register_parametrization(layer.block_sparse_moe.experts, name, Rounded())
    rounded = by_name(model, muon_groups(model))
    shorter = {name.replace("parametrizations.", "").removesuffix(".original"): rounded[name] for name in rounded}
    assert shorter == plain


@pytest.mark.one_release
def test_an_unknown_parameter_is_refused(model):
    model.model.layers[1].extra = nn.Parameter(torch.zeros(3, 3))
    with pytest.raises(ValueError, match=r"layers\.1\.extra \[3, 3\]"):
        muon_groups(model)
    with pytest.raises(ValueError, match="muon_groups"):
        PerHeadMuon([{"params": [model.lm_head.weight]}])


@pytest.mark.one_release
def test_a_step_is_that_of_torch_on_every_matrix_alone():
    """Three steps; what torch sees are copies of single heads and experts, cut out here by hand."""
    model = tiny.model("kkm").train()
    moe, kda, mla = (
        model.model.layers[1].block_sparse_moe,
        model.model.layers[0].self_attn,
        model.model.layers[2].self_attn,
    )
    cut = {
        "kda q": (kda.q_proj.weight, [(slice(8 * h, 8 * h + 8),) for h in range(5)]),
        "q_b": (mla.q_b_proj.weight, [(slice(26 * h, 26 * h + 26),) for h in range(6)]),
        "kv_b": (
            mla.kv_b_proj.weight,
            [(slice(22 * h + start, 22 * h + end),) for h in range(6) for start, end in ((0, 12), (12, 22))],
        ),
        "w1 and w3": (moe.experts.gate_up_proj, [(e, slice(p, p + 24)) for e in range(9) for p in (0, 24)]),
        "w2": (moe.experts.down_proj, [(e,) for e in range(9)]),
        "o_proj": (kda.o_proj.weight, [()]),
    }
    alone = {name: [nn.Parameter(weight[at].clone()) for at in places] for name, (weight, places) in cut.items()}
    reference = torch.optim.Muon(
        [part for parts in alone.values() for part in parts], lr=0.01, adjust_lr_fn="match_rms_adamw", weight_decay=0.1
    )
    vectors = {name: p for name, p in model.named_parameters() if "norm" in name}
    copies = {name: nn.Parameter(p.detach().clone()) for name, p in vectors.items()}
    adamw = torch.optim.AdamW(copies.values(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
    ours = PerHeadMuon(muon_groups(model), lr=0.01)
    before = {name: weight.detach().clone() for name, (weight, _) in cut.items()}
    for step in range(3):
        backward(model, step)
        for name, (weight, places) in cut.items():
            for part, at in zip(alone[name], places, strict=True):
                part.grad = weight.grad[at].clone()
        for name, copied in copies.items():
            copied.grad = None if vectors[name].grad is None else vectors[name].grad.clone()
        ours.step(), reference.step(), adamw.step()
        model.zero_grad()
    for name, (weight, places) in cut.items():
        moved = (weight - before[name]).abs().mean()
        for part, at in zip(alone[name], places, strict=True):
            assert (weight[at] - part).abs().mean() < 0.02 * moved, name  # bfloat16 products in another order
    for name, copied in copies.items():
        assert torch.equal(vectors[name], copied), name


@pytest.mark.one_release
def test_a_weak_head_moves_as_far_as_a_strong_one():
    """What per-head means: with one whole matrix the strong head would take the whole step."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.zeros(32, 64))
    weight.grad = torch.randn(32, 64)
    weight.grad[:16] *= 1e-4
    moved = {}
    for blocks in ((16,), None):
        with torch.no_grad():
            weight.zero_()
        group = {"params": [weight], "algorithm": "muon", "blocks": blocks, "weight_decay": 0.0}
        PerHeadMuon([group], lr=1.0).step()
        moved[blocks] = torch.linalg.svdvals(weight.detach().view(2, 16, 64)) / (0.2 * 64**0.5)
    assert moved[(16,)].min() > 0.6 and moved[(16,)].max() < 1.3
    # Newton-Schulz cannot lift a singular value of 1e-4 of the largest to 1 in five iterations
    assert moved[None][0].max() < 0.2


@pytest.mark.one_release
def test_a_saved_state_continues_on_the_same_path(model):
    optimizer = PerHeadMuon(muon_groups(model), lr=0.01)
    backward(model)
    optimizer.step()
    saved, twin = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model)
    again = PerHeadMuon(muon_groups(twin), lr=0.5)
    again.load_state_dict(saved)
    for stepped, its_optimizer in ((model, optimizer), (twin, again)):
        stepped.zero_grad()
        backward(stepped, 2)
        its_optimizer.step()
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        ids = tokens(1, 24, seed=index)[0]
        return {"input_ids": ids, "labels": ids}


def test_with_the_trainer_and_its_schedule(model, tmp_path):
    optimizer = PerHeadMuon(muon_groups(model), lr=0.01)
    arguments = TrainingArguments(
        tmp_path,
        max_steps=12,
        per_device_train_batch_size=8,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=Rows(), optimizers=(optimizer, None))
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.7 * losses[0]
    assert all(group["lr"] < 0.002 for group in optimizer.param_groups), "the schedule reaches both algorithms"


def mla_logits(model, index, inputs):
    """Attention logits [B, H, T, S] of one MLA layer from its weights, and the weights of eager attention."""
    attention = model.model.layers[index].self_attn
    seen = []
    handle = attention.register_forward_pre_hook(lambda module, args, kwargs: seen.append(args[0]), with_kwargs=True)
    with torch.no_grad():
        out = model(use_cache=False, output_attentions=True, **inputs)
    handle.remove()
    x = seen[0]
    q = (attention.q_a_layernorm(x @ attention.q_a_proj.weight.T) @ attention.q_b_proj.weight.T).view(
        *x.shape[:2], 4, 24
    )
    latent, k_pe = (x @ attention.kv_a_proj_with_mqa.weight.T).split([32, 8], dim=-1)
    k = (attention.kv_a_layernorm(latent) @ attention.kv_b_proj.weight.T).view(*x.shape[:2], 4, 32)[..., :16]
    k = torch.cat([k, k_pe[:, :, None].expand(-1, -1, 4, -1)], dim=-1)
    mla = [i for i, layer in enumerate(model.model.layers) if not layer.is_linear]
    return torch.einsum("bthd,bshd->bhts", q, k) * 24**-0.5, out.attentions[mla.index(index)]


def like_flash(module, query, key, value, mask, scaling, cu_seq_lens_q=None, **kwargs):
    """What a flash kernel computes: the real tokens in one row with offsets, or a mask [B, S] of them."""
    allowed = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
    if cu_seq_lens_q is not None:
        number = torch.repeat_interleave(cu_seq_lens_q.diff())
        allowed &= number[:, None] == number
    elif mask is not None:
        allowed = allowed & mask[:, None, None].bool()
    return F.scaled_dot_product_attention(query, key, value, allowed, scale=scaling).transpose(1, 2), None


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "flash_attention_2"])
@pytest.mark.parametrize("kind", ["plain", "padded", "packed", "filled", "with a cache"])
def test_qk_clip_measures_the_pairs_that_attend(model, kind, implementation, monkeypatch):
    with torch.no_grad():
        for index in (3, 6):
            model.model.layers[index].self_attn.q_b_proj.weight *= 40
    ids = tokens(2, 20)
    inputs = {
        "plain": {"input_ids": ids},
        "padded": {"input_ids": ids, "attention_mask": torch.tensor([[0] * 5 + [1] * 15, [1] * 20])},
        "packed": {"input_ids": ids, "position_ids": torch.cat([torch.arange(7), torch.arange(13)]).expand(2, -1)},
        "filled": {"input_ids": tokens(1, 40), "packing": fixed_packing(torch.tensor([7, 9]), 40, 8)},
        "with a cache": {"input_ids": ids, "attention_mask": torch.tensor([[1] * 15 + [0] * 5, [1] * 20])},
    }[kind]
    if implementation == "eager":
        model.set_attn_implementation("eager")
    expected = []
    for index in (3, 6):
        logits, weights = mla_logits(model, index, inputs)
        attends = weights > 0
        if kind == "padded":
            attends[0, :, :5] = False  # a row of padding attends anywhere and is read by nobody
        elif kind == "filled":
            attends[0, :, 16:] = False
        elif kind == "with a cache":
            attends[0, :, 15:] = False
        expected.append(logits.masked_fill(~attends, -torch.inf).amax(dim=(0, 2, 3)))
    if implementation == "flash_attention_2":
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, implementation, like_flash)
        model.config._attn_implementation = implementation
    clip = QKClip(model, threshold=1e9)
    clip.ROWS = 8
    model(use_cache=kind == "with a cache", **inputs)
    torch.testing.assert_close(clip.step(), torch.stack(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.one_release
def test_qk_clip_shrinks_the_heads_above_the_threshold_only(model):
    attention = model.model.layers[3].self_attn
    with torch.no_grad():
        attention.q_b_proj.weight *= 30
        attention.q_b_proj.weight[:24] *= 10  # head 0
    clip, inputs = QKClip(model, threshold=1.0), {"input_ids": tokens(2, 20)}
    before = {name: parameter.detach().clone() for name, parameter in attention.named_parameters()}
    old = mla_logits(model, 3, inputs)[0]
    model(use_cache=False, **inputs)
    largest = clip.step()[0]
    threshold = largest.sort().values[2].item() + 1e-3  # only the largest head is above
    for name, parameter in attention.named_parameters():
        parameter.data.copy_(before[name])
    clip.threshold = threshold
    model(use_cache=False, **inputs)
    assert clip.step()[0].max() > threshold
    new = mla_logits(model, 3, inputs)[0]
    head = int(largest.argmax())
    others = [h for h in range(4) if h != head]
    torch.testing.assert_close(new[:, head], old[:, head] * threshold / largest[head], rtol=1e-4, atol=1e-5)
    assert torch.equal(new[:, others], old[:, others])
    values = attention.kv_b_proj.weight.view(4, 32, -1)[:, 16:]
    assert torch.equal(values, before["kv_b_proj.weight"].view(4, 32, -1)[:, 16:])
    clip.step()
    cache = model(use_cache=True, **inputs)[CACHE_ARGUMENT]
    clip.step()
    for width in (8, 1):  # expanded, then absorbed
        model(input_ids=tokens(2, width), **{CACHE_ARGUMENT: cache})
    assert torch.isneginf(clip.step()).all(), "a continued cache is not measured"
    model.eval()(**inputs)
    assert torch.isneginf(clip.step()).all(), "evaluation is not measured"
    clip.close()
