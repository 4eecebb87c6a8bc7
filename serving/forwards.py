"""The forwards of an engine on its pool, captured where the device has graphs.

    step      a token of each of N sequences: one graph
    prefill   the next tokens of N sequences, end to end: graphs that are cut where an MLA layer attends, since lengths
              of texts decide what that computes; the attention between them runs as it is

What a forward needs of the host is one tensor of int32, in one copy that waits for nothing:

    step      a row a sequence:  slot | tokens with the new one | the new token, or -1: the one that `StatePool.tokens`
              has | pages ...
    prefill   ids [n] | rows of the latents' buffers [n] | where the sequences lie [N + 1] | slots [N]

Graphs are made for numbers that are rounded up: of rows and pages, or of tokens and sequences. What is too much
writes to the pool's spare slot and page, which nobody reads. The first forward of a size runs as it is, so that kernels
are compiled, the second is captured. What cannot be captured runs as it is, and the reason is logged once.
"""

import contextlib
import functools
import logging
import math
from collections.abc import Callable
from typing import Any

import torch

from .. import graph_kimi_k3
from .batch import PrefillBatch, StepBatch, attend_parts, parts_of, prefill_logits, step_logits
from .pool import Sequence, StatePool
from .scoring import Scored
from .sent import sent

logger = logging.getLogger(__name__)

MOST_SIZES = 128  # of which graphs are kept; the oldest gives way
_HEAD = 3  # columns of a step before the pages
UNKNOWN = -1  # a token that the host does not know yet


def rounded_rows(rows: int) -> int:
    """1, 2, 4, or a multiple of 8."""
    return next((few for few in (1, 2, 4) if rows <= few), -(-rows // 8) * 8)


def rounded_pages(pages: int) -> int:
    """A power of two, or one and a half of it; 0."""
    most = 1 << max(pages - 1, 0).bit_length() if pages else 0
    return most * 3 // 4 if most >= 4 and pages <= most * 3 // 4 else most


def rounded_tokens(tokens: int) -> int:
    """A multiple of 64, and above 512 an eighth more at most."""
    unit = max(1 << max((tokens - 1).bit_length() - 4, 0), 64)
    return -(-tokens // unit) * unit


class _Step:
    """The forward of a step; `device` is asked for by `Graph`."""

    def __init__(self, model: Any, pool: StatePool):
        self.model, self.pool, self.device = model, pool, pool.device

    def __call__(self, table: torch.Tensor, longest: int | None = None) -> torch.Tensor:
        """[N, 3 + pages] int32 -> logits [N, vocabulary]; `longest` as `StepBatch` takes it."""
        slots, ends, given = table[:, :_HEAD].T.long().contiguous()
        batch = StepBatch(self.pool, slots, ends, table[:, _HEAD:].contiguous(), longest)
        return step_logits(self.model, torch.where(given < 0, self.pool.tokens[slots], given), batch)


class _Prefill:
    """The forward of a prefill of `tokens` tokens of `sequences` sequences."""

    def __init__(self, model: Any, pool: StatePool, tokens: int, sequences: int):
        self.model, self.pool, self.device = model, pool, pool.device
        self.sizes = [tokens, tokens, sequences + 1, sequences]

    def __call__(
        self,
        table: torch.Tensor,
        attend: Callable[..., torch.Tensor],
        scored: list[tuple[Scored, int]] = [],  # noqa: B006  # nobody writes to it
    ) -> torch.Tensor:
        """[2 n + 2 N + 1] int32 -> logits [N, vocabulary]"""
        ids, places, offsets, slots = table.long().split(self.sizes)
        batch = PrefillBatch(self.pool, slots, places, offsets if len(slots) > 1 else None, attend)
        return prefill_logits(self.model, ids, offsets[1:] - 1, batch, scored)


def _captured(forward: _Step, table: torch.Tensor) -> graph_kimi_k3.Graph:
    return graph_kimi_k3.Graph(forward, {"table": table})


class _Memory:
    """What the graphs of all sizes use in turn: one replays at a time, and its results are read before the next."""

    def __init__(self, device: torch.device) -> None:
        self.graphs = graph_kimi_k3.GraphMemory(device)
        self._buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def buffer(self, name: str, like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Made inside of a capture, a larger one when it is too small."""
        size, key = math.prod(shape), (name, like.dtype)
        if key not in self._buffers or self._buffers[key].numel() < size:
            self._buffers[key] = like.new_empty(size)
        return self._buffers[key][:size].view(shape)


class _CutGraph:
    """A prefill in graphs, with the attention of MLA layers between them. `outputs` are the logits."""

    def __init__(self, forward: _Prefill, table: torch.Tensor, memory: _Memory):
        self._memory = memory
        self._cuts: list[tuple[torch.cuda.CUDAGraph, Any, torch.Tensor, torch.Tensor, dict[str, Any]]] = []
        with graph_kimi_k3.alone, torch.cuda.device(forward.device):
            torch.cuda.synchronize()
            with torch.cuda.stream(memory.graphs.stream):
                self._begin()
                try:
                    self.outputs = forward(table, self._cut)
                except BaseException:
                    with contextlib.suppress(RuntimeError):  # which a capture that was broken off raises again
                        self._graph.capture_end()
                    raise
                self._graph.capture_end()

    def _begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._memory.graphs.pool, capture_error_mode="thread_local")

    def _cut(self, module: Any, query: torch.Tensor, latents: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        batch, heads, length, _ = query.shape
        read = self._memory.buffer("query", query, query.shape)
        read.copy_(query)
        out = self._memory.buffer("out", query, (batch, length, heads, module.v_dim))
        self._graph.capture_end()
        self._cuts.append((self._graph, module, read, out, kwargs))
        self._begin()
        return out

    def replay(self, attend: Callable[..., torch.Tensor]) -> None:
        for graph, module, query, out, kwargs in self._cuts:
            graph.replay()
            out.copy_(attend(module, query, query, **kwargs))  # of the latents the dtype is read alone
        self._graph.replay()


class _Size:
    """Forwards of one size.

    Attributes:
        table: on the device, what a replay reads.
        graph: None until the size is met the second time.
    """

    def __init__(self, table: torch.Tensor, device: torch.device):
        with torch.inference_mode(False):
            self.table = torch.empty_like(table, device=device)
        self.graph: Any = None
        self.is_warm = False

    def fill(self, table: torch.Tensor) -> None:
        self.table.copy_(table.pin_memory() if self.table.is_cuda else table, non_blocking=True)


class Forwards:
    """All forwards of a model on its pool.

    Attributes:
        cuts_prefills: prefills are captured too. Off: no GPU has compared their texts yet.
    """

    cuts_prefills = False

    def __init__(self, model: Any, pool: StatePool):
        self.model, self.pool = model, pool
        self._sizes: dict[tuple[int, ...], _Size] = {}
        self._computation: Any = None
        self._refused = True  # until `examine` allows it
        self._reasons: set[str] = set()
        self._memory: _Memory | None = None  # of prefills

    def examine(self) -> None:
        """See what the model computes now: to be called before the first forward, and whenever the model may have
        changed. What was captured of another computation is let go."""
        if not self.pool.spare:
            return
        computation, reason = graph_kimi_k3.examined(self.model)
        if computation != self._computation:
            self._sizes, self._computation = {}, computation
        self._refused = reason is not None
        if reason is not None:
            self._refuse(reason)

    def _refuse(self, reason: str) -> None:
        self._refused, self._sizes = True, {}
        if reason not in self._reasons:
            self._reasons.add(reason)
            logger.warning("batches run without CUDA graphs: %s", reason)

    @torch.no_grad()
    def step(self, sequences: list[Sequence], tokens: list[int]) -> torch.Tensor:
        """Feed each sequence one token, `UNKNOWN` for the one that `StatePool.tokens` has, and return the logits
        [N, vocabulary] behind it; the next call may write over them. The pages must have room. A forward that fails
        leaves KDA states behind some of its tokens: close these sequences."""
        # Of what was fed, and not of what they have: by how many pages sums are split must not depend on that.
        used = [self.pool.pages_of(sequence.length + 1) for sequence in sequences]
        rows, pages = len(sequences), max(used)
        if not self._refused:
            rows, pages = min(rounded_rows(rows), self.pool.sequences), rounded_pages(pages)
        # Pages that are too many are gathered where no kernel runs, so they have to be pages.
        spare = [self.pool.sequences, 1, 0] + [self.pool.pages if self.pool.spare else 0] * pages
        filled = [
            [sequence.slot, sequence.length + 1, token, *sequence.pages[:count], *spare[_HEAD + count :]]
            for sequence, token, count in zip(sequences, tokens, used, strict=True)
        ]
        table = torch.tensor(filled + [spare] * (rows - len(filled)), dtype=torch.int32)
        forward = _Step(self.model, self.pool)
        if self._refused:
            longest = max(sequence.length for sequence in sequences) + 1
            logits = forward(sent(table, self.pool.device), longest)
        else:
            logits = self._run(table, (rows, pages), forward, functools.partial(_captured, forward), {})
        for sequence in sequences:
            sequence.length += 1
        return logits[: len(sequences)]

    @torch.no_grad()
    def prefill(
        self,
        sequences: list[Sequence],
        tokens: list[list[int]],
        scored: list[Scored | None] = [],  # noqa: B006
    ) -> torch.Tensor:
        """Feed each sequence its next tokens, and return the logits [N, vocabulary] behind the last of each. As `step`
        else.

        Args:
            scored: of every sequence what else is to be told of its tokens, if anything.
        """
        counts = [len(new) for new in tokens]
        parts, rows = parts_of(self.pool, sequences, counts)
        starts = [0, *torch.tensor(counts).cumsum(0).tolist()]
        told = [(asked, start) for asked, start in zip(scored, starts, strict=False) if asked is not None]
        attend = functools.partial(attend_parts, self.pool, parts)
        is_exact = self._refused or bool(told) or not self.cuts_prefills
        table, size = self._prefill_table(sequences, tokens, starts, rows, is_exact)
        forward = _Prefill(self.model, self.pool, *size)
        if is_exact:
            logits = forward(sent(table, self.pool.device), attend, told)
        else:
            if self._memory is None:
                self._memory = _Memory(self.pool.device)
            capture = functools.partial(_CutGraph, forward, memory=self._memory)
            logits = self._run(table, size, forward, capture, {"attend": attend})
        for sequence, count in zip(sequences, counts, strict=True):
            sequence.length += count
        return logits[: len(sequences)]

    def _prefill_table(
        self,
        sequences: list[Sequence],
        tokens: list[list[int]],
        starts: list[int],
        rows: torch.Tensor,
        is_exact: bool,
    ) -> tuple[torch.Tensor, tuple[int, int]]:
        """The table of a prefill, and for how many tokens and sequences it is. `rows` as `parts_of` returns them."""
        pool, length, count = self.pool, starts[-1], len(sequences)
        ids = [token for new in tokens for token in new]
        places = rows.tolist() if pool.latents else [0] * length
        slots = [sequence.slot for sequence in sequences]
        size = length, count
        if not is_exact:  # a sequence more has what the tokens are too many
            size = rounded_tokens(length), rounded_rows(count + 1)
            too_many = size[0] - length
            ids += [0] * too_many
            places += [pool.pages * pool.page if pool.latents else 0] * too_many
            slots += [pool.sequences] * (size[1] - count)
            starts = starts + [length] * (size[1] - count - 1) + [size[0]]
        return torch.tensor([*ids, *places, *starts, *slots], dtype=torch.int32), size

    def _run(
        self,
        table: torch.Tensor,
        size: tuple[int, int],
        forward: _Step | _Prefill,
        capture: Callable[[torch.Tensor], Any],
        arguments: dict[str, Any],
    ) -> torch.Tensor:
        """A forward on a table, or the graphs that `capture` makes of it."""
        key = (isinstance(forward, _Step), *size)
        kept = self._sizes.get(key)
        if kept is None:
            if len(self._sizes) == MOST_SIZES:
                del self._sizes[next(iter(self._sizes))]
            kept = self._sizes[key] = _Size(table, self.pool.device)
        kept.fill(table)
        if not kept.is_warm:
            logits, waits = graph_kimi_k3.waiting(self.pool.device, lambda: forward(kept.table, **arguments))
            kept.is_warm = True
            if waits:
                self._refuse(f"the forward waits for the device in {waits[0]}")
            return logits
        if kept.graph is None:
            try:
                kept.graph = capture(kept.table)
            except Exception as error:  # whatever an adapter in the model does that a capture forbids
                self._refuse(graph_kimi_k3.described_error(error))
                return forward(kept.table, **arguments)
        kept.graph.replay(**arguments)
        return kept.graph.outputs
