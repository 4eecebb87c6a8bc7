"""Speculative decoding with a DSpark-style draft: the draft, decoding with it, and its training (docs/serving.md)."""
