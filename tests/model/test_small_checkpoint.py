"""The checkpoint that ships: its shape, its size, and that it does what docs/small_checkpoint.md says."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kimi_k3
from kimi_k3 import demo
from kimi_k3.eval.words import HELD_OUT_NAMES

FOLDER = Path(kimi_k3.__file__).parent / "checkpoints" / "small"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype="auto")


def test_it_is_k3_in_every_part_and_small(model):
    config = model.config
    assert type(model) is kimi_k3.KimiK3ForCausalLM
    assert set(config.layer_types) == {"linear_attention", "full_attention"}
    assert config.attn_res_block_size and config.routed_expert_hidden_size and config.latent_moe_use_norm
    assert config.hidden_act == "situ" and config.gate_lower_bound == -5.0 and config.mla_use_output_gate
    assert model.model.layers[1].block_sparse_moe.experts.gate_up_proj_packed.dtype == torch.uint8
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= 13e6


def test_tokenizer_round_trips_any_text(tokenizer):
    for text in ("The year 1861.", "  naïve — 漢字 🙂\n\n\ttabs", "x" * 300, ""):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert len(tokenizer("48213", add_special_tokens=False).input_ids) == 5, "digits stand alone, so they can be copied"
    assert {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id} == {0, 1, 2}


def test_it_predicts_held_out_text(model, tokenizer):
    text = (FOLDER / "sample.txt").read_text(encoding="utf-8")
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :1024]
    with torch.no_grad():
        nats = model(ids, labels=ids).loss.item() * (ids.shape[1] - 1)
    bits_per_byte = nats / 0.6931 / len(tokenizer.decode(ids[0]).encode())
    assert bits_per_byte < 1.6


@torch.no_grad()
def test_it_binds_numbers_to_names_in_a_long_document(model, tokenizer):
    """Six facts of one kind in 1,500 tokens, about people whom its training never named; all asked for."""
    text = tokenizer.decode(tokenizer((FOLDER / "sample.txt").read_text(encoding="utf-8")).input_ids[:1500])
    numbers = dict(zip(HELD_OUT_NAMES[::3], ("70392", "18845", "60013", "99127", "24681", "35570"), strict=True))
    for place, (name, number) in enumerate(numbers.items()):
        text = demo.insert_fact(text, f"The secret number of {name} is {number}.", (5 - place) / 6)
    ids = tokenizer(text, return_tensors="pt").input_ids
    memory = kimi_k3.HybridCache(model.config)
    model(ids, **{kimi_k3.CACHE_ARGUMENT: memory})
    for name, number in numbers.items():
        question = tokenizer(demo.QUESTION.format(name=name), return_tensors="pt").input_ids
        asked = torch.cat([ids, question], dim=1)
        answer = model.generate(
            asked,
            attention_mask=torch.ones_like(asked),
            max_new_tokens=8,
            do_sample=False,
            **{kimi_k3.CACHE_ARGUMENT: memory.snapshot()},
        )
        assert tokenizer.decode(answer[0, asked.shape[1] :]).startswith(f" {number}."), name
