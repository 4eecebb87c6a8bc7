"""A folder of kept prefixes seen from outside, without a model: count what is in it, or empty it."""

import contextlib
import fcntl
import re
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from .tiers import SUFFIX, checksum, part_of

_NAMESPACE = re.compile(r"[0-9a-f]{64}")


@dataclass
class ModelFiles:
    """What the folder keeps of one model: texts to start from, tokens of latents, bytes, unusable files."""

    namespace: str
    segments: int = 0
    states: int = 0
    tokens: int = 0
    bytes: int = 0
    broken: int = 0


def namespaces(folder: Path) -> list[Path]:
    """One folder a model.

    Raises:
        ValueError: if there is no such folder, or it holds something else.
    """
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}")
    foreign = [entry.name for entry in folder.iterdir() if not (entry.is_dir() and _NAMESPACE.fullmatch(entry.name))]
    if foreign:
        raise ValueError(f"{folder} is not a folder of prefixes: it holds {foreign[0]}")
    return sorted(folder.iterdir())


def inspect(folder: Path, check: bool = False) -> list[ModelFiles]:
    """Count what lies in the folder; with `check` every file is read and its checksum verified. Changes nothing."""
    models = []
    for place in namespaces(folder):
        counted = ModelFiles(place.name)
        for file in sorted(place.glob("*" + SUFFIX)):
            try:
                key, kind = part_of(file.name)
                size = file.stat().st_size
                with safe_open(file, framework="pt") as opened:
                    metadata = opened.metadata()
                    tokens = opened.get_slice("tokens").get_shape()[0] if kind == "latents" else 0
                    if check:
                        tensors = {name: opened.get_tensor(name) for name in opened.keys()}
                        if metadata["checksum"] != checksum(key, kind, tensors):
                            raise ValueError("its checksum is wrong")
            except FileNotFoundError:  # evicted meanwhile
                continue
            except Exception:  # any error that a damaged file causes in the reader
                counted.broken += 1
                continue
            counted.bytes += size
            counted.tokens += tokens
            counted.segments += kind == "latents"
            counted.states += kind == "state"
        models.append(counted)
    return models


def clear(folder: Path) -> int:
    """Delete every kept prefix; returns the bytes that this freed.

    Raises:
        ValueError: if a process has the folder open; nothing is deleted then.
    """
    places, freed = namespaces(folder), 0
    with contextlib.ExitStack() as locks:
        for place in places:
            lock = locks.enter_context(open(place / "lock", "a"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"{place} is in use: stop the processes that share it first") from None
        for place in places:
            for file in (*place.glob("*" + SUFFIX), *place.glob("*.writing")):
                freed += file.stat().st_size
                file.unlink()
            (place / "lock").unlink()
            place.rmdir()
    return freed
