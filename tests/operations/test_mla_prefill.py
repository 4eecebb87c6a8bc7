"""A chunk of tokens against a long latent cache, in blocks of keys: the sum over all keys at once, in less memory."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from kimi_k3 import CACHE_ARGUMENT as CACHE
from kimi_k3 import HybridCache
from kimi_k3.kernels import mla_prefill
from rounding import EXACT

pytestmark = pytest.mark.one_release

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
GPU_ONLY = pytest.mark.skipif(not ON_GPU, reason="needs a GPU")


@pytest.mark.parametrize(
    ("dtype", "bound"),
    [(torch.float64, 1e-12), (torch.float32, 2e-3 if ON_GPU else None), (torch.bfloat16, 1e-2),
     pytest.param(torch.float16, 2e-3, marks=GPU_ONLY)],
)  # fmt: skip
@pytest.mark.parametrize(("tokens", "keys"), [(1, 300), (40, 40), (100, 101), (33, 450), (260, 700)])
@pytest.mark.parametrize(("size", "value_size"), [(24, 16), (20, 20), (12, 30)])
def test_blocks_equal_all_keys_at_once(tokens, keys, size, value_size, dtype, bound, monkeypatch):
    """Against float64 on all keys, scores in the hundreds too; head sizes that fused kernels want padded.

    In float32 a score is known to a unit of the sum of its terms' magnitudes, and a weight of the softmax as its score.
    """
    monkeypatch.setattr(mla_prefill, "MIN_BLOCK", 128)
    torch.manual_seed(0)
    query = (8 * torch.randn(2, 3, tokens, size)).to(DEVICE, dtype)
    latents = torch.randn(2, keys, 30).to(DEVICE, dtype)
    weight = torch.randn(3, 30, size + value_size).to(DEVICE, dtype)
    blocks = []

    def expand(part):
        blocks.append(part.shape[1])
        return torch.matmul(part[:, None], weight.to(part.dtype)).split([size, value_size], dim=-1)

    got = mla_prefill.attend_in_blocks(query, latents, expand, 0.3)
    assert got.shape == (2, tokens, 3, value_size) and got.dtype == dtype
    assert sum(blocks) == keys and max(blocks) <= max(tokens, 128)
    key, value = expand(latents)
    scores = query.double() @ key.double().transpose(-1, -2) * 0.3
    hidden = torch.ones(tokens, keys, dtype=torch.bool, device=DEVICE).triu(keys - tokens + 1)
    expected = (scores.masked_fill(hidden, float("-inf")).softmax(-1) @ value.double()).transpose(1, 2)
    if bound is None:
        bound = 2**-24 * (query.abs() @ key.abs().transpose(-1, -2) * 0.3).max()
    assert ((got.double() - expected).norm() / expected.norm()).item() < bound


def test_where_no_fused_kernel_runs():
    """What other devices take is what a CPU's kernel gives, its sums included, causal or not."""
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 3, 5, 16), torch.randn(2, 3, 9, 16), torch.randn(2, 3, 9, 16)
    for causal, keys in ((True, 5), (False, 9)):
        parts = [x.double() for x in (query, key[:, :, :keys], value[:, :, :keys])]
        found = mla_prefill._composed(*parts, causal, 0.3), mla_prefill._attention(*parts, causal, 0.3)
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs.to(ours.dtype), rtol=1e-6, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("folder", ["k3_tiny_mxfp4", "kimi_linear_flat"])
def test_chunks_of_a_prompt(data_dir, folder, monkeypatch):
    """A prompt in chunks is that prompt, many scores of the absorbed form included; padding takes the masks."""
    model = AutoModelForCausalLM.from_pretrained(data_dir / folder, dtype=torch.float32).to(DEVICE)
    model, close = (model, {"atol": 5e-4, "rtol": 0}) if ON_GPU else (model.double(), EXACT)
    ids = torch.randint(3, 160, (2, 300), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    calls, plain = [], mla_prefill.attend_in_blocks

    def counted(query, *args):
        calls.append(query.shape[2])
        return plain(query, *args)

    monkeypatch.setattr(mla_prefill, "attend_in_blocks", counted)
    monkeypatch.setattr(mla_prefill, "MIN_BLOCK", 64)
    expected = model(ids).logits
    assert not calls
    for most in (1 << 24, 0):
        monkeypatch.setattr("kimi_k3.layers_kimi_k3.MOST_SCORES", most)
        calls.clear()
        cache = HybridCache(model.config)
        got = torch.cat([model(part, **{CACHE: cache}).logits for part in ids.split([150, 100, 3, 46, 1], 1)], dim=1)
        torch.testing.assert_close(got, expected, **close)
        assert 100 in calls and (3 in calls) == (most == 0 and not ON_GPU) and 1 not in calls
    calls.clear()
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    cache = HybridCache(model.config)
    model(ids[:, :150], attention_mask=mask[:, :150], **{CACHE: cache})
    model(ids[:, 150:], attention_mask=mask, **{CACHE: cache})
    with torch.enable_grad():
        model(ids[:, :100], **{CACHE: (cache := HybridCache(model.config))})
        model(ids[:, 100:], **{CACHE: cache}).logits.sum().backward()
    assert not calls
