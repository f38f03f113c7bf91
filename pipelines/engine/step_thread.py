"""A thread that owns a device and runs its jobs: it begins when it is needed, waits for news, and ends when it is closed."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod

from staticllm.system.threads import LazyThread

from .jobs import JobSource, JobSources
from .step_host import OfOneProcess


class StepThread(OfOneProcess, ABC):
    """Runs ``_run`` on a thread that begins with the first ``need`` and ends, after ``end``, once ``_run`` has returned.

    A subclass with ``close`` is a ``JobHost``: its ``_run`` runs the ``jobs``.
    ``lock`` guards what ``_run`` waits for, and ``wake``, its condition, is notified of news; ``is_closing`` is among them.
    """

    def __init__(self, name: str, jobs: JobSources, lock: threading.RLock | None = None) -> None:
        super().__init__()
        self.lock = threading.RLock() if lock is None else lock
        self.wake = threading.Condition(self.lock)
        self.thread = LazyThread(name)
        self._jobs = jobs

    @abstractmethod
    def _run(self) -> None:
        """Work until ``is_closing`` is true, and then end what is left."""

    def need(self) -> None:
        """Start the thread if necessary, and wake it.

        Raises:
            ClosedError: it was closed, or belongs to another process.
        """
        self.check_process()
        with self.lock:
            self.check_open()
            self.thread.start(self._run)
            self.wake.notify_all()

    def add_jobs(self, source: JobSource) -> None:
        """As ``JobHost.add_jobs``."""
        self.check_process()
        self._jobs.add(source)
        source.attach(self.need)
        if source.has_jobs:
            self.need()

    def remove_jobs(self, source: JobSource) -> None:
        """As ``JobHost.remove_jobs``."""
        if self.is_ours:
            self._jobs.remove(source)

    def detach_jobs(self, source: JobSource) -> None:
        """As ``JobHost.detach_jobs``."""
        self._jobs.detach(source)

    def end(self) -> bool:
        """End the thread, and wait for it. Return False on the thread itself, which has not ended, and in a forked child."""
        if not self.is_ours:
            return False
        with self.lock:
            self.is_closing = True
            self.wake.notify_all()
        if self.thread.is_current:
            return False
        self.thread.join()
        return True
