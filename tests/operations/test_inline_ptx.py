"""What Triton's interpreter cannot run, by a few lines of Python: PTX, and products of bfloat16."""

import operator
import re
import types
from pathlib import Path

import pytest
import torch

from kimi_k3.kernels import mxfp4

pytest.importorskip("triton")

pytestmark = pytest.mark.one_release

WORD, ALL = 0xFFFFFFFF, range(32)


def bfloat16(bits):
    return torch.tensor(bits, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def bits_of(x):
    return x.view(torch.int16).item() & 0xFFFF


def lop3(a, b, c, table):
    return sum((table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1) & 1) << i for i in ALL)


def fma(a, b, c):
    """Two bfloat16 halves; the product is exact in float64, and a sum with -0 keeps the product's sign."""
    result = 0
    for shift in (0, 16):
        x, y, z = (bfloat16(value >> shift & 0xFFFF).double() for value in (a, b, c))
        assert z == 0 and torch.signbit(z)
        result |= bits_of((x * y).to(torch.bfloat16)) << shift
    return result


OPERATIONS = {
    "mov.b32": lambda a: a, "mul.lo.u32": operator.mul, "add.u32": operator.add, "and.b32": operator.and_,
    "or.b32": operator.or_, "shl.b32": operator.lshift, "shr.u32": operator.rshift, "lop3.b32": lop3,
    "fma.rn.bf16x2": fma,
}  # fmt: skip


def run(text, **registers):
    """Execute straight-line PTX; the halves that `mov.b32 {$i, $j}` takes apart are the results."""
    registers = {f"${name[1:]}": value for name, value in registers.items()}
    results, true = {}, {}
    for line in filter(None, (line.strip().rstrip(";") for line in text.splitlines())):
        if line in "{}" or line.startswith(".reg"):
            continue
        if guard := re.match(r"@(\w+) (.*)", line):
            if not true[guard[1]]:
                continue
            line = guard[2]
        name, rest = line.split(None, 1)
        if unpack := re.match(r"\{\$(\d+), \$(\d+)\}, (\w+)", rest):
            results[int(unpack[1])], results[int(unpack[2])] = registers[unpack[3]] & 0xFFFF, registers[unpack[3]] >> 16
            continue
        target, *sources = rest.split(", ")
        values = [registers[s] if s in registers else int(s, 0) for s in sources]
        if name == "setp.eq.u32":
            true[target] = values[0] == values[1]
        else:
            registers[target] = OPERATIONS[name](*values) & WORD
    return [results[i] for i in sorted(results)]


@pytest.mark.parametrize("scale", [0, 1, 2, 100, 127, 128, 129, 200, 253, 254, 255])
def test_words_of_mxfp4_codes(scale):
    """Fault 84: every code in every place of a word is the value of the specification; scale byte 255 is NaN."""
    from kimi_k3.kernels import experts_triton

    source = Path(experts_triton.__file__).read_text(encoding="utf-8")
    text = re.search(r'"""\{(.*?)\}"""', source.partition("def decode_words")[2], re.DOTALL)[1]
    for shift in range(16):
        codes = [(shift + 5 * place) % 16 for place in range(8)]
        packed = torch.tensor([codes[i] | codes[i + 1] << 4 for i in range(0, 8, 2)] * 4, dtype=torch.uint8)
        expected = mxfp4.dequantize_mxfp4(packed, torch.tensor([scale], dtype=torch.uint8))[:8]
        word = sum(code << 4 * place for place, code in enumerate(codes))
        got = run(text, _8=word, _9=scale * 0x00800080 | (0x00400040 if scale in (0, 255) else 0))  # `powers`
        for place, bits in zip((0, 4, 1, 5, 2, 6, 3, 7), got, strict=True):
            value = bfloat16(bits)
            assert value.isnan() if scale == 255 else bits == bits_of(expected[place]), (codes[place], place)


class Bits(torch.Tensor):
    """A tensor that is cast as Triton's are."""

    def to(self, dtype, bitcast=False):
        return self.view(dtype) if bitcast else super().to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_codes_without_ptx(dtype):
    """Fault 84: what GPUs without these instructions run, each of the 16 codes under each scale; 255 is NaN."""
    from kimi_k3.kernels import experts_triton

    language = types.SimpleNamespace(
        float32=torch.float32, int16=torch.int16, where=torch.where,
        full=lambda shape, value, dtype: torch.full(shape, value, dtype=dtype),
    )  # fmt: skip
    decode = types.FunctionType(experts_triton.decode.fn.__code__, {"tl": language})
    codes, scale = torch.arange(16, dtype=torch.int32), torch.arange(256, dtype=torch.int32)
    got = decode(codes.as_subclass(Bits)[None], scale.as_subclass(Bits)[:, None], dtype).as_subclass(torch.Tensor)
    rows = codes.to(torch.uint8).repeat(2)
    packed = (rows[0::2] | rows[1::2] << 4).repeat(256, 1)
    expected = mxfp4.dequantize_mxfp4(packed, scale[:, None].to(torch.uint8), dtype)[:, :16]
    assert got.dtype == dtype and torch.equal(got[:255], expected[:255]) and got[255].isnan().all()
    assert torch.equal(torch.signbit(got[:255]), torch.signbit(expected[:255]))
