"""Mirrors the calls of an engine in another process."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any, Protocol

from staticllm.pipelines.profiling.engine_watch import CallLog
from staticllm.pipelines.profiling.progress import RequestProgress
from staticllm.pipelines.profiling.stats import Stats

PULL_SECONDS = 0.2
"""The other process is asked at most this often, however many read."""
MAX_PULLS = 4
"""Questions per pull: an answer has a bounded number of calls."""
SAME_CLOCK_SECONDS = 1.0
"""Processes of one machine share a clock; a larger difference than this is that of two clocks, and not of a slow answer."""


class CallSource(Protocol):
    """A process that knows the calls of an engine."""

    def calls_after(self, number: int) -> dict[str, Any]:
        """Return what came after a number, as ``CallWatch.after`` does."""
        ...


@dataclass(frozen=True)
class RemoteState:
    """The answers that run, the KV slots of the engine, and its statistics."""

    requests: tuple[RequestProgress, ...]
    num_slots: int
    stats: Stats


class RemoteWatch:
    """The last calls of an engine, with numbers of their own. ``origin`` is the moment that is 0. Any thread may call."""

    def __init__(self, origin: float) -> None:
        self.log = CallLog(1)
        self._origin = origin
        self._lock = threading.Lock()
        self._name, self._cursor = "", 0
        self._state: RemoteState | None = None
        self._pulled = float("-inf")

    def read(self, source: CallSource) -> RemoteState | None:
        """Return the state of the engine, and take over its calls; None if nothing is known.

        One thread asks at a time; others get what is known.

        Raises:
            ClosedError: the process has ended.
        """
        if self._lock.acquire(blocking=self._state is None):
            try:
                if time.monotonic() - self._pulled >= PULL_SECONDS:
                    self._state = self._pull(source)
                    self._pulled = time.monotonic()
            finally:
                self._lock.release()
        return self._state

    def _pull(self, source: CallSource) -> RemoteState | None:
        state = None
        for _ in range(MAX_PULLS):
            found = source.calls_after(self._cursor)
            if "watch" not in found:  # a daemon of an earlier version
                return None
            if found["watch"] != self._name:  # another process, which has numbers of its own
                self._name = found["watch"]
                if self._cursor:
                    self._cursor = 0
                    continue
            shift = time.perf_counter() - found["now"]
            shift = 0.0 if abs(shift) < SAME_CLOCK_SECONDS else shift
            self._take(found, shift)
            requests = tuple(_moved(each, shift) for each in found["requests"])
            state = RemoteState(requests, found["num_slots"], Stats(**found["stats"]))
            if not found["more"]:
                break
        return state

    def _take(self, found: dict[str, Any], shift: float) -> None:
        self._cursor = found["cursor"]
        self.log.skip(found["dropped"])
        for entry in found["entries"]:
            for name in ("start", "end"):
                if entry.get(name) is not None:
                    entry[name] = round(entry[name] + shift - self._origin, 6)
            self.log.add(entry)


def _moved(values: dict[str, Any], shift: float) -> RequestProgress:
    """Return the progress of a request in the time of this process."""
    moments = {name: values[name] for name in ("arrival", "started", "first_token")}
    return RequestProgress(**{**values, **{name: None if at is None else at + shift for name, at in moments.items()}})
