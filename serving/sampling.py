"""The next token of many requests at once, each by its own rule.

The rules apply in the order in which transformers' generate applies its processors and warpers:

    logit_bias  repetition_penalty  frequency_penalty, presence_penalty  min_new_tokens  mask
    temperature  top_k  top_p  min_p

The last three each leave out an end of the tokens in order of their scores (the less likely of equals is the one with
the lower id, as in generate). Of what is left one token is found at a number `uniform` in [0, 1):

    score  x_1 <= ... <= x_V     weight  w_i = round(2^k exp((x_i - x_V) / temperature))     sum  C_i = w_1 + ... + w_i
    token  the first i with C_i > C_s + uniform (C_V - C_s), where s tokens are left out

Scores are float64. Weights and sums are whole numbers, with k as large as int64 allows (44 for 2^17 to 2^18 tokens), so
no sum is rounded and nothing about a request's token depends on the other rows, on their number or on their order. The
price: what is 2^-(k + 1) as likely as the most likely token, or less, is never drawn.
"""

import hashlib
import math
import secrets
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from .sent import sent


def _is_number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_count(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_bias(value) -> bool:
    return isinstance(value, Mapping) and all(_is_count(id_) and _is_number(bias) for id_, bias in value.items())


def _between(low, high):
    return f"a number from {low} to {high}", lambda value: _is_number(value) and low <= value <= high


# field -> what it has to be, and whether a value is that
_RIGHT = {
    "temperature": ("a number, 0 or more", lambda value: _is_number(value) and value >= 0),
    "top_k": ("a whole number, 0 (off) or more", _is_count),
    "top_p": _between(0, 1),
    "min_p": _between(0, 1),
    "repetition_penalty": ("a number above 0", lambda value: _is_number(value) and value > 0),
    "presence_penalty": _between(-2, 2),
    "frequency_penalty": _between(-2, 2),
    "logit_bias": ("numbers by token ids", _is_bias),
    "seed": ("a whole number or None", lambda value: value is None or type(value) is int),
    "min_new_tokens": ("a whole number, 0 or more", _is_count),
    "mask": ("a function or None", lambda value: value is None or callable(value)),
    "log_probabilities": ("None or a whole number, 0 or more", lambda value: value is None or _is_count(value)),
}


@dataclass(frozen=True)
class Sampling:
    """The rules of a request, which are greedy if none is given.

    Args:
        temperature: divides the scores; 0 takes the token of the highest one.
        top_k: so many of the most likely tokens are left, and those that equal the last of them; 0 leaves all.
        top_p: the fewest of the most likely tokens are left that together have this probability; one at least.
        min_p: tokens are left that are at least so many times as likely as the most likely one.
        repetition_penalty: divides the scores above 0, and multiplies those below, of all tokens of prompt and text.
        presence_penalty: is taken from the score of every token that was generated.
        frequency_penalty: is taken from it as often as the token was generated.
        logit_bias: token id -> what is added to its score.
        seed: the same one gives the same tokens for the same logits, whatever else runs; None draws one.
        min_new_tokens: end tokens come after so many others at the earliest.
        mask: which tokens may come next: called with the ids of the tokens generated so far, returns `packed_mask` of
            them on the host, or None for all. It should depend on these ids alone. `structured.py` makes some.
        log_probabilities: report the token's log-probability and so many of the highest, all under the model's own
            logits, before any rule; None reports none.

    Raises:
        ValueError: names a field that is out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    min_new_tokens: int = 0
    mask: Callable[[Sequence[int]], torch.Tensor | None] | None = None
    log_probabilities: int | None = None

    def __post_init__(self):
        for name, (what, is_right) in _RIGHT.items():
            if not is_right(value := getattr(self, name)):
                raise ValueError(f"{name} is {what}, not {value!r}")

    def refusal(self, vocabulary: int) -> str | None:
        """Why no model with so many tokens can follow these rules, None where it can."""
        highest = max(self.logit_bias, default=0)
        return f"logit_bias names token {highest}, but the model has {vocabulary:,}" if highest >= vocabulary else None

    @property
    def is_penalised(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


@dataclass(frozen=True)
class Choice:
    """A next token, its log-probability under the model's own logits, and the tokens of the highest ones with theirs,
    highest first; None and () where the request does not ask for them."""

    token: int
    log_probability: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Sampler:
    """How the next tokens of one request are chosen. `choose` changes nothing of it, `note` goes on to the next token.

    Whoever asks for a token before the host knows the last one says so by `expect`.

    It can be pickled, and goes on in another process or on another device as it would have here.

    Args:
        sampling: the rules.
        prompt: token ids.
        ends: ids of the tokens that end the text.

    Attributes:
        new: ids of the tokens that were noted.
        expected: how many more were asked for.
    """

    def __init__(self, sampling: Sampling = Sampling(), prompt: Sequence[int] = (), ends: Collection[int] = ()):
        self.sampling, self.prompt, self.ends = sampling, prompt, frozenset(ends)
        self.new: list[int] = []
        self.expected = 0
        self._seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        self._counts: torch.Tensor | None = None

    def note(self, token: int) -> None:
        """This token was taken."""
        self.new.append(token)
        if self.expected:
            self.expected -= 1
        elif self._counts is not None:
            self._counts[1, token] += 1

    def expect(self, token: torch.Tensor) -> None:
        """This token, int64 [1] on the device, will be noted."""
        self.expected += 1
        if self._counts is not None:
            self._counts[1].scatter_add_(0, token, torch.ones_like(token, dtype=self._counts.dtype))

    @property
    def place(self) -> int:
        """Of the next token behind the prompt."""
        return len(self.new) + self.expected

    def uniform(self) -> float:
        """The number in [0, 1) by which the next token is drawn: of the seed and of its place."""
        digest = hashlib.blake2b(f"{self._seed} {self.place}".encode(), digest_size=8).digest()
        return (int.from_bytes(digest, "big") >> 11) * 2.0**-53

    def counts(self, vocabulary: int, device: torch.device) -> torch.Tensor:
        """How often each token occurs in the prompt and was generated: int32 [2, vocabulary], kept on the device.
        Ids of the prompt that the model cannot generate are left out."""
        if self._counts is None or self._counts.device != device:
            texts = (torch.tensor([*text], dtype=torch.int64) for text in (self.prompt, self.new))
            known = [text[text < vocabulary].bincount(minlength=vocabulary) for text in texts]
            self._counts = sent(torch.stack(known).int(), device)
        return self._counts

    def __getstate__(self):
        return self.__dict__ | {"_counts": None}


def packed_mask(allowed: torch.Tensor) -> torch.Tensor:
    """A bit a token: bool [vocabulary] -> int32 [vocabulary / 32, rounded up], lowest bit first."""
    bits = torch.nn.functional.pad(allowed.long(), (0, -len(allowed) % 32)).view(-1, 32)
    return (bits << torch.arange(32)).sum(-1).int()  # the highest bit is the sign's: int() keeps the lower 32


class Asked:
    """Next tokens that the device chooses.

    Attributes:
        tokens: [N] int64, on the device.
    """

    def __init__(self, tokens: torch.Tensor, table: torch.Tensor, counts: list[int | None]):
        self.tokens, self._counts, self._arrival = tokens, counts, None
        self._table = table
        if table.is_cuda:
            self._table = torch.empty(table.shape, dtype=table.dtype, pin_memory=True)
            self._table.copy_(table, non_blocking=True)
            self._arrival = torch.cuda.Event()
            self._arrival.record()

    def have_come(self) -> bool:
        """Whether `choices` would not wait."""
        return self._arrival is None or self._arrival.query()

    def choices(self) -> "list[Choice | ValueError]":
        """Of every row; what is wrong with its rules or its logits in place of it. Waits for the device."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return [_choice(row, count) for row, count in zip(self._table.tolist(), self._counts, strict=True)]


def ask(logits: torch.Tensor, samplers: Sequence[Sampler]) -> Asked:
    """The next token of every row of logits [N, vocabulary], by its sampler, without waiting for the device.

    Raises:
        ValueError: for rules that name unknown tokens. Nothing has changed then.
    """
    for sampler in samplers:
        if (refusal := sampler.sampling.refusal(logits.shape[-1])) is not None:
            raise ValueError(refusal)
    scores = _ruled(logits, samplers)
    best, tokens = scores.max(-1)
    drawn = [row for row, sampler in enumerate(samplers) if sampler.sampling.temperature > 0]
    if drawn:
        rows = sent(drawn, logits.device)
        tokens[rows] = _drawn(scores[rows].double(), [samplers[row] for row in drawn])
    table = torch.stack([tokens.double(), best.double()], 1)  # ids are exact in float64: one copy brings everything
    counts = [sampler.sampling.log_probabilities for sampler in samplers]
    asked = [row for row, count in enumerate(counts) if count is not None]
    if asked:
        rows = sent(asked, logits.device)
        width = min(max(counts[row] for row in asked), logits.shape[-1])
        report = _report(logits[rows].double(), tokens[rows], width)
        table = torch.nn.functional.pad(table, (0, report.shape[1]))
        table[rows, 2:] = report
    return Asked(tokens, table, counts)


def choose(logits: torch.Tensor, samplers: Sequence[Sampler]) -> list[Choice]:
    """The next token of every row of logits [N, vocabulary], by its sampler. The host waits for the device once.

    Raises:
        ValueError: for rules that name unknown tokens or allow none, and for logits that are not finite. Nothing has
            changed then: the other rows can be chosen again, with the same tokens.
    """
    found = ask(logits, samplers).choices()
    for choice in found:
        if isinstance(choice, ValueError):
            raise choice
    return found


def _ruled(logits: torch.Tensor, samplers: Sequence[Sampler]) -> torch.Tensor:
    """Scores [N, vocabulary] under the rules that come before the temperature: in float64, or the logits themselves
    where no row has one of these rules."""
    vocabulary, device = logits.shape[-1], logits.device
    rules = [sampler.sampling for sampler in samplers]
    biased = [(row, *item) for row, rule in enumerate(rules) for item in rule.logit_bias.items()]
    penalised = [row for row, rule in enumerate(rules) if rule.is_penalised]
    early = [row for row, sampler in enumerate(samplers) if sampler.place < rules[row].min_new_tokens]
    ends = [(row, end) for row in early for end in samplers[row].ends if end < vocabulary]
    masks = {row: rule.mask(samplers[row].new) for row, rule in enumerate(rules) if rule.mask}
    masks = {row: mask for row, mask in masks.items() if mask is not None}
    if not (biased or penalised or ends or masks):
        return logits
    scores = logits.to(torch.float64, copy=True)
    if biased:
        rows, tokens, values = zip(*biased, strict=True)
        scores[sent(rows, device), sent(tokens, device)] += sent(values, device, torch.float64)
    if penalised:
        rows = sent(penalised, device)
        counts = torch.stack([samplers[row].counts(vocabulary, device) for row in penalised])
        scores[rows] = _penalised(scores[rows], counts, [rules[row] for row in penalised])
    if ends:
        rows, tokens = zip(*ends, strict=True)
        scores[sent(rows, device), sent(tokens, device)] = -math.inf
    if masks:
        # tokens that a mask does not know, because the tokenizer has fewer than the model, are banned
        words = -(-vocabulary // 32)
        bits = torch.stack([torch.nn.functional.pad(mask, (0, words - len(mask))) for mask in masks.values()])
        bits = sent(bits, device)[:, :, None] >> torch.arange(32, dtype=torch.int32, device=device)
        rows, banned = sent([*masks], device), (bits & 1).flatten(1)[:, :vocabulary] == 0
        scores[rows] = scores[rows].masked_fill(banned, -math.inf)
    return scores


def _penalised(scores: torch.Tensor, counts: torch.Tensor, rules: list[Sampling]) -> torch.Tensor:
    """Scores [M, vocabulary] of rows with counts [M, 2, vocabulary] under their penalties."""
    numbers = [(rule.repetition_penalty, rule.presence_penalty, rule.frequency_penalty) for rule in rules]
    repetition, presence, frequency = sent([*zip(*numbers, strict=True)], scores.device, torch.float64)[:, :, None]
    repeated, generated = torch.where(scores < 0, scores * repetition, scores / repetition), counts[:, 1]
    scores = torch.where((counts > 0).any(1), repeated, scores)
    return scores - frequency * generated - presence * (generated > 0)


def _drawn(scores: torch.Tensor, samplers: list[Sampler]) -> torch.Tensor:
    """Tokens [M] of scores [M, vocabulary] in float64, each at the number of its sampler."""
    vocabulary = scores.shape[-1]
    rules = [sampler.sampling for sampler in samplers]
    numbers = [
        (rule.temperature, min(rule.top_k or vocabulary, vocabulary), rule.top_p, rule.min_p, sampler.uniform())
        for rule, sampler in zip(rules, samplers, strict=True)
    ]
    temperature, top_k, top_p, min_p, uniform = sent([*zip(*numbers, strict=True)], scores.device, torch.float64)[
        :, :, None
    ]
    scores, order = scores.sort(stable=True)
    scores = (scores - scores[:, -1:]) / temperature  # cannot overflow, however low the temperature
    weights = scores.exp()
    whole = (weights * 2.0 ** (62 - vocabulary.bit_length())).round().long()
    sums = torch.nn.functional.pad(whole.cumsum(-1), (1, 0))  # [M, V + 1]: of the i least likely tokens
    total = sums[:, -1:]
    left_out = torch.searchsorted(scores, scores.gather(1, vocabulary - top_k.long()))
    below = sums.gather(1, left_out)
    below += ((1 - top_p) * (total - below)).long()
    left_out = torch.maximum(left_out, torch.searchsorted(sums, below, right=True) - 1)
    left_out = torch.maximum(left_out, torch.searchsorted(weights, min_p)).clamp(max=vocabulary - 1)
    below = sums.gather(1, left_out)
    target = torch.minimum(below + (uniform * (total - below)).long(), total - 1)
    place = (torch.searchsorted(sums, target, right=True) - 1).clamp(0, vocabulary - 1)  # if there is nothing to draw
    return order.gather(1, place)[:, 0]


def _report(logits: torch.Tensor, tokens: torch.Tensor, count: int) -> torch.Tensor:
    """Of logits [M, vocabulary] in float64: the log-probabilities of tokens [M], then the `count` highest ones, then
    their ids; [M, 1 + 2 count]."""
    found = logits.log_softmax(-1)
    report = [found.gather(1, tokens[:, None])]
    if count:
        # sorted and not selected: which of equals are reported must not depend on how many another row asks for
        top, order = found.sort(descending=True, stable=True)
        report += [top[:, :count], order[:, :count].double()]
    return torch.cat(report, 1)


def _choice(row: list[float], count: int | None) -> Choice | ValueError:
    """What a row of the table says: token, highest score and, where `count` is given, a report."""
    token, best, *report = row
    if best == -math.inf:
        return ValueError("no token may come next: the mask and min_new_tokens ban all of them")
    if not math.isfinite(best):
        return ValueError("the model's logits are not finite")
    if count is None:
        return Choice(int(token))
    width = len(report) // 2
    ids = map(int, report[1 + width :][:count])
    return Choice(int(token), report[0], tuple(zip(ids, report[1 : 1 + width][:count], strict=True)))
