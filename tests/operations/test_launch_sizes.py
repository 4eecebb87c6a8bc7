"""Tiles, warps and stages: where a GPU has less than the one that they were measured on, a program takes less."""

import pytest
import torch

from kimi_k3.kernels import triton_tools as tools

pytest.importorskip("triton")

from kimi_k3.kernels import (
    attn_res_triton,
    expert_rows_triton,
    experts_triton,
    kda_chunk_triton,
    mla_decode_triton,
    norms_triton,
)

pytestmark = pytest.mark.one_release

HALF, FLOAT = torch.bfloat16, torch.float32
H200 = 232448  # bytes of shared memory that a program may have

CASES = {
    mla_decode_triton.tiles: [
        ((HALF, 512, H200), (64, 64, 8, 2)),
        ((HALF, 256, 225 * 1024), (64, 64, 8, 2)),
        ((HALF, 255, H200), (64, 32, 4, 3)),
        ((HALF, 256, 225 * 1024 - 1), (64, 32, 8, 3)),
        ((HALF, 512, 192 * 1024), (64, 32, 8, 3)),
        ((HALF, 512, 192 * 1024 - 1), (16, 32, 4, 2)),
        ((HALF, 512, 64 * 1024 + 1), (16, 32, 4, 2)),
        ((HALF, 512, 64 * 1024), (16, 32, 4, 1)),
        ((FLOAT, 512, H200), (16, 16, 4, 1)),
    ],
    # One round of 132, then as many tiles a program as four outweigh.
    mla_decode_triton.count_splits: [
        ((2, 4096, 132), 66),
        ((1, 3, 132), 3),
        ((500, 100, 132), 1),
        ((100, 1000, 132), 5),
        ((132, 8, 132), 1),
        ((66, 8, 132), 2),
        ((1, 132, 132), 132),
    ],
    # One expert's pairs on average; packed weights are decoded once for three parts of 64.
    experts_triton.tile_size: [
        ((8, 8, True), (16, 1)),
        ((8 * 16, 8, False), (16, 1)),
        ((8 * 16 + 1, 8, False), (32, 1)),
        ((8 * 64, 8, True), (64, 1)),
        ((8 * 64 + 1, 8, True), (64, 3)),
        ((8 * 64 + 1, 8, False), (128, 1)),
        ((8 * 500, 8, False), (128, 1)),
    ],
    experts_triton.block_sizes: [
        ((16, 1, True, False, FLOAT, torch.int32, H200), (128, 8, 4, 1)),
        ((16, 1, False, True, FLOAT, FLOAT, H200), (32, 32, 4, 1)),
        ((64, 3, True, False, HALF, torch.int32, H200), (128, 16, 8, 3)),
        ((64, 1, True, True, HALF, torch.int32, H200), (128, 16, 4, 3)),
        ((128, 1, False, True, HALF, HALF, H200), (256, 64, 8, 4)),
        ((128, 1, False, False, HALF, HALF, H200), (128, 64, 8, 4)),
        ((16, 1, False, False, HALF, HALF, H200), (64, 128, 4, 3)),
        ((16, 1, False, True, HALF, HALF, H200), (64, 128, 4, 3)),
        # Two steps in flight are 2 x (3 x 64 rows of 16 words, 256 bytes each, and 128 rows of 68 bytes).
        ((64, 3, True, False, HALF, torch.int32, 115712), (128, 16, 8, 3)),
        ((64, 3, True, False, HALF, torch.int32, 115711), (128, 16, 8, 2)),
        ((64, 3, True, False, HALF, torch.int32, 57855), (128, 8, 8, 2)),
        # 128 rows of 64 bfloat16, and as many of float32 for gate and up.
        ((128, 1, False, False, HALF, FLOAT, H200), (128, 64, 8, 3)),
        ((128, 1, False, False, HALF, FLOAT, 2 * 81920 - 1), (128, 64, 8, 2)),
        ((128, 1, False, False, HALF, FLOAT, 81919), (128, 32, 8, 2)),
    ],
    expert_rows_triton.combine_blocks: [((3584,), (512, 4)), ((100,), (128, 1)), ((10,), (16, 1))],
    expert_rows_triton.backward_blocks: [
        ((3584, 16, 2), (256, 16, 4)),
        ((3584, 200, 4), (64, 256, 16)),
        ((40, 2, 2), (64, 2, 1)),
        ((3584, 8, 4), (256, 8, 4)),
    ],
    norms_triton._blocks: [((7168,), (8192, 1, 8)), ((128,), (128, 16, 2)), ((40000,), (65536, 1, 16))],
    attn_res_triton._warps: [((7168,), 8), ((56,), 1), ((2048,), 2), ((65536,), 16)],
    attn_res_triton._stages: [((torch.empty(0),), 1), ((torch.empty(0, dtype=HALF),), 4)],
    kda_chunk_triton.value_block: [((128, HALF), 64), ((128, FLOAT), 16), ((20, HALF), 32), ((3, FLOAT), 16)],
    kda_chunk_triton.scan_stages: [((HALF,), 3), ((FLOAT,), 1)],
}


@pytest.mark.parametrize("function", CASES, ids=lambda function: f"{function.__module__[8:]}.{function.__name__}")
def test_sizes(function, monkeypatch):
    monkeypatch.setattr(tools, "USE_PTX", True)
    monkeypatch.setattr(torch.version, "hip", None)
    uncached = getattr(function, "__wrapped__", function)
    for arguments, sizes in CASES[function]:
        assert uncached(*arguments) == sizes, arguments


def test_a_device_without_room_for_a_pipeline_has_none(monkeypatch):
    """AMD's MI300 has 64 KB; unpacked weights take their part of it, because its products do not read registers."""
    monkeypatch.setattr(tools, "USE_PTX", False)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert kda_chunk_triton.scan_stages(HALF) == attn_res_triton._stages(torch.empty(0, dtype=HALF)) == 1
    sizes = experts_triton.block_sizes.__wrapped__
    assert sizes(16, 1, True, False, HALF, torch.int32, 65536) == (128, 16, 4, 3)


@pytest.mark.parametrize(
    ("length", "sequences", "segments"),
    [(32768, 1, 4), (32737, 1, 4), (32736, 1, 1), (32768, 2, 2), (32768, 4, 1), (32768, 9, 1)],
)
def test_few_long_sequences_are_cut_into_segments(length, sequences, segments, monkeypatch):
    """Two programs a multiprocessor; where that is one a sequence, or the sequences are short, nothing is cut."""
    monkeypatch.setattr(tools, "multiprocessors", lambda device: 132)
    assert kda_chunk_triton.segments_of(sequences, 32, length, 128, torch.device("cpu")) == segments
