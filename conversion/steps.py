"""The steps of a plan, carried out piece by piece: read, compute, write. No tensor is ever whole in memory."""

import math
import os
import threading
from dataclasses import dataclass

import torch

from ..checkpoint_kimi_k3 import count_unusable
from ..kernels.mxfp4 import dequantize_mxfp4, quantize_mxfp4
from .plan import Shard, Step
from .source import DTYPES, PIECE, ConversionError, pieces, raw, shape_of

# Values that a computing step has in memory at once: the decoder needs about 40 bytes for each.
VALUES = 1 << 19

# 4 * 2^(253 - 127) is the first value that float32 and bfloat16 cannot hold.
FIRST_LARGE_SCALE = 253

_buffers = threading.local()


@dataclass
class Rounding:
    """What storing a tensor in fewer bits did to it: absolute errors, and the RMS of the values themselves."""

    count: int = 0
    squares: float = 0.0
    largest: float = 0.0
    value_squares: float = 0.0

    def add(self, wide: torch.Tensor, stored: torch.Tensor) -> None:
        error = wide.double() - stored.double()
        self.count += error.numel()
        self.squares += error.square().sum().item()
        self.largest = max(self.largest, error.abs().max().item())
        self.value_squares += wide.double().square().sum().item()

    def report(self) -> dict[str, float]:
        """`rms` and `max` of the error, and `relative`: its RMS over that of the values."""
        rms = math.sqrt(self.squares / self.count)
        value_rms = math.sqrt(self.value_squares / self.count)
        return {"rms": rms, "max": self.largest, "relative": rms / value_rms if value_rms else 0.0}


def carry_out(step: Step, shard: Shard, descriptor: int, begins: dict[str, int]) -> tuple[Rounding | None, bool]:
    """Write the bytes of one step into the shard's open file.

    Returns:
        What rounding did, for a step that may round; and whether all values are finite, for one that copies them.

    Raises:
        ConversionError: for values that the target cannot hold.
    """
    offsets = [begins[name] + place for name, place in step.places]
    if step.kind == "copy":
        return None, _copy(step, descriptor, offsets[0])
    rows, columns = shape_of(step.parts)
    dtype = DTYPES[shard.tensors[step.places[0][0]][0]]
    rounding = Rounding() if step.kind == "pack" or _narrows(step, dtype) else None
    for start, stop in pieces(rows, max(1, VALUES // columns)):
        parts = [part.read(start, stop) for part in step.parts]
        results, wide = _compute(step, parts, dtype)
        for result, offset in zip(results, offsets, strict=True):
            row_bytes = result[0].numel() * result.element_size()
            write_at(descriptor, memoryview(raw(result).numpy()), offset + start * row_bytes)
        if rounding is not None:
            rounding.add(wide, dequantize_mxfp4(*results, torch.float64) if step.kind == "pack" else results[0])
    return rounding, True


def _narrows(step, dtype):
    """Whether a cast may round; all others are exact."""
    if step.kind != "cast":
        return False
    old, new = (torch.finfo(each) for each in (DTYPES[step.parts[0].dtype], dtype))
    return not (new.eps <= old.eps and new.max >= old.max and new.smallest_normal <= old.smallest_normal)


def _compute(step, parts, dtype):
    """The results of a step on some rows, and what they stand for without rounding (None: themselves)."""
    name = step.label
    if step.kind == "decode":
        result = dequantize_mxfp4(*parts, dtype)
        if parts[1].max() >= FIRST_LARGE_SCALE and not torch.isfinite(result).all():
            raise ConversionError(
                f"{name} has scale bytes of values that {_name(dtype)} cannot hold (255 is not a number, 254 and 253 "
                "reach beyond the largest one): keep its experts packed"
            )
        return [result], None
    if not torch.isfinite(parts[0].float()).all():
        raise ConversionError(
            f"{name} has values that are not finite in float32: they cannot be stored in another format"
        )
    if step.kind == "pack":
        return list(quantize_mxfp4(parts[0])), parts[0]
    result = parts[0].to(dtype)
    if not torch.isfinite(result).all():
        raise ConversionError(f"{name} has values beyond the largest of {_name(dtype)}")
    return [result], parts[0]


def _name(dtype):
    return str(dtype).removeprefix("torch.")


def _copy(step, descriptor, offset):
    """Whether all values are finite."""
    (stored,) = step.parts
    finite = True
    if not hasattr(_buffers, "piece"):
        _buffers.piece = memoryview(bytearray(PIECE))
    for start, stop in pieces(stored.nbytes, PIECE):
        piece = _buffers.piece[: stop - start]
        stored.source.read_into(piece, stored.offset + start)
        values = torch.frombuffer(piece, dtype=DTYPES[stored.dtype])  # pieces are whole numbers of values
        finite = finite and not count_unusable(stored.name, values)
        write_at(descriptor, piece, offset + start)
    return finite


def write_at(descriptor, view, offset):
    """Write all bytes of a view: a disk that is nearly full takes a part of them and says nothing."""
    while view:
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count
