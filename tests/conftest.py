"""Shared fixtures."""

import os
from pathlib import Path

import pytest
import torch

# Read when a kernel is defined: without a GPU, the Triton kernels run in Triton's interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder of the golden checkpoints and published files (its README says where they come from)."""
    return Path(__file__).parent / "data"
