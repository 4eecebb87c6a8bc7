"""A long greedy run with the cache against whole forwards of a reference."""

import pytest
import torch
from transformers.models.kimi_linear import KimiLinearForCausalLM

from kimi_k3 import KimiK3ForCausalLM

TOKENS = 256


@pytest.mark.one_release
@pytest.mark.parametrize("folder", ["k3_tiny_mxfp4", "kimi_linear_flat"])
@torch.no_grad()
def test_long_greedy_run_keeps_to_the_reference(folder, data_dir):
    """Fault 77: no drift of the state over hundreds of steps; logits at intervals, every chosen token.

    The reference is transformers' own class where it can read the checkpoint, elsewhere our forward without a cache.
    """
    model = KimiK3ForCausalLM.from_pretrained(data_dir / folder, dtype=torch.float32)
    reference = model
    if folder == "kimi_linear_flat":
        reference = KimiLinearForCausalLM.from_pretrained(data_dir / folder, dtype=torch.float32)
    prompt = torch.arange(20, 50)[None]
    output = model.generate(
        prompt,
        max_new_tokens=TOKENS,
        min_new_tokens=TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    expected = reference(output.sequences, use_cache=False).logits[:, prompt.shape[1] - 1 : -1]
    got = torch.stack(output.logits, dim=1)
    assert got.shape == expected.shape == (1, TOKENS, model.config.vocab_size)
    for step in range(0, TOKENS, 32):
        torch.testing.assert_close(got[:, step], expected[:, step], atol=1e-3, rtol=0)
    eos = model.config.eos_token_id
    expected[..., eos] = -torch.inf  # the run was not allowed to end
    chosen = output.sequences[:, prompt.shape[1] :]
    best = expected.max(-1).values
    assert (best - expected.gather(-1, chosen[..., None])[..., 0] < 1e-3).all()
