"""Limits what a program computes: the rows that get logits, and the sizes of one variant or of several."""

__all__ = ["add_pooling", "select_logits", "select_output"]
"""The modules that other rooms may use."""
