"""The access log: one line of JSON per request, without text of prompts or answers."""

from __future__ import annotations

import logging
import logging.handlers
import queue
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone

from starlette.datastructures import Headers

from staticllm.errors import ConfigError
from staticllm.server.http.errors import to_json
from staticllm.server.telemetry.record import RequestRecord

STANDARD_ERROR = "-"


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
    """Return the line of a request. What nobody knows, such as tokens of a request that was refused, is left out."""
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
