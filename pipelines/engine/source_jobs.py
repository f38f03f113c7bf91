"""Computes the keys and values of cross-attention of sources, as jobs of the engine whose requests will see them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from staticllm.errors import ClosedError, NumericalError, as_ours, pipeline_closed
from staticllm.kvcache.cross_bank import CrossBank
from staticllm.pipelines.engine.jobs import new_source_id
from staticllm.pipelines.programs.source_runner import SourceRunner
from staticllm.pipelines.scheduling.interface import JobView

if TYPE_CHECKING:
    from staticllm.pipelines.engine.engine import Engine

_CLOSED = "the pipeline was closed before this recording was heard"


@dataclass
class _Waiting:
    """A source that waits for the device. Its future receives its number."""

    features: NDArray[np.float32]
    priority: int
    deadline: float | None
    arrival: float = field(default_factory=time.perf_counter)
    number: Future[int] = field(default_factory=Future)


class SourceJobs:
    """The ``JobSource`` of an engine's sources: one call per source, as long as the bank of the engine has room for it.

    Any thread may call ``submit``, ``remove`` and what ``JobSource`` says.
    """

    def __init__(self, runner: SourceRunner, engine: Engine) -> None:
        self.id = new_source_id()
        self._runner = runner
        self._engine = engine
        self._waiting: deque[_Waiting] = deque()
        self._lock = threading.Lock()
        self._is_running = threading.Lock()
        self._is_closing = False
        self._wake: Callable[[], None] = lambda: None

    def submit(self, features: NDArray[np.float32], priority: int = 0, deadline: float | None = None) -> Future[int]:
        """Return the future number of a source, for ``EngineRequest.source``; ``remove`` must follow once it is there.

        ``features [bands, columns]``. Cancelling the future gives the source up. It raises ``NumericalError`` (keys or values are
        not finite), ``DeviceError`` (the device failed) and ``ClosedError``. Raises ``ClosedError`` (the engine was closed).
        """
        waiting = _Waiting(features, priority, deadline)
        with self._lock:
            if self._is_closing:
                raise pipeline_closed()
            self._waiting.append(waiting)
        self._wake()
        return waiting.number

    def remove(self, source: int) -> None:
        """Give the place of a source to the next one, once the requests that see it have ended."""
        with suppress(ClosedError):
            self._engine.remove_source(source)

    @property
    def has_jobs(self) -> bool:
        """Whether a source waits, and the bank has room for it."""
        return bool(self._waiting) and self._bank.num_free > 0

    @property
    def wait_seconds(self) -> float:
        """No call waits for others."""
        return 0.0

    def attach(self, wake: Callable[[], None]) -> None:
        """Take the function that wakes the engine's thread."""
        self._wake = wake

    def next_job(self, max_seconds: float | None = None) -> JobView | None:
        """Return the next call as a policy sees it. It takes its time, whatever ``max_seconds`` says: a source is not divided."""
        del max_seconds
        with self._lock:
            waiting = self._next()
        if waiting is None or not self._bank.num_free:
            return None
        return JobView(self.id, self._runner.cost, waiting.arrival, waiting.priority, waiting.deadline)

    def run_next(self, meanwhile: Callable[[], None] | None = None) -> int:
        """Run the call of one source."""
        with self._is_running:
            with self._lock:
                waiting = self._next()
                if waiting is None or not self._bank.num_free:
                    return 0
                self._waiting.remove(waiting)
            if not waiting.number.set_running_or_notify_cancel():
                return 0
            try:
                frames = self._runner.run(waiting.features, meanwhile)
                if frames is None:
                    raise NumericalError(
                        "the encoder computed values that are not finite: check the sound, or try INFERENCE_PRECISION_HINT='f32'"
                    )
                waiting.number.set_result(self._bank.add(frames))
            except BaseException as error:  # its reader must not wait forever
                waiting.number.set_exception(as_ours(error))
        return 1

    def close(self) -> None:
        """End what waits with a ``ClosedError``, and drop the program after the call that runs now."""
        with self._lock:
            self._is_closing = True
            waiting = list(self._waiting)
            self._waiting.clear()
        for each in waiting:
            if each.number.set_running_or_notify_cancel():
                each.number.set_exception(ClosedError(_CLOSED))
        with self._is_running:
            self._runner.close()

    @property
    def _bank(self) -> CrossBank:
        return self._engine.runner.cache.cross

    def _next(self) -> _Waiting | None:
        """Return what waits with the highest priority, the earliest among equals; drop what was given up. The lock is held."""
        while self._waiting and self._waiting[0].number.cancelled():
            self._waiting.popleft()
        alive = (each for each in self._waiting if not each.number.cancelled())
        return max(alive, key=lambda each: (each.priority, -each.arrival), default=None)
