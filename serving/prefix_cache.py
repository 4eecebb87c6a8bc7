"""PrefixCache: keeps the states of prompts and turns, and starts later prompts from the longest kept prefix.

A hybrid can only start where the recurrent state of *every* KDA layer is kept together with all latents before it.
States are therefore kept at few boundaries: every `every` tokens, before the last token of a prompt (which has to run
in any case, to give the first logits), at the end of a turn, and where a text was seen to part from a kept one.
`prefix_index.py` says why a hit is exact to the last bit.

A segment of a text (`prefix_index.py`) has two parts, each in any number of tiers. What is in no tier decides:

    latents    states    the segment
    kept       kept      a prompt can start behind it
    kept       lost      only leads to others: `_remove_useless` takes it out with the last of them and the last user
    lost       either    `_after_loss` takes it out, with all that lie behind it

    cache = PrefixCache(model, device_bytes=8 << 30, folder="prefixes", disk_bytes=100 << 30)
    output, done = cache.generate(input_ids, max_new_tokens=100)  # done.hit tokens were restored
"""

import functools
import hashlib
import itertools
import os
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy
import torch

from ..cache_kimi_k3 import HybridCache
from ..cache_layers_kimi_k3 import LatentCacheLayer
from ..costs.formulas import ModelCost, text_cost
from ..fingerprint_kimi_k3 import model_fingerprint
from ..modeling_kimi_k3 import CACHE_ARGUMENT
from .prefix_index import PrefixIndex, Segment, chained, token_bytes
from .tiers import Behind, DiskTier, Entry, MemoryTier, PartId, Tensors, Tier, recorded, secret_key

LATENTS, STATE = "latents", "state"


@dataclass
class Prefilled:
    """A prompt of which all but the last token ran.

    Attributes:
        cache: at the boundary behind them; it belongs to the caller.
        segment: what was kept last; None from the first one on that found no room.
        hit: tokens that were restored.
        splits: boundaries at which states were kept or forwards ended, the last of them `cache.get_seq_length()`.
        exact: every one of them ended a forward, so that a cold run split there gives the same bits.
        logits: of the tokens that ran, [1, n, vocabulary], if they were asked for.
    """

    cache: HybridCache
    segment: Segment | None
    logits: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self):
        self.hit, self.splits = self.segment.end, self.segment.splits()
        self.exact = not any(segment.forward for segment in self.segment.chain())


class PrefixCache:
    """Prefixes of one model in tiers of memory and disk; threads may share it, processes may share its folder.

    Args:
        model: a Kimi K3 model in evaluation mode; neither its weights nor its active adapters may change
            while the cache lives.
        device_bytes: budget on the model's device.
        host_bytes: budget in host memory (pinned when the model is on a GPU); 0 leaves the tier out.
        folder, disk_bytes: of the disk tier; None leaves it out. Prefixes of several models can lie in one folder.
        block: tokens of a block of latents, and the granularity at which a shared prefix is recognised.
        every: tokens between two kept states of a long prompt.
        chunk: tokens that one forward may read, exporting the states inside it in the same pass; all of them stay on
            the device until it ends. None: a forward ends at every state, which makes a hit exact to the last bit
            (docs/serving.md).
        write_through: copy to the lower tiers too; otherwise a part moves down when the tier above is full.

    With write-through the lower tiers take a new part at once, but as the device's tensors. A thread replaces these by
    copies and writes the files once the forward or generation that made the part is over, or `flush` or `close` asks.
    What the device's tier refuses, or evicts before that, is copied to host memory there and then, and files are begun.

    Raises:
        ValueError: for budgets or sizes that cannot work.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        device_bytes: int,
        host_bytes: int = 0,
        folder: str | os.PathLike | None = None,
        disk_bytes: int = 0,
        block: int = 512,
        every: int = 32768,
        write_through: bool = True,
        chunk: int | None = None,
    ):
        if block < 1 or every < block or every % block:
            raise ValueError(f"every ({every}) must be a positive multiple of block ({block})")
        if chunk is not None and chunk < every:
            raise ValueError(f"chunk ({chunk}) must be at least every ({every}): a forward ends at a state")
        if min(device_bytes, host_bytes, disk_bytes) < 0:
            raise ValueError("budgets are numbers of bytes that are not negative")
        if (folder is None) != (disk_bytes == 0):
            raise ValueError("folder and disk_bytes belong together: give both or neither")
        self.model, self.every, self.chunk, self.write_through = model, every, chunk, write_through
        self.index = PrefixIndex(numerics_fingerprint(model), block)
        self.tiers: list[Tier] = [MemoryTier("device", model.device, device_bytes)]
        self._behind = Behind()
        if host_bytes:
            self.tiers.append(MemoryTier("host", torch.device("cpu"), host_bytes, self._behind))
        self.disk = None if folder is None else DiskTier(Path(folder), disk_bytes, self.index.namespace, self._behind)
        if self.disk:
            self.tiers.append(self.disk)
        self.lookups = self.hits = self.hit_tokens = self.computed_tokens = 0
        self._cost: ModelCost = text_cost(model.config.get_text_config(decoder=True), dtype_bytes=model.dtype.itemsize)
        self._weights = _weight_versions(model)
        self._lock = threading.RLock()
        self._closed = False
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="prefix-cache-reader")
        with self._lock:
            self._adopt_files()
            if self.disk:
                self.disk.settle()

    # --- use -----------------------------------------------------------------------------------------------------

    def prefill(self, input_ids: torch.Tensor, keep_logits: bool = False, cache_salt: str = "") -> Prefilled:
        """Run all but the last of the tokens [1, T], from the longest kept prefix on, and keep the result.

        Args:
            cache_salt: what was kept under one salt is found under no other, nor without one; a secret for each tenant.

        Raises:
            ValueError: for more than one row, or weights that changed since the cache was made.
            RuntimeError: for a cache that is closed.
        """
        with self._prefilled(input_ids, keep_logits, cache_salt) as done:
            return done

    def forward(
        self, input_ids: torch.Tensor, keep_logits: bool = False, cache_salt: str = ""
    ) -> tuple[torch.Tensor, Prefilled]:
        """Logits [1, 1, vocabulary] of the last of the tokens [1, T], and the cache behind it.

        With `keep_logits` those of all tokens that ran, [1, T - hit, vocabulary].
        """
        with self._prefilled(input_ids, keep_logits, cache_salt) as done:  # which switches gradients off
            last = self.model(input_ids[:, -1:], **{CACHE_ARGUMENT: done.cache}).logits
            logits = torch.cat([*done.logits, last], dim=1)
        done.splits.append(input_ids.shape[1])
        return logits, done

    def generate(self, input_ids: torch.Tensor, cache_salt: str = "", **kwargs) -> tuple:
        """What `model.generate(input_ids [1, T], ...)` returns, and the cache behind it, `hit` tokens of which were
        restored; the prompt and the finished turn are kept.

        Raises:
            ValueError: also for what cannot continue one kept state: beams, several sequences, drafts, padding, or a
                cache of the caller's.
        """
        settings = kwargs.get("generation_config") or self.model.generation_config
        for name in ("num_beams", "num_return_sequences"):
            if (kwargs.get(name, getattr(settings, name, None)) or 1) != 1:
                raise ValueError(f"a prefix is one row: generate through the prefix cache takes no {name}")
        for name in ("assistant_model", "prompt_lookup_num_tokens", "cache", "past_key_values", "inputs_embeds"):
            if kwargs.get(name) is not None:
                raise ValueError(
                    f"generate through the prefix cache takes no {name}: it starts from a cache of its own"
                )
        mask = kwargs.pop("attention_mask", None)
        if mask is not None and not mask.bool().all():
            raise ValueError("a prefix has no padding: pass the row without it")
        with self._prefilled(input_ids, cache_salt=cache_salt) as done:
            # Captured steps sum over the latents in another order than forwards do: a cold run's bits would differ.
            kwargs |= {CACHE_ARGUMENT: done.cache, "disable_compile": True}
            output = self.model.generate(input_ids, attention_mask=torch.ones_like(input_ids), **kwargs)
            ids = output if isinstance(output, torch.Tensor) else output.sequences
            self._keep_turn(done, ids[0].tolist())
        return output, done

    def prefetch(self, input_ids: torch.Tensor, cache_salt: str = "") -> Future:
        """Bring the prefix that `prefill` would use up to the device, in a thread, while something else computes."""
        tokens = self._tokens(input_ids)
        return self._reader.submit(self._prefetched, tokens, cache_salt)

    def flush(self) -> None:
        """Wait until everything that belongs on the disk is there."""
        self._behind.flush()
        with self._lock:
            self._drop_unwritten()

    def clear(self) -> None:
        """Forget every prefix that is not in use, in all tiers."""
        with self._lock:
            for segment in sorted(self.index.segments.values(), key=lambda segment: -segment.start):
                if not segment.pins and not segment.children:
                    self._remove(segment)

    def close(self) -> None:
        """Finish writing and release the folder; what still runs in other threads finishes, and is not kept below the
        device. With write-back, what is only in memory is written first."""
        if self._closed:
            return
        self._closed = True
        self._reader.shutdown(wait=True)
        if self.disk and not self.write_through:
            with self._lock:
                for segment in sorted(self.index.segments.values(), key=lambda segment: segment.start):
                    for kind in (LATENTS, STATE):
                        tier = self._tier_of(segment, kind)
                        if tier is not None:
                            entry = tier.entries[segment.key, kind]
                            self._put(len(self.tiers) - 1, segment, kind, entry.tensors, entry.cost)
        self._behind.close()
        for tier in self.tiers:
            tier.close()

    def stats(self) -> dict:
        """Counters since the cache was made; tokens are those of prompts, bytes those of each tier."""
        with self._lock:
            return {
                "lookups": self.lookups,
                "hits": self.hits,
                "hit_tokens": self.hit_tokens,
                "computed_tokens": self.computed_tokens,
                "segments": len(self.index.segments),
                "states": sum(self._is_kept(segment, STATE) for segment in self.index.segments.values()),
                "tiers": {
                    tier.name: {
                        "bytes": tier.used,
                        "budget": tier.budget,
                        "parts": len(tier.entries),
                        "written_bytes": tier.written_bytes,
                        "read_bytes": tier.read_bytes,
                        "evicted_bytes": tier.evicted_bytes,
                    }
                    for tier in self.tiers
                },
            }

    # --- running -------------------------------------------------------------------------------------------------

    def _tokens(self, input_ids: torch.Tensor) -> numpy.ndarray:
        if self._closed:
            raise RuntimeError("the prefix cache is closed: make a new PrefixCache")
        if input_ids.dim() != 2 or input_ids.shape[0] != 1 or input_ids.shape[1] < 1:
            raise ValueError(f"a prefix is one row of tokens [1, T], T at least 1, but got {tuple(input_ids.shape)}")
        if _weight_versions(self.model) != self._weights:
            raise ValueError("the model's weights changed since the prefix cache was made: make a new PrefixCache")
        return input_ids[0].to("cpu", torch.int64, copy=True).numpy()

    @contextmanager
    def _prefilled(self, input_ids: torch.Tensor, keep_logits: bool = False, cache_salt: str = ""):
        """A `Prefilled` whose segment is pinned inside the block; copies and files wait for the block's end."""
        tokens = self._tokens(input_ids)
        last = len(tokens) - 1
        with self._fetched(tokens, cache_salt) as (done, parts, shared), torch.no_grad():
            self._assemble(done, parts, len(tokens))
            hit, cache = done.hit, done.cache
            boundaries = {*range(self.every, last, self.every), shared, last}
            for ends in self._forwards(hit, sorted(end for end in boundaries if hit < end <= last)):
                start = int(cache.get_seq_length())
                cache.keep_states(ends[:-1])
                part, logits_to_keep = input_ids[:, start : ends[-1]], 0 if keep_logits else 1
                logits = self.model(part, logits_to_keep=logits_to_keep, **{CACHE_ARGUMENT: cache}).logits
                if keep_logits:
                    done.logits.append(logits)
                forward = b""
                if len(ends) > 1:
                    done.exact = False
                    forward = chained(b"", token_bytes(tokens[start : ends[-1]]), token_bytes(ends))
                for end in ends:
                    done.splits.append(end)
                    self._append(done, tokens[start:end], cache.snapshot(end), forward=forward)
                    start = end
                cache.keep_states(())
            with self._lock:
                self.lookups += 1
                self.hits += hit > 0
                self.hit_tokens += hit
                self.computed_tokens += len(tokens) - hit
            yield done

    def _forwards(self, start: int, ends: list[int]) -> list[list[int]]:
        """The states to keep behind `start`, by the forward that makes them: its last one ends there."""
        forwards: list[list[int]] = []
        for end in ends:
            if self.chunk is not None and forwards and end - start <= self.chunk:
                forwards[-1].append(end)
            else:
                start = forwards[-1][-1] if forwards else start
                forwards.append([end])
        return forwards

    def _keep_turn(self, done: Prefilled, tokens: list[int]) -> None:
        """Keep the tokens that were fed one by one since the prompt; the last generated token never is fed."""
        start, end = done.splits[-1] if done.splits else 0, int(done.cache.get_seq_length())
        if end > start:
            done.splits += range(start + 1, end + 1)
            self._append(done, tokens[start:end], done.cache, steps=True)

    def _append(
        self, done: Prefilled, tokens: Sequence[int], cache: HybridCache, steps: bool = False, forward: bytes = b""
    ) -> None:
        """Put a segment, at whose end `cache` stands, behind `done.segment`; that is None from the first one on that
        found no room."""
        if done.segment is None:
            return
        with self._lock, ExitStack() as at_end:
            self._drop_unwritten()
            parent, done.segment = done.segment, None
            at_end.callback(self._release, parent)
            if not self.index.has(parent):  # it was removed, with a file that could not be read or written
                return
            segment = self.index.make(parent, tokens, steps, forward)
            self.index.add(segment)
            segment.pin()
            at_end.callback(self._release, segment)
            for kind, take in ((LATENTS, self._latents), (STATE, self._state)):
                if not self._is_kept(segment, kind):
                    self._insert(segment, kind, take(cache, segment), self._flops_without(segment, kind))
            if self._is_kept(segment, LATENTS):
                segment.pin()
                done.segment = segment

    def _release(self, segment: Segment) -> None:
        """Unpin a segment; it goes if nothing came of it, or nothing can start from it any more."""
        with self._lock:
            segment.unpin()
            if segment.parent is not None and not self._is_kept(segment, LATENTS):
                self._after_loss(segment, LATENTS)
            self._remove_useless(segment)
            self.index.leave(segment.root())

    def _latents(self, cache: HybridCache, segment: Segment) -> Tensors:
        """Latents of the segment, [MLA layers, tokens, R] a block; blocks end at multiples of the block size."""
        device = self.model.device  # which searches all modules
        layers = [layer.filled()[0] for layer in cache.layers if isinstance(layer, LatentCacheLayer)]
        tensors, block = {"tokens": torch.tensor(segment.tokens)}, self.index.block
        edges = [segment.start, *range((segment.start // block + 1) * block, segment.end, block), segment.end]
        if layers:
            for i, (start, end) in enumerate(itertools.pairwise(edges)):
                tensors[f"block.{i:06d}"] = torch.stack([layer[start:end].to(device) for layer in layers])
        return tensors

    def _state(self, cache: HybridCache, segment: Segment) -> Tensors:
        """Recurrent states and convolution tails of all KDA layers."""
        device = self.model.device
        return {
            f"layers.{i}.{name}": tensor.to(device)
            for i, layer in enumerate(cache.layers)
            if not isinstance(layer, LatentCacheLayer)
            for name, tensor in zip(layer.tensor_names, layer.tensors(), strict=True)
        }

    def _assemble(self, done: Prefilled, parts: list[Tensors], room: int) -> None:
        """Fill the cache with the latents of every segment and the state behind the last of them. Latents are copied,
        into buffers that have room for `room` tokens; states are shared (nobody writes to them)."""
        if not parts:
            return
        (*latents, state), device = parts, self.model.device
        done.cache.reserve(room)
        blocks = [part[name].to(device) for part in latents for name in sorted(part) if name.startswith("block.")]
        of_layers = zip(*(block.unbind() for block in blocks), strict=True)
        for i, layer in enumerate(done.cache.layers):
            if isinstance(layer, LatentCacheLayer):
                layer.append(torch.cat(next(of_layers))[None])
            else:
                layer.load([state[f"layers.{i}.{name}"].to(device) for name in layer.tensor_names], done.hit)

    # --- looking up ----------------------------------------------------------------------------------------------

    @contextmanager
    def _fetched(self, tokens: numpy.ndarray, cache_salt: str):
        """(`Prefilled` with a cache that is yet empty, what belongs into it, tokens shared with some kept text), from
        the longest prefix that is kept. `done.segment` is pinned inside the block.

        Tensors are read outside the lock. A part that cannot be read is forgotten and the next best prefix tried.
        """
        parts = None
        while parts is None:
            with self._lock:
                self._drop_unwritten()
                self._adopt_files()
                root = self.index.root_of(cache_salt)
                prefixes, shared = self.index.matches(tokens, len(tokens) - 1, root)
                segment = next((prefix for prefix in prefixes if self._is_kept(prefix, STATE)), root)
                segment.pin()
            done, chain = Prefilled(HybridCache(self.model.config), segment), segment.chain()
            try:
                parts = self._read_all([*((s, LATENTS) for s in chain), (segment, STATE)] if chain else [])
                if parts is not None:
                    yield done, parts, shared
            finally:
                if done.segment is not None:
                    self._release(done.segment)
                self._behind.start(self.model.device)

    def _prefetched(self, tokens: numpy.ndarray, cache_salt: str) -> int:
        with self._fetched(tokens, cache_salt) as (done, _, _):
            copied = recorded(self.model.device)
            if copied is not None:  # the caller may continue on another stream than this thread's
                copied.synchronize()
        return done.hit

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
        files = self.disk.scan() if self.disk else {}
        described = {key: self.disk.describe(key) for key, kind in files if kind == LATENTS}
        texts = {key: text for key, text in described.items() if text is not None}
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


def _code_digest(model: torch.nn.Module) -> str:
    """Digest of the files that compute the states, another version of which may round differently: kernels, the model's
    files in the root, and those of its modules' classes, adapters' included."""
    root = Path(__file__).parent.parent
    modules = {base.__module__ for module in model.modules() for base in type(module).__mro__}
    of_classes = {Path(file) for name in modules if (file := getattr(sys.modules.get(name), "__file__", None))}
    return _digest_of(tuple(sorted({*root.glob("*_kimi_k3.py"), *root.glob("kernels/*.py"), *of_classes})))


@functools.cache
def _digest_of(files: tuple[Path, ...]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


@functools.cache
def _compiler() -> str | None:
    """Version of the Triton that the kernels import, which need not be the one that torch came with."""
    try:
        from ..kernels.triton_tools import triton
    except ImportError:
        return None
    return triton.__version__


def numerics_fingerprint(model: torch.nn.Module) -> str:
    """Hex digest of the model and of all that rounding depends on: what differs in it never shares a prefix."""
    device = model.device
    settings = (
        model.config._attn_implementation,
        _code_digest(model),
        torch.__version__,
        _compiler(),
        torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} {torch.get_num_threads()}",
        os.environ.get("KIMI_K3_TRITON"),
        hashlib.sha256(secret_key() or b"").hexdigest(),  # whose files the others cannot check
        torch.get_float32_matmul_precision(),
    )
    return hashlib.sha256(f"{model_fingerprint(model)} {settings}".encode()).hexdigest()


def _weight_versions(model: torch.nn.Module) -> int:
    """Changes when a parameter is replaced or written in place."""
    return hash(tuple((id(p), -1 if p.is_inference() else p._version) for p in model.parameters()))
