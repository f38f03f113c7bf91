"""Packs the tokens of several texts into one call of an encoder, and writes the arrays of the call."""

__all__ = ["encoder_buffers", "tokenized_text"]
"""The modules that other rooms may use."""
