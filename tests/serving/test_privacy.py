"""Whose prefixes are whose: modes of files, salts of tenants, parts that a key authenticates."""

import os
import stat

import pytest
import torch

import tiny
from kimi_k3.serving import tiers
from kimi_k3.serving.prefix_cache import PrefixCache
from kimi_k3.serving.protocol import CompletionRequest

pytestmark = pytest.mark.one_release

MODEL = tiny.model("km", **tiny.DENSE, **tiny.NO_SPECIAL).double()
KEY = "a key of at least 16 bytes"


def tokens(length, seed=0):
    return torch.randint(3, tiny.VOCABULARY, (1, length), generator=torch.Generator().manual_seed(seed))


def make(folder=None, **options):
    disk = {"folder": folder, "disk_bytes": 1 << 30} if folder else {}
    return PrefixCache(MODEL, **{"device_bytes": 1 << 30, "block": 4, "every": 12, **disk, **options})


def test_files_are_for_their_owners_eyes(tmp_path):
    """Whatever the umask; a folder of an earlier version is closed too."""
    folder, before = tmp_path / "a" / "kept", os.umask(0)
    try:
        for _ in range(2):
            cache = make(folder)
            cache.forward(tokens(20))
            cache.flush()
            cache.close()
            (place,) = folder.iterdir()
            modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (folder, place, *place.iterdir())}
            assert modes.pop(folder) == 0o700 and modes.pop(place) == 0o700
            assert len(modes) > 3 and {*modes.values()} == {0o600}
            place.chmod(0o755)
    finally:
        os.umask(before)


def test_a_salt_keeps_prefixes_apart(tmp_path):
    """Neither what was kept nor how much of it tells anything across salts; on the disk too, and after a restart."""
    ids = tokens(30)
    for folder in (None, tmp_path):
        cache = make(folder)
        cold = MODEL.generate(ids, max_new_tokens=3, do_sample=False)
        for salt, hit in (("", 0), ("one", 0), ("two", 0), ("one", 29), ("", 29), ("two", 29), ("three", 0)):
            output, done = cache.generate(ids, cache_salt=salt, max_new_tokens=3, do_sample=False)
            assert done.hit == hit and torch.equal(output, cold)
        assert cache.prefetch(ids, cache_salt="one").result() == 29
        assert cache.prefill(ids, cache_salt="o").hit == 0
        cache.close()
    cache = make(tmp_path)
    assert cache.forward(ids, cache_salt="one")[1].hit == 29 and cache.forward(ids)[1].hit == 29
    assert cache.forward(ids, cache_salt="four")[1].hit == 0
    assert not any("one" in path.read_bytes().decode("latin-1") for path in tmp_path.rglob("*.safetensors"))
    cache.close()


def test_salts_that_keep_nothing_leave_nothing(tmp_path):
    """A client that sends a new one each time fills no memory."""
    cache = make(device_bytes=0)
    for number in range(20):
        cache.forward(tokens(20), cache_salt=f"salt {number}")
    assert [*cache.index.roots.values()] == [cache.index.root] and not cache.index.segments
    cache = make()
    cache.forward(tokens(20), cache_salt="\ud800")  # half a character, as JSON may have it
    cache.forward(tokens(20), cache_salt="other")
    assert len(cache.index.roots) == 3
    cache.clear()
    assert [*cache.index.roots.values()] == [cache.index.root]


def test_requests_have_a_salt():
    request = {"model": "m", "prompt": "a"}
    assert CompletionRequest(**request).cache_salt is None
    assert CompletionRequest(**request, cache_salt="tenant").cache_salt == "tenant"
    for salt in ("", "x" * 257, 7):
        with pytest.raises(ValueError, match="cache_salt"):
            CompletionRequest(**request, cache_salt=salt)


def test_a_key_authenticates_parts(tmp_path, monkeypatch, caplog):
    """Files made without it lie in another place, and put in its place they are never used."""
    cache = make(tmp_path)
    cache.forward(tokens(20))
    cache.close()
    (plain,) = tmp_path.iterdir()
    monkeypatch.setenv("KIMI_K3_PREFIX_KEY", KEY)
    cache = make(tmp_path)
    assert cache.forward(tokens(20))[1].hit == 0
    cache.flush()
    own = cache.disk.folder
    assert own != plain and len([*own.iterdir()]) == len([*plain.iterdir()])
    cache.close()
    assert make(tmp_path, device_bytes=0).forward(tokens(20))[1].hit == 19
    # forged: the right names and all that can be computed without the key
    monkeypatch.delenv("KIMI_K3_PREFIX_KEY")
    for file in own.glob("*.safetensors"):
        part, data = tiers.part_of(file.name), file.read_bytes()
        with tiers.open_part(file) as opened:
            metadata = tiers.read_header(opened)["__metadata__"]
        tensors = {name: tensor.clone() for name, tensor in tiers.load(data).items()}
        for name, tensor in tensors.items():
            if name != "tokens":
                tensor += 1
        metadata["checksum"] = tiers.checksum(*part, tensors)
        file.write_bytes(tiers.save(tensors, metadata=metadata))
    monkeypatch.setenv("KIMI_K3_PREFIX_KEY", KEY)
    cache = make(tmp_path, device_bytes=0)
    assert cache.forward(tokens(20))[1].hit == 0 and "its checksum is wrong" in caplog.text
    cache.close()
    monkeypatch.setenv("KIMI_K3_PREFIX_KEY", "short")
    with pytest.raises(ValueError, match="KIMI_K3_PREFIX_KEY has 5 bytes: a key needs 16 at least"):
        make(tmp_path)
