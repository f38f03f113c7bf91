"""Follows each request to its end, and hands its record, without text, to the access log and to OpenTelemetry."""

from __future__ import annotations

import logging
import logging.handlers
import queue
import sys
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from staticllm.errors import ConfigError, quoted
from staticllm.pipelines.text.output_processor import RequestOutput
from staticllm.server.http.access import CLIENT
from staticllm.server.http.errors import to_json

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/api/chat": "chat",
    "/v1/completions": "text_completion",
    "/api/generate": "text_completion",
    "/v1/embeddings": "embeddings",
    "/api/embed": "embeddings",
    "/api/embeddings": "embeddings",
    "/v1/rerank": "rerank",
    "/v2/rerank": "rerank",
    "/rerank": "rerank",
    "/v1/audio/transcriptions": "transcription",
    "/v1/audio/translations": "transcription",
}
"""What the endpoints that use a model do, in the words of OpenTelemetry's conventions, where they have one."""
MAX_PATH = 200
PARAMETERS = ("temperature", "top_p", "top_k", "seed", "presence_penalty", "frequency_penalty", "max_tokens",
              "max_completion_tokens", "max_output_tokens", "num_predict", "stream", "n", "dimensions")  # fmt: skip
_CURRENT: ContextVar[HttpRecord | None] = ContextVar("staticllm_request", default=None)
STANDARD_ERROR = "-"
SESSION = "x-session-affinity"
MAX_SESSION = 200
"""Characters of the name of a session that count."""


@dataclass
class HttpRecord:
    """One HTTP request. Moments are those of ``time.perf_counter``, ``began_at`` is in seconds since 1970.

    ``session`` is what the client said in ``x-session-affinity``. ``parameters`` are those of ``PARAMETERS`` that it gave. Tokens
    are the sums of all answers. ``text_seconds`` is the device time of texts for vectors. ``is_disconnected``: the client closed
    the connection before the end.
    """

    method: str
    path: str
    client: str = ""
    session: str | None = None
    began: float = field(default_factory=time.perf_counter)
    began_at: float = field(default_factory=time.time)
    status: int = 0
    num_bytes: int = 0
    model: str | None = None
    parameters: dict[str, Any] = field(default_factory=dict)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    text_seconds: float = 0.0
    first_token: float | None = None
    finish_reasons: list[str] = field(default_factory=list)
    is_disconnected: bool = False
    error: str | None = None

    def note_parameters(self, body: object) -> None:
        """Take over what a body says about its answers; of Ollama's bodies also from their options."""
        for given in (body, getattr(body, "options", None)):
            found = {name: getattr(given, name, None) for name in PARAMETERS}
            self.parameters |= {name: value for name, value in found.items() if value is not None}

    def note_token(self) -> None:
        if self.first_token is None:
            self.first_token = time.perf_counter()

    def note_outputs(self, outputs: list[RequestOutput]) -> None:
        self.prompt_tokens += outputs[0].metrics.get_num_input_tokens()
        self.cached_tokens += outputs[0].num_cached
        self.output_tokens += sum(len(output.token_times) for output in outputs)
        self.finish_reasons += [str(output.finish_reason.value) for output in outputs]


def current_record() -> HttpRecord:
    """Return the record of the request that this task belongs to; outside of one, a new record that is not read."""
    found = _CURRENT.get()
    return HttpRecord("", "") if found is None else found


def set_current(record: HttpRecord) -> None:
    """Make a record that of the calling task, and of the tasks that it starts."""
    _CURRENT.set(record)


class AccessLog:
    """Writes lines to a file, or to standard error (``-``), on a thread of its own.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: str) -> None:
        try:
            stream = sys.stderr if path == STANDARD_ERROR else None
            handler = logging.FileHandler(path, encoding="utf-8") if stream is None else logging.StreamHandler(stream)
        except OSError as error:
            raise ConfigError(f"--access-log {quoted(path)} cannot be written: {error.strerror}") from None
        handler.setFormatter(logging.Formatter("%(message)s"))
        self._handler = handler
        lines: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
        self._queue = logging.handlers.QueueHandler(lines)
        self._listener = logging.handlers.QueueListener(lines, handler)
        self._listener.start()

    def begin(self, record: HttpRecord, headers: Headers) -> Callable[[], None]:
        """Return the function that writes the line of a request."""
        return lambda: self._queue.emit(logging.makeLogRecord({"msg": line_of(record)}))

    def close(self) -> None:
        self._listener.stop()
        self._handler.close()


def line_of(record: HttpRecord) -> str:
    """Return the line of a request. Unknown fields, such as tokens of a request that was refused, are left out."""
    now = time.perf_counter()
    found: dict[str, object] = {
        "time": datetime.fromtimestamp(record.began_at, UTC).isoformat(timespec="milliseconds"),
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


class Sink(Protocol):
    """What takes the records of requests. Its methods run on the event loop and must not wait."""

    def begin(self, record: HttpRecord, headers: Headers) -> Callable[[], None]:
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
        record = HttpRecord(
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
