"""What a call costs: measured, and predicted."""

__all__ = ["model", "probe"]
"""The modules that other rooms may use."""
