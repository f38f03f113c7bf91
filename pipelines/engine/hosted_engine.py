"""An engine on a device that another engine owns: its steps are jobs of that one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from staticllm.core import Clock
from staticllm.errors import pipeline_closed
from staticllm.system.threads import run_uninterrupted

from ..programs.model_runner import ModelRunner
from ..scheduling.interface import JobView, Policy, View
from .engine import Engine
from .jobs import JobHost, JobSource, job_priority, new_source_id
from .options import EngineOptions
from .request import EngineText


class HostedEngine(Engine):
    """An engine without a thread: the ``JobSource`` of its own steps, each of which is a job of its ``host``.

    The host's scheduler decides when a step runs, and this engine's own what is in it: its requests share calls as in any engine.
    Its jobs are jobs of the host too. The host may change between two jobs. No costs are measured while it rests; they are learnt
    from its calls. It joins the host with its first request, and leaves it when either of them is closed.
    """

    def __init__(
        self,
        host: JobHost,
        runner: ModelRunner,
        policy: Policy,
        options: EngineOptions,
        text: EngineText | None = None,
        clock: Clock = time.perf_counter,
    ) -> None:
        super().__init__(runner, policy, options, text, clock)
        self.id = new_source_id()
        self.host = host
        self._sources: list[JobSource] = []  # of which the jobs were passed on to the host
        self._wake_host: Callable[[], None] = lambda: None
        self._has_joined = False
        self._has_ended = False
        self._last_end = float("-inf")  # of a step

    def add_jobs(self, source: JobSource) -> None:
        """Run the jobs of a source beside the requests of the host.

        Raises:
            ClosedError: the host was closed.
        """
        self.check_process()
        self.host.add_jobs(source)
        self._sources.append(source)

    def remove_jobs(self, source: JobSource) -> None:
        """Close a source after its current job. Nothing happens if the host has closed it already."""
        self.host.remove_jobs(source)

    def detach_jobs(self, source: JobSource) -> None:
        """Begin no more jobs of a source, which stays open for another host. One that runs now goes on."""
        self.host.detach_jobs(source)

    @property
    def is_idle(self) -> bool:
        """Whether the engine has neither requests nor jobs."""
        return not self.num_requests and not any(source.has_jobs for source in self._sources)

    @property
    def has_jobs(self) -> bool:
        """Whether there is something to do on the host's thread; found without a lock."""
        return bool(
            self._has_news or self.num_requests or self._callbacks or self._next or self._core.device.is_offloading
        )

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
        with self.in_use, self._guarded():
            if self._has_ended:
                return None
            self._admit()
            self._callbacks.run()
            self._core.end_expired()
            if self._core.requests:
                return self._job_of(self._core.serving.view())
            self._core.step()  # without a call: it hands out what is left, and moves cached slots
        return None

    def run_next(self, meanwhile: Callable[[], None] | None = None) -> int:
        """Make one step, and return the number of rows of its call; 0 if there was none."""
        with self.in_use, self._guarded():
            if self._has_ended:
                return 0
            self._core.step(meanwhile)
            self._last_end = self._core.clock()
            with self._lock:
                self._wake.notify_all()  # ``close`` may wait for the last request
            return sum(rows.count for rows in self._core.rows)
        return 0

    def close(self, drain: bool = False) -> None:
        """Leave the host: with ``drain`` after all requests and jobs have ended, else at once, and cancel them.

        A second call does nothing, and neither does one in a forked child.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._is_closing = True
            if drain:
                self._wake.wait_for(lambda: self._has_ended or self.is_idle)
        for source in (*self._sources, self):
            self.host.detach_jobs(source)
        for source in self._sources:
            source.close()
        run_uninterrupted(self._leave, "staticllm-close")
        with self._lock:
            self._wake.notify_all()

    def _leave(self) -> None:
        with self.in_use:
            self._has_ended = True
            super()._leave()

    def _start(self) -> None:
        """Join the host if necessary, and wake it. The caller holds the lock."""
        if self._is_closing:
            raise pipeline_closed()
        if not self._has_joined:
            self.host.add_jobs(self)
            self._has_joined = True
        self._has_news = True
        self._wake_host()

    def _job_of(self, view: View) -> JobView:
        """Return the next step of the requests in a view, of which it has the highest priority and the first deadline.

        The step waits since the last one: what came before that, such as a window that is to be heard, goes first.
        """
        requests = view.requests
        arrival = max(self._last_end, min((request.arrival for request in requests), default=view.now))
        deadline = min((request.deadline for request in requests if request.deadline is not None), default=None)
        return JobView(self.id, _longest_call(view), arrival, job_priority(self._core.demand.priority), deadline)


def _longest_call(view: View) -> float:
    """Return the longest time that the next call may take, s: with all rows that wait, as far as one call has them."""
    device = view.device
    num_rows = sum(request.num_left for request in view.requests)
    variant = device.call(num_rows, len(view.requests))
    if variant is not None:
        return device.seconds(variant)
    return max(map(device.seconds, device.index.variants))
