"""Limits of HTTP: paths in their known form, connections, the size and time of bodies, and the parts of their JSON."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Collection, Iterator

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from staticllm.server.http.errors import SERVER, ApiError

PREFIX = "/v1"
LM_STUDIO = "/api/v0"
MAX_STRUCTURES = 100_000
"""Arrays, objects and keys of a body. Ten thousand messages with a part each have 70,000."""
MAX_VALUES = 500_000
"""Elements of arrays and fields of objects, token ids among them."""
MAX_ESCAPES = 3_000_000
"""Escapes in texts; as many as the largest body by default has if it is written in ``\\uXXXX`` alone."""
DIGITS = 100
"""Digits that no number needs. A number of up to 200 may pass; the time of parsing grows with the square of their count."""
_SLICE = 256 << 10


class PathMiddleware:
    """Finds endpoints without ``/v1``, with LM Studio's ``/api/v0`` in its place, and with slashes at the end."""

    def __init__(self, app: ASGIApp, paths: Collection[str]) -> None:
        self._app = app
        self._paths = tuple(paths)

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
        self._app = app
        self._limit = limit
        self._num_connections = num_connections
        self._on_refusal = on_refusal

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
        ApiError: its headers contradict each other (400), it is too large (413), takes too long (408), or is in a form that is
            not read (415).
        ClientDisconnect: the client has gone.
    """
    check_headers(request, max_bytes)
    coding = request.headers.get("content-encoding", "").strip().lower() or "identity"
    if coding not in ("identity", "zstd"):
        message = f"Content-Encoding is {coding[:100]!r}: send the body as it is, or as zstd"
        raise ApiError(415, message, code="unsupported_media_type")
    try:
        data = await asyncio.wait_for(_collected(request, max_bytes), seconds)
    except TimeoutError:
        raise too_slow(seconds) from None
    return data if coding == "identity" else await asyncio.to_thread(_expanded, data, max_bytes)


def _expanded(data: bytes, max_bytes: int) -> bytes:
    """Return what zstd has made smaller.

    Raises:
        ApiError: it is damaged (400) or larger than ``max_bytes`` (413), or this Python cannot read it (415).
    """
    try:
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd
    except ImportError:
        message = 'zstd cannot be read: send the body as it is, or serve with pip install "staticllm[server]"'
        raise ApiError(415, message, code="unsupported_media_type") from None
    reader = zstd.ZstdDecompressor()
    try:
        found = reader.decompress(data, max_length=max_bytes + 1)
    except zstd.ZstdError as error:
        raise ApiError(400, f"the body is not valid zstd: {error}", code="invalid_body") from None
    if len(found) > max_bytes:
        raise too_large(max_bytes)
    if not reader.eof or reader.unused_data:
        raise ApiError(400, "the body is not one whole frame of zstd", code="invalid_body")
    return found


def check_headers(request: Request, max_bytes: int, knob: str = "--max-body-mb") -> None:
    """Check what the headers say of the length of a body. ``knob``: the option of the server that limits it.

    Raises:
        ApiError: they contradict each other (400), or it is too large (413).
    """
    if "transfer-encoding" in request.headers and "content-length" in request.headers:  # behind another server's parser
        message = "a request with both Content-Length and Transfer-Encoding says two lengths: send one of them"
        raise ApiError(400, message, code="invalid_headers", headers={"Connection": "close"})
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > max_bytes:
        raise too_large(max_bytes, knob)


def too_slow(seconds: float) -> ApiError:
    """Return the answer to a body that takes longer than ``seconds``."""
    return ApiError(
        408, f"the body did not arrive within {seconds:g} seconds: send it faster, or serve with larger --body-seconds",
        code="timeout", headers={"Connection": "close"}, knob="--body-seconds",
    )  # fmt: skip


async def _collected(request: Request, max_bytes: int) -> bytes:
    parts = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > max_bytes:
            raise too_large(max_bytes)
        parts.append(part)
    return b"".join(parts)


def too_large(max_bytes: int, knob: str = "--max-body-mb") -> ApiError:
    """Return the answer to a body that is larger than ``max_bytes``. ``knob``: the option of the server that limits it."""
    return ApiError(
        413,
        f"the request is larger than {max_bytes} bytes: send less, or serve with a larger {knob}",
        code="request_too_large",
        headers={"Connection": "close"},
        knob=knob,
    )


async def wait_for_disconnect(request: Request) -> None:
    """Return when the client has closed the connection. The body must have been read."""
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            return


def check_json(data: bytes) -> None:
    """Check that a body is parsed within a fraction of a second. Takes milliseconds; what texts hold does not count.

    Raises:
        ApiError: it has too many arrays, objects, keys, elements or escapes, or a number with too many digits (status 400).
    """
    if len(data) <= MAX_STRUCTURES:
        return
    num_escapes = data.count(b"\\")
    max_escapes = max(MAX_ESCAPES, len(data) // 5)
    if num_escapes > max_escapes:
        raise _refused(f"{num_escapes} escapes in its texts, at most {max_escapes} are parsed: send UTF-8")
    if _is_small(_num_structures(data), data.count(b",")) and not _has_long_number(data):
        return
    num_structures = 0
    num_values = 0
    for part in outside_texts(data):
        num_structures += _num_structures(part)
        num_values += part.count(b",")
        if num_structures > MAX_STRUCTURES:
            raise _refused(f"more than {MAX_STRUCTURES} arrays, objects and keys: send several requests")
        if num_values > MAX_VALUES:
            raise _refused(f"more than {MAX_VALUES} elements: send several requests")
        if _has_long_number(part):
            raise _refused(f"a number of more than {DIGITS} digits: send a shorter one")


def outside_texts(data: bytes) -> Iterator[bytes]:
    """Yield what is outside of the texts of a JSON document, slice by slice, so that other threads run in between."""
    is_inside = False
    held = b""
    for start in range(0, len(data), _SLICE):
        part = held + data[start : start + _SLICE]
        is_split = (len(part) - len(part.rstrip(b"\\"))) % 2 == 1  # an escape whose second half is in the next slice
        held = b"\\" if is_split else b""
        part = part.removesuffix(held).replace(b"\\\\", b"").replace(b'\\"', b"")
        pieces = part.split(b'"')
        yield b"".join(pieces[is_inside::2])
        is_inside ^= len(pieces) % 2 == 0


def _is_small(num_structures: int, num_values: int) -> bool:
    return num_structures <= MAX_STRUCTURES and num_values <= MAX_VALUES


def _num_structures(part: bytes) -> int:
    return part.count(b"[") + part.count(b"{") + part.count(b":")


def _has_long_number(part: bytes) -> bool:
    """Return whether ``DIGITS`` digits follow each other; seen for certain if twice as many do."""
    return any(part[start : start + DIGITS].isdigit() for start in range(0, len(part) - DIGITS + 1, DIGITS))


def _refused(what: str) -> ApiError:
    return ApiError(400, f"the body has {what}", code="body_too_complex")
