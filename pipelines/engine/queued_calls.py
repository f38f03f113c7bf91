"""Calls of other programs of a model, one after another, as jobs of the engine that owns the device."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from staticllm.errors import ClosedError, as_ours, pipeline_closed
from staticllm.pipelines.engine.jobs import new_source_id
from staticllm.pipelines.scheduling.interface import JobView

if TYPE_CHECKING:
    from staticllm.pipelines.engine.engine import Engine

Result = TypeVar("Result")
Meanwhile: TypeAlias = Callable[[], None] | None
_CLOSED = "the pipeline was closed before this part of a recording was heard"


@dataclass
class _Waiting:
    """A call that waits for the device. Its future receives what it returns."""

    call: Callable[[Meanwhile], Any]
    priority: int
    deadline: float | None
    arrival: float
    result: Future[Any] = field(default_factory=Future)


class QueuedCalls:
    """The ``JobSource`` of calls that are whole: each runs alone, those of the highest priority first, the oldest among equals.

    ``engine``: the one whose requests need the calls. ``seconds`` returns what a call takes; ``has_room`` whether one may begin
    now. Any thread may call ``submit`` and what ``JobSource`` says; calls run on the engine's thread.
    """

    def __init__(
        self, engine: Engine, seconds: Callable[[], float], has_room: Callable[[], bool] = lambda: True
    ) -> None:
        self.id = new_source_id()
        self._seconds = seconds
        self._has_room = has_room
        self._waiting: deque[_Waiting] = deque()
        self._lock = threading.Lock()
        self._in_use = engine.in_use
        self._clock = engine.clock
        self._is_closing = False
        self._wake: Callable[[], None] = lambda: None

    def submit(
        self, call: Callable[[Meanwhile], Result], priority: int = 0, deadline: float | None = None
    ) -> Future[Result]:
        """Return the future result of a call, which gets a function to call while the device runs. Cancelling gives it up.

        The future raises what the call raises, and ``ClosedError``. Raises ``ClosedError`` (the engine was closed).
        """
        waiting = _Waiting(call, priority, deadline, self._clock())
        with self._lock:
            if self._is_closing:
                raise pipeline_closed()
            self._waiting.append(waiting)
        self._wake()
        return waiting.result

    @property
    def has_jobs(self) -> bool:
        """Whether a call waits and may begin."""
        return bool(self._waiting) and self._has_room()

    @property
    def wait_seconds(self) -> float:
        """No call waits for others."""
        return 0.0

    def attach(self, wake: Callable[[], None]) -> None:
        """Take the function that wakes the engine's thread."""
        self._wake = wake

    def next_job(self, max_seconds: float | None = None) -> JobView | None:
        """Return the next call as a policy sees it. It takes its time, whatever ``max_seconds`` says: it cannot be divided."""
        del max_seconds
        with self._lock:
            waiting = self._next()
        if waiting is None or not self._has_room():
            return None
        return JobView(self.id, self._seconds(), waiting.arrival, waiting.priority, waiting.deadline)

    def run_next(self, meanwhile: Meanwhile = None) -> int:
        """Run one call; return 1, or 0 if there was none."""
        with self._in_use:
            with self._lock:
                waiting = self._next()
                if waiting is None or not self._has_room():
                    return 0
                self._waiting.remove(waiting)
            if not waiting.result.set_running_or_notify_cancel():
                return 0
            try:
                waiting.result.set_result(waiting.call(meanwhile))
            except BaseException as error:  # its reader must not wait forever
                waiting.result.set_exception(as_ours(error))
        return 1

    def close(self) -> None:
        """End what waits with a ``ClosedError``, and return after the call that runs now."""
        with self._lock:
            self._is_closing = True
            waiting = list(self._waiting)
            self._waiting.clear()
        for each in waiting:
            if each.result.set_running_or_notify_cancel():
                each.result.set_exception(ClosedError(_CLOSED))
        with self._in_use:
            self.release()

    def release(self) -> None:
        """Drop what the calls need; no call runs afterwards."""

    def _next(self) -> _Waiting | None:
        """Return what waits with the highest priority, the oldest among equals; drop what was given up. The lock is held."""
        while self._waiting and self._waiting[0].result.cancelled():
            self._waiting.popleft()
        alive = (each for each in self._waiting if not each.result.cancelled())
        return max(alive, key=lambda each: (each.priority, -each.arrival), default=None)
