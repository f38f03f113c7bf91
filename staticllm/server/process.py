"""Runs a server in this process: its socket, signals, and the graceful end."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Sequence
from types import FrameType

import uvicorn

from staticllm.errors import ConfigError, StaticLLMError
from staticllm.server.app import create_app
from staticllm.server.http_limits import protocol_with
from staticllm.server.served_model import ModelSpec
from staticllm.server.settings import ServerSettings
from staticllm.server.state import ServerState

CLOSE_SECONDS = 5
"""Seconds that connections have to close after their last answer."""
KEEP_ALIVE_SECONDS = 30
_log = logging.getLogger("staticllm.server")


def listen(settings: ServerSettings) -> socket.socket:
    """Return a socket at the address of the settings; its port is known now, also if it was 0.

    Raises:
        ConfigError: the address cannot be used.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"host {settings.host!r} cannot be used: {error.strerror}") from None
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(2048)
    except (OSError, OverflowError) as error:
        found.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{settings.host}:{settings.port} cannot be used: {reason}; choose another --port") from None
    found.setblocking(False)
    return found


def base_url(listener: socket.socket) -> str:
    """Return the URL of a listening socket; a wildcard address stands for this machine."""
    name, port = listener.getsockname()[:2]
    host = str({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(name, name))
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class GracefulServer(uvicorn.Server):
    """A uvicorn server that finishes running answers when it is told to stop. A second signal ends it at once."""

    def __init__(self, state: ServerState) -> None:
        settings = state.settings
        config = uvicorn.Config(
            create_app(state),
            http=protocol_with(settings.header_seconds),
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=settings.max_connections,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=CLOSE_SECONDS,
        )
        super().__init__(config)
        self._state = state
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Task[None] | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._state.hub.first_load is not None:
            self._state.hub.first_load.add_done_callback(self._check_first_load)

    def _check_first_load(self, load: asyncio.Task[None]) -> None:
        """End the server if its first model cannot be loaded; ``serve`` raises the reason."""
        if not load.cancelled() and isinstance(load.exception(), StaticLLMError):
            self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._stopping is not None:
            self.should_exit = self.force_exit = True
        self.stop_soon()

    def stop_soon(self) -> None:
        """Begin to stop. Any thread, and a handler of a signal, may call."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._begin_stop)

    def _begin_stop(self) -> None:
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self._stop())

    async def _stop(self) -> None:
        _log.info("stopping")
        self._state.hub.give_up_loading()
        try:
            await self._state.lifecycle.stop(self._state.settings.grace)
        finally:
            self.should_exit = True


def serve(
    specs: Sequence[ModelSpec], settings: ServerSettings, on_listening: Callable[[str], object] = lambda url: None
) -> None:
    """Serve models until a signal (SIGTERM, SIGINT) ends it. ``on_listening`` gets the URL.

    Raises:
        ConfigError: the settings are not safe, the address cannot be used, or two models have the same name.
        StaticLLMError: the first model was to be loaded at the start, and cannot be.
    """
    settings.check()
    listener = listen(settings)

    async def run() -> None:
        state = ServerState.of(specs, settings)
        server = GracefulServer(state)
        on_listening(base_url(listener))
        await server.serve([listener])
        load = state.hub.first_load
        if load is not None and load.done() and not load.cancelled() and (error := load.exception()) is not None:
            raise error

    try:
        asyncio.run(run())
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
    finally:
        listener.close()
