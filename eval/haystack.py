"""Filler that the facts are hidden in: random sentences, one repeated line, or a user's own text files."""

import hashlib
import random
import re
from pathlib import Path

from .sizing import EvalError, Tokens
from .words import ADJECTIVES, NOUNS, VERBS

# The repeated line of RULER's simplest haystack (Hsieh et al. 2024), from the passkey test of Mohtashami & Jaggi 2023.
REPEATED = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
_LONGEST = 400  # characters of a unit: a longer stretch without a full stop is cut at a blank
_SENTENCE = re.compile(r"\S.*?(?:[.!?][\"')\]]*\s+|\Z)", re.DOTALL)


class Haystack:
    """Where units of filler come from.

    Attributes:
        name: "repeat", "noise", or "text-" with a hash of the files.
        separator: what a unit ends with, which facts that are put in between have to end with as well.
    """

    def __init__(self, name: str, separator: str, sentences: list[str] | None = None):
        self.name, self.separator, self._sentences = name, separator, sentences

    def stream(self, rng: random.Random) -> "Stream":
        return Stream(self, rng)

    def unit(self, rng: random.Random, index: int, first: int) -> str:
        if self.name == "repeat":
            return REPEATED
        if self._sentences is not None:
            return self._sentences[(first + index) % len(self._sentences)]
        subject, object_ = rng.sample(NOUNS, 2)
        kinds = rng.sample(ADJECTIVES, 2)
        return f"The {kinds[0]} {subject} {rng.choice(VERBS)} the {kinds[1]} {object_}. "


class Stream:
    """The units of one text: asked for more, it continues where it was, and the earlier ones stay as they were.

    Text files start at a random sentence and begin again when they are used up.
    """

    def __init__(self, haystack: Haystack, rng: random.Random):
        self._haystack, self._rng, self._units = haystack, rng, []
        sentences = haystack._sentences
        self._first = 0 if sentences is None else rng.randrange(len(sentences))

    def units(self, count: int) -> list[str]:
        while len(self._units) < count:
            self._units.append(self._haystack.unit(self._rng, len(self._units), self._first))
        return self._units[:count]

    def characters(self, count: int) -> str:
        units = 1
        while len(text := "".join(self.units(units))) < count:
            units *= 2
        return text


def open_haystack(names: list[str], tokens: Tokens) -> Haystack:
    """The haystack of `["noise"]`, `["repeat"]`, or the paths of UTF-8 text files.

    Raises:
        EvalError: for a file that cannot be read, holds no text, or spells out a control token.
    """
    if names == ["repeat"]:
        return Haystack("repeat", "\n")
    if names == ["noise"]:
        return Haystack("noise", " ")
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
    return Haystack(f"text-{digest[:12]}", " ", sentences)


def _pieces(sentence: str) -> list[str]:
    pieces = []
    while len(sentence) > _LONGEST:
        cut = sentence.rfind(" ", 1, _LONGEST) + 1 or _LONGEST
        pieces.append(sentence[:cut])
        sentence = sentence[cut:]
    return [*pieces, sentence]
