"""Log-probabilities of a prompt's own tokens, from the forwards that read it.

What a forward leaves of token t says how likely token t + 1 was, and that one is known in a prompt: a chunk of it
scores the token behind each of its own. Nothing has to be carried from one chunk to the next.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from .sampling import Choice

ROWS = 128  # of logits at a time: in float64, those of a large vocabulary are 1.3 MB each


@dataclass
class Scored:
    """What one forward is to say of one sequence.

    Attributes:
        start: of the first of `targets` in its text.
        targets: tokens that follow those which are fed, one each.
        count: of the highest log-probabilities that are reported beside a token's own.
        choices: of every target, once the forward has run.
    """

    start: int
    targets: list[int]
    count: int
    choices: list[Choice] = field(default_factory=list)

    def fill(self, logits_of: Callable[[int, int], torch.Tensor], first: int) -> None:
        """
        Args:
            logits_of: called with two places a <= b in the forward, returns the logits [b - a, vocabulary] of these.
            first: place of the sequence's first token.
        """
        for start in range(0, len(self.targets), ROWS):
            part = self.targets[start : start + ROWS]
            logits = logits_of(first + start, first + start + len(part))
            found = logits.double().log_softmax(-1)
            own = found.gather(1, torch.tensor(part, device=found.device)[:, None])
            top, tokens = found.topk(min(self.count, found.shape[1]))
            for target, (value, *values), ids in zip(
                part, torch.cat([own, top], 1).tolist(), tokens.tolist(), strict=True
            ):
                self.choices.append(Choice(target, value, tuple(zip(ids, values, strict=True))))
