"""`kimi-k3 generate`: a continuation, what it cost, and the size of its cache."""

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import TextStreamer
from transformers.generation import BaseStreamer

from .. import CACHE_ARGUMENT, HybridCache, KimiK3ForCausalLM, KimiK3TextConfig
from ..runs_kimi_k3 import keeping
from .common import (
    UsageError,
    add_seed,
    at_least_one,
    check_ids,
    choose_device,
    encode,
    load_model,
    load_tokenizer,
    number,
    read_config,
)

# --- generating and measuring ----------------------------------------------------------------------------------------


class TimedStreamer(BaseStreamer):
    """Notes when the prompt and each new token arrive, and passes them on to `text` if there is one."""

    def __init__(self, text: TextStreamer | None = None):
        self.text = text
        self.times = []

    def put(self, value):
        self.times.append(time.perf_counter())
        if self.text is not None:
            self.text.put(value)

    def end(self):
        if self.text is not None:
            self.text.end()


@dataclass
class Generation:
    """One generated continuation and what it cost.

    `prompt_tokens` counts the tokens that this call processed, without those that were in the cache. The prefill
    gives the first new token, so the decoding time belongs to the other `new_tokens - 1`.
    """

    text: str
    prompt_tokens: int
    new_tokens: int
    prefill_seconds: float
    decode_seconds: float
    cache: HybridCache


def generate_text(
    model: KimiK3ForCausalLM,
    tokenizer,
    input_ids: torch.Tensor,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    cache: HybridCache | None = None,
    stream: bool = True,
) -> Generation:
    """Continue `input_ids` [1, T], greedily at temperature 0; with `stream`, print the text while it comes.

    A `cache` that holds the first tokens of `input_ids` is continued in place.
    """
    cache = HybridCache(model.config) if cache is None else cache
    known = cache.get_seq_length()
    streamer = TimedStreamer(TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True) if stream else None)

    def printed():
        streamer.end()  # which prints the word that was not finished
        tokens = max(len(streamer.times) - 1, 0)  # without the prompt
        return f"{tokens} new tokens are printed above: to go on, put them behind the prompt"

    # top_k=0 switches off the cut at 50 that generation defaults carry; greedy decoding warns about all three.
    sampling = {"temperature": temperature, "top_p": top_p, "top_k": 0} if temperature > 0 else {}
    input_ids = input_ids.to(model.device)
    with keeping(printed if stream else ""):
        output = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=max_new_tokens,
            do_sample=temperature > 0,
            streamer=streamer,
            **sampling,
            **{CACHE_ARGUMENT: cache},
        )
    new_ids = output[0, input_ids.shape[1] :]
    return Generation(
        text=tokenizer.decode(new_ids, skip_special_tokens=True),
        prompt_tokens=input_ids.shape[1] - known,
        new_tokens=len(new_ids),
        prefill_seconds=streamer.times[1] - streamer.times[0],
        decode_seconds=streamer.times[-1] - streamer.times[1],
        cache=cache,
    )


def check_length(config: KimiK3TextConfig, prompt_tokens: int, max_new_tokens: int) -> None:
    """Refuse a request that exceeds the positions for which the model was configured."""
    limit = config.max_position_embeddings
    if prompt_tokens + max_new_tokens > limit:
        raise UsageError(
            f"the prompt has {prompt_tokens} tokens and {max_new_tokens} new ones are asked for, "
            f"but the model's max_position_embeddings is {limit}"
        )


def full_attention_bytes(config: KimiK3TextConfig, tokens: int, dtype: torch.dtype) -> int:
    """Bytes that a K/V cache would take if every layer were full attention with the MLA head sizes.

        layers * heads * (qk_head_dim + v_head_dim) * tokens * bytes per element

    With qk_head_dim = v_head_dim = head_dim this is the usual 2 * layers * heads * head_dim * tokens * bytes. Keys and
    values are counted per head, as attention uses them, not as the compressed latent that MLA stores.
    """
    head_elements = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    return config.num_hidden_layers * config.num_attention_heads * head_elements * tokens * dtype.itemsize


def report(model: KimiK3ForCausalLM, generation: Generation) -> str:
    """Speed of a generation and the size of its cache, as lines to print."""
    lines = [speed("prefill", generation.prompt_tokens, generation.prefill_seconds)]
    if generation.new_tokens > 1:
        lines.append(speed("decode", generation.new_tokens - 1, generation.decode_seconds))
    tokens, size = generation.cache.get_seq_length(), generation.cache.nbytes
    full = full_attention_bytes(model.config, tokens, model.dtype)
    lines.append(f"cache    {size:,} bytes for {tokens:,} tokens")
    lines.append(f"         {full:,} bytes in a full-attention K/V cache of the same model ({full / size:.1f} times)")
    return "\n".join(lines)


def speed(phase: str, tokens: int, seconds: float) -> str:
    return f"{phase:<8} {tokens:,} tokens in {seconds:.2f} s: {tokens / seconds:,.1f} tokens/s"


# --- kimi-k3 generate ------------------------------------------------------------------------------------------------


LEAST_TEMPERATURE = 1e-6  # by which the largest logits of a model can be divided and stay finite
_not_negative = number(float, lambda t: 0 <= t < float("inf"), "must be a number of at least 0")
_probability = number(float, lambda p: 0 < p <= 1, "must be a number above 0 and at most 1")


def add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", type=Path, metavar="MODEL", help="folder of the checkpoint")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="text to continue")
    prompt.add_argument("--prompt-file", type=Path, metavar="FILE", help="UTF-8 file with the text to continue")
    about = "stop after N tokens (default: %(default)s)"
    add("--max-new-tokens", type=at_least_one, default=128, metavar="N", help=about)
    about = "0 decodes greedily (default), above 0 samples"
    add("--temperature", type=_not_negative, default=0.0, metavar="T", help=about)
    about = "sample from the most likely tokens that together have probability P"
    add("--top-p", type=_probability, default=1.0, metavar="P", help=about)
    add_seed(parser, "seed of the sampling (default: %(default)s)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: a GPU if any")
    about = "default: that of the checkpoint"
    add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help=about)
    add("--dequantize", action="store_true", help="unpack MXFP4 experts when loading")


def read_prompt(args: argparse.Namespace) -> str:
    """The prompt from `--prompt` or `--prompt-file`, unchanged."""
    try:
        prompt = args.prompt if args.prompt_file is None else args.prompt_file.read_bytes().decode("utf-8")
        prompt.encode("utf-8")  # what is no text in a command line comes as halves of surrogate pairs
    except OSError as error:
        raise UsageError(f"cannot read {args.prompt_file}: {error.strerror}") from error
    except UnicodeError as error:
        raise UsageError(f"{args.prompt_file or 'the prompt'} is not UTF-8 text") from error
    if not prompt.strip():
        raise UsageError("the prompt is empty")
    return prompt


def run_generate(args: argparse.Namespace) -> None:
    """Stream a continuation to stdout and its cost to stderr."""
    if args.top_p < 1 and args.temperature == 0:
        raise UsageError("--top-p needs a --temperature above 0: greedy decoding does not sample")
    if 0 < args.temperature < LEAST_TEMPERATURE:
        raise UsageError(f"--temperature must be 0, which is greedy, or at least {LEAST_TEMPERATURE:g}")
    prompt = read_prompt(args)
    device = choose_device(args.device)
    config = read_config(args.model)
    if args.dequantize and config.expert_quantization is None:
        raise UsageError("--dequantize unpacks MXFP4 experts, and this checkpoint has none")
    tokenizer = load_tokenizer(args.model)
    input_ids = encode(tokenizer, prompt)
    check_ids(input_ids, config, args.model)
    check_length(config, input_ids.shape[1], args.max_new_tokens)

    with keeping("nothing was generated"):
        model = load_model(args.model, device, args.dtype, args.dequantize)
    torch.manual_seed(args.seed)
    generation = generate_text(model, tokenizer, input_ids, args.max_new_tokens, args.temperature, args.top_p)
    print(report(model, generation), file=sys.stderr)


# name: (help, declares the arguments, runs)
COMMANDS = {"generate": ("continue a text with a checkpoint", add_generate_arguments, run_generate)}
