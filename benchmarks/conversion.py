"""Throughput and peak memory of conversion beside a plain copy of the same files.

    python benchmarks/conversion.py FOLDER [--experts 896] [--vocabulary 163840] [--repeats 3]

FOLDER gets a checkpoint with the tensor names and shapes of Kimi K3: embedding, head and two full-width layers, the
dense one and one with `--experts` of 896 experts; random bytes. Every run is a process of its own, reads from the disk
(the source is evicted from the page cache) and ends with its files on it (fsync), the copy too. Copy and conversion
take turns, so that both meet the same load; what is written is deleted after each run. A RAM disk shows what conversion
itself costs. The table goes to docs/conversion.md.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from kimi_k3 import KimiK3Config
from kimi_k3.conversion import Target, convert
from kimi_k3.conversion.plan import Shard
from kimi_k3.conversion.source import DTYPES, expected_tensors

CONFIG = Path(__file__).parent.parent / "tests" / "data" / "config_kimi_k3.json"
SHARD = 2_000_000_000
RUNS = {
    "plain copy": None,
    "re-layout: released to flat, other shards": Target(layout="flat", shard_size=3 * SHARD),
    "MXFP4 to bf16": Target(expert_dtype="bf16"),
}


def make_source(folder: Path, experts: int, vocabulary: int) -> None:
    """A folder in the released layout; random bytes, scales around 2^-7, no tail in `A_log`."""
    values = json.loads(CONFIG.read_text())
    values.pop("vision_config")
    values["text_config"] |= {"num_hidden_layers": 2, "num_experts": experts, "vocab_size": vocabulary}
    values["text_config"]["linear_attn_config"] |= {"kda_layers": [1, 2], "full_attn_layers": []}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(values))
    shards = [Shard()]
    for name, entry in expected_tensors(KimiK3Config.from_pretrained(folder)).items():
        if shards[-1].tensors and shards[-1].nbytes > SHARD:
            shards.append(Shard())
        shards[-1].tensors[name] = entry
    noise = memoryview(os.urandom((64 << 20) + 1021))
    scales = memoryview(bytes(torch.randint(116, 124, (8 << 20,), dtype=torch.uint8).numpy()))
    index = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        head, begins = shard.layout()
        with (folder / name).open("wb") as file:
            file.write(head)
            for tensor, begin in begins.items():
                dtype, shape = shard.tensors[tensor]
                size = DTYPES[dtype].itemsize * torch.Size(shape).numel()
                assert file.tell() == begin
                if tensor.endswith("A_log"):
                    file.write(bytes(size))
                while (left := begin + size - file.tell()) > 0:
                    file.write((scales if tensor.endswith("_scale") else noise)[:left])
                index[tensor] = name
            os.fsync(file.fileno())
    total = sum(shard.nbytes for shard in shards)
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)


def measure(run: str, source: Path, destination: Path) -> dict:
    """One run in this process: seconds, bytes read and written, and how far the resident memory rose."""
    for path in source.iterdir():  # every run reads from the disk
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    os.sync()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of the imports
    before = peak_memory()
    start = time.perf_counter()
    if RUNS[run] is None:
        destination.mkdir()
        for path in source.iterdir():
            shutil.copyfile(path, destination / path.name)
            descriptor = os.open(destination / path.name, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
    else:
        convert(source, destination, RUNS[run])
    seconds = time.perf_counter() - start
    size = sum(path.stat().st_size for path in destination.iterdir())
    read = sum(path.stat().st_size for path in source.iterdir())
    return {"seconds": seconds, "read": read, "written": size, "peak": peak_memory() - before}


def peak_memory() -> int:
    """Bytes; Linux."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--experts", type=int, default=896)
    parser.add_argument("--vocabulary", type=int, default=163840)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--run", choices=RUNS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    source, destination = args.folder / "source", args.folder / "out"
    if args.run:
        print(json.dumps(measure(args.run, source, destination)))
        return
    if not source.exists():
        make_source(source, args.experts, args.vocabulary)
    results = {run: [] for run in RUNS}
    for _ in range(args.repeats):
        for run in RUNS:
            command = [sys.executable, "-P", __file__, str(args.folder), "--run", run]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            results[run].append(json.loads(output))
            shutil.rmtree(destination)
    copied = statistics.median(each["written"] / each["seconds"] for each in results["plain copy"])
    print(
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}, ",
        end="",
    )
    print(f"{args.experts} experts, median of {args.repeats}")
    print("\n| run | GB read | GB written | s | written, GB/s | of a plain copy | peak memory, MB |")
    print("|---|---|---|---|---|---|---|")
    for run, each in results.items():
        seconds = statistics.median(one["seconds"] for one in each)
        rate = statistics.median(one["written"] / one["seconds"] for one in each)
        sizes = f"{each[0]['read'] / 1e9:.2f} | {each[0]['written'] / 1e9:.2f}"
        peak = max(one["peak"] for one in each) / 1e6
        print(f"| {run} | {sizes} | {seconds:.1f} | {rate / 1e9:.2f} | {rate / copied:.0%} | {peak:.0f} |")


if __name__ == "__main__":
    main()
