"""The KV cache on the host keeps slots, masks, positions and sequences between steps."""

__all__ = [
    "arena",
    "cache",
    "cross_bank",
    "finite",
    "groups",
    "host_pool",
    "paged",
    "prefix",
    "rotation",
    "sequence",
    "snapshot",
    "step",
    "stored",
]
"""The modules that other rooms may use."""
