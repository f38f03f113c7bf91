"""How a model writes turns, calls and reasoning."""
