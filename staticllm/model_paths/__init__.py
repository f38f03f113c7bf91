"""What a path holds that is given as a model, and whether an argument of the command line is such a path."""

__all__ = ["arguments", "hub_names", "path_kind", "path_kinds"]
"""The modules that other rooms may use."""
