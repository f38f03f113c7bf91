"""Follows each request to its end, and hands its record to the access log and to OpenTelemetry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from staticllm.errors import ConfigError
from staticllm.server.http.access import CLIENT
from staticllm.server.settings import ServerSettings
from staticllm.server.telemetry.access_log import AccessLog
from staticllm.server.telemetry.record import MAX_PATH, RequestRecord, set_current

SESSION = "x-session-affinity"
MAX_SESSION = 200
"""Characters of the name of a session that count."""


class Sink(Protocol):
    """What takes the records of requests. Its methods run on the event loop and must not wait."""

    def begin(self, record: RequestRecord, headers: Headers) -> Callable[[], None]:
        """Note that a request has begun. The function that is returned is called at its end."""
        ...

    def close(self) -> None:
        """Write what is left, and release files and connections."""
        ...


class TelemetryMiddleware:
    """Makes a record for each request; other layers fill it in."""

    def __init__(self, app: ASGIApp, sinks: Sequence[Sink]) -> None:
        self._app, self._sinks = app, sinks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        session = headers.get(SESSION)
        record = RequestRecord(
            scope["method"], scope["path"][:MAX_PATH], session=None if session is None else session[:MAX_SESSION]
        )
        ends = [sink.begin(record, headers) for sink in self._sinks]
        set_current(record)

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
            elif message["type"] == "http.response.body":
                record.num_bytes += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, counted)
        finally:
            record.client = str(scope.get(CLIENT, ""))
            for end in ends:
                end()


def make_sinks(settings: ServerSettings) -> list[Sink]:
    """Return the access log and the spans that the settings ask for.

    Raises:
        ConfigError: the log cannot be written, or OpenTelemetry is not installed.
    """
    sinks: list[Sink] = []
    if settings.has_spans:
        try:
            from staticllm.server.telemetry.spans import otlp_spans

            sinks.append(otlp_spans())
        except ModuleNotFoundError as error:
            raise ConfigError(f"--otel: {error.name} is not installed: pip install 'staticllm[otel]'") from None
    if settings.access_log is not None:
        sinks.append(AccessLog(settings.access_log))
    return sinks
