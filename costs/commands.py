"""`kimi-k3 cost` and `trace`: arguments, and what is run and printed."""

import argparse
from pathlib import Path

from ..cli.common import UsageError, at_least_one, check_picture, explained

# --- kimi-k3 cost ----------------------------------------------------------------------------------------------------


def add_cost_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    about = (
        "checkpoint folders or config.json files of any transformers model with KDA, MLA or grouped-query attention; "
        "the first is compared with the others"
    )
    add("config", type=Path, nargs="+", metavar="CONFIG", help=about)
    add("--gpu", choices=("h100", "h200", "b200", "b300"), default="b300", help="default: %(default)s")
    add("--gpus", type=at_least_one, default=8, metavar="N", help="in the node (default: %(default)s)")
    add("--context", type=at_least_one, default=131072, metavar="N", help="tokens of a session (default: %(default)s)")
    add("--picture", type=Path, metavar="FILE", help="draw cache and KV throughput against context")


def run_cost(args: argparse.Namespace) -> None:
    """Print parameters, FLOPs, bytes and what fits on a node, from configurations alone."""
    from . import report

    if args.picture is not None:
        check_picture(args.picture)
    with explained(ValueError):
        costs = [report.read_cost(path) for path in args.config]
    print(report.report(costs, args.gpu, args.gpus, args.context), end="")
    if args.picture is not None:
        report.draw(costs, args.gpu, args.gpus, args.picture)


# --- kimi-k3 trace ---------------------------------------------------------------------------------------------------


def add_trace_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("file", type=Path, metavar="FILE", help="JSONL to write, one session a line")
    add("--sessions", type=at_least_one, default=300, metavar="N", help="default: %(default)s")
    add("--seed", type=int, default=0, metavar="S", help="default: %(default)s")


def run_trace(args: argparse.Namespace) -> None:
    """Write sessions that have the medians of published agentic traffic."""
    from . import trace

    if args.file.exists():
        raise UsageError(f"{args.file} exists: delete it or choose another name")
    if not args.file.absolute().parent.is_dir():
        raise UsageError(f"there is no folder {args.file.parent}")
    sessions = trace.generate(args.sessions, args.seed)
    trace.write(args.file, sessions)
    print(f"medians: {trace.medians(sessions)}")


# name: (help, declares the arguments, runs)
COMMANDS = {
    "cost": ("count parameters, FLOPs and bytes of a configuration", add_cost_arguments, run_cost),
    "trace": ("write sessions of agentic traffic", add_trace_arguments, run_trace),
}
