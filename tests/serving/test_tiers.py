"""The tiers of the prefix cache alone: copies from a GPU behind the first token, files that changed."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from kimi_k3.serving import tiers

pytestmark = pytest.mark.one_release


def test_copies_of_a_gpu_are_waited_for_together(monkeypatch):
    """The calls, on a device that only notes them: behind what it was given last, on a stream that waits for the event
    behind the tensors, all copies, then one wait."""
    calls = []

    class Event(str):
        def synchronize(self):
            calls.append(f"wait for {self}")

    class Stream(nullcontext):
        def record_event(self):
            calls.append("record")
            return Event(f"event {len(calls)}")

        def wait_event(self, event):
            calls.append(f"stream waits for {event}")

        def __exit__(self, *error):
            calls.append("copies are under way")

        def synchronize(self):
            calls.append("wait for the stream")

    module = SimpleNamespace(Stream=Stream, current_stream=Stream, stream=lambda stream: stream)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(tiers, "_home", lambda tensors: torch.device("cuda"))
    behind = tiers.Behind()
    tier = tiers.MemoryTier("host", torch.device("cpu"), 1 << 30, behind)
    entry = tier.put(("a", "state"), {"x": torch.zeros(3), "y": torch.ones(3)}, 1.0)
    assert calls == ["record"]
    behind.start(torch.device("cuda"))
    behind.close()
    assert calls[1:] == ["record", "wait for event 2", "stream waits for event 1", "copies are under way",
                         "wait for the stream"]  # fmt: skip
    assert entry.ready is None and torch.equal(entry.tensors["y"], torch.ones(3))


def test_a_file_of_which_any_bit_changed_is_not_served(tmp_path, caplog):
    """Every byte of the values, and a file that bears another part's name; each is deleted and logged."""
    behind, part, tensors = tiers.Behind(), ("a", "state"), {"x": torch.arange(6.0).view(2, 3), "y": torch.arange(3)}
    tier = tiers.DiskTier(tmp_path, 1 << 30, "ab", behind)
    metadata = {"parent": "ab", "start": "0", "steps": "0", "forward": ""}
    entry = tier.put(part, tensors, 1.0, metadata)
    behind.flush()
    whole, values = tier.path(part).read_bytes(), 6 * 4 + 3 * 8
    assert entry.tensors is None and entry.bytes == len(whole) and tier.written_bytes == len(whole)
    read = tier.read(part)
    assert read.keys() == tensors.keys() and all(torch.equal(read[name], tensors[name]) for name in tensors)
    for place in range(len(whole) - values, len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 1 << place % 8
        tier.path(part).write_bytes(changed)
        assert tier.read(part) is None and not tier.path(part).exists()
    for field, value in (("format", "kimi-k3 prefix 0"), ("namespace", "cd")):
        header = {"format": tiers.FORMAT, "namespace": "ab", "checksum": tiers.checksum(*part, tensors), **metadata}
        tier.path(part).write_bytes(tiers.save(tensors, metadata=header))
        assert tier.read(part) is not None
        tier.path(part).write_bytes(tiers.save(tensors, metadata={**header, field: value}))
        assert tier.read(part) is None and not tier.path(part).exists()
    for other in (("b", "state"), ("a", "latents")):
        tier.path(other).write_bytes(whole)
        assert tier.read(other) is None and not tier.path(other).exists()
    assert caplog.text.count("is dropped") == values + 4 and caplog.text.count("its checksum is wrong") == values + 2
    assert tier.read_bytes == 3 * len(whole)
    tier.close()
    behind.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_copies_of_a_gpu_are_page_locked_and_equal():
    """Copied beside what the GPU computes, behind what it computed for them."""
    behind = tiers.Behind()
    tier = tiers.MemoryTier("host", torch.device("cpu"), 1 << 40, behind)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(10**8)
        found = {str(i): torch.full((1000, i), float(i), device="cuda") for i in range(1, 50)}
        entry = tier.put(("a", "state"), found, 1.0)
    assert all(tensor.is_cuda for tensor in tier.get(("a", "state")).values())
    behind.start(torch.device("cuda"))
    behind.close()
    assert entry.ready is None
    for i, tensor in tier.get(("a", "state")).items():
        assert tensor.is_pinned() and (tensor == float(i)).all() and tensor.shape == (1000, int(i))
