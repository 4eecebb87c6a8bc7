"""Which prefixes are kept: a tree of segments, walked along a prompt from the empty text on.

A segment is what one forward added (or a run of one-token forwards, `steps`): its tokens, the latents of all MLA layers
for them, and the recurrent states of all KDA layers behind them. Rounding depends on how a text was split into
forwards, so a segment's key is a hash over its tokens *and* over how everything before it was split: what is restored
has exactly one history, which `splits` names and a cold run can repeat to the last bit. Several segments
can come from one forward, with states exported inside it; all that this forward read then counts in their keys, because
later tokens decide how earlier ones are rounded (sizes of products, experts' batches).

The kind of a segment (`forward`) says which forwards computed it:

    empty              one of the model over its tokens; `steps`: one for each token
    hash, 32 bytes     one that went on behind it
    `TOGETHER`         an engine's, which had other requests beside it
    `alone(chunk)`     an engine's, of one request, that end at the multiples of `chunk`; `steps` as above
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
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


TOGETHER = b"together"
_ALONE = b"alone"


def alone(chunk: int, code: bytes) -> bytes:
    """The kind of an engine's forwards of one request each; `code`: 8 bytes that name the code of these forwards."""
    return _ALONE + chunk.to_bytes(8, "little") + code


def _is_alone(forward: bytes) -> bool:
    return len(forward) == len(_ALONE) + 8 + 8  # as no other kind


def is_exact(forward: bytes) -> bool:
    """Whether a run that is split at the same boundaries gives the bits of this kind."""
    return not forward or _is_alone(forward)


def ends_of(start: int, end: int, steps: bool, forward: bytes) -> Iterable[int]:
    """Where the forwards ended that fed the tokens [start, end) of a segment."""
    if steps:
        return range(start + 1, end + 1)
    if not _is_alone(forward):
        return [end]
    chunk = int.from_bytes(forward[len(_ALONE) :][:8], "little")
    return [*range((start // chunk + 1) * chunk, end, chunk), end]


@dataclass(eq=False)
class Segment:
    """Tokens [start, end) of a text, computed behind `parent`.

    Attributes:
        key: names it, in memory and on disk.
        tokens: its own ones, [n] int64.
        steps: computed one token at a time (decoding) instead of in one forward.
        forward: its kind.
        first: bytes of its tokens up to the end of a block: a text that differs in them shares no block with it.
        children: by key, the eldest first.
        pins: number of users of it or of a segment behind it; it stays while there are any.
    """

    key: str
    parent: "Segment | None"
    start: int
    tokens: numpy.ndarray
    first: bytes
    steps: bool
    forward: bytes = b""
    children: dict[str, "Segment"] = field(default_factory=dict)
    pins: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    def metadata(self) -> dict[str, str]:
        """What its files say beside its tokens."""
        return {
            "parent": self.parent.key,
            "start": str(self.start),
            "steps": str(int(self.steps)),
            "forward": self.forward.hex(),
        }

    def pin(self, count: int = 1) -> None:
        """Keep this segment and those before it until `unpin`."""
        segment = self
        while segment is not None:
            segment.pins += count
            segment = segment.parent

    def unpin(self) -> None:
        self.pin(-1)

    def root(self) -> "Segment":
        """The empty text that it goes on from."""
        segment = self
        while segment.parent is not None:
            segment = segment.parent
        return segment

    def chain(self) -> list["Segment"]:
        """From the first segment of the text to this one."""
        found, segment = [], self
        while segment.parent is not None:
            found.append(segment)
            segment = segment.parent
        return found[::-1]

    def splits(self) -> list[int]:
        """Boundaries of the forwards that computed this prefix and of its segments, the last of them `end`."""
        return [end for part in self.chain() for end in ends_of(part.start, part.end, part.steps, part.forward)]


class PrefixIndex:
    """The segments of one model. Not locked: `PrefixCache` holds its lock around every call.

    Attributes:
        namespace: hex digest that names the model, here and on the disk.
        block: tokens of a block.
        root: the empty text, which every other goes on from; its key is hashed into all others, so that no key of one
            model is one of another's.
        roots: by key, that one and those of the salts in use; texts of one salt are found by none of another.
    """

    def __init__(self, namespace: str, block: int):
        self.namespace, self.block = namespace, block
        self.segments: dict[str, Segment] = {}
        self.roots: dict[str, Segment] = {}
        self.root = self.root_named(chained(bytes.fromhex(namespace)).hex())

    def root_of(self, salt: str) -> Segment:
        """The empty text of a tenant; without a salt the common one."""
        if not salt:
            return self.root
        secret = salt.encode("utf-8", "surrogatepass")
        return self.root_named(chained(bytes.fromhex(self.namespace), secret).hex())

    def root_named(self, key: str) -> Segment:
        """The empty text of this key, as the files of its texts name it."""
        if key not in self.roots:
            self.roots[key] = Segment(key, None, 0, numpy.empty(0, "<i8"), b"", False)
        return self.roots[key]

    def leave(self, root: Segment) -> None:
        """Forget the empty text of a salt from which nothing goes on any more."""
        if root is not self.root and not root.children and not root.pins:
            self.roots.pop(root.key, None)

    def has(self, segment: Segment) -> bool:
        """Whether a text can continue behind it: it is a root, or was not forgotten."""
        known = self.roots if segment.parent is None else self.segments
        return known.get(segment.key) is segment

    def make(self, parent: Segment, tokens: Sequence[int], steps: bool, forward: bytes = b"") -> Segment:
        """The segment of these tokens behind `parent`: the existing one, or a new one that is not added yet."""
        tokens = numpy.array(tokens, dtype="<i8")  # a copy, which keeps no prompt alive
        how = (b"steps" if steps else b"forward") + forward
        key = chained(bytes.fromhex(parent.key), how, tokens.tobytes()).hex()
        first = tokens[: self.block - parent.end % self.block].tobytes()
        return self.segments.get(key) or Segment(key, parent, parent.end, tokens, first, steps, forward)

    def add(self, segment: Segment) -> None:
        if not self.has(segment):
            self.segments[segment.key] = segment.parent.children[segment.key] = segment

    def remove(self, segment: Segment) -> None:
        """Forget a segment that has no children."""
        if segment.children:
            raise ValueError(f"segment {segment.key} still has {len(segment.children)} children")
        if self.has(segment):
            del self.segments[segment.key], segment.parent.children[segment.key]
            if segment.parent.parent is None:
                self.leave(segment.parent)

    def matches(self, tokens: Sequence[int], limit: int, root: Segment) -> tuple[list[Segment], int]:
        """Segments behind `root` whose text is a prefix of `tokens` of at most `limit` tokens, the longest first; and
        how many tokens some kept text shares with this one, in whole blocks."""
        tokens, shared, prefixes = numpy.asarray(tokens, dtype="<i8"), 0, [root]
        text = tokens.tobytes()
        for prefix in prefixes:  # the children that match are appended meanwhile
            for segment in prefix.children.values():
                if not text.startswith(segment.first, 8 * segment.start):
                    continue
                rest = tokens[segment.start : segment.end]
                equal = rest == segment.tokens[: len(rest)]
                end = segment.start + (len(rest) if equal.all() else int(equal.argmin()))
                shared = max(shared, end - end % self.block)
                if end == segment.end <= limit:
                    prefixes.append(segment)
        return sorted(prefixes[1:], key=lambda segment: -segment.end), min(shared, limit)


class AskedPrefixes:
    """Which prefixes, of whole blocks, were asked for: names of 16 bytes, at most `limit` of them. Those that were not
    asked for the longest are forgotten first, and of one text the longest. Not locked either."""

    def __init__(self, block: int, limit: int):
        self.block, self.limit = block, limit
        self._names: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._names)

    def ask(self, tokens: numpy.ndarray, root: Segment) -> int:
        """Tokens of the longest prefix of a text behind `root` that was asked for before; now all of them were."""
        text, names, asked = hashlib.sha256(bytes.fromhex(root.key)), [], 0
        for end in range(self.block, len(tokens) + 1, self.block):
            text.update(token_bytes(tokens[end - self.block : end]))
            names.append(text.digest()[:16])
            if names[-1] in self._names:
                asked = end
        for name in reversed(names):
            self._names[name] = None
            self._names.move_to_end(name)
        while len(self._names) > self.limit:
            self._names.popitem(last=False)
        return asked
