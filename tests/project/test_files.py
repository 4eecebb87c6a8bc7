"""What is written is whole or not there, and known when it was damaged: states, records and tensors."""

import contextlib
import functools
import itertools
import json
import os
import random
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from kimi_k3 import files_kimi_k3 as files
from kimi_k3.runs_kimi_k3 import lock

pytestmark = pytest.mark.one_release

STATE = {"step": 3, "weights": {"a": torch.arange(700.0), "b": torch.ones(3, 5, dtype=torch.bfloat16)}, "loss": 0.25}
BEFORE = {**STATE, "step": 2}


def damages(data: bytes, count: int, seed: int = 0):
    """The bytes with a flipped bit, cut off, with a piece overwritten, lengthened; none of them what they were."""
    draw = random.Random(seed)
    for number in range(count):
        at, damaged = draw.randrange(len(data)), bytearray(data)
        match number % 5:
            case 0 | 1:
                damaged[at] ^= 1 << draw.randrange(8)
            case 2:
                del damaged[at:]
            case 3:
                damaged[at : at + 64] = draw.randbytes(len(damaged[at : at + 64]))
            case 4:
                damaged[at:at] = draw.randbytes(draw.randrange(1, 9))
        if damaged != data:
            yield bytes(damaged)


def same(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def test_a_damaged_state_gives_way_to_the_one_before(tmp_path, caplog):
    file = tmp_path / "state.pt"
    assert files.load_state(file) is None
    files.save_state(BEFORE, file)
    files.save_state(STATE, file)
    assert same(torch.load(file, weights_only=True), STATE)  # torch reads it without us
    assert same(files.load_state(file), STATE) and not caplog.records
    newest, before = file.read_bytes(), (tmp_path / "state.before.pt").read_bytes()
    for damaged in damages(newest, 100):
        caplog.clear()
        file.write_bytes(damaged)
        (tmp_path / "state.before.pt").write_bytes(before)
        assert same(files.load_state(file), BEFORE)
        assert len(caplog.records) == 1 and "goes on from the state before it" in caplog.text
        assert file.read_bytes() == before  # the next state to be saved keeps a whole one before it
    for one, other in zip(damages(newest, 20, 1), damages(before, 20, 2), strict=True):
        file.write_bytes(one)
        (tmp_path / "state.before.pt").write_bytes(other)
        with pytest.raises(files.DamagedFile, match=r"state.pt and state.before.pt are damaged: remove them"):
            files.load_state(file)
    files.remove_state(file)
    assert not list(tmp_path.iterdir())


def test_a_state_that_cannot_be_written_leaves_the_others(tmp_path):
    """A kill between the two renames, one before them, and an error while writing."""
    file = tmp_path / "state.pt"
    files.save_state(BEFORE, file)
    files.save_state(STATE, file)
    with pytest.raises(Exception, match="pickle"):
        files.save_state({"function": lambda: None}, file)
    (tmp_path / "state.pt.17.writing").write_bytes(b"begun")
    assert same(files.load_state(file), STATE)
    file.unlink()
    assert same(files.load_state(file), BEFORE)
    assert [path.name for path in tmp_path.iterdir()] == ["state.pt"]


def test_a_damaged_record_is_known(tmp_path):
    record = {"name": "a", "values": [1, 2.5, None], "score": 0.1}
    line = json.dumps(files.sealed(record))
    assert files.unsealed(json.loads(line)) == record
    for damaged in damages(line.encode(), 200):
        (tmp_path / "record.json").write_bytes(damaged)
        try:
            assert files.load_record(tmp_path / "record.json") == record  # a space more, say
        except files.DamagedFile as error:
            assert "record.json is damaged" in str(error)
    files.save_record(record, tmp_path / "record.json")
    assert files.load_record(tmp_path / "record.json") == record
    for other in ([record], record, {**files.sealed(record), "more": 1}):
        with pytest.raises(files.DamagedFile):
            files.unsealed(other)


def test_damaged_tensors_are_known(tmp_path):
    tensors, about = STATE["weights"], {"format": "a test", "tokens": "7"}
    path = tmp_path / "tensors.safetensors"
    files.save_tensors(tensors, path, about)
    assert files.load_tensors(path)[0] == about and same(files.load_tensors(path)[1], tensors)
    right = path.read_bytes()
    for damaged in damages(right, 150):
        path.write_bytes(damaged)
        try:
            loaded = files.load_tensors(path)
            assert loaded == ({}, {}) or (loaded[0] == about and same(loaded[1], tensors))
        except files.DamagedFile as error:
            assert "tensors.safetensors is damaged" in str(error)
    with pytest.raises(FileNotFoundError):
        files.load_tensors(tmp_path / "missing")
    # with a key nobody else can make the checksum
    sums = {files.tensors_sum("about", tensors, key) for key in (None, b"key", b"another key")}
    assert len(sums) == 3 and files.tensors_sum("about", tensors, b"key") in sums


def test_large_tensors_and_files_are_hashed_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_PIECE", 1 << 10)
    ids = torch.arange(3000, dtype=torch.int16)
    swapped = torch.cat([ids[512:1024], ids[:512], ids[1024:]])  # whole pieces change places
    digests = files.digest_of([ids, swapped, ids[:0], ids.reshape(60, 50).t(), ids.reshape(60, 50).t().contiguous()])
    assert len(set(digests)) == 4 and digests[3] == digests[4]
    assert files.digest_of([ids]) == digests[:1]
    digests = set()
    for number, tensor in enumerate((ids, swapped, ids)):
        (tmp_path / str(number)).write_bytes(tensor.numpy().tobytes())
        digests.add(files.file_digest(tmp_path / str(number)))
    assert len(digests) == 2


def test_a_state_of_an_older_version_is_told_apart(tmp_path):
    """It is whole; nobody is to delete days of work for it."""
    torch.save({"step": torch.tensor(3)}, tmp_path / "state.pt")
    with pytest.raises(files.DamagedFile, match="has no checksum, as states of an older version"):
        files.load_state(tmp_path / "state.pt")


@pytest.mark.parametrize(("system", "opened"), [("posix", ["r", "r"]), ("nt", ["w"])])
def test_what_is_written_reaches_the_disk(system, opened, tmp_path, monkeypatch):
    """A file and its folder; Windows opens no folders, and writes only what is open for writing."""
    calls = []
    fake = SimpleNamespace(name=system, O_RDONLY="r", O_RDWR="w", close=calls.append, fsync=calls.append)
    fake.open = lambda path, flags: calls.append(flags) or f"{path} is open"
    (tmp_path / "a").write_text("a")
    monkeypatch.setattr(files, "os", fake)
    files.sync(tmp_path / "a")
    files.sync(tmp_path)
    folder = [] if system == "nt" else [opened[1], *[f"{tmp_path} is open"] * 2]
    assert calls == [opened[0], *[f"{tmp_path / 'a'} is open"] * 2, *folder]


def test_a_lock_that_is_taken_away_meanwhile_is_made_anew(tmp_path, monkeypatch):
    """Between opening and locking the holder may have ended and deleted it; two processes must not hold two files."""
    import fcntl

    first = lock(tmp_path, ValueError)
    taken = fcntl.flock

    def after_the_holder(file, how):
        monkeypatch.setattr(fcntl, "flock", taken)
        (tmp_path / "lock").unlink()
        first.close()
        taken(file, how)

    monkeypatch.setattr(fcntl, "flock", after_the_holder)
    with lock(tmp_path, ValueError), pytest.raises(ValueError, match="another process is working in"):
        lock(tmp_path, ValueError)


def test_a_file_that_is_called_lock_keeps_its_content(tmp_path):
    """A run folder may be anybody's."""
    (tmp_path / "lock").write_text("of another program")
    with lock(tmp_path, ValueError):
        assert (tmp_path / "lock").read_text() == "of another program"


def test_tensors_and_their_description_are_never_two_halves(tmp_path, monkeypatch):
    """Wherever writing ends: the former pair, the new one, or no description, without which nothing loads."""
    weights, config = tmp_path / "adapter_model.safetensors", tmp_path / "adapter_config.json"
    former, new = ({"a": torch.full((3,), float(number))} for number in (1, 2))
    outcomes = set()
    for number in range(12):
        files.save_described(former, weights, "former", config)
        with monkeypatch.context() as patch:
            calls = itertools.count()

            def killed(*arguments, real, calls=calls, number=number):
                if next(calls) == number:
                    raise SystemExit
                return real(*arguments)

            for name in ("fsync", "replace"):
                patch.setattr(os, name, functools.partial(killed, real=getattr(os, name)))
            with contextlib.suppress(SystemExit):
                files.save_described(new, weights, "new", config)
        held = int(load_file(weights)["a"][0])
        outcomes.add((held, config.read_text().strip() if config.exists() else None))
        assert not list(tmp_path.glob("*.writing"))
    assert outcomes == {(1, "former"), (1, None), (2, None), (2, "new")}
