"""What the package writes and reads again: whole or not there, and known to be damaged when it is.

A file is written aside, synced and renamed, so that a kill or a full disk leaves what was there before. A SHA-256 of
all that it holds goes with it: in the metadata of safetensors, in a field of a JSON record, behind the end of a
`torch.save` file (which torch still reads).
"""

import contextlib
import hashlib
import hmac
import itertools
import json
import logging
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import safe_open
from safetensors.torch import save_file

logger = logging.getLogger(__name__)

# Bytes that one thread hashes at a time.
_PIECE = 1 << 24
_TRAILER = b"\nsha256 "
_TRAILER_BYTES = len(_TRAILER) + 64 + 1


class DamagedFile(ValueError):
    """A file that is not as it was written."""


@contextlib.contextmanager
def written_whole(path: str | os.PathLike, keep: Path | None = None) -> Iterator[Path]:
    """A path to write to inside the block, which takes the place of `path` at its end; an error leaves what was there.

    Args:
        keep: where the file that was there goes.
    """
    path = Path(path)
    aside = path.with_name(f"{path.name}.{os.getpid()}.writing")
    try:
        yield aside
        sync(aside)
        if keep is not None and path.exists():
            os.replace(path, keep)
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync(path.absolute().parent)


def sync(path: Path) -> None:
    """Return only when a file's content, or a folder's list of names, is on the disk."""
    if os.name != "posix" and path.is_dir():  # Windows opens no folders
        return
    descriptor = os.open(path, os.O_RDWR if os.name != "posix" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- JSON ------------------------------------------------------------------------------------------------------------


def _record_sum(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:32]


def sealed(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with a field `checksum` over the others; its names are strings, its values what JSON returns."""
    return {**record, "checksum": _record_sum(record)}


def unsealed(record: Any) -> dict[str, Any]:
    """The record that `sealed` was given.

    Raises:
        DamagedFile: if it is not that any more.
    """
    if not isinstance(record, dict):
        raise DamagedFile("it is not a record")
    rest = {name: value for name, value in record.items() if name != "checksum"}
    if record.get("checksum") != _record_sum(rest):
        raise DamagedFile("its checksum is wrong")
    return rest


def save_record(record: Mapping[str, Any], path: Path) -> None:
    """A sealed record in a JSON file of its own."""
    with written_whole(path) as aside:
        aside.write_text(json.dumps(sealed(record), indent=1) + "\n", encoding="utf-8")


def load_record(path: Path) -> dict[str, Any]:
    """
    Raises:
        DamagedFile: if it is not what `save_record` wrote.
        OSError: if it cannot be read.
    """
    try:
        return unsealed(json.loads(path.read_bytes()))
    except ValueError as error:
        raise DamagedFile(f"{path} is damaged") from error


# --- tensors ---------------------------------------------------------------------------------------------------------


def digest_of(tensors: Iterable[torch.Tensor]) -> list[bytes]:
    """SHA-256 of the bytes of each tensor, wherever it lies; one of more than 16 MB has the hash of its pieces' hashes,
    which many threads make."""
    pieces: list[torch.Tensor] = []
    counts = []
    for tensor in tensors:
        of_tensor = tensor.detach().reshape(-1).split(max(_PIECE // tensor.element_size(), 1))
        pieces += of_tensor
        counts.append(len(of_tensor))
    hashes = iter(_by_threads(_piece_digest, pieces, sum(piece.nbytes for piece in pieces)))
    grouped = [list(itertools.islice(hashes, count)) for count in counts]
    return [group[0] if len(group) == 1 else hashlib.sha256(b"".join(group)).digest() for group in grouped]


def _piece_digest(data: torch.Tensor) -> bytes:
    return hashlib.sha256(data.cpu().contiguous().view(torch.uint8).numpy().data).digest()


def _by_threads(digest: Callable[[Any], bytes], pieces: Iterable[Any], size: int) -> list[bytes]:
    if size <= _PIECE:  # threads would cost more than they bring
        return list(map(digest, pieces))
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1), thread_name_prefix="hash") as pool:
        return list(pool.map(digest, pieces))


def file_digest(path: Path) -> str:
    """Hex SHA-256 over those of the file's pieces of 16 MB."""

    def of_piece(start):
        with open(path, "rb") as file:
            file.seek(start)
            return hashlib.sha256(file.read(_PIECE)).digest()

    size = path.stat().st_size
    return hashlib.sha256(b"".join(_by_threads(of_piece, range(0, size, _PIECE), size))).hexdigest()


def tensors_sum(about: str, tensors: Mapping[str, torch.Tensor], key: bytes | None = None) -> str:
    """Hex checksum of named tensors and a text; with a key (HMAC) one that nobody else can make."""
    digest = hmac.new(key, about.encode(), "sha256") if key else hashlib.sha256(about.encode())
    names = sorted(tensors)
    for name, content in zip(names, digest_of(tensors[name] for name in names), strict=True):
        digest.update(f"{name} {tuple(tensors[name].shape)} {tensors[name].dtype}".encode() + content)
    return digest.hexdigest()


def save_tensors(tensors: Mapping[str, torch.Tensor], path: str | os.PathLike, metadata: Mapping[str, str]) -> None:
    """A safetensors file with a checksum in its metadata."""
    about = json.dumps(dict(metadata), sort_keys=True)
    with written_whole(path) as aside:
        save_file(dict(tensors), aside, metadata={**metadata, "checksum": tensors_sum(about, tensors)})


def load_tensors(path: str | os.PathLike) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """(metadata, tensors on the CPU) of a safetensors file that `save_tensors` wrote; ({}, {}) for another one.

    Raises:
        DamagedFile: if it is not as it was written, or no safetensors file.
        OSError: if it cannot be read.
    """
    open(path, "rb").close()  # safetensors has no error of its own for a missing file on every release
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            checksum = metadata.pop("checksum", None)
            if checksum is None:
                return {}, {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except Exception as error:  # of whatever type the reader has for what it cannot read
        raise DamagedFile(f"{path} is damaged: {error}") from error
    if checksum != tensors_sum(json.dumps(metadata, sort_keys=True), tensors):
        raise DamagedFile(f"{path} is damaged: its checksum is wrong")
    return metadata, tensors


def save_described(tensors: Mapping[str, torch.Tensor], weights: Path, description: str, config: Path) -> None:
    """A safetensors file and the JSON text that says what its tensors are, of an adapter for example.

    What was there stays until both are written. A kill leaves the former pair, the new one, or tensors without a text,
    but none of two halves, which would load.
    """
    with written_whole(config) as text, written_whole(weights) as file:
        text.write_text(description + "\n", encoding="utf-8")
        save_file(dict(tensors), file, metadata={"format": "pt"})
        sync(file)
        config.unlink(missing_ok=True)


# --- states of a training --------------------------------------------------------------------------------------------


class _Summed:
    """A file that is written from its start to its end, and the SHA-256 of what was."""

    def __init__(self, file: BinaryIO):
        self._file, self.digest = file, hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


def _generation_before(file: Path) -> Path:
    return file.with_name(f"{file.stem}.before{file.suffix}")


def save_state(state: dict, file: Path) -> None:
    """Write a state of tensors and plain values whole or not at all; the one before stays as `NAME.before.pt`."""
    with written_whole(file, keep=_generation_before(file)) as aside, open(aside, "wb") as opened:
        summed = _Summed(opened)
        torch.save(state, summed)  # type: ignore[arg-type]  # which it writes and flushes, no more
        opened.write(_TRAILER + summed.digest.hexdigest().encode() + b"\n")


def load_state(file: Path, device: torch.device | str = "cpu") -> dict | None:
    """The newest state that `save_state` wrote, or the one before where that is damaged, which a warning tells; None if
    there is neither.

    To be called by the one process that goes on with the run: what a killed one began to write is deleted.

    Raises:
        DamagedFile: if there are states and all are damaged.
    """
    for unfinished in file.parent.glob(f"{file.name}.*.writing"):
        unfinished.unlink(missing_ok=True)
    before = _generation_before(file)
    there = [each for each in (file, before) if each.exists()]
    for each in there:
        if not _is_whole(each):
            continue
        if each is before:
            logger.warning("%s is damaged or gone: the run goes on from the state before it, %s", file, before.name)
            os.replace(before, file)
        return torch.load(file, map_location=device, weights_only=True)
    if old := next((each for each in there if zipfile.is_zipfile(each) and not _has_trailer(each)), None):
        raise DamagedFile(
            f"{old} has no checksum, as states of an older version of this package: finish the run with that one, "
            "or take another folder"
        )
    if there:
        names, verb, them = (file, "is", "it") if len(there) == 1 else (f"{file} and {before.name}", "are", "them")
        raise DamagedFile(f"{names} {verb} damaged: remove {them} to start the run again")
    return None


def remove_state(file: Path) -> None:
    """Delete what `save_state` wrote."""
    for each in (file, _generation_before(file)):
        each.unlink(missing_ok=True)


def _has_trailer(file: Path) -> bool:
    with open(file, "rb") as opened:
        opened.seek(max(opened.seek(0, os.SEEK_END) - _TRAILER_BYTES, 0))
        return opened.read(len(_TRAILER)) == _TRAILER


def _is_whole(file: Path) -> bool:
    """Whether a file is what its trailer says."""
    digest, left = hashlib.sha256(), file.stat().st_size - _TRAILER_BYTES
    with open(file, "rb") as opened:
        while left > 0 and (data := opened.read(min(left, _PIECE))):
            digest.update(data)
            left -= len(data)
        return opened.read() == _TRAILER + digest.hexdigest().encode() + b"\n"
