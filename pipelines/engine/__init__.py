"""The engine owns a device and serves all requests on one thread."""

__all__ = [
    "client",
    "device_use",
    "engine",
    "engine_core",
    "job_engine",
    "jobs",
    "options",
    "overflow",
    "own_thread",
    "request",
    "state",
    "window_jobs",
]
"""The modules that other rooms may use."""
