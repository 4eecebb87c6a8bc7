"""A folder of prefixes in which anything may lie: what is odd is left alone, requests go on, answers are right."""

import os
import threading
from pathlib import Path

import pytest
import torch

import tiny
from kimi_k3 import CACHE_ARGUMENT as CACHE
from kimi_k3 import HybridCache
from kimi_k3 import __main__ as cli
from kimi_k3.serving import tiers
from kimi_k3.serving.prefix_cache import PrefixCache

pytestmark = pytest.mark.one_release

MODEL = tiny.model("km", **tiny.DENSE).double()
ODD = "ab" * 32


def tokens(length, seed=0):
    return torch.randint(3, tiny.VOCABULARY, (1, length), generator=torch.Generator().manual_seed(seed))


def make(folder, **options):
    settings = {"device_bytes": 1 << 30, "folder": folder, "disk_bytes": 1 << 30, "block": 4, "every": 12}
    return PrefixCache(MODEL, **{**settings, **options})


@torch.no_grad()
def check(cache, ids):
    """The tokens that were restored; the logits are those of a cold run with the same splits."""
    logits, done = cache.forward(ids)
    cold, start = HybridCache(MODEL.config), 0
    for end in done.splits:
        expected = MODEL(ids[:, start:end], **{CACHE: cold}).logits[:, -1:]
        start = end
    assert torch.equal(logits, expected)
    return done.hit


def namespace(folder):
    (place,) = folder.iterdir()
    return place


@pytest.fixture
def odd(tmp_path):
    """A folder with a part of every kind of entry that is none, beside two texts that are kept."""
    folder, elsewhere = tmp_path / "kept", tmp_path / "elsewhere"
    cache = make(folder)
    check(cache, tokens(20))
    check(cache, tokens(20, 1))
    cache.close()
    place = namespace(folder)
    elsewhere.write_bytes(next(place.glob("*.latents.*")).read_bytes())
    (place / f"{ODD}.latents.safetensors").mkdir()
    (place / f"{ODD}.latents.safetensors" / "inside").touch()
    os.mkfifo(place / f"{ODD}.state.safetensors")
    (place / f"{ODD[::-1]}.latents.safetensors").symlink_to(elsewhere)
    (place / f"{ODD[::-1]}.state.safetensors").symlink_to("/dev/zero")
    (place / "0.writing").mkdir()
    (place / "notes.txt").write_text("mine")
    return folder


def test_odd_entries_are_left_alone(odd, tmp_path, caplog):
    """A directory, a pipe, links and a stranger's file, named like parts or not; none is opened or deleted."""
    before = sorted(path.name for path in namespace(odd).iterdir())
    cache = make(odd)
    assert check(cache, tokens(20)) == check(cache, tokens(20, 1)) == 19
    assert check(cache, tokens(30, 2)) == 0
    cache.flush()
    cache.close()
    assert caplog.text.count("it is no regular file") == len(caplog.records) == 4  # once each
    assert {*before} <= {path.name for path in namespace(odd).iterdir()}
    for action in ("stats", "clear"):
        assert cli.main(["cache", action, str(odd)]) == (2 if action == "clear" else 0)
    assert {*before} <= {path.name for path in namespace(odd).iterdir()} and (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("lock", ["pipe", "link", "directory"])
def test_an_odd_lock_switches_the_disk_off(odd, lock, caplog):
    file = namespace(odd) / "lock"
    file.unlink()
    {"pipe": os.mkfifo, "link": lambda file: file.symlink_to("elsewhere"), "directory": os.mkdir}[lock](file)
    cache = make(odd)
    assert cache.disk.bypassed and len(caplog.records) == 1 and "prefixes stay in memory" in caplog.text
    assert check(cache, tokens(20)) == 0 and check(cache, tokens(20)) == 19
    cache.close()
    assert not (odd / "elsewhere").exists()


def test_a_folder_that_cannot_be_made_switches_the_disk_off(tmp_path, caplog):
    (tmp_path / "file").touch()
    linked = tmp_path / "linked"
    with make(linked).disk._file_lock:
        place = namespace(linked)
    place.rename(tmp_path / "moved")
    place.symlink_to(tmp_path / "moved")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / ("deep/" * 900), linked):
        caplog.clear()
        cache = make(folder)
        assert check(cache, tokens(20)) == 0 and check(cache, tokens(20)) == 19
        cache.flush()
        cache.clear()
        cache.close()
        assert cache.disk.bypassed and len(caplog.records) == 1, caplog.text
    assert [path.name for path in (tmp_path / "moved").iterdir()] == ["lock"]


@pytest.mark.parametrize("refused", ["listing", "deleting", "writing"])
def test_a_folder_that_becomes_unusable_switches_the_disk_off(refused, tmp_path, caplog, monkeypatch):
    """Rights that are taken away while it serves: no request fails, one warning, what memory holds stays."""
    cache = make(tmp_path / "kept", device_bytes=20_000, disk_bytes=120_000)
    assert check(cache, tokens(20)) == 0
    cache.flush()

    def denied(path, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(path))

    owner, name = {"listing": (os, "scandir"), "deleting": (Path, "unlink"), "writing": (os, "replace")}[refused]
    monkeypatch.setattr(owner, name, denied)
    for seed in range(8):  # more than fits
        check(cache, tokens(40, seed))
        cache.flush()
    assert cache.disk.bypassed and not cache.disk.entries
    assert caplog.text.count("prefixes stay in memory") == len(caplog.records) == 1
    assert check(cache, tokens(20, 9)) == 0 and check(cache, tokens(20, 9)) == 19
    cache.close()


def test_a_damaged_file_that_may_not_be_deleted_is_left_alone(tmp_path, caplog, monkeypatch):
    folder = tmp_path / "kept"
    cache = make(folder)
    check(cache, tokens(20))
    cache.close()
    (first, *_) = namespace(folder).glob("*.latents.*")

    def denied(self, *args, **kwargs):
        raise PermissionError(1, "Operation not permitted")

    with make(folder).disk._file_lock:  # another process is there, so that nothing is swept up
        first.write_bytes(b"\xff" * 100)
        monkeypatch.setattr(Path, "unlink", denied)
        cache = make(folder)
        for _ in range(3):
            check(cache, tokens(20))
            cache.flush()
        assert not cache.disk.bypassed
        assert caplog.text.count("is dropped") == caplog.text.count("is left alone: Operation not permitted") == 1
        cache.close()
    assert first.read_bytes() == b"\xff" * 100


def test_a_pipe_that_takes_the_place_of_a_part_does_not_hold_the_reader(tmp_path):
    """Between the look at the folder and the reading."""
    behind = tiers.Behind()
    tier = tiers.DiskTier(tmp_path, 1 << 30, "ab", behind)
    for part in (("a", "state"), ("a", "latents")):
        os.mkfifo(tier.path(part))
        read = threading.Thread(target=lambda part=part: (tier.read(part), tier.describe(part[0])), daemon=True)
        read.start()
        read.join(10)
        assert not read.is_alive()
    tier.close()
    behind.close()
