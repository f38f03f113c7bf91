"""The engine owns a device and serves all requests on one thread."""

__all__ = [
    "client",
    "device_use",
    "engine",
    "engine_core",
    "hosted_engine",
    "job_engine",
    "jobs",
    "options",
    "overflow",
    "request",
    "source_jobs",
    "state",
]
"""The modules that other rooms may use."""
