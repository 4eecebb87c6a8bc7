"""How tests wait: for what they wait for, never for a time in which it should have happened."""

import functools
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import tiny

# Seconds after which something hangs. They measure nothing: on a machine that is as busy as can be, what does not hang
# is done long before.
PATIENCE = 600


def until(happened: Callable[[], object]) -> None:
    """Return as soon as `happened()` is true.

    Raises:
        TimeoutError: it never was.
    """
    end = time.monotonic() + PATIENCE
    while not happened():
        if time.monotonic() > end:
            raise TimeoutError(f"nothing happened within {PATIENCE} seconds")
        time.sleep(0.01)


def sending(number: int, function: Callable, call: int = 1) -> Callable:
    """The function, which sends this process a signal when it is called for the `call`-th time."""
    calls = []

    @functools.wraps(function)
    def sends(*args, **options):
        calls.append(1)
        if len(calls) == call:
            signal.raise_signal(number)
        return function(*args, **options)

    return sends


def work_for(seconds: float | None, spent: Path, function: Callable, *args, **kwargs) -> None:
    """Call a function in a process that the system kills once it has worked for so long; for processes of their own.

    Args:
        seconds: of a processor, not of a clock: how far the function has got by then does not depend on what else the
            machine does. None never kills. What kills is SIGPROF, of which a process learns as little as of SIGKILL.
        spent: file that gets the seconds that the whole function took.
    """
    begin = time.process_time()
    if seconds is not None:
        signal.setitimer(signal.ITIMER_PROF, seconds)
    function(*args, **kwargs)
    spent.write_text(str(time.process_time() - begin))


def run_script(file: str, *arguments: str | Path, gpus: int = 0, **options) -> subprocess.CompletedProcess:
    """Run a test file as a script, which imports what lies in this folder as pytest does.

    Args:
        file: its `__file__`.
        arguments: of the script.
        gpus: as many processes are started by torchrun; without any it is one, which starts others itself.
        options: of `subprocess.run`.
    """
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)] if gpus else []
    command = [sys.executable, "-P", *torchrun, file, *map(str, arguments)]
    return subprocess.run(command, env=tiny.environment(), timeout=PATIENCE, **options)
