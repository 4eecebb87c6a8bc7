"""`kimi-k3 convert`, `verify` and `inspect`: arguments and what is printed."""

import argparse
import contextlib
import re
import sys
from pathlib import Path

from ..cli.common import UsageError, add_seed, at_least_one, explained, number
from ..runs_kimi_k3 import keeping
from .inventory import table, take_inventory
from .plan import EXPERTS, LAYOUTS, Target
from .run import REPORT, convert
from .source import ConversionError
from .verify import verify

_SHOWN = 20  # differences that `verify` prints


def layer_range(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if not match:
        raise argparse.ArgumentTypeError(f"must be a layer or a range like 0-3, not {text!r}")
    return int(match[1]), int(match[2] or match[1])


def byte_size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)B?", text.strip().upper())
    size = float(match[1]) * 1000 ** " KMGT".index(match[2] or " ") if match else 0
    if not 1 <= size < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a size like 5GB or 500MB, not {text!r}")
    return int(size)


@contextlib.contextmanager
def _explained(place: Path, way_on: str = ""):
    """Turns a ConversionError or an error of the system into one sentence; `way_on` follows it, as it does Ctrl-C."""
    try:
        with explained(ConversionError), keeping(way_on):
            yield
    except OSError as error:
        sentence = f"{error.filename or place}: {error.strerror or error}"
        raise UsageError("; ".join(part for part in (sentence, way_on) if part)) from error


def add_convert_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", type=Path, metavar="SRC", help="folder of a checkpoint in any form of the family")
    add("destination", type=Path, metavar="DST", help="folder to make")
    add("--layout", choices=LAYOUTS, default="released", help="default: %(default)s")
    add("--expert-dtype", choices=tuple(EXPERTS), help="storage of the routed experts (default: as it is)")
    add("--text-only", action="store_true", help="leave the vision tower and the projector out")
    add("--layers", type=layer_range, metavar="A-B", help="keep these decoder layers, counted from 0")
    add("--experts", type=at_least_one, metavar="N", help="keep the first N routed experts of a layer")
    add("--shard-size", type=byte_size, default="5GB", metavar="SIZE", help="default: %(default)s")
    add("--workers", type=at_least_one, metavar="N", help="threads (default: one a core, at most 8)")
    add("--overwrite", action="store_true", help="replace DST, once the new one is whole")
    add("--weights-only", action="store_true", help="read torch.save files too, tensors and nothing else")
    add("--drop-foreign", action="store_true", help="leave out tensors the configuration does not know")


def run_convert(args: argparse.Namespace) -> None:
    target = Target(
        layout=args.layout,
        expert_dtype=args.expert_dtype,
        text_only=args.text_only,
        layers=args.layers,
        experts=args.experts,
        shard_size=args.shard_size,
    )
    with _explained(args.destination, "the same command continues where this one ended"):
        plan = convert(
            args.source,
            args.destination,
            target,
            workers=args.workers,
            overwrite=args.overwrite,
            allow_pickle=args.weights_only,
            drop_foreign=args.drop_foreign,
            progress=sys.stderr.isatty(),
        )
    tensors = sum(len(shard.tensors) for shard in plan.shards)
    print(f"{args.destination}: {tensors:,} tensors, {plan.total_size:,} bytes in {len(plan.shards):,} files")
    if (args.destination / REPORT).is_file():
        print(f"rounding errors of each tensor are in {args.destination / REPORT}")


def add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", type=Path, metavar="A", help="folder of a checkpoint")
    parser.add_argument("b", type=Path, metavar="B", help="folder of another one")
    tolerance = number(float, lambda t: 0 <= t < float("inf"), "must be a number of at least 0")
    parser.add_argument("--tolerance", type=tolerance, default=0.0, metavar="T", help="largest difference (default: 0)")
    parser.add_argument("--text-only", action="store_true", help="compare the text models only")
    parser.add_argument("--no-logits", action="store_true", help="compare tensors only")
    add_seed(parser, "seed of the prompt (default: %(default)s)")


def run_verify(args: argparse.Namespace) -> None:
    with _explained(args.b):
        result = verify(
            args.a,
            args.b,
            tolerance=args.tolerance,
            text_only=args.text_only,
            logits=not args.no_logits,
            seed=args.seed,
            progress=sys.stderr.isatty(),
        )
    print(f"{result.equal:,} tensors are equal")
    if result.close:
        worst = max(result.close, key=result.close.get)
        print(f"{len(result.close):,} are within {args.tolerance:g}, the worst {worst} by {result.close[worst]:.6g}")
    if result.not_finite:
        print(f"{len(result.not_finite):,} have values that are not finite, the first {result.not_finite[0]}")
    print(f"logits: {result.logits}")
    if not result.same:
        for folder, names in result.lacking.items():
            print(f"{folder} lacks {len(names):,} tensors, the first {names[0]}")
        print("\n".join(result.differences[:_SHOWN]))
        if len(result.differences) > _SHOWN:
            print(f"... {len(result.differences) - _SHOWN:,} more")
        differences = len(result.differences) + sum(map(len, result.lacking.values()))
        raise UsageError(f"not the same model: {differences:,} differences")
    print("the same model" + (f" within {args.tolerance:g}" if result.close else ""))


def add_inspect_arguments(parser: argparse.ArgumentParser) -> None:
    about = "folder of a checkpoint; its index may be all there is"
    parser.add_argument("folder", type=Path, metavar="DIR", help=about)


def run_inspect(args: argparse.Namespace) -> None:
    with _explained(args.folder):
        inventory = take_inventory(args.folder)
    print(table(inventory))


# name: (help, declares the arguments, runs)
COMMANDS = {
    "convert": ("write a checkpoint in another form", add_convert_arguments, run_convert),
    "verify": ("say whether two checkpoints are the same model", add_verify_arguments, run_verify),
    "inspect": ("list what a checkpoint holds", add_inspect_arguments, run_inspect),
}
