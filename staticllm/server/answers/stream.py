"""The stream of an answer as server-sent events: chunks that are ready together are one message; stalled readers are cut off."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import anyio
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.types import Message, Receive, Scope, Send

from staticllm.server.endpoint import ApiCall, count_cancelled, count_refusal
from staticllm.server.http.errors import ApiError, api_error_of, forget_frames, to_json

SEPARATOR = "\n"
_PLACE = "{}"


@dataclass(frozen=True)
class EventFrame:
    """What server-sent events of one name have before and after their JSON text, which has no line breaks."""

    before: bytes
    after: bytes

    @classmethod
    @lru_cache(64)
    def of(cls, name: str | None = None) -> EventFrame:
        """Return the frame of the events of this name, or of those without a name."""
        before, _, after = ServerSentEvent(_PLACE, event=name, sep=SEPARATOR).encode().partition(_PLACE.encode())
        return cls(before, after)

    def around(self, text: str) -> bytes:
        """Return the event with this JSON text."""
        return b"%b%b%b" % (self.before, text.encode(), self.after)


class StallLimit:
    """Sends messages, and cancels ``scope`` once one of them takes longer than ``seconds``: the client takes nothing.

    It has one timer for all messages of a stream, in a ``with`` block.
    """

    def __init__(self, send: Send, seconds: float, scope: anyio.CancelScope) -> None:
        self._send = send
        self._seconds = seconds
        self._scope = scope
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None

    async def __call__(self, message: Message) -> None:
        if self._since is not None:  # a ping, while a chunk waits
            await self._send(message)
            return
        self._since = self._loop.time()
        try:
            await self._send(message)
        finally:
            self._since = None

    def __enter__(self) -> StallLimit:
        self._timer = self._loop.call_later(self._seconds, self._check)
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def _check(self) -> None:
        now = self._loop.time()
        end = (now if self._since is None else self._since) + self._seconds
        if end <= now:
            self._scope.cancel()
        else:
            self._timer = self._loop.call_at(end, self._check)


class ChunkStream(EventSourceResponse):
    """A stream of JSON chunks as server-sent events, with comment lines while it is silent.

    ``batches`` yields lists of chunks that are ready together; each list is sent at once. ``close`` is awaited at the end, also
    if the client has gone before the first chunk. Subclasses say how chunks are written.
    """

    END_MARK = "[DONE]"

    def __init__(
        self, call: ApiCall, batches: AsyncGenerator[list[dict[str, Any]], None], close: Callable[[], Awaitable[None]]
    ) -> None:
        settings = call.state.settings
        super().__init__(
            self._events(batches),
            ping=settings.ping_seconds,
            sep=SEPARATOR,
            ping_message_factory=lambda: ServerSentEvent(comment="ping", sep=SEPARATOR),
        )
        self._state = call.state
        self._close = close
        self._has_ended = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with anyio.CancelScope() as stream, StallLimit(send, self._state.settings.send_seconds, stream) as limited:
                await super().__call__(scope, receive, limited)
        finally:
            if not self._has_ended:
                count_cancelled(self._state)
            with anyio.CancelScope(shield=True):
                await self._close()

    async def _send_with_timeout(self, send: Send, message: Message) -> None:
        """Send a message: ``StallLimit`` has the timeout, as a scope and a timer per message cost more than sending it."""
        await send(message)

    async def _events(self, batches: AsyncGenerator[list[dict[str, Any]], None]) -> AsyncGenerator[bytes, None]:
        """Yield the chunks, and the mark of the end. An exception becomes a last chunk with an error."""
        try:
            async with contextlib.aclosing(batches):
                async for chunks in batches:
                    yield b"".join([self._encoded(chunk) for chunk in chunks])
        except Exception as error:
            found = api_error_of(error)
            count_refusal(self._state, found)
            forget_frames(found)
            forget_frames(error)
            yield self._encoded(self._chunk_of(found))
        self._has_ended = True
        if self.END_MARK:
            yield EventFrame.of().around(self.END_MARK)

    def _encoded(self, chunk: dict[str, Any]) -> bytes:
        return EventFrame.of().around(to_json(chunk))

    def _chunk_of(self, error: ApiError) -> dict[str, Any]:
        """Return the chunk that tells of an error."""
        return error.body()
