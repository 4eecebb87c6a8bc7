"""Sampling: each rule against transformers' own processors, each row as if it were alone, no number that is not right.

In float64, where the two ways of summing probabilities differ by less than any distance between a number that is drawn
and a border between tokens.
"""

import copy
import functools
import math
import pickle
import random
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation import GenerationMixin

from kimi_k3.serving.sampling import Choice, Sampler, Sampling, choose, packed_mask

pytestmark = pytest.mark.one_release

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCABULARY = 37  # no multiple of the 32 tokens that a word of a mask holds
ENDS = (3, 36)
SOME = (1, 2, 3, 8, 31, 32, 36)


def only(*tokens):
    allowed = torch.zeros(VOCABULARY, dtype=torch.bool)
    allowed[list(tokens)] = True
    return lambda new: packed_mask(allowed)


class At(Sampler):
    """Draws at one number."""

    def __init__(self, number, *args):
        super().__init__(*args)
        self.number = number

    def uniform(self):
        return self.number


class Generated(LogitsProcessor):
    """The penalties that transformers does not have, counted one token after another."""

    def __init__(self, rule, prompt):
        self.rule, self.prompt = rule, prompt

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        new = input_ids[0, self.prompt :].tolist()
        for token in set(new):
            scores[0, token] -= self.rule.presence_penalty
        for token in new:
            scores[0, token] -= self.rule.frequency_penalty
        return scores


def processed(scores, rule, prompt, new):
    """Scores [V] as generate makes them of logits [V], by the list of processors that it would use."""
    model = type("Model", (GenerationMixin,), {"config": SimpleNamespace(is_encoder_decoder=False)})()
    config = GenerationConfig(
        num_beams=1,
        num_return_sequences=1,
        do_sample=rule.temperature > 0,
        temperature=rule.temperature or None,
        top_k=rule.top_k,
        top_p=rule.top_p,
        min_p=rule.min_p or None,
        repetition_penalty=rule.repetition_penalty,
        min_new_tokens=rule.min_new_tokens,
        sequence_bias=[[[token], bias] for token, bias in rule.logit_bias.items()] or None,
    )
    config._eos_token_tensor = torch.tensor(ENDS)
    allowed = None if rule.mask is None else lambda batch, ids: list(SOME)
    own = LogitsProcessorList([Generated(rule, len(prompt))])
    processors = model._get_logits_processor(config, len(prompt), None, allowed, own, "cpu", {})
    return processors(torch.tensor([prompt + new]), scores[None])[0]


def found_at(scores, number):
    """The token at a number, by the probabilities of scores [V] in order."""
    scores, order = scores.sort(stable=True)
    sums = scores.softmax(-1).cumsum(-1)
    return int(order[(sums > number).nonzero()[0, 0]])


def test_tokens_are_those_of_transformers_pipeline(monkeypatch):
    """Values of all rules at random, so many that every two of them meet, on scores that differ and on scores of which
    many are equal, in one batch."""
    # Which of equals a top_p leaves out is otherwise the processor's choice.
    monkeypatch.setattr(torch, "sort", functools.partial(torch.sort, stable=True))
    values = {
        "temperature": (0, 0.25, 1.0, 2.5),
        "top_k": (0, 1, 6, 10**30),
        "top_p": (1.0, 0.8, 1e-12),
        "min_p": (0, 0.15),
        "repetition_penalty": (1.0, 1.75, 0.5),
        "presence_penalty": (0, 1.25),
        "frequency_penalty": (0, 0.375, -2),
        "logit_bias": ({}, {0: 2.5, 8: 4.25, 36: -100.0}),
        "min_new_tokens": (0, 9),
        "mask": (None, only(*SOME)),
    }
    draw, samplers, rows = random.Random(1), [], []
    for number in range(300):
        rule = Sampling(**{name: draw.choice(each) for name, each in values.items()})
        prompt = [draw.randrange(VOCABULARY + 3) for _ in range(draw.randrange(1, 12))]  # ids beyond the vocabulary
        samplers.append(At(draw.random(), rule, prompt, ENDS))
        for _ in range(draw.randrange(9)):
            samplers[-1].note(draw.randrange(VOCABULARY))
        noise = torch.tensor([draw.gauss(0, 2) for _ in range(VOCABULARY)], dtype=torch.float64)
        rows.append(noise.round() if number % 2 else noise)
    chosen = choose(torch.stack(rows).to(DEVICE), samplers)
    for row, sampler, choice in zip(rows, samplers, chosen, strict=True):
        scores = processed(row, sampler.sampling, sampler.prompt, sampler.new)
        wanted = found_at(scores, sampler.number) if sampler.sampling.temperature else int(scores.argmax())
        assert choice == Choice(wanted), (sampler.sampling, sampler.number)


@pytest.mark.parametrize(
    "rule",
    [
        Sampling(1.0),
        Sampling(0.7, top_k=9),
        Sampling(1.3, top_p=0.7, min_p=0.05),
        Sampling(1e-320),
        Sampling(1e300),
        Sampling(1.0, mask=only(5)),
    ],
    ids=["all", "top-k", "top-p and min-p", "coldest", "hottest", "all but one banned"],
)
def test_tokens_come_as_often_as_they_are_likely(rule):
    """At numbers of one distance, each comes that often to within one time; the ends of the range belong to it."""
    torch.manual_seed(2)
    row, count = torch.randn(VOCABULARY, dtype=torch.float64) * 3, 1000
    numbers = [(i + 0.5) / count for i in range(count)]
    tokens = [choice.token for choice in choose(row.expand(count, -1).to(DEVICE), [At(u, rule) for u in numbers])]
    if 1e-300 < rule.temperature < 1e300 and rule.mask is None:
        likely = processed(row, rule, [0], []).softmax(-1)
    else:
        likely = torch.zeros(VOCABULARY, dtype=torch.float64)
        likely[:] = 1 / VOCABULARY
        if rule.temperature < 1e300:
            likely = torch.nn.functional.one_hot(row.argmax() if rule.mask is None else torch.tensor(5), VOCABULARY)
    assert (torch.bincount(torch.tensor(tokens), minlength=VOCABULARY) - likely * count).abs().max() <= 1
    ends = choose(row.expand(2, -1).to(DEVICE), [At(0.0, rule), At(1 - 2.0**-53, rule)])
    order = [token for token in row.argsort().tolist() if likely[token]]
    assert [end.token for end in ends] == [order[0], order[-1]]


RULES = [
    Sampling(),
    Sampling(log_probabilities=2),
    Sampling(1.0, seed=5),
    Sampling(0.8, top_k=7, seed=-6, log_probabilities=0),
    Sampling(1.5, top_p=0.9, seed=7, repetition_penalty=1.3),
    Sampling(1.0, min_p=0.02, seed=8, presence_penalty=0.5, frequency_penalty=-0.5, log_probabilities=10**30),
    Sampling(0, frequency_penalty=1.5, min_new_tokens=4),
    Sampling(2.0, seed=10, logit_bias={2: 3, 7: -1.5}, mask=only(*SOME), min_new_tokens=3),
]


def logits_after(sampler):
    """Of the text alone, with many equals, as a model in bfloat16 gives them."""
    draw = random.Random(str([*sampler.prompt, *sampler.new]))
    return torch.tensor([draw.gauss(0, 2) for _ in range(VOCABULARY)], device=DEVICE).round(decimals=1)


def samplers():
    return [Sampler(rule, [i, i, 4], ENDS) for i, rule in enumerate(RULES)]


def test_a_text_never_depends_on_its_company():
    """To the last bit: alone; in batches of any size and order, chosen twice, and pickled between the steps."""
    steps, alone = 12, []
    for sampler in samplers():
        for _ in range(steps):
            [choice] = choose(logits_after(sampler)[None], [sampler])
            alone.append(choice)
            sampler.note(choice.token)
    together, draw = samplers(), random.Random(3)
    choices = {id(sampler): [] for sampler in together}
    while min(map(len, choices.values())) < steps:
        batch = [sampler for sampler in together if len(sampler.new) < steps]
        batch = draw.sample(batch, draw.randint(1, len(batch)))
        logits = torch.stack([logits_after(sampler) for sampler in batch])
        copies = copy.deepcopy(batch)
        chosen = choose(logits, batch)
        assert choose(logits, copies) == chosen
        for sampler, choice in zip(batch, chosen, strict=True):
            choices[id(sampler)].append(choice)
            sampler.note(choice.token)
            if sampler.sampling.mask is None and draw.random() < 0.5:
                together[together.index(sampler)] = again = pickle.loads(pickle.dumps(sampler))
                choices[id(again)] = choices.pop(id(sampler))
    assert [choice for sampler in together for choice in choices[id(sampler)]] == alone
    assert len({sampler.new[0] for sampler in together}) > 3


def test_what_a_seed_draws():
    """Numbers that are spread evenly (six standard deviations), over tokens and over seeds; without a seed each request
    has its own."""
    first, many = Sampler(Sampling(1, seed=1)), [Sampler(Sampling(1, seed=seed)) for seed in range(3200)]
    along = []
    for _ in range(3200):
        along.append(first.uniform())
        first.note(0)
    for numbers in (along, [sampler.uniform() for sampler in many]):
        counts = torch.tensor(numbers).histc(bins=16, min=0, max=1)
        assert (counts - 200).abs().max() < 6 * math.sqrt(3200 / 16 * 15 / 16)
    assert Sampler(Sampling(1)).uniform() != Sampler(Sampling(1)).uniform()
    assert Sampler(Sampling(1, seed=1)).uniform() == along[0]


def test_log_probabilities_are_of_the_models_logits():
    """Whatever the rules, of the chosen token and of the highest, equals in order of their ids."""
    row = torch.zeros(VOCABULARY, dtype=torch.bfloat16, device=DEVICE)
    row[7], row[20], row[5] = 2, 2, 1
    wanted = row.double().log_softmax(-1).tolist()
    asks = [None, 0, 2, 5]
    rules = [Sampling(logit_bias={30: 50}, repetition_penalty=2.0, log_probabilities=count) for count in asks]
    for count, choice in zip(asks, choose(row.expand(4, -1), [Sampler(rule) for rule in rules]), strict=True):
        assert choice.token == 30
        if count is None:
            assert choice == Choice(30)
        else:
            assert choice.log_probability == pytest.approx(wanted[30], rel=1e-14)
            assert choice.top == tuple((i, pytest.approx(wanted[i], rel=1e-14)) for i in (7, 20, 5, 0, 1)[:count])


def test_what_cannot_be_chosen_is_refused_and_changes_nothing():
    together = [Sampler(Sampling(1.0, seed=i, repetition_penalty=1.1), [1], ENDS) for i in range(3)]
    logits = torch.stack([logits_after(sampler) for sampler in together])
    wanted = choose(logits, together)
    banned = Sampler(Sampling(1.0, min_new_tokens=1, mask=only(*ENDS)), [1], ENDS)
    for rule in (banned.sampling, replace(banned.sampling, temperature=0)):
        with pytest.raises(ValueError, match="no token may come next: the mask and min_new_tokens ban all of them"):
            choose(logits, [*together[:2], Sampler(rule, [1], ENDS)])
    for bad in (math.nan, math.inf):
        for rule in (Sampling(), Sampling(1.0)):
            broken = logits.clone()
            broken[2, 4] = bad
            with pytest.raises(ValueError, match="the model's logits are not finite"):
                choose(broken, [*together[:2], Sampler(rule)])
    with pytest.raises(ValueError, match="logit_bias names token 37, but the model has 37"):
        choose(logits, [*together[:2], Sampler(Sampling(logit_bias={1: 1, 37: 1}))])
    assert choose(logits, together) == wanted


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", (-0.1, math.nan, math.inf, 10**400, "1", True, None)),
        ("top_k", (-1, 1.0, True, None)),
        ("top_p", (-0.1, 1.1, math.nan, None)),
        ("min_p", (-0.1, 1.1, None)),
        ("repetition_penalty", (0, -1, math.inf, None)),
        ("presence_penalty", (-2.1, 2.1, None)),
        ("frequency_penalty", (-2.1, 2.1, None)),
        ("logit_bias", ({"1": 1}, {-1: 1}, {1: math.nan}, {1: "1"}, {True: 1}, [(1, 1)], None)),
        ("seed", (1.0, "1", True)),
        ("min_new_tokens", (-1, 1.0, None)),
        ("mask", ([1],)),
        ("log_probabilities", (-1, 1.0, True)),
    ],
)
def test_values_are_refused_by_the_name_of_their_field(field, values):
    for value in values:
        with pytest.raises(ValueError, match=rf"^{field} is .*, not "):
            Sampling(**{field: value})


@pytest.mark.skipif(DEVICE.type == "cpu", reason="a CPU is never waited for")
def test_the_host_waits_once():
    together = samplers()
    logits = torch.stack([logits_after(sampler) for sampler in together])
    choose(logits, together)  # counts are there from now on
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as waits:
            warnings.simplefilter("always")
            for sampler, choice in zip(together, choose(logits, together), strict=True):
                sampler.note(choice.token)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(waits) == 1, [str(wait.message) for wait in waits]
