"""What travels between the ingress and a replica, and how the application in this process answers it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Any

from starlette.types import ASGIApp

Headers = tuple[tuple[bytes, bytes], ...]
MAX_PREFIX_CHARS = 8192
"""Characters of a prompt that the router compares: what follows rarely decides."""
MAX_PARTS = 64
"""Parts of an answer that wait to be taken; then the application waits."""


@dataclass(frozen=True)
class ReplicaRequest:
    """One HTTP request. Ray's router for prefixes reads ``prompt``, the beginning of what the model will see; never empty."""

    method: str
    path: str
    query: bytes
    headers: Headers
    client: tuple[str, int] | None
    body: bytes
    prompt: str
    model: str

    def with_body(self, body: bytes) -> ReplicaRequest:
        headers = tuple((name, value) for name, value in self.headers if name != b"content-length")
        return replace(self, body=body, headers=(*headers, (b"content-length", str(len(body)).encode())))


@dataclass(frozen=True)
class ReplicaHead:
    """The first part of an answer; parts of its body follow as bytes."""

    status: int
    headers: Headers

    def header(self, name: bytes) -> bytes:
        """Return the value of a header, empty if it is missing."""
        return next((value for key, value in self.headers if key.lower() == name), b"")


def prompt_of(body: dict[str, Any]) -> str:
    """Return the beginning of the text of a request, by which requests with the same beginning are known. Never empty."""
    parts: list[str] = []
    for name in ("instructions", "system", "messages", "prompt", "input", "query"):
        _collect(body.get(name), parts)
    return "\n".join(parts)[:MAX_PREFIX_CHARS] or " "


def _collect(value: object, parts: list[str]) -> None:
    if sum(map(len, parts)) >= MAX_PREFIX_CHARS:
        return
    if isinstance(value, str):
        parts.append(value[:MAX_PREFIX_CHARS])
    elif isinstance(value, list):
        for each in value[:MAX_PREFIX_CHARS]:
            _collect(each, parts)
    elif isinstance(value, dict):
        for name in ("role", "content", "text"):
            _collect(value.get(name), parts)


async def answer_parts(app: ASGIApp, request: ReplicaRequest) -> AsyncGenerator[ReplicaHead | bytes, None]:
    """Yield the head of an answer, then the parts of its body. For the application, a closed generator is a client that has gone.

    Raises:
        Exception: what the application raises.
    """
    parts: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue(MAX_PARTS)
    has_gone = asyncio.Event()
    is_read = False

    async def receive() -> dict[str, Any]:
        nonlocal is_read
        if not is_read:
            is_read = True
            return {"type": "http.request", "body": request.body, "more_body": False}
        await has_gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if not has_gone.is_set():
            await parts.put(message)

    async def run() -> None:
        try:
            await app(scope_of(request), receive, send)
        finally:
            if not has_gone.is_set():
                await parts.put(None)

    task = asyncio.ensure_future(run())
    try:
        while (message := await parts.get()) is not None:
            if message["type"] == "http.response.start":
                yield ReplicaHead(
                    message["status"], tuple((bytes(key), bytes(value)) for key, value in message["headers"])
                )
            elif message["type"] == "http.response.body" and message.get("body"):
                yield bytes(message["body"])
        await task
    finally:
        has_gone.set()
        while not parts.empty():  # a sender that waits for room goes on
            parts.get_nowait()
        if not task.done():
            await _ended(task)


async def _ended(task: asyncio.Future[None]) -> None:
    """Wait until the application has noticed that its client has gone; then cancel it."""
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(asyncio.shield(task), 5.0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def scope_of(request: ReplicaRequest) -> dict[str, Any]:
    """Return the scope of a request for an ASGI application."""
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": request.path,
        "raw_path": request.path.encode("utf-8", "surrogateescape"),
        "root_path": "",
        "query_string": request.query,
        "headers": list(request.headers),
        "client": request.client,
        "server": None,
        "state": {},
    }
