"""Decoding with the early exits of a language model."""
