"""Shared fixtures."""

import importlib.util
import json
import os
import re
from pathlib import Path

import pytest
import torch

from which_tests import QUICK

# Read when a kernel is defined: without a GPU, the Triton kernels run in Triton's interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None:
    from interpreter import compute_bfloat16, patch_once_a_launch

    compute_bfloat16()
    patch_once_a_launch()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark what `make quick` runs."""
    folder = Path(__file__).parent
    for item in items:
        left_out = QUICK.get(str(item.path.relative_to(folder)))
        if left_out is not None and not (left_out and re.search(left_out, item.name)):
            item.add_marker("quick")


@pytest.fixture(autouse=True)
def no_kernel_is_given_up():
    """A kernel that does not compile would be replaced by the torch path, and every comparison with it would hold."""
    from kimi_k3.kernels import dispatch

    given_up = dispatch._broken
    yield
    reasons = dict(given_up)
    given_up.clear()
    assert not reasons


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder of the golden checkpoints and published files (its README says where they come from)."""
    return Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def released_table(data_dir):
    """name -> (dtype, shape) of the 497,220 tensors of the released model, from the table of name patterns."""
    from kimi_k3 import KimiK3TextConfig

    config = KimiK3TextConfig()
    of_type = {
        kind: [i for i, t in enumerate(config.layer_types) if t == name]
        for kind, name in (("kda", "linear_attention"), ("mla", "full_attention"))
    }
    tensors = {}
    for row in json.loads((data_dir / "tensors_kimi_k3.json").read_text())["tensors_by_pattern"]:
        name, where = row["name"], row["layers"]
        layers = of_type["kda"] if where.startswith("kda") else of_type["mla"] if where.startswith("mla") else None
        if layers is None:
            layers = {"0-92": range(93), "0": [0]}.get(where, range(1, 93) if where.startswith("1-92") else [None])
        experts = range(896) if "{E}" in name else [None]
        blocks = range(27) if "{B}" in name else [None]
        rows = {
            name.replace("{L}", str(layer)).replace("{E}", str(expert)).replace("{B}", str(block))
            for layer in layers
            for expert in experts
            for block in blocks
        }
        assert len(rows) == row["count"], name
        tensors.update(dict.fromkeys(rows, (row["dtype"], tuple(row["shape"]))))
    return tensors
