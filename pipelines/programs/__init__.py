"""Compiled step programs: their sizes, their costs, how they run."""

__all__ = [
    "autotune",
    "bind",
    "chain",
    "chain_compiler",
    "compile",
    "device_memory",
    "dry_run",
    "in_flight",
    "keep_small_constants",
    "kinds",
    "layout",
    "model_runner",
    "source_runner",
    "variant_index",
    "variants",
    "warm_up",
    "weight_bank",
]
"""The modules that other rooms may use."""
