"""Command line of the package: `kimi-k3 COMMAND ...`, or `python -m kimi_k3 COMMAND ...`.

A subcommand is two functions, one that declares its arguments and one that runs it, in the `COMMANDS` of the package
whose work it is. Input that cannot work ends in one sentence on stderr and exit code 2, as early as possible: before
the weights are read wherever the configuration and the tokenizer are enough to tell. Every other error is one line too,
with exit code 1, and `--debug` shows the traceback; Ctrl-C and SIGTERM say what is kept (`run_or_explain`).
"""

import sys

from .cli.common import Parser, add_debug, run_or_explain
from .cli.generate import COMMANDS as GENERATE_COMMANDS
from .cli.warmup import COMMANDS as WARMUP_COMMANDS
from .conversion.commands import COMMANDS as CONVERSION_COMMANDS
from .costs.commands import COMMANDS as COSTS_COMMANDS
from .eval.commands import COMMANDS as EVAL_COMMANDS
from .serving.commands import COMMANDS as SERVING_COMMANDS
from .training.commands import COMMANDS as TRAINING_COMMANDS

# name: (help, declares the arguments, runs)
COMMANDS = {
    **GENERATE_COMMANDS,
    **TRAINING_COMMANDS,
    **CONVERSION_COMMANDS,
    **EVAL_COMMANDS,
    **COSTS_COMMANDS,
    **SERVING_COMMANDS,
    **WARMUP_COMMANDS,
}


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="kimi-k3", description="Kimi K3 models on the command line.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    for name, (summary, add_arguments, _) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary.capitalize() + ".")
        add_arguments(command)
        add_debug(command)
    args = parser.parse_args(argv)
    return run_or_explain(f"{parser.prog} {args.command}", COMMANDS[args.command][2], args)


if __name__ == "__main__":
    sys.exit(main())
