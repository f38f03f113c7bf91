"""The interface through which the rest of the library uses an engine, in this process or in another one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from staticllm.core import FinishReason

from ...kvcache.sequence import AdapterScales
from ...kvcache.snapshot import Identity
from ..generation.logits_processors import LogitsProcessor
from ..profiling.stats import Stats
from ..profiling.trace import MAX_RECORDS, Trace
from .request import EngineRequest, OutputQueue

UserProcessors: TypeAlias = Sequence[Sequence[LogitsProcessor]]
"""The logits processors that a user made, per answer of a request; empty without any."""


@dataclass(frozen=True)
class SnapshotTarget:
    """The file of a snapshot.

    Attributes:
        path: Where it is.
        identity: What the models of its writer and its readers must share.
        key: The key of its signature; empty for none.
        adapters: The scales of the adapters that its keys and values were computed with.
    """

    path: Path
    identity: Identity
    key: bytes = b""
    adapters: AdapterScales = ()


class EngineClient(Protocol):
    """All that a pipeline uses of an engine. Requests and outputs are plain values. ``Engine`` implements it for this process.

    Any thread may call the methods.
    """

    def submit(
        self, request: EngineRequest, queue: OutputQueue | None = None, processors: UserProcessors = ()
    ) -> OutputQueue:
        """Submit a request and return at once. Its tokens, and one ``Finished`` per answer, arrive in the returned queue.

        The queue is ``queue``, or a new one for None. ``processors`` are objects of this process.

        Raises:
            GenerationConfigError: there are ``processors``, and the engine is in another process; or the grammar cannot be
                compiled, or has no answer that is short enough.
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

    def stats(self) -> Stats:
        """Return statistics of all requests and calls since the engine was made."""
        ...

    def calls_after(self, number: int) -> dict[str, Any]:
        """Return what the engine has done since the call or answer of this number: ``CallWatch.after`` says how.

        Raises:
            ClosedError: the engine was closed, or its process has ended.
        """
        ...

    def claim(self, session: str, tokens: Sequence[int], adapters: AdapterScales = ()) -> None:
        """Keep the conversation that begins with ``tokens`` longer than those that no session has claimed.

        It replaces the session's earlier claim.

        Raises:
            ClosedError: the engine was closed.
        """
        ...

    def record(self, max_records: int = MAX_RECORDS) -> AbstractContextManager[Trace]:
        """Record every step of a ``with`` block.

        Raises:
            StaticLLMError: another recording is in progress.
            ConfigError: ``max_records`` is not a whole number of at least 1.
        """
        ...

    def save_snapshot(self, tokens: list[int], target: SnapshotTarget) -> int:
        """Save the keys and values of the longest prefix of ``tokens`` that is cached with the target's adapters.

        Return its number of tokens.

        Raises:
            SnapshotError: no cached sequence begins with these tokens, or the file cannot be written.
            ClosedError: the engine was closed.
        """
        ...

    def load_snapshot(self, target: SnapshotTarget) -> int:
        """Read a snapshot, so that prompts that begin with its tokens do not compute them again. Return its number of tokens.

        Raises:
            SnapshotError: the file is missing, damaged or of another model, or there is no room for its tokens.
            ClosedError: the engine was closed.
        """
        ...

    def close(self, drain: bool = False) -> None:
        """Cancel all requests, or with ``drain`` wait for them, and release the device. In a forked child it does nothing."""
        ...
