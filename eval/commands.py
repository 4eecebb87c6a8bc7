"""`kimi-k3 eval` and `eval-cost`: arguments, and what is run and printed."""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from ..checkpoint_kimi_k3 import refuse_unusable_values
from ..cli.common import (
    UsageError,
    at_least_one,
    broken,
    choose_device,
    explained,
    load_tokenizer,
    read_config,
    refuse_without_matplotlib,
)
from ..runs_kimi_k3 import keeping
from . import cost, report, run
from .endpoint import EndpointReader
from .haystack import open_haystack
from .reader import ModelReader
from .run import Plan, evaluate, parse_length, summary
from .sizing import EvalError, Tokens
from .suite import TASKS

# --- kimi-k3 eval ----------------------------------------------------------------------------------------------------


def add_eval_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", type=Path, metavar="MODEL", help="folder of any causal language model of transformers")
    add("--tasks", required=True, metavar="A,B", help="names in docs/evaluation.md, or all")
    add("--lengths", required=True, metavar="4k,32k", help="tokens of a prompt, exactly")
    add("--out", type=Path, required=True, metavar="RUN", help="run folder; one that exists is continued")
    about = "what facts are hidden in: repeat (default), noise, or text files"
    add("--haystack", nargs="+", default=["repeat"], metavar="H", help=about)
    add("--depths", type=at_least_one, default=5, metavar="N", help="places of a fact (default: 5)")
    add("--samples", type=at_least_one, default=10, metavar="N", help="texts a cell (default: 10)")
    add("--seed", type=int, default=0, metavar="S", help="decides all texts (default: 0)")
    add("--batch", type=at_least_one, metavar="N", help="rows of a forward (default: by length)")
    add("--chunk", type=at_least_one, default=4096, metavar="N", help="tokens a forward (default: 4096)")
    about = "marked in the pictures (default: max_position_embeddings)"
    add("--trained-length", type=at_least_one, metavar="N", help=about)
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: a GPU if any")
    about = "default: float32 on a CPU, on a GPU that of the checkpoint (auto)"
    add("--dtype", choices=("auto", "float32", "bfloat16"), help=about)
    add("--endpoint", metavar="URL", help="ask a completion server, such as http://localhost:8000/v1")
    add("--endpoint-model", metavar="NAME", help="the server's name of the model (default: MODEL)")
    about = "seconds for one answer of a server (default: 600)"
    add("--timeout", type=at_least_one, default=600, metavar="S", help=about)


@explained(EvalError)
def run_eval(args: argparse.Namespace) -> None:
    """Ask a model for what is hidden in long texts; the run folder gets results, pictures and a page."""
    refuse_without_matplotlib()
    names = tuple(TASKS) if args.tasks == "all" else tuple(args.tasks.split(","))
    lengths = tuple(parse_length(length) for length in args.lengths.split(","))
    plan = Plan(names, lengths, args.depths, args.samples, args.seed)
    device = choose_device(args.device)
    if not args.model.is_dir():
        raise UsageError(f"there is no checkpoint folder {args.model}")
    tokens = Tokens(load_tokenizer(args.model))
    haystack = open_haystack(args.haystack, tokens)
    plan.check(haystack, tokens)
    run.touch(args.out / run.RESULTS)
    with keeping(f"{args.out} is as it was, and the same command goes on from there"):
        reader = eval_reader(args, tokens, device)
    lines = evaluate(reader, tokens, haystack, plan, args.out)
    mark = report.Mark(args.trained_length, "trained on") if args.trained_length else configured_length(reader)
    page = report.write_report(lines, args.out, f"Recall of {args.model.name}", mark)
    print(report.table(summary(lines)))
    print(f"pictures: {page}")
    for length, line in run.write_memory(args.out, getattr(reader, "memory", {})).items():
        print(
            f"GPU memory at {int(length):,} tokens: {line['peak_bytes'] / 1e9:.3f} GB at the peak, "
            f"{line['peak_ratio']:.2f} times weights + cache + one chunk"
        )


def eval_reader(args: argparse.Namespace, tokens, device: torch.device):
    """A reader of the endpoint, or of the folder's model, whatever its class."""
    if args.endpoint is not None:
        return EndpointReader(args.endpoint, args.endpoint_model or str(args.model), tokens, args.timeout)
    dtype = args.dtype or ("auto" if device.type == "cuda" else "float32")
    with broken(f"the model in {args.model} cannot be loaded"):
        model = AutoModelForCausalLM.from_pretrained(
            args.model, dtype=dtype, device_map=device, trust_remote_code=False
        ).eval()
        refuse_unusable_values(dict(model.named_parameters()))
    return ModelReader(model, tokens, args.chunk, args.batch)


def configured_length(reader):
    """The number of positions in a model's config, as a mark for the pictures; None where it has none."""
    model = getattr(reader, "model", None)
    config = model.config.get_text_config(decoder=True) if isinstance(model, torch.nn.Module) else None
    length = getattr(config, "max_position_embeddings", None)
    return report.Mark(length, "max_position_embeddings") if length else None


# --- kimi-k3 eval-cost -----------------------------------------------------------------------------------------------


def add_eval_cost_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", type=Path, metavar="MODEL", help="folder with a config.json; no weights are read")
    add("--lengths", required=True, metavar="4k,32k", help="tokens of context")
    add("--out", type=Path, required=True, metavar="RUN", help="run folder; one that exists is continued")
    add("--rows", type=at_least_one, default=1, metavar="N", help="sequences at once (default: 1)")
    add("--steps", type=at_least_one, default=32, metavar="N", help="decoded tokens (default: 32)")
    add("--chunk", type=at_least_one, default=4096, metavar="N", help="tokens a forward (default: 4096)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: a GPU if any")
    add("--dtype", choices=("float32", "bfloat16"), help="default: bfloat16 on a GPU, else float32")


@explained(EvalError)
def run_eval_cost(args: argparse.Namespace) -> None:
    """Time to first token, decoding and cache by length, beside the same model with full attention everywhere."""
    refuse_without_matplotlib()
    device = choose_device(args.device)
    config = read_config(args.model)
    dtype = getattr(torch, args.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    lengths = tuple(dict.fromkeys(parse_length(length) for length in args.lengths.split(",")))
    plan = cost.CostPlan(lengths, args.rows, args.steps, args.chunk)
    lines = cost.measure(config, plan, args.out, device, dtype)
    cost.draw(lines, args.out / "cost.png")
    print(cost.table(lines))
    print(f"picture: {args.out / 'cost.png'}")


# name: (help, declares the arguments, runs)
COMMANDS = {
    "eval": ("measure recall over the length of the context", add_eval_arguments, run_eval),
    "eval-cost": ("measure time and memory over the length of the context", add_eval_cost_arguments, run_eval_cost),
}
