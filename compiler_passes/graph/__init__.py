"""The graph that the passes change, what they look for in it, and what must hold after each of them."""
