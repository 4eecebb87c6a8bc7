"""Memory for the states of many sequences: slots for what KDA layers keep, pages for the latents of MLA layers.

A sequence has one slot, whatever its length, and as many pages as its tokens fill. All layers use the same numbers:
slot 3 is row 3 of every KDA layer's buffers, and page 7 holds the same tokens in every MLA layer. Sequences that share
a beginning (`fork`) share its whole pages; whoever writes owns the page it writes to.
"""

from dataclasses import dataclass, field

import torch

from ..cache_kimi_k3 import HybridCache
from ..cache_layers_kimi_k3 import KDA_TENSORS, KDACacheLayer
from ..generation_kimi_k3 import CACHE_ARGUMENT
from ..graph_kimi_k3 import has_graphs
from ..kernels_kimi_k3 import kda
from .sent import sent


@dataclass(eq=False)
class Sequence:
    """The places of one sequence in a pool. `length` tokens were fed; the pages may have room for more."""

    slot: int
    pages: list[int] = field(default_factory=list)
    length: int = 0


@dataclass
class Saved:
    """A sequence outside of the pool: what `StatePool.load` and `restore` bring back to the last bit.

    Attributes:
        length: tokens that were fed.
        states: of every KDA layer its tensors, [1, ...] each.
        latents: of every MLA layer [tokens, kv_lora_rank + qk_rope_head_dim].
    """

    length: int
    states: dict[int, list[torch.Tensor]]
    latents: dict[int, torch.Tensor]

    @property
    def layers(self) -> int:
        """How many are there."""
        return len(self.states) + len(self.latents)

    def put(self, layer: int, tensors: dict[str, torch.Tensor]) -> None:
        """Take what `StatePool.layer` has made of a layer."""
        if "latents" in tensors:
            self.latents[layer] = tensors["latents"]
        else:
            self.states[layer] = [tensors[name] for name in KDA_TENSORS]

    @property
    def nbytes(self) -> int:
        tensors = [*self.latents.values(), *(tensor for state in self.states.values() for tensor in state)]
        return sum(tensor.nbytes for tensor in tensors)


class StatePool:
    """Slots and pages of one model, in buffers that are made once.

    Where steps are captured (`steps.py`) there is a slot and a page behind the last one, which no sequence has: rows
    that fill up a captured step write there.

    Args:
        model: with all its layers on one device. Sizes and dtypes are those that a forward of it leaves in a cache.
        sequences: slots, the most sequences at a time.
        memory: bytes of all buffers at most; what the slots leave becomes pages. None: no limit but `tokens`.
        tokens: that all sequences may have together at most. None: no limit but `memory`.
        page: tokens of a page.

    Attributes:
        tokens: of every slot the token that was chosen last on the device, int64.

    Raises:
        ValueError: for memory in which no token fits beside the slots, and for a model on several devices.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        sequences: int,
        memory: int | None = None,
        tokens: int | None = None,
        page: int = 64,
    ):
        # Whoever makes the pool may be in inference mode or under autocast, and the thread that fills it in neither.
        with torch.inference_mode(False), kda.full_precision(model.device):
            layers = _example(model).layers
            states = {i: layer.tensors() for i, layer in enumerate(layers) if isinstance(layer, KDACacheLayer)}
            latents = {i: layer.filled() for i, layer in enumerate(layers) if i not in states}
            self.device, self.page, self.config = model.device, page, model.config
            self.spare = int(has_graphs(self.device))
            self.state_bytes = sum(tensor.nbytes for state in states.values() for tensor in state)  # of a slot
            self.page_bytes = page * sum(tensor.nbytes for tensor in latents.values())
            pages = self._pages_for(sequences, memory, tokens)
            self.states: dict[int, list[torch.Tensor]] = {
                i: [tensor.new_zeros(sequences + self.spare, *tensor.shape[1:]) for tensor in state]
                for i, state in states.items()
            }
            # The last dimension is a token's latent; rows of all pages one behind the other.
            self.latents: dict[int, torch.Tensor] = {
                i: tensor.new_zeros((pages + self.spare) * page, tensor.shape[-1]) for i, tensor in latents.items()
            }
            self.tokens = torch.zeros(sequences + self.spare, dtype=torch.int64, device=self.device)
        self.sequences, self.pages = sequences, pages
        self._free_slots = list(range(sequences))[::-1]
        self._free_pages = list(range(pages if latents else 0))[::-1]
        self._holders: dict[int, int] = {}  # of a page in use, how many sequences have it

    def _pages_for(self, sequences: int, memory: int | None, tokens: int | None) -> int:
        limits = [] if tokens is None else [-(-tokens // self.page)]
        left = None if memory is None else memory - (sequences + self.spare) * self.state_bytes
        if not self.page_bytes:  # no layer keeps latents
            limits = [1 << 30 if left is None or left >= 0 else 0]
        elif left is not None:
            limits.append(left // self.page_bytes - self.spare)
        if sequences < 1 or min(limits, default=0) < 1:
            given = "no room for a token" if memory is None else f"{memory:,} bytes hold no token"
            raise ValueError(
                f"{given} beside {sequences} states of {self.state_bytes:,} bytes: give more memory, or run fewer "
                "sequences at a time"
            )
        return min(limits)

    # --- room ----------------------------------------------------------------------------------------------------

    @property
    def free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def free_pages(self) -> int:
        return len(self._free_pages)

    def pages_of(self, tokens: int) -> int:
        """Pages that so many tokens fill."""
        return -(-tokens // self.page) if self.latents else 0

    def missing_pages(self, sequence: Sequence | None, tokens: int) -> int:
        """Pages that a sequence needs beside its own to hold `tokens` tokens."""
        return max(self.pages_of(tokens) - (len(sequence.pages) if sequence else 0), 0)

    def open(self) -> Sequence | None:
        """A sequence without tokens; None while all slots are taken."""
        if not self._free_slots:
            return None
        sequence = Sequence(self._free_slots.pop())
        for state in self.states.values():
            for buffer in state:
                buffer[sequence.slot] = 0
        return sequence

    def grow(self, sequence: Sequence, tokens: int) -> bool:
        """Give a sequence room for `tokens` tokens in all; False, and nothing is changed, where pages are missing."""
        missing = self.missing_pages(sequence, tokens)
        if missing > len(self._free_pages):
            return False
        for _ in range(missing):
            sequence.pages.append(self._take())
        return True

    def close(self, sequence: Sequence) -> None:
        """Give back what a sequence holds."""
        self._free_slots.append(sequence.slot)
        for page in sequence.pages:
            self._let_go(page)
        sequence.pages = []

    def _take(self) -> int:
        page = self._free_pages.pop()
        self._holders[page] = 1
        return page

    def _let_go(self, page: int) -> None:
        self._holders[page] -= 1
        if not self._holders[page]:
            del self._holders[page]
            self._free_pages.append(page)

    # --- copies --------------------------------------------------------------------------------------------------

    def fork(self, sequence: Sequence) -> Sequence | None:
        """A second sequence that stands where this one does; None where a slot, or a page for the tokens behind the
        last whole one, is missing."""
        whole, rest = divmod(sequence.length, self.page) if self.latents else (0, 0)
        if not self._free_slots or (rest and not self._free_pages):
            return None
        forked = Sequence(self._free_slots.pop(), sequence.pages[:whole], sequence.length)
        for page in forked.pages:
            self._holders[page] += 1
        for state in self.states.values():
            for buffer in state:
                buffer[forked.slot] = buffer[sequence.slot]
        if rest:
            forked.pages.append(self._take())
            start, target = (pages[whole] * self.page for pages in (sequence.pages, forked.pages))
            for buffer in self.latents.values():
                buffer[target : target + rest] = buffer[start : start + rest]
        return forked

    def places(self, sequence: Sequence, start: int, end: int) -> torch.Tensor:
        """`rows`, on the device."""
        return sent(self.rows(sequence, start, end), self.device)

    def rows(self, sequence: Sequence, start: int, end: int) -> torch.Tensor:
        """Rows of the latents' buffers that the tokens from `start` to `end` have, [end - start] int64."""
        tokens = torch.arange(start, end)
        pages = torch.tensor(sequence.pages, dtype=torch.int64)
        return pages[tokens // self.page] * self.page + tokens % self.page

    def layer(self, sequence: Sequence, layer: int, length: int) -> dict[str, torch.Tensor]:
        """A copy in host memory of what one layer keeps of the first `length` tokens, by the names of cache layers."""
        if layer in self.states:
            rows = [buffer[sequence.slot][None].to("cpu", copy=True) for buffer in self.states[layer]]
            return dict(zip(KDA_TENSORS, rows, strict=True))
        return {"latents": self.latents[layer][self.places(sequence, 0, length)].cpu()}

    def save(self, sequence: Sequence) -> Saved:
        """A copy in host memory."""
        saved = Saved(sequence.length, {}, {})
        for layer in (*self.states, *self.latents):
            saved.put(layer, self.layer(sequence, layer, sequence.length))
        return saved

    def load(self, saved: Saved) -> Sequence | None:
        """What was saved, in a sequence of its own; None where there is no room."""
        if not self._free_slots or self.pages_of(saved.length) > len(self._free_pages):
            return None
        sequence = Sequence(self._free_slots.pop())
        self.grow(sequence, saved.length)
        self.restore(saved, sequence)
        return sequence

    def restore(self, saved: Saved, sequence: Sequence) -> None:
        """Let a sequence without tokens, whose pages have room, go on from what was saved."""
        for i, state in saved.states.items():
            for buffer, tensor in zip(self.states[i], state, strict=True):
                buffer[sequence.slot] = tensor[0].to(buffer)
        for i, rows in saved.latents.items():
            self.latents[i][self.places(sequence, 0, len(rows))] = rows.to(self.latents[i])
        sequence.length = saved.length

    def read(self, sequence: Sequence) -> HybridCache:
        """A cache of one row that stands where the sequence does, in tensors of its own."""
        cache = HybridCache(self.config)
        if not sequence.length:
            return cache
        places = self.places(sequence, 0, sequence.length) if self.latents else None
        for i, layer in enumerate(cache.layers):
            if i in self.states:
                layer.load([buffer[sequence.slot][None].clone() for buffer in self.states[i]], sequence.length)
            else:
                layer.load([self.latents[i][places][None]], sequence.length)
        return cache

    def write(self, cache: HybridCache, sequence: Sequence) -> bool:
        """Let a sequence without tokens go on from a cache of one row; False where pages are missing."""
        length = int(cache.get_seq_length())
        if not self.grow(sequence, length):
            return False
        states = {i: cache.layers[i].tensors() for i in self.states}
        self.restore(Saved(length, states, {i: cache.layers[i].filled()[0] for i in self.latents}), sequence)
        return True


def _example(model: torch.nn.Module) -> HybridCache:
    """The cache that a forward of one token leaves."""
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        named = ", ".join(sorted(map(str, devices)))
        raise ValueError(
            f"the model lies on several devices ({named}), and a pool of states lies on one: load it there"
        )
    cache = HybridCache(model.config)
    with torch.no_grad():
        model(torch.zeros(1, 1, dtype=torch.int64, device=model.device), use_cache=True, **{CACHE_ARGUMENT: cache})
    return cache
