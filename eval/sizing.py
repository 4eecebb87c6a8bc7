"""Prompts of an exact number of tokens, for any tokenizer.

A prompt is text, and its ids are what the tokenizer makes of the whole text: none is put together from ids, so a server
or another program that gets the text reads the same tokens. The text grows by whole units (sentences, lines) until no
further one fits; the last tokens are filled with the beginning of one more piece of filler.
"""

from collections.abc import Callable
from dataclasses import dataclass

_CONTEXT = 256  # characters before the filling that are tokenized with it: it does not change the tokens farther back
_TRIALS = 8
_WINDOW = 32  # characters around the estimated end of the filling that are tried
# Tokens left to the filling: one, since the tail that is longest by itself need not be the longest behind the body, and
# more where a tokenizer cannot add as few as that.
_SPARE = (1, 8, 24, 64)
_GAP = 96  # most tokens that the filling may have to make up for
_ENDINGS = ("", ".", " a", " I", "...", " .", "!", " -", "?!")  # where no cut of the filler alone fits exactly


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
        body, questions, measured, count = _grow(draft, length, spare, tokens)
        front = draft.head + body
        behind = front[-_CONTEXT:]
        beyond = count - tokens.count(behind + measured)  # tokens before the last _CONTEXT characters
        prompts = [_fill(draft, front, beyond, question, length, tokens) for question in questions]
        if None not in prompts:
            return prompts
    raise EvalError(f"the tokenizer makes no text of exactly {length} tokens here: choose another length or haystack")


def fewest_tokens(draft: Draft, tokens: Tokens) -> int:
    """The smallest length of a draft's prompts."""
    return _measure(draft, draft.fewest, tokens)[0] + _SPARE[0]


def _measure(draft, units, tokens):
    """(tokens with the longest tail, what `_grow` returns) of a body of `units` units."""
    body, questions = draft.build(units)
    longest = max((question.tail for question in questions), key=tokens.count)
    count = tokens.count(draft.head + body + longest)
    return count, (body, questions, longest, count)


def _grow(draft, length, spare, tokens):
    """(body, questions, longest tail, tokens with it): `spare` tokens or more are left, up to `_GAP` or one unit."""

    room = length - spare
    low, (low_count, best) = draft.fewest, _measure(draft, draft.fewest, tokens)
    if low_count > room:
        raise TooShort(low_count + spare)
    high, high_count = None, None
    while room - low_count > _GAP and (high is None or high > low + 1):
        if high is None:
            per_unit = max(low_count / max(low, 1), 1e-3)
            guess = low + max(int((room - low_count) / per_unit), 1)
        else:
            share = (room - low_count) / max(high_count - low_count, 1)
            guess = low + min(max(int((high - low) * share), 1), high - low - 1)
        count, made = _measure(draft, guess, tokens)
        if count <= room:
            low, low_count, best = guess, count, made
        else:
            high, high_count = guess, count
    return best


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
    low, high = 0, len(source)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if added(source[:middle]) >= count else (middle + 1, high)
    around = sorted(range(max(low - _WINDOW, 0), min(low + _WINDOW, len(source)) + 1), key=lambda end: abs(end - low))
    whole = [
        end for end in around if source[end : end + 1] in ("", " ", "\n") and source[:end] == source[:end].rstrip()
    ]
    whole = [0, *whole] if low == 0 else whole
    for ends, endings in ((whole, ("",)), (around, ("",)), (around, _ENDINGS[1:])):
        for end in ends:
            for ending in endings:
                if added(source[:end] + ending) == count:
                    return source[:end] + ending
    return None
