"""Structured output: at every step exactly the tokens that some text of the structure goes on with."""

import json
import pickle
import random
import re
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

import kimi_k3
from kimi_k3.serving.sampling import Sampler, Sampling, choose
from kimi_k3.serving.structured import Structures

pytestmark = pytest.mark.one_release

SMALL = Path(kimi_k3.__file__).parent / "checkpoints" / "small"
BEYOND = 5  # ids of the model that its tokenizer does not have
END = 1
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ab", "cd é"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "count"],
}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(SMALL)


@pytest.fixture(scope="module")
def structures(tokenizer):
    pytest.importorskip("xgrammar")
    return Structures(tokenizer, len(tokenizer) + BEYOND, [END])


def tokens_of(mask):
    return {i for i in range(32 * len(mask)) if int(mask[i // 32]) >> i % 32 & 1}


def text_of(mask, vocabulary, seed):
    """Tokens drawn under a mask from noise, their end included."""
    sampler = Sampler(Sampling(1.0, seed=seed, mask=mask), ends=[END])
    noise = torch.Generator().manual_seed(seed)
    while END not in sampler.new:
        [choice] = choose(torch.randn(1, vocabulary, generator=noise), [sampler])
        sampler.note(choice.token)
    return sampler.new


def test_every_token_that_some_text_goes_on_with_is_allowed_and_no_other(tokenizer, structures):
    """Against all texts of a finite language and the text of every token, along many of them."""
    language = ["yes", "yesterday", "no", "no one", "nono", "<|pad|> it", "<|"]
    words = {i: tokenizer.decode([i]) for i in range(len(tokenizer)) if i not in tokenizer.all_special_ids}
    mask = structures.grammar("root ::= " + " | ".join(f'"{text}"' for text in language))
    draw, seen = random.Random(0), set()
    for _ in range(40):
        new, text = [], ""
        while END not in new:
            wanted = {i for i, word in words.items() if any(whole.startswith(text + word) for whole in language)}
            wanted |= {END} if text in language else set()
            assert tokens_of(mask(new)) == wanted
            new.append(END if END in wanted and draw.random() < 0.4 else draw.choice(sorted(wanted)))
            text += words.get(new[-1], "")
        seen.add(text)
    assert seen == set(language)


def test_texts_are_of_their_structure(tokenizer, structures):
    vocabulary = len(tokenizer) + BEYOND
    for seed in range(4):
        found = json.loads(tokenizer.decode(text_of(structures.json_schema(SCHEMA), vocabulary, seed)[:-1]))
        assert [*found] == ["name", "count"] and found["name"] in ("ab", "cd é") and found["count"] in range(100)
        pattern = r"(a|bé)+[0-9]{3}"
        assert re.fullmatch(pattern, tokenizer.decode(text_of(structures.regex(pattern), vocabulary, seed)[:-1]))


def test_a_mask_depends_on_the_text_alone(tokenizer, structures):
    """One that followed other texts, or was pickled behind some, is that of a fresh one."""
    texts = [text_of(structures.json_schema(SCHEMA), len(tokenizer) + BEYOND, seed) for seed in range(3)]
    used, draw = structures.json_schema(json.dumps(SCHEMA)), random.Random(1)
    for number in range(30):
        new = draw.choice(texts)
        new = new[: draw.randrange(len(new))]
        assert torch.equal(used(new), structures.json_schema(SCHEMA)(new))
        if number % 10 == 5:
            used = pickle.loads(pickle.dumps(used))


def test_what_cannot_be_followed_is_refused(tokenizer, structures):
    for make, source, reason in (
        (structures.json_schema, "{", "this json schema cannot be followed: .*Failed to parse JSON"),
        (structures.json_schema, {"type": "objec"}, 'this json schema cannot be followed: Unsupported type "objec"$'),
        (structures.regex, "(a", "this regex cannot be followed: Regex parsing error at position 3: "),
        (structures.grammar, "a ::= b", "this grammar cannot be followed: EBNF parser error at line 1"),
    ):
        with pytest.raises(ValueError, match=f"^{reason}"):
            make(source)
    mask = structures.regex("ab")
    [a], [b] = tokenizer.encode("a"), tokenizer.encode("b")
    with pytest.raises(ValueError, match=f"token {a}, number 1 of the text, does not follow its structure"):
        mask([a, a])
    with pytest.raises(ValueError, match="the structured text has ended"):
        mask([a, b, END])
    assert tokens_of(mask([a])) == {b}
    with pytest.raises(ValueError, match="needs a token that ends it"):
        Structures(tokenizer, len(tokenizer), [])


def test_without_xgrammar_one_sentence_says_so(tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(ImportError, match=r"^structured output needs xgrammar: pip install 'kimi-k3\[structured\]'$"):
        Structures(tokenizer, len(tokenizer), [END])
