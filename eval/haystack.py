"""Filler that the facts are hidden in: random sentences, one repeated line, or a user's own text files."""

import hashlib
import itertools
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .sizing import EvalError, Tokens
from .words import ADJECTIVES, NOUNS, VERBS

# The repeated line of RULER's simplest haystack (Hsieh et al. 2024), from the passkey test of Mohtashami & Jaggi 2023.
REPEATED = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
_LONGEST = 400  # characters of a unit: a longer stretch without a full stop is cut at a blank
_SENTENCE = re.compile(r"\S.*?(?:[.!?][\"')\]]*\s+|\Z)", re.DOTALL)


@dataclass(frozen=True)
class Haystack:
    """Where units of filler come from.

    Attributes:
        name: "repeat", "noise", or "text-" with a hash of the files.
        separator: what a unit ends with, which facts that are put in between have to end with as well.
        start: rng -> the units of one text, without end.
    """

    name: str
    separator: str
    start: Callable[[random.Random], Iterator[str]]

    def units(self, rng: random.Random) -> Callable[[int], list[str]]:
        """Number -> the first units of one text, that number of them."""
        return growing(self.start(rng))

    def characters(self, rng: random.Random) -> Callable[[int], str]:
        """Number of characters -> whole units of one text with at least that number."""
        units = self.units(rng)

        def characters(count):
            number = 1
            while len(text := "".join(units(number))) < count:
                number *= 2
            return text

        return characters


def growing(items: Iterator) -> Callable[[int], list]:
    """Number -> the first items, that number: asked for more, it continues, and the earlier ones stay as they were."""
    known = []

    def first(count):
        known.extend(itertools.islice(items, max(count - len(known), 0)))
        return known[:count]

    return first


def _noise(rng):
    while True:
        subject, object_ = rng.sample(NOUNS, 2)
        kinds = rng.sample(ADJECTIVES, 2)
        yield f"The {kinds[0]} {subject} {rng.choice(VERBS)} the {kinds[1]} {object_}. "


def open_haystack(names: list[str], tokens: Tokens) -> Haystack:
    """The haystack of `["noise"]`, `["repeat"]`, or the paths of UTF-8 text files.

    A text made of files starts at a random sentence of theirs and begins again when they are used up.

    Raises:
        EvalError: for a file that cannot be read, holds no text, or spells out a control token.
    """
    if names == ["repeat"]:
        return Haystack("repeat", "\n", lambda rng: itertools.repeat(REPEATED))
    if names == ["noise"]:
        return Haystack("noise", " ", _noise)
    texts = []
    for name in names:
        path = Path(name)
        try:
            text = path.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise EvalError(
                f"the haystack {name} cannot be read ({error.strerror}): it is noise, repeat or a text file"
            ) from error
        except UnicodeDecodeError as error:
            raise EvalError(f"the haystack {name} is not UTF-8 text") from error
        if not text:
            raise EvalError(f"the haystack {name} is empty")
        if control := tokens.control_words(text):
            raise EvalError(f"the haystack {name} spells out the control token {control[0]}: take it out of the text")
        texts.append(text + " ")
    sentences = [part for match in _SENTENCE.finditer("".join(texts)) for part in _pieces(match.group())]
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()

    def start(rng):
        return itertools.islice(itertools.cycle(sentences), rng.randrange(len(sentences)), None)

    return Haystack(f"text-{digest[:12]}", " ", start)


def _pieces(sentence: str) -> list[str]:
    pieces = []
    while len(sentence) > _LONGEST:
        cut = sentence.rfind(" ", 1, _LONGEST) + 1 or _LONGEST
        pieces.append(sentence[:cut])
        sentence = sentence[cut:]
    return [*pieces, sentence]
