"""Compiled programs as files: written whole, verified before use."""

__all__ = ["blob_set", "cache", "crashes", "fingerprint", "manifest", "measurements", "stored_chain"]
"""The modules that other rooms may use."""
