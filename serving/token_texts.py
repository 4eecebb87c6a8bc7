"""The texts of single tokens, and where in the whole text each of them begins."""

from dataclasses import dataclass

from .sampling import Choice

PART = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer reads where a character is not whole
MOST_PENDING = 16  # tokens that are read together until a character is whole


@dataclass(frozen=True)
class TokenText:
    """A token whose log-probability was asked for.

    Attributes:
        choice: the token, None of its probabilities where nothing came before it.
        text: of the token alone, special ones spelt out.
        offset: characters of the whole text before it. Tokens of one character share the place where it begins.
    """

    choice: Choice
    text: str
    offset: int


class TokenTexts:
    """Reads tokens one by one.

    Args:
        start: characters of the whole text before the first one.
        with_special: special tokens are in the whole text too.
    """

    def __init__(self, tokenizer, start: int = 0, with_special: bool = False):
        self.tokenizer, self.with_special = tokenizer, with_special
        self._start = self._offset = start  # of the pending tokens, of the next one
        self._pending: list[int] = []

    def add(self, choice: Choice) -> TokenText:
        found = TokenText(choice, self.tokenizer.decode([choice.token]), self._offset)
        self._pending.append(choice.token)
        whole = self.tokenizer.decode(self._pending, skip_special_tokens=not self.with_special)
        is_part = whole.endswith(PART)
        self._offset = self._start + len(whole) - is_part
        if not is_part or len(self._pending) == MOST_PENDING:
            self._start, self._pending = self._offset, []
        return found
