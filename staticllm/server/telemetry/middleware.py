"""Follows each request to its end, and hands what is known then to the access log and to OpenTelemetry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from staticllm.server.access import CLIENT
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
