"""Runs jobs on a device that has no requests, with a thread of its own."""

from __future__ import annotations

import os
import threading

from staticllm.errors import pipeline_closed
from staticllm.system.threads import LazyThread, check_process, owned_device

from ..scheduling.job_scheduler import UrgentFirst
from .jobs import JobSource, JobSources


class JobEngine:
    """The ``JobHost`` of a device without a language model. Its thread starts with the first job."""

    def __init__(self) -> None:
        self._jobs = JobSources()
        self._order = UrgentFirst()
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)
        self._thread = LazyThread("staticllm-jobs")
        self._is_closing = False
        self._pid = os.getpid()

    def add_jobs(self, source: JobSource) -> None:
        """Run the jobs of a source from now on.

        Raises:
            ClosedError: the engine was closed, or belongs to another process.
        """
        check_process(self._pid)
        self._jobs.add(source)
        source.attach(self._notify)
        if source.has_jobs:
            self._notify()

    def remove_jobs(self, source: JobSource) -> None:
        """Close a source after its current job. Nothing happens if the engine has closed it already."""
        if os.getpid() == self._pid:
            self._jobs.remove(source)

    def detach_jobs(self, source: JobSource) -> None:
        """Begin no more jobs of a source, which stays open for another host. One that runs now goes on."""
        self._jobs.detach(source)

    def close(self) -> None:
        """End the thread after its current job, and close all sources. A second call does nothing."""
        if os.getpid() != self._pid:  # a forked child: thread and locks belong to the parent
            return
        with self._lock:
            self._is_closing = True
            self._wake.notify_all()
        if self._thread.is_current:
            return  # it closes the sources when it ends
        self._thread.join()
        self._jobs.close()

    def _notify(self) -> None:
        check_process(self._pid)
        with self._lock:
            if self._is_closing:
                raise pipeline_closed()
            self._thread.start(self._loop)
            self._wake.notify_all()

    def _loop(self) -> None:
        while self._waits_for_jobs():
            with owned_device():
                jobs = self._jobs.views()
                if (job := self._order.next(jobs)) is not None:
                    self._order.begin(job, jobs)
                    self._jobs.run(job.id)
        self._jobs.close()

    def _waits_for_jobs(self) -> bool:
        """Wait until there may be a job, and return True; False at the end."""
        with self._lock:
            while not self._is_closing:
                seconds = self._jobs.wait_seconds if self._jobs.has_jobs else None
                if seconds == 0:
                    return True
                self._wake.wait(seconds)
            return False
