"""Calls of other programs of a model, one after another, as jobs of the engine that owns the device."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from staticllm.errors import ClosedError, as_ours, pipeline_closed
from staticllm.system.threads import InterruptibleFuture, run_uninterrupted

from ..scheduling.interface import JobView
from .jobs import Asked, new_source_id, request_priority

if TYPE_CHECKING:
    from .engine import Engine

Result = TypeVar("Result")
Meanwhile: TypeAlias = Callable[[], None] | None
Call: TypeAlias = Callable[[range, Meanwhile], Result]
"""Runs some of its blocks, the next ones in their order, and returns a result after the last one; it counts only then."""
_CLOSED = "the pipeline was closed before this part of a recording was processed"


@dataclass(eq=False)
class _Waiting:
    """A call that waits for the device, of which ``num_done`` blocks have run. Its future receives what it returns.

    ``owner``: the client of the daemon that pays for it; 0 without one.
    """

    call: Call[Any]
    priority: int
    deadline: float | None
    arrival: float
    owner: int
    result: InterruptibleFuture[Any] = field(default_factory=InterruptibleFuture)
    num_done: int = 0


class QueuedCalls:
    """The ``JobSource`` of calls that share nothing: those of the highest priority first, the oldest among equals.

    A call of several blocks may be several jobs, between which others use the device. Each job has as many blocks as fit into
    the time that the host gives it, at least one. Once a call has begun, no other one begins before it ends or is given up, and
    it has the priority of the most urgent one behind it.

    ``engine``: the one whose requests need the calls. ``block_seconds`` returns what each block of a call takes, of a whole one
    a single number; ``has_room`` whether one may begin now. Any thread may call ``submit`` and what ``JobSource`` says; calls
    run on the engine's thread.
    """

    def __init__(
        self, engine: Engine, block_seconds: Callable[[], Sequence[float]], has_room: Callable[[], bool] = lambda: True
    ) -> None:
        self.id = new_source_id()
        self._block_seconds = block_seconds
        self._num_next = 1  # blocks of the next job
        self._has_room = has_room
        self.waiting: deque[_Waiting] = deque()
        self._lock = threading.Lock()
        self._in_use = engine.steps.in_use
        self._clock = engine.clock
        self._is_closing = False
        self._wake: Callable[[], None] = lambda: None

    def submit(
        self, call: Call[Result], priority: int = 0, deadline: float | None = None, owner: int = 0
    ) -> Future[Result]:
        """Return the future result of a call. It gets the blocks to run, and a function to call while the device runs.

        ``owner``: the client of the daemon that pays for it; 0 without one. Cancelling gives the call up, until its last block
        begins. The future raises what the call raises, and ``ClosedError``.

        Raises:
            ClosedError: the engine was closed.
        """
        waiting = _Waiting(call, priority, deadline, self._clock(), owner)
        with self._lock:
            if self._is_closing:
                raise pipeline_closed()
            self.waiting.append(waiting)
        self._wake()
        return waiting.result

    @property
    def has_jobs(self) -> bool:
        """Whether a call waits and may begin."""
        return bool(self.waiting) and self._has_room()

    @property
    def asked(self) -> Sequence[Asked]:
        """The priority of the request that the next call is for, and who pays for it; nothing if none may begin."""
        with self._lock:
            waiting = self._next() if self._has_room() else None
        return () if waiting is None else (Asked(request_priority(waiting.priority), waiting.owner),)

    @property
    def wait_seconds(self) -> float:
        """No call waits for others."""
        return 0.0

    def attach(self, wake: Callable[[], None]) -> None:
        """Take the function that wakes the engine's thread."""
        self._wake = wake

    def next_job(self, max_seconds: float | None = None) -> JobView | None:
        """Return the next blocks of a call as a policy sees them: as many as take ``max_seconds`` together, at least one."""
        with self._lock:
            waiting = self._next()
            if waiting is None or not self._has_room():
                return None
            alive = self._alive()
        left = self._block_seconds()[waiting.num_done :]
        self._num_next = _num_within(left, max_seconds)
        priority = max(each.priority for each in alive)
        deadline = min((each.deadline for each in alive if each.deadline is not None), default=None)
        return JobView(self.id, sum(left[: self._num_next]), waiting.arrival, priority, deadline)

    def run_next(self, meanwhile: Meanwhile = None) -> int:
        """Run the next blocks of a call; return 1, or 0 if there was none."""
        with self._in_use:
            num_blocks = len(self._block_seconds())
            with self._lock:
                waiting = self._next()
                if waiting is None or not self._has_room():
                    return 0
                blocks = range(waiting.num_done, min(waiting.num_done + self._num_next, num_blocks))
                is_last = blocks.stop == num_blocks
                if is_last:
                    self.waiting.remove(waiting)
            if is_last and not waiting.result.set_running_or_notify_cancel():
                return 0
            try:
                found = waiting.call(blocks, meanwhile)
            except BaseException as error:  # its reader must not wait forever
                self._fail(waiting, error)
                return 1
            waiting.num_done = blocks.stop
            if is_last:
                waiting.result.set_result(found)
        return 1

    def close(self) -> None:
        """End what waits with a ``ClosedError``, and return after the call that runs now."""
        with self._lock:
            self._is_closing = True
        run_uninterrupted(self._end_waiting, "staticllm-close")
        with self._in_use:
            self.release()

    def _end_waiting(self) -> None:
        with self._lock:
            waiting = list(self.waiting)
            self.waiting.clear()
        for each in waiting:
            if each.result.set_running_or_notify_cancel():
                each.result.set_exception(ClosedError(_CLOSED))

    def release(self) -> None:
        """Drop what the calls need; no call runs afterwards."""

    def _fail(self, waiting: _Waiting, error: BaseException) -> None:
        """End a call that raised an error, unless it was given up or the source was closed meanwhile."""
        with self._lock:
            is_waiting = waiting in self.waiting
            if is_waiting:
                self.waiting.remove(waiting)
        if waiting.result.running() or (is_waiting and waiting.result.set_running_or_notify_cancel()):
            waiting.result.set_exception(as_ours(error))

    def _next(self) -> _Waiting | None:
        """Return the call that has begun, else that of the highest priority, the oldest among equals. The lock is held."""
        return max(self._alive(), key=lambda each: (each.num_done, each.priority, -each.arrival), default=None)

    def _alive(self) -> list[_Waiting]:
        """Return what waits; drop what was given up. The lock is held."""
        alive = [each for each in self.waiting if not each.result.cancelled()]
        if len(alive) < len(self.waiting):
            self.waiting = deque(alive)
        return alive


def _num_within(seconds: Sequence[float], limit: float | None) -> int:
    """Return how many of the first blocks take at most the limit together, but at least 1; None is no limit."""
    if limit is None:
        return len(seconds)
    return max(1, sum(total <= limit for total in accumulate(seconds)))
