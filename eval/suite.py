"""The recall tasks: drafts of prompts, made from a seed for any tokenizer, and how their answers are scored.

The tasks with a RULER name (Hsieh et al. 2024, arXiv 2404.06654) keep its wording, counts and score, so that results
can be compared. docs/evaluation.md says where they differ.
"""

import itertools
import math
import random
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from .haystack import Haystack, growing
from .sizing import Draft, EvalError, Prompt, Question, Tokens, TooShort, fewest_tokens, fit
from .words import (
    ADJECTIVES,
    ASSOCIATIVE_HEAD,
    HELD_OUT_NAMES,
    NEEDLE,
    NOUNS,
    QUESTION,
    STATEMENTS,
    different,
    distinct,
    invented,
)

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
NO_WORDS = [letter for letter in LETTERS if letter not in "AI"]  # letters that no sentence starts with alone
SEQUENCE = 10  # letters of a palindrome task
STACKS = 4
PAIRS_ASKED = 8  # number of pairs of a list that are asked for
_ATTEMPTS = 8  # at a text that holds its facts once

# --- scoring ---------------------------------------------------------------------------------------------------------


def contained(output: str, answers: tuple[str, ...]) -> float:
    """The share of the answers that occur anywhere in the output, as RULER counts them."""
    return sum(answer.lower() in output.lower() for answer in answers) / len(answers)


def whole_words(output: str, answers: tuple[str, ...]) -> float:
    """The share of the answers that occur in the output as whole words."""
    words = set(re.findall(r"\w+", output.lower()))
    return sum(answer.lower() in words for answer in answers) / len(answers)


def in_order(output: str, answers: tuple[str, ...]) -> float:
    """The share of the answers that are in their place among the output's words."""
    words = re.findall(r"\w+", output)
    return sum(word == answer for word, answer in zip(words, answers, strict=False)) / len(answers)


# --- tasks -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """One kind of question.

    Attributes:
        make: (rng, haystack, text of the plan) -> its draft.
        about: one line for the report.
        chance: expected score of an answer of the right kind by somebody who did not read the text.
        room: the least number of tokens that an answer is allowed; RULER's where it has the task.
        score: (output, answers) -> 0 to 1.
        by_depth: whether texts are made for each depth of the grid.
        ruler: its name in RULER.
    """

    name: str
    make: Callable[[random.Random, Haystack, "Unit"], Draft]
    about: str
    chance: float
    room: int
    score: Callable[[str, tuple[str, ...]], float] = contained
    by_depth: bool = False
    ruler: str | None = None

    def finished(self, output: str, answers: tuple[str, ...]) -> bool:
        """Whether no further word can change the score: every answer was found, wherever in the output."""
        return self.score is contained and contained(output, answers) == 1


def _hidden(rng, haystack, head, facts, questions, values=(), units=None) -> Draft:
    """A draft of filler with facts (depth, text) between its units; they and `values` may occur in it only once."""
    lines = units or haystack.units(rng)
    # An rng of its own, so that the end of the text does not depend on how many units were drawn.
    filling = haystack.characters(random.Random(rng.random()))
    separator = "\n" if units else haystack.separator
    facts = sorted(facts, key=lambda fact: fact[0])

    def build(count):
        pieces, before, filler = [], 0, lines(count)
        for depth, fact in facts:
            at = round(depth * count)
            pieces += [*filler[before:at], fact + separator]
            before = at
        return "".join([*pieces, *filler[before:]]), questions

    return Draft(head, build, len(facts) + 1, filling, (*(fact for _, fact in facts), *values))


def _number(rng):
    return str(rng.randint(10**6, 10**7 - 1))


def _word(rng):
    return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"


def _uuid(rng):
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def _needles(keys=1, values=1, together=False, key=_word, kind="number", needles_only=False):
    """RULER's needles: `values` numbers for each of `keys` keys, asked one key at a time or all `together`."""
    value = _number if kind == "number" else _uuid

    def make(rng: random.Random, haystack: Haystack, unit: "Unit") -> Draft:
        names = distinct(lambda: key(rng), keys)
        told = distinct(lambda: value(rng), keys * values)
        answers = {name: tuple(told[i * values : (i + 1) * values]) for i, name in enumerate(names)}
        if unit.depth is not None:
            depths = [unit.depth]
        else:  # as RULER: distinct ones of 40 depths from the start to the end
            depths = [step / 39 for step in rng.sample(range(40), keys * values)]
        depth_of = dict(zip(told, depths, strict=True))
        facts = [(depth_of[v], NEEDLE.format(kind=kind, key=name, value=v)) for name in names for v in answers[name]]
        one = values == 1 and not together
        article, many, verb, which = ("A", "", "is", "What is the") if one else ("Some", "s", "are", "What are all the")

        def question(asked_names):
            query = asked_names[0]
            if len(asked_names) > 1:
                query = ", ".join(asked_names[:-1]) + ", and " + asked_names[-1]
            tail = (
                f"\n{which} special magic {kind}{many} for {query} mentioned in the provided text? "
                f"The special magic {kind}{many} for {query} mentioned in the provided text {verb}"
            )
            expected = tuple(value for name in asked_names for value in answers[name])
            return Question(tail, expected, depth_of[expected[0]] if one else None)

        questions = [question(names)] if together else [question([name]) for name in names]
        head = (
            f"{article} special magic {kind}{many} {verb} hidden within the following text. Make sure to memorize it. "
            f"I will quiz you about the {kind}{many} afterwards.\n"
        )
        lines = growing(_needle_lines(rng, key, value, kind, names, told)) if needles_only else None
        return _hidden(rng, haystack, head, facts, questions, told, lines)

    return make


def _needle_lines(rng, key, value, kind, keys, values):
    """Filler of other needles, each with a new key and a new value, without end."""
    new_keys, new_values = different(lambda: key(rng), keys), different(lambda: value(rng), values)
    for used, (name, number) in enumerate(zip(new_keys, new_values, strict=True), len(keys)):
        if key is _word and used >= 0.9 * len(ADJECTIVES) * len(NOUNS):
            raise EvalError("multikey_lines runs out of different keys at this length: take multikey_uuid")
        yield NEEDLE.format(kind=kind, key=name, value=number) + "\n"


def _tracking(rng: random.Random, haystack: Haystack, unit: "Unit") -> Draft:
    """RULER's variable tracking: one value handed on along a chain of four hops."""
    hops = 4
    names = distinct(lambda: "".join(rng.choices(LETTERS, k=5)), hops + 1)
    value = str(rng.randint(10_000, 99_999))
    steps = [f"VAR {names[0]} = {value}", *(f"VAR {new} = VAR {old}" for old, new in itertools.pairwise(names))]
    facts = list(zip(sorted(rng.random() for _ in steps), steps, strict=True))
    head = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
    tail = (
        f"\nQuestion: Find all variables that are assigned the value {value} in the text above. "
        f"Answer: According to the chain(s) of variable assignment in the text above, {len(names)} variables are "
        f"assigned the value {value}, they are:"
    )
    return _hidden(rng, haystack, head, facts, [Question(tail, tuple(names))])


def _common_words(rng: random.Random, haystack: Haystack, unit: "Unit") -> Draft:
    """RULER's common words: ten words of a list occur 30 times in it, all others 3 times (6 and 1 below 4k)."""
    often, seldom = (30, 3) if unit.length >= 4096 else (6, 1)
    common = distinct(lambda: invented(rng), 10)
    others, order = growing(different(lambda: invented(rng), common)), rng.random()

    def build(count):
        words = common * often + others(count) * seldom
        random.Random(order).shuffle(words)
        return " ".join(f"{i}. {word}" for i, word in enumerate(words, 1)) + " ", [Question(tail, tuple(common))]

    head = (
        "Below is a numbered list of words. In these words, some appear more often than others. "
        "Memorize the ones that appear most often.\n"
    )
    tail = (
        "\nQuestion: What are the 10 most common words in the above list? "
        "Answer: The top 10 words that appear most often in the list are:"
    )
    return Draft(head, build, 10, haystack.characters(rng))


def _frequent_words(rng: random.Random, haystack: Haystack, unit: "Unit") -> Draft:
    """RULER's frequent words: the count falls with the square of the rank; dots come first, then the answers."""
    norm = math.pi**2 / 6
    coded = distinct(lambda: "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=6)), max(unit.length // 50, 8))
    order = rng.random()

    def build(count):
        words = ["..."] * int(count / norm)
        for rank, word in enumerate(coded, 2):
            words += [word] * int(count / norm / rank**2)
        random.Random(order).shuffle(words)
        return " ".join(words) + " ", [Question(tail, tuple(coded[:3]))]

    head = (
        "Read the following coded text and track the frequency of each coded word. "
        "Find the three most frequently appeared coded words. "
    )
    tail = (
        "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently "
        "appeared words in the above coded text? Answer: According to the coded text above, the three most frequently "
        "appeared words are:"
    )
    return Draft(head, build, 110, haystack.characters(rng))  # from 110 words on the fourth is rarer


def _associative(rng: random.Random, haystack: Haystack, unit: "Unit") -> Draft:
    """Multi-query associative recall (Arora et al. 2023): a text of keys and values, several of which are asked for."""
    keys = distinct(lambda: invented(rng), PAIRS_ASKED)
    pairs = {key: rng.choice(NOUNS) for key in keys}
    depths = [(i + 0.5) / PAIRS_ASKED for i in range(PAIRS_ASKED)]
    lines = (f"{key}: {rng.choice(NOUNS)}\n" for key in different(lambda: invented(rng), keys))
    questions = [
        Question(f"\nThe value of the key {key} is\n{key}:", (pairs[key],), depth)
        for key, depth in zip(keys, depths, strict=True)
    ]
    facts = [(depth, f"{key}: {pairs[key]}") for key, depth in zip(keys, depths, strict=True)]
    return _hidden(rng, haystack, ASSOCIATIVE_HEAD, facts, questions, units=growing(lines))


def _palindrome(rng: random.Random, haystack: Haystack, unit: "Unit") -> Draft:
    """A sequence of letters hidden in the text, to be written backwards (the task of Kimi Linear, in text)."""
    letters = rng.sample(NO_WORDS, SEQUENCE)
    head = "A sequence of letters is hidden within the following text. Memorize it.\n"
    tail = "\nWrite the letters of the sequence in reverse order, from the last to the first:"
    fact = f"The sequence is: {' '.join(letters)}."
    return _hidden(rng, haystack, head, [(unit.depth, fact)], [Question(tail, tuple(reversed(letters)), unit.depth)])


def _stack(rng: random.Random, haystack: Haystack, unit: "Unit") -> Draft:
    """Words pushed on stacks and popped from them; the question is what lies on top at the end (Kimi Linear's task)."""
    lines, words, tops = [], [[] for _ in range(STACKS)], []

    def step():
        place = len(lines)
        which = place if place < STACKS else rng.randrange(STACKS)
        stack = words[which]
        if len(stack) > 1 and rng.random() < 0.5:
            stack.pop()
            lines.append(f"pop from stack {which + 1}\n")
        else:
            stack.append((rng.choice(NOUNS), place))
            lines.append(f"push {stack[-1][0]} on stack {which + 1}\n")
        tops.append([stack[-1] if stack else None for stack in words])

    def build(count):
        while len(lines) < count:
            step()
        questions = [
            Question(f"\nThe word on top of stack {which} is", (word,), place / count)
            for which, (word, place) in enumerate(tops[count - 1], 1)
        ]
        return "".join(lines[:count]), questions

    head = f"Words are pushed on {STACKS} stacks and popped from them. Keep track of what lies on top.\n"
    return Draft(head, build, 2 * STACKS, haystack.characters(rng))


def _facts(count: int):
    """The facts that the small checkpoint was trained on, about people whom its training never named."""

    def make(rng: random.Random, haystack: Haystack, unit: "Unit") -> Draft:
        names = rng.sample(HELD_OUT_NAMES, count)
        values = distinct(lambda: str(rng.randint(10_000, 99_999)), count)
        depths = [unit.depth] if count == 1 else [rng.random() for _ in names]
        told = list(zip(depths, names, values, strict=True))
        attribute = "secret number"
        statement, question = STATEMENTS[attribute][0], "\n" + QUESTION
        facts = [(depth, statement.format(name=name, value=value)) for depth, name, value in told]
        questions = [
            Question(question.format(attribute=attribute, name=name), (value,), depth) for depth, name, value in told
        ]
        return _hidden(rng, haystack, "", facts, questions, values)

    return make


def _needle_task(name: str, about: str, ruler: str, keys: int = 1, values: int = 1, **options) -> Task:
    """A task of RULER's needles: one needle alone lies at the plan's depths; a number can be guessed, a UUID cannot."""
    chance = 0.0 if options.get("kind") == "uuid" else 1 / 9e6
    make = _needles(keys, values, **options)
    return Task(name, make, about, chance, 128, by_depth=keys * values == 1, ruler=f"niah_{ruler}")


_WORD_CHANCE = 1 / len(NOUNS)

TASKS = {
    task.name: task
    for task in (
        _needle_task("single", "one number in the text", "single_1, _2"),
        _needle_task("single_uuid", "one UUID in the text", "single_3", kind="uuid"),
        _needle_task("multikey", "four keys, each asked for", "multikey_1", keys=4),
        _needle_task("multikey_lines", "one key among nothing but other keys", "multikey_2", needles_only=True),
        _needle_task(
            "multikey_uuid",
            "one UUID among nothing but other UUIDs",
            "multikey_3",
            key=_uuid,
            kind="uuid",
            needles_only=True,
        ),
        _needle_task("multivalue", "one key with four values", "multivalue", values=4),
        _needle_task("multiquery", "four keys asked at once", "multiquery", keys=4, together=True),
        Task("tracking", _tracking, "a value along a chain of variables", 0.0, 30, ruler="vt"),
        Task("common_words", _common_words, "the ten most common words of a list", 0.0, 120, ruler="cwe"),
        Task("frequent_words", _frequent_words, "the three most frequent words", 0.0, 50, ruler="fwe"),
        Task("associative", _associative, "values of eight keys in a list of pairs", _WORD_CHANCE, 8, whole_words),
        Task("palindrome", _palindrome, "a sequence backwards", 1 / len(NO_WORDS), 8, in_order, by_depth=True),
        Task("stack", _stack, "the top of each of four stacks", _WORD_CHANCE, 8, whole_words),
        Task("fact", _facts(1), "one fact about a person", 1 / 9e4, 8, by_depth=True),
        Task("fact_among_three", _facts(3), "three facts of one kind, each asked for", 1 / 9e4, 8),
    )
}


@dataclass(frozen=True)
class Unit:
    """One text of a plan: what its prompts are made from."""

    task: str
    length: int
    depth: float | None
    sample: int

    def _draft(self, seed, haystack, attempt=0):
        name = f"{seed}/{self.task}/{self.length}/{self.depth}/{self.sample}/{haystack.name}/{attempt}"
        return TASKS[self.task].make(random.Random(name), haystack, self)

    def needs(self, seed: int, haystack: Haystack, tokens: Tokens) -> int:
        """The smallest number of tokens that this text can have."""
        return fewest_tokens(self._draft(seed, haystack), tokens)

    def questions(self, seed: int, haystack: Haystack) -> int:
        """How many questions are asked about this text."""
        draft = self._draft(seed, haystack)
        return len(draft.build(draft.fewest)[1])

    def refusal(self, needed: int) -> EvalError:
        return EvalError(
            f"the task {self.task} needs at least {needed} tokens with this tokenizer and haystack: leave out the "
            f"length {self.length}"
        )

    def prompts(self, seed: int, haystack: Haystack, tokens: Tokens) -> list[Prompt]:
        """The prompts of this text, the same ones for the same arguments, each of exactly `length` tokens.

        Raises:
            EvalError: if the task needs more tokens, or the haystack holds what would be hidden in it.
        """
        for attempt in range(_ATTEMPTS):
            draft = self._draft(seed, haystack, attempt)
            try:
                prompts = fit(draft, self.length, tokens)
            except TooShort as error:
                raise self.refusal(error.needed) from error
            text = prompts[0].text.removesuffix(prompts[0].question.tail)
            if all(text.count(fact) == 1 for fact in draft.once):
                return prompts
        raise EvalError(f"the haystack already holds what the task {self.task} would hide in it: take another one")


def answer_room(prompt: Prompt, task: Task, tokens: Tokens) -> int:
    """New tokens that an answer may have: the task's room, or one and a half times the right answer if that is more."""
    return max(task.room, tokens.count(" ".join(prompt.question.answers)) * 3 // 2 + 4)
