"""Texts of one structure: a JSON schema, a regular expression or a grammar becomes the `mask` of a `Sampling`.

    structures = Structures(tokenizer, model.config.vocab_size, ends=[tokenizer.eos_token_id])
    Sampling(mask=structures.json_schema({"type": "object"}))

xgrammar follows the texts (pip install 'kimi-k3[structured]').
"""

import json
import re
from collections.abc import Collection, Sequence

import torch


def _xgrammar():
    try:
        import xgrammar
    except ModuleNotFoundError as error:
        if error.name != "xgrammar":
            raise
        raise ImportError("structured output needs xgrammar: pip install 'kimi-k3[structured]'") from error
    return xgrammar


class Structures:
    """Makes masks for one tokenizer. Ordinary tokens are taken as their bytes; special ones, and ids that the tokenizer
    does not have, never come.

    Args:
        tokenizer: of transformers.
        vocabulary: tokens of the model.
        ends: ids of the tokens that end a text; they come where the structure is complete, and nowhere else.
        cache_bytes: of structures that were compiled, which are kept for the next request that asks for the same.

    Raises:
        ImportError: if xgrammar is not installed.
    """

    def __init__(self, tokenizer, vocabulary: int, ends: Collection[int], cache_bytes: int = 1 << 28):
        xgrammar = _xgrammar()
        ends = sorted({end for end in ends if end < vocabulary})
        if not ends:
            raise ValueError("a structured text needs a token that ends it: the model's configuration names none")
        found = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocabulary, stop_token_ids=ends)
        texts = list(found.decoded_vocab)
        added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        for i in added | set(tokenizer.all_special_ids):
            if i < vocabulary:
                texts[i] = b""  # its name is no text: a string could hold it otherwise
        self._compile(
            xgrammar.TokenizerInfo(
                texts, vocab_size=vocabulary, stop_token_ids=ends, add_prefix_space=found.add_prefix_space
            ),
            cache_bytes,
        )

    def _compile(self, info, cache_bytes: int) -> None:
        self.info, self._cache_bytes = info, cache_bytes
        self._compiler = _xgrammar().GrammarCompiler(info, cache_limit_bytes=cache_bytes)

    def __getstate__(self):
        return self.info.serialize_json(), self._cache_bytes

    def __setstate__(self, state):
        info, cache_bytes = state
        self._compile(_xgrammar().TokenizerInfo.deserialize_json(info), cache_bytes)

    def json_schema(self, schema: dict | str) -> "StructureMask":
        """JSON that fits a schema; an object has the properties that the schema names, in its order.

        Raises:
            ValueError: for one that cannot be followed, with the reason; so do the others.
        """
        return StructureMask(self, "json_schema", schema if isinstance(schema, str) else json.dumps(schema))

    def regex(self, pattern: str) -> "StructureMask":
        """Texts that a regular expression matches from their first character to the last."""
        return StructureMask(self, "regex", pattern)

    def grammar(self, rules: str) -> "StructureMask":
        """Texts of a grammar in the form of llama.cpp's GBNF, whose first rule is `root`."""
        return StructureMask(self, "grammar", rules)

    def matcher(self, kind: str, source: str):
        """xgrammar's, at the beginning of a text."""
        try:
            compiled = getattr(self._compiler, f"compile_{kind}")(source)
        except RuntimeError as error:
            reason = re.sub(r"^\[[\d:]+\] \S+: ", "", str(error)).split("\n")[0]  # when and where in xgrammar's source
            raise ValueError(f"this {kind.replace('_', ' ')} cannot be followed: {reason}") from error
        return _xgrammar().GrammarMatcher(compiled)


class StructureMask:
    """Which tokens may come next. It follows one text, and goes back where it is asked about another: right for any
    number of requests, fast for one. It can be pickled."""

    def __init__(self, structures: Structures, kind: str, source: str):
        self._structures, self._kind, self._source = structures, kind, source
        self._matcher, self._followed = structures.matcher(kind, source), []

    def __call__(self, new: Sequence[int]) -> torch.Tensor:
        """int32 [vocabulary / 32, rounded up] on the host, for the token behind `new`.

        Raises:
            ValueError: if `new` is no beginning of such a text.
        """
        if self._followed != new[: len(self._followed)]:
            pairs = enumerate(zip(self._followed, new, strict=False))
            common = next((i for i, (old, token) in pairs if old != token), min(len(self._followed), len(new)))
            self._matcher.rollback(len(self._followed) - common)
            del self._followed[common:]
        for token in new[len(self._followed) :]:
            if not self._matcher.accept_token(token):
                place = len(self._followed)
                raise ValueError(f"token {token}, number {place} of the text, does not follow its structure")
            self._followed.append(token)
        if self._matcher.is_terminated():
            raise ValueError("the structured text has ended: no token follows its end token")
        mask = _xgrammar().allocate_token_bitmask(1, self._structures.info.vocab_size)
        self._matcher.fill_next_token_bitmask(mask)
        return mask[0]

    def __getstate__(self):
        return self._structures, self._kind, self._source

    def __setstate__(self, state):
        self.__init__(*state)
