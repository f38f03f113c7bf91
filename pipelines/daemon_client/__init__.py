"""The client's side of the daemon: an engine that runs in another process."""

__all__ = ["delivered", "remote_engine", "remote_launch"]
"""The modules that other rooms may use."""
