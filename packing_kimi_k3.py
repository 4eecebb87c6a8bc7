"""Padding and packing: which columns of a batch are real tokens, and which sequence each belongs to.

Convolution and recurrence must see every sequence alone and without padding, so the KDA layers work on the real tokens
only, laid end to end (`cu_seqlens`); the MLA layers mask instead, except with flash kernels, which know no such mask.
"""

import dataclasses
import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask
from transformers import PreTrainedConfig
from transformers.masking_utils import create_causal_mask

from .cache_kimi_k3 import HybridCache, RefusedForward


@dataclasses.dataclass
class Packing:
    """Which columns of a [B, T] forward are real tokens, and to which sequence each belongs.

    Only made when some column is padding or a row holds several documents; a plain batch has none.

    Attributes:
        order: [n] flat indices of the real tokens, sequence after sequence; None for all columns as they lie.
        cu_seqlens: [N + 1] offsets of the sequences inside `order`; a row of padding alone is a sequence of length 0.
        documents: [B, T] number of the document of every column, None when each row is one document.
        padding: [B, T] True for columns that only fill up a shape (`fixed_packing`): they are computed, as documents of
            their own, and mean nothing. None where there are none.
    """

    order: torch.Tensor | None
    cu_seqlens: torch.Tensor
    documents: torch.Tensor | None
    padding: torch.Tensor | None = None

    @functools.cached_property
    def longest(self) -> int:
        """Tokens of the longest sequence; of a fixed shape, as many as there could be."""
        return int(self.cu_seqlens.diff().max()) if self.padding is None else self.padding.numel()

    def to(self, device: torch.device | str) -> "Packing":
        """The packing for a layer on `device`; the hooks that join several devices call it, as they do for tensors."""
        if self.cu_seqlens.device == torch.device(device):
            return self

        def moved(x: torch.Tensor | None) -> torch.Tensor | None:
            return None if x is None else x.to(device)

        return Packing(moved(self.order), self.cu_seqlens.to(device), moved(self.documents), moved(self.padding))

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, D] -> [1, n, D]"""
        flat = x.flatten(0, 1)
        return (flat if self.order is None else flat[self.order])[None]

    def put_back(self, x: torch.Tensor, batch: int, length: int) -> torch.Tensor:
        """[1, n, D] -> [B, T, D], zeros at the padding"""
        if self.order is None:
            return x.reshape(batch, length, -1)
        flat = x.new_zeros(batch * length, x.shape[-1])
        return flat.index_copy(0, self.order, x[0]).view(batch, length, -1)


@dataclasses.dataclass
class StepPacking:
    """Which rows of a one-token forward with a static cache hold a real token; `real` [B]."""

    real: torch.Tensor
    documents: None = None

    def to(self, device: torch.device | str) -> "StepPacking":
        """As `Packing.to`."""
        return StepPacking(self.real.to(device))


def find_packing(
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    cu_seq_lens: torch.Tensor | None,
    embeds: torch.Tensor,
    cache: HybridCache | None,
    given: Packing | StepPacking | None = None,
) -> Packing | StepPacking | None:
    """Find padding and packed documents; None for a plain batch, in which every row is one sequence of real tokens.

    Args:
        attention_mask: [B, S] with the T columns of this forward last, or None. With a static cache also
            [B, max_length], one column for each place.
        position_ids: [B, T], [T] or None; a document starts where one does not follow that of the last real token.
        cu_seq_lens: [N + 1] offsets of documents in a packed row (B = 1), or None.
        embeds: [B, T, hidden].
        cache: once it holds tokens, rows go on and documents are refused.
        given: the answer, which leaves nothing to be found.
    """
    if given is not None:
        if attention_mask is not None or position_ids is not None:
            raise RefusedForward("packing says what attention_mask and position_ids say: leave them out")
        return given
    batch, length, _ = embeds.shape
    device = embeds.device
    real = None
    if attention_mask is not None:
        cached = cache.get_seq_length() if cache is not None else 0
        places = cache.get_max_length() if cache is not None else -1
        if attention_mask.shape == (batch, places):
            if length == 1 and isinstance(cached, torch.Tensor):  # static shapes: no value may be read on the host
                column = cached.view(1).to(attention_mask.device)
                return StepPacking(attention_mask.index_select(1, column)[:, 0].to(device).bool())
            real = attention_mask[:, int(cached) : int(cached) + length]
        else:
            seen = length + int(cached)
            if attention_mask.shape != (batch, seen):
                raise RefusedForward(
                    f"attention_mask has shape {tuple(attention_mask.shape)}, expected {(batch, seen)}: one column for "
                    "each token in the cache and each new one"
                )
            real = attention_mask[:, -length:]
        real = real.to(device).bool()
        if real.all():
            real = None
    starts = _document_starts(real, position_ids, cu_seq_lens, batch, length, device, cache)
    if real is None and starts is None:
        return None
    order = None if real is None else real.flatten().nonzero().flatten()
    if starts is None:
        assert real is not None  # one of them is there
        lengths = real.sum(-1)
        documents = None
    else:
        documents = starts.flatten().cumsum(0).view(batch, length)
        numbers = documents.flatten() if order is None else documents.flatten()[order]
        lengths = torch.bincount(numbers, minlength=int(documents[-1, -1]) + 1)[1:]
    return Packing(order, F.pad(lengths.cumsum(0), (1, 0)), documents)


def fixed_packing(lengths: torch.Tensor, columns: int, sequences: int) -> Packing:
    """The packing of one row of documents end to end, in shapes that do not depend on them: steps on it can be
    captured. What is left of the row is one more document, of padding.

    Args:
        lengths: [n] tokens of the documents, on the CPU.
        columns: T of the row.
        sequences: N of `cu_seqlens`, more than n; those without a document are empty.
    """
    offsets = torch.full((sequences + 1,), columns)
    offsets[0], offsets[1 : len(lengths) + 1] = 0, lengths.cumsum(0)
    places = torch.arange(columns)[None]
    documents = torch.searchsorted(offsets[1 : len(lengths) + 1].contiguous(), places, right=True)
    return Packing(None, offsets, documents, documents == len(lengths))


def causal_mask(
    config: PreTrainedConfig,
    embeds: torch.Tensor,
    attention_mask: torch.Tensor | None,
    cache: HybridCache | None,
    packing: Packing | StepPacking | None,
) -> torch.Tensor | BlockMask | None:
    """transformers' causal mask in the form of the config's attention implementation; documents do not see each other.

    Args:
        embeds: [B, T, hidden]; attention_mask [B, S] or None.
        packing: what `find_packing` found.
    """
    empty = cache is None or not (cache.is_compileable or cache.get_seq_length())
    if config._attn_implementation == "sdpa" and attention_mask is None and packing is None and empty:
        # transformers finds this too, but not while a graph is captured (older releases) or traced: torch would compute
        # with a mask of T^2 numbers, and not by its flash kernels.
        return None
    inside_document = None
    if packing is not None and packing.documents is not None:

        def inside_document(b, h, q, kv):
            return packing.documents[b, q] == packing.documents[b, kv]

    return create_causal_mask(config, embeds, attention_mask, cache, and_mask_function=inside_document)


def _document_starts(real, position_ids, cu_seq_lens, batch, length, device, cache):
    """[B, T] True where a document starts, None when no row holds more than one."""
    cached = cache.get_seq_length() if cache is not None else 0
    # a static cache counts in a tensor once it holds tokens
    continuing = isinstance(cached, torch.Tensor) or cached > 0
    if continuing and cu_seq_lens is not None:
        raise RefusedForward("cu_seq_lens_q describes packed documents, which cannot continue a cache")
    if continuing and torch.compiler.is_compiling():  # no value may be read on the host
        return None
    starts = torch.zeros(batch, length, dtype=torch.bool, device=device)
    if position_ids is not None and position_ids.dim() == 1:
        position_ids = position_ids[None]
    if cu_seq_lens is not None:
        if not isinstance(cu_seq_lens, torch.Tensor) or cu_seq_lens.dim() != 1:
            raise RefusedForward("cu_seq_lens_q must be a 1-D tensor, the offsets of the documents of one packed row")
        if batch != 1:
            raise RefusedForward(f"cu_seq_lens_q describes one packed row, but the batch has {batch} rows")
        offsets = cu_seq_lens.to(device).long()
        if offsets[0] != 0 or offsets[-1] != length or (offsets.diff() < 0).any():
            raise RefusedForward(
                f"cu_seq_lens_q must rise from 0 to the length of the row ({length}), got {offsets.tolist()}"
            )
        starts[0, offsets[:-1][offsets[:-1] < length]] = True
    elif position_ids is not None and length > 1:
        if position_ids.dim() != 2:  # positions of several axes say nothing about documents
            return None
        if position_ids.shape not in ((1, length), (batch, length)):
            raise RefusedForward(f"position_ids has shape {tuple(position_ids.shape)}, expected {(batch, length)}")
        positions = position_ids.to(device).expand(batch, -1)
        previous = positions[:, :-1]
        if real is not None:
            # the position of the last real token before each column, whatever padding lies between
            index = torch.arange(length, device=device).expand(batch, -1).masked_fill(~real, -1)
            last_real = index.cummax(-1).values[:, :-1]
            previous = positions.gather(-1, last_real.clamp_min(0)).where(last_real >= 0, positions[:, 1:] - 1)
        starts[:, 1:] = positions[:, 1:] != previous + 1
        if real is not None:
            starts &= real
    else:
        return None
    starts[:, 0] = False
    if not starts.any():
        return None
    if continuing:
        raise RefusedForward("position_ids restart as in packed documents, which cannot continue a cache")
    starts[:, 0] = True
    return starts


def packed_offsets(kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Take the packing arguments of the collators out of `kwargs`; the offsets of the documents are returned."""
    seq_idx = kwargs.pop("seq_idx", None)
    named = [kwargs.pop(name, None) for name in ("cu_seq_lens_q", "cu_seqlens", "cu_seq_lens_k")]
    for name in ("max_length_q", "max_length_k"):
        kwargs.pop(name, None)
    passed = [each for each in named if each is not None]
    if any(other is not passed[0] and not torch.equal(other, passed[0].to(other)) for other in passed[1:]):
        raise RefusedForward("cu_seq_lens_q and cu_seq_lens_k name different documents")
    offsets = passed[0] if passed else None
    if offsets is None and seq_idx is not None:
        if seq_idx.dim() != 2 or seq_idx.shape[0] != 1:
            shape = tuple(seq_idx.shape)
            raise RefusedForward(f"seq_idx numbers the documents of one packed row, but has shape {shape}")
        changes = seq_idx[0].diff().nonzero().flatten() + 1
        offsets = torch.cat([changes.new_zeros(1), changes, changes.new_tensor([seq_idx.shape[1]])])
    return offsets


def check_mask(attention_mask: Any, new_columns: int) -> None:
    """Refuse what is not [B, S] of ones and zeros. Whole numbers are not looked at again in steps of one token."""
    if attention_mask is None:
        return
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.dim() != 2:
        raise RefusedForward("attention_mask must be 2-D, a column for each token seen: KDA layers read no other form")
    is_known = attention_mask.dtype == torch.bool or (new_columns == 1 and not attention_mask.is_floating_point())
    if is_known or attention_mask.is_meta or torch.compiler.is_compiling():
        return
    if not ((attention_mask == 0) | (attention_mask == 1)).all():
        raise RefusedForward(
            "attention_mask holds numbers other than 0 and 1: pass 1 for a token and 0 for padding, not what is added "
            "to the scores, nor numbers of packed documents, which position_ids tell apart"
        )
