"""The daemon in which a pipeline runs: that of the user, or a process of an application's own."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from staticllm.pipelines.daemon_client.daemon_link import Startable, start_daemon
from staticllm.pipelines.daemon_client.remote_engine import RemoteEngine
from staticllm.wire import endpoint


class DaemonHome(Startable, Protocol):
    """A daemon: where it listens, how it is started, and what it is told about the engines in it."""

    @property
    def resumes_requests(self) -> bool:
        """Whether the running requests of a daemon that was killed go on in the next one, or end with an error."""
        ...

    def adopt(self, engine: RemoteEngine) -> None:
        """Note an engine that now runs in it; when the daemon ends, the engine calls its ``on_lost``."""
        ...


class UserDaemon:
    """The daemon that all programs of this user share."""

    resumes_requests = True

    @property
    def folder(self) -> Path:
        """The runtime folder of this user.

        Raises:
            EndpointError: it cannot be used.
        """
        return endpoint.runtime_folder()

    def start(self) -> None:
        """Start it in the background.

        Raises:
            EndpointError: it does not listen in time.
        """
        start_daemon()

    def adopt(self, engine: RemoteEngine) -> None:
        """Do nothing: its next request connects a lost engine again."""
