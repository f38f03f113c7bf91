"""Child processes: how they are started, asked, watched and ended."""

__all__ = ["answers", "child", "line_child", "parent_watch"]
"""The modules that other rooms may use."""
