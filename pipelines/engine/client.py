"""Defines the interface of an engine for the rest of the library, in this process or in another one."""

from __future__ import annotations

from typing import Protocol

from staticllm.core import FinishReason
from staticllm.pipelines.engine.output_queue import OutputQueue
from staticllm.pipelines.engine.request import EngineRequest


class EngineClient(Protocol):
    """Accepts requests and returns outputs, both as plain values. ``Engine`` implements it for this process.

    Any thread may call the methods.
    """

    def submit(self, request: EngineRequest, queue: OutputQueue | None = None) -> OutputQueue:
        """Submit a request and return at once. Its tokens, and one ``Finished`` per answer, arrive in the returned queue.

        The queue is ``queue``, or a new one for None.

        Raises:
            BusyError: ``MAX_WAITING`` requests are waiting.
            ClosedError: the engine was closed, or belongs to another process.
        """
        ...

    def cancel(self, request: int, index: int | None = None, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End a request, or one of its answers, before the next device call. Unknown and ended requests are ignored."""
        ...

    def check_process(self) -> None:
        """Check that the calling process is the one that the client belongs to.

        Raises:
            ClosedError: it is a fork of that process.
        """
        ...
