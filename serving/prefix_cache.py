"""PrefixCache: keeps the states of prompts and turns, and starts later prompts from the longest kept prefix.

A hybrid can only start where the recurrent state of *every* KDA layer is kept together with all latents before it.
States are therefore kept at few boundaries: every `every` tokens, before the last token of a prompt (which has to run
in any case, to give the first logits), at the end of a turn, and where a text was seen to part from a kept one.
`prefix_index.py` says why a hit is exact to the last bit.

`prefix_store.py` says what is kept where. Here the model runs what was not.

    cache = PrefixCache(model, device_bytes=8 << 30, folder="prefixes", disk_bytes=100 << 30)
    output, done = cache.generate(input_ids, max_new_tokens=100)  # done.hit tokens were restored
"""

import functools
import hashlib
import os
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy
import torch

from ..cache_kimi_k3 import HybridCache
from ..cache_layers_kimi_k3 import LatentCacheLayer
from ..costs.formulas import text_cost
from ..fingerprint_kimi_k3 import model_fingerprint
from ..modeling_kimi_k3 import CACHE_ARGUMENT
from .prefix_index import chained, token_bytes
from .prefix_store import LATENTS, STATE, Lookup, PrefixStore, Turn
from .tiers import recorded, secret_key

# Reads from below the device that are under way at once: one that hangs shall not hold up those of others.
READERS = 4


@dataclass
class Prefilled:
    """A prompt of which all but the last token ran.

    Attributes:
        cache: at the boundary behind them; it belongs to the caller.
        turn: what was restored and kept.
        logits: of the tokens that ran, [1, n, vocabulary], if they were asked for.
    """

    cache: HybridCache
    turn: Turn
    logits: list[torch.Tensor] = field(default_factory=list)

    @property
    def hit(self) -> int:
        """Tokens that were restored."""
        return self.turn.hit

    @property
    def splits(self) -> list[int]:
        """Boundaries at which states were kept or forwards ended, the last of them `cache.get_seq_length()`."""
        return self.turn.splits

    @property
    def exact(self) -> bool:
        """Every one of them ended a forward, so that a cold run split there gives the same bits."""
        return self.turn.exact


@dataclass
class _Source:
    """What a cache has, for `Turn.keep`."""

    cache: HybridCache

    def latents(self, start: int, end: int) -> list[torch.Tensor]:
        return [layer.filled()[0, start:end] for layer in self.cache.layers if isinstance(layer, LatentCacheLayer)]

    def states(self) -> dict[int, list[torch.Tensor]]:
        layers = enumerate(self.cache.layers)
        return {i: layer.tensors() for i, layer in layers if not isinstance(layer, LatentCacheLayer)}


class PrefixCache(PrefixStore):
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
        admission: "first" keeps every text; "second" what is asked for a second time, in whole blocks, so that texts
            that nobody asks for again take no room. It remembers the last `ASKED` prefixes.

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
        admission: str = "first",
    ):
        if block < 1 or every < block or every % block:
            raise ValueError(f"every ({every}) must be a positive multiple of block ({block})")
        if chunk is not None and chunk < every:
            raise ValueError(f"chunk ({chunk}) must be at least every ({every}): a forward ends at a state")
        if min(device_bytes, host_bytes, disk_bytes) < 0:
            raise ValueError("budgets are numbers of bytes that are not negative")
        if (folder is None) != (disk_bytes == 0):
            raise ValueError("folder and disk_bytes belong together: give both or neither")
        if admission not in ("first", "second"):
            raise ValueError(f"admission is 'first' or 'second', but got {admission!r}")
        cost = text_cost(model.config.get_text_config(decoder=True), dtype_bytes=model.dtype.itemsize)
        namespace = numerics_fingerprint(model)
        is_second = admission == "second"
        super().__init__(
            model.device, namespace, cost, device_bytes, host_bytes, folder, disk_bytes, block, write_through, is_second
        )
        self.model, self.every, self.chunk = model, every, chunk
        self.lookups = self.hits = self.hit_tokens = self.computed_tokens = 0
        self._weights = _weight_versions(model)
        self._closed = False
        self._reader = ThreadPoolExecutor(READERS, thread_name_prefix="prefix-cache-reader")

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

    def check(self) -> None:
        """
        Raises:
            RuntimeError: for a cache that is closed.
            ValueError: for weights that changed since it was made.
        """
        if self._closed:
            raise RuntimeError("the prefix cache is closed: make a new PrefixCache")
        if _weight_versions(self.model) != self._weights:
            raise ValueError("the model's weights changed since the prefix cache was made: make a new PrefixCache")

    def _tokens(self, input_ids: torch.Tensor) -> numpy.ndarray:
        if input_ids.dim() != 2 or input_ids.shape[0] != 1 or input_ids.shape[1] < 1:
            raise ValueError(f"a prefix is one row of tokens [1, T], T at least 1, but got {tuple(input_ids.shape)}")
        self.check()
        return input_ids[0].to("cpu", torch.int64, copy=True).numpy()

    @contextmanager
    def _prefilled(self, input_ids: torch.Tensor, keep_logits: bool = False, cache_salt: str = ""):
        """A `Prefilled` whose segment is pinned inside the block; copies and files wait for the block's end."""
        tokens = self._tokens(input_ids)
        last = len(tokens) - 1
        asked = Lookup(tokens, last, cache_salt, self.worth(tokens, cache_salt))
        with closing(self.begin(asked)) as turn, torch.no_grad():
            done = Prefilled(HybridCache(self.model.config), turn)
            cache = done.cache
            self._assemble(done, len(tokens))
            for ends in self._forwards(turn.hit, self.boundaries(turn, last)):
                start = int(cache.get_seq_length())
                cache.keep_states(ends[:-1])
                part, logits_to_keep = input_ids[:, start : ends[-1]], 0 if keep_logits else 1
                logits = self.model(part, logits_to_keep=logits_to_keep, **{CACHE_ARGUMENT: cache}).logits
                if keep_logits:
                    done.logits.append(logits)
                forward = b""
                if len(ends) > 1:
                    forward = chained(b"", token_bytes(tokens[start : ends[-1]]), token_bytes(ends))
                for end in ends:
                    turn.keep(tokens[start:end], _Source(cache.snapshot(end)), forward=forward)
                    start = end
                cache.keep_states(())
            self.count(turn, len(tokens))
            yield done

    def boundaries(self, turn: Turn, last: int) -> list[int]:
        """Where states are kept of a text that goes on from `turn.hit`, up to `last`, before its last token."""
        ends = {*range(self.every, last, self.every), turn.shared, last}
        return sorted(end for end in ends if turn.hit < end <= last)

    def count(self, turn: Turn, tokens: int) -> None:
        """One more prompt, of so many tokens, is looked up."""
        with self._lock:
            self.lookups += 1
            self.hits += turn.hit > 0
            self.hit_tokens += turn.hit
            self.computed_tokens += tokens - turn.hit

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
        start, end = done.turn.kept, int(done.cache.get_seq_length())
        if end > start:
            done.turn.keep(tokens[start:end], _Source(done.cache), steps=True)

    def _assemble(self, done: Prefilled, room: int) -> None:
        """Fill the cache with what was restored. Latents are copied, into buffers that have room for `room` tokens;
        states are shared (nobody writes to them)."""
        if not done.hit:
            return
        states, latents = done.turn.take()
        done.cache.reserve(room)
        rows = iter(latents)
        for i, layer in enumerate(done.cache.layers):
            if isinstance(layer, LatentCacheLayer):
                layer.append(next(rows)[None])
            else:
                layer.load(states[i], done.hit)

    def begin_later(self, asked: Lookup) -> "Future[Turn]":
        """`begin` in a thread."""
        return self._reader.submit(self.begin, asked)

    def _prefetched(self, tokens: numpy.ndarray, cache_salt: str) -> int:
        with closing(self.begin(Lookup(tokens, len(tokens) - 1, cache_salt))) as turn:
            copied = recorded(self.device)
            if copied is not None:  # the caller may continue on another stream than this thread's
                copied.synchronize()
        return turn.hit


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
