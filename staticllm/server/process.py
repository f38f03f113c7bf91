"""Runs a server in this process: its socket, signals, and the graceful end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import uvicorn

from staticllm.children.parent_watch import ParentWatch
from staticllm.errors import ConfigError, StaticLLMError
from staticllm.server.app import create_app
from staticllm.server.endpoint import count_refusal
from staticllm.server.http.errors import ApiError, api_error_of
from staticllm.server.http.limits import ConnectionLimit
from staticllm.server.http.protocol import protocol_with
from staticllm.server.models.served import ModelSpec
from staticllm.server.settings import ServerSettings
from staticllm.server.sidecar import PortInUseError, PortLock, Ready, ReadySignal, server_at
from staticllm.server.state import ServerState

CLOSE_SECONDS = 5
"""Seconds that connections have to close after their last answer."""
KEEP_ALIVE_SECONDS = 30
_log = logging.getLogger("staticllm.server")


def listen(settings: ServerSettings) -> socket.socket:
    """Return a socket at the address of the settings; its port is known now, also if it was 0.

    Raises:
        PortInUseError: another process has the port.
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
        option = socket.SO_REUSEADDR
        if sys.platform == "win32":  # where that would let two processes listen at one port, the opposite is asked for
            option = socket.SO_EXCLUSIVEADDRUSE
        found.setsockopt(socket.SOL_SOCKET, option, 1)
        found.bind(address)
        found.listen(2048)
    except (OSError, OverflowError) as error:
        found.close()
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            reason = f"another process has the port {settings.port} at {settings.host}: choose another --port"
            raise PortInUseError(server_at(settings.port) or reason) from None
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
    """A uvicorn server that finishes running answers when it is told to stop. A second signal cuts them off, a third one does not
    wait for their ends; ``second_signal`` is then its number."""

    def __init__(self, state: ServerState, on_ready: Callable[[], object] = lambda: None) -> None:
        settings = state.settings
        self._on_ready = on_ready
        self.error: StaticLLMError | None = None
        self.second_signal: int | None = None

        def refused(error: ApiError) -> None:
            count_refusal(state, error)

        app = ConnectionLimit(
            create_app(state), settings.max_connections, lambda: len(self.server_state.connections), refused
        )
        config = uvicorn.Config(
            app,
            http=protocol_with(settings, refused),
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=CLOSE_SECONDS,
        )
        super().__init__(config)
        self._state = state
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._is_unwanted = False

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        if self._is_unwanted:
            self._begin_stop()
        await super().serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._state.hub.first_load is None:
            self._become_ready()
        else:
            self._state.hub.first_load.add_done_callback(self._check_first_load)

    def _check_first_load(self, load: asyncio.Task[None]) -> None:
        """Tell that the server is ready, or end it if its first model cannot be loaded; ``error`` is the reason."""
        if load.cancelled():
            return
        error = load.exception()
        if error is None:
            self._become_ready()
        elif self._stopping is None:  # else it was given up
            self.error = error if isinstance(error, StaticLLMError) else StaticLLMError(api_error_of(error).message)
            self.should_exit = True

    def _become_ready(self) -> None:
        try:
            self._on_ready()
        except StaticLLMError as error:
            self.error = error
            self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.second_signal is not None:
            self.should_exit = True
            self.force_exit = True
        elif self._is_unwanted:
            self.second_signal = sig
            self._soon(self._state.lifecycle.hurry)
        self.stop_soon()

    def stop_soon(self) -> None:
        """Begin to stop. Any thread, and a handler of a signal, may call, also before the server has begun."""
        self._is_unwanted = True
        self._soon(self._begin_stop)

    def _soon(self, function: Callable[[], object]) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function)

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


@dataclass(frozen=True)
class SidecarOptions:
    """How a server belongs to the application that started it (docs/desktop.md).

    Attributes:
        ready_fd: A file descriptor that gets one line of JSON when the server serves; not on Windows.
        ready_file: A file that gets it.
        parent_pid: The process with which the server ends.
    """

    ready_fd: int | None = None
    ready_file: Path | None = None
    parent_pid: int | None = None


def serve(
    specs: Sequence[ModelSpec],
    settings: ServerSettings,
    on_listening: Callable[[str], object] = lambda url: None,
    sidecar: SidecarOptions | None = None,
) -> None:
    """Serve models until a signal (SIGTERM, SIGINT) or the end of the parent ends it. ``on_listening`` gets the URL.

    Raises:
        PortInUseError: another process has the port.
        ConfigError: the settings are not safe, the address cannot be used, two models have the same name, the parent has
            ended, or the application cannot be told that the server is ready.
        StaticLLMError: the first model was to be loaded at the start, and cannot be.
        SystemExit: a second signal ended it, with 128 and its number.
    """
    settings.check()
    options = sidecar or SidecarOptions()
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(listen(settings))
        lock = PortLock(listener.getsockname()[1], base_url(listener))
        stack.callback(lock.close)
        ready = ReadySignal(options.ready_fd, options.ready_file)  # after the lock: the file may be that of its holder
        stack.callback(ready.close)
        try:
            second = asyncio.run(_run(specs, settings, listener, on_listening, ready, options.parent_pid))
        except KeyboardInterrupt:
            second = signal.SIGINT
    if second is not None:
        raise SystemExit(128 + second)


async def _run(
    specs: Sequence[ModelSpec],
    settings: ServerSettings,
    listener: socket.socket,
    on_listening: Callable[[str], object],
    ready: ReadySignal,
    parent_pid: int | None,
) -> int | None:
    """Serve, and return the number of the second signal, if there was one."""
    state = ServerState.of(specs, settings)
    url = base_url(listener)

    def tell() -> None:
        key = settings.keys[0] if settings.keys else None
        names = tuple(spec.name for spec in specs)
        ready.write(Ready(f"{url}/v1", listener.getsockname()[1], key, os.getpid(), names))

    def end_with_parent() -> None:
        _log.info("the process %s has ended", parent_pid)
        server.stop_soon()

    server = GracefulServer(state, tell)
    watch = None if parent_pid is None else ParentWatch(parent_pid, end_with_parent)
    try:
        on_listening(url)
        await server.serve([listener])
    finally:
        if watch is not None:
            await asyncio.to_thread(watch.close)
    if server.error is not None:
        raise server.error
    return server.second_signal
