"""The settings of a server: frozen values with their limits, which `staticllm serve` reads from its options."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from staticllm.errors import ConfigError, shown

WORK_CLASSES = ("reactive", "proactive")
RunsIn = Literal["process", "worker", "daemon"]
DEFAULT_PORT = 8000
LOCAL_NAMES = ("localhost", "tauri.localhost")


@dataclass(frozen=True)
class ApiClient:
    """A client with a key of its own.

    ``work_class``: the class of its requests that do not say it, one of ``WORK_CLASSES``; None for that of the model. ``share``:
    its part of the device time while others wait, in relation to theirs; 1 is that of clients without an entry.
    """

    name: str
    key: str
    work_class: str | None = None
    share: float = 1.0


@dataclass(frozen=True)
class ServerSettings:
    """How a server answers.

    Attributes:
        host: The address that it listens at.
        port: The port; 0 lets the system choose one.
        api_keys: The keys that clients may use; without any, all clients are served.
        clients: Clients with keys, classes and shares of their own.
        allowed_origins: Origins of web pages that may send requests, beside local ones and those of desktop apps; ``*``: all.
        is_insecure: Whether other machines may connect without a key.
        device: The OpenVINO device of the models, or several in their order (``NPU,GPU,CPU``).
        properties: The options of all models that know them.
        runs_in: Where chat models run: in this ``process``, in a ``worker`` process each, or in the ``daemon`` of this user.
        max_waiting: The most requests per model that wait for their turn; more are refused with status 429.
        max_per_client: The most answers of one client that run at once; None for three quarters of what a model
            runs at once, and all while it is alone.
        memory_limit: Bytes of all loaded models together, by estimate; None for no limit.
        idle_unload: Seconds after its last request after which a model is unloaded; None for never.
        is_lazy: Whether the first model is loaded by its first request, not at the start.
        grace: Seconds that running answers have after a signal to stop; then they are cut off.
        max_body: Bytes of the body of a request.
        max_upload: Bytes of a recording.
        max_audio: Seconds of a recording.
        header_seconds, body_seconds: Seconds that a client has to send the headers, and the body, of a request.
        send_seconds: Seconds that a client has to take what was sent, before the connection is closed.
        ping_seconds: Seconds between the comment lines of a stream that has nothing to say.
        max_connections: Connections at once; more are answered with status 503.
        access_log: The file of the access log, ``-`` for standard error; None for no log.
        has_spans: Whether spans of OpenTelemetry are exported.
        num_threads: Threads that parse long bodies and run templates and tokenizers.
    """

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    api_keys: tuple[str, ...] = ()
    clients: tuple[ApiClient, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    is_insecure: bool = False
    device: str = "CPU"
    properties: Mapping[str, object] = field(default_factory=dict)
    runs_in: RunsIn = "process"
    max_waiting: int = 64
    max_per_client: int | None = None
    memory_limit: int | None = None
    idle_unload: float | None = None
    is_lazy: bool = False
    grace: float = 10.0
    max_body: int = 16 << 20
    max_upload: int = 25 << 20
    max_audio: float = 3600.0
    header_seconds: float = 10.0
    body_seconds: float = 60.0
    send_seconds: float = 120.0
    ping_seconds: float = 15.0
    max_connections: int = 1024
    access_log: str | None = None
    has_spans: bool = False
    num_threads: int = 4

    def check(self) -> None:
        """Check that these settings are safe.

        Raises:
            ConfigError: other machines could connect without a key.
        """
        if not (self.is_local or self.keys or self.is_insecure):
            raise ConfigError(
                f"host {self.host!r} is reachable from other machines and there is no API key: give --api-key, or --insecure"
            )
        if any(not key or not key.isascii() or not key.isprintable() or " " in key for key in self.keys):
            raise ConfigError("an API key is empty or has spaces or characters outside ASCII: choose another")
        for each in self.clients:
            if not each.name.strip() or not each.name.isprintable():
                raise ConfigError(
                    f"the client's name {shown(each.name)} is blank or has control characters: choose another"
                )
        for name, values in (("name", [each.name for each in self.clients]), ("key", self.keys)):
            if len(set(values)) < len(values):
                raise ConfigError(f"two clients have the same {name}: choose another")

    @property
    def keys(self) -> tuple[str, ...]:
        """All keys that clients may use; those with an entry are the last ones."""
        return (*self.api_keys, *(client.key for client in self.clients))

    def client_of(self, name: str) -> ApiClient | None:
        """Return the entry of a client by what requests call it (``client_name``); None without an entry."""
        return next((each for each in self.clients if client_name(each) == name), None)

    @property
    def is_local(self) -> bool:
        """Whether only this machine can connect."""
        return is_local_name(self.host)


def is_local_name(name: str) -> bool:
    """Return whether a host name or address, without its port, stands for this machine."""
    name = name.strip("[]").lower()
    if name in LOCAL_NAMES or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def client_name(client: ApiClient) -> str:
    """Return what requests of a client are counted under."""
    return f"client {client.name}"
