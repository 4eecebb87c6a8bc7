"""What the subcommands of `kimi-k3` share: the parser, errors for users, loading, and types of arguments."""

import argparse
import contextlib
import importlib.util
import io
import os
import signal
import sys
import threading
import traceback
from pathlib import Path

import torch
from transformers import AutoTokenizer

from .. import KimiK3ForCausalLM, KimiK3TextConfig
from ..checkpoint_kimi_k3 import why_no_checkpoint
from ..runs_kimi_k3 import Terminated


class UsageError(ValueError):
    """Input that cannot work; its text is the one sentence that the user reads."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one sentence instead of a usage block."""

    def error(self, message):
        self.exit(2, f"{self.prog}: {one_line(message)}\n")


def add_debug(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--debug", action="store_true", help="show where in the code an error came from")


def run_or_explain(prog: str, run, args: argparse.Namespace) -> int:
    """The exit code of `run(args)`, after one line on stderr for whatever ended it early, and never a traceback.

    Args:
        args: with `debug` (`add_debug`) the traceback comes before the line.

    Returns:
        0; 2 for an error that the user can mend; 1 for any other; 130 after Ctrl-C and 143 after SIGTERM; 141 when
        nobody reads the output any more.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # generated texts have characters that not every terminal knows
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with _terminable():
            run(args)
            sys.stdout.flush()
            return 0
    except BrokenPipeError as error:
        try:
            sys.stdout.flush()
        except BrokenPipeError:  # `kimi-k3 ... | head`: what is in the buffer must not fail again when Python ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
        ended, code, sentence = error, 1, f"{described(error)} (--debug shows where)"  # another pipe or a socket
    except KeyboardInterrupt as error:
        code = 128 + (signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT)
        ended, sentence = error, f"interrupted; {error}" if str(error) else "interrupted"
    except UsageError as error:
        ended, code, sentence = error, 2, one_line(str(error))
    except Exception as error:  # whatever a library raises
        ended, code, sentence = error, 1, f"{described(error)} (--debug shows where)"
    if args.debug:
        traceback.print_exception(ended)
    print(f"{prog}: {sentence}", file=sys.stderr)
    return code


def one_line(text: str, longest: int = 1000) -> str:
    """The lines of a text as one, cut behind `longest` characters."""
    line = " ".join(part.strip() for part in text.splitlines() if part.strip())
    return line if len(line) <= longest else f"{line[:longest]} ..."


def described(error: Exception) -> str:
    """The error on one line, with its type, without which many texts (\'name\', \'0\') say nothing."""
    text = one_line(str(error))
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


# --- Ctrl-C and SIGTERM ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _terminable():
    """SIGTERM raises `Terminated`, unless somebody else decides about it or this is not the main thread."""

    def stop(number, frame):
        raise Terminated

    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


# --- errors of what is called ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def explained(*errors: type[Exception]):
    """Around a block or a command: the text of these `errors` is a sentence for the user too."""
    try:
        yield
    except errors as error:
        raise UsageError(str(error)) from error


@contextlib.contextmanager
def broken(what: str):
    """Around the reading of files: `what` cannot be used, and why. A file that is not what its name says makes
    libraries raise errors of any type."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        # the text of these is a sentence, which their type would only lengthen
        reason = one_line(str(error)) if type(error) in (OSError, ValueError) else described(error)
        raise UsageError(f"{what}: {reason}") from error


@contextlib.contextmanager
def needing(task: str, extra: str):
    """Around the imports of a task: a package that is missing is named, with the extra that brings it."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise UsageError(f"{task} needs {error.name}: pip install 'kimi-k3[{extra}]'") from error


def read_config(folder: Path) -> KimiK3TextConfig:
    """The text configuration of a checkpoint folder, nested or flat; reads no weights."""
    if not folder.is_dir():
        raise UsageError(f"there is no checkpoint folder {folder}")
    if not (folder / "config.json").is_file():
        raise UsageError(why_no_checkpoint(folder))
    with broken(f"the configuration in {folder} cannot be used"):
        return KimiK3TextConfig.from_pretrained(folder)


def load_tokenizer(folder: Path):
    """The tokenizer of a checkpoint folder; code shipped inside the folder is never run."""
    with broken(f"no tokenizer can be loaded from {folder}"):
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def encode(tokenizer, text: str, **options) -> torch.Tensor:
    """Token ids [1, T]. The tokenizer's own warning about long texts is off: `check_length` decides about them."""
    return tokenizer(text, return_tensors="pt", verbose=False, **options).input_ids


def check_ids(ids: torch.Tensor, config: KimiK3TextConfig, folder: Path) -> None:
    """Refuse tokens that the model does not know, which a tokenizer of another model makes."""
    if int(ids.max()) >= config.vocab_size:
        raise UsageError(
            f"the tokenizer in {folder} makes the id {int(ids.max())} and the model knows {config.vocab_size}: they do "
            "not belong together"
        )


def choose_device(name: str) -> torch.device:
    """`auto` takes the GPU where there is one."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda needs a CUDA GPU, and torch sees none")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def load_model(
    folder: Path,
    device: torch.device,
    dtype: str = "auto",
    dequantize: bool = False,
) -> KimiK3ForCausalLM:
    """The model on `device`, in evaluation mode; `auto` keeps the dtype of the checkpoint.

    Values that are not finite are refused: no command writes wrong texts without a word.
    """
    with broken(f"the weights in {folder} cannot be loaded"):
        model = KimiK3ForCausalLM.from_pretrained(
            folder, dtype=dtype, device_map=device, dequantize=dequantize, check_finite=True
        )
    ends = model.generation_config.eos_token_id
    if not all(type(end) is int for end in (ends if isinstance(ends, list) else [ends]) if end is not None):
        raise UsageError(
            f"eos_token_id in {folder / 'generation_config.json'} is no token id: {one_line(str(ends), 100)}"
        )
    return model


def number(kind, accepts, rule: str):
    """An argparse type: `kind` of the text, refused with `rule` unless `accepts` says yes."""

    def convert(text: str):
        try:
            value = kind(text)
        except (ValueError, OverflowError):
            value = None
        if value is None or not accepts(value):
            raise argparse.ArgumentTypeError(f"{rule}, not {text!r}")
        return value

    return convert


at_least_one = number(int, lambda n: n >= 1, "must be a whole number of at least 1")


def add_seed(
    parser: argparse.ArgumentParser, about: str, limit: int = 2**63, rule: str = "must be a whole number of at least 0"
) -> None:
    """`--seed S`, a whole number below `limit`, refused with `rule`."""
    accepted = number(int, lambda s: 0 <= s < limit, rule)
    parser.add_argument("--seed", type=accepted, default=0, metavar="S", help=about)


def refuse_without_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("the pictures need matplotlib: pip install 'kimi-k3[eval]'")


def check_picture(path: Path) -> None:
    """Refuse a picture that could not be drawn, before any work."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("a picture needs matplotlib: pip install 'kimi-k3[plots]'")
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise UsageError(f"{path} must end in .png, .svg or .pdf")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"there is no folder {path.parent} for the picture")
