"""Recall episodes: made-up facts, in lists or hidden in real text, and questions about them.

    maple: river          the key of a list of pairs                       facts of `bare`
    seven: cloud          is told once and asked for at some later place
    maple: river

    ... real text. The secret number of Alice is 48213. More real text ...
    Question: What is the secret number of Alice?
    Answer: 48213.<|eos|>                                                  facts of `people`

Only answers have a weight in the loss: keys and values are drawn at random, so there is nothing to learn from them. A
part of the episodes (`needles`, `associative`, `tracking`, `sequence`, `stacks`) is phrased as in the recall suite of
`kimi_k3.eval`, with other words: no name, word or invented key of the suite occurs in an episode (see `Vocabulary`).
Numbers are drawn from the same ranges, at random in both.
"""

import bisect
import itertools
import random
import re
from collections import Counter
from dataclasses import dataclass

from kimi_k3.eval.words import (
    ADJECTIVES,
    ASSOCIATIVE_HEAD,
    HELD_OUT_NAMES,
    NEEDLE,
    NOUNS,
    QUESTION,
    STATEMENTS,
    VERBS,
)

ANSWER_WEIGHT = 4.0
END = "<|eos|>"  # behind an answer
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

NAMES = """
Abigail Adam Agnes Albert Alexander Alfred Alice Amelia Amos Andrew Anna Anthony Arthur Audrey Barbara Basil
Beatrice Benjamin Bernard Bridget Caroline Catherine Cecil Charles Charlotte Christine Clara Clement Conrad
Cornelia Daniel David Deborah Diana Dorothy Edgar Edith Edmund Edward Eleanor Eliza Ellen Emily Ernest Esther
Eugene Eva Felix Florence Francis Frederick Gabriel George Gerald Gilbert Gloria Grace Gregory Gustav Hannah
Harold Harriet Harvey Helen Henry Herbert Hilda Horace Hubert Hugo Ida Irene Isaac Isabel Ivan Jacob James
Jane Jasper Jerome Joan Joel John Jonas Joseph Josephine Judith Julia Julian Karl Katherine Laura Lawrence
Leonard Leo Lewis Lillian Louisa Lucas Lucy Luke Lydia Magnus Margaret Maria Marion Mark Martha Martin Mary
Matthew Maurice Maximilian Michael Mildred Miriam Nathaniel Nicholas Nina Nora Norman Oliver Olivia Oscar Otto
Patrick Paul Penelope Peter Philip Phoebe Rachel Ralph Raymond Rebecca Richard Robert Roger Rosalind Rose
Rupert Ruth Samuel Sarah Sebastian Silas Simon Sophia Stella Stephen Susan Sylvia Theodore Theresa Thomas
Timothy Ursula Valentine Victor Victoria Vincent Viola Virginia Walter Wilfred William Winifred Zachary
""".split()
SURNAMES = """
Abbott Archer Baker Barlow Bennett Bishop Brewer Carter Chandler Clarke Cooper Dalton Drake Ellis Fletcher
Foster Gardner Graham Grant Hale Harper Hayes Hughes Hunter Kent Lambert Marsh Mason Mercer Miller Morgan
Norris Parker Porter Quinn Reed Rowe Sawyer Shaw Spencer Stone Sutton Taylor Thorne Tucker Turner Vaughan Wade
Walsh Warren Webb Wells Wood Wright
""".split()
CITIES = """
Amsterdam Athens Baltimore Barcelona Belfast Berlin Boston Bristol Brussels Budapest Cairo Chicago Cologne
Copenhagen Dresden Dublin Edinburgh Florence Geneva Glasgow Hamburg Hanover Havana Helsinki Istanbul Jerusalem
Lisbon Liverpool London Lyons Madrid Manchester Marseilles Milan Montreal Moscow Munich Naples Oslo Oxford
Palermo Paris Philadelphia Prague Quebec Rome Rotterdam Salem Seville Stockholm Tokyo Toronto Venice Verona
Vienna Warsaw Zurich
""".split()

# attribute: (share, kind of its value); `STATEMENTS` has the ways to tell a fact of it
ATTRIBUTES = {"secret number": (0.6, "five_digits"), "secret word": (0.2, "word"), "home city": (0.2, "city")}

SEPARATORS = (": ", ": ", " = ", " -> ", " is ", " has ", " means ", ", ")
LINE_ENDS = ("\n", "\n", "; ", ", ", ". ")
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"


@dataclass(frozen=True)
class Vocabulary:
    """What keys and values are made of.

    Attributes:
        words: lower-case words.
        short: words that are one token.
        names: first names.
        syllables: of an invented word; the recall suite's have three.
        capitals: letters of a variable's name; the recall suite's has five.
    """

    words: tuple[str, ...]
    short: tuple[str, ...]
    names: tuple[str, ...]
    syllables: tuple[int, ...]
    capitals: tuple[int, ...]

    @classmethod
    def training(cls, text: str, count_tokens) -> "Vocabulary":
        """The words of `text` that occur 20 times or more, without those of the recall suite."""
        withheld = {*ADJECTIVES, *NOUNS, *VERBS}
        counts = Counter(re.findall(r"(?<= )[a-z]{3,9}(?= )", text))
        words = tuple(sorted(word for word, count in counts.items() if count >= 20 and word not in withheld))
        short = tuple(word for word in words if count_tokens(" " + word) == 1)
        if len(short) < 50:
            raise ValueError(
                f"the text has {len(short)} frequent words of one token; 50 are needed for recall episodes"
            )
        return cls(words, short, tuple(NAMES), (2, 4), (2, 3, 4, 6))

    @classmethod
    def held_out(cls, count_tokens) -> "Vocabulary":
        """A vocabulary of words that no training episode mentions."""
        short = tuple(word for word in NOUNS if count_tokens(" " + word) == 1)
        return cls(tuple(NOUNS), short, tuple(HELD_OUT_NAMES), (3,), (5,))

    def draw(self, rng: random.Random, kind: str) -> str:
        return DRAWN[kind](self, rng)

    def distinct(self, rng: random.Random, kind: str, most: int) -> list[str]:
        """Up to `most` different words of a kind; fewer if the vocabulary has fewer."""
        drawn = {}
        for _ in range(2 * most + 20):
            if len(drawn) == most:
                break
            drawn.setdefault(self.draw(rng, kind))
        return list(drawn)


# kind of a key or value: how one is drawn
DRAWN = {
    "short": lambda vocabulary, rng: rng.choice(vocabulary.short),
    "word": lambda vocabulary, rng: rng.choice(vocabulary.words),
    "invented": lambda vocabulary, rng: "".join(
        rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in range(rng.choice(vocabulary.syllables))
    ),
    "two_words": lambda vocabulary, rng: f"{rng.choice(vocabulary.words)}-{rng.choice(vocabulary.words)}",
    "name": lambda vocabulary, rng: (
        rng.choice(vocabulary.names) + (f" {rng.choice(SURNAMES)}" if rng.random() < 0.3 else "")
    ),
    "city": lambda vocabulary, rng: rng.choice(CITIES),
    "digit": lambda vocabulary, rng: str(rng.randrange(10)),
    "five_digits": lambda vocabulary, rng: str(rng.randrange(10_000, 100_000)),
    "seven_digits": lambda vocabulary, rng: str(rng.randrange(10**6, 10**7)),
    "number": lambda vocabulary, rng: str(rng.randrange(10 ** rng.randrange(1, 7), 10**7))[: rng.randrange(2, 8)],
    "capitals": lambda vocabulary, rng: "".join(rng.choices(LETTERS, k=rng.choice(vocabulary.capitals))),
}
KEYS = ("short", "word", "invented", "two_words", "name", "number", "capitals")
VALUES = ("short", "word", "digit", "five_digits", "seven_digits", "number", "city", "invented")


@dataclass
class Facts:
    """Facts in the order in which they are told, and (question, answer) pairs about them."""

    statements: list[str]
    questions: list[tuple[str, str]]
    head: str = ""
    line_end: str = "\n"


class Script:
    """A text of which some spans are answers."""

    def __init__(self):
        self.parts: list[tuple[str, bool]] = []  # (text, whether it is an answer)

    def say(self, text: str):
        self.parts.append((text, False))

    def answer(self, text: str):
        self.parts.append((text, True))

    def encode(self, backend) -> tuple[list[int], list[float]]:
        """(ids, weights) of the whole text as the tokenizer splits it."""
        encoding = backend.encode("".join(text for text, _ in self.parts), add_special_tokens=False)
        ends = list(itertools.accumulate(len(text) for text, _ in self.parts))
        # a token belongs to the part in which it ends
        answers = (self.parts[bisect.bisect_left(ends, end)][1] for _, end in encoding.offsets)
        return encoding.ids, [ANSWER_WEIGHT if answer else 0.0 for answer in answers]


# --- facts and questions ---------------------------------------------------------------------------------------------


def bare(rng, vocabulary, count, easy=False):
    """Pairs of one form; the question is the beginning of the pair."""
    kinds = ("short", "short") if easy else (rng.choice(KEYS), rng.choice(VALUES))
    separator, line_end = rng.choice(SEPARATORS), rng.choice(LINE_ENDS)
    pairs = [(key, vocabulary.draw(rng, kinds[1])) for key in vocabulary.distinct(rng, kinds[0], count)]
    told = [f"{key}{separator}{value}" for key, value in pairs]
    # The blank belongs to the value's first token.
    questions = [(f"{key}{separator.rstrip()}", f" {value}{line_end}") for key, value in pairs]
    return Facts(told, questions, line_end=line_end)


def associative(rng, vocabulary, count):
    """Pairs that are told and asked for as in the suite's task of that name."""
    pairs = [(key, vocabulary.draw(rng, "word")) for key in vocabulary.distinct(rng, "invented", count)]
    questions = [(f"\nThe value of the key {key} is\n{key}:", f" {value}{END}") for key, value in pairs]
    return Facts([f"{key}: {value}" for key, value in pairs], questions, head=ASSOCIATIVE_HEAD)


def people(rng, vocabulary, count):
    """Attributes of people, some of which have several."""
    names = vocabulary.distinct(rng, "name", count)
    shares = [share for share, _ in ATTRIBUTES.values()]
    only = rng.choices(list(ATTRIBUTES), shares) if rng.random() < 0.5 else None
    asked = {}
    while len(asked) < count and len(asked) < len(names) * (1 if only else 2):
        attribute = only[0] if only else rng.choices(list(ATTRIBUTES), shares)[0]
        name = rng.choice(names) if not only else names[len(asked)]
        asked.setdefault((attribute, name), vocabulary.draw(rng, ATTRIBUTES[attribute][1]))
    statements = [
        rng.choice(STATEMENTS[attribute]).format(name=name, value=value) for (attribute, name), value in asked.items()
    ]
    questions = [
        ("\n" + QUESTION.format(attribute=attribute, name=name), f" {value}.{END}")
        for (attribute, name), value in asked.items()
    ]
    return Facts(statements, questions)


def needles(rng, vocabulary, count):
    """RULER's needles: one or several values of a key, asked for one key at a time or several at once."""
    several = rng.random() < 0.3
    kind, drawn = rng.choice((("number", "seven_digits"), ("number", "seven_digits"), ("word", "word")))
    keys = vocabulary.distinct(rng, rng.choice(("two_words", "two_words", "word", "invented")), count)
    told = []
    while keys and len(told) < count:
        key = keys.pop()
        told += [(key, vocabulary.draw(rng, drawn)) for _ in range(rng.randrange(1, 5) if several else 1)]
    rng.shuffle(told)
    values = {}
    for key, value in told:
        values.setdefault(key, []).append(value)
    together = rng.random() < 0.25
    groups, left = [], list(values)
    rng.shuffle(left)
    while left:
        size = rng.randrange(1, 5) if together else 1
        groups.append(left[:size])
        left = left[size:]
    plural = several or together
    many, verb, which = ("s", "are", "What are all the") if plural else ("", "is", "What is the")
    questions = []
    for group in groups:
        query = group[0] if len(group) == 1 else ", ".join(group[:-1]) + ", and " + group[-1]
        prompt = (
            f"\n{which} special magic {kind}{many} for {query} mentioned in the provided text? "
            f"The special magic {kind}{many} for {query} mentioned in the provided text {verb}"
        )
        answer = ", ".join(value for key in group for value in values[key])
        questions.append((prompt, f" {answer}.{END}"))
    head = (
        f"Some special magic {kind}s are hidden within the following text. Make sure to memorize it. "
        f"I will quiz you about the {kind}s afterwards.\n"
        if plural
        else f"A special magic {kind} is hidden within the following text. Make sure to memorize it. "
        f"I will quiz you about the {kind} afterwards.\n"
    )
    return Facts([NEEDLE.format(kind=kind, key=key, value=value) for key, value in told], questions, head)


def tracking(rng, vocabulary, count):
    """RULER's chains of assignments: all names that hold a value, or the value that a name holds."""
    statements, questions, chains = [], [], []
    names = iter(vocabulary.distinct(rng, "capitals", count))
    left = count
    while left > 0:
        chain = [name for _, name in zip(range(min(left, rng.randrange(1, 6))), names, strict=False)]
        if not chain:
            break
        left -= len(chain)
        value = vocabulary.draw(rng, "five_digits")
        chains.append([f"VAR {chain[0]} = {value}"])
        chains[-1] += [f"VAR {new} = VAR {old}" for old, new in itertools.pairwise(chain)]
        every = (
            f"\nQuestion: Find all variables that are assigned the value {value} in the text above. Answer: According "
            f"to the chain(s) of variable assignment in the text above, {len(chain)} variables are assigned the value "
            f"{value}, they are:"
        )
        questions.append((every, f" {', '.join(chain)}.{END}"))
        questions += [(f"\nVAR {name} =", f" {value}.{END}") for name in rng.sample(chain, min(2, len(chain)))]
    while chains:  # interleaved, each in its own order
        chain = rng.choice(chains)
        statements.append(chain.pop(0))
        chains = [chain for chain in chains if chain]
    head = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
    return Facts(statements, questions, head)


def sequence(rng, vocabulary, count):
    """One sequence, to be written backwards (the palindromes of the Kimi Linear report) or forwards."""
    length = rng.randrange(3, 13)
    if rng.random() < 0.6:
        thing, items = "letters", rng.sample(LETTERS, length)
    else:
        thing, items = "words", vocabulary.distinct(rng, "short", length)
    tail = f"\nWrite the {thing} of the sequence in "
    backwards = f"{tail}reverse order, from the last to the first:"
    questions = [(backwards, f" {' '.join(reversed(items))}{END}")]
    if rng.random() < 0.5:
        questions.append((f"{tail}order, from the first to the last:", f" {' '.join(items)}{END}"))
    head = f"A sequence of {thing} is hidden within the following text. Memorize it.\n"
    return Facts([f"The sequence is: {' '.join(items)}."], questions, head)


MAKERS = {"people": people, "needles": needles, "tracking": tracking, "sequence": sequence, "associative": associative}


# --- episodes --------------------------------------------------------------------------------------------------------


def told_in_a_row(rng, vocabulary, backend, size, easy):
    """Facts one after the other, then questions about them: at most `size` tokens."""
    costs = {"people": 40, "needles": 75, "tracking": 60, "associative": 24}  # tokens a fact, about
    name = "bare" if easy or rng.random() < 0.5 else rng.choice(list(costs))
    cost = costs.get(name, 8)
    count = max(2, round(size / cost))
    if rng.random() < 0.3:
        count = max(2, round(count * rng.random()))
    facts = bare(rng, vocabulary, count, easy) if name == "bare" else MAKERS[name](rng, vocabulary, count)
    questions = facts.questions
    rng.shuffle(questions)
    script = Script()
    script.say(facts.head + facts.line_end.join(facts.statements) + facts.line_end)
    for question, answer in questions:
        script.say(question)
        script.answer(answer)
    return script.encode(backend)


def asked_in_between(rng, vocabulary, backend, size, easy):
    """A list of pairs in which earlier ones are repeated: every repetition is a question, near or far."""
    facts = bare(rng, vocabulary, max(2, round(size / 9)), easy)
    repeat = rng.uniform(0.3, 0.7)
    script, asked, new = Script(), [], list(zip(facts.statements, facts.questions, strict=True))
    while new:
        if asked and rng.random() < repeat:
            question, answer = rng.choice(asked[-rng.choice((4, 16, 64, 10**6)) :])
            script.say(question)
            script.answer(answer)
        else:
            statement, question = new.pop()
            script.say(statement + facts.line_end)
            asked.append(question)
    return script.encode(backend)


def stacks(rng, vocabulary, backend, size, easy):
    """Words pushed on stacks and popped from them; the word on top is asked for in between and at the end."""
    script, piles = Script(), [[] for _ in range(rng.choice((1, 2, 3, 4, 4, 6)))]
    script.say(f"Words are pushed on {len(piles)} stacks and popped from them. Keep track of what lies on top.\n")
    ask = rng.choice((0.0, 0.2, 0.4))
    for _ in range(max(4, round(size / (10 + 14 * ask)) - 2 * len(piles))):
        which = rng.randrange(len(piles))
        if len(piles[which]) > 1 and rng.random() < 0.5:
            piles[which].pop()
            script.say(f"pop from stack {which + 1}\n")
        else:
            piles[which].append(vocabulary.draw(rng, "short" if easy else "word"))
            script.say(f"push {piles[which][-1]} on stack {which + 1}\n")
        if rng.random() < ask:
            script.say(f"The word on top of stack {which + 1} is")
            script.answer(f" {piles[which][-1]}\n")
    for which in rng.sample(range(len(piles)), len(piles)):
        if piles[which]:
            script.say(f"\nThe word on top of stack {which + 1} is")
            script.answer(f" {piles[which][-1]}{END}")
    return script.encode(backend)


def hidden_in_text(rng, vocabulary, corpus, size):
    """Facts between sentences of real text, then questions: exactly `size` tokens; None if that is too few."""
    name = rng.choices(("people", "needles", "tracking", "sequence", "bare"), (0.4, 0.3, 0.1, 0.1, 0.1))[0]
    count = max(1, round(max(1, size // 100) ** rng.random()))
    facts = bare(rng, vocabulary, count) if name == "bare" else MAKERS[name](rng, vocabulary, count)
    if name == "bare":
        end = rng.choice((".", "", ";"))
        facts.statements = [statement + end for statement in facts.statements]
        facts.questions = [(f"\n{question}", answer) for question, answer in facts.questions]
    rng.shuffle(facts.questions)
    ids, weights = [], []
    for question, answer in facts.questions:
        script = Script()
        script.say(question)
        script.answer(answer)
        more, more_weights = script.encode(corpus.backend)
        if ids and len(ids) + len(more) > size // 3:
            break
        ids += more
        weights += more_weights
    head = corpus.encode(facts.head) if facts.head and rng.random() < 0.5 else []
    told = sum(len(corpus.encode(" " + statement)) + 2 for statement in facts.statements)
    if len(head) + told + len(ids) > size:
        return None
    depths = sorted(rng.random() for _ in facts.statements)
    text = head + corpus.document(rng, size - len(ids) - len(head), facts.statements, depths)
    return text + ids, [0.0] * len(text) + weights


def episode(rng, corpus, size, easy_share):
    """One episode of at most `size` tokens: (ids, weights)."""
    vocabulary, backend = corpus.vocabulary, corpus.backend
    if rng.random() < 0.5 and (hidden := hidden_in_text(rng, vocabulary, corpus, size)) is not None:
        return hidden
    make = rng.choices((told_in_a_row, asked_in_between, stacks), (0.5, 0.35, 0.15))[0]
    easy = rng.random() < easy_share
    planned = size
    while True:
        ids, weights = make(rng, vocabulary, backend, planned, easy)
        if len(ids) <= size or planned < 16:
            return ids[:size], weights[:size]
        planned = round(planned * min(0.95 * size / len(ids), 0.9))
