"""Runs jobs on a device that has no requests, with a thread of its own."""

from __future__ import annotations

from staticllm.system.threads import owned_device

from ..scheduling.job_scheduler import UrgentFirst
from .jobs import JobSources
from .step_thread import StepThread


class JobEngine(StepThread):
    """The ``JobHost`` of a device without a language model. Its thread starts with the first job."""

    def __init__(self) -> None:
        super().__init__("staticllm-jobs", JobSources())
        self._order = UrgentFirst()

    def close(self) -> None:
        """End the thread after its current job, and close all job sources. A second call does nothing."""
        if self.end():
            self._jobs.close()

    def _run(self) -> None:
        while self._waits_for_jobs():
            with owned_device():
                jobs = self._jobs.views()
                if (job := self._order.next(jobs)) is not None:
                    self._order.begin(job, jobs)
                    self._jobs.run(job.id)
        self._jobs.close()

    def _waits_for_jobs(self) -> bool:
        """Wait until there may be a job, and return True; False at the end."""
        with self.lock:
            while not self.is_closing:
                seconds = self._jobs.wait_seconds if self._jobs.has_jobs else None
                if seconds == 0:
                    return True
                self.wake.wait(seconds)
            return False
