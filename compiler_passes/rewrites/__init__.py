"""Rewrites attention and projections into forms that compute the same values faster."""

__all__ = ["fuse_adapters"]
"""The modules that other rooms may use."""
