"""The steps of an engine on a device that another engine owns: they are jobs of that one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from staticllm.system.threads import POLL_SECONDS, run_uninterrupted

from ..scheduling.interface import JobView, View
from .jobs import JobHost, JobSource, job_priority, new_source_id
from .step_host import OfOneProcess
from .steps import EngineSteps


class HostedSteps(OfOneProcess):
    """The ``StepHost`` of an engine without a thread: the ``JobSource`` of its steps, each of which is a job of its ``host``.

    The host's scheduler decides when a step runs, and the engine's own what is in it: its requests share calls as in any engine.
    Its jobs are jobs of the host too. The host may change between two jobs. No costs are measured while it rests; they are learnt
    from its calls. It joins the host with its first request, and leaves it when either of them is closed.
    """

    def __init__(self, steps: EngineSteps, host: JobHost) -> None:
        super().__init__()
        self.id = new_source_id()
        self.host = host
        self._steps = steps
        self._changed = threading.Condition(steps.lock)
        self._sources: list[JobSource] = []  # of which the jobs were passed on to the host
        self._wake_host: Callable[[], None] = lambda: None
        self._has_joined = False
        self._has_ended = False
        self._last_end = float("-inf")  # of a step

    @property
    def is_busy(self) -> bool:
        """As ``StepHost.is_busy``."""
        return bool(self._steps.num_requests) or any(source.has_jobs for source in self._sources)

    def need(self) -> None:
        """As ``StepHost.need``: join the host if necessary, and wake it."""
        self.check_process()
        with self._steps.lock:
            self.check_open()
            if not self._has_joined:
                self.host.add_jobs(self)
                self._has_joined = True
            self._steps.has_news = True
            self._wake_host()

    def add_jobs(self, source: JobSource) -> None:
        """As ``JobHost.add_jobs``."""
        self.check_process()
        self.host.add_jobs(source)
        with self._steps.lock:
            self._sources = [*self._sources, source]

    def remove_jobs(self, source: JobSource) -> None:
        """As ``JobHost.remove_jobs``."""
        self._forget(source)
        self.host.remove_jobs(source)

    def detach_jobs(self, source: JobSource) -> None:
        """As ``JobHost.detach_jobs``."""
        self._forget(source)
        self.host.detach_jobs(source)

    def _forget(self, source: JobSource) -> None:
        with self._steps.lock:
            self._sources = [other for other in self._sources if other is not source]

    def costs_awaited(self) -> AbstractContextManager[None]:
        """Do nothing: costs are learnt from calls."""
        return nullcontext()

    @property
    def has_jobs(self) -> bool:
        """Whether there is something to do on the host's thread; found without a lock."""
        return self._steps.has_news or self._steps.is_needed or self._steps.core.device.is_offloading

    @property
    def wait_seconds(self) -> float:
        """No step waits for requests that may come."""
        return 0.0

    def attach(self, wake: Callable[[], None]) -> None:
        """Take the function that wakes the host's thread."""
        self._wake_host = wake

    def next_job(self, max_seconds: float | None = None) -> JobView | None:
        """Do what needs no device, and return the next step as a policy sees it; None if no request is left.

        It takes its time, whatever ``max_seconds`` says: how long prompts are divided is the affair of this engine's own policy.
        """
        del max_seconds
        with self._steps.in_use:
            return None if self._has_ended else self._steps.guarded(self._next_job, None)

    def _next_job(self) -> JobView | None:
        core = self._steps.core
        self._steps.take()
        core.end_expired()
        if core.requests:
            return self._job_of(core.serving.view())
        core.step()  # without a call: it hands out what is left, and moves cached slots
        return None

    def run_next(self, meanwhile: Callable[[], None] | None = None) -> int:
        """Make one step, and return the number of rows of its call; 0 if there was none."""
        with self._steps.in_use:
            return 0 if self._has_ended else self._steps.guarded(partial(self._run_next, meanwhile), 0)

    def _run_next(self, meanwhile: Callable[[], None] | None) -> int:
        core = self._steps.core
        core.step(meanwhile)
        self._last_end = core.clock()
        with self._steps.lock:
            self._changed.notify_all()  # ``close`` may wait for the last request
        return sum(rows.count for rows in core.rows)

    def close(self, drain: bool = False) -> None:
        """Leave the host: with ``drain`` after all requests and jobs have ended, else at once, and cancel them.

        A second call does nothing, and neither does one in a forked child.
        """
        if not self.is_ours:
            return
        with self._steps.lock:
            self.is_closing = True
            while drain and self.is_busy and not self._has_ended:  # jobs end without a word here
                self._changed.wait(POLL_SECONDS)
            sources = self._sources
        for source in (*sources, self):
            self.host.detach_jobs(source)
        for source in sources:
            source.close()
        run_uninterrupted(self._leave, "staticllm-close")
        with self._steps.lock:
            self._changed.notify_all()

    def _leave(self) -> None:
        with self._steps.in_use:
            self._has_ended = True
            self._steps.end()

    def _job_of(self, view: View) -> JobView:
        """Return the next step of the requests in a view, of which it has the highest priority and the first deadline.

        The step waits since the last one: what came before that, such as a window that is to be encoded, goes first.
        """
        requests = view.requests
        arrival = max(self._last_end, min((request.arrival for request in requests), default=view.now))
        deadline = min((request.deadline for request in requests if request.deadline is not None), default=None)
        priority = job_priority(self._steps.core.demand.priority)
        return JobView(self.id, _longest_call(view), arrival, priority, deadline)


def _longest_call(view: View) -> float:
    """Return the longest time that the next call may take, s: with all rows that wait, as far as one call has them."""
    device = view.device
    num_rows = sum(request.num_left for request in view.requests)
    variant = device.call(num_rows, len(view.requests))
    if variant is not None:
        return device.seconds(variant)
    return max(map(device.seconds, device.index.variants))
