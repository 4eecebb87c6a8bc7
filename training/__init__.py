"""Training tools: router balance, the Muon optimizer and LoRA, for any training loop or transformers' `Trainer`."""

from .balancing import QuantileBalancer, QuantileBalancerCallback

__all__ = ["QuantileBalancer", "QuantileBalancerCallback"]
