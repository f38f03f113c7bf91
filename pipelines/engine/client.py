"""What the rest of the library asks of an engine: in this process, or in another one that owns the device."""

from __future__ import annotations

from typing import Protocol

from staticllm.core import FinishReason
from staticllm.pipelines.engine.output_queue import OutputQueue
from staticllm.pipelines.engine.request import EngineRequest


class EngineClient(Protocol):
    """Requests go in and outputs come back as plain values. ``Engine`` is the implementation for this process.

    Any thread may call.
    """

    def submit(self, request: EngineRequest, queue: OutputQueue | None = None) -> OutputQueue:
        """Hand a request over and return at once. Its tokens, and one ``Finished`` per answer, come through ``queue``.

        Raises:
            BusyError: ``MAX_WAITING`` requests are waiting.
            ClosedError: the engine was closed, or belongs to another process.
        """
        ...

    def cancel(self, request: int, index: int | None = None, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End a request, or one of its answers, before the next device call. Unknown and ended requests are ignored."""
        ...

    def check_process(self) -> None:
        """
        Raises:
            ClosedError: the calling process is a fork of the one that the client belongs to.
        """
        ...
