"""A stream as Ollama's clients read it: one JSON object per line."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from staticllm.server.api_error import api_error_of, to_json
from staticllm.server.endpoint import Call, ChunkStream, count_refusal


class LineStream(ChunkStream):
    """A stream of JSON objects, one per line, without lines between them: clients would take an empty one for an object."""

    def __init__(
        self, call: Call, chunks: AsyncGenerator[dict[str, Any], None], close: Callable[[], Awaitable[None]]
    ) -> None:
        super().__init__(call, chunks, close)
        self.ping_interval = 0
        self.headers["Content-Type"] = "application/x-ndjson"

    async def _events(self, chunks: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[bytes, None]:
        """Yield the lines. An exception becomes a last line with an error."""
        try:
            async with contextlib.aclosing(chunks):
                async for chunk in chunks:
                    yield to_json(chunk).encode() + b"\n"
        except Exception as error:
            found = api_error_of(error)
            count_refusal(self._state, found)
            yield to_json({"error": found.message}).encode() + b"\n"
        self._has_ended = True
