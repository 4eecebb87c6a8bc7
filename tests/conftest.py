"""Shared fixtures."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder of the golden checkpoints and published files (its README says where they come from)."""
    return Path(__file__).parent / "data"
