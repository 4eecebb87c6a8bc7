"""eager, sdpa, flash and flex attention: honoured, visible and of one result.

flash-attn runs on GPUs only. In its place stand plain torch functions with its signature, put where transformers
imports the package, so what reaches the kernel is tested: masks, offsets, causality, head sizes, scale and dropout.
Flex attention runs as torch's uncompiled form but for one test: the code that torch 2.13 generates for a CPU does not
compile for some shapes that are dynamic.
"""

import copy
import shutil

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import flex_attention
from transformers import AutoModelForCausalLM, masking_utils, modeling_flash_attention_utils
from transformers.integrations import flex_attention as flex_integration

from kimi_k3 import CACHE_ARGUMENT as CACHE
from kimi_k3 import HybridCache
from kimi_k3.layers_kimi_k3 import KimiK3MLAttention
from rounding import EXACT, rms, rms_of_float32

LENGTHS = (9, 17, 30)


@pytest.fixture(scope="module", params=["k3_tiny_mxfp4", "kimi_linear_flat"])
def model(request, data_dir):
    return AutoModelForCausalLM.from_pretrained(data_dir / request.param, dtype=torch.float32).double()


def tokens(rows, length, seed=0):
    return torch.randint(3, 160, (rows, length), generator=torch.Generator().manual_seed(seed))


DOCUMENTS = [tokens(1, length, length) for length in LENGTHS]


def attend(q, k, v, causal, scale):
    """[T, H, D] of one sequence; the last query reads all keys, as in flash-attn since 2.1."""
    mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q)) if causal else None
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).transpose(0, 1)


class Flash:
    """What flash-attn does, and what it was asked for."""

    def __init__(self):
        self.calls = []

    def note(self, q, k, v, dropout_p, softmax_scale, causal):
        assert q.shape[-1] == k.shape[-1] == v.shape[-1], "flash-attn wants one head size"
        assert dropout_p == 0.0 and causal
        self.calls.append((q.shape[-1], softmax_scale))

    def flash_attn_func(self, q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1)):
        self.note(q, k, v, dropout_p, softmax_scale, causal)
        return torch.stack([attend(*row, causal, softmax_scale) for row in zip(q, k, v, strict=True)])

    def flash_attn_varlen_func(
        self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
        causal=False, window_size=(-1, -1),
    ):  # fmt: skip
        self.note(q, k, v, dropout_p, softmax_scale, causal)
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        assert max_seqlen_q == cu_seqlens_q.diff().max() and max_seqlen_k == cu_seqlens_k.diff().max()
        assert len(q) == cu_seqlens_q[-1] and len(k) == cu_seqlens_k[-1]
        pieces = [x.split(offsets.diff().tolist()) for x, offsets in ((q, cu_seqlens_q), (k, cu_seqlens_k))]
        pieces.append(v.split(cu_seqlens_k.diff().tolist()))
        return torch.cat([attend(*sequence, causal, softmax_scale) for sequence in zip(*pieces, strict=True)])


@pytest.fixture
def flash(model, monkeypatch):
    """The model under flash_attention_2, with the stand-in for the package."""
    package, utils = Flash(), modeling_flash_attention_utils
    found = (package.flash_attn_func, package.flash_attn_varlen_func, None, utils._pad_input, utils._unpad_input)
    monkeypatch.setattr(utils, "_lazy_imports", lambda *args, **kwargs: found)
    monkeypatch.setattr(utils, "_loaded_implementation", None)
    monkeypatch.setitem(utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2], "general_availability_check", lambda: True)
    monkeypatch.setattr(type(model), "_flash_attn_can_dispatch", lambda *args, **kwargs: True)
    for part in model.modules():
        if hasattr(part, "_flash_attn_can_dispatch"):
            monkeypatch.setattr(type(part), "_flash_attn_can_dispatch", lambda *args, **kwargs: True)
    model.set_attn_implementation("flash_attention_2")
    yield package
    model.set_attn_implementation("sdpa")


def needs_compiler():
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("transformers compiles the masks of flex attention, which needs a C++ compiler on a CPU")


@pytest.fixture
def flex(model, monkeypatch):
    """Neither the kernel nor its masks are compiled, which takes seconds a shape: one test below compiles both."""
    monkeypatch.setattr(flex_integration, "WrappedFlexAttention", lambda training: lambda: flex_attention)
    compiled = masking_utils.create_block_mask
    monkeypatch.setattr(masking_utils, "create_block_mask", lambda **given: compiled(**given | {"_compile": False}))
    model.set_attn_implementation("flex_attention")
    yield
    model.set_attn_implementation("sdpa")


@pytest.fixture(params=["flash", "flex"])
def implementation(request):
    return request.getfixturevalue(request.param)


def expanded_always(model, monkeypatch):
    """No absorbed attention, which is eager whatever the implementation: decoding goes through the kernel too."""
    monkeypatch.setattr(KimiK3MLAttention, "_absorbing_is_cheaper", lambda *args: False)


@pytest.mark.parametrize("absorbed", [True, False], ids=["as chosen", "expanded"])
@pytest.mark.parametrize("pieces", [[40], [7, 1, 1, 21, 10]], ids=["whole", "pieces"])
@torch.no_grad()
def test_padding_anywhere(model, implementation, pieces, absorbed, monkeypatch):
    """Fault 25: left, right and middle padding in one batch, with a cache."""
    ids, mask = torch.zeros(3, 40, dtype=torch.long), torch.zeros(3, 40, dtype=torch.long)
    places = [torch.arange(40 - 9, 40), torch.arange(17), torch.randperm(40)[:30].sort().values]
    for row, document in enumerate(DOCUMENTS):
        ids[row, places[row]], mask[row, places[row]] = document[0], 1
    if not absorbed:
        expanded_always(model, monkeypatch)
    cache, outputs, start = HybridCache(model.config), [], 0
    for size in pieces:
        stop = start + size
        outputs.append(model(ids[:, start:stop], attention_mask=mask[:, :stop], **{CACHE: cache}).logits)
        start = stop
    logits = torch.cat(outputs, dim=1)
    without_cache = model(ids, attention_mask=mask, use_cache=False).logits
    model.set_attn_implementation("sdpa")
    for row, document in enumerate(DOCUMENTS):
        expected = model(document).logits[0]
        torch.testing.assert_close(logits[row, mask[row].bool()], expected, **EXACT)
        torch.testing.assert_close(without_cache[row, mask[row].bool()], expected, **EXACT)


@pytest.mark.parametrize("padded", [False, True], ids=["packed", "packed and padded"])
@torch.no_grad()
def test_packed_documents_do_not_touch(model, implementation, padded):
    """Faults 53, 58: boundaries reach the kernel, in one row and in two rows with padding."""
    ids = torch.cat(DOCUMENTS, dim=1)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    arguments = {"position_ids": positions}
    if padded:  # the second row holds the documents in another order, the first ends in padding
        order = [DOCUMENTS[i] for i in (1, 0, 2)]
        ids = torch.cat([F.pad(ids, (0, 3)), F.pad(torch.cat(order, dim=1), (3, 0))])
        second = torch.cat([torch.arange(d.shape[1]) for d in order])[None]
        arguments["position_ids"] = torch.cat([F.pad(positions, (0, 3)), F.pad(second, (3, 0))])
        arguments["attention_mask"] = torch.cat([F.pad(torch.ones_like(positions), pad) for pad in ((0, 3), (3, 0))])
    logits = model(ids, **arguments).logits
    model.set_attn_implementation("sdpa")
    alone = {document.shape[1]: model(document).logits[0] for document in DOCUMENTS}
    expected = torch.cat([alone[n] for n in LENGTHS])
    torch.testing.assert_close(logits[0, : sum(LENGTHS)], expected, **EXACT)
    if padded:
        torch.testing.assert_close(logits[1, 3:], torch.cat([alone[n] for n in (17, 9, 30)]), **EXACT)


def test_generation_gives_the_same_text(model, implementation):
    ids, mask = tokens(2, 20), torch.ones(2, 20, dtype=torch.long)
    mask[0, :6] = 0
    settings = {"attention_mask": mask, "max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    text = model.generate(ids, **settings)
    model.set_attn_implementation("sdpa")
    assert torch.equal(text, model.generate(ids, **settings))


@torch.no_grad()
def test_a_few_tokens_of_one_unpadded_row(model, implementation):
    """Drafts and short chunks go through the absorbed form, where the mask of one plain row has fewer dimensions."""
    ids = tokens(1, 30)
    cache = HybridCache(model.config)
    model(ids[:, :27], **{CACHE: cache})
    torch.testing.assert_close(model(ids[:, 27:], **{CACHE: cache}).logits, model(ids).logits[:, 27:], **EXACT)
    ids = tokens(1, 8).repeat(1, 3)
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    text = model.generate(ids, prompt_lookup_num_tokens=3, **settings)
    model.set_attn_implementation("sdpa")
    assert torch.equal(text, model.generate(ids, **settings))


def test_what_reaches_a_flash_kernel(model, flash):
    """One head size (that of the keys), the scale of q k^T before padding, no dropout; gradients flow."""
    text = model.config.get_text_config()
    embeds = model.get_input_embeddings()(DOCUMENTS[2]).detach().requires_grad_()
    model(inputs_embeds=embeds).logits.square().sum().backward()
    size = text.qk_nope_head_dim + text.qk_rope_head_dim
    assert set(flash.calls) == {(size, size**-0.5)}
    assert len(flash.calls) == text.layer_types.count("full_attention")
    model.set_attn_implementation("sdpa")
    other = embeds.detach().clone().requires_grad_()
    model(inputs_embeds=other).logits.square().sum().backward()
    torch.testing.assert_close(embeds.grad, other.grad, **EXACT)


@pytest.mark.one_release
@torch.no_grad()
def test_compiled_flex_attention(model):
    """In float32, as what torch generates for a CPU knows no float64."""
    needs_compiler()
    ids, mask = tokens(2, 40), torch.ones(2, 40, dtype=torch.long)
    mask[0, 5:12] = 0

    def logits(model):
        return model(ids, attention_mask=mask).logits[mask.bool()]

    single = copy.deepcopy(model).float()
    single.set_attn_implementation("flex_attention")
    torch._dynamo.reset()
    assert rms(logits(single) - logits(model)) < rms_of_float32(model, logits)


@torch.no_grad()
def test_attention_weights_of_packed_documents(model, implementation):
    """Weights are computed eagerly; with documents their mask must not be the kernel's."""
    ids = torch.cat(DOCUMENTS, dim=1)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    weights = model(ids, position_ids=positions, output_attentions=True).attentions
    assert all(w[..., 9:, :9].abs().max() == 0 for w in weights)
    model.set_attn_implementation("sdpa")
    for got, expected in zip(
        weights, model(ids, position_ids=positions, output_attentions=True).attentions, strict=True
    ):
        torch.testing.assert_close(got, expected, **EXACT)


def test_static_caches_refuse_kernels_without_a_mask(model, implementation):
    with torch.no_grad(), pytest.raises(ValueError, match="use 'sdpa' with it"):
        model(tokens(1, 5), **{CACHE: HybridCache(model.config, max_length=8)})


def test_the_setting_is_honoured_and_visible(model, data_dir):
    """Fault 25: the configs say what runs, also that of a multimodal model's text part."""
    text_model = getattr(model, "language_model", model)
    for name in ("eager", "flex_attention", "sdpa"):
        model.set_attn_implementation(name)
        configs = (model.config, model.config.get_text_config(), text_model.config, text_model.model.config)
        assert {config._attn_implementation for config in configs} == {name}
    loaded = AutoModelForCausalLM.from_pretrained(model.name_or_path, attn_implementation="eager")
    assert loaded.config.get_text_config()._attn_implementation == "eager"


def test_what_is_not_there_is_refused(model):
    """Fault 24: without flash-attn the other implementations work, and asking for it gives transformers' error."""
    with pytest.raises(ImportError, match=r"[Ff]lash"):
        model.set_attn_implementation("flash_attention_2")
    for name in ("paged|eager", "fused"):
        with pytest.raises(ValueError, match="use 'eager', 'sdpa', 'flash_attention_2' or 'flex_attention'"):
            model.set_attn_implementation(name)
    assert model.config._attn_implementation == "sdpa"
    assert copy.deepcopy(model)(tokens(1, 5)).logits.isfinite().all()
