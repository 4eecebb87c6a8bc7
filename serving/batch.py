"""One forward over many sequences of a pool, each at its own token boundary.

    decoding   [N, 1] a token of each of N sequences
    prefill    [1, n] the next tokens of N sequences, end to end, each behind what it has fed before

The layers take a `Batch` as their cache (KDA reads and stores states there) and as their context (MLA asks it for
attention). Everything else in a layer sees one token at a time and knows of no sequence.
"""

import functools
from collections.abc import Callable, Iterable
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


class _Slots:
    """A KDA layer's cache: rows of the pool's buffers.

    Attributes:
        slots: for a step [N], the rows of the buffers, which it reads and writes where they lie; None for a prefill,
            which is given copies.
    """

    writes_in_place = True

    def __init__(self, buffers: list[torch.Tensor], rows: torch.Tensor, is_step: bool, stored: Callable[[], None]):
        self.buffers, self.rows, self.slots, self.stored = buffers, rows, rows if is_step else None, stored

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
        self.stored()


class _Pages:
    """An MLA layer's cache: the new latents go to their pages."""

    def __init__(self, buffer: torch.Tensor, places: torch.Tensor, stored: Callable[[], None]):
        self.buffer, self.places, self.stored = buffer, places, stored

    def append(self, latents: torch.Tensor) -> torch.Tensor:
        """As `LatentCacheLayer.append`; `Batch.attention` reads the rest."""
        self.buffer.index_copy_(0, self.places, latents.flatten(0, 1).to(self.buffer.dtype))
        self.stored()
        return latents

    @staticmethod
    def get_seq_length() -> None:
        """No one number: every sequence has its own."""


class Batch:
    """What the layers read and write in a forward of `counts[i]` new tokens of `sequences[i]`.

    The pages must have room for them. Until `commit` the sequences stand where they stood, but a forward that fails in
    between leaves KDA states behind some of its tokens: close these sequences.

    Args:
        stored: called with the number of every layer once its new state or latents are in the pool.
    """

    short_convs = staticmethod(short_conv.short_convs)
    fused_kda = staticmethod(kda.fused_kda)

    def __init__(
        self,
        pool: StatePool,
        sequences: list[Sequence],
        counts: list[int],
        stored: Callable[[int], None] = lambda layer: None,
    ):
        self.pool, self.sequences, self.counts = pool, sequences, counts
        self.is_step = max(counts) == 1
        rows = torch.tensor([sequence.slot for sequence in sequences], device=pool.device)
        self.layers: dict[int, _Slots | _Pages] = {
            i: _Slots(state, rows, self.is_step, functools.partial(stored, i)) for i, state in pool.states.items()
        }
        if not pool.latents:
            return
        ends = [sequence.length + count for sequence, count in zip(sequences, counts, strict=True)]
        new = [pool.places(*each) for each in zip(sequences, (each.length for each in sequences), ends, strict=True)]
        places = torch.cat(new)
        self.layers |= {i: _Pages(buffer, places, functools.partial(stored, i)) for i, buffer in pool.latents.items()}
        self._ends, self._lengths = ends, torch.tensor(ends, device=pool.device)
        if not self.is_step:  # for all layers: rows of the buffers of each sequence's tokens
            self._seen = [pool.places(sequence, 0, end) for sequence, end in zip(sequences, ends, strict=True)]
            return
        tables = [torch.tensor(sequence.pages, dtype=torch.int32) for sequence in sequences]
        table = torch.nn.utils.rnn.pad_sequence(tables, batch_first=True).to(pool.device)
        self._pages = mla_decode.Pages(table, pool.page)

    def packing(self) -> Packing | None:
        """Where the sequences lie in a prefill of several."""
        if self.is_step or len(self.counts) == 1:
            return None
        offsets = torch.tensor([0, *self.counts], device=self.pool.device).cumsum(0)
        return Packing(torch.arange(sum(self.counts), device=self.pool.device), offsets, None)

    def attention(self, module: Any, query: torch.Tensor, latents: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Attention of one MLA layer: query [B, H, T, D + P] of the new tokens, latents as `_Pages` took them.

        Returns:
            [B, T, H, V].
        """
        buffer = self.pool.latents[module.layer_idx]
        if self.is_step:
            return self._of_step(module, query, buffer, **kwargs)
        parts, of_sequences = [], query.split(self.counts, dim=2)
        for seen, end, new in zip(self._seen, self._ends, of_sequences, strict=True):
            read, behind = buffer[seen][None], end > new.shape[2] > 1
            is_flash = is_flash_attention_requested(module.config)
            # sdpa and flash kernels know causality by themselves where queries and keys are the same tokens
            alone = behind or is_flash or module.config._attn_implementation == "sdpa"
            mask = None if alone else module.explicit_mask(None, new, end)
            parts.append(module.attend(new, read.to(latents.dtype), mask, None, False, behind, **kwargs)[0])
        return torch.cat(parts, dim=1)

    def _of_step(self, module: Any, query: torch.Tensor, buffer: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """`attention` of one token a sequence, by a kernel that reads pages where one runs."""
        if dispatch.stands_for_call(module.kv_b_proj, torch.nn.Linear):
            kv_b = module.kv_b_proj.weight.view(module.num_heads, -1, module.kv_rank)
            where = None, self._lengths, self._pages
            out = mla_decode.absorbed_attention(query, buffer, kv_b, module.scaling, *where)
            if out is not None:
                return out
        read = self._pages.gathered(buffer)[:, : max(self._ends)].to(query.dtype)
        mask = torch.arange(read.shape[1], device=buffer.device) < self._lengths[:, None]
        if not is_flash_attention_requested(module.config):  # which take it as it is
            mask = module.explicit_mask(mask, query, read.shape[1])
        return module.attend(query, read, mask, self._lengths, False, False, **kwargs)[0]

    def commit(self) -> None:
        """The forward has returned: its tokens are fed."""
        for sequence, count in zip(self.sequences, self.counts, strict=True):
            sequence.length += count


@torch.no_grad()
def next_logits(
    model: Any, tokens: list[list[int]], batch: Batch, scored: Iterable[Scored | None] = ()
) -> torch.Tensor:
    """Feed every sequence of a batch its new tokens, and return the logits behind the last of each, [N, vocabulary].

    Args:
        scored: of every sequence what else is to be told of its tokens, if anything.
    """
    backbone, counts = model.base_model, batch.counts
    ids = torch.tensor([token for row in tokens for token in row], device=batch.pool.device)
    embeds = backbone.embed_tokens(ids.view(-1, 1) if batch.is_step else ids.view(1, -1))
    stream, blocks = run_layers(backbone.layers, embeds, cache=batch, packing=batch.packing(), context=batch)

    def logits_of(rows: torch.Tensor) -> torch.Tensor:
        chosen, *others = (source.flatten(0, 1).index_select(0, rows)[None] for source in (stream, *blocks))
        return model.get_output_embeddings()(backbone.output_norm(chosen, *others))[0]

    logits = logits_of(torch.tensor(counts, device=ids.device).cumsum(0) - 1)
    for i, asked in enumerate(scored):
        if asked is not None:
            asked.fill(lambda start, end: logits_of(torch.arange(start, end, device=ids.device)), sum(counts[:i]))
    batch.commit()
    return logits
