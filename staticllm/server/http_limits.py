"""Limits of HTTP: paths in their known form, the number of connections, the size of bodies, and the time that they take."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from staticllm.server.api_error import SERVER, ApiError

PREFIX, LM_STUDIO = "/v1", "/api/v0"


class PathMiddleware:
    """Finds endpoints without ``/v1``, with LM Studio's ``/api/v0`` in its place, and with slashes at the end."""

    def __init__(self, app: ASGIApp, paths: Collection[str]) -> None:
        self._app, self._paths = app, tuple(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = "/" + scope["path"].strip("/")
            short = path.removeprefix(LM_STUDIO)
            if not self._is_known(path) and self._is_known(PREFIX + short):
                path = PREFIX + short
            scope = {**scope, "path": path, "raw_path": path.encode("utf-8", "surrogateescape")}
        await self._app(scope, receive, send)

    def _is_known(self, path: str) -> bool:
        return path in self._paths or any(path.startswith(known + "/") for known in self._paths)


class ConnectionLimit:
    """Answers requests with status 503 while there are more connections than ``limit``. ``on_refusal`` gets the errors."""

    def __init__(
        self, app: ASGIApp, limit: int, num_connections: Callable[[], int], on_refusal: Callable[[ApiError], object]
    ) -> None:
        self._app, self._limit, self._num_connections, self._on_refusal = app, limit, num_connections, on_refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._num_connections() <= self._limit:
            await self._app(scope, receive, send)
            return
        error = ApiError(
            503, f"more than {self._limit} connections are open: try again later, or serve with a larger --max-connections",
            kind=SERVER, code="too_many_connections", headers={"Retry-After": "1", "Connection": "close"},
            knob="--max-connections",
        )  # fmt: skip
        self._on_refusal(error)
        await error.response(scope["path"])(scope, receive, send)


async def read_body(request: Request, max_bytes: int, seconds: float) -> bytes:
    """Return the body of a request.

    Raises:
        ApiError: its headers contradict each other (400), it is too large (413), or takes too long (408).
        ClientDisconnect: the client has gone.
    """
    if "transfer-encoding" in request.headers and "content-length" in request.headers:  # behind another server's parser
        message = "a request with both Content-Length and Transfer-Encoding says two lengths: send one of them"
        raise ApiError(400, message, code="invalid_headers", headers={"Connection": "close"})
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > max_bytes:
        raise _too_large(max_bytes)
    try:
        return await asyncio.wait_for(_collected(request, max_bytes), seconds)
    except asyncio.TimeoutError:
        raise ApiError(
            408, f"the body did not arrive within {seconds:g} seconds: send it faster, or serve with larger --body-seconds",
            code="timeout", headers={"Connection": "close"}, knob="--body-seconds",
        ) from None  # fmt: skip


async def _collected(request: Request, max_bytes: int) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > max_bytes:
            raise _too_large(max_bytes)
        parts.append(part)
    return b"".join(parts)


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(
        413,
        f"the request is larger than {max_bytes} bytes: send less, or serve with a larger --max-body-mb",
        code="request_too_large",
        headers={"Connection": "close"},
        knob="--max-body-mb",
    )


async def wait_for_disconnect(request: Request) -> None:
    """Return when the client has closed the connection. The body must have been read."""
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            return


__all__ = ["ClientDisconnect", "ConnectionLimit", "PathMiddleware", "read_body", "wait_for_disconnect"]
