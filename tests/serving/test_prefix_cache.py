"""The prefix cache: a hit is a cold run split at the same boundaries, to the last bit, whatever happened before."""

import contextlib
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from prefix_model import BLOCK, EVERY, MODEL, STATE_BYTES, TOKEN_BYTES, check, cold, make, row, small_model, tokens
from safetensors.torch import load_file, save_file

import kimi_k3
import tiny
from kimi_k3 import CACHE_ARGUMENT as CACHE
from kimi_k3 import HybridCache, KimiK3ForCausalLM
from kimi_k3.cache_layers_kimi_k3 import LatentCacheLayer
from kimi_k3.serving import prefix_cache, tiers
from kimi_k3.serving.prefix_cache import PrefixCache
from kimi_k3.training import lora_targets
from rounding import EXACT
from waiting import PATIENCE


@pytest.mark.one_release
@pytest.mark.portable
def test_a_second_turn_starts_where_the_first_ended():
    """Faults 46, 47: one turn kept, two different follow-ups; each equals a fresh run."""
    cache, prompt = make(), tokens(30)
    assert check(cache, prompt) == 0
    for seed in (1, 2):
        assert check(cache, prompt + tokens(9, seed)) == 29
    assert check(cache, prompt) == 29  # the last token always runs
    assert check(cache, prompt[:20]) == 12  # a state every 12 tokens
    assert check(cache, prompt[:20]) == 19


@pytest.mark.one_release
def test_a_shared_prefix_is_kept_when_it_is_seen_a_second_time():
    """No state lies where two texts part until the second one shows the place; the third starts there."""
    cache, system = make(every=400), tokens(50)
    assert check(cache, system + tokens(20, 1)) == 0
    assert check(cache, system + tokens(20, 2)) == 0
    assert check(cache, system + tokens(20, 3)) == 48  # whole blocks of 4


@pytest.mark.one_release
@pytest.mark.parametrize("changed", ["_code_digest", "_compiler"])
def test_another_version_of_the_code_starts_afresh(changed, tmp_path, monkeypatch):
    """Its kernels may round elsewhere: files of this one are no exact prefix for it, and stay for who has it."""
    prompt, options = tokens(20), dict(folder=tmp_path, disk_bytes=1 << 30)
    with contextlib.closing(make(**options)) as cache:
        assert check(cache, prompt) == 0
    with monkeypatch.context() as patch:
        patch.setattr(prefix_cache, changed, lambda *_: "another")
        with contextlib.closing(make(**options)) as cache:
            assert check(cache, prompt) == 0
    with contextlib.closing(make(**options)) as cache:
        assert check(cache, prompt) == 19


def test_the_code_of_a_model_is_what_computes_its_states(data_dir, monkeypatch):
    """Kernels, files of the root, and peft where there are adapters: nothing else of the package, where editing what
    reads a training text would leave every prefix on the disk unused."""
    model, root = KimiK3ForCausalLM.from_pretrained(data_dir / "k3_tiny_mxfp4"), Path(kimi_k3.__file__).parent
    digested = []
    monkeypatch.setattr(prefix_cache, "_digest_of", lambda files: digested.append({*files}))
    prefix_cache._code_digest(model)
    prefix_cache._code_digest(get_peft_model(model, LoraConfig(r=2, **lora_targets(model))))
    own = [[f for f in files if root in f.parents and "site-packages" not in f.parts] for files in digested]
    plain, adapted = ({str(file.relative_to(root)) for file in files} for files in own)
    assert {"kernels/kda.py", "layers_kimi_k3.py", "modeling_kimi_k3.py"} <= plain
    assert {name.partition("/")[0] for name in plain if "/" in name} == {"kernels"}
    assert "lora_kimi_k3.py" in plain and adapted == plain
    assert any("peft" in file.parts for file in digested[1] - digested[0])


@pytest.mark.one_release
def test_the_fingerprint_names_the_folder_and_no_text(tmp_path):
    with contextlib.closing(make(folder=tmp_path, disk_bytes=1 << 30)) as cache:
        assert cache.index.namespace == prefix_cache.numerics_fingerprint(MODEL) == cache.disk.folder.name
        assert cache.index.root.key != cache.index.namespace


@pytest.mark.one_release
def test_a_digest_changes_with_a_file(tmp_path):
    file = tmp_path / "code.py"
    digests = []
    for text in ("a = 1", "a = 2"):
        file.write_text(text)
        prefix_cache._digest_of.cache_clear()
        digests.append(prefix_cache._digest_of((file,)))
    assert digests[0] != digests[1]


def counting(forward, lengths):
    """A forward that notes how many tokens each call reads."""
    return lambda ids, **kwargs: lengths.append(ids.shape[1]) or forward(ids, **kwargs)


@pytest.mark.one_release
@pytest.mark.portable
def test_states_exported_inside_a_forward(tmp_path):
    """In the same pass: forwards of up to 50 tokens instead of 12, hits at the same places, close to a cold run,
    bit for bit what another cache gives that saw the same texts; through files too."""
    prompt, answers = tokens(100), []
    texts = [prompt, prompt + tokens(9, 1), prompt[:40] + tokens(30, 2), prompt[:20], prompt[:40] + tokens(9, 3)]
    for options in ({}, {"device_bytes": 0, "folder": tmp_path, "disk_bytes": 1 << 30}):
        exporting, splitting, answers = make(chunk=50, **options), make(), [*answers, []]
        for text in texts:
            forwards = []
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(MODEL, "forward", counting(MODEL.forward, forwards))
                got, done = exporting.forward(row(text), keep_logits=True)
            assert forwards == ([48, 48, 3, 1] if text is prompt else [*forwards[:-1], 1])
            assert done.exact == (done.hit == 0 and len(text) < 14)
            assert done.hit == check(splitting, text) and done.splits[-1] == len(text)
            torch.testing.assert_close(got, cold(text, [len(text)])[:, done.hit :], **EXACT)
            answers[-1].append(got)
        exporting.close()
    assert all(map(torch.equal, *answers))
    again = make(chunk=50, device_bytes=0, folder=tmp_path, disk_bytes=1 << 30)
    got, done = again.forward(row(prompt + tokens(9, 1)), keep_logits=True)
    assert done.hit == 108 and torch.equal(got[:, -1], answers[0][1][:, -1])
    again.close()
    with pytest.raises(ValueError, match="chunk"):
        make(chunk=EVERY - 1)


@pytest.mark.portable
@pytest.mark.parametrize("folder", ["k3_tiny_mxfp4", "k3_dense_flat", "kimi_linear_flat"])
def test_checkpoints_of_every_family(data_dir, tmp_path, folder):
    """Routed experts, packed ones, both gates; also through files."""
    model = KimiK3ForCausalLM.from_pretrained(data_dir / folder, dtype=torch.float32).double()
    ids = tokens(90)
    for device_bytes in (1 << 30, 0):
        cache = PrefixCache(model, device_bytes, folder=tmp_path, disk_bytes=1 << 30, block=16, every=32)
        first = check(cache, ids[:70], model)
        assert first == (0 if device_bytes else 69)
        assert check(cache, ids, model) == (69 if device_bytes else 89)
        cache.close()


def test_generate_keeps_turns():
    """Two turns through the cache give the greedy text of plain generate, and the second starts behind the first."""
    cache, prompt = make(), row(tokens(20))
    first, one = cache.generate(prompt, max_new_tokens=12, do_sample=False)
    assert torch.equal(first, MODEL.generate(prompt, max_new_tokens=12, do_sample=False))
    follow = torch.cat([first, row(tokens(7, 5))], dim=1)
    second, two = cache.generate(follow, max_new_tokens=12, do_sample=False)
    assert torch.equal(second, MODEL.generate(follow, max_new_tokens=12, do_sample=False))
    assert (one.hit, two.hit) == (0, 31)  # 20 + 12, without the last one, which was never fed
    assert cache.stats()["hit_tokens"] == 31
    assert check(cache, follow[0].tolist()) > 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"num_beams": 2}, "num_beams"),
        ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup"),
        ({CACHE: HybridCache(MODEL.config)}, CACHE),
        ({"attention_mask": torch.tensor([[0] + [1] * 9])}, "padding"),
    ],
)
def test_generate_refuses_what_one_state_cannot_do(given, said):
    cache = make()
    with pytest.raises(ValueError, match=said):
        cache.generate(row(tokens(10)), max_new_tokens=2, **given)
    assert cache.stats()["lookups"] == 0


@pytest.mark.one_release
def test_bad_input_is_refused():
    for options in ({"block": 0}, {"every": 6}, {"device_bytes": -1}, {"disk_bytes": 5}, {"folder": "x"}):
        with pytest.raises(ValueError):
            make(**options)
    with pytest.raises(ValueError, match="one row"):
        make().forward(torch.ones(2, 5, dtype=torch.long))
    with pytest.raises(ValueError, match="one row"):
        make().forward(torch.ones(1, 0, dtype=torch.long))


@pytest.mark.one_release
def test_changed_weights_are_noticed():
    model = small_model(3)
    cache = PrefixCache(model, 1 << 30, block=BLOCK, every=EVERY)
    cache.forward(row(tokens(20)))
    with torch.no_grad():
        model.model.norm.weight += 0.1
    with pytest.raises(ValueError, match="weights changed"):
        cache.forward(row(tokens(20)))


@pytest.mark.one_release
def test_bytes_counted_are_bytes_held_and_stay_in_the_budget():
    cache = make()
    check(cache, tokens(30))
    boundaries = [12, 24, 29]
    assert cache.stats()["tiers"]["device"]["bytes"] == len(boundaries) * STATE_BYTES + 29 * TOKEN_BYTES
    held = {id(t): t for entry in cache.tiers[0].entries.values() for t in entry.tensors.values()}
    assert sum(t.untyped_storage().nbytes() for t in held.values()) == cache.tiers[0].used


@pytest.mark.one_release
@pytest.mark.parametrize("options", [{}, {"write_through": False}, None], ids=["device", "write-back", "three-tiers"])
def test_what_is_in_use_stays(options, disk):
    """A squeeze of every tier in the middle of a prompt: states go, latents that it stands on stay until it is over."""
    cache, prompt = make(**(disk if options is None else options)), tokens(30)
    check(cache, tokens(20, 1))
    cache.flush()
    with cache._prefilled(row(prompt)) as done:
        for level, tier in enumerate(cache.tiers):
            tier.budget = 0
            assert cache._make_room(level, 0) == (level < len(cache.tiers) - 1)
        chain = done.turn.segment.chain()
        assert [segment.end for segment in chain] == [12, 24, 29] and all(segment.pins for segment in chain)
        kept = {part for tier in cache.tiers for part in tier.entries}
        assert kept == {(segment.key, "latents") for segment in chain}
    assert all(cache._make_room(level, 0) for level in range(len(cache.tiers)))
    assert not cache.index.segments and not any(tier.entries or tier.used for tier in cache.tiers)
    cache.close()


@pytest.mark.one_release
def test_lru_goes_by_the_cost_of_computing_again():
    """Of two states of one size and age the one behind fewer tokens goes first."""
    cache = make(every=400)
    check(cache, tokens(60, 1))
    check(cache, tokens(6, 2))
    cache.tiers[0].budget = cache.tiers[0].used + 19 * TOKEN_BYTES
    check(cache, tokens(20, 3))
    assert check(cache, tokens(60, 1)) == 59
    assert check(cache, tokens(6, 2)) == 0


@pytest.mark.one_release
def test_a_state_is_valid_in_all_layers_or_in_none(tmp_path):
    """A state file that lacks one layer is no state."""
    cache = make(device_bytes=0, folder=tmp_path, disk_bytes=1 << 30)
    check(cache, tokens(9))
    cache.close()
    (state,) = Path(tmp_path).rglob("*.state.safetensors")
    tensors = load_file(state)
    del tensors["layers.2.recurrent_state"]
    save_file(tensors, state, metadata={"format": "kimi-k3 prefix 1"})
    assert check(make(device_bytes=0, folder=tmp_path, disk_bytes=1 << 30), tokens(9)) == 0


@pytest.mark.one_release
def test_write_back_moves_less_than_write_through(tmp_path):
    moved = {}
    for through in (True, False):
        budgets = {"device_bytes": 4 * STATE_BYTES + 90 * TOKEN_BYTES, "disk_bytes": 1 << 30}
        cache = make(folder=tmp_path / str(through), write_through=through, **budgets)
        for turn in range(1, 6):
            for seed in range(3):
                check(cache, tokens(60, seed)[: 12 * turn])
        cache.flush()
        moved[through] = cache.stats()["tiers"]["disk"]["written_bytes"]
    assert 0 < moved[False] < moved[True]


@pytest.mark.one_release
def test_closing_writes_what_only_memory_had(tmp_path):
    """With write-back nothing is on the disk before; a folder that is deleted meanwhile costs the files only."""
    options = {"folder": tmp_path / "kept", "disk_bytes": 1 << 30, "write_through": False}
    cache = make(**options)
    check(cache, tokens(30))
    assert cache.stats()["tiers"]["disk"]["bytes"] == 0
    cache.close()
    cache = make(**options)
    assert check(cache, tokens(30)) == 29
    shutil.rmtree(tmp_path / "kept")
    assert check(cache, tokens(30)) == 29
    cache.close()


@pytest.mark.one_release
def test_an_error_in_the_middle_leaves_nothing_pinned(monkeypatch):
    cache = make()
    check(cache, tokens(30))

    def broken(*args, **kwargs):
        raise KeyboardInterrupt

    for name in ("_assemble", "_latents"):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(cache, name, broken)
            cache.forward(row(tokens(40)))
    assert not cache.index.root.pins
    assert check(cache, tokens(40)) == 29


@pytest.mark.one_release
def test_prefetch_brings_a_prefix_up(tmp_path):
    cache = make(folder=tmp_path, disk_bytes=1 << 30)
    check(cache, tokens(30))
    cache.close()
    cache = make(folder=tmp_path, disk_bytes=1 << 30)
    ids = row(tokens(30))
    with cache._lock:  # the thread has to wait, and the caller's tensor may be another prompt by then
        prefetched = cache.prefetch(ids)
        ids.fill_(1)
    assert prefetched.result() == 29
    read = cache.stats()["tiers"]["disk"]["read_bytes"]
    assert read > 0 and check(cache, tokens(30)) == 29
    assert cache.stats()["tiers"]["disk"]["read_bytes"] == read


@pytest.mark.one_release
def test_threads_share_it(tmp_path):
    """Eight threads, a device tier that is too small for them: every answer is that of a cold run."""
    cache = make(device_bytes=6 * STATE_BYTES, host_bytes=20 * STATE_BYTES, folder=tmp_path, disk_bytes=1 << 30,
                 write_through=False)  # fmt: skip
    failures = []

    def work(seed):
        choose = random.Random(seed)
        try:
            for _ in range(12):
                check(cache, tokens(40, choose.randrange(3))[: choose.randrange(2, 40)])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
    assert cache.stats()["hits"] > 20
    assert not any(segment.pins for segment in cache.index.segments.values()) and not cache.index.root.pins
    cache.close()


CHILD = """
import resource, sys
sys.path.insert(0, sys.argv[2])
from test_prefix_cache import check, make, tokens
options = {"device_bytes": 0, "folder": sys.argv[1], "disk_bytes": 1 << 30}
resource.setrlimit(resource.RLIMIT_FSIZE, (4000, resource.RLIM_INFINITY))  # the disk is full for larger files
cache = make(**options)
for _ in range(2):
    assert check(cache, tokens(30)) == 0
    cache.flush()
assert cache.stats()["segments"] == 0
assert not [file for file in cache.disk.folder.iterdir() if file.name != "lock"]
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print("full", flush=True)
for seed in range(10**6):
    check(cache, tokens(40, seed))
    if seed % 3 == 0:
        cache.flush()
        print(seed, flush=True)
"""


@pytest.mark.one_release
def test_disk_full_two_processes_and_a_kill(tmp_path):
    """Fault 49: a process meets a full disk, then writes into a folder that this one uses at the same time, until it is
    killed. Nothing wrong is served, and everything it had flushed is there."""
    folder = str(tmp_path / "kept")
    command = [sys.executable, "-P", "-c", CHILD, folder, str(Path(__file__).parent)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=tiny.environment())
    try:
        assert child.stdout.readline() == "full\n"
        ours = make(device_bytes=0, folder=folder, disk_bytes=1 << 30)
        flushed = -1
        while flushed < 12:
            flushed = int(child.stdout.readline())
            assert check(ours, [*tokens(40, flushed), 5]) == 39  # of the other process, or kept by both
            check(ours, tokens(33, 7))
        child.send_signal(signal.SIGKILL)
    finally:
        child.kill()
        rest = child.stdout.read().split()
        child.wait()
        child.stdout.close()
    ours.close()
    flushed = max([flushed, *map(int, rest)])
    again = make(device_bytes=0, folder=folder, disk_bytes=1 << 30)
    assert not list(again.disk.folder.glob("*.writing"))
    for seed in range(flushed + 1):
        assert check(again, tokens(40, seed)) >= 36
    again.close()


@pytest.fixture
def disk(tmp_path):
    """Options of a cache with all three tiers."""
    return {"host_bytes": 1 << 30, "folder": tmp_path, "disk_bytes": 1 << 30}


@pytest.fixture
def writes(monkeypatch):
    """Checksums, one a part, of what is being written or was; it is slow, and waits while `writes.gate` is not set."""

    class Writes(list):
        gate = threading.Event()

    written, save = Writes(), tiers.save

    def slow(tensors, metadata):
        written.append(metadata["checksum"])
        assert written.gate.wait(PATIENCE)
        time.sleep(0.01)
        return save(tensors, metadata)

    written.gate.set()
    monkeypatch.setattr(tiers, "save", slow)
    yield written
    written.gate.set()


def finish_what_began(cache):
    """Wait until the thread has done all that it was told to begin; what nobody told it stays undone."""
    cache._behind._thread.submit(lambda: None).result()


def hit_of_another(disk, ids):
    """Tokens that a cache without memory of its own finds on the disk."""
    another = make(**{**disk, "device_bytes": 0, "host_bytes": 0})
    hit = check(another, ids)
    another.close()
    return hit


def at_step(step, action):
    """Stopping criteria that do something once, at a number of tokens."""

    def criterion(ids, scores, **kwargs):
        if ids.shape[1] == step:
            action()
        return torch.zeros(1, dtype=torch.bool)

    return [criterion]


@pytest.mark.one_release
def test_a_blocked_disk_delays_no_token(disk, writes):
    cache = make(**disk)
    writes.gate.clear()
    assert check(cache, tokens(30)) == 0
    text, _ = cache.generate(row(tokens(30)), max_new_tokens=8, do_sample=False)
    assert check(cache, [*text[0].tolist(), 3]) == 37  # nothing is on the disk, all of it is served
    assert cache.disk.written_bytes == 0
    writes.gate.set()
    cache.close()
    assert hit_of_another(disk, [*text[0].tolist(), 3]) == 38


@pytest.mark.one_release
@pytest.mark.parametrize("what", ["forward", "generate"])
def test_copies_begin_behind_the_last_forward(disk, monkeypatch, what):
    """The thread has all the time it needs to begin in any of the forwards, and must not."""
    cache, events, forward, on_host = make(**disk), [], MODEL.forward, tiers.on_host

    def slow(*args, **kwargs):
        finish_what_began(cache)
        logits = forward(*args, **kwargs)
        events.append("forward")
        return logits

    monkeypatch.setattr(MODEL, "forward", slow)
    monkeypatch.setattr(tiers, "on_host", lambda *args: events.append("copy") or on_host(*args))
    if what == "forward":
        cache.forward(row(tokens(20)))
    else:
        cache.generate(row(tokens(20)), max_new_tokens=3, do_sample=False)
    cache.flush()
    assert "copy" in events and events == sorted(events, key="forward".__ne__)
    assert events.count("forward") == (3 if what == "forward" else 5)
    cache.close()


@pytest.mark.one_release
@pytest.mark.parametrize("how", ["flush", "close", "flush in the middle"])
def test_what_is_owed_is_paid(disk, writes, how):
    """In the middle of a generation nothing is begun before, and all of the prompt is there afterwards."""
    cache, prompt = make(**disk), tokens(30)
    if how == "flush in the middle":

        def flush():
            assert not writes
            cache.flush()
            assert hit_of_another(disk, [*prompt, 5]) == 29

        cache.generate(row(prompt), max_new_tokens=3, stopping_criteria=at_step(31, flush))
    else:
        check(cache, prompt)
        getattr(cache, how)()
    assert hit_of_another(disk, [*prompt, 5]) >= 29
    cache.close()


@pytest.mark.one_release
@pytest.mark.parametrize(("states", "shared"), [(4, {True, False}), (0, {False}), (1000, {True})])
def test_what_the_device_evicts_or_refuses_is_copied_before(disk, monkeypatch, states, shared):
    """The tiers below share the tensors of the device's tier while it has them, and no longer."""
    copies, on_host = set(), tiers.on_host

    def copied(tensors, ready):
        fresh = {name: tensor.clone() for name, tensor in on_host(tensors, ready).items()}
        copies.update(map(id, fresh.values()))
        return fresh

    monkeypatch.setattr(tiers, "on_host", copied)
    cache, prompt = make(**{**disk, "device_bytes": states * STATE_BYTES}), tokens(60)
    state_of = cache._state

    def views(*args):  # which the device's tier replaces
        return {name: tensor.repeat(2, *[1] * (tensor.dim() - 1))[:1] for name, tensor in state_of(*args).items()}

    monkeypatch.setattr(cache, "_state", views)
    kept = {}

    def look():
        device, *below = cache.tiers
        for tier in below:
            for part, entry in tier.entries.items():
                kept[tier.name, part] = part in device
                for name, tensor in entry.tensors.items():
                    assert (id(tensor) in copies) != (part in device)
                    assert part not in device or tensor is device.entries[part].tensors[name]

    with monkeypatch.context() as later:
        later.setattr(cache._behind, "start", lambda device=None: None)  # a file that is written needs no tensors
        cache.generate(row(prompt), max_new_tokens=3, stopping_criteria=at_step(61, look))
    assert len(kept) == 20 and set(kept.values()) == shared
    assert cache.tiers[0].used <= cache.tiers[0].budget
    cache.close()
    assert hit_of_another(disk, [*prompt, 5]) == 59


@pytest.mark.one_release
@pytest.mark.parametrize("states", [0, 4, 1000])
def test_little_room_begins_files_at_once(disk, states):
    """Else all that the device could not hold would lie in host memory until a generation of minutes is over."""
    cache, written = make(**{**disk, "device_bytes": states * STATE_BYTES}), []

    def look():
        finish_what_began(cache)
        written.append(cache.disk.written_bytes)

    cache.generate(row(tokens(60)), max_new_tokens=3, stopping_criteria=at_step(61, look))
    assert (written[0] > 0) == (states < 1000)
    cache.close()


def test_a_generation_that_breaks_off_pays_too(disk, writes):
    cache, prompt = make(**disk), tokens(30)

    def leave():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.generate(row(prompt), max_new_tokens=5, stopping_criteria=at_step(32, leave))
    assert not cache._behind._waiting and not cache.index.root.pins
    cache.flush()
    assert hit_of_another(disk, prompt) == 29
    cache.close()


@pytest.mark.one_release
@pytest.mark.parametrize("options", [{}, {"host_bytes": 1 << 30}, None], ids=["device", "host", "disk"])
@pytest.mark.parametrize("write_through", [True, False])
def test_a_closed_cache_says_so(disk, options, write_through):
    """Before anything runs; what runs while another thread closes it ends. Closing and flushing again do nothing."""
    cache = make(**(disk if options is None else options), write_through=write_through)
    at_two = at_step(32, cache.close)
    text, _ = cache.generate(row(tokens(30)), max_new_tokens=5, stopping_criteria=at_two, do_sample=False)
    assert torch.equal(text, MODEL.generate(row(tokens(30)), max_new_tokens=5, do_sample=False))
    cache.flush()
    cache.close()
    for use in (cache.prefill, cache.forward, cache.generate, cache.prefetch):
        with pytest.raises(RuntimeError, match="the prefix cache is closed"):
            use(row(tokens(20, 1)))
    assert not cache._behind._waiting and not cache.index.root.pins
    if options is None:
        assert hit_of_another(disk, tokens(30)) == 29


@pytest.mark.one_release
def test_two_threads_pay_once(disk, writes):
    """A short forward ends while another thread generates: it pays for both, and nothing is written twice."""
    cache, prompt = make(**disk), tokens(30)

    def meanwhile():
        assert not writes
        other = threading.Thread(target=check, args=(cache, tokens(20, 1)))
        other.start()
        other.join()
        finish_what_began(cache)
        assert len(writes) == 2 * len(cache.index.segments) == 10  # latents and state

    cache.generate(row(prompt), max_new_tokens=3, stopping_criteria=at_step(31, meanwhile))
    cache.flush()
    assert len(writes) == len(set(writes)) == len(cache.disk.entries) == 12
    cache.close()
    assert hit_of_another(disk, prompt) == 29 and hit_of_another(disk, tokens(20, 1)) == 19


@pytest.mark.one_release
def test_what_is_forgotten_is_not_written(disk, writes):
    cache = make(**disk)
    writes.gate.clear()
    check(cache, tokens(30))
    cache.clear()
    writes.gate.set()
    cache.flush()
    assert not any(tier.entries or tier.used for tier in cache.tiers)
    assert not list(cache.disk.folder.glob("*.*")) and len(writes) <= 1  # one may have been under way
    cache.close()
    assert hit_of_another(disk, tokens(30)) == 0


@pytest.mark.one_release
def test_a_copy_that_fails_costs_the_copy(disk, monkeypatch, caplog):
    """Logged; the disk forgets the part, memory serves it, and later ones are written."""
    cache = make(**disk)
    with monkeypatch.context() as patch:
        patch.setattr(tiers, "on_host", lambda *args: 1 / 0)
        check(cache, tokens(30))
        cache.flush()
    assert "a copy behind the first token failed" in caplog.text and "could not be written" in caplog.text
    assert not cache.disk.entries and check(cache, tokens(30)) == 29
    check(cache, tokens(30, 1))
    cache.close()
    assert hit_of_another(disk, tokens(30, 1)) == 29 and hit_of_another(disk, tokens(30)) == 0


@pytest.mark.one_release
def test_what_was_prefetched_is_there(disk, monkeypatch):
    """Copies to a GPU are not waited for where they are made: the future is done when they are."""
    cache, waited = make(**disk), []
    check(cache, tokens(30))
    event = SimpleNamespace(synchronize=lambda: waited.append(1))
    monkeypatch.setattr(prefix_cache, "recorded", lambda device: event)
    assert cache.prefetch(row(tokens(30))).result() == 29 and waited == [1]
    cache.close()


@pytest.mark.one_release
def test_a_hit_copies_latents_into_buffers_with_room(monkeypatch):
    """The forward behind a hit does not copy them a second time to make room."""
    cache, grown, grow = make(), [], LatentCacheLayer._grown
    check(cache, tokens(60))
    monkeypatch.setattr(LatentCacheLayer, "_grown", lambda *args: grown.append(args[2]) or grow(*args))
    _, done = cache.forward(row(tokens(60) + tokens(30, 1)))
    assert done.hit == 59 and grown == [59]
