"""What runs of hours need: one process at a time in their folder, the same inputs to the end, a stop that says what is
kept."""

import contextlib
import hashlib
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from transformers import PreTrainedTokenizerBase


def lock(folder: Path, error: type[Exception]) -> IO[str]:
    """A file that keeps other processes out of `folder`, which is made if need be, until it is closed or this process
    ends in whatever way.

    Args:
        error: raised, with one sentence, while another process works there, and for a folder that cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "lock").open("a")  # a file of that name that is not ours keeps its content
    except OSError as reason:
        raise error(f"{folder} cannot be written: {reason.strerror}") from reason
    try:
        import fcntl
    except ModuleNotFoundError:  # Windows, which has none
        return file
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as reason:
        file.close()
        raise error(f"another process is working in {folder}: wait for it, or choose another folder") from reason
    except OSError:  # a file system without locks
        return file
    if _is_still_there(file, folder / "lock"):
        return file
    file.close()  # whoever held it has taken it away since it was opened
    return lock(folder, error)


def _is_still_there(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hex SHA-256 of what decides which ids a text gets: vocabulary, merges, normalization, special tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content: Any = sorted(tokenizer.get_vocab().items())
    if backend is not None:
        # how a call cut or filled up its texts stays behind in the tokenizer
        content = {**json.loads(backend.to_str()), "truncation": None, "padding": None}
    about = [type(tokenizer).__name__, content, tokenizer.special_tokens_map]
    return hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs in the values of names that both have, each as words for a sentence."""
    return [f"{name} was {before[name]}, is {now[name]}" for name in now if before.get(name, now[name]) != now[name]]


def step_of(line: bytes) -> int | None:
    """The step of which a line of a log tells; None for one that was damaged."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, LookupError, TypeError):
        return None


# --- Ctrl-C and SIGTERM ----------------------------------------------------------------------------------------------


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a command as Ctrl-C does."""


@contextlib.contextmanager
def keeping(said: str | Callable[[], str]) -> Iterator[None]:
    """Around work: what an interruption leaves and how to go on, unless work inside this has said it already."""
    try:
        yield
    except KeyboardInterrupt as stop:
        if stop.args:
            raise
        raise type(stop)(said() if callable(said) else said) from stop


@contextlib.contextmanager
def postponed_stop(notice: str) -> Iterator[list[KeyboardInterrupt]]:
    """Around steps that should end whole: gives a list, in which the first Ctrl-C or SIGTERM puts its exception.

    Whoever runs the steps looks into the list behind each of them and raises what is there. The user reads `notice`
    until then; a second signal acts at once. Outside the main thread nothing changes, nor for signals that are ignored.
    """
    stops: list[KeyboardInterrupt] = []

    def note(number: int, frame: object) -> None:
        stop = Terminated() if number == signal.SIGTERM else KeyboardInterrupt()
        if stops:
            raise stop
        stops.append(stop)
        # past the buffers of Python, in the middle of which a signal may come
        os.write(2, f"\n{notice}\n".encode())

    numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.getsignal(number) for number in numbers}
    before = {number: handler for number, handler in before.items() if handler not in (signal.SIG_IGN, None)}
    for number in before:
        signal.signal(number, note)
    try:
        yield stops
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
