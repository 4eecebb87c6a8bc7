"""State reuse: snapshots, forks, files, and random histories of a cache against documents run alone."""

import copy
import io
import pickle
import subprocess
import sys
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

import tiny
from kimi_k3 import CACHE_ARGUMENT as CACHE
from kimi_k3 import HybridCache, KimiK3ForCausalLM
from rounding import EXACT


@pytest.fixture(scope="module")
def model(data_dir):
    return AutoModelForCausalLM.from_pretrained(data_dir / "k3_tiny_mxfp4", dtype=torch.float32).double()


def tokens(rows, length, seed=0):
    return torch.randint(3, 160, (rows, length), generator=torch.Generator().manual_seed(seed))


def filled(model, ids):
    cache = HybridCache(model.config)
    with torch.no_grad():
        model(ids, **{CACHE: cache})
    return cache


@pytest.mark.one_release
@torch.no_grad()
def test_restore_is_bitwise(model):
    """Fault 38: snapshot, forward, restore, forward again: equal to the last bit, as often as one likes."""
    cache = filled(model, tokens(2, 30))
    snapshot = cache.snapshot()
    first = model(tokens(2, 5, 1), **{CACHE: cache}).logits
    for _ in range(2):
        cache.restore(snapshot)
        assert cache.get_seq_length() == 30
        assert torch.equal(model(tokens(2, 5, 1), **{CACHE: cache}).logits, first)


@pytest.mark.one_release
@pytest.mark.portable
@torch.no_grad()
def test_forks_do_not_see_each_other(model):
    """Faults 46, 47: one prefix, several continuations in turn, none overwrites what another reads."""
    prompt, tails = tokens(1, 30), [tokens(1, 8, seed) for seed in (1, 2, 3)]
    trunk = filled(model, prompt)
    forks = [trunk.snapshot() for _ in tails]
    outputs = [[] for _ in tails]
    for t in range(8):
        for fork, tail, out in zip([trunk, *forks[1:]], tails, outputs, strict=True):
            out.append(model(tail[:, t : t + 1], **{CACHE: fork}).logits)
        if t == 3:
            trunk_at_four = trunk.snapshot()
    for tail, out in zip(tails, outputs, strict=True):
        expected = model(torch.cat([prompt, tail], dim=1)).logits[:, -8:]
        torch.testing.assert_close(torch.cat(out, dim=1), expected, **EXACT)
    trunk.restore(forks[0])
    model(tails[1], **{CACHE: trunk})  # writes where `trunk_at_four` reads
    got = model(tails[0][:, 4:5], **{CACHE: trunk_at_four}).logits
    torch.testing.assert_close(got, outputs[0][4], **EXACT)


@pytest.mark.one_release
@torch.no_grad()
def test_a_forward_that_was_broken_off_is_noticed(model):
    """Out of memory, or an interrupt: the first layers have the tokens and the last ones have not."""
    ids = tokens(1, 20)
    cache = filled(model, ids[:, :12])
    snapshot, interrupt = cache.snapshot(), KeyboardInterrupt()

    def stop(*args):
        raise interrupt

    hook = model.language_model.model.layers[-1].register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        model(ids[:, 12:15], **{CACHE: cache})
    hook.remove()
    with pytest.raises(ValueError, match="broken off"):
        model(ids[:, 12:], **{CACHE: cache})
    cache.restore(snapshot)
    torch.testing.assert_close(model(ids[:, 12:], **{CACHE: cache}).logits, model(ids).logits[:, 12:], **EXACT)
    cache.reset()
    torch.testing.assert_close(model(ids, **{CACHE: cache}).logits, model(ids).logits, **EXACT)


@pytest.mark.one_release
def test_a_snapshot_of_another_kind_is_refused(model):
    with pytest.raises(ValueError, match="other layers"):
        HybridCache(model.config).restore(HybridCache(model.config, max_length=9))
    with pytest.raises(ValueError, match="room for a token"):
        HybridCache(model.config, max_length=0)


def through_torch_save(thing):
    file = io.BytesIO()
    torch.save(thing, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


COPIES = {
    "pickle": lambda thing: pickle.loads(pickle.dumps(thing)),
    "torch_save": through_torch_save,
    # What a queue of `torch.multiprocessing` hands over: tensors in memory that both processes share.
    "shared_memory": lambda thing: ForkingPickler.loads(ForkingPickler.dumps(thing)),
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        *(("pickle", kind) for kind in ("growing", "recording", "padded", "static", "autograd")),
        ("torch_save", "padded"),
        ("shared_memory", "growing"),
        ("shared_memory", "static"),
        ("deepcopy", "recording"),
    ],
)
def test_a_cache_is_pickled(model, kind, how):
    """The copy goes on from the boundary by itself, whatever the cache that it was made of does."""
    ids, mask = tokens(2, 20), torch.ones(2, 20, dtype=torch.long)
    if kind == "padded":
        mask[1, :4] = 0
    cache = HybridCache(model.config, max_length=30 if kind == "static" else None)
    if kind == "recording":
        cache.activate_past_recording()
    with torch.set_grad_enabled(kind == "autograd"):
        model(ids[:, :12], attention_mask=mask[:, :12], **{CACHE: cache})
        assert cache.layers[0].tensors()[0].requires_grad == (kind == "autograd")
    copied = COPIES[how](cache)
    assert type(copied) is HybridCache and copied.get_seq_length() == 12
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits[:, 12:]
        other = torch.ones(2, 15, dtype=torch.long)
        other[:, :12] = mask[:, :12]
        model(tokens(2, 3, 9), attention_mask=other, **{CACHE: cache})  # writes behind what the copy reads
        if kind == "recording":
            copied.crop(-4)
            got = model(ids[:, 8:], **{CACHE: copied}).logits[:, 4:]
        else:
            got = model(ids[:, 12:], attention_mask=mask, **{CACHE: copied}).logits
    torch.testing.assert_close(got, expected, **EXACT)


@pytest.mark.parametrize("how", COPIES)
def test_a_model_output_is_pickled(model, how):
    with torch.no_grad():
        out = model(tokens(1, 5), output_hidden_states=True)
    copied = COPIES[how](out)
    assert type(copied) is type(out) and copied.keys() == out.keys()
    assert torch.equal(copied.logits, out.logits) and torch.equal(copied.hidden_states[1], out.hidden_states[1])
    assert copied.cache is copied.past_key_values and copied.cache.get_seq_length() == 5


@pytest.mark.one_release
def test_a_pickled_cache_has_no_spare_room(model):
    cache = HybridCache(model.config)
    assert len(pickle.dumps(cache)) < 10_000
    cache.reserve(10_000)
    with torch.no_grad():
        model(tokens(1, 40), **{CACHE: cache})
    assert len(pickle.dumps(cache)) < cache.nbytes + 10_000


@pytest.mark.one_release
def test_a_snapshot_copies_nothing(model):
    cache = filled(model, tokens(1, 40))
    snapshot = cache.snapshot()
    for layer, held in zip(cache.layers, snapshot.layers, strict=True):
        for tensor, other in zip(layer.tensors(), held.tensors(), strict=True):
            assert tensor.data_ptr() == other.data_ptr()


@pytest.mark.one_release
@pytest.mark.portable
@pytest.mark.parametrize("recording", [False, True])
@torch.no_grad()
def test_states_inside_a_forward(model, recording):
    """One forward exports the states at any boundaries; each goes on as a cold run does, alone."""
    cache, prompt, following = HybridCache(model.config), tokens(2, 230), tokens(2, 5, 1)
    if recording:
        cache.activate_past_recording()
    cache.keep_states([1, 7, 64, 128, 192, 201, 230])
    model(prompt[:, :210], **{CACHE: cache})
    model(prompt[:, 210:], **{CACHE: cache})
    model(following, **{CACHE: cache})
    for column in (1, 7, 64, 128, 192, torch.tensor(201), 230):
        got = model(following, **{CACHE: cache.snapshot(column)}).logits
        expected = model(torch.cat([prompt[:, :column], following], dim=1)).logits[:, -5:]
        torch.testing.assert_close(got, expected, **EXACT)
    with pytest.raises(ValueError, match="no state was kept at column 8"):
        cache.snapshot(8)
    with pytest.raises(ValueError, match="column 9 has been passed"):
        cache.keep_states([9])
    if recording:
        cache.crop(-5)
        assert cache.snapshot(201).get_seq_length() == 201
        cache.crop(0)
    cache.keep_states([300])
    with pytest.raises(ValueError, match="no state was kept at column 201"):
        cache.snapshot(201)
    held = cache.get_seq_length()
    mask = torch.ones(2, held + 80, dtype=torch.long)
    mask[0, held + 2] = 0
    with pytest.raises(ValueError, match="padding exports no states"):
        model(tokens(2, 80), attention_mask=mask, **{CACHE: cache})
    assert {layer.get_seq_length() for layer in cache.layers} == {held}
    static = HybridCache(model.config, max_length=9)
    with pytest.raises(ValueError, match="static"):
        static.keep_states([3])
    model(tokens(2, 5), **{CACHE: static})
    with pytest.raises(ValueError, match="static"):
        static.snapshot(3)
    assert static.snapshot(5).get_seq_length() == 5


CONTINUE = """
import sys, torch
from kimi_k3 import CACHE_ARGUMENT, HybridCache, KimiK3ForConditionalGeneration
model = KimiK3ForConditionalGeneration.from_pretrained(sys.argv[1], dtype=torch.float32).double()
cache = HybridCache.load(sys.argv[2], model)
with torch.no_grad():
    torch.save(model(torch.load(sys.argv[3]), **{CACHE_ARGUMENT: cache}).logits, sys.argv[4])
"""


@pytest.mark.one_release
@torch.no_grad()
def test_questions_about_one_text_copy_no_latents(model):
    """Going back to a snapshot and on again writes in place unless somebody still reads there; room can be reserved."""
    cache = HybridCache(model.config)
    cache.reserve(500)
    model(tokens(1, 30), **{CACHE: cache})
    layer = next(i for i, layer in enumerate(cache.layers) if "latents" in layer.tensor_names)
    address = cache.layers[layer].latents.data_ptr()
    snapshot = cache.snapshot()
    kept = snapshot.layers[layer].latents.clone()
    for seed in (1, 2, 3):
        model(tokens(1, 8, seed), **{CACHE: cache})
        assert cache.layers[layer].latents.data_ptr() == address
        cache.restore(snapshot)
    for fork in (snapshot.snapshot() for _ in range(2)):  # one after the other, each gone before the next
        model(tokens(1, 400, 4), **{CACHE: fork})
        assert fork.layers[layer].latents.data_ptr() == address
        del fork
    model(tokens(1, 8, 5), **{CACHE: cache})
    later = cache.snapshot()
    read = later.layers[layer].latents.clone()
    cache.restore(snapshot)
    model(tokens(1, 8, 6), **{CACHE: cache})  # `later` reads where this writes
    assert cache.layers[layer].latents.data_ptr() != address
    assert torch.equal(later.layers[layer].latents, read) and torch.equal(snapshot.layers[layer].latents, kept)


def test_a_saved_cache_goes_on_in_another_process(model, data_dir, tmp_path):
    """Fault 49: serialize, load elsewhere, continue: equal."""
    cache, following = filled(model, tokens(2, 33)), tokens(2, 4, 1)
    cache.save(tmp_path / "cache.safetensors", model)
    torch.save(following, tmp_path / "ids.pt")
    files = [data_dir / "k3_tiny_mxfp4", *(tmp_path / n for n in ("cache.safetensors", "ids.pt", "logits.pt"))]
    subprocess.run([sys.executable, "-c", CONTINUE, *map(str, files)], check=True, capture_output=True)
    with torch.no_grad():
        expected = model(following, **{CACHE: cache}).logits
    assert torch.equal(torch.load(tmp_path / "logits.pt"), expected)


@pytest.mark.one_release
def test_a_foreign_cache_is_refused(model, data_dir, tmp_path):
    """Fault 51: a refusal says why; the boundary is part of the file."""
    path = tmp_path / "cache.safetensors"
    with pytest.raises(ValueError, match="empty"):
        HybridCache(model.config).save(path, model)
    filled(model, tokens(1, 5)).save(path, model)
    assert HybridCache.load(path, model).get_seq_length() == 5
    other = AutoModelForCausalLM.from_pretrained(data_dir / "k3_tiny_mxfp4", dtype=torch.float32)
    with torch.no_grad():
        other.language_model.model.norm.weight[3] += 0.01
    with pytest.raises(ValueError, match="another model"):
        HybridCache.load(path, other)
    with pytest.raises(ValueError, match="not a saved HybridCache"):
        HybridCache.load(data_dir / "k3_tiny_mxfp4" / "golden.safetensors", model)


def small_model(shape):
    layers, block, dense, softplus = shape
    softplus = {"kda": tiny.KIMI_LINEAR["kda"], "q_lora_rank": None} if softplus else {}
    changes = {"attn_res_block_size": block, "initializer_range": 0.2, **softplus, **(tiny.DENSE if dense else {})}
    return tiny.model(layers, **changes).double()


SHAPES = st.tuples(
    st.sampled_from(["km", "mk", "kkm", "kk", "mm", "kmkm"]),
    st.sampled_from([None, 1, 2]),
    st.booleans(),
    st.booleans(),
)


@pytest.mark.one_release
@settings(max_examples=16, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(shape=SHAPES, data=st.data())
@torch.no_grad()
def test_random_histories_equal_each_document_alone(shape, data):
    """Random models, documents, paddings, splits, crops, reorders and snapshots: every real token as if run alone."""
    model = small_model(shape)
    rows = data.draw(st.integers(1, 3))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    cache = HybridCache(model.config)
    cache.activate_past_recording()
    documents = [torch.zeros(0, dtype=torch.long) for _ in range(rows)]
    mask = torch.zeros(rows, 0, dtype=torch.long)

    def feed(length):
        nonlocal mask
        ids = torch.randint(3, tiny.VOCABULARY, (len(documents), length), generator=generator)
        real = (torch.rand(len(documents), length, generator=generator) < 0.7).long()
        mask = torch.cat([mask, real], dim=1)
        logits = model(ids, attention_mask=mask, **{CACHE: cache}).logits
        for row in range(len(documents)):
            kept = real[row].bool()
            documents[row] = torch.cat([documents[row], ids[row][kept]])
            if kept.any():
                alone = model(documents[row][None], use_cache=False).logits[0, -int(kept.sum()) :]
                torch.testing.assert_close(logits[row][kept], alone, **EXACT)

    feed(data.draw(st.integers(1, 90)))
    for action in data.draw(st.lists(st.sampled_from(["feed", "crop", "reorder", "snapshot"]), max_size=5)):
        if action == "feed":
            feed(data.draw(st.integers(1, 9)))
        elif action == "crop":
            before, columns = [d.clone() for d in documents], mask.shape[1]
            cache.crop(0)
            feed(data.draw(st.integers(1, 9)))
            kept = data.draw(st.integers(columns, mask.shape[1]))
            cache.crop(kept - mask.shape[1])
            added = mask[:, columns:kept].sum(-1).tolist()
            documents[:] = [d[: len(b) + n] for d, b, n in zip(documents, before, added, strict=True)]
            mask = mask[:, :kept]
        elif action == "reorder":
            order = data.draw(st.lists(st.integers(0, len(documents) - 1), min_size=1, max_size=3))
            cache.batch_select_indices(torch.tensor(order))
            documents, mask = [documents[i].clone() for i in order], mask[order]
        else:
            kept = cache.snapshot(), [d.clone() for d in documents], mask.clone()
            feed(3)
            cache.restore(kept[0])
            documents, mask = kept[1], kept[2]
    feed(1)


@pytest.mark.one_release
@torch.no_grad()
def test_a_cache_with_padding_wants_its_mask(model, tmp_path):
    """Without the mask MLA would read the padding as tokens."""
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0
    cache = HybridCache(model.config)
    model(tokens(2, 9), attention_mask=mask, **{CACHE: cache})
    cache.save(tmp_path / "cache.safetensors", model)
    for held in (cache, cache.snapshot(), HybridCache.load(tmp_path / "cache.safetensors", model)):
        with pytest.raises(ValueError, match="holds padding"):
            model(tokens(2, 1), **{CACHE: held})
        model(tokens(2, 1), attention_mask=torch.cat([mask, mask[:, -1:]], dim=1), **{CACHE: held})
    with pytest.raises(ValueError, match="holds 2 rows, the input has 1"):
        model(tokens(1, 1), attention_mask=torch.ones(1, 11).long(), **{CACHE: cache})


@torch.no_grad()
def test_every_state_stays_on_its_layers_device(model):
    """Fault 45: layers on two devices, the meta device as the second; no operation of the cache gathers them on one."""
    with torch.device("meta"):
        elsewhere = KimiK3ForCausalLM(model.config.text_config)
    caches = [HybridCache(model.config) for _ in range(2)]
    for cache, runs in zip(caches, (model, elsewhere), strict=True):
        runs(tokens(2, 9).to(runs.device), **{CACHE: cache})
    cache, other = caches
    devices = ["cpu" if i % 2 else "meta" for i in range(len(cache.layers))]
    cache.layers = [(cache if device == "cpu" else other).layers[i] for i, device in enumerate(devices)]
    for operation in (
        lambda: cache.reorder_cache(torch.tensor([1, 0])),
        lambda: cache.batch_repeat_interleave(2),
        lambda: cache.batch_select_indices(torch.tensor([0, 3])),
        lambda: cache.restore(cache.snapshot()),
        lambda: cache.layers.__setitem__(slice(None), copy.deepcopy(cache).layers),
    ):
        operation()
        assert [{tensor.device.type for tensor in layer.tensors()} for layer in cache.layers] == [{d} for d in devices]
        assert cache.get_seq_length() == 9 and cache.batch_size in (2, 4)


@pytest.mark.one_release
@torch.no_grad()
def test_what_was_fed_as_a_token_cannot_become_padding(model, tmp_path):
    """The states hold it; also for rows taken from a batch, after a crop, and from a file."""
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0
    cache = HybridCache(model.config)
    cache.activate_past_recording()
    model(tokens(2, 9), attention_mask=mask, **{CACHE: cache})
    cache.save(tmp_path / "cache.safetensors", model)
    plain = filled(model, tokens(2, 9))
    selected, repeated, cropped = (copy.deepcopy(cache) for _ in range(3))
    selected.reorder_cache(torch.tensor([1, 0]))
    selected.batch_select_indices(torch.tensor([1, 1]))
    repeated.batch_repeat_interleave(2)
    cropped.crop(-2)
    for held, fed in [
        (cache, mask),
        (HybridCache.load(tmp_path / "cache.safetensors", model), mask),
        (selected, mask[[0, 0]]),
        (repeated, mask[[0, 0, 1, 1]]),
        (cropped, mask[:, :7]),
        (plain, torch.ones_like(mask)),
    ]:
        ids = tokens(len(fed), 2)
        for column in (1, 6):
            other = torch.nn.functional.pad(fed, (0, 2), value=1)
            other[0, column] = 1 - other[0, column]
            with pytest.raises(ValueError, match="contradicts the one under which the cache was filled"):
                model(ids, attention_mask=other, **{CACHE: held})
        model(ids, attention_mask=torch.nn.functional.pad(fed, (0, 2), value=1), **{CACHE: held})
    cache.reset()
    model(tokens(1, 3), **{CACHE: cache})
