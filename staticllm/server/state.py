"""State shared by the endpoints of one server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from staticllm.server.feed import SchedulerFeed
from staticllm.server.http.lifecycle import Lifecycle
from staticllm.server.metrics import ServerMetrics
from staticllm.server.models.hub import ModelHub
from staticllm.server.models.served import LoadPipeline, ModelSpec, load_pipeline
from staticllm.server.models.workers import Workers
from staticllm.server.settings import ServerSettings

NUM_OBSERVERS = 2
LOOK_SECONDS = 5.0
"""The longest time in which a model's process says how it is."""


@dataclass(frozen=True)
class ServerState:
    """The settings and the parts of a server. Belongs to one event loop.

    ``observers`` run what only looks at models, such as metrics: a process that does not answer must not hold the threads of
    ``workers``, which all models share.
    """

    settings: ServerSettings
    hub: ModelHub
    workers: Workers
    metrics: ServerMetrics
    lifecycle: Lifecycle
    scheduler: SchedulerFeed
    observers: Workers
    said: set[str] = field(default_factory=set)

    def is_first(self, about: str) -> bool:
        """Return whether nothing was said ``about`` this, as a line of the log, before; remember it."""
        is_new = about not in self.said
        self.said.add(about)
        return is_new

    @classmethod
    def of(
        cls, specs: Sequence[ModelSpec], settings: ServerSettings, load: LoadPipeline = load_pipeline
    ) -> ServerState:
        """Return the state of a new server, which loads its models by ``load``.

        Raises:
            ConfigError: two models have the same name, or the settings are not safe.
        """
        settings.check()
        hub = ModelHub(specs, settings, load)
        metrics = ServerMetrics(lambda: hub.loaded, hub.tenants)
        return cls(
            settings, hub, Workers(settings.num_threads), metrics, Lifecycle(), SchedulerFeed(), Workers(NUM_OBSERVERS)
        )
