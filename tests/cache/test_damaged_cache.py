"""A saved cache that was damaged is refused; it is loaded only as it was saved."""

import random

import pytest
import torch

import tiny
from kimi_k3 import CACHE_ARGUMENT as CACHE
from kimi_k3 import HybridCache

pytestmark = pytest.mark.one_release


@torch.no_grad()
def test_random_damage_never_gives_another_cache(tmp_path):
    """Flipped bits of header and values, pieces cut out or written over: the same states, or a sentence."""
    model, path, draw = tiny.model("km"), tmp_path / "cache.safetensors", random.Random(0)
    cache = HybridCache(model.config)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :3] = 0
    model(torch.arange(18).view(2, 9), attention_mask=mask, **{CACHE: cache})
    cache.save(path, model)
    right, messages = path.read_bytes(), set()
    expected = [tensor for layer in cache.layers for tensor in layer.tensors()]
    for number in range(300):
        damaged, at = bytearray(right), draw.randrange(len(right) if number % 3 else 1200)
        match number % 4:
            case 0 | 1:
                damaged[at] ^= 1 << draw.randrange(8)
            case 2:
                del damaged[at : at + draw.choice([1, 8, 4096, len(right)])]
            case 3:
                damaged[at : at + 32] = draw.randbytes(len(damaged[at : at + 32]))
        path.write_bytes(damaged)
        try:
            loaded = HybridCache.load(path, model)
        except ValueError as error:
            assert "cache.safetensors" in str(error)
            messages.add(str(error).split(" is ")[-1].split(":")[0])
            continue
        assert torch.equal(loaded.real, cache.real) and loaded.get_seq_length() == 9
        for tensor, other in zip(expected, (t for layer in loaded.layers for t in layer.tensors()), strict=True):
            assert torch.equal(tensor, other)
    assert "damaged" in messages
    with pytest.raises(FileNotFoundError):
        HybridCache.load(tmp_path / "missing", model)


def test_what_cannot_be_written_leaves_the_file_before(tmp_path, monkeypatch):
    model, path = tiny.model("km"), tmp_path / "cache.safetensors"
    cache = HybridCache(model.config)
    with torch.no_grad():
        model(torch.arange(9)[None], **{CACHE: cache})
    cache.save(path, model)
    before = path.read_bytes()

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        cache.save(path, model)
    assert path.read_bytes() == before and [file.name for file in tmp_path.iterdir()] == [path.name]
