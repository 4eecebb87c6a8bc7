"""A folder of a tiny model whose tokenizer reads bytes, as the commands take it."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import tiny

POSITIONS = 640


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, so that any text has as many tokens as bytes; id 0 ends a text."""
    alphabet = ["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def save_checkpoint(folder, **changes):
    """Write a random two-layer model (one KDA, one MLA layer) with a tokenizer; `changes` are config keys."""
    ids = {"vocab_size": 257, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": None}
    tiny.model("km", max_position_embeddings=POSITIONS, **(ids | changes)).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder
