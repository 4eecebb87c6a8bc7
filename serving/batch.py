"""One forward over many sequences of a pool, each at its own token boundary.

    StepBatch      [N, 1] a token of each of N sequences
    PrefillBatch   [1, n] the next tokens of N sequences, end to end, each behind what it has fed before

Where sequences lie is said by tensors alone, so that these forwards can be captured (`forwards.py`).

The layers take one of them as their cache (KDA reads and stores states there) and as their context (MLA asks it for
attention). Everything else in a layer sees one token at a time and knows of no sequence.
"""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils.generic import is_flash_attention_requested

from ..cache_layers_kimi_k3 import KDAForward
from ..kernels_kimi_k3 import dispatch, kda, mla_decode, short_conv
from ..layers_kimi_k3 import run_layers
from ..packing_kimi_k3 import Packing
from ..rollback_kimi_k3 import KDAState
from .pool import Sequence, StatePool
from .scoring import Scored
from .sent import sent


class _Slots:
    """A KDA layer's cache: rows of the pool's buffers.

    Attributes:
        stored: what a prefill calls then; None for a step.
        slots: for a step [N], the rows of the buffers, which it reads and writes where they lie; None for a prefill,
            which is given copies.
    """

    writes_in_place = True

    def __init__(self, buffers: list[torch.Tensor], rows: torch.Tensor, stored: Callable[[], None] | None):
        self.buffers, self.rows, self.slots, self.stored = buffers, rows, None if stored else rows, stored

    def read(self, device: torch.device) -> KDAState:
        """As `KDACacheLayer.read`; what a sequence without tokens reads are zeros."""
        buffers = self.buffers
        if self.slots is None:
            buffers = [buffer.index_select(0, self.rows) for buffer in buffers]
        return KDAState(tuple(buffers[:-1]), buffers[-1])

    @staticmethod
    def boundaries(length: int) -> list[int]:
        """As `KDACacheLayer.boundaries`: a state inside a forward is not exported; a forward ends where one is kept."""
        return []

    def store(self, forward: KDAForward) -> None:
        """As `KDACacheLayer.store`."""
        for buffer, tensor in zip(self.buffers, forward.state.tensors, strict=True):
            if tensor is not buffer:
                buffer.index_copy_(0, self.rows, tensor.to(buffer.dtype))
        if self.stored is not None:
            self.stored()


class _Pages:
    """An MLA layer's cache: the new latents go to their pages."""

    def __init__(self, buffer: torch.Tensor, places: torch.Tensor, stored: Callable[[], None] | None):
        self.buffer, self.places, self.stored = buffer, places, stored

    def append(self, latents: torch.Tensor) -> torch.Tensor:
        """As `LatentCacheLayer.append`; `attention` of the batch reads the rest."""
        self.buffer.index_copy_(0, self.places, latents.flatten(0, 1).to(self.buffer.dtype))
        if self.stored is not None:
            self.stored()
        return latents

    @staticmethod
    def get_seq_length() -> None:
        """No one number: every sequence has its own."""


class StepBatch:
    """What the layers read and write in a forward of one new token of each of N sequences.

    Args:
        slots: [N] int64.
        ends: [N] int64, tokens of each with the new one.
        table: [N, W] int32, its pages; those behind the last one are not read. The new tokens' pages are there.
        longest: of `ends`, where the host may say it: no page's rest is read then where no kernel runs, so that no
            bit depends on the size of pages.
    """

    short_convs = staticmethod(short_conv.short_convs)
    fused_kda = staticmethod(kda.fused_kda)

    def __init__(
        self,
        pool: StatePool,
        slots: torch.Tensor,
        ends: torch.Tensor,
        table: torch.Tensor,
        longest: int | None = None,
    ):
        self.pool, self.ends, self.pages, self.longest = pool, ends, mla_decode.Pages(table, pool.page), longest
        self.layers: dict[int, _Slots | _Pages] = {i: _Slots(state, slots, None) for i, state in pool.states.items()}
        if not pool.latents:
            return
        last = ends - 1
        pages = table.gather(1, (last // pool.page)[:, None])[:, 0].long()
        places = pages * pool.page + last % pool.page
        self.layers |= {i: _Pages(buffer, places, None) for i, buffer in pool.latents.items()}

    def attention(self, module: Any, query: torch.Tensor, latents: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Attention of one MLA layer, by a kernel that reads pages where one runs: query [N, H, 1, D + P].

        Returns:
            [N, 1, H, V].
        """
        buffer = self.pool.latents[module.layer_idx]
        if dispatch.stands_for_call(module.kv_b_proj, torch.nn.Linear):
            kv_b = module.kv_b_proj.weight.view(module.num_heads, -1, module.kv_rank)
            where = None, self.ends, self.pages
            out = mla_decode.absorbed_attention(query, buffer, kv_b, module.scaling, *where)
            if out is not None:
                return out
        read = self.pages.gathered(buffer)[:, : self.longest].to(query.dtype)
        mask = torch.arange(read.shape[1], device=buffer.device) < self.ends[:, None]
        if not is_flash_attention_requested(module.config):  # which take it as it is
            mask = module.explicit_mask(mask, query, read.shape[1])
        return module.attend(query, read, mask, self.ends, False, False, **kwargs)[0]


@dataclass
class Part:
    """One sequence in a prefill.

    Attributes:
        count: of its new tokens.
        end: tokens of it with them.
        seen: [end] int64, rows of the latents' buffers that all of them have.
    """

    count: int
    end: int
    seen: torch.Tensor


def parts_of(pool: StatePool, sequences: list[Sequence], counts: list[int]) -> tuple[list[Part], torch.Tensor]:
    """What a prefill of `counts[i]` new tokens of `sequences[i]` reads, and the rows of the latents' buffers that the
    new ones have, [n] int64 on the host; nothing where no layer keeps latents. The pages must have room for them."""
    parts, new = [], [torch.empty(0, dtype=torch.int64)]
    for sequence, count in zip(sequences, counts, strict=True):
        if pool.latents:
            rows = pool.rows(sequence, 0, sequence.length + count)
            parts.append(Part(count, len(rows), sent(rows, pool.device)))
            new.append(rows[-count:])
    return parts, torch.cat(new)


class PrefillBatch:
    """What the layers read and write in a forward of the next tokens of N sequences. A forward that fails leaves KDA
    states behind some of them: close these sequences.

    Args:
        slots: [N] int64.
        places: [n] int64, rows of the latents' buffers for the new tokens of all.
        offsets: [N + 1] int64, where the sequences lie; None for one, which all tokens belong to.
        attend: attention of an MLA layer, which comes first, of query [1, H, n, D + P] and latents as `_Pages` took
            them: [1, n, H, V].
        stored: called with the number of every layer once its new state or latents are in the pool.
    """

    short_convs = staticmethod(short_conv.short_convs)
    fused_kda = staticmethod(kda.fused_kda)

    def __init__(
        self,
        pool: StatePool,
        slots: torch.Tensor,
        places: torch.Tensor,
        offsets: torch.Tensor | None,
        attend: Callable[..., torch.Tensor],
        stored: Callable[[int], None] = lambda layer: None,
    ):
        self.attention, self.packing = attend, None
        if offsets is not None:
            self.packing = Packing(torch.arange(len(places), device=places.device), offsets, None)
        self.layers: dict[int, _Slots | _Pages] = {
            i: _Slots(state, slots, functools.partial(stored, i)) for i, state in pool.states.items()
        }
        self.layers |= {i: _Pages(buffer, places, functools.partial(stored, i)) for i, buffer in pool.latents.items()}


def attend_parts(
    pool: StatePool, parts: list[Part], module: Any, query: torch.Tensor, latents: torch.Tensor, **kwargs: Any
) -> torch.Tensor:
    """Attention of one MLA layer, sequence by sequence: query [1, H, n, D + P] of the parts' tokens, and maybe others
    behind them, of which nothing comes.

    Returns:
        [1, n, H, V].
    """
    buffer, found, start = pool.latents[module.layer_idx], [], 0
    is_flash = is_flash_attention_requested(module.config)
    for part in parts:
        new, start = query[:, :, start : start + part.count], start + part.count
        behind = part.end > part.count > 1
        # sdpa and flash kernels know causality by themselves where queries and keys are the same tokens
        alone = behind or is_flash or module.config._attn_implementation == "sdpa"
        mask = None if alone else module.explicit_mask(None, new, part.end)
        read = buffer[part.seen][None].to(latents.dtype)
        found.append(module.attend(new, read, mask, None, False, behind, **kwargs)[0])
    if start < query.shape[2]:
        found.append(query.new_zeros(1, query.shape[2] - start, *found[0].shape[2:]))
    return torch.cat(found, dim=1)


@torch.no_grad()
def step_logits(model: Any, ids: torch.Tensor, batch: StepBatch) -> torch.Tensor:
    """Feed a token to every sequence, ids [N]; the logits behind it, [N, vocabulary]."""
    backbone = model.base_model
    embeds = backbone.embed_tokens(ids[:, None])
    stream, blocks = run_layers(backbone.layers, embeds, cache=batch, packing=None, context=batch)
    return model.get_output_embeddings()(backbone.output_norm(stream, *blocks))[:, 0]


@torch.no_grad()
def prefill_logits(
    model: Any, ids: torch.Tensor, last: torch.Tensor, batch: PrefillBatch, scored: Iterable[tuple[Scored, int]] = ()
) -> torch.Tensor:
    """Feed the sequences of a batch their new tokens, and return the logits behind some of them.

    Args:
        ids: [n], of one sequence behind the other.
        last: [N] places in it.
        scored: what else is to be told, each of a sequence that begins at this place.

    Returns:
        [N, vocabulary].
    """
    backbone = model.base_model
    embeds = backbone.embed_tokens(ids.view(1, -1))
    stream, blocks = run_layers(backbone.layers, embeds, cache=batch, packing=batch.packing, context=batch)

    def logits_of(rows: torch.Tensor) -> torch.Tensor:
        chosen, *others = (source[0].index_select(0, rows)[None] for source in (stream, *blocks))
        return model.get_output_embeddings()(backbone.output_norm(chosen, *others))[0]

    logits = logits_of(last)
    for asked, first in scored:
        asked.fill(lambda start, end: logits_of(torch.arange(start, end, device=ids.device)), first)
    return logits
