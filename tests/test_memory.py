"""What a forward holds at most, counted tensor by tensor: every storage from its making to its release."""

import copy

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kimi_k3 import CACHE_ARGUMENT as CACHE
from kimi_k3 import HybridCache, KimiK3ForCausalLM, KimiK3TextConfig

VOCABULARY = 2048


class Memory(TorchDispatchMode):
    """Bytes of the storages made inside: `live` now, `peak`, and the `largest` of them."""

    def __init__(self):
        super().__init__()
        self.held, self.peak, self.largest = {}, 0, 0

    @property
    def live(self):
        self.held = {key: entry for key, entry in self.held.items() if not entry[0].expired()}
        return sum(size for _, size in self.held.values())

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        inputs = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in inputs:
                storage = tensor.untyped_storage()
                self.held[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self.largest = max(self.largest, storage.nbytes())
                self.peak = max(self.peak, self.live)
        return result


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
