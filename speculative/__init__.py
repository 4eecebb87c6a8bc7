"""Speculative decoding with a DSpark-style draft: the draft, decoding, and training of drafts (docs/speculative.md)."""
