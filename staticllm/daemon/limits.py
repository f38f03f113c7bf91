"""What one client, and all clients together, may have at most."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import psutil

FOREVER = 1e9
"""Seconds; JSON has no infinity."""


@dataclass(frozen=True)
class DaemonLimits:
    """Bounds of the daemon.

    Attributes:
        clients: Programs that are connected at a time.
        models: Models of one client.
        requests: Infer requests of one client, each of which has at most one call in flight.
        connections: Connections of one client: one for itself, and one for each infer request and compilation in progress.
        block_bytes: Bytes of shared memory of one client.
        model_bytes: Bytes of the weights of all models together.
        idle_model_seconds: Seconds after which a model that no client holds is dropped.
        idle_seconds: Seconds without a client after which the daemon ends.
    """

    clients: int = 32
    models: int = 16
    requests: int = 64
    connections: int = 96
    block_bytes: int = 512 << 20
    model_bytes: int = 0
    idle_model_seconds: float = 300.0
    idle_seconds: float = 600.0

    def to_dict(self) -> dict[str, float]:
        """Return the limits as a dict of JSON types."""
        return asdict(self)


def default_limits() -> DaemonLimits:
    """Return the limits of this machine: models may take half of its memory."""
    return DaemonLimits(model_bytes=psutil.virtual_memory().total // 2)


def worker_limits() -> DaemonLimits:
    """Return the limits of a daemon that works for one process: its models may take what they would take there."""
    return DaemonLimits(model_bytes=psutil.virtual_memory().total, idle_seconds=FOREVER)
