"""Compiled step programs: their sizes, their costs, how they run."""

__all__ = ["bind", "in_flight", "model_runner", "variant_index", "warm_up", "window_runner"]
"""The modules that other rooms may use."""
