"""`kimi-k3 replay`, `serve` and `cache`: arguments, and what is run and printed."""

import argparse
import contextlib
import math
import os
import socket
import sys
import tempfile
from pathlib import Path

from ..cli.common import (
    UsageError,
    at_least_one,
    check_picture,
    choose_device,
    explained,
    load_model,
    load_tokenizer,
    needing,
    number,
    read_config,
)
from ..runs_kimi_k3 import keeping

# --- kimi-k3 cache ---------------------------------------------------------------------------------------------------


def add_cache_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("stats", "clear"), help="count what is kept, or delete it")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="of the disk tier of a prefix cache")
    parser.add_argument("--check", action="store_true", help="stats: read every file and verify its checksum")


def run_cache(args: argparse.Namespace) -> None:
    """What a folder of kept prefixes holds, one line a model; or empty it."""
    from . import prefix_folder

    if args.check and args.action == "clear":
        raise UsageError("--check belongs to stats: clear deletes broken files too")
    with explained(OSError, ValueError):
        if args.action == "clear":
            print(f"{prefix_folder.clear(args.folder):,} bytes freed")
            return
        models = prefix_folder.inspect(args.folder, args.check)
    for model in models:
        print(
            f"model {model.namespace[:12]}: {model.states:,} states and {model.segments:,} segments of "
            f"{model.tokens:,} tokens, {model.bytes:,} bytes, {model.broken} broken files"
        )
    if not models:
        print("no prefixes")


# --- kimi-k3 replay --------------------------------------------------------------------------------------------------


def _bytes(text: str) -> int:
    powers = {"k": 3, "M": 6, "G": 9, "T": 12}
    size = float(text[:-1]) * 10 ** powers[text[-1]] if text[-1:] in powers else float(text)
    return math.floor(size)  # what is below zero stays there, and is refused


# An argparse type: bytes, as a number with an optional decimal suffix k, M, G or T.
byte_count = number(_bytes, lambda size: 0 <= size < 1e18, "must be bytes such as 500M, 20G or 2T")


def add_replay_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("trace", type=Path, metavar="TRACE", help="JSONL that kimi-k3 trace writes")
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--model", type=Path, metavar="MODEL", help="run a small checkpoint through the prefix cache")
    kind.add_argument("--simulate", type=Path, metavar="CONFIG", help="simulate a model at full size")
    counts = [1, 4, 16, 64]
    add("--concurrency", type=at_least_one, nargs="+", default=counts, metavar="N", help="sessions at a time")
    add("--host-bytes", type=byte_count, default=0, metavar="B", help="host memory for the cache")
    add("--disk-bytes", type=byte_count, default=0, metavar="B", help="disk for the cache")
    add("--write-through", action="store_true", help="copy down at once instead of when the tier above is full")
    add = parser.add_argument_group("with --model").add_argument
    add("--device-bytes", type=byte_count, default=10**9, metavar="B", help="default: 1G")
    add("--scale", type=at_least_one, default=256, metavar="N", help="divide token counts (default: 256)")
    add("--turns", type=at_least_one, default=200, metavar="N", help="to play (default: %(default)s)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: a GPU if any")
    add = parser.add_argument_group("with --simulate").add_argument
    add("--gpu", choices=("h100", "h200", "b200", "b300"), default="b300", help="default: b300")
    add("--gpus", type=at_least_one, default=8, metavar="N", help="in the node (default: 8)")
    about = "each GPU holds its own sequences, instead of its heads and a copy of all latents"
    add("--by-sequences", action="store_true", help=about)
    add("--minutes", type=at_least_one, default=40, metavar="N", help="simulated, after a warm-up (default: 40)")
    add("--picture", type=Path, metavar="FILE", help="draw throughput, hit rate and waiting")


def run_replay(args: argparse.Namespace) -> None:
    """Play a trace for real or in a simulation, and print what the cache did at every concurrency."""
    with needing("a replay", "serve"):
        from ..costs import curves, trace
    if args.picture is not None:
        if args.simulate is None:
            raise UsageError("--picture belongs to --simulate")
        check_picture(args.picture)
    with explained(ValueError):
        sessions = trace.read(args.trace)
        if args.simulate is None:
            replay_model(args, trace.smaller(sessions, args.scale))
            return
        from ..costs import report
        from ..costs.formulas import GPUS, Node

        cost = report.read_cost(args.simulate)
        node = Node(GPUS[args.gpu], args.gpus, by_heads=not args.by_sequences)
        tiers = {"GPUs": (0, 0)}
        if args.host_bytes:
            tiers[f"GPUs and {report.scaled(args.host_bytes, 'B')} of host memory"] = (args.host_bytes, 0)
        if args.disk_bytes:
            tiers[f"the same and {report.scaled(args.disk_bytes, 'B')} of SSD"] = (args.host_bytes, args.disk_bytes)
        options = {"minutes": args.minutes, "write_through": args.write_through}
        with keeping("a simulation is shown when all of it is done"):
            simulated = curves.simulate(cost, node, sessions, args.concurrency, tiers, **options)
    print(curves.simulated_table(simulated), end="")
    if args.picture is not None:
        title = f"{cost.name} on {args.gpus} x {args.gpu}, simulated"
        curves.draw(simulated, curves.knee(cost, node), title, args.picture)


def replay_model(args: argparse.Namespace, sessions: list) -> None:
    """Every concurrency with a fresh cache, on the disk in a folder that is deleted afterwards."""
    from . import replay
    from .prefix_cache import PrefixCache

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

    def finished():
        if not results:
            return "nothing was finished"
        print(replay.replayed_table(results), end="")
        others = args.concurrency[len(results) :]
        return f"the table has what was finished; to go on, ask for --concurrency {' '.join(map(str, others))}"

    with keeping(finished):
        for concurrency in args.concurrency:
            with tempfile.TemporaryDirectory() as folder:
                budgets = args.device_bytes, args.host_bytes, folder if args.disk_bytes else None, args.disk_bytes
                cache = PrefixCache(model, *budgets, block=16, every=512, write_through=args.write_through)
                with contextlib.closing(cache):
                    results.append(replay.replay(cache, sessions, concurrency, args.turns))
    print(replay.replayed_table(results), end="")


# --- kimi-k3 serve ---------------------------------------------------------------------------------------------------


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", type=Path, metavar="MODEL", help="folder of the checkpoint")
    add("--host", default="127.0.0.1", metavar="H", help="address to listen on (default: %(default)s)")
    add(
        "--port",
        type=number(int, lambda n: 0 <= n < 65536, "must be a port"),
        default=8000,
        metavar="P",
        help="default: %(default)s",
    )
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: a GPU if any")
    add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="default: that of the checkpoint")
    add("--api-key", metavar="KEY", help="that requests need; better in the environment, as KIMI_K3_API_KEY")
    add = parser.add_argument_group("many requests at once").add_argument
    add("--max-running", type=at_least_one, default=64, metavar="N", help="at a time (default: %(default)s)")
    about = "for their states and latents (default: room for 65,536 tokens)"
    add("--memory", type=byte_count, metavar="B", help=about)
    about = "that one step reads, so that long prompts do not hold up the others (default: 2048, on a GPU 8192)"
    add("--step-tokens", type=at_least_one, metavar="N", help=about)
    about = "host memory for those that give way (default: none, they are computed again)"
    add("--evicted-bytes", type=byte_count, default=0, metavar="B", help=about)
    about = "no bit of a text depends on the others; costs what batches save"
    add("--batch-invariant", action="store_true", help=about)
    add = parser.add_argument_group("prefix cache").add_argument
    add("--device-bytes", type=byte_count, default=10**9, metavar="B", help="default: 1G")
    add("--host-bytes", type=byte_count, default=0, metavar="B", help="host memory (default: none)")
    add("--folder", type=Path, metavar="DIR", help="keep prefixes on the disk too, across restarts")
    add("--disk-bytes", type=byte_count, default=10**10, metavar="B", help="with --folder (default: 10G)")
    add = parser.add_argument_group("limits").add_argument
    add("--max-prompt-tokens", type=at_least_one, metavar="N", help="default: what the model reads")
    add("--max-new-tokens", type=at_least_one, default=4096, metavar="N", help="default: %(default)s")
    add("--max-seconds", type=at_least_one, default=300, metavar="N", help="a request may take (default: %(default)s)")
    add(
        "--max-waiting",
        type=at_least_one,
        default=256,
        metavar="N",
        help="texts that may wait to begin (default: %(default)s)",
    )
    add(
        "--max-connections",
        type=at_least_one,
        default=512,
        metavar="N",
        help="that may be open at once (default: %(default)s)",
    )


def check_address(host: str, port: int) -> None:
    """Refuse an address at which no server can listen, before minutes of loading."""
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            with socket.socket(family, kind, protocol) as link:
                link.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                link.bind(address)
    except (OSError, UnicodeError) as error:  # UnicodeError: of a name that is too long
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"the server cannot listen at {host}, port {port}: {reason}") from error


def run_serve(args: argparse.Namespace) -> None:
    """Serve completions and chats until a signal; what is under way is finished and kept prefixes are written."""
    with needing("serving", "serve"):
        import uvicorn

        from . import server
        from .batching import BatchEngine
        from .connections import uvicorn_options
        from .prefix_cache import PrefixCache
        from .stopping import CompletionServer
    if args.api_key == "":  # of a variable that is not set: everybody would be let in
        raise UsageError("--api-key is empty: give a key, or leave the option out to let everybody in")
    device = choose_device(args.device)
    config = read_config(args.model)
    tokenizer = load_tokenizer(args.model)
    check_address(args.host, args.port)
    model = load_model(args.model, device, args.dtype)
    budgets = args.device_bytes, args.host_bytes, args.folder, args.disk_bytes if args.folder else 0
    try:
        cache = PrefixCache(model, *budgets)
    except (OSError, ValueError) as error:
        raise UsageError(f"the prefix cache cannot be made: {error}") from error
    with explained(ValueError):
        batches = BatchEngine(
            model,
            args.max_running,
            args.memory,
            step_tokens=args.step_tokens,
            host_bytes=args.evicted_bytes,
            batch_invariant=args.batch_invariant,
            prefix_cache=cache,
        )
    most_tokens = args.max_prompt_tokens or config.max_position_embeddings
    open_at_once = server.ConnectionLimits(args.max_connections)
    limits = server.Limits(
        most_tokens, args.max_new_tokens, args.max_seconds, args.max_waiting, connections=open_at_once
    )
    name = args.model.resolve().name
    api_key = args.api_key or os.environ.get("KIMI_K3_API_KEY") or None
    app = server.build_app(batches, tokenizer, name, limits, api_key)
    print(
        f"model {name!r} at http://{args.host}:{args.port}/v1; Ctrl-C lets running requests end, for "
        f"at most {limits.stop_seconds:g} seconds",
        file=sys.stderr,
    )
    options = uvicorn.Config(app, host=args.host, port=args.port, **uvicorn_options(open_at_once))
    CompletionServer(options, app.state.engine, limits.stop_seconds).run_until_stopped()


# name: (help, declares the arguments, runs)
COMMANDS = {
    "replay": ("play a trace through the prefix cache, or simulate it", add_replay_arguments, run_replay),
    "serve": ("answer completions over HTTP", add_serve_arguments, run_serve),
    "cache": ("count or delete the prefixes kept in a folder", add_cache_arguments, run_cache),
}
