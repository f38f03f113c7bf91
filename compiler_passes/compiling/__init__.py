"""Programs of lowered graphs: their sizes and layout, what compiles them, chains of blocks, and one bank of weights."""

__all__ = [
    "autotune",
    "chain",
    "chain_compiler",
    "compile",
    "device_memory",
    "dry_run",
    "keep_small_constants",
    "layout",
    "npu_compiler",
    "npu_platform",
    "variants",
    "weight_bank",
]
"""The modules that other rooms may use."""
