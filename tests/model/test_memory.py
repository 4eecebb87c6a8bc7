"""What a forward holds at most, counted tensor by tensor: every storage from its making to its release."""

import contextlib
import copy
import importlib.util
from pathlib import Path

import pytest
import torch

import kimi_k3
from kimi_k3 import CACHE_ARGUMENT as CACHE
from kimi_k3 import HybridCache, KimiK3ForCausalLM, KimiK3TextConfig

pytestmark = pytest.mark.one_release

VOCABULARY = 2048


_script = Path(kimi_k3.__file__).parent / "benchmarks" / "activation_memory.py"
_spec = importlib.util.spec_from_file_location("activation_memory", _script)
activation_memory = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(activation_memory)
Memory = activation_memory.Memory


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = KimiK3TextConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=2, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8,
        linear_attn_config={
            "kda_layers": [1, 2, 4], "full_attn_layers": [3], "num_heads": 2, "head_dim": 8,
            "short_conv_kernel_size": 4, "gate_lower_bound": -5.0, "use_full_rank_gate": True,
        },
        attn_res_block_size=2, num_experts=4, num_experts_per_token=2, moe_intermediate_size=16,
        routed_expert_hidden_size=16, num_shared_experts=1, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return KimiK3ForCausalLM(config).eval()


def tokens(length, seed=0):
    return torch.randint(3, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def test_one_position_of_8192_never_makes_all_logits(model):
    """With `logits_to_keep=1`, and in `generate`, which sets it, no tensor is nearly as large as [T, vocabulary]."""
    ids, whole = tokens(8192), 8192 * VOCABULARY * 4
    with Memory() as memory:
        model(ids, logits_to_keep=1)
    assert memory.peak < whole
    assert memory.largest < whole / 8
    with Memory() as memory:
        model.generate(ids, max_new_tokens=2, do_sample=False)
    assert memory.largest < whole / 8
    with Memory() as memory:
        model(ids[:, :512])
    assert memory.largest >= 512 * VOCABULARY * 4, "the measure sees all logits where they are made"


@torch.no_grad()
def test_the_number_of_lengths_seen_changes_no_peak(model):
    """Fault 34: nothing is kept a length: after many distinct prompts the peak is the first one, and nothing stays."""

    def prefill(length, mask=False):
        ids = tokens(length)
        mask = {"attention_mask": (torch.arange(length) > 2).long()[None]} if mask else {}
        model(ids, logits_to_keep=1, **mask, **{CACHE: HybridCache(model.config)})

    for mask in (False, True):
        prefill(900, mask)  # what is made once, whatever the length
        peaks = []
        for lengths in ([900], range(1, 300, 13), [900]):
            with Memory() as memory:
                for length in lengths:
                    prefill(length, mask)
            assert memory.live == 0
            peaks.append(memory.peak)
        assert peaks[0] == peaks[2] > peaks[1]


def test_checkpointing_lowers_the_peak_of_a_training_step(model):
    """Fault 96: forward and backward at T=2048; the gradients are the same."""
    model, ids = copy.deepcopy(model).train(), tokens(2048)

    def step():
        model.zero_grad()
        with Memory() as memory:
            model(ids, labels=ids, use_cache=False).loss.backward()
        return memory.peak, model.model.layers[0].self_attn.q_proj.weight.grad.clone()

    plain, gradient = step()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    checkpointed, same = step()
    torch.testing.assert_close(same, gradient, atol=1e-6, rtol=1e-4)
    assert checkpointed < 0.7 * plain


@pytest.mark.parametrize("path", ["torch", "triton"])
def test_attention_residuals_are_held_once(model, path):
    """Checkpointing holds the block sums as inputs of layers and adds nothing for them; the kernels hold no copies.

    One more [T, hidden] is above the 4 % that is allowed: a copy of a block, a stack, what the output mix computes.
    """
    if path == "triton":
        pytest.importorskip("triton")
    length, layers, size = 64, 8, 2
    fields = {**model.config.to_dict(), "num_hidden_layers": layers, "attn_res_block_size": size}
    linear = {"kda_layers": [i for i in range(1, layers + 1) if i % 4], "full_attn_layers": [4, 8]}
    fields["linear_attn_config"] = {**fields["linear_attn_config"], **linear}
    blocks, ordinary = (KimiK3TextConfig.from_dict({**fields, "attn_res_block_size": n}) for n in (size, None))
    stream = length * blocks.hidden_size * 2  # bytes of [T, hidden] in bfloat16
    least = (layers + 2) * stream  # the embedding, the sum after every layer, and the result
    with activation_memory.gpu_path() if path == "triton" else contextlib.nullcontext():
        for reentrant in (False, True):
            held, _ = activation_memory.count(blocks, length, {"use_reentrant": reentrant})
            assert least <= held <= 1.04 * least
        plain, _ = activation_memory.count(blocks, length, None)
        assert plain > 5 * least, "the measure sees what checkpointing does not hold"
        if path == "triton":
            mixes = [1 + -(-at // size) + (feeds and at % size == 0) for at in range(layers) for feeds in (0, 1)]
            scores = sum([*mixes, 1 + layers // size]) * length * 2 * 4  # and 1/rms, for every source
            more = plain - activation_memory.count(ordinary, length, None)[0]
            assert 0 < more <= (2 * layers + 1) * stream + scores, "what mixes make; their sources are held as they are"


@torch.no_grad()
def test_a_long_prompt_holds_weights_cache_and_one_chunk(model):
    """Chunks against a reserved cache: at most 1.2 times that, and longer prompts add nothing but their latents."""
    weights, chunk = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())), 1024
    peaks, caches = [], []
    for length in (chunk, 4 * chunk, 12 * chunk):
        parts = tokens(length).split(chunk, dim=1)
        with Memory() as memory:
            cache = HybridCache(model.config)
            cache.reserve(length)
            for part in parts:
                model(part, logits_to_keep=1, **{CACHE: cache})
        peaks.append(memory.peak + weights)
        caches.append(cache.nbytes)
    one = peaks[0] - caches[0]
    assert peaks[2] < 1.2 * (one + caches[2])
    assert peaks[2] - peaks[1] < 1.01 * (caches[2] - caches[1])
