"""What the subcommands of `kimi-k3` share: the parser, errors for users, loading, and types of arguments."""

import argparse
import contextlib
import importlib.util
import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer

from .. import KimiK3ForCausalLM, KimiK3TextConfig


class UsageError(ValueError):
    """Input that cannot work; its text is the one sentence that the user reads."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one sentence instead of a usage block."""

    def error(self, message):
        self.exit(2, f"{self.prog}: {message}\n")


def run_or_explain(prog: str, run, args: argparse.Namespace) -> int:
    """The exit code of `run(args)`: 0, or 2 after printing the sentence of an error that the user can mend."""
    try:
        run(args)
    except UsageError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    return 0


@contextlib.contextmanager
def explained(*errors: type[Exception]):
    """Around a block or a command: the text of these `errors` is a sentence for the user too."""
    try:
        yield
    except errors as error:
        raise UsageError(str(error)) from error


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
        raise UsageError(f"{folder} is not a checkpoint: it has no config.json")
    try:
        return KimiK3TextConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise UsageError(f"the configuration in {folder} cannot be used: {error}") from error


def load_tokenizer(folder: Path):
    """The tokenizer of a checkpoint folder; code shipped inside the folder is never run."""
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # which of them a missing or broken file raises differs between tokenizer classes
        reason, _, rest = str(error).strip().partition("\n")
        if reason.rstrip().endswith(":"):  # a list follows
            reason = " ".join([reason.rstrip(), *rest.split()])
        raise UsageError(f"no tokenizer can be loaded from {folder}: {reason}") from error


def encode(tokenizer, text: str, **options) -> torch.Tensor:
    """Token ids [1, T]. The tokenizer's own warning about long texts is off: `check_length` decides about them."""
    return tokenizer(text, return_tensors="pt", verbose=False, **options).input_ids


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
    check_finite: bool = False,
) -> KimiK3ForCausalLM:
    """The model on `device`, in evaluation mode; `auto` keeps the dtype of the checkpoint."""
    try:
        return KimiK3ForCausalLM.from_pretrained(
            folder, dtype=dtype, device_map=device, dequantize=dequantize, check_finite=check_finite
        )
    except (OSError, ValueError) as error:
        raise UsageError(f"the weights in {folder} cannot be loaded: {error}") from error


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
