"""What a generation may be asked for: one table of options, and how a request's own are read and checked."""

__all__ = ["extra", "requested_grammar", "resolve", "table"]
"""The modules that other rooms may use."""
