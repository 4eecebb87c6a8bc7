"""The recall tasks as documents for lm-eval: the prompts and scores of `kimi-k3 eval`, asked by the harness."""

import functools

import datasets
from transformers import AutoTokenizer

from kimi_k3.eval import TASKS, Plan, Tokens, open_haystack, parse_length


def documents(task, pretrained=None, tokenizer=None, length=4096, samples=10, depths=5, seed=0, haystack="repeat", **_):
    """{"test": documents} of one task; the harness passes its model arguments and those of `--metadata`.

    Args:
        task: name in `TASKS`.
        pretrained, tokenizer: folder with the tokenizer; `tokenizer` goes first.
        length: tokens of a prompt, a number or "4k".
        samples, depths, seed: as in `Plan`.
        haystack: "repeat", "noise" or the path of a text file.
    """
    tokens = Tokens(AutoTokenizer.from_pretrained(tokenizer or pretrained, trust_remote_code=False))
    filler = open_haystack([haystack], tokens)
    units = Plan((task,), (parse_length(str(length)),), depths, samples, seed).units()
    prompts = [prompt for unit in units for prompt in unit.prompts(seed, filler, tokens)]
    rows = [{"task": task, "prompt": p.text, "answers": list(p.question.answers)} for p in prompts]
    return {"test": datasets.Dataset.from_list(rows, split=datasets.Split.TEST)}


def process_results(doc, results):
    return {"recall": TASKS[doc["task"]].score(results[0], tuple(doc["answers"]))}


globals().update({name: functools.partial(documents, name) for name in TASKS})
