"""Grammars: an answer is JSON of a schema, a match of a regular expression, or a sentence of a grammar."""

__all__ = ["compiler", "vocabulary"]
"""The modules that other rooms may use."""
