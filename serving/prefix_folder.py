"""A folder of kept prefixes seen from outside, without a model: count what is in it, or empty it."""

import contextlib
import fcntl
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load

from .tiers import SUFFIX, checksum, open_part, open_private, part_of, read_header

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
    for entry in folder.iterdir():
        if entry.is_symlink() or not (entry.is_dir() and _NAMESPACE.fullmatch(entry.name)):
            raise ValueError(f"{folder} is not a folder of prefixes: it holds {entry.name}")
    return sorted(folder.iterdir())


def inspect(folder: Path, check: bool = False) -> list[ModelFiles]:
    """Count what lies in the folder; with `check` every file is read and its checksum verified. Changes nothing."""
    models = []
    for place in namespaces(folder):
        counted = ModelFiles(place.name)
        for file in sorted(place.glob("*" + SUFFIX)):
            try:
                key, kind = part_of(file.name)
                with open_part(file) as opened:
                    header = read_header(opened)
                    metadata = header.pop("__metadata__")
                    size = opened.tell() + max(tensor["data_offsets"][1] for tensor in header.values())
                    tokens = header["tokens"]["shape"][0] if kind == "latents" else 0
                    if size != file.stat().st_size:
                        raise ValueError("a part of it is missing")
                    if check:
                        opened.seek(0)
                        if metadata["checksum"] != checksum(key, kind, load(opened.read())):
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
        ValueError: if a process has the folder open, or something else lies in it; nothing is deleted then.
    """
    places, freed = namespaces(folder), 0
    with contextlib.ExitStack() as locks:
        for place in places:
            odd = [file.name for file in place.iterdir() if not stat.S_ISREG(file.lstat().st_mode)]
            if odd:
                raise ValueError(f"{place} holds {odd[0]}, which is no regular file: take it away first")
            lock = locks.enter_context(open(place / "lock", "ab", opener=open_private))
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
