"""Where the parts of segments are kept: memory of a device, pinned memory of the host, files.

A part is named (segment key, "latents" or "state") and is a dict of tensors that nobody writes to. Every tier has a
budget of bytes and ranks its parts by GreedyDual-Size (Cao and Irani, 1997): LRU weighted by the cost of computing a
part again for each byte it takes. `PrefixCache` decides which part may go, and where to.
"""

import contextlib
import errno
import fcntl
import hmac
import json
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy
import torch
from safetensors.torch import load, save

from ..files_kimi_k3 import sync, tensors_sum

logger = logging.getLogger(__name__)

PartId = tuple[str, str]
Tensors = dict[str, torch.Tensor]
FORMAT, SUFFIX = "kimi-k3 prefix 1", ".safetensors"
# Seconds that threads which waited for the GPU have the interpreter to themselves, before writing files occupies it.
GRACE = 0.02


class Behind:
    """Work that no first token waits for: copies and files, made in order by one thread once `start` is called.

    Threads may share it. An error is logged and does not stop what comes after.
    """

    def __init__(self):
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefix-cache-writer")
        self._lock = threading.Lock()
        self._waiting: list[tuple] = []
        self._closed = False

    def add(self, work: Callable, *args) -> None:
        """Queue `work(*args)` for after the next `start`."""
        with self._lock:
            self._waiting.append((work, *args))

    def start(self, device: torch.device | None = None) -> None:
        """Do the queued work; with a device, once it has finished what this thread gave it before."""
        with self._lock:
            if self._closed:
                self._waiting.clear()
            event = recorded(device) if self._waiting and device is not None else None
            if event is not None:
                self._thread.submit(self._logged, event.synchronize)
                self._thread.submit(time.sleep, GRACE)
            for work in self._waiting:
                self._thread.submit(self._logged, *work)
            self._waiting.clear()

    @staticmethod
    def _logged(work: Callable, *args) -> None:
        try:
            work(*args)
        except Exception:
            logger.exception("prefix cache: a copy behind the first token failed")

    def flush(self) -> None:
        """Wait until everything added before is done."""
        self.start()
        with contextlib.suppress(RuntimeError):  # of a thread that was closed, when all was done
            self._thread.submit(lambda: None).result()

    def close(self) -> None:
        """`flush`; what is added later is not done."""
        self.start()
        with self._lock:
            self._closed = True
        self._thread.shutdown()


def recorded(device: torch.device):
    """An event behind what this thread gave the device so far; None where calls return when their work is done."""
    module = torch.get_device_module(device)
    if device.type == "cpu" or not hasattr(module, "Stream"):
        return None
    return module.current_stream(device).record_event()


def _home(tensors: Tensors) -> torch.device:
    """The device of a part: tokens may lie in host memory beside latents that do not."""
    devices = [tensor.device for tensor in tensors.values()]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def on_host(tensors: Tensors, ready) -> Tensors:
    """The tensors in host memory, page-locked if they are copied from a GPU; those already there are not copied.

    Args:
        ready: the event behind which a GPU's tensors are computed. All copies are then under way at once, beside
            what the GPU computes, and are waited for together.
    """
    if ready is None:
        return {name: tensor.cpu() for name, tensor in tensors.items()}
    device = _home(tensors)
    module = torch.get_device_module(device)
    stream = module.Stream(device)
    stream.wait_event(ready)
    with module.stream(stream):
        copies = {name: tensor.to("cpu", non_blocking=True) for name, tensor in tensors.items()}
    stream.synchronize()
    return copies


@dataclass
class Entry:
    """`cost` is what recomputing the part takes; `tensors` is None where they lie in a file; `ready` is the event
    behind which they are computed, where they lie on a GPU and are yet to be copied."""

    bytes: int
    cost: float
    priority: float
    tensors: Tensors | None = None
    ready: object = None


class Tier:
    """Counts bytes and ranks the parts of one place."""

    def __init__(self, budget: int):
        self.budget, self.used, self.clock = budget, 0, 0.0
        self.entries: dict[PartId, Entry] = {}
        self.written_bytes = self.read_bytes = self.evicted_bytes = 0
        self._lock = threading.RLock()

    @staticmethod
    def size_of(tensors: Tensors) -> int:
        """Bytes that `put` will count."""
        return sum(tensor.nbytes for tensor in tensors.values())

    def __contains__(self, part: PartId) -> bool:
        return part in self.entries

    def _enter(self, part: PartId, size: int, cost: float, tensors: Tensors | None) -> Entry:
        entry = Entry(size, cost, self.clock + cost / max(size, 1), tensors)
        self.entries[part] = entry
        self.used += size
        return entry

    def touch(self, part: PartId) -> None:
        """The part was used: it now ranks as if it were new."""
        entry = self.entries.get(part)
        if entry is not None:
            entry.priority = self.clock + entry.cost / max(entry.bytes, 1)

    def revalue(self, part: PartId, cost: float) -> None:
        """What recomputing the part takes has changed; its age has not."""
        entry = self.entries.get(part)
        if entry is not None:
            entry.priority += (cost - entry.cost) / max(entry.bytes, 1)
            entry.cost = cost

    def drop(self, part: PartId) -> Entry | None:
        entry = self.entries.pop(part, None)
        if entry is not None:
            self.used -= entry.bytes
            entry.tensors = None  # a queued copy must neither be made nor keep them alive
        return entry

    def evict(self, part: PartId) -> Entry:
        """Drop a part, and let the others age by what it was worth."""
        entry = self.drop(part)
        self.clock = max(self.clock, entry.priority)
        self.evicted_bytes += entry.bytes
        return entry

    def own(self, entry: Entry) -> None:
        """Of a tier below the device's: hold copies in host memory in place of tensors that lie on the device."""
        with self._lock:
            tensors, ready = entry.tensors, entry.ready
        if tensors is None:
            return
        copies = on_host(tensors, ready)
        with self._lock:
            if entry.tensors is tensors:  # otherwise another thread was faster, or the file is written
                entry.tensors, entry.ready = copies, None

    def close(self) -> None:
        """Release what is open."""


class MemoryTier(Tier):
    """Tensors on the model's device, or with `behind` in host memory: page-locked copies of a GPU's, made later."""

    def __init__(self, name: str, device: torch.device, budget: int, behind: Behind | None = None):
        super().__init__(budget)
        self.name, self.device, self.behind = name, device, behind

    def put(self, part: PartId, tensors: Tensors, cost: float, metadata: dict[str, str] | None = None) -> Entry:
        stored = {}
        for name, tensor in tensors.items():
            if self.behind is None:  # CUDA has read pageable memory when the call returns: no need to wait for more
                tensor = tensor.to(self.device, non_blocking=self.device.type == "cuda")
            if tensor.untyped_storage().nbytes() != tensor.nbytes:
                tensor = tensor.clone()  # a view would keep more bytes alive than are counted
            stored[name] = tensor
        entry = self._enter(part, self.size_of(stored), cost, stored)
        self.written_bytes += entry.bytes
        if self.behind is not None:
            entry.ready = recorded(_home(stored))
            self.behind.add(self.own, entry)
        return entry

    def get(self, part: PartId) -> Tensors | None:
        entry = self.entries.get(part)
        if entry is None:
            return None
        self.read_bytes += entry.bytes
        return entry.tensors


def part_of(name: str) -> PartId | None:
    """The part that a file of this name holds; None for one of another kind."""
    key, _, kind = name.removesuffix(SUFFIX).partition(".")
    return (key, kind) if name.endswith(SUFFIX) and kind in ("latents", "state") else None


def secret_key() -> bytes | None:
    """With `KIMI_K3_PREFIX_KEY` in the environment parts are authenticated: who has it alone makes files that are used.

    Raises:
        ValueError: for a key of less than 16 bytes.
    """
    key = os.environ.get("KIMI_K3_PREFIX_KEY", "").encode()
    if key and len(key) < 16:
        raise ValueError(f"KIMI_K3_PREFIX_KEY has {len(key)} bytes: a key needs 16 at least")
    return key or None


def checksum(key: str, kind: str, tensors: Tensors) -> str:
    return tensors_sum(f"{key} {kind}", tensors, secret_key())


def open_part(path: Path) -> BinaryIO:
    """A file to read; a link, a pipe or a device of that name is not opened.

    Raises:
        OSError: if there is none.
        ValueError: if it is no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError("it is no regular file")
    return open(descriptor, "rb")


def read_header(file: BinaryIO) -> dict:
    """The header of safetensors, with its metadata; the file then stands at its data."""
    length = int.from_bytes(file.read(8), "little")
    if length > os.fstat(file.fileno()).st_size:
        raise ValueError("its header is longer than the file")
    return json.loads(file.read(length))


# A folder that cannot be written at all, other than one that is full.
_UNUSABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP}


def open_private(path: str, flags: int) -> int:
    """Opens a file for the user's eyes only, and neither through a link nor a pipe."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.ENOTDIR, "it is no regular file", path)
    return descriptor


class DiskTier(Tier):
    """One safetensors file a part, in a folder that several processes may share, for the user's eyes only.

    A file appears under its name only when it is whole and on the disk (written aside, synced, renamed), and its
    checksum is verified whenever it is read. Writing is done by the thread of `behind`; until it is done the tensors
    are served from memory. The names of parts whose writing failed wait in `failed`.

    Attributes:
        bypassed: whether the folder turned out not to be usable. It is left alone then, and nothing fits in the tier.
    """

    name = "disk"

    def __init__(self, folder: Path, budget: int, namespace: str, behind: Behind):
        super().__init__(budget)
        self.folder, self.namespace, self.behind = folder / namespace, namespace, behind
        self.failed: list[PartId] = []
        self.bypassed = False
        self._ignored: set[str] = set()  # names in the folder that are no parts and cannot be deleted
        self._seen: int | None = None
        self._file_lock: BinaryIO | None = None
        # the lock is held jointly with other processes, except by one that is alone, until `settle`
        self._alone = False
        try:
            self._open(folder)
        except OSError as error:
            self.bypass(error)

    def _open(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder.mkdir(mode=0o700, exist_ok=True)
        status = self.folder.lstat()
        if not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(f"{self.folder} is a link")
        if status.st_mode & 0o077:  # of an earlier version
            self.folder.chmod(0o700)
        self._file_lock = open(self.folder / "lock", "ab", opener=open_private)
        try:
            fcntl.flock(self._file_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._alone = True
        except BlockingIOError:
            fcntl.flock(self._file_lock, fcntl.LOCK_SH)

    def bypass(self, reason: Any) -> None:
        """Leave the folder alone from here on; parts that lie nowhere else are lost."""
        with self._lock:
            if not self.bypassed:
                logger.warning("prefix cache: %s is left alone, prefixes stay in memory: %s", self.folder, reason)
            self.bypassed, self.budget = True, 0
            self.failed = list(self.entries)

    def path(self, part: PartId) -> Path:
        return self.folder / f"{part[0]}.{part[1]}{SUFFIX}"

    def scan(self) -> dict[PartId, int]:
        """Whole files that this object does not know yet and their sizes; empty while nothing in the folder changed."""
        if self.bypassed:
            return {}
        try:
            now = self.folder.stat().st_mtime_ns
            if now == self._seen:
                return {}
            # clocks of file systems are coarse: a recent change may hide a later one
            self._seen = now if time.time_ns() - now > 10**8 else None
            with os.scandir(self.folder) as files:
                return dict(self._new_parts(files))
        except FileNotFoundError:  # somebody deleted the folder: parts in memory still serve
            return {}
        except OSError as error:
            self.bypass(error)
            return {}

    def _new_parts(self, files: Iterable[os.DirEntry]) -> Iterator[tuple[PartId, int]]:
        for file in files:
            part = part_of(file.name)
            if part is None or part in self.entries or file.name in self._ignored:
                continue
            with contextlib.suppress(FileNotFoundError):  # another process has evicted it meanwhile
                status = file.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    yield part, status.st_size
                else:
                    self._ignore(file.name, "it is no regular file")

    def _ignore(self, name: str, reason: Any) -> None:
        self._ignored.add(name)
        logger.warning("prefix cache: %s is left alone: %s", name, reason)

    def adopt(self, part: PartId, size: int, cost: float) -> None:
        """Count a file that another process wrote, or an earlier one."""
        with self._lock:
            if part not in self.entries:
                self._enter(part, size, cost, None)

    @staticmethod
    def size_of(tensors: Tensors) -> int:
        """With room for the file's header, whose exact size is known only when the file is written."""
        return Tier.size_of(tensors) + 1024 + 160 * len(tensors)

    def describe(self, key: str) -> tuple[str, int, bool, bytes, list[int]] | None:
        """(parent's key, start, steps, forward, tokens) of a segment, without its latents; None for a damaged file."""
        part = key, "latents"
        try:
            with open_part(self.path(part)) as file:
                header = read_header(file)
                metadata, (begin, end) = header["__metadata__"], header["tokens"]["data_offsets"]
                self._check(metadata)
                file.seek(begin, os.SEEK_CUR)
                tokens = numpy.frombuffer(file.read(end - begin), "<i8").tolist()
                if len(bytes.fromhex(metadata["parent"])) != 32:
                    raise ValueError("its parent is none")
                forward = bytes.fromhex(metadata.get("forward", ""))
                return metadata["parent"], int(metadata["start"]), metadata["steps"] == "1", forward, tokens
        except FileNotFoundError:
            return None
        except Exception as error:  # any error that a damaged file causes in the readers
            self.reject(part, error)
            return None

    def _check(self, metadata: dict[str, str]) -> None:
        if (metadata["format"], metadata["namespace"]) != (FORMAT, self.namespace):
            raise ValueError("it belongs to another model or format")

    def reject(self, part: PartId, reason: Any) -> None:
        """Delete a file that must never be used; one that cannot be deleted is left alone."""
        path = self.path(part)
        logger.warning("prefix cache: %s is dropped: %s", path.name, reason)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            self._ignore(path.name, error.strerror)

    def settle(self) -> None:
        """After the first look at the folder, if nobody else is there who may know them: delete files that a killed
        process began, and those of no known text; then let others in."""
        if not self._alone or self.bypassed:
            return
        self._seen = None
        try:
            for file in (*map(self.path, self.scan()), *self.folder.glob("*.writing")):
                if not file.is_dir():
                    file.unlink(missing_ok=True)
        except OSError as error:
            self.bypass(error)
        fcntl.flock(self._file_lock, fcntl.LOCK_SH)

    def put(self, part: PartId, tensors: Tensors, cost: float, metadata: dict[str, str]) -> Entry:
        with self._lock:
            entry = self._enter(part, self.size_of(tensors), cost, tensors)
            entry.ready = recorded(_home(tensors))
        self.behind.add(self._write, part, entry, metadata)
        return entry

    def _write(self, part: PartId, entry: Entry, metadata: dict[str, str]) -> None:
        aside = self.folder / f"{part[0]}.{part[1]}.{os.getpid()}-{threading.get_native_id()}.writing"
        try:
            if self.bypassed or self.path(part).name in self._ignored:
                self._has_failed(part, entry)
                return
            self.own(entry)
            tensors = entry.tensors
            if tensors is None:  # evicted before its turn
                return
            header = {"format": FORMAT, "namespace": self.namespace, "checksum": checksum(*part, tensors), **metadata}
            data = save(tensors, metadata=header)
            with open(aside, "wb", opener=open_private) as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            with self._lock:
                if self.entries.get(part) is not entry:
                    aside.unlink(missing_ok=True)
                    return
                os.replace(aside, self.path(part))
                entry.tensors = None
                self.used += len(data) - entry.bytes
                entry.bytes = len(data)
                self.written_bytes += len(data)
            sync(self.folder)
        except Exception as error:  # of the file system, or of the device that holds the tensors
            self._not_written(part, entry, aside, error)

    def _not_written(self, part: PartId, entry: Entry, aside: Path, error: Exception) -> None:
        if isinstance(error, OSError) and error.errno in _UNUSABLE:
            self.bypass(error)
            return
        logger.warning("prefix cache: %s could not be written and is not kept on disk: %s", aside.name, error)
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        self._has_failed(part, entry)

    def _has_failed(self, part: PartId, entry: Entry) -> None:
        with self._lock:
            if self.entries.get(part) is entry:
                self.failed.append(part)

    def read(self, part: PartId) -> Tensors | None:
        """The tensors of a file, or None if it is gone, torn, changed or foreign; such a file is deleted."""
        try:
            with open_part(self.path(part)) as file:
                data = file.read()
        except (OSError, ValueError):
            return None
        try:
            length = int.from_bytes(data[:8], "little")
            metadata = json.loads(data[8 : 8 + length])["__metadata__"]
            tensors = load(data)
            self._check(metadata)
            if not hmac.compare_digest(metadata["checksum"], checksum(*part, tensors)):
                raise ValueError("its checksum is wrong")
        except Exception as error:  # any error that a damaged file causes in the readers
            self.reject(part, error)
            return None
        self.read_bytes += len(data)
        return tensors

    def get(self, part: PartId) -> Tensors | None:
        with self._lock:
            entry = self.entries.get(part)
            if entry is None:
                return None
            if entry.tensors is not None:
                return entry.tensors
        return self.read(part)

    def drop(self, part: PartId) -> Entry | None:
        with self._lock:
            lies_there = part in self.entries and self.entries[part].tensors is None
            entry = super().drop(part)
            if lies_there and not self.bypassed:
                try:
                    self.path(part).unlink(missing_ok=True)
                except OSError as error:  # what cannot be deleted takes room that cannot be counted
                    self.bypass(error)
            return entry

    def close(self) -> None:
        if self._file_lock is not None:
            self._file_lock.close()
