"""The limits of one client and of all clients together."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import psutil

FOREVER = 1e9
"""Seconds; JSON has no infinity."""


@dataclass(frozen=True)
class DaemonLimits:
    """Bounds of the daemon."""

    clients: int = 32
    """Programs that are connected at the same time."""
    models: int = 16
    """Models of one client."""
    requests: int = 64
    """Infer requests of one client, each of which has at most one call in flight."""
    connections: int = 96
    """Connections of one client: one for itself, and one for each infer request and compilation in progress."""
    block_bytes: int = 512 << 20
    """Bytes of shared memory of one client."""
    model_bytes: int = 0
    """Bytes of the weights of all models together."""
    idle_model_seconds: float = 300.0
    """Seconds after which the daemon drops a model that no client holds."""
    idle_seconds: float = 600.0
    """Seconds without a client after which the daemon exits."""

    def to_dict(self) -> dict[str, float]:
        """Return the limits as a dict of JSON types."""
        return asdict(self)


def default_limits() -> DaemonLimits:
    """Return the limits of this machine: models may take half of its memory."""
    return DaemonLimits(model_bytes=psutil.virtual_memory().total // 2)


def worker_limits() -> DaemonLimits:
    """Return the limits of a daemon that serves one process: its models may take as much memory as in that process."""
    return DaemonLimits(model_bytes=psutil.virtual_memory().total, idle_seconds=FOREVER)
