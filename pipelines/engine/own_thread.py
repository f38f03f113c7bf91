"""The thread of an engine that owns its device. While it has nothing to do, it measures costs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from staticllm.system.threads import run_uninterrupted

from ..costs.probe import Rests
from .step_thread import StepThread
from .steps import EngineSteps

logger = logging.getLogger(__name__)


class OwnThread(StepThread):
    """Makes the steps of an engine on a thread of its own, and measures a cost after each rest, while some are unknown."""

    def __init__(self, steps: EngineSteps) -> None:
        super().__init__("staticllm-engine", steps.core.jobs, steps.lock)
        self.rests = Rests()
        self._steps = steps
        self._is_draining = False
        self._has_rested = False
        self._num_awaiting = 0  # callers that wait for costs

    @property
    def host(self) -> None:
        """None: the device is the engine's own."""

    @property
    def is_busy(self) -> bool:
        """As ``StepHost.is_busy``."""
        return bool(self._steps.num_requests) or self._jobs.has_jobs

    def need(self) -> None:
        """As ``StepHost.need``."""
        self.check_process()  # before the lock, which a forked child may never get
        with self.lock:
            super().need()
            self._steps.has_news = True

    @contextmanager
    def costs_awaited(self) -> Iterator[None]:
        """As ``StepHost.costs_awaited``."""
        with self.lock:
            self._num_awaiting += 1
            self.wake.notify_all()  # ends a long rest
        try:
            yield
        finally:
            with self.lock:
                self._num_awaiting -= 1

    def close(self, drain: bool = False) -> None:
        """As ``StepHost.close``. On the thread itself it returns at once: the thread closes the core when it ends."""
        self._is_draining = drain
        if not self.end():
            return
        if not self.thread.has_begun:
            run_uninterrupted(self._leave, "staticllm-close")
        self._steps.close()

    def _leave(self) -> None:
        """End what is left, in place of the thread. A second call waits for the first."""
        with self._steps.in_use:
            self._steps.end()

    def _run(self) -> None:
        while (work := self._next_work()) is not None:
            work()
        self._steps.end()

    def _next_work(self) -> Callable[[], None] | None:
        """Wait until there is something to do, and return it: a step, or after a rest a measurement. None at the end."""
        core = self._steps.core
        with self.lock:
            if self._is_needed or core.device.is_offloading:
                if core.wait_until is not None and not (self._steps.has_news or self.is_closing):
                    self.wake.wait(max(0.0, core.wait_until - core.clock()))
            elif not (self._has_rested and core.device.has_unknown_costs):
                self._has_rested = self._wait_through_rest()
            self._has_rested = self._has_rested and not self._is_needed
            if self.is_closing and not (self._is_draining and self.is_busy):
                return None
        return self._measure_next if self._has_rested else self._steps.step

    @property
    def _is_needed(self) -> bool:
        """Whether the thread has something to do for others."""
        return self._steps.is_needed or self._jobs.has_jobs or self.is_closing

    def _wait_through_rest(self) -> bool:
        """Wait for news, and return whether none came in the time of a rest. The caller holds the lock."""
        if not self._steps.core.device.has_unknown_costs:
            self.wake.wait()
            return False
        self.rests.begin()
        return not self.wake.wait(self.rests.seconds(self._num_awaiting > 0))

    def _measure_next(self) -> None:
        """Measure one cost, unless others use the device. A rest follows, if one is due and nobody waits for the costs."""
        self._has_rested = False
        core = self._steps.core
        use = self._steps.device_use
        try:
            with use.measure():
                must_rest = self.rests.measure(
                    lambda: core.measure_next(lambda: self._is_needed or use.is_wanted),
                    is_awaited=self._num_awaiting > 0,
                )
            self._has_rested = not must_rest
        except Exception:  # costs are only estimates: the thread must go on
            logger.warning("costs are no longer measured", exc_info=True)
            core.device.runner.probe.pause()
