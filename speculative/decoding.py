"""Speculative decoding with a DSpark-style draft: draft a block, verify it in one forward, keep what is accepted.

The target verifies all tokens of a block in one multi-token pass; `HybridCache.crop` then rebuilds the recurrent states
from the tokens that stay. Greedy text is that of plain greedy decoding, and sampled text has the target's distribution:
a drafted token x is accepted with probability min(1, p(x) / q(x)), else one is drawn from max(p - q, 0) normalised
(Leviathan et al., arXiv 2211.17192).
"""

from dataclasses import dataclass

import torch

from ..cache_kimi_k3 import HybridCache
from ..modeling_kimi_k3 import CACHE_ARGUMENT
from .draft import DSparkDraft

# A block ends before a token that is reached with less than this probability: verifying it costs more than it gains.
LEAST_CONFIDENCE = 0.3


@dataclass
class Speculated:
    """`ids` [1, T + new]; the numbers of verification rounds, of tokens drafted and of those accepted."""

    ids: torch.Tensor
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0


def probabilities(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """[..., V] float32 on the CPU, where the generator draws."""
    return torch.softmax(logits.float() / temperature, dim=-1).cpu()


def accept(drafted: list[int], q: list[torch.Tensor], p: torch.Tensor, generator=None) -> tuple[int, int]:
    """(how many of the drafted tokens stay, the token after them).

    Args:
        q: n distributions [V] from which the tokens were drawn.
        p: [n + 1, V], the target's distributions behind each prefix of them.
    """
    for i, token in enumerate(drafted):
        if torch.rand((), generator=generator) * q[i][token] < p[i, token]:
            continue
        rest = (p[i] - q[i]).clamp_min(0)
        return i, _draw(rest / rest.sum(), generator)
    return len(drafted), _draw(p[len(drafted)], generator)


def accept_greedy(drafted: list[int], best: list[int]) -> tuple[int, int]:
    """`accept` for greedy decoding: `best` are the target's n + 1 choices, one behind each prefix."""
    kept = next((i for i, token in enumerate(drafted) if token != best[i]), len(drafted))
    return kept, best[kept]


def _draw(distribution: torch.Tensor, generator) -> int:
    return int(torch.multinomial(distribution, 1, generator=generator))


class _Drafting:
    """The draft's context, and the blocks it proposes."""

    def __init__(self, draft: DSparkDraft, lm_head: torch.nn.Module, temperature: float, generator):
        self.draft, self.lm_head, self.temperature, self.generator = draft, lm_head, temperature, generator
        self.latents: list[torch.Tensor] = []
        self.tokens = 0

    def extend(self, taps: torch.Tensor) -> None:
        """Take in the `taps` of tokens that the target has read since."""
        new = self.draft.context(taps, self.tokens)
        self.latents = [torch.cat(pair, dim=1) for pair in zip(self.latents, new, strict=True)] if self.tokens else new
        self.tokens += taps.shape[1]

    def propose(self, newest: int, most: int) -> tuple[list[int], list[torch.Tensor]]:
        """At most `most` tokens behind `newest`, and the distributions [V] that they were drawn from, none at
        temperature 0."""
        draft, device = self.draft, self.latents[0].device
        drawn, distributions, sure = [], [], 1.0
        most = min(most, draft.config.block_size)
        if most == 0:
            return drawn, distributions
        before = torch.tensor([[newest]], device=device)
        positions = torch.arange(self.tokens, self.tokens + draft.config.block_size, device=device)
        hidden = draft.block(before, positions, self.latents)[0, :most]
        logits, before = self.lm_head(hidden), before[0, 0]
        for i in range(most):
            sure *= torch.sigmoid(draft.confidence(hidden[i], before)).item()
            if sure < LEAST_CONFIDENCE:
                break
            behind = logits[i] + draft.bias(before)
            if self.temperature == 0:
                before = behind.argmax()
                drawn.append(before.item())
            else:
                distributions.append(probabilities(behind, self.temperature))
                drawn.append(_draw(distributions[-1], self.generator))
                before = torch.tensor(drawn[-1], device=device)
        return drawn, distributions


@torch.no_grad()
def speculative_generate(
    model: torch.nn.Module,
    draft: DSparkDraft,
    input_ids: torch.Tensor,
    max_new_tokens: int,
    temperature: float = 0.0,
    eos_token_id: int | None = None,
    generator: torch.Generator | None = None,
) -> Speculated:
    """Continue one row [1, T] with at most `max_new_tokens`, up to and with `eos_token_id`.

    Args:
        generator: of the CPU, for sampling.

    Raises:
        ValueError: for several rows, no tokens, or numbers out of range.
    """
    if input_ids.dim() != 2 or input_ids.shape[0] != 1 or input_ids.shape[1] < 1:
        raise ValueError(f"speculative decoding takes one row of tokens [1, T], but got {tuple(input_ids.shape)}")
    if max_new_tokens < 1 or not 0 <= temperature < float("inf"):
        raise ValueError("max_new_tokens is at least 1, temperature a number of at least 0")
    cache = HybridCache(model.config)
    drafting = _Drafting(draft, model.get_output_embeddings(), temperature, generator)

    def run(ids, keep):
        out = model(ids, logits_to_keep=keep, output_hidden_states=True, **{CACHE_ARGUMENT: cache})
        return out.logits[0], draft.taps(out.hidden_states)

    def judge(drawn, q, logits):
        if temperature == 0:
            return accept_greedy(drawn, logits.argmax(-1).tolist())
        return accept(drawn, q, probabilities(logits, temperature), generator)

    logits, taps = run(input_ids, 1)
    drafting.extend(taps)
    _, newest = judge([], [], logits)
    result, found = Speculated(input_ids), [newest]
    cache.activate_past_recording()
    while len(found) < max_new_tokens and newest != eos_token_id:
        drawn, q = drafting.propose(newest, max_new_tokens - len(found) - 1)
        logits, taps = run(torch.tensor([[newest, *drawn]], device=input_ids.device), 0)
        kept, newest = judge(drawn, q, logits)
        cache.crop(kept - len(drawn))
        drafting.extend(taps[:, : kept + 1])
        result.rounds += 1
        result.drafted += len(drawn)
        result.accepted += kept
        new = [*drawn[:kept], newest]
        if eos_token_id in new:
            new = new[: new.index(eos_token_id) + 1]
            newest = eos_token_id
        found += new
    result.ids = torch.cat([input_ids, torch.tensor([found], device=input_ids.device)], dim=1)
    return result
