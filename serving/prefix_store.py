"""PrefixStore: which texts' latents and states are kept, in which tier, and what goes when there is no room.

It runs no forward. `PrefixCache` runs those of one text, an engine keeps here what its requests leave in the
pool (`prefix_requests.py`); both go by a `Turn`.

A segment of a text (`prefix_index.py`) has two parts, each in any number of tiers. What is in no tier decides:

    latents    states    the segment
    kept       kept      a prompt can start behind it
    kept       lost      only leads to others: `_remove_useless` takes it out with the last of them and the last user
    lost       either    `_after_loss` takes it out, with all that lie behind it
"""

import copy
import itertools
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy
import torch

from ..cache_layers_kimi_k3 import KDACacheLayer
from ..costs.formulas import ModelCost
from .prefix_index import AskedPrefixes, PrefixIndex, Segment, ends_of, is_exact
from .tiers import Behind, DiskTier, Entry, MemoryTier, PartId, Tensors, Tier

LATENTS, STATE = "latents", "state"
# Prefixes that a cache with second-hit admission remembers, at 137 bytes each: 33M tokens in blocks of 512.
ASKED = 65536


class Source(Protocol):
    """What has the latents and states of a text that is fed."""

    def latents(self, start: int, end: int) -> list[torch.Tensor]:
        """Of every MLA layer [end - start, R]; they are copied at once."""

    def states(self) -> dict[int, list[torch.Tensor]]:
        """Of every KDA layer its tensors [1, ...] behind the last token that was fed; nobody may write to them."""


@dataclass(frozen=True)
class Lookup:
    """What is asked for.

    Attributes:
        tokens: of the text, [T] int64.
        limit: of them, the most that can be restored.
        cache_salt: under which it was kept.
        worth: up to which boundary it is worth keeping (`PrefixStore.worth`).
        kind: of the forwards that will go on from there.
        accepts: which segments may be gone on from.
    """

    tokens: numpy.ndarray
    limit: int
    cache_salt: str = ""
    worth: float = float("inf")
    kind: bytes = b""
    accepts: Callable[[Segment], bool] = lambda segment: True


class Turn:
    """A text under way: where it goes on from, and what its next segment is kept behind.

    Attributes:
        hit: tokens that were restored.
        shared: tokens that it has in common with some kept text, in whole blocks.
        kept: tokens up to which it is kept, or could not be.
        splits: boundaries at which states were kept or forwards ended. Whoever runs several forwards before `keep`
            appends the end of each.
        exact: every one of them ended a forward of one kind, so that a cold run split there gives the same bits.
        segment: what was kept last, pinned until `close`; None from the first one on that found no room.
        worth: tokens up to which it is kept; what lies behind was not asked for before.
        parts: what was restored, until `take`.
    """

    def __init__(self, store: "PrefixStore", segment: Segment, shared: int, asked: Lookup):
        self.segment: Segment | None = segment
        self.hit = self.kept = segment.end
        self.shared, self.splits = shared, segment.splits()
        self.exact = is_exact(asked.kind) and all(part.forward == asked.kind for part in segment.chain())
        self.parts: list[Tensors] = []
        self.worth = max(asked.worth, shared)
        self._store, self._kind = store, asked.kind
        self._resting: Segment | None = None

    def take(self) -> tuple[dict[int, list[torch.Tensor]], list[torch.Tensor]]:
        """What was restored, once: states of every KDA layer, [1, ...] each, and latents of every MLA layer, [hit, R].
        States are shared, nobody may write to them."""
        (*latents, state), self.parts = self.parts, []
        device = self._store.device
        blocks = [part[name].to(device) for part in latents for name in sorted(part) if name.startswith("block.")]
        rows = [torch.cat(of_layer) for of_layer in zip(*(block.unbind() for block in blocks), strict=True)]
        layers = sorted({int(name.split(".")[1]) for name in state})
        names = KDACacheLayer.tensor_names
        return {i: [state[f"layers.{i}.{name}"].to(device) for name in names] for i in layers}, rows

    def keep(self, tokens: Sequence[int], source: Source, steps: bool = False, forward: bytes | None = None) -> None:
        """Keep the tokens that were fed since `kept`, at whose end `source` stands.

        Args:
            steps: one by one.
            forward: their kind, where it is not that of the turn.
        """
        start, kind = self.kept, self._kind if forward is None else forward
        self.kept += len(tokens)
        ends, ran = list(ends_of(start, self.kept, steps, kind)), [end for end in self.splits if end > start]
        if not ran:
            self.splits += ends
        elif ran != ends and is_exact(kind):  # no key says so
            self._let_go()
        if self.kept > self.worth:
            self._let_go()
        self.exact &= kind == self._kind
        self._store.append(self, tokens, source, steps, kind)

    def fork(self) -> "Turn":
        """A second text that goes on from here."""
        forked = copy.copy(self)
        forked.splits, forked.parts = self.splits[:], []
        forked.segment = forked.segment and self._store.pin(forked.segment)
        return forked

    def rest(self) -> None:
        """Let what is kept go if it must, until `resume`."""
        self._resting = self.segment
        self._let_go()

    def resume(self) -> None:
        """Go on keeping behind what was kept, if that is still there."""
        self.segment, self._resting = self._resting and self._store.pin(self._resting), None

    def close(self) -> None:
        """The text has ended: what it made may go, and be copied to the tiers below."""
        self._let_go()
        self.parts = []
        self._store.start_behind()

    def _let_go(self) -> None:
        segment, self.segment = self.segment, None
        if segment is not None:
            self._store.release(segment)


class PrefixStore:
    """The tiers of a `PrefixCache`, and what is in them. Threads may share it.

    Args:
        namespace: hex digest that names the model.
        cost: of the model, by which parts are ranked.
        asked_before: keep only what is asked for a second time.
    """

    def __init__(
        self,
        device: torch.device,
        namespace: str,
        cost: ModelCost,
        device_bytes: int,
        host_bytes: int,
        folder: str | os.PathLike | None,
        disk_bytes: int,
        block: int,
        write_through: bool,
        asked_before: bool,
    ):
        self.device, self.write_through = device, write_through
        self.index = PrefixIndex(namespace, block)
        self.tiers: list[Tier] = [MemoryTier("device", device, device_bytes)]
        self._behind = Behind()
        if host_bytes:
            self.tiers.append(MemoryTier("host", torch.device("cpu"), host_bytes, self._behind))
        self.disk = None if folder is None else DiskTier(Path(folder), disk_bytes, namespace, self._behind)
        if self.disk:
            self.tiers.append(self.disk)
        self._asked = AskedPrefixes(block, ASKED) if asked_before else None
        self._cost = cost
        self._lock = threading.RLock()
        self._looking = threading.Lock()  # of whoever looks through the folder, which holds up nobody else
        self._adopt_files()
        if self.disk:
            self.disk.settle()

    # --- texts under way -----------------------------------------------------------------------------------------

    def worth(self, tokens: numpy.ndarray, cache_salt: str) -> float:
        """Up to which boundary a text that is asked for now is worth keeping: any, or what was asked for before."""
        if self._asked is None:
            return float("inf")
        with self._lock:
            root = self.index.root_of(cache_salt)
            asked = self._asked.ask(tokens, root)
            self.index.leave(root)
            return asked

    def begin(self, asked: Lookup) -> Turn:
        """A turn from the longest prefix that is kept. Tensors are read outside the lock; a part that cannot be read is
        forgotten and the next best prefix tried."""
        turn = None
        while turn is None:
            self._adopt_files()
            turn = self._begun(asked, lambda parts: True)
        return turn

    def begin_near(self, asked: Lookup) -> Turn | None:
        """The same where the device's tier has all of it; None where something may have to be read from below."""
        device = self.tiers[0]
        return (
            None if self.disk else self._begun(asked, lambda parts: all((s.key, kind) in device for s, kind in parts))
        )

    def _begun(self, asked: Lookup, may_read: Callable[[list[tuple[Segment, str]]], bool]) -> Turn | None:
        with self._lock:
            self._drop_unwritten()
            root = self.index.root_of(asked.cache_salt)
            prefixes, shared = self.index.matches(asked.tokens, asked.limit, root)
            if asked.worth <= asked.limit:
                shared = max(shared, int(asked.worth))
            usable = (prefix for prefix in prefixes if self._is_kept(prefix, STATE) and asked.accepts(prefix))
            segment = next(usable, root)
            segment.pin()
        turn, chain = Turn(self, segment, shared, asked), segment.chain()
        parts = [*((part, LATENTS) for part in chain), (segment, STATE)] if chain else []
        try:
            found = self._read_all(parts) if may_read(parts) else None
        except BaseException:
            turn.close()
            raise
        if found is None:
            turn.close()
            return None
        turn.parts = found
        return turn

    def pin(self, segment: Segment) -> Segment | None:
        """The segment, which then stays until `release`; None if it was forgotten."""
        with self._lock:
            if segment.parent is None:  # of a salt that nobody used meanwhile there may be none, or another
                segment = self.index.root_named(segment.key)
            if not self.index.has(segment):
                return None
            segment.pin()
            return segment

    def start_behind(self) -> None:
        """Begin the copies and files that wait, behind what this thread gave the device."""
        self._behind.start(self.device)

    def append(self, turn: Turn, tokens: Sequence[int], source: Source, steps: bool, forward: bytes) -> None:
        """Put a segment, at whose end `source` stands, behind `turn.segment`; that is None from the first one on that
        found no room."""
        if turn.segment is None:
            return
        with self._lock, ExitStack() as at_end:
            self._drop_unwritten()
            parent, turn.segment = turn.segment, None
            at_end.callback(self.release, parent)
            if not self.index.has(parent):  # it was removed, with a file that could not be read or written
                return
            segment = self.index.make(parent, tokens, steps, forward)
            self.index.add(segment)
            segment.pin()
            at_end.callback(self.release, segment)
            for kind, take in ((LATENTS, self._latents), (STATE, self._state)):
                if not self._is_kept(segment, kind):
                    self._insert(segment, kind, take(source, segment), self._flops_without(segment, kind))
            if self._is_kept(segment, LATENTS):
                segment.pin()
                turn.segment = segment

    def release(self, segment: Segment) -> None:
        """Unpin a segment; it goes if nothing came of it, or nothing can start from it any more."""
        with self._lock:
            segment.unpin()
            if segment.parent is not None and not self._is_kept(segment, LATENTS):
                self._after_loss(segment, LATENTS)
            self._remove_useless(segment)
            self.index.leave(segment.root())

    def _latents(self, source: Source, segment: Segment) -> Tensors:
        """Latents of the segment, [MLA layers, tokens, R] a block; blocks end at multiples of the block size."""
        tensors, block = {"tokens": torch.tensor(segment.tokens)}, self.index.block
        edges = [segment.start, *range((segment.start // block + 1) * block, segment.end, block), segment.end]
        layers = source.latents(segment.start, segment.end)
        if layers:
            for i, (start, end) in enumerate(itertools.pairwise(edge - segment.start for edge in edges)):
                tensors[f"block.{i:06d}"] = torch.stack([layer[start:end].to(self.device) for layer in layers])
        return tensors

    def _state(self, source: Source, segment: Segment) -> Tensors:
        """Recurrent states and convolution tails of all KDA layers behind the segment."""
        return {
            f"layers.{i}.{name}": tensor.to(self.device)
            for i, tensors in source.states().items()
            for name, tensor in zip(KDACacheLayer.tensor_names, tensors, strict=True)
        }

    # --- reading -------------------------------------------------------------------------------------------------

    def _read_all(self, parts: list[tuple[Segment, str]]) -> list[Tensors] | None:
        """The tensors of all parts, which then rank as used; None where one could not be read."""
        read = [self._read(segment.key, kind) for segment, kind in parts]
        with self._lock:
            for (segment, kind), tensors in zip(parts, read, strict=True):
                if tensors is None:
                    self._after_loss(segment, kind)
                    return None
            return [self._promote(*part, tensors) for part, tensors in zip(parts, read, strict=True)]

    def _read(self, *part: str) -> Tensors | None:
        for tier in self.tiers:
            tensors = tier.get(part)
            if tensors is not None:
                return tensors
            if tier is self.disk and part in tier:
                with self._lock:
                    tier.drop(part)
        return None

    def _promote(self, segment: Segment, kind: str, tensors: Tensors) -> Tensors:
        """A part was used: it ranks as new, and lies on the device again if room can be made there. The tensors are
        returned, from the device's tier if it has them now."""
        part, device = (segment.key, kind), self.tiers[0]
        cost = next((tier.entries[part].cost for tier in self.tiers if part in tier), 0.0)
        self._put(0, segment, kind, tensors, cost)
        for tier in self.tiers:
            tier.touch(part)
        return device.entries[part].tensors if part in device else tensors

    # --- keeping (all of it under the lock) ----------------------------------------------------------------------

    def _tier_of(self, segment: Segment, kind: str) -> Tier | None:
        """The first tier that has a part."""
        return next((tier for tier in self.tiers if (segment.key, kind) in tier), None)

    def _is_kept(self, segment: Segment, kind: str) -> bool:
        return self._tier_of(segment, kind) is not None

    def _insert(self, segment: Segment, kind: str, tensors: Tensors, cost: float, highest: int = 0) -> None:
        """Into the first tier from `highest` on that takes it, and with write-through into all below, which share its
        tensors."""
        for level in range(highest, len(self.tiers)):
            if self._put(level, segment, kind, tensors, cost):
                if not self.write_through:
                    return
                tensors = self.tiers[level].entries[segment.key, kind].tensors or tensors

    def _put(self, level: int, segment: Segment, kind: str, tensors: Tensors, cost: float) -> bool:
        """Whether the tier has the part now, after evicting what had to go."""
        tier, part = self.tiers[level], (segment.key, kind)
        if part in tier:
            return True
        size = tier.size_of(tensors)
        if size > tier.budget or not self._make_room(level, size) or not self.index.has(segment):
            return False  # making room can evict what this text continues from
        entry = tier.put(part, tensors, cost, segment.metadata())
        if level > 0 and part not in self.tiers[0]:
            self._own(tier, entry)
        return True

    def _own(self, tier: Tier, entry: Entry) -> None:
        """Copy what the device's tier has not or no longer. Files are begun as well: where there is little room, a long
        prompt's parts would otherwise all wait in host memory for the end of its generation."""
        tier.own(entry)
        self._behind.start()

    def _make_room(self, level: int, size: int) -> bool:
        """Evict what is worth least until `size` bytes fit; False if they cannot."""
        tier = self.tiers[level]
        while tier.used + size > tier.budget:
            parts = list(tier.entries)
            candidates = [part for part in parts if self._may_go(level, part)]
            if not candidates:  # only texts whose later segments are in other tiers: those are lost with them
                candidates = [part for part in parts if not self.index.segments[part[0]].pins]
            if not candidates:
                return False
            part = min(candidates, key=lambda part: tier.entries[part].priority)
            segment, below = self.index.segments[part[0]], self.tiers[level + 1 :]
            moves_down = below and not self.write_through and not any(part in lower for lower in below)
            tensors = tier.get(part) if moves_down else None
            entry = tier.evict(part)
            for lower in below if level == 0 else ():
                if part in lower:
                    self._own(lower, lower.entries[part])
            if tensors is not None:
                self._insert(segment, part[1], tensors, entry.cost, level + 1)
            if not self._is_kept(segment, part[1]):
                self._after_loss(segment, part[1])
        return True

    def _may_go(self, level: int, part: PartId) -> bool:
        """A state may always go. Latents may if another tier has them; else while nobody uses them, and at the end of a
        text first: what lies behind would be lost with them, unless they move down."""
        if part[1] == STATE or any(part in tier for i, tier in enumerate(self.tiers) if i != level):
            return True
        segment = self.index.segments[part[0]]
        moves_down = not self.write_through and level + 1 < len(self.tiers)
        return not segment.pins and (moves_down or not segment.children)

    def _after_loss(self, segment: Segment, kind: str) -> None:
        """A part is in no tier any more: without its latents a text ends before it, without its state it cannot start
        there."""
        if kind == LATENTS:
            behind = [segment]
            for lost in behind:
                behind += lost.children.values()
            for lost in reversed(behind):
                self._remove(lost)
            segment = segment.parent
        elif self.index.has(segment):  # states behind it would now be computed from further back
            behind = list(segment.children.values())
            for later in behind:
                if not self._is_kept(later, STATE):
                    behind += later.children.values()
                    continue
                for tier in self.tiers:
                    tier.revalue((later.key, STATE), self._flops_without(later, STATE))
        self._remove_useless(segment)

    def _flops_without(self, segment: Segment, kind: str) -> int:
        """What it takes to compute a part again: latents from the start of their segment, a state from the last state
        before it that is kept."""
        start = segment.start
        if kind == STATE:
            before = segment.parent
            while before.parent is not None and not self._is_kept(before, STATE):
                before = before.parent
            start = before.end
        return self._cost.flops(segment.end - start, start)

    def _remove_useless(self, segment: Segment) -> None:
        """Forget segments that nothing can start from any more, this one and those before it."""
        while segment.parent is not None and not segment.children and not segment.pins:
            if self._is_kept(segment, STATE) or not self.index.has(segment):
                return
            self._remove(segment)
            segment = segment.parent

    def _remove(self, segment: Segment) -> None:
        if not self.index.has(segment):  # forgotten before; parts of its name may be those of a newer one
            return
        for kind in (LATENTS, STATE):
            for tier in self.tiers:
                tier.drop((segment.key, kind))
        self.index.remove(segment)

    def _drop_unwritten(self) -> None:
        """Forget what could not be written to the disk and is in no other tier."""
        while self.disk and self.disk.failed:
            part = self.disk.failed.pop()
            self.disk.drop(part)
            segment = self.index.segments.get(part[0])
            if segment is not None and not self._is_kept(segment, part[1]):
                self._after_loss(segment, part[1])

    def _adopt_files(self) -> None:
        """Index what other processes, or earlier ones, left in the folder."""
        if self.disk is None:
            return
        with self._looking:
            files = self.disk.scan()
            described = {key: self.disk.describe(key) for key, kind in files if kind == LATENTS}
            with self._lock:
                self._index(files, {key: text for key, text in described.items() if text is not None})

    def _index(self, files: dict[PartId, int], texts: dict[str, tuple]) -> None:
        for key, (parent_key, start, steps, forward, tokens) in sorted(texts.items(), key=lambda item: item[1][1]):
            parent = self.index.root_named(parent_key) if start == 0 else self.index.segments.get(parent_key)
            if parent is None:  # not there (yet)
                continue
            segment = self.index.make(parent, tokens, steps, forward)
            if segment.key != key or segment.start != start:
                self.disk.reject((key, LATENTS), "its name is not that of its text")
                self.index.leave(parent.root())
                continue
            self.index.add(segment)
            self._adopt(segment, LATENTS, files[key, LATENTS])
        for (key, kind), size in files.items():
            if kind == STATE and key in self.index.segments:
                self._adopt(self.index.segments[key], STATE, size)

    def _adopt(self, segment: Segment, kind: str, size: int) -> None:
        self.disk.adopt((segment.key, kind), size, self._flops_without(segment, kind))
