"""Runs jobs on a device that has no requests, with a thread of its own."""

from __future__ import annotations

from staticllm.system.threads import owned_device

from ..scheduling.job_scheduler import UrgentFirst
from .jobs import JobSource, JobSources
from .step_thread import StepThread


class JobEngine(StepThread):
    """The ``JobHost`` of a device without a language model. Its thread starts with the first job."""

    def __init__(self) -> None:
        super().__init__("staticllm-jobs")
        self._jobs = JobSources()
        self._order = UrgentFirst()

    def add_jobs(self, source: JobSource) -> None:
        """Run the jobs of a source from now on.

        Raises:
            ClosedError: the engine was closed, or belongs to another process.
        """
        self.check_process()
        self._jobs.add(source)
        source.attach(self.need)
        if source.has_jobs:
            self.need()

    def remove_jobs(self, source: JobSource) -> None:
        """Close a source after its current job. Nothing happens if the engine has closed it already."""
        if self.is_ours:
            self._jobs.remove(source)

    def detach_jobs(self, source: JobSource) -> None:
        """Begin no more jobs of a source, which stays open for another host. One that runs now goes on."""
        self._jobs.detach(source)

    def close(self) -> None:
        """End the thread after its current job, and close all sources. A second call does nothing."""
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
