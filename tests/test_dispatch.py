"""Which device and tensors the Triton kernels take, and that a refusal is told once."""

import logging

import pytest
import torch

from kimi_k3.kernels import dispatch


class OnGPU:
    """Stands for a tensor on a GPU, of which only type and device are looked at."""

    def __init__(self, dtype=torch.bfloat16, index=0):
        self.dtype, self.device = dtype, torch.device("cuda", index)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(dispatch, "_device_refusal", lambda device: None)
    dispatch._tell.cache_clear()


def test_cpu_tensors_take_the_torch_path_without_a_word(caplog):
    assert "cpu" in dispatch.triton_refusal(torch.zeros(1))
    assert not caplog.records


def test_everything_supported_is_taken():
    assert dispatch.triton_refusal(OnGPU(), OnGPU(torch.float32), sizes=(16, 256)) is None


@pytest.mark.parametrize(
    ("tensors", "sizes", "reason"),
    [
        ((OnGPU(torch.float64),), (), "float64"),
        ((OnGPU(), OnGPU(index=1)), (), "several devices"),
        ((OnGPU(),), (64, 512), "512 is above 256"),
    ],
)
def test_a_refusal_names_its_reason_and_is_logged_once(tensors, sizes, reason, caplog):
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert reason in dispatch.triton_refusal(*tensors, sizes=sizes)
    assert [reason in record.getMessage() for record in caplog.records] == [True]


def test_the_kernels_can_be_switched_off(monkeypatch):
    monkeypatch.setattr(dispatch, "use_triton", False)
    assert "use_triton" in dispatch.triton_refusal(OnGPU())
