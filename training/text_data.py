"""Local text as packed rows: files -> documents -> token ids -> rows of whole documents, streamed.

A row holds documents end to end, without padding, and says where each starts, so that the model keeps them apart
exactly. The position in the stream is two numbers and the rest of the last document: a run that was killed continues
with the row that it would have seen.
"""

import contextlib
from pathlib import Path

import torch
import torch.nn.functional as F
from datasets import load_dataset

from ..kernels.cross_entropy import IGNORED
from ..packing_kimi_k3 import fixed_packing

# file ending -> (builder of `datasets`, its options); the text is in the column `text`
FORMATS = {
    ".txt": ("text", {"sample_by": "document"}),
    ".jsonl": ("json", {}),
    ".parquet": ("parquet", {}),
}
SHUFFLED = 10_000  # documents that are shuffled together
LENGTHS = 8  # of filled rows, that differ


class DataError(ValueError):
    """Data that cannot be trained on; the text is one sentence."""


@contextlib.contextmanager
def _readable():
    """Turns what `datasets` raises for a file that is not what its name says into one sentence; error types vary."""
    try:
        yield
    except Exception as error:
        reason = str(error.__cause__ or error).strip().partition("\n")[0]
        raise DataError(f"the data files cannot be read: {reason}") from error


class PackedRows:
    """An endless stream of packed rows over the documents of `files`; every epoch has an order of its own.

    Args:
        files: .txt (a file is one document), .jsonl and .parquet (a row is one, its text in `text`), all of one kind.
        tokenizer: of transformers; a document ends with its end-of-text token.
        context: tokens in a row, at most; at least 2.
        vocab_size: of the model; a token id outside is an error.
        seed: of the order.
        split_long: cut documents that are longer than `context` into pieces instead of refusing them.
    """

    def __init__(self, files: list[Path], tokenizer, context: int, vocab_size: int, seed: int, split_long: bool):
        if context < 2:
            raise DataError(f"a row of context {context} has nothing to predict: it must be at least 2")
        kinds = {file.suffix for file in files}
        if len(kinds) != 1 or not kinds <= set(FORMATS):
            raise DataError(f"data files must all be of one kind, {', '.join(FORMATS)}, not {', '.join(sorted(kinds))}")
        for file in files:
            if not file.is_file():
                raise DataError(f"there is no file {file}")
            if file.stat().st_size == 0:
                raise DataError(f"{file} is empty")
        if tokenizer.eos_token_id is None:
            raise DataError("the tokenizer has no end-of-text token (eos_token) to end a document with")
        builder, options = FORMATS[kinds.pop()]
        names = [str(file) for file in files]
        with _readable():
            stream = load_dataset(builder, data_files=names, split="train", streaming=True, **options)
        self.stream = stream.shuffle(seed=seed, buffer_size=SHUFFLED)
        self.tokenizer, self.context, self.vocab_size, self.split_long = tokenizer, context, vocab_size, split_long
        self.load_state_dict({"epoch": 0, "taken": 0, "pending": []})

    def state_dict(self) -> dict:
        return {"epoch": self.epoch, "taken": self.taken, "pending": list(self.pending)}

    def load_state_dict(self, state: dict) -> None:
        self.epoch, self.taken, self.pending = state["epoch"], state["taken"], list(state["pending"])
        self._texts = self._read_texts()

    def _read_texts(self):
        """The texts of the documents behind those that are taken, epoch after epoch."""
        while True:
            self.stream.set_epoch(self.epoch)
            documents = iter(self.stream)
            for _ in range(self.taken):  # for a run that continues; `skip` would not follow the shuffled order
                if next(documents, None) is None:
                    raise DataError(f"the data files have changed: the run has read {self.taken} documents of them")
            while True:
                with _readable():
                    document = next(documents, None)
                if document is None:
                    break
                self.taken += 1
                if not isinstance(document.get("text"), str):
                    raise DataError(f"document {self.taken} has no `text`, only {', '.join(sorted(document))}")
                yield document["text"]
            if self.taken == 0:
                raise DataError("the data files hold no documents")
            self.epoch, self.taken = self.epoch + 1, 0

    def _next_pieces(self):
        """Token ids of the next document that has a token to predict, in pieces that fit into a row."""
        started = self.epoch
        while True:
            ids = self.tokenizer(next(self._texts), verbose=False).input_ids
            if not ids or ids[-1] != self.tokenizer.eos_token_id:
                ids = [*ids, self.tokenizer.eos_token_id]
            if max(ids) >= self.vocab_size:
                raise DataError(
                    f"the tokenizer gives the token id {max(ids)}, but the model's vocab_size is {self.vocab_size}"
                )
            if len(ids) > self.context and not self.split_long:
                raise DataError(
                    f"document {self.taken} of the shuffled stream has {len(ids)} tokens, the context {self.context}: "
                    "raise --context, or cut long documents with --split-long"
                )
            pieces = [ids[start : start + self.context] for start in range(0, len(ids), self.context)]
            pieces = [piece for piece in pieces if len(piece) > 1]
            if pieces:
                return pieces
            if self.epoch - started > 1:
                raise DataError("the data files hold no document of more than one token")

    def next_row(self) -> dict[str, torch.Tensor]:
        """`input_ids` and `position_ids` [1, T], T at most the context, and `targets` [T]: the next token within the
        document, -100 at its end."""
        documents, room = [], self.context
        while room > 1:
            if not self.pending:
                self.pending = self._next_pieces()
            if len(self.pending[0]) > room:
                break
            documents.append(torch.tensor(self.pending.pop(0)))
            room -= len(documents[-1])
        end = torch.tensor([IGNORED])
        return {
            "input_ids": torch.cat(documents)[None],
            "position_ids": torch.cat([torch.arange(len(document)) for document in documents])[None],
            "targets": torch.cat([part for document in documents for part in (document[1:], end)]),
        }


def filled_row(row: dict[str, torch.Tensor], context: int) -> dict[str, torch.Tensor]:
    """A row of `PackedRows` in one of a few shapes, filled up with padding, so that steps on it can be captured.

    Returns:
        `input_ids` [1, T] and `targets` [T], of its packing `cu_seqlens`, `documents` and `padding`, and what else the
        row has.
    """
    tokens, starts = row["input_ids"].shape[1], (row["position_ids"][0] == 0).nonzero().flatten()
    lengths = torch.cat([starts, torch.tensor([tokens])]).diff()
    steps = -(-context // (64 * LENGTHS)) * 64
    packing = fixed_packing(lengths, -(-tokens // steps) * steps, max(8, 1 << len(lengths).bit_length()))
    fill = 0, packing.documents.shape[1] - tokens
    rest = {name: x for name, x in row.items() if name != "position_ids"}
    return rest | {
        "input_ids": F.pad(row["input_ids"], fill),
        "targets": F.pad(row["targets"], fill, value=IGNORED),
        "cu_seqlens": packing.cu_seqlens,
        "documents": packing.documents,
        "padding": packing.padding,
    }
