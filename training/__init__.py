"""Training tools for any loop or `Trainer`: router balance, Muon, LoRA, quantisation-aware training, a loss."""

import importlib

from ..kernels.cross_entropy import chunked_cross_entropy
from .balancing import QuantileBalancer, QuantileBalancerCallback
from .muon import PerHeadMuon, QKClip, muon_groups
from .qat import finish_qat, start_qat

_NEEDS_PEFT = ("export_expert_loras", "lora_targets")

__all__ = [
    "PerHeadMuon",
    "QKClip",
    "QuantileBalancer",
    "QuantileBalancerCallback",
    "chunked_cross_entropy",
    "finish_qat",
    "muon_groups",
    "start_qat",
    *_NEEDS_PEFT,
]


def __getattr__(name):
    if name not in _NEEDS_PEFT:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(".lora", __name__)
    except ModuleNotFoundError as error:
        if error.name != "peft":
            raise
        raise ImportError(f"{name} needs peft: pip install 'kimi-k3[train]'") from error
    return getattr(module, name)
