"""lm-eval's own command with our recall tasks on the path; being of the package, this module registers its classes.

    python -m kimi_k3.eval.harness --model hf --model_args pretrained=checkpoints/small --tasks kimi_k3_fact ...

A folder that carries our code (`save_pretrained` writes it) needs none of this: plain `lm_eval` reads it with
`trust_remote_code=True`.
"""

import os
import sys
from importlib.metadata import entry_points
from pathlib import Path

TASKS_FOLDER = Path(__file__).parent / "tasks"


def main() -> None:
    commands = entry_points(group="console_scripts", name="lm_eval")
    if not commands:
        sys.exit("the harness is not installed: pip install 'kimi-k3[eval]'")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if "--include_path" not in sys.argv:
        sys.argv += ["--include_path", str(TASKS_FOLDER)]
    next(iter(commands)).load()()


if __name__ == "__main__":
    main()
