"""Checkpoints of the K3 family in and out: convert, verify, inspect (docs/conversion.md)."""

from .plan import Target
from .run import convert
from .source import ConversionError, open_checkpoint

__all__ = ["ConversionError", "Target", "convert", "open_checkpoint"]
