"""From what a user passes to an engine that serves."""

__all__ = ["arguments", "draft_origin", "engine", "genai_properties"]
"""The modules that other rooms may use."""
