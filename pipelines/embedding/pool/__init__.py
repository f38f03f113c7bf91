"""Serves texts on several devices at once: instances of an encoder, worker processes, and WINDVE on real devices."""

__all__ = ["instances", "pool_plan", "served_encoder"]
"""The modules that other rooms may use."""
