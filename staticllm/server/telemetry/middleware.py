"""Follows each request to its end, and hands its record to the access log and to OpenTelemetry."""

from __future__ import annotations

import logging
import logging.handlers
import queue
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from typing import Protocol

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from staticllm.errors import ConfigError
from staticllm.server.http.access import CLIENT
from staticllm.server.http.errors import to_json
from staticllm.server.settings import ServerSettings
from staticllm.server.telemetry.record import MAX_PATH, RequestRecord, set_current

STANDARD_ERROR = "-"


class AccessLog:
    """Writes lines to a file, or to standard error (``-``), on a thread of its own.

    Raises ``ConfigError`` (the file cannot be written).
    """

    def __init__(self, path: str) -> None:
        try:
            stream = sys.stderr if path == STANDARD_ERROR else None
            handler = logging.FileHandler(path, encoding="utf-8") if stream is None else logging.StreamHandler(stream)
        except OSError as error:
            raise ConfigError(f"--access-log {path!r} cannot be written: {error.strerror}") from None
        handler.setFormatter(logging.Formatter("%(message)s"))
        self._handler = handler
        lines: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
        self._queue = logging.handlers.QueueHandler(lines)
        self._listener = logging.handlers.QueueListener(lines, handler)
        self._listener.start()

    def begin(self, record: RequestRecord, headers: Headers) -> Callable[[], None]:
        """Return the function that writes the line of a request."""
        return lambda: self._queue.emit(logging.makeLogRecord({"msg": line_of(record)}))

    def close(self) -> None:
        """Write all lines, and close the file."""
        self._listener.stop()
        self._handler.close()


def line_of(record: RequestRecord) -> str:
    """Return the line of a request. Unknown fields, such as tokens of a request that was refused, are left out."""
    now = time.perf_counter()
    found: dict[str, object] = {
        "time": datetime.fromtimestamp(record.began_at, timezone.utc).isoformat(timespec="milliseconds"),
        "client": record.client,
        "method": record.method,
        "path": record.path,
        "status": record.status,
        "duration_ms": round((now - record.began) * 1e3, 3),
        "bytes": record.num_bytes,
    }
    if record.is_disconnected:
        found["disconnected"] = True
    if record.session is not None:
        found["session"] = record.session
    if record.error is not None:
        found["error"] = record.error
    if record.model is not None:
        found["model"] = record.model
    if record.prompt_tokens:
        found |= {
            "prompt_tokens": record.prompt_tokens,
            "cached_tokens": record.cached_tokens,
            "output_tokens": record.output_tokens,
        }
    if record.first_token is not None:
        found["ttft_ms"] = round((record.first_token - record.began) * 1e3, 3)
    if record.finish_reasons:
        found["finish_reasons"] = record.finish_reasons
    return to_json(found)


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
        self._app = app
        self._sinks = sinks

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

    Raises ``ConfigError`` (the log cannot be written, or OpenTelemetry is not installed).
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
