"""What reads the prompts of a unit and answers them: a model of transformers.

All prompts of a batch have the same number of tokens, so that no row is ever padded. What the questions of one text
share is read once; each question then continues from a copy of the cache.
"""

import copy

import torch

from .. import CACHE_ARGUMENT, HybridCache
from ..fingerprint_kimi_k3 import model_fingerprint
from .memory import PeakMemory
from .sizing import EvalError, Prompt, Tokens
from .suite import Task, answer_room

TOKENS_AT_ONCE = 32_768  # of a batch whose size is chosen by itself
PROBE = "The grass is green. The sky is blue. The sun is yellow. Here we go."


def rows_at_once(batch: int | None, length: int) -> int:
    """Rows of a forward: those asked for, or as many as `TOKENS_AT_ONCE` allows."""
    return batch or max(TOKENS_AT_ONCE // length, 1)


class ModelReader:
    """Greedy answers of a causal language model.

    Args:
        model: any `AutoModelForCausalLM` with a cache, in evaluation mode.
        tokens: its tokenizer.
        chunk: tokens of a prompt that one forward reads; the memory of a long prompt is its cache and one chunk.
        batch: rows of a forward; None chooses by length.

    Raises:
        EvalError: for a model whose cache cannot be continued by several tokens at once, such as Mamba's in
            transformers 5.24.
    """

    def __init__(self, model: torch.nn.Module, tokens: Tokens, chunk: int = 4096, batch: int | None = None):
        self.model, self.tokens, self.chunk, self.batch = model, tokens, chunk, batch
        self.memory: dict[int, dict] = {}  # on a GPU with a HybridCache: by length, what `PeakMemory.line` says
        self._peak, self._cache_bytes = PeakMemory(model), 0
        ends = getattr(model.generation_config, "eos_token_id", None)
        self.ends = {tokens.eos, *(ends if isinstance(ends, list) else [ends])} - {None}
        self._check_cache()

    @torch.no_grad()
    def _check_cache(self) -> None:
        """A text in two parts must give the logits of the whole, and not those of its second part alone."""
        ids = self._tensor([self.tokens.ids(PROBE)])
        half = ids.shape[1] // 2
        whole, alone = (
            self.model(input_ids=part, logits_to_keep=1).logits[:, -1].float() for part in (ids, ids[:, half:])
        )
        output = self.model(input_ids=ids[:, :half], use_cache=True, logits_to_keep=1)
        name = type(self.model).__name__
        if output.get(CACHE_ARGUMENT) is None:
            raise EvalError(f"{name} returns no {CACHE_ARGUMENT}: texts are read in parts, which takes a cache")
        parts = self._forward(ids[:, half:], output[CACHE_ARGUMENT])[1].float()
        error, forgotten = ((whole - logits).norm().item() for logits in (parts, alone))
        if error > max(0.5 * forgotten, 0.05 * (whole - whole.mean()).norm().item()):
            raise EvalError(
                f"the cache of {name} forgets what was read when several tokens follow: no text can be shared"
            )

    def _tensor(self, ids):
        """Token ids on the model's device.

        Raises:
            EvalError: for ids that the model has no embedding of.
        """
        ids, rows = torch.tensor(ids), self.model.get_input_embeddings().weight.shape[0]
        if ids.max() >= rows:
            raise EvalError(
                f"the tokenizer makes the id {ids.max()} and the model knows {rows}: they do not belong together"
            )
        return ids.to(self.model.device)

    def fingerprint(self) -> str:
        """Hex digest of the weights, the output layer and the computation that the config names."""
        return model_fingerprint(self.model, with_head=True)

    def units_at_once(self, length: int, questions: int) -> int:
        """How many texts of `length` tokens, with `questions` questions each, go into one call of `answers`."""
        return max(rows_at_once(self.batch, length) // questions, 1)

    @torch.no_grad()
    def answers(self, task: Task, units: list[list[Prompt]]) -> list[list[str]]:
        """Answers [unit][question].

        Args:
            task: of all units.
            units: prompts of one length, the same number for each unit.

        Raises:
            EvalError: for tokens or a length that the model cannot read.
        """
        ids = self._tensor([[prompt.ids for prompt in prompts] for prompts in units])
        length = ids.shape[2]
        self._peak.start()
        self._cache_bytes = 0
        try:
            texts = self._answers(task, units, ids)
        except IndexError as error:  # of a table of positions, on a CPU
            raise EvalError(f"{type(self.model).__name__} cannot read {length} tokens: {error}") from error
        line = self._peak.line(self._cache_bytes) if self._cache_bytes else {}
        if line.get("peak_bytes", 0) > self.memory.get(length, {}).get("peak_bytes", 0):
            self.memory[length] = line
        return texts

    def _answers(self, task, units, ids):
        count, questions, length = ids.shape
        shared = length if questions == 1 else min(_shared(rows) for rows in ids)
        columns = length + max(answer_room(prompt, task, self.tokens) for prompts in units for prompt in prompts)
        cache, logits = self._read(ids[:, 0, :shared], None, columns)
        if questions == 1:
            return [[text] for text in self._decode([prompts[0] for prompts in units], task, cache, logits)]
        together = min(max(rows_at_once(self.batch, length) // count, 1), questions)
        if not all(hasattr(layer, "batch_repeat_interleave") for layer in cache.layers):
            together = 1
        answered = [[] for _ in units]
        for first in range(0, questions, together):
            group = ids[:, first : first + together]
            last = first + together >= questions
            branch = cache if last else _copy(cache)
            if group.shape[1] > 1:
                branch.batch_repeat_interleave(group.shape[1])
            prompts = [prompt for unit in units for prompt in unit[first : first + together]]
            branch, logits = self._read(group[:, :, shared:].flatten(0, 1), branch, columns)
            texts = self._decode(prompts, task, branch, logits)
            for row, unit in enumerate(answered):
                unit += texts[row * group.shape[1] : (row + 1) * group.shape[1]]
            del branch
        return answered

    def _forward(self, ids, cache):
        known = {} if cache is None else {CACHE_ARGUMENT: cache}
        with self._peak.forward():
            output = self.model(input_ids=ids, use_cache=True, logits_to_keep=1, **known)
        if isinstance(output[CACHE_ARGUMENT], HybridCache):
            self._cache_bytes = max(self._cache_bytes, output[CACHE_ARGUMENT].nbytes)
        return output[CACHE_ARGUMENT], output.logits[:, -1]

    def _read(self, ids, cache, columns):
        """[rows, T] -> the cache after them, with room for `columns`, and the logits [rows, vocab] of what follows."""
        for part in ids.split(self.chunk, dim=1):
            cache, logits = self._forward(part, cache)
            if isinstance(cache, HybridCache):
                cache.reserve(columns)
        return cache, logits

    def _decode(self, prompts, task, cache, logits):
        """The greedy continuations, each cut at an end token, at its room, or where it has named all answers."""
        rooms = [answer_room(prompt, task, self.tokens) for prompt in prompts]
        written, running = [[] for _ in prompts], set(range(len(prompts)))
        texts = [""] * len(prompts)
        while running:
            chosen = logits.argmax(-1)
            for row, token in enumerate(chosen.tolist()):
                if row not in running:
                    continue
                if token not in self.ends:
                    written[row].append(token)
                    texts[row] = self.tokens.text(written[row])
                finished = task.finished(texts[row], prompts[row].question.answers)
                if token in self.ends or finished or len(written[row]) == rooms[row]:
                    running.remove(row)
            if running:
                cache, logits = self._forward(chosen[:, None], cache)
        return texts


def _shared(rows: torch.Tensor) -> int:
    """How many first tokens the rows [questions, T] have in common; each row keeps at least its last token."""
    same = (rows == rows[:1]).all(0)
    return min(int(same.long().cumprod(0).sum()), rows.shape[1] - 1)


def _copy(cache):
    return cache.snapshot() if isinstance(cache, HybridCache) else copy.deepcopy(cache)
