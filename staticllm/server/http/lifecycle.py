"""The life of a server: which requests run, and how they end when it stops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from staticllm.server.http.errors import SERVER, ApiError

CUT_SECONDS = 5.0
"""The time for answers that were cut off to reach their clients."""
OPEN_WHILE_STOPPING = ("/health", "/metrics")


class Cancellable(Protocol):
    """A handle of something that runs."""

    def cancel(self) -> object:
        """End it soon."""
        ...


class Lifecycle:
    """Counts the running requests, and ends them. Belongs to one event loop."""

    def __init__(self) -> None:
        self.is_stopping = False
        self.num_requests = 0
        self._is_cut = False
        self._running: set[Cancellable] = set()
        self._is_idle = asyncio.Event()
        self._is_hurried = asyncio.Event()
        self._is_idle.set()

    def add(self, handle: Cancellable) -> None:
        """Note an answer that runs; if the server is being cut off, end it."""
        self._running.add(handle)
        if self._is_cut:
            handle.cancel()

    def remove(self, handle: Cancellable) -> None:
        self._running.discard(handle)

    def begin(self) -> None:
        self.num_requests += 1
        self._is_idle.clear()

    def end(self) -> None:
        self.num_requests -= 1
        if not self.num_requests:
            self._is_idle.set()

    async def stop(self, grace: float) -> None:
        """Refuse new requests, wait up to ``grace`` seconds for running ones, and then cut off their answers."""
        self.is_stopping = True
        await _first_of((self._is_idle, self._is_hurried), grace)
        if not self._is_idle.is_set():
            self._is_cut = True
            for handle in list(self._running):
                handle.cancel()
            await _first_of((self._is_idle,), CUT_SECONDS)

    def hurry(self) -> None:
        """End the grace of ``stop``."""
        self._is_hurried.set()


async def _first_of(events: Sequence[asyncio.Event], seconds: float) -> None:
    """Wait for one of the events, at most so long."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


class LifecycleMiddleware:
    """Counts requests, and refuses new ones with status 503 while the server stops, also those that do not end in time.

    ``on_refusal`` gets the errors.
    """

    def __init__(self, app: ASGIApp, lifecycle: Lifecycle, on_refusal: Callable[[ApiError], object]) -> None:
        self._app = app
        self._lifecycle = lifecycle
        self._on_refusal = on_refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_WHILE_STOPPING:
            await self._app(scope, receive, send)
            return
        if self._lifecycle.is_stopping:
            await self._refuse(scope, receive, send)
            return
        has_begun = False

        async def noting(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        self._lifecycle.begin()
        try:
            await self._app(scope, receive, noting)
        except asyncio.CancelledError:
            if not self._lifecycle.is_stopping:
                raise
            if not has_begun:
                await self._refuse(scope, receive, send)
        finally:
            self._lifecycle.end()

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = ApiError(
            503, "the server is stopping", kind=SERVER, code="stopping",
            headers={"Retry-After": "5", "Connection": "close"},
        )  # fmt: skip
        self._on_refusal(error)
        await error.response(scope["path"])(scope, receive, send)
