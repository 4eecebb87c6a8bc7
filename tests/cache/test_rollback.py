"""Going back: crop, assisted and prompt-lookup decoding on a cache with recurrent states."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

import tiny
from kimi_k3 import CACHE_ARGUMENT as CACHE
from kimi_k3 import HybridCache
from kimi_k3.kernels import kda
from kimi_k3.rollback_kimi_k3 import RECORDED_COLUMNS
from rounding import EXACT


@pytest.fixture(scope="module", params=["k3_tiny_mxfp4", "kimi_linear_flat"])
def model(request, data_dir):
    return AutoModelForCausalLM.from_pretrained(data_dir / request.param, dtype=torch.float32).double()


def tokens(rows, length, seed=0):
    return torch.randint(3, 160, (rows, length), generator=torch.Generator().manual_seed(seed))


def recording_cache(model):
    cache = HybridCache(model.config)
    cache.activate_past_recording()
    return cache


@pytest.mark.one_release
@pytest.mark.portable
@pytest.mark.parametrize("kept", [0, 1, 2, 5, 9])
@torch.no_grad()
def test_drafts_leave_no_trace(model, kept):
    """Fault 35: prefill, forward draft tokens in two pieces, crop, go on: equal to a run without drafts."""
    prompt, draft, following = tokens(2, 40), tokens(2, 9, 1), tokens(2, 4, 2)
    cache = recording_cache(model)
    model(prompt, **{CACHE: cache})
    cache.crop(0)
    model(draft[:, :2], **{CACHE: cache})
    model(draft[:, 2:], **{CACHE: cache})
    cache.crop(kept - 9)
    assert cache.get_seq_length() == 40 + kept
    assert all(layer.get_seq_length() == 40 + kept for layer in cache.layers)
    got = model(following, **{CACHE: cache}).logits
    expected = model(torch.cat([prompt, draft[:, :kept], following], dim=1)).logits[:, -4:]
    torch.testing.assert_close(got, expected, **EXACT)


@pytest.mark.one_release
@pytest.mark.portable
@torch.no_grad()
def test_many_accepted_and_rejected_drafts(model):
    """Fault 40: after many interleaved rounds the state equals that of a clean run."""
    generator = torch.Generator().manual_seed(3)
    cache, history = recording_cache(model), tokens(1, 20)
    model(history, **{CACHE: cache})
    cache.crop(0)
    for round_ in range(12):
        size = int(torch.randint(1, 8, (1,), generator=generator))
        kept = int(torch.randint(0, size + 1, (1,), generator=generator))
        draft = tokens(1, size, 10 + round_)
        model(draft, **{CACHE: cache})
        cache.crop(kept - size)
        history = torch.cat([history, draft[:, :kept]], dim=1)
    clean = HybridCache(model.config)
    model(history, **{CACHE: clean})
    for layer, expected in zip(cache.layers, clean.layers, strict=True):
        for got, want in zip(layer.tensors(), expected.tensors(), strict=True):
            torch.testing.assert_close(got, want, **EXACT)


@pytest.mark.one_release
@torch.no_grad()
def test_crop_into_a_long_prompt(model):
    """Of a prompt only the last columns are recorded, so that recording a long one costs no memory."""
    prompt = tokens(2, 5 * RECORDED_COLUMNS)
    cache = recording_cache(model)
    model(prompt, **{CACHE: cache})
    assert sum(part.length for part in cache.layers[0].recording.parts) == RECORDED_COLUMNS
    untouched = copy.deepcopy(cache)
    with pytest.raises(ValueError, match="recorded the last 64"):
        cache.crop(-RECORDED_COLUMNS - 1)
    assert cache.get_seq_length() == untouched.get_seq_length()
    cache.crop(-RECORDED_COLUMNS)
    got = model(tokens(2, 1, 1), **{CACHE: cache}).logits
    expected = model(torch.cat([prompt[:, :-RECORDED_COLUMNS], tokens(2, 1, 1)], dim=1)).logits[:, -1:]
    torch.testing.assert_close(got, expected, **EXACT)


@pytest.mark.one_release
@torch.no_grad()
def test_recording_a_prompt_scans_it_once(model, monkeypatch):
    """The state that `crop` can go back to comes out of the forward, which replays nothing."""
    scanned, plain = [], kda.chunk_kda
    monkeypatch.setattr(kda, "chunk_kda", lambda q, *args, **kw: scanned.append(q.shape[1]) or plain(q, *args, **kw))
    counts = []
    for cache in (HybridCache(model.config), recording_cache(model)):
        scanned.clear()
        model(tokens(2, 200), **{CACHE: cache})
        counts.append(sum(scanned))
    assert counts[0] == counts[1] > 0
    scanned.clear()
    cache.crop(-40)
    assert 0 < sum(scanned) < counts[0] // 5


@pytest.mark.one_release
@torch.no_grad()
def test_crop_of_a_padded_batch(model):
    """Padding inside the removed and the kept columns of a batch, then other rows of it."""
    lengths, width = [6, 11], 14
    ids, mask = torch.zeros(2, width, dtype=torch.long), torch.zeros(2, width, dtype=torch.long)
    rows = [tokens(1, n, n)[0] for n in lengths]
    for row, (places, text) in enumerate(zip([range(2, 14, 2), range(3, 14)], rows, strict=True)):
        ids[row, list(places)], mask[row, list(places)] = text, 1
    cache = recording_cache(model)
    model(ids[:, :5], attention_mask=mask[:, :5], **{CACHE: cache})
    model(ids[:, 5:], attention_mask=mask, **{CACHE: cache})
    cache.batch_select_indices(torch.tensor([1, 0, 1]))
    cache.crop(-5)
    order = torch.tensor([1, 0, 1])
    kept = mask[order, : width - 5]
    following = tokens(3, 3, 7)
    got = model(following, attention_mask=torch.cat([kept, torch.ones(3, 3).long()], dim=1), **{CACHE: cache}).logits
    for row, source in enumerate(order.tolist()):
        alone = torch.cat([ids[source, : width - 5][kept[row].bool()], following[row]])[None]
        torch.testing.assert_close(got[row : row + 1], model(alone).logits[:, -3:], **EXACT)


@pytest.mark.one_release
@pytest.mark.parametrize("kept", [0, 3, 4])
@pytest.mark.parametrize("rows", [[1, 0], [1, 0, 1]], ids=str)
@torch.no_grad()
def test_rows_that_move_take_their_past_along(model, rows, kept):
    """Between a draft and its crop: states, tails and recorded inputs are those of the rows that stand there now."""
    prompt, draft, following = tokens(2, 20), tokens(2, 4, 1), tokens(len(rows), 2, 2)
    cache, clean = recording_cache(model), HybridCache(model.config)
    model(prompt, **{CACHE: cache})
    cache.crop(0)
    model(draft, **{CACHE: cache})
    cache.reorder_cache(torch.tensor(rows))
    cache.crop(kept - 4)
    history = torch.cat([prompt, draft[:, :kept]], dim=1)[rows]
    model(history, **{CACHE: clean})
    for layer, expected in zip(cache.layers, clean.layers, strict=True):
        for got, want in zip(layer.tensors(), expected.tensors(), strict=True):
            torch.testing.assert_close(got, want, **EXACT)
    got = model(following, **{CACHE: cache}).logits
    torch.testing.assert_close(got, model(torch.cat([history, following], dim=1)).logits[:, -2:], **EXACT)


def generate(model, ids, **kwargs):
    settings = {"max_new_tokens": 24, "min_new_tokens": 24, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    return model.generate(ids, **settings, **kwargs)


def test_prompt_lookup_equals_greedy(model):
    """Fault 37: prompt lookup works; a repetitive prompt makes it draft."""
    ids = tokens(1, 12).repeat(1, 4)
    assert torch.equal(generate(model, ids, prompt_lookup_num_tokens=5), generate(model, ids))


@pytest.mark.one_release
@pytest.mark.parametrize("noise", [0.0, 0.05, 1.0], ids=["same", "similar", "random"])
def test_any_drafter_gives_the_greedy_text(model, noise):
    """Faults 36, 48: the text does not depend on the drafter, even a random one."""
    drafter = copy.deepcopy(model)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.is_floating_point():
                parameter.add_(noise * parameter.std() * torch.randn_like(parameter))
    ids = tokens(1, 30)
    assert torch.equal(generate(model, ids, assistant_model=drafter), generate(model, ids))


@pytest.mark.one_release
@torch.no_grad()
def test_acceptance_stays_total_at_any_length(model):
    """Fault 50: what the model drafts itself is accepted after a long and after a short context."""
    for length in (5, 150):
        ids = tokens(1, length)
        text = generate(model, ids)[:, length:]
        cache = recording_cache(model)
        model(ids[:, :-1], **{CACHE: cache})
        cache.crop(0)
        verified = model(torch.cat([ids[:, -1:], text[:, :8]], dim=1), **{CACHE: cache}).logits.argmax(-1)
        assert torch.equal(verified[:, :8], text[:, :8])


@torch.no_grad()
def test_autocast_does_not_reach_the_replay(model):
    """Generating under autocast crops under autocast; states and their replay are float32 all the same."""
    cache = recording_cache(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(tokens(2, 3 * RECORDED_COLUMNS), **{CACHE: cache})
        cache.crop(-20)
        model(tokens(2, 30, 1), **{CACHE: cache})
        other = copy.deepcopy(cache)
        cache.crop(-6)
        ids = tokens(1, 12).repeat(1, 4)
        assert generate(model, ids, prompt_lookup_num_tokens=5).shape == (1, 72)
    other.crop(-6)
    for layer, expected in zip(cache.layers, other.layers, strict=True):
        for got, want in zip(layer.tensors(), expected.tensors(), strict=True):
            assert torch.equal(got, want) and got.dtype == want.dtype


def wide_model():
    """Layers whose states weigh something, next to a narrow rest."""
    sizes = {"vocab_size": 160, "hidden_size": 256, "intermediate_size": 512, "kda": {"num_heads": 8, "head_dim": 64}}
    return tiny.model("kkkm", **sizes, **tiny.DENSE)


class Operations(TorchDispatchMode):
    """Counts the operations of torch, which are what a step of a few tokens costs."""

    count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.count += 1
        return operation(*args, **(kwargs or {}))


def counted(work):
    """(operations, multiplications and additions in products of matrices) of `work()`."""
    with Operations() as operations, FlopCounterMode(display=False) as products:
        work()
    return operations.count, products.get_total_flops()


@pytest.mark.one_release
@pytest.mark.parametrize("size", ["tiny", "wide"])
@torch.no_grad()
def test_crop_costs_less_than_a_decode_step(data_dir, size):
    """Fault 41: taking a few tokens back replays a few projected inputs, no forward. Counted, not timed."""
    if size == "wide":
        model = wide_model()
    else:
        model = AutoModelForCausalLM.from_pretrained(data_dir / "k3_tiny_mxfp4", dtype=torch.float32)
    cache = recording_cache(model)
    model(tokens(1, 64), **{CACHE: cache})
    cache.crop(0)
    model(tokens(1, 6), **{CACHE: cache})
    cropped = counted(lambda: cache.crop(-3))
    decoded = counted(lambda: model(tokens(1, 1), **{CACHE: cache}))
    assert 0 < cropped[0] < decoded[0] and 0 < cropped[1] < decoded[1]


@pytest.mark.one_release
@torch.no_grad()
def test_a_whole_draft_is_taken_back_to_the_last_bit(model):
    """Nothing is computed for it; and a crop of everything leaves an empty cache, which starts over."""
    cache = recording_cache(model)
    model(tokens(2, 20), **{CACHE: cache})
    cache.crop(0)
    kept = [[tensor.clone() for tensor in layer.tensors()] for layer in cache.layers]
    model(tokens(2, 5, 1), **{CACHE: cache})
    cache.crop(-5)
    for layer, before in zip(cache.layers, kept, strict=True):
        assert all(map(torch.equal, layer.tensors(), before))
    cache.reset()
    model(tokens(2, 9, 2), **{CACHE: cache})
    cache.crop(-9)
    assert cache.get_seq_length() == 0
    got = model(tokens(2, 7, 3), **{CACHE: cache}).logits
    torch.testing.assert_close(got, model(tokens(2, 7, 3)).logits, **EXACT)


@pytest.mark.one_release
@torch.no_grad()
def test_what_crop_refuses(model):
    cache = HybridCache(model.config)
    model(tokens(1, 8), **{CACHE: cache})
    with pytest.raises(ValueError, match="activate_past_recording"):
        cache.crop(-1)
    with pytest.raises(ValueError, match="minus the number"):
        cache.crop(3)
    cache.activate_past_recording()
    assert cache.is_croppable
    with pytest.raises(ValueError, match="holds 8 tokens"):
        cache.crop(-9)
    assert cache.get_seq_length() == 8
    model(tokens(1, 2), **{CACHE: cache})
    cache.crop(-2)
    assert cache.get_seq_length() == 8


@pytest.mark.one_release
def test_drafts_longer_than_what_is_recorded_by_default(model):
    ids = tokens(1, 20).repeat(1, 8)
    assert torch.equal(generate(model, ids, prompt_lookup_num_tokens=100), generate(model, ids))


def test_generate_refuses_what_transformers_would_feed_twice(model):
    """On the newest transformers both give wrong text without a word, with any cache class."""
    ids = tokens(1, 10)
    with torch.no_grad():
        cache = HybridCache(model.config)
        model(ids, **{CACHE: cache})
    with pytest.raises(ValueError, match="at least one new one"):
        generate(model, ids, **{CACHE: copy.deepcopy(cache)})
    longer = torch.cat([ids, ids[:, :3]], dim=1)
    with pytest.raises(ValueError, match="cannot continue a cache"):
        generate(model, longer, prompt_lookup_num_tokens=3, **{CACHE: cache})
