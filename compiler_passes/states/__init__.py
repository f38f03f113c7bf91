"""Turns the state of a model into inputs and outputs, and states of keys and values into KV slots."""

__all__ = ["store_kv_as"]
"""The modules that other rooms may use."""
