"""The recall prompts: exactly sized with any tokenizer, the fact in them once, and answerable from their text alone."""

import dataclasses
import random
import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import kimi_k3
from kimi_k3.eval import EvalError, Plan, Tokens, open_haystack, suite
from kimi_k3.eval.sizing import TooShort
from kimi_k3.eval.suite import TASKS, Unit
from kimi_k3.eval.words import NOUNS

pytestmark = pytest.mark.one_release

SMALL = Path(kimi_k3.__file__).parent / "checkpoints" / "small"


def byte_tokenizer():
    """One token a byte, nothing in front."""
    alphabet = ["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def metaspace_tokenizer():
    """Pieces that carry the blank before them, one put in front of the text, and both BOS and EOS around it."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    sample = (SMALL / "sample.txt").read_text(encoding="utf-8")
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator([sample, "0123456789 : - = ' _ \n"], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", bos_token="<s>", unk_token="<unk>")


def word_tokenizer():
    """A token for each word and each mark, most of them unknown."""
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "the": 2, ".": 3}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


TOKENIZERS = {
    "small": AutoTokenizer.from_pretrained(SMALL),
    "bytes": byte_tokenizer(),
    "metaspace": metaspace_tokenizer(),
    "words": word_tokenizer(),
}
TOKENS = {name: Tokens(tokenizer) for name, tokenizer in TOKENIZERS.items()}
HAYSTACKS = {name: open_haystack([name], TOKENS["small"]) for name in ("repeat", "noise")}
HAYSTACKS["text"] = open_haystack([str(SMALL / "sample.txt")], TOKENS["small"])


def prompts_of(unit, seed, haystack, tokens):
    """(unit, prompts) of a length that is enough where the unit's is not: other keys need a few tokens more or less."""
    try:
        return unit, unit.prompts(seed, haystack, tokens)
    except EvalError as error:
        assert isinstance(error.__cause__, TooShort), error
        needed = error.__cause__.needed
        assert needed > unit.length and f"needs at least {needed} tokens" in str(error)
        return prompts_of(Unit(unit.task, needed, unit.depth, unit.sample), seed, haystack, tokens)


@settings(max_examples=400, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    task=st.sampled_from(list(TASKS)),
    tokenizer=st.sampled_from(list(TOKENIZERS)),
    haystack=st.sampled_from(list(HAYSTACKS)),
    length=st.integers(20, 900),
    depth=st.floats(0, 1),
    seed=st.integers(0, 2**32),
)
def test_prompts_have_exactly_the_length_and_the_fact_once(task, tokenizer, haystack, length, depth, seed):
    """Fault 127: any tokenizer, no network."""
    tokens, haystack = TOKENS[tokenizer], HAYSTACKS[haystack]
    unit, prompts = prompts_of(Unit(task, length, depth if TASKS[task].by_depth else None, 0), seed, haystack, tokens)
    for prompt in prompts:
        assert len(prompt.ids) == unit.length
        whole = TOKENIZERS[tokenizer](prompt.text).input_ids
        assert prompt.ids == (whole[:-1] if tokenizer == "metaspace" else whole), "what the tokenizer makes of the text"
        assert prompt.text.endswith(prompt.question.tail)
        told = prompt.text.removesuffix(prompt.question.tail)
        if TASKS[task].score.__name__ == "contained" and task not in ("tracking", "common_words", "frequent_words"):
            for answer in prompt.question.answers:
                assert told.count(answer) == 1
        if task == "fact":
            assert len(re.findall(r"The secret number of \w+ is \d+\.", told)) == 1
        if task == "single":
            assert told.count("special magic number") == 2, "in the first line and in the needle"


def solve(task: str, text: str) -> str:
    """An answer found by reading the prompt, with no knowledge of how it was made."""
    question = text.rpartition("\n")[2] if task != "associative" else "\n".join(text.split("\n")[-2:])
    body = text[: len(text) - len(question)]
    if task.startswith(("single", "multi")):
        keys = re.search(r"for (.*?) mentioned", question).group(1).replace(", and ", ", ").split(", ")
        return " and ".join(value for key in keys for value in re.findall(rf"magic \w+ for {key} is: ([\w-]+)\.", body))
    if task.startswith("fact"):
        # the question is two lines: the last one says "Answer:"
        name = re.search(r"secret number of (\w+)\?", text).group(1)
        return re.search(rf"The secret number of {name} is (\d+)\.", text).group(1)
    if task == "tracking":
        held = {}
        for name, source in re.findall(r"VAR ([A-Z]{5}) = (?:VAR )?(\w+)", body):
            held[name] = held.get(source, source)
        wanted = re.search(r"assigned the value (\d+)", question).group(1)
        return " ".join(name for name, value in held.items() if value == wanted)
    if task == "common_words":
        return " ".join(word for word, _ in Counter(re.findall(r"\d+\. (\w+)", body)).most_common(10))
    if task == "frequent_words":
        return " ".join(
            word for word, _ in Counter(re.findall(r"\b[a-z]{6}\b", body.split("coded words. ")[1])).most_common(3)
        )
    if task == "associative":
        key = re.search(r"key (\w+) is", question).group(1)
        return re.search(rf"^{key}: (\w+)$", body, re.MULTILINE).group(1)
    if task == "palindrome":
        return " ".join(reversed(re.search(r"The sequence is: ([A-Z ]+)\.", body).group(1).split()))
    assert task == "stack"
    stacks = {}
    for verb, word, stack in re.findall(r"^(push|pop) (?:(\w+) on|from) stack (\d)$", body, re.MULTILINE):
        if verb == "push":
            stacks.setdefault(stack, []).append(word)
        else:
            stacks[stack].pop()
    return stacks[re.search(r"stack (\d) is", question).group(1)][-1]


UNITS = [
    Unit(task, length, depth, 0)
    for task in TASKS
    for length in (1024, 4096)
    for depth in ([0.0, 0.5, 1.0] if TASKS[task].by_depth else [None])
]


@pytest.mark.parametrize("haystack", list(HAYSTACKS))
def test_an_oracle_scores_everything_and_a_constant_nothing(haystack):
    generator = random.Random(0)
    blind = {task: [] for task in TASKS}
    for unit in UNITS:
        task = TASKS[unit.task]
        for prompt in unit.prompts(3, HAYSTACKS[haystack], TOKENS["small"]):
            answers = prompt.question.answers
            assert task.score(solve(unit.task, prompt.text), answers) == 1, (unit, prompt.text[-300:])
            for constant in ("", "I do not know.", "0", prompt.question.tail):
                assert task.score(constant, answers) == 0, (unit, constant)
            for _ in range(40):
                guess = [generator.choice(suite.NO_WORDS if unit.task == "palindrome" else NOUNS) for _ in answers]
                blind[unit.task].append(task.score(" ".join(guess), answers))
    for name, scores in blind.items():
        mean, chance = sum(scores) / len(scores), TASKS[name].chance
        deviation = (chance * (1 - chance) / len(scores)) ** 0.5
        assert abs(mean - chance) <= 4 * deviation + 1e-6, (name, mean, chance)


def test_the_same_seed_gives_the_same_prompts_and_another_one_others():
    for unit in UNITS[:: len(UNITS) // 12]:
        first = unit.prompts(1, HAYSTACKS["noise"], TOKENS["small"])
        assert first == unit.prompts(1, HAYSTACKS["noise"], TOKENS["small"])
        assert first != unit.prompts(2, HAYSTACKS["noise"], TOKENS["small"])


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("haystack", list(HAYSTACKS))
def test_a_fact_lies_at_its_depth(haystack, depth):
    prompt = Unit("single", 4096, depth, 0).prompts(0, HAYSTACKS[haystack], TOKENS["small"])[0]
    before = prompt.text.index("One of the special")
    text = len(prompt.text) - len(prompt.question.tail)
    assert abs(before / text - depth) < 0.06


def test_questions_of_one_text_share_all_but_its_end():
    prompts = Unit("associative", 2048, None, 0).prompts(0, HAYSTACKS["noise"], TOKENS["small"])
    assert len(prompts) == 8 and len({prompt.text for prompt in prompts}) == 8
    shared = 0
    while len({prompt.ids[shared] for prompt in prompts}) == 1:
        shared += 1
    assert shared > 1900


def test_ruler_counts_and_wording():
    """The parts of RULER's definitions that make scores comparable."""
    tokens, noise = TOKENS["small"], HAYSTACKS["repeat"]
    text = Unit("multivalue", 2048, None, 0).prompts(0, noise, tokens)[0].text
    assert len(re.findall(r"One of the special magic numbers for \S+ is: \d{7}\.", text)) == 4
    text = Unit("multiquery", 2048, None, 0).prompts(0, noise, tokens)[0]
    assert len(text.question.answers) == 4 and "What are all the special magic numbers for" in text.question.tail
    words = re.findall(r"\d+\. (\w+)", Unit("common_words", 4096, None, 0).prompts(0, noise, tokens)[0].text)
    assert sorted(set(Counter(words).values())) == [3, 30]
    chain = Unit("tracking", 2048, None, 0).prompts(0, noise, tokens)[0]
    assert len(chain.question.answers) == 5 and chain.text.count("VAR ") == 9
    lines = Unit("multikey_lines", 2048, 0.5, 0).prompts(0, noise, tokens)[0].text
    keys = re.findall(r"magic numbers for (\S+) is:", lines)
    assert len(keys) == len(set(keys)) > 30, "every line another key"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"tasks": ("needle",)}, "there is no task 'needle': choose from single"),
        ({"tasks": ()}, "no tasks were given"),
        ({"tasks": ("single", "single")}, "one of the tasks is given twice"),
        ({"samples": 0}, "must be at least 1"),
    ],
)
def test_plans_that_cannot_be(changes, sentence):
    with pytest.raises(EvalError, match=sentence):
        Plan(**{"tasks": ("single",), "lengths": (512,), **changes})


def test_bad_tokenizers_and_haystacks(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(EvalError, match="no EOS token to end an answer: set eos_token"):
        Tokens(tokenizer)
    tokens = TOKENS["bytes"]
    for name, text, sentence in (
        ("gone.txt", None, "cannot be read"),
        ("empty.txt", b" \n", "is empty"),
        ("binary.txt", b"\xff\xfe", "is not UTF-8 text"),
        ("control.txt", b"The end. <|end|> Or not.", r"spells out the control token <\|end\|>"),
    ):
        path = tmp_path / name
        if text is not None:
            path.write_bytes(text)
        with pytest.raises(EvalError, match=sentence):
            open_haystack([str(path)], tokens)


def test_a_haystack_that_holds_the_fact_already(tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("They counted 1234567 sheep. Then they slept. ")
    haystack = open_haystack([str(tmp_path / "text.txt")], TOKENS["words"])
    monkeypatch.setattr(suite, "_number", lambda rng: "1234567")
    task = dataclasses.replace(TASKS["single"], make=suite._needles())
    monkeypatch.setitem(suite.TASKS, "single", task)
    with pytest.raises(EvalError, match="already holds what the task single would hide"):
        Unit("single", 500, 0.5, 0).prompts(0, haystack, TOKENS["words"])
    assert Unit("single", 500, 0.5, 0).prompts(0, HAYSTACKS["noise"], TOKENS["words"])


def test_a_plan_refuses_lengths_that_a_task_cannot_do_before_anything_is_loaded():
    plan = Plan(("fact", "common_words"), (128, 300), samples=2)
    with pytest.raises(EvalError, match=r"the task common_words needs at least \d+ tokens .* leave out the length 128"):
        plan.check(HAYSTACKS["repeat"], TOKENS["small"])
    Plan(("fact",), (128, 300), samples=2).check(HAYSTACKS["repeat"], TOKENS["small"])
