"""Runs an endpoint: reads and checks the body, calls its function, and turns exceptions into answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.datastructures import UploadFile
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from staticllm.server.http.access import CLIENT
from staticllm.server.http.errors import ApiError, api_error_of, forget_frames
from staticllm.server.http.forms import Uploads, checked_form, read_form
from staticllm.server.http.limits import check_json, read_body, wait_for_disconnect
from staticllm.server.models.served import ServedModel
from staticllm.server.state import ServerState
from staticllm.server.telemetry import current_record

Body = TypeVar("Body", bound=BaseModel)
Result = TypeVar("Result")
SHORT_BODY = 16 << 10
"""Bytes up to which a body is parsed on the event loop: that takes less time than the way to a thread and back."""
MAX_MISTAKES = 1000
"""The most mistakes of a body that are looked at: a hostile one has millions, and each takes about a KiB as a Python object."""
CLIENT_GONE = 499
_LENGTHS = ("too_long", "too_short")
_FORMS = {"str", "int", "float", "bool", "list", "dict"}


class ApiCall:
    """One request of a client."""

    def __init__(self, state: ServerState, request: Request) -> None:
        self.state = state
        self.request = request
        self.client = str(request.scope.get(CLIENT, ""))

    async def connected(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Return the result of ``work``, which is cancelled if the client closes the connection.

        Raises:
            ClientDisconnect: the client has closed the connection.
        """
        task = asyncio.ensure_future(work)
        watcher = asyncio.ensure_future(wait_for_disconnect(self.request))
        try:
            await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientDisconnect
            return task.result()
        finally:
            watcher.cancel()
            task.cancel()
            await asyncio.gather(task, watcher, return_exceptions=True)

    async def acquire(self, model: ServedModel) -> None:
        """Load a model if necessary, and keep it loaded until ``hub.release``.

        Raises:
            ApiError, StaticLLMError: as for ``ModelHub.acquire``.
            ClientDisconnect: the client has closed the connection.
        """
        acquiring = self.state.hub.acquire(model)
        await (acquiring if model.is_ready else self.connected(acquiring))  # one that is ready takes no time


Handler = Callable[[ApiCall, Body], Awaitable[Response]]
Answer = Callable[[Request], Awaitable[Response]]


def endpoint(state: ServerState, kind: type[Body], handler: Handler[Body]) -> Answer:
    """Return the function of a route that takes a JSON body of this ``kind``."""

    async def run(request: Request) -> Response:
        call = ApiCall(state, request)

        async def answer() -> Response:
            data = await read_body(request, state.settings.max_body, state.settings.body_seconds)
            if len(data) <= SHORT_BODY:
                body = parsed(kind, data)
            else:
                body = await state.workers.run(lambda: parsed(kind, data))
            current_record().note_parameters(body)
            return await handler(call, body)

        return await guarded(state, request, answer())

    run.__name__ = handler.__name__
    return run


FormHandler = Callable[[ApiCall, Body, UploadFile], Awaitable[Response]]


def form_endpoint(state: ServerState, kind: type[Body], handler: FormHandler[Body], uploads: Uploads) -> Answer:
    """Return the function of a route that takes a form with a file, and other fields of this ``kind``."""

    async def run(request: Request) -> Response:
        call = ApiCall(state, request)

        async def answer() -> Response:
            settings = state.settings
            with uploads.counted():
                parts = await read_form(request, settings.max_upload, settings.body_seconds)
                try:
                    form = checked_form(parts, settings.max_upload)
                    body = checked(kind, form.values)
                    current_record().note_parameters(body)
                    return await handler(call, body, form.file)
                finally:
                    await parts.close()

        return await guarded(state, request, answer())

    run.__name__ = handler.__name__
    return run


def bodiless(state: ServerState, answer: Answer) -> Answer:
    """Return the function of a route without a body, which answers as ``answer`` does, also to its exceptions."""

    async def run(request: Request) -> Response:
        return await guarded(state, request, answer(request))

    run.__name__ = answer.__name__
    return run


async def guarded(state: ServerState, request: Request, work: Awaitable[Response]) -> Response:
    """Return the answer that ``work`` returns, or that to its exception; count both."""
    route = request.scope.get("route")  # its path has a name in place of what clients choose: labels must stay few
    path = str(getattr(route, "path", ""))
    try:
        response = await work
    except ClientDisconnect as error:
        count_cancelled(state)
        response = Response(status_code=CLIENT_GONE)
        forget_frames(error)
    except Exception as error:
        found = api_error_of(error)
        count_refusal(state, found)
        response = found.response(request.scope["path"])
        forget_frames(found)
        forget_frames(error)
    state.metrics.requests.labels(path, str(response.status_code)).inc()
    return response


def count_refusal(state: ServerState, error: ApiError) -> None:
    """Count an error of the API by its reason."""
    state.metrics.rejected.labels(error.code or str(error.status), error.knob).inc()
    current_record().error = error.code or str(error.status)


def count_cancelled(state: ServerState) -> None:
    """Count a request whose client has closed the connection."""
    state.metrics.cancelled.inc()
    current_record().is_disconnected = True


def parsed(kind: type[Body], data: bytes) -> Body:
    """Return the checked body of a request.

    Raises:
        ApiError: it is no JSON object, has too many parts or an unknown field, or a field has an impossible value.
    """
    return checked(kind, parsed_json(data))


def parsed_json(data: bytes) -> dict[str, Any]:
    """Return the fields of a request.

    Raises:
        ApiError: it is no JSON object, or has too many parts.
    """
    check_json(data)
    try:
        values = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(values, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return values


def checked(kind: type[Body], values: dict[str, Any]) -> Body:
    """Return the checked fields of a request.

    Raises:
        ApiError: one is unknown, or has an impossible value.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise _refusal(error) from None


def _refusal(error: ValidationError) -> ApiError:
    """Return the answer to a body that is not valid: of several forms of a field, about the one that was meant.

    That is the form that the value has apart from its length, else the one whose problem lies deepest in it.
    """
    if (count := error.error_count()) > MAX_MISTAKES:
        return ApiError(
            400, f"{count} fields or elements of the body are wrong: too many to say which", code="invalid_value"
        )
    found = error.errors(include_url=False, include_input=False, include_context=False)
    first = max(found, key=lambda each: (each["type"] in _LENGTHS, len(each["loc"])))
    is_unknown = first["type"] == "extra_forbidden"
    *outer, last = first["loc"]
    path = [part for part in outer if not _is_form(part)] + ([last] if is_unknown or not _is_form(last) else [])
    where = ".".join(map(str, path))
    if is_unknown:
        return ApiError(400, f"Unknown parameter: {where!r}", param=where, code="unknown_parameter")
    if first["type"] == "missing":
        return ApiError(400, f"Missing required parameter: {where!r}", param=where, code="missing_required_parameter")
    message = first["msg"].removeprefix("Value error, ")
    return ApiError(400, f"Invalid {where or 'body'}: {message}", param=where or None, code="invalid_value")


def _is_form(part: int | str) -> bool:
    """Return whether a part of a path names no field, but one of several forms that a field may have."""
    return isinstance(part, str) and (not part.isidentifier() or part in _FORMS or part[0].isupper())
