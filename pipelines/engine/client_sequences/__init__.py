"""Client sequences: a client chooses their tokens, and the engine returns the logits after them."""

__all__ = ["sequence", "state"]
"""The modules that other rooms may use."""
