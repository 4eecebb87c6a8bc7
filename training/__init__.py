"""Training tools: router balance, the Muon optimizer and LoRA, for any training loop or transformers' `Trainer`."""

from .balancing import QuantileBalancer, QuantileBalancerCallback
from .muon import PerHeadMuon, QKClip, muon_groups

__all__ = ["PerHeadMuon", "QKClip", "QuantileBalancer", "QuantileBalancerCallback", "muon_groups"]
