"""Records device calls and requests, and makes statistics and traces of them."""

__all__ = ["call_watch", "records", "stats", "trace"]
"""The modules that other rooms may use."""
