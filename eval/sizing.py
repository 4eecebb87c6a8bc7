"""Prompts of an exact number of tokens, for any tokenizer.

A prompt is text, and its ids are what the tokenizer makes of the whole text: none is put together from ids, so a server
or another program that gets the text reads the same tokens. The text grows by whole units (sentences, lines) until no
further one fits; the last tokens are filled with the beginning of one more piece of filler.
"""

import bisect
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

_CONTEXT = 256  # characters before the filling that are tokenized with it: it does not change the tokens farther back
_TRIALS = 8
_WINDOW = 32  # characters around the estimated end of the filling that are tried
# Tokens left to the filling: one, since the tail that is longest by itself need not be the longest behind the body, and
# more where a tokenizer cannot add as few as that.
_SPARE = (1, 8, 24, 64)
_GAP = 96  # most tokens that the filling may have to make up for
_ENDINGS = (".", " a", " I", "...", " .", "!", " -", "?!")  # where no cut of the filler alone fits exactly


class EvalError(ValueError):
    """An evaluation that cannot be done as asked; its text is a sentence for the user."""


class TooShort(EvalError):
    """A prompt that needs more tokens than were asked for: `needed`."""

    def __init__(self, needed: int):
        self.needed = needed
        super().__init__(f"needs at least {needed} tokens")


class Tokens:
    """A tokenizer as prompts need it: text to ids, with the tokens that it puts in front and none behind.

    Args:
        tokenizer: of transformers, slow or fast.

    Raises:
        EvalError: for one without an EOS token, which could not end an answer.
    """

    def __init__(self, tokenizer):
        if tokenizer.eos_token_id is None:
            raise EvalError("the tokenizer has no EOS token to end an answer: set eos_token in tokenizer_config.json")
        self.tokenizer, self.eos = tokenizer, tokenizer.eos_token_id
        plain, framed = self._plain("a"), tokenizer("a").input_ids
        if not plain:
            raise EvalError('the tokenizer makes no token of "a": its vocabulary is empty')
        at = next((i for i in range(len(framed)) if framed[i : i + len(plain)] == plain), 0)
        self.start = list(framed[:at])

    def _plain(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids

    def ids(self, text: str) -> list[int]:
        return self.start + self._plain(text)

    def count(self, text: str) -> int:
        return len(self.ids(text))

    def text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def control_words(self, text: str) -> list[str]:
        """The special tokens that are written out in `text`, where they would act instead of being read."""
        return [word for word in self.tokenizer.all_special_tokens if word and word in text]


@dataclass(frozen=True)
class Question:
    """What follows the text, up to where the answer starts.

    Attributes:
        tail: the end of the prompt.
        answers: what an answer has to name.
        depth: where in the text the answer is told, 0 first and 1 last; None if it is spread over the text.
    """

    tail: str
    answers: tuple[str, ...]
    depth: float | None = None


@dataclass(frozen=True)
class Draft:
    """A text of no fixed size and the questions about it.

    Attributes:
        head: the beginning, the same at any size.
        build: number of units, at least `fewest` -> (body, questions); the number of questions does not depend on it.
        filling: number of characters -> text of at least that length, to follow the body.
        once: what must stand in the body exactly once: the facts that are asked for.
    """

    head: str
    build: Callable[[int], tuple[str, list[Question]]]
    fewest: int
    filling: Callable[[int], str]
    once: tuple[str, ...] = ()


@dataclass(frozen=True)
class Prompt:
    """One question with its text, `ids` being what the tokenizer makes of `text`."""

    text: str
    ids: list[int]
    question: Question


def fit(draft: Draft, length: int, tokens: Tokens) -> list[Prompt]:
    """The prompts of a draft, one a question, each of exactly `length` tokens.

    Raises:
        TooShort: if the draft's shortest form has more.
        EvalError: if no text has exactly that number of tokens with this tokenizer.
    """
    for spare in _SPARE:
        body = _grow(draft, length, spare, tokens)
        front = draft.head + body.text
        beyond = body.count - tokens.count(front[-_CONTEXT:] + body.tail)  # tokens before the last _CONTEXT characters
        prompts = [_fill(draft, front, beyond, question, length, tokens) for question in body.questions]
        if None not in prompts:
            return prompts
    raise EvalError(f"the tokenizer makes no text of exactly {length} tokens here: choose another length or haystack")


def fewest_tokens(draft: Draft, tokens: Tokens) -> int:
    """The smallest length of a draft's prompts."""
    return _measure(draft, draft.fewest, tokens).count + _SPARE[0]


class _Body(NamedTuple):
    """A draft built of `units` units; `count` is its tokens with the longest tail."""

    units: int
    text: str
    questions: list[Question]
    tail: str
    count: int


def _measure(draft, units, tokens):
    text, questions = draft.build(units)
    tail = max((question.tail for question in questions), key=tokens.count)
    return _Body(units, text, questions, tail, tokens.count(draft.head + text + tail))


def _grow(draft, length, spare, tokens):
    """The body that leaves `spare` tokens or more, up to `_GAP` or one unit of them."""
    room = length - spare
    low, high = _measure(draft, draft.fewest, tokens), None
    if low.count > room:
        raise TooShort(low.count + spare)
    while room - low.count > _GAP and (high is None or high.units > low.units + 1):
        if high is None:
            more = int((room - low.count) / (low.count / low.units))
        else:
            share = (room - low.count) / (high.count - low.count)
            more = min(int((high.units - low.units) * share), high.units - low.units - 1)
        body = _measure(draft, low.units + max(more, 1), tokens)
        if body.count <= room:
            low = body
        else:
            high = body
    return low


def _fill(draft, front, beyond, question, length, tokens):
    """The prompt of a question: filling between `front` and its tail up to the exact length; None if none fits.

    Only the end is tokenized for each trial; the whole text has the last word.
    """
    behind, tail = front[-_CONTEXT:], question.tail
    without = tokens.count(behind + tail)
    missing = length - beyond - without
    source = draft.filling(16 * max(missing, 0) + 2 * _CONTEXT)
    for _ in range(_TRIALS):
        if missing < 0:
            break
        filling = _filling_of(source, missing, lambda part: tokens.count(behind + part + tail) - without)
        if filling is None:
            break
        text = front + filling + tail
        ids = tokens.ids(text)
        if len(ids) == length:
            return Prompt(text, ids, question)
        missing += length - len(ids)
    return None


def _filling_of(source, count, added):
    """A beginning of `source`, perhaps with a short ending, that adds `count` tokens; whole words if that is possible.

    `added` is almost monotonic in the number of characters: bisection finds the place, around which cuts are tried.
    """
    place = bisect.bisect_left(range(len(source)), count, key=lambda end: added(source[:end]))
    nearby = range(max(place - _WINDOW, 0), min(place + _WINDOW, len(source)) + 1)
    cuts = sorted(nearby, key=lambda end: abs(end - place))
    whole = [end for end in cuts if source[end : end + 1] in ("", " ", "\n") and not source[:end][-1:].isspace()]
    if place == 0:
        whole = [0, *whole]
    trials = itertools.chain(((end, "") for end in (*whole, *cuts)), itertools.product(cuts, _ENDINGS))
    fillings = (source[:end] + ending for end, ending in trials)
    return next((filling for filling in fillings if added(filling) == count), None)
