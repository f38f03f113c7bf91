"""How a model writes turns, calls and reasoning."""

__all__ = ["chat_templates", "formats", "sandbox"]
"""The modules that other rooms may use."""
