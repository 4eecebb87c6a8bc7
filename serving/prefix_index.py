"""Which prefixes are kept: a tree of segments, found by chained hashes of token blocks.

A segment is what one forward added (or a run of one-token forwards, `steps`): its tokens, the latents of all MLA layers
for them, and the recurrent states of all KDA layers behind them. Rounding depends on how a text was split into
forwards, so a segment's key is a hash over its tokens *and* over how everything before it was split: what is restored
has exactly one history, which `splits` names and a cold run can repeat to the last bit. Several segments
can come from one forward, with states exported inside it; all that this forward read then counts in their keys, because
later tokens decide how earlier ones are rounded (sizes of products, experts' batches).
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy


def token_bytes(tokens: Sequence[int]) -> bytes:
    return numpy.asarray(tokens, dtype="<i8").tobytes()


def chained(previous: bytes, *parts: bytes) -> bytes:
    """sha256 over a hash and what follows it; the length of every part is hashed too, so that they stay apart."""
    digest = hashlib.sha256(previous)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


@dataclass(eq=False)
class Segment:
    """Tokens [start, end) of a text, computed behind `parent`.

    Attributes:
        key: names it, in memory and on disk.
        tokens: its own ones.
        steps: computed one token at a time (decoding) instead of in one forward.
        forward: hash of what its forward read, if that made several segments; else empty.
        block_hash, remainder: chained hash of the full token blocks up to `end`, and the tokens after the last of them.
        covered: the chained hashes of the full blocks that end inside this segment.
        pins: number of users of it or of a segment behind it; it stays while there are any.
    """

    key: str
    parent: "Segment | None"
    start: int
    tokens: tuple[int, ...]
    steps: bool
    block_hash: bytes
    remainder: tuple[int, ...]
    covered: tuple[bytes, ...]
    forward: bytes = b""
    children: set["Segment"] = field(default_factory=set)
    pins: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    def pin(self, count: int = 1) -> None:
        """Keep this segment and those before it until `unpin`."""
        segment = self
        while segment is not None:
            segment.pins += count
            segment = segment.parent

    def unpin(self) -> None:
        self.pin(-1)

    def chain(self) -> list["Segment"]:
        """From the first segment of the text to this one."""
        found, segment = [], self
        while segment.parent is not None:
            found.append(segment)
            segment = segment.parent
        return found[::-1]

    def splits(self) -> list[int]:
        """Boundaries of the forwards that computed this prefix and of its segments, the last of them `end`."""
        found: list[int] = []
        for segment in self.chain():
            found += range(segment.start + 1, segment.end + 1) if segment.steps else [segment.end]
        return found


class PrefixIndex:
    """The segments of one model. Not locked: `PrefixCache` holds its lock around every call.

    Attributes:
        namespace: hex digest that names the model, here and on the disk.
        block: tokens of a block.
        root: the empty text, which every other goes on from; its hash begins all chains, so that no key of one model is
            one of another's.
    """

    def __init__(self, namespace: str, block: int):
        self.namespace, self.block = namespace, block
        empty = chained(bytes.fromhex(namespace))
        self.root = Segment(empty.hex(), None, 0, (), False, empty, (), ())
        self.segments: dict[str, Segment] = {}
        self._ending: dict[bytes, list[Segment]] = {}
        self._covering: dict[bytes, int] = {}

    def has(self, segment: Segment) -> bool:
        """Whether a text can continue behind it: it is the root, or was not forgotten."""
        return segment is self.root or self.segments.get(segment.key) is segment

    def make(self, parent: Segment, tokens: Sequence[int], steps: bool, forward: bytes = b"") -> Segment:
        """The segment of these tokens behind `parent`: the existing one, or a new one that is not added yet."""
        tokens = numpy.asarray(tokens, dtype="<i8")
        how = b"steps" if steps else b"forward" + forward
        key = chained(bytes.fromhex(parent.key), how, tokens.tobytes()).hex()
        if key in self.segments:
            return self.segments[key]
        rest = numpy.concatenate([numpy.asarray(parent.remainder, dtype="<i8"), tokens])
        block_hash, covered = parent.block_hash, []
        while len(rest) >= self.block:
            block_hash = chained(block_hash, rest[: self.block].tobytes())
            covered.append(block_hash)
            rest = rest[self.block :]
        return Segment(
            key, parent, parent.end, tuple(tokens.tolist()), steps, block_hash, tuple(rest.tolist()), tuple(covered),
            forward,
        )  # fmt: skip

    def add(self, segment: Segment) -> None:
        if self.has(segment):
            return
        self.segments[segment.key] = segment
        segment.parent.children.add(segment)
        self._ending.setdefault(segment.block_hash, []).append(segment)
        for block_hash in segment.covered:
            self._covering[block_hash] = self._covering.get(block_hash, 0) + 1

    def remove(self, segment: Segment) -> None:
        """Forget a segment that has no children."""
        if segment.children:
            raise ValueError(f"segment {segment.key} still has {len(segment.children)} children")
        if not self.has(segment):
            return
        del self.segments[segment.key]
        segment.parent.children.discard(segment)
        ending = self._ending[segment.block_hash]
        ending.remove(segment)
        if not ending:
            del self._ending[segment.block_hash]
        for block_hash in segment.covered:
            self._covering[block_hash] -= 1
            if not self._covering[block_hash]:
                del self._covering[block_hash]

    def matches(self, tokens: Sequence[int], limit: int) -> tuple[list[Segment], int]:
        """Segments whose text is a prefix of `tokens` of at most `limit` tokens, the longest first; and how many tokens
        some kept text shares with this one, in whole blocks."""
        tokens = numpy.asarray(tokens, dtype="<i8")
        block_hash, hashes = self.root.block_hash, [self.root.block_hash]
        shared = 0
        for at in range(0, len(tokens) - self.block + 1, self.block):
            block_hash = chained(block_hash, tokens[at : at + self.block].tobytes())
            if block_hash not in self._covering:
                break  # a segment that ends farther on covers every block before
            hashes.append(block_hash)
            shared = at + self.block
        found = []
        for blocks, block_hash in reversed(list(enumerate(hashes))):
            here = [
                segment
                for segment in self._ending.get(block_hash, ())
                if 0 < segment.end <= limit
                and segment.remainder == tuple(tokens[blocks * self.block : segment.end].tolist())
            ]
            found += sorted(here, key=lambda segment: -segment.end)
        return found, min(shared, limit)
