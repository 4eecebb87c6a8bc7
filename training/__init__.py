"""Training tools for any loop or `Trainer`: router balance, Muon, LoRA, quantisation-aware training, a loss, captured
steps."""

import importlib

from ..kernels.cross_entropy import chunked_cross_entropy
from ..parallel.sharding import fully_shard_by_dtype
from .balancing import QuantileBalancer, QuantileBalancerCallback
from .captured import CapturedStep, CapturedTraining
from .muon import PerHeadMuon, QKClip, muon_groups
from .qat import finish_qat, start_qat

# name -> its module, and the package that this one needs
_OPTIONAL = {
    "ReplayGRPOTrainer": ("replay", "trl"),
    "export_expert_loras": ("lora", "peft"),
    "lora_targets": ("lora", "peft"),
}

__all__ = [
    "CapturedStep",
    "CapturedTraining",
    "PerHeadMuon",
    "QKClip",
    "QuantileBalancer",
    "QuantileBalancerCallback",
    "chunked_cross_entropy",
    "finish_qat",
    "fully_shard_by_dtype",
    "muon_groups",
    "start_qat",
    *_OPTIONAL,
]


def __getattr__(name):
    if name not in _OPTIONAL:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, package = _OPTIONAL[name]
    try:
        return getattr(importlib.import_module(f".{module}", __name__), name)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ImportError(f"{name} needs {package}: pip install 'kimi-k3[train]'") from error
