"""Reports about models, programs and machines."""

__all__ = ["kinds"]
"""The modules that other rooms may use."""
