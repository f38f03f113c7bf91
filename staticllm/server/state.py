"""What the endpoints of one server share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from staticllm.server.lifecycle import Lifecycle
from staticllm.server.metrics import ServerMetrics
from staticllm.server.model_hub import ModelHub
from staticllm.server.page.scheduler_feed import SchedulerFeed
from staticllm.server.served_model import ModelSpec
from staticllm.server.settings import ServerSettings
from staticllm.server.workers import Workers


@dataclass(frozen=True)
class ServerState:
    """The settings and the parts of a server. Belongs to one event loop."""

    settings: ServerSettings
    hub: ModelHub
    workers: Workers
    metrics: ServerMetrics
    lifecycle: Lifecycle
    scheduler: SchedulerFeed

    @classmethod
    def of(cls, specs: Sequence[ModelSpec], settings: ServerSettings) -> ServerState:
        """Return the state of a new server.

        Raises:
            ConfigError: two models have the same name, or the settings are not safe.
        """
        settings.check()
        hub = ModelHub(specs, settings)
        metrics = ServerMetrics(lambda: hub.loaded)
        return cls(settings, hub, Workers(settings.num_threads), metrics, Lifecycle(), SchedulerFeed())
