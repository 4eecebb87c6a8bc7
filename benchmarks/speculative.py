"""Decoding of the small checkpoint with a draft against decoding without one; greedy text is equal token for token.

    python -m kimi_k3.speculative.training --text .data/train.txt --out draft
    python benchmarks/speculative.py --draft draft [--dequantize] [--tokens 128]

Three kinds of text: greedy continuations of passages that neither the checkpoint nor the draft was trained on (from
documents that recipes/small/corpus.py holds out), samples of the same at temperature 1, and answers to questions about
facts. The plain loop only runs forwards with a cache, without what `generate` does around them. Reading the prompt is
part of both times.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).parent))

from host_facts import host_facts

from kimi_k3 import CACHE_ARGUMENT, HybridCache, KimiK3ForCausalLM
from kimi_k3.demo import QUESTION
from kimi_k3.eval.words import HELD_OUT_NAMES
from kimi_k3.speculative.decoding import speculative_generate
from kimi_k3.speculative.draft import DSparkDraft

ROOT = Path(__file__).parent.parent
PROMPTS = [
    "On the ocean the pride of our naval arms had been amply supported. A second frigate has indeed "
    "fallen into the hands of the enemy, but the loss is hidden in the blaze of heroism with which she "
    "was defended. Captain Porter, who",
    "Privileges like these would render the possession of such securities to the amount limited most "
    "desirable to every person of small means who might be able to save enough for the purpose. The great"
    " advantage of citizens being",
    "There is another matter of which I must make special mention, if I am to discharge my conscience, "
    "lest it should escape your attention. It may seem a very small thing. It affects only a single item "
    "of appropriation. But many",
    "The rest of the gentlemen being now in the room, Emma found herself obliged to turn from him for a "
    "few minutes, and listen to Mr. Cole. When Mr. Cole had moved away, and her attention could be "
    "restored as before, she saw Frank",
    "He had expected a very different son-in-law; and beginning to feel grave on Maria's account, tried "
    "to understand her feelings. Little observation there was necessary to tell him that indifference was"
    " the most favourable state",
    '"No," replied Jane, "I have not forgotten him; but I have nothing satisfactory to tell you. Mr. '
    "Bingley does not know the whole of his history, and is quite ignorant of the circumstances which "
    "have principally offended Mr. Darcy;",
    "With memories like these in him, and, moreover, given to a certain superstitiousness, as has been "
    "said; the courage of this Starbuck which could, nevertheless, still flourish, must indeed have been "
    "extreme. But it was not in",
    "The life-buoy--a long slender cask--was dropped from the stern, where it always hung obedient to a "
    "cunning spring; but no hand rose to seize it, and the sun having long beat upon this cask it had "
    "shrunken, so that it slowly",
]

ANSWER = 7  # tokens: the space, five digits, the full stop


def questions() -> list[str]:
    """Eight prompts: as many facts about people whom no training named, and a question about one of them."""
    numbers = {name: 10007 + 11113 * i for i, name in enumerate(HELD_OUT_NAMES[:8])}
    facts = " ".join(f"The secret number of {name} is {number}." for name, number in numbers.items())
    return [facts + QUESTION.format(name=name) for name in numbers]


@torch.no_grad()
def plain(model, ids, count, temperature, generator):
    cache = HybridCache(model.config)
    new = ids
    for _ in range(count):
        logits = model(new, logits_to_keep=1, **{CACHE_ARGUMENT: cache}).logits[:, -1]
        if temperature == 0:
            new = logits.argmax(-1, keepdim=True)
        else:
            new = torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=generator)
        ids = torch.cat([ids, new], dim=1)
    return ids


def measure(model, draft, prompts, count, temperature, repeats):
    """The shortest times over all prompts, in ms a token, and how the draft did."""
    total = {"ours_ms": 0.0, "peer_ms": 0.0}
    rounds = drafted = accepted = 0
    for ids in prompts:
        best = dict.fromkeys(total, float("inf"))
        for repeat in range(repeats):
            drawn = [torch.Generator().manual_seed(repeat) for _ in range(2)]
            started = time.perf_counter()
            expected = plain(model, ids, count, temperature, drawn[0])
            middle = time.perf_counter()
            result = speculative_generate(model, draft, ids, count, temperature, generator=drawn[1])
            ended = time.perf_counter()
            assert temperature > 0 or torch.equal(result.ids, expected), ids
            best["peer_ms"] = min(best["peer_ms"], middle - started)
            best["ours_ms"] = min(best["ours_ms"], ended - middle)
            rounds, drafted, accepted = rounds + result.rounds, drafted + result.drafted, accepted + result.accepted
        for name in total:
            total[name] += best[name]
    return {name: round(1e3 * seconds / count / len(prompts), 2) for name, seconds in total.items()} | {
        "tokens_a_round": round(accepted / rounds + 1, 3),
        "accepted_share": round(accepted / max(drafted, 1), 3),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draft", type=Path, required=True, help="folder that kimi_k3.speculative.training wrote")
    parser.add_argument("--dequantize", action="store_true", help="unpack the MXFP4 experts when loading")
    parser.add_argument("--tokens", type=int, default=128, help="of a continuation")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    folder = ROOT / "checkpoints" / "small"
    model = KimiK3ForCausalLM.from_pretrained(folder, dtype=torch.float32, dequantize=options.dequantize).eval()
    draft = DSparkDraft.load(options.draft, model)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    experts = "float" if options.dequantize else "packed"
    for name, prompts, count, temperature in (
        (f"greedy decoding of {options.tokens} tokens", PROMPTS, options.tokens, 0.0),
        (f"sampling of {options.tokens} tokens at temperature 1", PROMPTS, options.tokens, 1.0),
        (f"answers of {ANSWER} tokens", questions(), ANSWER, 0.0),
    ):
        ids = [tokenizer(prompt, return_tensors="pt").input_ids for prompt in prompts]
        measured = measure(model, draft, ids, count, temperature, options.repeats)
        line = {
            "case": f"{name} with a draft, a token, {experts} experts, CPU",
            "ours_ms": measured.pop("ours_ms"),
            "peer": "without a draft",
            "peer_ms": measured.pop("peer_ms"),
            "roofline_ms": None,
            **host_facts(),
            **measured,
        }
        with (ROOT / "benchmarks" / "results" / "speculative.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(
            f"{line['case']}: {line['ours_ms']} ms, without {line['peer_ms']}, "
            f"{line['peer_ms'] / line['ours_ms']:.2f}x; {line['tokens_a_round']} tokens a round, "
            f"{100 * line['accepted_share']:.0f} % of what was drafted accepted"
        )


if __name__ == "__main__":
    main()
