"""The state of a run in a file, from which the run continues after a kill."""

import os
from pathlib import Path

import torch


def save_state(state: dict, file: Path) -> None:
    """Write the file whole or not at all: a kill in between leaves the previous state."""
    new = file.with_suffix(".new")
    torch.save(state, new)
    os.replace(new, file)
