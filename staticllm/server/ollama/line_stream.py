"""A stream as Ollama's clients read it: one JSON object per line."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from staticllm.server.api_error import ApiError, to_json
from staticllm.server.chunk_stream import ChunkStream
from staticllm.server.endpoint import Call


class LineStream(ChunkStream):
    """A stream of JSON objects, one per line, without lines between them: clients would take an empty one for an object."""

    END_MARK = ""

    def __init__(
        self, call: Call, batches: AsyncGenerator[list[dict[str, Any]], None], close: Callable[[], Awaitable[None]]
    ) -> None:
        super().__init__(call, batches, close)
        self.ping_interval = 0
        self.headers["Content-Type"] = "application/x-ndjson"

    def _encoded(self, chunk: dict[str, Any]) -> bytes:
        return to_json(chunk).encode() + b"\n"

    def _chunk_of(self, error: ApiError) -> dict[str, Any]:
        return {"error": error.message}
