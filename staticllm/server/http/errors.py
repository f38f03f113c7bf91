"""Turns exceptions into answers of the API: a status, and a body with message, type, parameter and code."""

from __future__ import annotations

import json
import logging
import math
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import Response

from staticllm.errors import (
    MAX_LEN,
    AdapterError,
    BusyError,
    ClosedError,
    ConfigError,
    ProcessLostError,
    PromptError,
    PromptTooLongError,
    StaticLLMError,
    last_line,
)
from staticllm.pipelines.embedding.pool.instances import WorkerLostError

INVALID, SERVER, BUSY = "invalid_request_error", "server_error", "rate_limit_error"
MAX_RETRY_SECONDS = 600
OLLAMA_NAMES = {
    "chat", "generate", "embed", "embeddings", "tags", "show", "ps", "version", "pull", "push", "create", "copy", "delete",
    "blobs",
}  # fmt: skip
"""The first part of each path of Ollama's API, after ``/api/``."""
ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""The types of errors of Anthropic's API."""
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
_LINE_ENDS = tuple((mark, f"\\u{ord(mark):04x}") for mark in "\x85\u2028\u2029")
"""What Unicode takes for the end of a line and JSON does not escape, with the escapes."""
_log = logging.getLogger("staticllm.server")


class ApiError(Exception):
    """An error with the fields of OpenAI's error object. ``knob`` is the option of the server that would have helped.

    ``where`` and ``detail_type``: where a fault of the body is, and its type, for the form of TypeSafe's API.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        knob: str = "",
        where: Sequence[str | int] = (),
        detail_type: str = "",
    ) -> None:
        super().__init__(message)
        self.where = tuple(where)
        self.detail_type = detail_type
        self.status = status
        self.message = message
        self.kind = kind
        self.code = code
        self.param = param
        self.headers = dict(headers or {})
        self.knob = knob

    def body(self, path: str = "") -> dict[str, Any]:
        """Return the JSON body of the answer: OpenAI's error object, or for a ``path`` of Ollama's API only the message.

        TypeSafe's API has what FastAPI answers, and Anthropic's a type by the status.
        """
        if is_ollama(path):
            return {"error": self.message}
        room = path.strip("/").removeprefix("v1/")
        if room == "systemone":
            return {"detail": self._detail()}
        if room.partition("/")[0] == "messages":
            kind = ANTHROPIC_KINDS.get(self.status, "api_error" if self.status >= 500 else INVALID)
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def _detail(self) -> object:
        if self.where:
            return [{"loc": list(self.where), "msg": self.message, "type": self.detail_type}]
        kinds = {401: "authentication_error", 403: "authentication_error", 404: "not_found_error"}
        return {"error_type": kinds.get(self.status, self.kind), "message": self.message}

    def response(self, path: str = "") -> Response:
        """Return the answer to a request for ``path``."""
        return json_response(self.body(path), self.status, self.headers)


def is_ollama(path: str) -> bool:
    """Return whether a path belongs to Ollama's API."""
    room, _, name = path.strip("/").partition("/")
    return room == "api" and name.partition("/")[0] in OLLAMA_NAMES


def json_response(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(to_json(content), status, dict(headers or {}), media_type="application/json")


def to_json(content: object) -> str:
    """Return the compact JSON text of a value, on one line also for clients that split lines as Unicode does (httpx's)."""
    text = _ENCODER.encode(content)
    if not text.isascii():
        for mark, escape in _LINE_ENDS:
            text = text.replace(mark, escape)
    return text


def api_error_of(error: BaseException) -> ApiError:
    """Return the answer to an exception. An unexpected one is logged without its message, which may hold text of a prompt."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, PromptTooLongError):
        return prompt_too_long(error, "prompt")
    if isinstance(error, BusyError):
        return _of_engine(error)
    if isinstance(error, StaticLLMError):
        return _of_ours(error)
    frames = "".join(traceback.format_tb(error.__traceback__))
    _log.error("unexpected %s\n%s", type(error).__name__, frames)
    return ApiError(500, f"unexpected {type(error).__name__}: the log has more", kind=SERVER, code="server_error")


def forget_frames(error: BaseException | None) -> None:
    """Drop the tracebacks of an exception that was answered, and of those behind it.

    Their frames hold the futures and tasks that hold the exception. Such a cycle keeps the body and the tokens of a refused
    request until Python's garbage collector runs, which counts objects and not bytes.
    """
    if error is not None and error.__traceback__ is not None:
        error.__traceback__ = None
        forget_frames(error.__cause__)
        forget_frames(error.__context__)


def too_long(limit: int, field: str, given: str, remedy: str, knob: str = "") -> ApiError:
    """Return the answer to a ``field`` of a request that is longer than the model can take: it has what is ``given``.

    Clients that shorten a conversation and try again know this error by the words of OpenAI's, which come first.
    """
    has = "have" if field.endswith("s") else "has"
    return ApiError(
        400,
        f"This model's maximum context length is {limit} tokens. However, your {field} {has} {given}: {remedy}",
        code="context_length_exceeded",
        param=field,
        knob=knob,
    )


def prompt_too_long(error: PromptTooLongError, field: str) -> ApiError:
    """Return the answer to a prompt, in this ``field`` of a request, with too many tokens."""
    longer = f", or serve with --max-prompt-len {error.num_tokens} or more"
    if error.num_tokens > MAX_LEN:
        longer = f"; no model can be served with more than --max-prompt-len {MAX_LEN}"
    given = f"{error.num_tokens} tokens, of at most {error.limit} for prompts"
    return too_long(error.limit, field, given, f"send less{longer}", "--max-prompt-len")


def model_missing(name: str) -> ApiError:
    """Return the answer to a request for a model that is not loaded and whose files are gone. Clients learn no paths."""
    return ApiError(
        503,
        f"the files of the model {name!r} are not there any more: put them back, or serve without it",
        kind=SERVER,
        code="model_missing",
    )


def _of_ours(error: StaticLLMError) -> ApiError:
    if isinstance(error, (ProcessLostError, WorkerLostError)):
        return ApiError(503, last_line(error), kind=SERVER, code="process_lost", headers={"Retry-After": "1"})
    if isinstance(error, ClosedError):
        return ApiError(
            503, "the model is being unloaded: try again", kind=SERVER, code="unloading", headers={"Retry-After": "1"}
        )
    if isinstance(error, (ConfigError, PromptError, AdapterError)):
        return ApiError(400, last_line(error))
    return ApiError(500, last_line(error), kind=SERVER, code="server_error")


def _of_engine(error: BusyError) -> ApiError:
    """Return the answer of a full engine or device; the remedy is the server's option, not that of a program.

    What no idle device takes either is no matter of trying again: status 400.
    """
    if error.retry_after == math.inf:
        return ApiError(400, last_line(error))
    message = str(error).replace("load with a larger MAX_WAITING", "serve with a larger -p MAX_WAITING")
    knob = "-p MAX_WAITING" if message != str(error) else ""
    return busy(message, error.retry_after, knob)


def busy(message: str, retry_after: float | None = None, knob: str = "--max-waiting") -> ApiError:
    """Return the answer of a server with too many requests."""
    seconds = 1.0 if retry_after is None or math.isnan(retry_after) else min(retry_after, MAX_RETRY_SECONDS)
    headers = {"Retry-After": str(max(1, math.ceil(seconds)))}
    return ApiError(429, message, kind=BUSY, code="busy", headers=headers, knob=knob)
