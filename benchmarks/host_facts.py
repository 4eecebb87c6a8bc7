"""What a line of results says besides its case, where the host's time is measured."""

import datetime
import platform
import shlex
import sys
from pathlib import Path

import torch
import transformers


def host_facts(gpu: str | None = None) -> dict[str, str | int | None]:
    return {
        "gpu": gpu,
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}, "
        f"python {platform.python_version()}",
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cpu_threads": torch.get_num_threads(),
    }
