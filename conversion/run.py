"""Carry a plan out into a folder: resumable, and whole or not there at all (docs/conversion.md)."""

import contextlib
import hashlib
import json
import logging
import os
import shutil
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import torch
from tqdm import tqdm

from ..files_kimi_k3 import DamagedFile, file_digest, load_record, save_record, sync
from ..runs_kimi_k3 import lock
from .plan import Plan, Shard, Target, make_plan
from .source import INDEX, Checkpoint, ConversionError, open_checkpoint
from .steps import carry_out, write_at

logger = logging.getLogger(__name__)

REPORT = "rounding.json"
# Never copied beside the new weights: what the conversion writes itself, and weights in any form.
_NOT_SIDE_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
_LARGEST_SIDE_FILE = 100 << 20


def convert(
    source: str | os.PathLike,
    destination: str | os.PathLike,
    target: Target | None = None,
    *,
    workers: int | None = None,
    overwrite: bool = False,
    allow_pickle: bool = False,
    drop_foreign: bool = False,
    progress: bool = False,
) -> Plan:
    """Write the checkpoint in `source` to `destination` in another form; a killed call is continued by the same call.

    Args:
        source: folder of the checkpoint.
        destination: folder to make; while it is made, everything is in `destination` + `.partial`.
        target: the form to convert into; by default the released layout, with everything else as it is.
        workers: threads; None takes one a core, at most 8.
        overwrite: replace a `destination` that exists, at the very end.
        allow_pickle, drop_foreign: see `open_checkpoint`.
        progress: show a bar of the bytes written.

    Raises:
        ConversionError: for a source, target or destination that does not work; then nothing has been changed. While
            shards are written, for values that the target cannot hold; then only the `.partial` folder exists.
    """
    target = target or Target()
    source, destination = Path(source), Path(destination).resolve()
    work = Path(f"{destination}.partial")
    workers = min(8, os.cpu_count() or 1) if workers is None else workers
    if workers < 1:
        raise ConversionError(f"workers must be at least 1, not {workers}")
    # killed between the last rename and the end: only tidying up is left
    finished = destination.is_dir() and (work / "state.json").is_file() and not (work / "files").exists()
    _check_place(source, destination, work, overwrite or finished)
    checkpoint = open_checkpoint(source, allow_pickle, drop_foreign)
    plan = make_plan(checkpoint, target)
    digest, header_bytes = _digest(plan)
    state = {"options": repr(target), "source": _source_state(checkpoint), "target": digest}
    side_files = _side_files(checkpoint, plan)
    _check_resumable(work, state)
    if finished:
        _tidy(work)
        return plan
    side_bytes = sum((source / path).stat().st_size for path in side_files)
    _check_space(work, destination, plan, plan.total_size + header_bytes + side_bytes)

    files = work / "files"
    files.mkdir(parents=True, exist_ok=True)
    with lock(work, ConversionError):
        save_record(state, work / "state.json")
        unusable: list[str] = []
        bar = tqdm(total=plan.total_size, unit="B", unit_scale=True, disable=not progress)
        with bar, _pool(workers) as pool:
            for shard in plan.shards:
                _write_shard(shard, files, pool, bar, unusable)
        if _source_state(checkpoint) != state["source"]:
            raise ConversionError(f"{source} changed while it was read: delete {work} and start again")
        _finish(checkpoint, plan, side_files, files)
        _put_in_place(work, destination, overwrite)
    if unusable:
        more = f" and {len(unusable) - 1:,} more" if len(unusable) > 1 else ""
        logger.warning("%s%s: values that are not finite were copied as they are", unusable[0], more)
    return plan


# --- before anything is written --------------------------------------------------------------------------------------


def _check_place(source, destination, work, overwrite):
    real = source.resolve()
    for place in (destination, work):
        if real == place or real in place.parents or place in real.parents:
            raise ConversionError(f"{place} is {source} or a folder inside it or around it: take another place")
    if destination.exists() and not destination.is_dir():
        raise ConversionError(f"{destination} is a file")
    if destination.is_mount():
        raise ConversionError(f"{destination} is a mount point, which no rename can replace: take a folder inside it")
    _check_replaceable(destination, overwrite)


def _check_replaceable(destination, overwrite):
    if not destination.exists() or not any(destination.iterdir()):
        return
    if not overwrite:
        raise ConversionError(f"{destination} is there already: --overwrite replaces it when the new one is whole")
    if not (destination / "config.json").is_file():
        raise ConversionError(
            f"{destination} is not a checkpoint (it has no config.json), and --overwrite deletes nothing else: move it "
            "away, or take another place"
        )


def _source_state(checkpoint: Checkpoint) -> list:
    paths = sorted({stored.source.path for stored in checkpoint.tensors.values()})
    paths.append(checkpoint.folder / "config.json")
    return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in paths]


def _digest(plan: Plan) -> tuple[str, int]:
    """What the plan writes, and how many bytes of it are headers."""
    digest, header_bytes = hashlib.sha256(json.dumps(plan.config).encode()), 0
    for shard in plan.shards:
        head, _ = shard.layout()
        digest.update(shard.name.encode() + head)
        header_bytes += len(head)
    return digest.hexdigest(), header_bytes


def _check_resumable(work, state):
    if not (work / "state.json").is_file():
        names = {path.name for path in work.iterdir()} if work.exists() else set()
        if any(name not in ("files", "lock") and not name.endswith(".writing") for name in names):
            raise ConversionError(f"{work} is not the work of a conversion: move it away")
        return
    try:
        before = load_record(work / "state.json")
    except DamagedFile as error:
        raise ConversionError(f"{error}, and what was to be converted is not known: delete {work}") from error
    for part, meaning in (("options", "other options"), ("source", "other source files"), ("target", "another plan")):
        if before.get(part) != state[part]:
            raise ConversionError(
                f"{work} holds a conversion that was begun with {meaning}: finish that one, or delete the folder"
            )


def _check_space(work, destination, plan, size):
    place = destination.parent
    while not place.exists():
        place = place.parent
    # blocks and not sizes: an unfinished shard has its full size from the start
    there = sum(path.stat().st_blocks * 512 for path in work.rglob("*") if path.is_file()) if work.exists() else 0
    index = len(json.dumps(plan.index(), indent=2)) if len(plan.shards) > 1 else 0
    needed = size + index - there
    free = shutil.disk_usage(place).free
    if needed > free:
        raise ConversionError(f"{place} has {free:,} bytes free, and {needed:,} are needed")


# --- shards ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _pool(workers: int):
    """Threads that each compute on one core: torch's own threads inside them would only wait for one another."""
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)


def _write_shard(shard: Shard, files: Path, pool: ThreadPoolExecutor, bar, unusable: list[str]) -> None:
    """Steps that copied values which are not finite are added to `unusable`; a shard that is finished has none."""
    path = files / shard.name
    head, begins = shard.layout()
    size = len(head) + shard.nbytes
    done = files.parent / f"{shard.name}.done"
    if path.is_file():
        if _is_finished(path, done):
            bar.update(shard.nbytes)
            return
        logger.warning("%s was damaged and is written again", path)
    unfinished = path.with_suffix(".tmp")
    rounding = {}
    with unfinished.open("wb") as file:
        descriptor = file.fileno()
        os.ftruncate(descriptor, size)  # what no step writes is zero: the tail of `A_log`
        write_at(descriptor, memoryview(head), 0)
        jobs = [pool.submit(carry_out, step, shard, descriptor, begins) for step in shard.steps]
        try:
            for step, job in zip(shard.steps, jobs, strict=True):
                result, finite = job.result()
                if result is not None:
                    rounding[step.label] = result.report()
                if not finite:
                    unusable.append(step.label)
                bar.update(step.nbytes)
        finally:  # no thread may write to a closed descriptor
            for job in jobs:
                job.cancel()
            wait(jobs)
        os.fsync(descriptor)
    save_record({"digest": file_digest(unfinished), "rounding": rounding}, done)
    unfinished.replace(path)
    sync(files)


def _is_finished(path: Path, done: Path) -> bool:
    """Whether a shard is what was written, by the digest that was kept beside it."""
    try:
        return load_record(done)["digest"] == file_digest(path)
    except (OSError, DamagedFile):
        return False


# --- the end ---------------------------------------------------------------------------------------------------------


def _side_files(checkpoint: Checkpoint, plan: Plan) -> list[Path]:
    """Tokenizer, generation settings and whatever else lies beside the weights, as paths in the folder.

    So does config.json where the plan has no other one. Code goes along only with a configuration that names it: the
    model's own, or that of a tokenizer or processor.
    """
    folder, chosen = checkpoint.folder, []
    if (folder / "adapter_config.json").is_file():
        raise ConversionError(
            f"{folder} has an adapter beside its weights (adapter_config.json), which loads with them and is not "
            "converted: merge it, or move it away"
        )
    code = plan.config is None or any(
        '"auto_map"' in path.read_text(encoding="utf-8", errors="replace")
        for path in folder.glob("*_config.json")
        if path.name != "generation_config.json"
    )
    written = {REPORT} if plan.config is None else {REPORT, "config.json"}
    for path in sorted([*folder.iterdir(), *folder.glob("kernels/*.py"), *folder.glob("additional_chat_templates/*")]):
        if not path.is_file() or path.name in written or path.name.endswith(_NOT_SIDE_FILES):
            continue
        if path.stat().st_size > _LARGEST_SIDE_FILE or (path.suffix == ".py" and not code):
            continue
        # A folder of somebody must not make us copy a file of this machine; the hub's cache links to its own blobs.
        real = folder.resolve()
        if not any(path.resolve().is_relative_to(place) for place in (real, real.parent.parent / "blobs")):
            raise ConversionError(
                f"{path} is a link to a file outside the folder: put a copy in its place or remove it"
            )
        chosen.append(path.relative_to(folder))
    return chosen


def _finish(checkpoint, plan, side_files, files):
    for path in side_files:
        (files / path).parent.mkdir(exist_ok=True)
        shutil.copyfile(checkpoint.folder / path, files / path)
        sync(files / path)
    if plan.config is not None:
        _write_text(files / "config.json", json.dumps(plan.config, indent=2, sort_keys=True) + "\n")
    finished = map(load_record, sorted(files.parent.glob("*.done")))
    rounding = {name: report for shard in finished for name, report in shard["rounding"].items()}
    if rounding:
        _write_text(files / REPORT, json.dumps(rounding, indent=1) + "\n")
    if len(plan.shards) > 1:
        _write_text(files / INDEX, json.dumps(plan.index(), indent=2) + "\n")


def _put_in_place(work, destination, overwrite):
    """One rename makes the folder. The next call deals with what a kill between any two lines leaves behind."""
    _check_replaceable(destination, overwrite)  # again: it may have been made in the meantime
    files = work / "files"
    sync(files)
    if destination.exists():
        destination.replace(work / "replaced")
    files.replace(destination)
    sync(destination.parent)
    _tidy(work)


def _tidy(work):
    """Remove the work folder; the state goes last, since it tells the next call that everything is done."""
    if (work / "replaced").exists():
        shutil.rmtree(work / "replaced")
    for path in [*work.glob("*.done"), *work.glob("*.writing"), work / "lock", work / "state.json"]:
        path.unlink(missing_ok=True)
    work.rmdir()


def _write_text(path: Path, text: str) -> None:
    """Whole or not at all."""
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(text, encoding="utf-8")
    sync(unfinished)
    unfinished.replace(path)
