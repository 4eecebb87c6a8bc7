"""Which model a state belongs to: a hash of what it computes and of every byte of its weights."""

import hashlib
import itertools
import json
import weakref
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedConfig, PreTrainedModel

from .files_kimi_k3 import digest_of

_NOT_COMPUTATION = (
    "transformers_version", "_name_or_path", "auto_map", "architectures", "dtype", "use_cache", "return_dict",
    "output_hidden_states", "output_attentions", "output_router_logits", "id2label", "label2id", "problem_type",
    "chunk_size_feed_forward",
)  # fmt: skip

# Devices whose tensors are hashed as fast as anything else could look at them: 1.8 GB/s a thread.
_READ_EACH_TIME = ("cpu",)
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes of an element -> what is summed
# Hashes that were made: of parameters and buffers, with what `_mark` said then, and of what each accelerate hook keeps.
_hashed: WeakIdKeyDictionary = WeakIdKeyDictionary()
_offloaded: weakref.WeakKeyDictionary[Any, dict[str, bytes]] = weakref.WeakKeyDictionary()


def computation_of(config: PreTrainedConfig) -> dict[str, Any]:
    """The keys of a configuration on which results depend, with the values that JSON returns for them."""
    settings = config.get_text_config(decoder=True).to_dict()
    for key in _NOT_COMPUTATION:
        settings.pop(key, None)
    return json.loads(json.dumps(settings, sort_keys=True, default=str))


def model_fingerprint(model: PreTrainedModel, with_head: bool = False) -> str:
    """Hex digest of what makes states comparable: the config's computation and the backbone's parameters, wherever they
    lie; where they are cut over processes, of this process's parts. With its head, of what makes outputs comparable.

    The same for equal weights, however they are stored. All of them are read each time, so that any change is seen; on
    a GPU a sum over words and places tells whether one must be copied and hashed again. Offloaded ones are read once.
    """
    digest = hashlib.sha256(json.dumps(computation_of(model.config), sort_keys=True).encode())
    text_model = getattr(model, "language_model", model)
    module = model if with_head else getattr(text_model, "model", text_model)
    tensors = dict(sorted(module.state_dict(keep_vars=True).items()))
    contents = iter(_hashes([tensor for tensor in tensors.values() if not tensor.is_meta]))
    for name, tensor in tensors.items():
        content = _offloaded_hash(module, name) if tensor.is_meta else next(contents)
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode() + content)
    return digest.hexdigest()


def _hashes(tensors: list[torch.Tensor]) -> list[bytes]:
    """SHA-256 of each of these parameters or buffers."""
    unknown = []
    for tensor in tensors:
        parts = _parts(tensor)
        mark = None if tensor.device.type in _READ_EACH_TIME else [_mark(part.detach()) for part in parts]
        if mark is None or tensor not in _hashed or _hashed[tensor][0] != mark:
            unknown.append((tensor, mark, parts))
    hashes = iter(digest_of(part for *_, parts in unknown for part in parts))
    for tensor, mark, parts in unknown:
        _hashed[tensor] = mark, b"".join(itertools.islice(hashes, len(parts)))
    return [_hashed[tensor][1] for tensor in tensors]


def _parts(tensor: Any) -> list[torch.Tensor]:
    """The plain tensors behind one: this process's part, or what a quantizer's wrapper holds."""
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in _parts(getattr(tensor, name))]


def _mark(tensor: torch.Tensor) -> tuple[int, int]:
    """Changes, where the tensor lies, with any of its values and with their order."""
    words = tensor.reshape(-1).view(_WORDS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for piece in words.split(1 << 22):  # products and sums are modulo 2^64
        places = torch.arange(1, 2 * len(piece), 2, device=words.device)  # odd, so that no product loses a bit
        mixed = (piece + places) * 0x5851F42D4C957F2D
        total = total * 0x5851F42D4C957F2D + ((mixed ^ (mixed >> 29)) * places).sum()
    return tensor.data_ptr(), int(total)


def _offloaded_hash(module: Any, name: str) -> bytes:
    """Of a tensor that accelerate's hooks keep in memory or files; empty for a model without data."""
    parts = name.split(".")
    for depth, part in enumerate(parts):
        hook = getattr(module, "_hf_hook", None)
        for each in getattr(hook, "hooks", (hook,)):
            weights, key = getattr(each, "weights_map", None), ".".join(parts[depth:])
            if weights is None:
                continue
            known = _offloaded.setdefault(each, {})
            if key not in known:
                try:
                    (known[key],) = digest_of([weights[key]])
                except KeyError:
                    continue
            return known[key]
        module = getattr(module, part)
    return b""
