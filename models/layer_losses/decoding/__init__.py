"""Decoding with the early exits of a language model."""

from cdt_fast.models.layer_losses.decoding.tuning import frequent_tokens

__all__ = ["frequent_tokens"]
