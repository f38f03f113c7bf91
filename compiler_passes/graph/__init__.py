"""The graph that the passes change, what they look for in it, and what must hold after each of them."""

__all__ = ["compressed_matrix", "control_values", "step_graph"]
"""The modules that other rooms may use."""
