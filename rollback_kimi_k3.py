"""Going back in a recurrent state: what a KDA layer records of its forwards, and the replay that `crop` runs.

A state cannot be inverted, so it is rebuilt, as the Kimi K3 report does for speculative decoding: a recording layer
keeps its state at an earlier boundary and the projected inputs since then, a few KB a token, and advances the former
over the tokens that stay.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch

from .kernels_kimi_k3 import kda, kda_step

# Columns that a recording layer can take back at least; it keeps the inputs of up to twice as many.
RECORDED_COLUMNS = 64


class KDAState(NamedTuple):
    """Of all rows: the last W - 1 inputs of the q, k and v convolutions, three tensors [B, W - 1, H * K or V], and the
    recurrent state [B, H, K, V]; both None before the first token."""

    tails: tuple[torch.Tensor, ...] | None = None
    recurrent: torch.Tensor | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All four; none before the first token."""
        return () if self.tails is None or self.recurrent is None else (*self.tails, self.recurrent)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "KDAState":
        """The state with `function` applied to each of its tensors."""
        if self.tails is None or self.recurrent is None:
            return self
        return KDAState(tuple(function(tail) for tail in self.tails), function(self.recurrent))


@dataclasses.dataclass
class ProjectedInputs:
    """What one forward fed to a KDA layer, enough to advance a state again: real tokens only, row after row.

    Attributes:
        tokens: q, k, v before the convolution and the logits of decay and beta, each [n, P].
        conv_weights, parameters: as `kda_step.advance` takes them.
        rows, columns: [n] batch row and column (counted from the start of the forward) of every token.
        length: columns of the forward.
        plain: whether every column of every row is a token.
    """

    tokens: tuple[torch.Tensor, ...]
    conv_weights: tuple[torch.Tensor, ...]
    parameters: kda.KDAParameters
    rows: torch.Tensor
    columns: torch.Tensor
    length: int
    plain: bool

    @classmethod
    def of_forward(
        cls,
        projected: tuple[torch.Tensor, ...],
        logits: tuple[torch.Tensor, ...],
        conv_weights: tuple[torch.Tensor, ...],
        parameters: kda.KDAParameters,
        order: torch.Tensor | None,
        batch: int,
        length: int,
    ) -> "ProjectedInputs":
        """
        Args:
            projected, logits: q, k, v before the convolution, and of decay and beta; [B, T, P], or [1, n, P] of the
                real tokens.
            conv_weights, parameters: as `kda_step.advance` takes them.
            order: [n] flat indices of the real tokens in [B, T], None when all are.
        """
        flat = torch.arange(batch * length, device=projected[0].device) if order is None else order
        return cls(
            tuple(x.detach().flatten(0, 1) for x in (*projected, *logits)),
            tuple(x.detach() for x in conv_weights),
            parameters.with_tensors(*(x.detach() for x in parameters.tensors)),
            flat // length,
            flat % length,
            length,
            order is None,
        )

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "ProjectedInputs":
        tokens = tuple(function(x) for x in self.tokens)
        return dataclasses.replace(self, tokens=tokens, rows=function(self.rows), columns=function(self.columns))

    def select(self, index: torch.Tensor) -> "ProjectedInputs":
        """The tokens at `index` (positions or a mask), copied, so that the others can be freed."""
        return self._map(lambda x: x[index])

    def to(self, device: torch.device | str) -> "ProjectedInputs":
        return self._map(lambda x: x.to(device))

    def of_rows(self, indices: list[int]) -> "ProjectedInputs":
        """The same for a batch that consists of the given rows."""
        places = [torch.nonzero(self.rows == row).flatten() for row in indices]
        part = self.select(torch.cat(places))
        part.rows = torch.cat([torch.full_like(place, row) for row, place in enumerate(places)])
        return part

    def without_first(self, columns: int) -> "ProjectedInputs":
        part = self.select(self.columns >= columns)
        part.columns, part.length = part.columns - columns, self.length - columns
        return part

    def advance(self, columns: int, state: KDAState, batch: int) -> KDAState:
        """The state after the tokens in the first `columns` columns; computed where the weights lie."""
        home, device = self.rows.device, self.parameters.A_log.device
        part = self.select(self.columns < columns).to(device)
        if self.plain:  # as a batch, in which a few tokens need no chunks
            tokens, cu_seqlens = tuple(x.unflatten(0, (batch, -1)) for x in part.tokens), None
        else:
            tokens = tuple(x[None] for x in part.tokens)
            cu_seqlens = torch.nn.functional.pad(torch.bincount(part.rows, minlength=batch).cumsum(0), (1, 0))
        with kda.full_precision(device):
            before = state.map(lambda x: x.to(device))
            q, k, v, decay, beta = tokens
            weights = self.conv_weights, self.parameters
            after = kda_step.advance((q, k, v), (decay, beta), *weights, *before, cu_seqlens)
        return KDAState(*after).map(lambda x: x.to(home))


@dataclasses.dataclass
class Recording:
    """The recorded span of a KDA layer.

    Attributes:
        active: whether forwards are recorded.
        reach: columns that can be taken back at least; the inputs of up to twice as many are kept.
        start: the state before the recorded tokens.
        parts: what was recorded, a forward each.
    """

    active: bool = False
    reach: int = RECORDED_COLUMNS
    start: KDAState = dataclasses.field(default_factory=KDAState)
    parts: list[ProjectedInputs] = dataclasses.field(default_factory=list)

    @property
    def columns(self) -> int:
        """How many were recorded."""
        return sum(part.length for part in self.parts)

    def split(self, length: int) -> int | None:
        """Tokens inside the next forward, of `length` columns without padding, at which the span will start anew."""
        return length - self.reach if self.active and self.columns + length > 2 * self.reach else None

    def add(self, inputs: ProjectedInputs, before: KDAState, passed: dict[int, KDAState], batch: int) -> None:
        """Record a forward.

        Args:
            inputs: on the device where the layer keeps its state.
            before: the state that the forward started from.
            passed: {tokens inside the forward: state}, with that at `split` unless there is padding.
        """
        if not self.parts:
            self.start = before
        excess = self.columns + inputs.length - self.reach
        split = inputs.length - self.reach
        if excess > self.reach and split in passed:  # a prompt
            self.start, self.parts = passed[split].map(torch.Tensor.detach), [inputs.without_first(split)]
            return
        self.parts.append(inputs)
        if excess > self.reach:  # a prompt with padding, or a long run without a crop: move the start up
            self.start = self.state_after(excess, before, batch)
            while excess >= self.parts[0].length:
                excess -= self.parts.pop(0).length
            self.parts[0] = self.parts[0].without_first(excess)

    @torch.no_grad()
    def state_after(self, columns: int, like: KDAState, batch: int) -> KDAState:
        """The state `columns` recorded columns after the start of the span; before the first token it is zero.

        Args:
            like: of the shapes and the type that zeros need.
        """
        state = self.start
        if columns == 0:  # nothing to replay
            return like.map(torch.zeros_like) if state.recurrent is None else state
        for part in self.parts:
            state = part.advance(columns, state, batch)
            columns -= part.length
            if columns <= 0:
                break
        return state

    def clear(self) -> None:
        """Forget the span: the next one starts at the next forward."""
        self.start, self.parts = KDAState(), []

    def fork(self) -> "Recording":
        """The same span, which then goes on apart."""
        return dataclasses.replace(self, parts=list(self.parts))

    def of_rows(self, indices: torch.Tensor) -> None:
        """Go on with a batch that consists of the given rows."""
        self.start = self.start.map(lambda x: x.index_select(0, indices.to(x.device)))
        if self.parts:
            rows = indices.tolist()
            self.parts = [part.of_rows(rows) for part in self.parts]

    def to(self, device: torch.device | str) -> None:
        self.start = self.start.map(lambda x: x.to(device))
        self.parts = [part.to(device) for part in self.parts]
