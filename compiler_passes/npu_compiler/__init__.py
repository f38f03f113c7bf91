"""Intel's NPU compiler, wherever it can be run: finds it, runs it in a child process, reads its schedule."""

__all__ = ["find", "schedule", "wine"]
"""The modules that other rooms may use."""
