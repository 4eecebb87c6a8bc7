"""Command line of the package: `kimi-k3 COMMAND ...`.

A subcommand is two functions, one that declares its arguments and one that runs it, registered in `COMMANDS`. Input
that cannot work ends in one sentence on stderr and exit code 2, as early as it can be known: before the weights are
read wherever the configuration and the tokenizer are enough to tell.
"""

import argparse
import importlib.util
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer
from transformers.generation import BaseStreamer

from . import CACHE_ARGUMENT, HybridCache, KimiK3ForCausalLM, KimiK3TextConfig
from .conversion import ConversionError
from .conversion.commands import COMMANDS as CONVERSION_COMMANDS


class UsageError(ValueError):
    """Input that cannot work; its text is the one sentence that the user reads."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one sentence instead of a usage block."""

    def error(self, message):
        self.exit(2, f"{self.prog}: {message}\n")


# --- loading ---------------------------------------------------------------------------------------------------------


def read_config(folder: Path) -> KimiK3TextConfig:
    """The text configuration of a checkpoint folder, nested or flat; reads no weights."""
    if not folder.is_dir():
        raise UsageError(f"there is no checkpoint folder {folder}")
    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder} is not a checkpoint: it has no config.json")
    try:
        return KimiK3TextConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise UsageError(f"the configuration in {folder} cannot be used: {error}") from error


def load_tokenizer(folder: Path):
    """The tokenizer of a checkpoint folder; code shipped inside the folder is never run."""
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # which one a missing or broken file raises differs between tokenizer classes
        reason = str(error).strip().partition("\n")[0]
        raise UsageError(f"no tokenizer can be loaded from {folder}: {reason}") from error


def encode(tokenizer, text: str, **options) -> torch.Tensor:
    """Token ids [1, T]. The tokenizer's own warning about long texts is off: `check_length` is the judge of that."""
    return tokenizer(text, return_tensors="pt", verbose=False, **options).input_ids


def choose_device(name: str) -> torch.device:
    """`auto` takes the GPU where there is one."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda needs a CUDA GPU, and torch sees none")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def load_model(folder: Path, device: torch.device, dtype: str = "auto", dequantize: bool = False) -> KimiK3ForCausalLM:
    """The model on `device`, in evaluation mode; `auto` keeps the dtype of the checkpoint."""
    try:
        return KimiK3ForCausalLM.from_pretrained(folder, dtype=dtype, device_map=device, dequantize=dequantize)
    except (OSError, ValueError) as error:
        raise UsageError(f"the weights in {folder} cannot be loaded: {error}") from error


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

    `prompt_tokens` counts the tokens that this call processed, without those that the cache already held. The prefill
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
    """Continue `input_ids` [1, T], greedily at temperature 0, and print the text while it comes if `stream`.

    A `cache` that already holds the first tokens of `input_ids` is continued, in place.
    """
    cache = HybridCache(model.config) if cache is None else cache
    known = cache.get_seq_length()
    streamer = TimedStreamer(TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True) if stream else None)
    # top_k=0 switches off the cut at 50 that generation defaults carry; greedy decoding warns about all three.
    sampling = {"temperature": temperature, "top_p": top_p, "top_k": 0} if temperature > 0 else {}
    input_ids = input_ids.to(model.device)
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
    """Refuse a request that leaves the range of positions the model was configured for."""
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


def number(kind, accepts, rule: str):
    """An argparse type: `kind` of the text, refused with `rule` unless `accepts` says yes."""

    def convert(text: str):
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not accepts(value):
            raise argparse.ArgumentTypeError(f"{rule}, not {text!r}")
        return value

    return convert


def add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder of the checkpoint")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="text to continue")
    prompt.add_argument("--prompt-file", type=Path, metavar="FILE", help="UTF-8 file with the text to continue")
    parser.add_argument(
        "--max-new-tokens",
        type=number(int, lambda n: n >= 1, "must be a whole number of at least 1"),
        default=128,
        metavar="N",
        help="stop after N tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--temperature",
        type=number(float, lambda t: 0 <= t < float("inf"), "must be a number of at least 0"),
        default=0.0,
        metavar="T",
        help="0 decodes greedily (default), above 0 samples",
    )
    parser.add_argument(
        "--top-p",
        type=number(float, lambda p: 0 < p <= 1, "must be a number above 0 and at most 1"),
        default=1.0,
        metavar="P",
        help="sample from the most likely tokens that together have probability P",
    )
    parser.add_argument(
        "--seed",
        type=number(int, lambda s: 0 <= s < 2**63, "must be a whole number of at least 0"),
        default=0,
        metavar="S",
        help="seed of the sampling (default: %(default)s)",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: a GPU if any")
    parser.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="default: that of the checkpoint"
    )
    parser.add_argument("--dequantize", action="store_true", help="unpack MXFP4 experts when loading")


def read_prompt(args: argparse.Namespace) -> str:
    """The prompt from `--prompt` or `--prompt-file`, as it stands."""
    try:
        prompt = args.prompt if args.prompt_file is None else args.prompt_file.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read {args.prompt_file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{args.prompt_file} is not UTF-8 text") from error
    if not prompt.strip():
        raise UsageError("the prompt is empty")
    return prompt


def run_generate(args: argparse.Namespace) -> None:
    """Stream a continuation to stdout and its cost to stderr."""
    if args.top_p < 1 and args.temperature == 0:
        raise UsageError("--top-p needs a --temperature above 0: greedy decoding does not sample")
    prompt = read_prompt(args)
    device = choose_device(args.device)
    config = read_config(args.model)
    if args.dequantize and config.expert_quantization is None:
        raise UsageError("--dequantize unpacks MXFP4 experts, and this checkpoint has none")
    tokenizer = load_tokenizer(args.model)
    input_ids = encode(tokenizer, prompt)
    check_length(config, input_ids.shape[1], args.max_new_tokens)

    model = load_model(args.model, device, args.dtype, args.dequantize)
    torch.manual_seed(args.seed)
    generation = generate_text(model, tokenizer, input_ids, args.max_new_tokens, args.temperature, args.top_p)
    print(report(model, generation), file=sys.stderr)


# --- kimi-k3 train ---------------------------------------------------------------------------------------------------

at_least_one = number(int, lambda n: n >= 1, "must be a whole number of at least 1")


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder with config and tokenizer, and the weights")
    parser.add_argument("data", type=Path, nargs="+", metavar="DATA", help=".txt, .jsonl or .parquet files of one kind")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="RUN", help="run folder; one that exists is continued"
    )
    parser.add_argument("--from-scratch", action="store_true", help="new weights: only config and tokenizer are read")
    parser.add_argument("--steps", type=at_least_one, required=True, metavar="N", help="optimizer steps")
    parser.add_argument("--context", type=at_least_one, default=1024, metavar="N", help="tokens a row (default: 1024)")
    parser.add_argument("--rows", type=at_least_one, default=16, metavar="N", help="rows a step (default: 16)")
    parser.add_argument(
        "--rate",
        type=number(float, lambda rate: 0 < rate < float("inf"), "must be a number above 0"),
        default=1e-3,
        metavar="R",
        help="peak learning rate (default: %(default)s)",
    )
    parser.add_argument("--split-long", action="store_true", help="cut documents that are longer than the context")
    parser.add_argument(
        "--gradient-checkpointing", action="store_true", help="recompute layers in backward: less memory"
    )
    parser.add_argument("--save-every", type=at_least_one, default=100, metavar="N", help="steps (default: 100)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="default: %(default)s")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: a GPU if any")


def run_train(args: argparse.Namespace) -> None:
    """Train on packed local text; the run folder gets state, metrics, a curve and the finished model."""
    try:
        from .training.text_data import DataError
        from .training.text_run import TextRun, TextTraining
    except ModuleNotFoundError as error:
        raise UsageError(f"training needs {error.name}: pip install 'kimi-k3[train]'") from error
    device = choose_device(args.device)
    config = read_config(args.model)
    limit = config.max_position_embeddings
    if args.context > limit:
        raise UsageError(f"--context {args.context} is more than the model's max_position_embeddings, {limit}")
    tokenizer = load_tokenizer(args.model)
    torch.manual_seed(args.seed)
    if args.from_scratch:
        config.expert_quantization = None
        model = KimiK3ForCausalLM(config).to(device)
    else:
        packed = config.expert_quantization is not None
        model = load_model(args.model, device, "float32", dequantize=packed)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    run = TextRun(
        files=[str(file) for file in args.data],
        steps=args.steps,
        context=args.context,
        rows=args.rows,
        rate=args.rate,
        seed=args.seed,
        split_long=args.split_long,
    )
    try:
        TextTraining(model, tokenizer, run, args.out, args.save_every).train()
    except (DataError, FloatingPointError) as error:
        raise UsageError(str(error)) from error


# --- kimi-k3 eval ----------------------------------------------------------------------------------------------------


def add_eval_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder of any causal language model of transformers")
    parser.add_argument("--tasks", required=True, metavar="A,B", help="names in docs/evaluation.md, or all")
    parser.add_argument("--lengths", required=True, metavar="4k,32k", help="tokens of a prompt, exactly")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="RUN", help="run folder; one that exists is continued"
    )
    parser.add_argument(
        "--haystack",
        nargs="+",
        default=["repeat"],
        metavar="H",
        help="what facts are hidden in: repeat (default), noise, or text files",
    )
    parser.add_argument("--depths", type=at_least_one, default=5, metavar="N", help="places of a fact (default: 5)")
    parser.add_argument("--samples", type=at_least_one, default=10, metavar="N", help="texts a cell (default: 10)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="decides all texts (default: 0)")
    parser.add_argument("--batch", type=at_least_one, metavar="N", help="rows of a forward (default: by length)")
    parser.add_argument(
        "--chunk", type=at_least_one, default=4096, metavar="N", help="tokens a forward (default: 4096)"
    )
    parser.add_argument(
        "--trained-length",
        type=at_least_one,
        metavar="N",
        help="marked in the pictures (default: max_position_embeddings)",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: a GPU if any")
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        help="default: float32 on a CPU, on a GPU that of the checkpoint (auto)",
    )
    parser.add_argument("--endpoint", metavar="URL", help="ask a completion server, such as http://localhost:8000/v1")
    parser.add_argument("--endpoint-model", metavar="NAME", help="the server's name of the model (default: MODEL)")
    parser.add_argument(
        "--timeout",
        type=at_least_one,
        default=600,
        metavar="S",
        help="seconds for one answer of a server (default: 600)",
    )


def run_eval(args: argparse.Namespace) -> None:
    """Ask a model for what is hidden in long texts; the run folder gets results, pictures and a page."""
    refuse_without_matplotlib()
    from .eval import EvalError, Plan, Tokens, evaluate, open_haystack, parse_length, report, run, suite, summary

    try:
        names = tuple(suite.TASKS) if args.tasks == "all" else tuple(args.tasks.split(","))
        lengths = tuple(parse_length(length) for length in args.lengths.split(","))
        plan = Plan(names, lengths, args.depths, args.samples, args.seed)
        device = choose_device(args.device)
        if not args.model.is_dir():
            raise UsageError(f"there is no checkpoint folder {args.model}")
        tokens = Tokens(load_tokenizer(args.model))
        haystack = open_haystack(args.haystack, tokens)
        plan.check(haystack, tokens)
        run.touch(args.out / run.RESULTS)
        reader = eval_reader(args, tokens, device)
        lines = evaluate(reader, tokens, haystack, plan, args.out)
    except EvalError as error:
        raise UsageError(str(error)) from error
    mark = report.Mark(args.trained_length, "trained on") if args.trained_length else configured_length(reader)
    page = report.write_report(lines, args.out, f"Recall of {args.model.name}", mark)
    print(report.table(summary(lines)))
    print(f"pictures: {page}")
    if device.type == "cuda":
        print(f"peak GPU memory: {torch.cuda.max_memory_allocated(device) / 1e9:.2f} GB")


def eval_reader(args: argparse.Namespace, tokens, device: torch.device):
    """The endpoint, or the model of the folder, whatever class it has."""
    from .eval import EndpointReader, ModelReader

    if args.endpoint is not None:
        return EndpointReader(args.endpoint, args.endpoint_model or str(args.model), tokens, args.timeout)
    try:
        dtype = args.dtype or ("auto" if device.type == "cuda" else "float32")
        model = AutoModelForCausalLM.from_pretrained(
            args.model, dtype=dtype, device_map=device, trust_remote_code=False
        ).eval()
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UsageError(f"the model in {args.model} cannot be loaded: {reason}") from error
    return ModelReader(model, tokens, args.chunk, args.batch)


def configured_length(reader):
    """The positions that a model's config names, as a mark for the pictures; None where it names none."""
    from .eval.report import Mark

    model = getattr(reader, "model", None)
    config = model.config.get_text_config(decoder=True) if isinstance(model, torch.nn.Module) else None
    length = getattr(config, "max_position_embeddings", None)
    return Mark(length, "max_position_embeddings") if length else None


# --- kimi-k3 eval-cost -----------------------------------------------------------------------------------------------


def add_eval_cost_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder with a config.json; no weights are read")
    parser.add_argument("--lengths", required=True, metavar="4k,32k", help="tokens of context")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="RUN", help="run folder; one that exists is continued"
    )
    parser.add_argument("--rows", type=at_least_one, default=1, metavar="N", help="sequences at once (default: 1)")
    parser.add_argument("--steps", type=at_least_one, default=32, metavar="N", help="decoded tokens (default: 32)")
    parser.add_argument(
        "--chunk", type=at_least_one, default=4096, metavar="N", help="tokens a forward (default: 4096)"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: a GPU if any")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: bfloat16 on a GPU, else float32")


def run_eval_cost(args: argparse.Namespace) -> None:
    """Time to first token, decoding and cache by length, beside the same model with full attention everywhere."""
    refuse_without_matplotlib()
    from .eval import EvalError, cost, parse_length

    device = choose_device(args.device)
    config = read_config(args.model)
    dtype = getattr(torch, args.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    try:
        lengths = tuple(parse_length(length) for length in args.lengths.split(","))
        plan = cost.CostPlan(lengths, args.rows, args.steps, args.chunk)
        lines = cost.measure(config, plan, args.out, device, dtype)
    except EvalError as error:
        raise UsageError(str(error)) from error
    cost.draw(lines, args.out / "cost.png")
    print(cost.table(lines))
    print(f"picture: {args.out / 'cost.png'}")


def refuse_without_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("the pictures need matplotlib: pip install 'kimi-k3[eval]'")
# --- kimi-k3 cost ----------------------------------------------------------------------------------------------------


def add_cost_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", type=Path, nargs="+", metavar="CONFIG",
        help="checkpoint folders or config.json files of any transformers model with KDA, MLA or grouped-query "
        "attention; the first is compared with the others",
    )  # fmt: skip
    parser.add_argument("--gpu", choices=("h100", "h200", "b200", "b300"), default="b300", help="default: %(default)s")
    parser.add_argument("--gpus", type=at_least_one, default=8, metavar="N", help="in the node (default: %(default)s)")
    parser.add_argument(
        "--context", type=at_least_one, default=131072, metavar="N", help="tokens of a session (default: %(default)s)"
    )
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw cache and KV throughput against context")


def run_cost(args: argparse.Namespace) -> None:
    """Print parameters, FLOPs, bytes and what fits on a node, from configurations alone."""
    from .serving import cost_report

    if args.picture is not None:
        check_picture(args.picture)
    try:
        costs = [cost_report.read_cost(path) for path in args.config]
    except ValueError as error:
        raise UsageError(str(error)) from error
    print(cost_report.report(costs, args.gpu, args.gpus, args.context), end="")
    if args.picture is not None:
        cost_report.draw(costs, args.gpu, args.gpus, args.picture)


def check_picture(path: Path) -> None:
    """Refuse a picture that could not be drawn, before any work."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("a picture needs matplotlib: pip install 'kimi-k3[plots]'")
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise UsageError(f"{path} must end in .png, .svg or .pdf")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"there is no folder {path.parent} for the picture")


# --- kimi-k3 cache ---------------------------------------------------------------------------------------------------


def add_cache_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("stats", "clear"), help="count what is kept, or delete it")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="of the disk tier of a prefix cache")
    parser.add_argument("--check", action="store_true", help="stats: read every file and verify its checksum")


def run_cache(args: argparse.Namespace) -> None:
    """What a folder of kept prefixes holds, one line a model; or empty it."""
    from .serving import prefix_folder

    if args.check and args.action == "clear":
        raise UsageError("--check belongs to stats: clear deletes broken files too")
    try:
        if args.action == "clear":
            print(f"{prefix_folder.clear(args.folder):,} bytes freed")
            return
        models = prefix_folder.inspect(args.folder, args.check)
    except (OSError, ValueError) as error:
        raise UsageError(str(error)) from error
    for model in models:
        print(
            f"model {model.namespace[:12]}: {model.states:,} states and {model.segments:,} segments of "
            f"{model.tokens:,} tokens, {model.bytes:,} bytes, {model.broken} broken files"
        )
    if not models:
        print("no prefixes")


# --- kimi-k3 trace, kimi-k3 replay -----------------------------------------------------------------------------------


def byte_count(text: str) -> int:
    """An argparse type: bytes, as a number with an optional decimal suffix k, M, G or T."""
    powers = {"k": 3, "M": 6, "G": 9, "T": 12}
    try:
        size = float(text[:-1]) * 10 ** powers[text[-1]] if text[-1:] in powers else float(text)
    except ValueError:
        size = -1
    if not 0 <= size < 1e18:
        raise argparse.ArgumentTypeError(f"must be bytes such as 500M, 20G or 2T, not {text!r}")
    return int(size)


def add_trace_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="JSONL to write, one session a line")
    parser.add_argument("--sessions", type=at_least_one, default=300, metavar="N", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="default: %(default)s")


def run_trace(args: argparse.Namespace) -> None:
    """Write sessions that have the medians of published agentic traffic."""
    from .serving import trace

    if args.file.exists():
        raise UsageError(f"{args.file} exists: delete it or choose another name")
    if not args.file.absolute().parent.is_dir():
        raise UsageError(f"there is no folder {args.file.parent}")
    sessions = trace.generate(args.sessions, args.seed)
    trace.write(args.file, sessions)
    print(f"medians: {trace.medians(sessions)}")


def add_replay_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, metavar="TRACE", help="JSONL that kimi-k3 trace writes")
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--model", type=Path, metavar="MODEL", help="run a small checkpoint through the prefix cache")
    kind.add_argument("--simulate", type=Path, metavar="CONFIG", help="simulate a model at full size")
    parser.add_argument(
        "--concurrency", type=at_least_one, nargs="+", default=[1, 4, 16, 64], metavar="N", help="sessions at a time"
    )
    parser.add_argument("--host-bytes", type=byte_count, default=0, metavar="B", help="host memory for the cache")
    parser.add_argument("--disk-bytes", type=byte_count, default=0, metavar="B", help="disk for the cache")
    parser.add_argument(
        "--write-through", action="store_true", help="copy down at once instead of when the tier above is full"
    )
    real = parser.add_argument_group("with --model")
    real.add_argument("--device-bytes", type=byte_count, default=10**9, metavar="B", help="default: 1G")
    real.add_argument("--scale", type=at_least_one, default=256, metavar="N", help="divide token counts (default: 256)")
    real.add_argument("--turns", type=at_least_one, default=200, metavar="N", help="to play (default: %(default)s)")
    real.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: a GPU if any")
    simulated = parser.add_argument_group("with --simulate")
    simulated.add_argument("--gpu", choices=("h100", "h200", "b200", "b300"), default="b300", help="default: b300")
    simulated.add_argument("--gpus", type=at_least_one, default=8, metavar="N", help="in the node (default: 8)")
    simulated.add_argument(
        "--by-sequences",
        action="store_true",
        help="each GPU holds its own sequences, instead of its heads and a copy of all latents",
    )
    simulated.add_argument(
        "--minutes", type=at_least_one, default=40, metavar="N", help="simulated, after a warm-up (default: 40)"
    )
    simulated.add_argument("--picture", type=Path, metavar="FILE", help="draw throughput, hit rate and waiting")


def run_replay(args: argparse.Namespace) -> None:
    """Play a trace for real or in a simulation, and print what the cache did at every concurrency."""
    try:
        from .serving import replay, trace
    except ModuleNotFoundError as error:
        raise UsageError(f"a replay needs {error.name}: pip install 'kimi-k3[serve]'") from error
    if args.picture is not None:
        if args.simulate is None:
            raise UsageError("--picture belongs to --simulate")
        check_picture(args.picture)
    try:
        sessions = trace.read(args.trace)
        if args.simulate is None:
            replay_model(args, trace.smaller(sessions, args.scale))
            return
        from .serving import cost_report
        from .serving.cost import GPUS, Node

        cost = cost_report.read_cost(args.simulate)
        node = Node(GPUS[args.gpu], args.gpus, by_heads=not args.by_sequences)
        tiers = {"GPUs": (0, 0)}
        if args.host_bytes:
            tiers[f"GPUs and {cost_report.scaled(args.host_bytes, 'B')} of host memory"] = (args.host_bytes, 0)
        if args.disk_bytes:
            tiers[f"the same and {cost_report.scaled(args.disk_bytes, 'B')} of SSD"] = (
                args.host_bytes,
                args.disk_bytes,
            )
        options = {"minutes": args.minutes, "write_through": args.write_through}
        curves = replay.simulate(cost, node, sessions, args.concurrency, tiers, **options)
    except ValueError as error:
        raise UsageError(str(error)) from error
    print(replay.simulated_table(curves), end="")
    if args.picture is not None:
        title = f"{cost.name} on {args.gpus} x {args.gpu}, simulated"
        replay.draw(curves, replay.knee(cost, node), title, args.picture)


def replay_model(args: argparse.Namespace, sessions: list) -> None:
    """Every concurrency with a fresh cache, on the disk in a folder that is deleted afterwards."""
    from .serving import replay
    from .serving.prefix_cache import PrefixCache

    device = choose_device(args.device)
    config = read_config(args.model)
    longest = max(session.inputs()[-1] + session.turns[-1][1] for session in sessions)
    if longest > config.max_position_embeddings:
        raise UsageError(
            f"divided by {args.scale} the longest session still has {longest} tokens, but the model's "
            f"max_position_embeddings is {config.max_position_embeddings}: give a larger --scale"
        )
    model = load_model(args.model, device)
    results = []
    for concurrency in args.concurrency:
        with tempfile.TemporaryDirectory() as folder:
            cache = PrefixCache(
                model,
                args.device_bytes,
                args.host_bytes,
                folder if args.disk_bytes else None,
                args.disk_bytes,
                block=16,
                every=512,
                write_through=args.write_through,
            )
            results.append(replay.replay(cache, sessions, concurrency, args.turns))
            cache.close()
    print(replay.replayed_table(results), end="")


# --- kimi-k3 serve ---------------------------------------------------------------------------------------------------


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder of the checkpoint")
    parser.add_argument("--host", default="127.0.0.1", metavar="H", help="address to listen on (default: %(default)s)")
    parser.add_argument(
        "--port", type=number(int, lambda n: 0 <= n < 65536, "must be a port"), default=8000, metavar="P"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: a GPU if any")
    parser.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="default: that of the checkpoint"
    )
    kept = parser.add_argument_group("prefix cache")
    kept.add_argument("--device-bytes", type=byte_count, default=10**9, metavar="B", help="default: 1G")
    kept.add_argument("--host-bytes", type=byte_count, default=0, metavar="B", help="host memory (default: none)")
    kept.add_argument("--folder", type=Path, metavar="DIR", help="keep prefixes on the disk too, across restarts")
    kept.add_argument("--disk-bytes", type=byte_count, default=10**10, metavar="B", help="with --folder (default: 10G)")
    limits = parser.add_argument_group("limits")
    limits.add_argument("--max-prompt-tokens", type=at_least_one, metavar="N", help="default: what the model reads")
    limits.add_argument("--max-new-tokens", type=at_least_one, default=4096, metavar="N", help="default: %(default)s")
    limits.add_argument("--max-seconds", type=at_least_one, default=300, metavar="N", help="a request may take")
    limits.add_argument("--max-waiting", type=at_least_one, default=256, metavar="N", help="requests that may wait")


def run_serve(args: argparse.Namespace) -> None:
    """Serve completions until a signal; what is under way is finished and kept prefixes are written."""
    try:
        import uvicorn

        from .serving import server
        from .serving.prefix_cache import PrefixCache
    except ModuleNotFoundError as error:
        raise UsageError(f"serving needs {error.name}: pip install 'kimi-k3[serve]'") from error
    device = choose_device(args.device)
    config = read_config(args.model)
    tokenizer = load_tokenizer(args.model)
    model = load_model(args.model, device, args.dtype)
    try:
        cache = PrefixCache(
            model, args.device_bytes, args.host_bytes, args.folder, args.disk_bytes if args.folder else 0
        )
    except (OSError, ValueError) as error:
        raise UsageError(f"the prefix cache cannot be made: {error}") from error
    limits = server.Limits(
        args.max_prompt_tokens or config.max_position_embeddings,
        args.max_new_tokens,
        args.max_seconds,
        args.max_waiting,
    )
    app = server.build_app(cache, tokenizer, args.model.resolve().name, limits)
    uvicorn.run(
        app, host=args.host, port=args.port, log_level="warning", timeout_graceful_shutdown=int(limits.stop_seconds)
    )


# --- entry -----------------------------------------------------------------------------------------------------------

# name: (help, declares the arguments, runs)
COMMANDS = {
    "generate": ("continue a text with a checkpoint", add_generate_arguments, run_generate),
    "train": ("train a model on local text", add_train_arguments, run_train),
    **CONVERSION_COMMANDS,
    "eval": ("measure recall over the length of the context", add_eval_arguments, run_eval),
    "eval-cost": ("measure time and memory over the length of the context", add_eval_cost_arguments, run_eval_cost),
    "cost": ("count parameters, FLOPs and bytes of a configuration", add_cost_arguments, run_cost),
    "trace": ("write sessions of agentic traffic", add_trace_arguments, run_trace),
    "replay": ("play a trace through the prefix cache, or simulate it", add_replay_arguments, run_replay),
    "serve": ("answer completions over HTTP", add_serve_arguments, run_serve),
    "cache": ("count or delete the prefixes kept in a folder", add_cache_arguments, run_cache),
}


def run_or_explain(prog: str, run, args: argparse.Namespace) -> int:
    """The exit code of `run(args)`: 0, or 2 after the sentence of an error that the user can do something about."""
    try:
        run(args)
    except (UsageError, ConversionError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="kimi-k3", description="Kimi K3 models on the command line.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    for name, (summary, add_arguments, _) in COMMANDS.items():
        add_arguments(commands.add_parser(name, help=summary, description=summary.capitalize() + "."))
    args = parser.parse_args(argv)
    return run_or_explain(f"{parser.prog} {args.command}", COMMANDS[args.command][2], args)
