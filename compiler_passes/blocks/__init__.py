"""Cuts a static program into parts that are compiled once each: for the host, a block of layers that repeats, and the rest."""

__all__ = ["chain_model", "dataflow"]
"""The modules that other rooms may use."""
