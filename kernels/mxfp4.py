"""MXFP4 weights: two E2M1 codes a byte, one E8M0 scale byte for 32 neighbouring input columns (torch reference).

    W[o, 2j] = code of the low nibble of packed[o, j], W[o, 2j + 1] of the high nibble
    value = (+-){0, 0.5, 1, 1.5, 2, 3, 4, 6}[nibble & 7] * 2^(scale - 127)

Scale byte 255 is NaN in the OCP Microscaling specification and decodes to NaN here.
"""

import functools

import torch
import torch.nn.functional as F

GROUP = 32


def _make_tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Values of the 16 codes and of the 256 scale bytes, float32, made without a copy from the host (graph capture)."""
    code = torch.arange(8, dtype=torch.float32, device=device)
    magnitude = torch.where(code < 4, code / 2, torch.where(code < 6, code - 2, 2 * code - 8))
    bits = torch.arange(256, dtype=torch.int32, device=device) << 23  # the byte is the exponent field of a float32
    bits[0], bits[255] = 1 << 22, 0x7FC00000  # 2^-127 is subnormal; NaN
    return torch.cat([magnitude, -magnitude]), bits.view(torch.float32)


_tables = functools.cache(_make_tables)


@functools.cache
def _pairs(device: torch.device) -> torch.Tensor:
    """[256] int64: the two float32 values of every byte in one number, so that a processor looks up a byte at once."""
    byte = torch.arange(256, device=device)
    codes, _ = _tables(device)
    return torch.stack([codes[byte & 15], codes[byte >> 4]], dim=-1).view(torch.int64).view(-1)


def dequantize_mxfp4(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Decode packed weights; the product is exact in bfloat16 over its normal range.

    Args:
        packed: [..., K / 2] uint8.
        scale: [..., K / 32] uint8.

    Returns:
        [..., K] in `dtype`.

    Raises:
        ValueError: if the two shapes do not belong together.
    """
    if packed.shape[:-1] != scale.shape[:-1] or packed.shape[-1] * 2 != scale.shape[-1] * GROUP:
        raise ValueError(
            f"packed {tuple(packed.shape)} and scale {tuple(scale.shape)} do not belong together: "
            f"a row of n packed bytes has n / {GROUP // 2} scales"
        )
    # a traced graph makes its own: Dynamo does not trace through a cache
    codes, scales = (_make_tables if torch.compiler.is_compiling() else _tables)(packed.device)
    if packed.device.type == "cpu" and not torch.compiler.is_compiling():
        indices = packed.reshape(-1).to(torch.int32)
        values = _pairs(packed.device).index_select(0, indices).view(torch.float32)
    else:
        values = codes[torch.stack([packed & 15, packed >> 4], dim=-1).long()]
    grouped = values.reshape(*scale.shape, GROUP) * scales[scale.long()][..., None]
    return grouped.reshape(*packed.shape[:-1], packed.shape[-1] * 2).to(dtype)


class _PackedLinear(torch.autograd.Function):
    @staticmethod
    def forward(x, packed, scale):
        return F.linear(x, dequantize_mxfp4(packed, scale, x.dtype))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx, grad):
        return grad @ dequantize_mxfp4(*ctx.saved_tensors, grad.dtype), None, None


def packed_linear(x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x W^T; backward decodes W once more, so that no decoded weight is kept for it.

    Args:
        x: [..., K].
        packed: [O, K / 2] uint8.
        scale: [O, K / 32] uint8.

    Returns:
        [..., O].
    """
    return _PackedLinear.apply(x, packed, scale)


def quantize_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round to the nearest MXFP4 value, ties to the even code; packed bytes come back from their decoded values.

    The scale 2^e of a group is the one with 3.5 * 2^e <= largest < 7 * 2^e, so that the largest entry rounds to 4 or 6.
    A value in (6, 7) * 2^e rounds to 6 there, which is its nearest value at the next scale too, and all others have the
    finer grid. Groups whose largest code is 4 or 6, as this rule and the Microscaling specification make them, are
    reproduced to the byte, -0 included; other groups keep their values.

    Args:
        weight: [..., K] floating point, finite, K a multiple of 32.

    Returns:
        packed [..., K / 2] and scale [..., K / 32], uint8.
    """
    if weight.shape[-1] % GROUP:
        raise ValueError(f"the last dimension ({weight.shape[-1]}) must be a multiple of {GROUP}")
    groups = weight.detach().float().unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(-1)
    if not torch.isfinite(largest).all():
        raise ValueError("cannot quantize a weight that is not finite")
    # frexp: largest = mantissa * 2^exponent with mantissa in [0.5, 1), that is 4 * mantissa * 2^(exponent - 2) and
    # 8 * mantissa * 2^(exponent - 3): the finer scale reaches as long as 8 * mantissa is below 7.
    mantissa, exponent = torch.frexp(largest)
    exponent = torch.where(mantissa < 0.875, exponent - 3, exponent - 2)
    scale = torch.where(largest > 0, (exponent + 127).clamp(0, 254), 127)
    scaled = torch.ldexp(groups.double(), (127 - scale)[..., None])
    bounds = scaled.new_tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    magnitude = scaled.abs()
    code = torch.bucketize(magnitude, bounds)
    tie = magnitude == bounds[code.clamp_max(6)]
    code = torch.where(tie & (code % 2 == 1), code + 1, code)
    code = (code + 8 * (torch.signbit(scaled) & ((code > 0) | (scaled == 0)))).to(torch.uint8).flatten(-2)
    return code[..., 0::2] | (code[..., 1::2] << 4), scale.to(torch.uint8)
