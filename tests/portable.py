"""Runs the tests marked `portable` as other machines would: with other instructions, orders of sums and threads.

    python -P tests/portable.py [arguments of pytest]

What the instruction sets of a processor change is the order in which sums are added. torch's own loops follow
ATEN_CPU_CAPABILITY on any processor. Products of MKL follow MKL_ENABLE_INSTRUCTIONS on Intel's processors alone, and
MKL_CBWR=COMPATIBLE, an order without any of them, everywhere.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import torch

SETTINGS = (
    {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "OMP_NUM_THREADS": "1"},
    {"ATEN_CPU_CAPABILITY": "avx2", "OMP_NUM_THREADS": "2"},
    {"ATEN_CPU_CAPABILITY": "avx512", "OMP_NUM_THREADS": "1"},
    {"MKL_ENABLE_INSTRUCTIONS": "AVX2", "OMP_NUM_THREADS": "1"},
)


def passes(settings: dict[str, str], arguments: list[str]) -> bool:
    """Run the tests under environment variables and print one line; all that pytest says where one fails."""
    name = " ".join(f"{variable}={value}" for variable, value in settings.items())
    if settings.get("ATEN_CPU_CAPABILITY") == "avx512" and torch.backends.cpu.get_cpu_capability() != "AVX512":
        print(f"{name}: skipped, this processor has no AVX-512", flush=True)
        return True
    workers = max(1, len(os.sched_getaffinity(0)) // int(settings["OMP_NUM_THREADS"]))
    command = [sys.executable, "-P", "-m", "pytest", str(Path(__file__).parent), "-q", "-m", "portable"]
    started = time.monotonic()
    done = subprocess.run(
        [*command, "-n", str(workers), *arguments], env={**os.environ, **settings}, capture_output=True, text=True
    )
    counts = (done.stdout.splitlines() or ["nothing ran"])[-1].partition(" in ")[0]
    print(f"{name}: {counts} in {time.monotonic() - started:.0f} s", flush=True)
    if done.returncode != 0:
        print(done.stdout, done.stderr, sep="\n", flush=True)
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(not all([passes(settings, sys.argv[1:]) for settings in SETTINGS]))
