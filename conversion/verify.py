"""Do two folders hold the same model? `kimi-k3 verify`.

Tensors are compared in their plain form, so layouts, fusions and shards do not matter. Packed and floating-point
experts are compared by value.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch
from tqdm import tqdm

from ..checkpoint_kimi_k3 import count_unusable
from ..configuration_kimi_k3 import KimiK3TextConfig, KimiK3VisionConfig
from ..kernels.mxfp4 import dequantize_mxfp4
from ..modeling_kimi_k3 import KimiK3ForCausalLM
from .source import (
    VISION,
    Checkpoint,
    ConversionError,
    Stored,
    expected_tensors,
    matrices,
    open_checkpoint,
    pieces,
    same_bytes,
    shape_of,
)
from .steps import VALUES

# Fields of a configuration that do not change what the model computes.
_NOT_COMPUTED = {"initializer_range", "output_router_logits", "use_cache", "model_type", "attribute_map"}
LOGITS_TOKENS = 64


@dataclass
class Comparison:
    """Attributes:
    equal: how many tensors have the same bytes, or the same values in different formats.
    close: plain name -> largest absolute difference, of those within the tolerance.
    lacking: folder -> plain names of the tensors that it lacks and the other has.
    differences: sentences about anything else in which the models are not the same.
    not_finite: plain names of tensors with values that are not finite, in either folder.
    logits: the result of comparing logits, or why they were not compared.
    """

    equal: int = 0
    close: dict[str, float] = field(default_factory=dict)
    lacking: dict[str, list[str]] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)
    not_finite: list[str] = field(default_factory=list)
    logits: str = ""

    @property
    def same(self) -> bool:
        return not (self.lacking or self.differences)


def verify(
    a: str | Path,
    b: str | Path,
    *,
    tolerance: float = 0.0,
    text_only: bool = False,
    logits: bool = True,
    seed: int = 0,
    progress: bool = False,
) -> Comparison:
    """Compare two checkpoint folders in any form of the family.

    Args:
        tolerance: largest absolute difference of a value; 0 asks for the same values, the sign of zeros included.
        text_only: leave vision towers and projectors out of the comparison.
        logits: run both models on one seeded prompt where both fit into memory, in float32 on the CPU.

    Raises:
        ConversionError: if one of the folders is broken.
    """
    if not 0 <= tolerance < math.inf:
        raise ConversionError(f"the tolerance must be a number of at least 0, not {tolerance}")
    both = [open_checkpoint(folder) for folder in (a, b)]
    result = Comparison()
    _compare_configurations(*both, text_only, result)
    tensors = [_matrices(checkpoint, text_only) for checkpoint in both]
    for folder, here, there in ((b, *tensors), (a, *reversed(tensors))):
        if lacking := [name for name in here if name not in there]:
            result.lacking[str(folder)] = lacking
    shared = [name for name in tensors[0] if name in tensors[1]]
    for name in tqdm(shared, unit="tensor", disable=not progress):
        _compare_tensor(name, *(each[name] for each in tensors), tolerance, result)
    result.logits = _compare_logits(both, seed, tolerance, result) if logits else "not compared"
    return result


def _compare_configurations(a: Checkpoint, b: Checkpoint, text_only: bool, result: Comparison) -> None:
    sections = [(KimiK3TextConfig, a.text_config, b.text_config)]
    towers = [getattr(checkpoint.config, "vision_config", None) for checkpoint in (a, b)]
    if not text_only and None not in towers:  # a tower that only one of them has shows in the tensors
        sections.append((KimiK3VisionConfig, *towers))
    for section, *configs in sections:
        for name in sorted(set(section.__annotations__) - _NOT_COMPUTED):
            one, other = (getattr(config, name, None) for config in configs)
            if one != other:
                result.differences.append(f"{name} is {one!r} in {a.folder} and {other!r} in {b.folder}")


def _matrices(checkpoint: Checkpoint, text_only: bool) -> dict[str, tuple[Stored, ...]]:
    left_out = VISION if text_only else ()
    return matrices({name: stored for name, stored in checkpoint.tensors.items() if not name.startswith(left_out)})


def _read(parts, start, stop):
    tensors = [part.read(start, stop) for part in parts]
    return dequantize_mxfp4(*tensors, torch.float64) if len(tensors) == 2 else tensors[0]


def _error(one, other):
    """Absolute differences; zero between equal infinities, and between two values that are not numbers."""
    return torch.where((one == other) | (one.isnan() & other.isnan()), 0.0, (one - other).abs())


def _compare_tensor(name, a, b, tolerance, result):
    shape = shape_of(a)
    if shape != shape_of(b):
        result.differences.append(f"{name} has shape {list(shape)} and {list(shape_of(b))}")
        return
    same_format = [part.dtype for part in a] == [part.dtype for part in b]
    largest, wrong_zero, finite = 0.0, False, True
    rows = shape[0] if shape else 1
    for start, stop in pieces(rows, max(1, VALUES // max(1, math.prod(shape[1:])))):
        alike = same_format and all(same_bytes(*pair, start, stop) for pair in zip(a, b, strict=True))
        parts = a if alike else (*a, *b)
        finite = finite and not any(count_unusable(part.name, part.read(start, stop)) for part in parts)
        if alike:
            continue
        one, other = _read(a, start, stop).double(), _read(b, start, stop).double()
        error = _error(one, other)
        largest = max(largest, math.inf if error.isnan().any() else error.max().item())
        wrong_zero |= bool((torch.signbit(one) != torch.signbit(other))[(one == 0) & (other == 0)].any())
    if not finite:
        result.not_finite.append(name)
    if largest == 0 and (not wrong_zero or tolerance > 0):
        result.equal += 1
    elif largest <= tolerance:
        result.close[name] = largest
    elif largest == 0:
        result.differences.append(f"{name} differs in the sign of zeros")
    else:
        result.differences.append(f"{name} differs by up to {largest:.6g}")


# --- logits ----------------------------------------------------------------------------------------------------------


def _compare_logits(both, seed, tolerance, result) -> str:
    if not result.same:
        return "not compared: the models differ"
    needed = sum(4 * math.prod(shape_of(parts)) for parts in _matrices(both[0], True).values())
    available = psutil.virtual_memory().available
    if 2 * needed > available:
        return f"not compared: a float32 model takes {needed:,} bytes twice while it loads, {available:,} are free"
    vocabulary = both[0].text_config.vocab_size
    ids = torch.randint(0, vocabulary, (1, LOGITS_TOKENS), generator=torch.Generator().manual_seed(seed))
    one, other = (_logits(checkpoint, ids) for checkpoint in both)
    largest = _error(one, other).max().item()
    agree = (one.argmax(-1) == other.argmax(-1)).float().mean().item()
    text = f"{LOGITS_TOKENS} tokens, seed {seed}: largest difference {largest:.3g}, same argmax at {agree:.1%}"
    # Equal weights in different formats take different kernels, whose float32 sums round differently.
    if tolerance == 0 and not largest <= 1e-3 * max(1.0, one.nan_to_num().abs().max().item()):
        result.differences.append(f"the logits of equal weights differ: {text}")
    return text


@torch.no_grad()
def _logits(checkpoint: Checkpoint, ids: torch.Tensor) -> torch.Tensor:
    """Logits [1, T, V] of the text model in float32."""
    config = checkpoint.text_config
    state = {}
    for full_name in expected_tensors(config):
        name = full_name.removeprefix("model.")
        state[full_name] = checkpoint.tensors[name].read()
    model = KimiK3ForCausalLM.from_pretrained(None, config=config, state_dict=state, dtype=torch.float32)
    return model.eval()(ids).logits
