"""Whose thread makes an engine's steps, and which process it belongs to."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Protocol

from staticllm.errors import pipeline_closed
from staticllm.system.threads import check_process

from .jobs import JobHost


class OfOneProcess:
    """What belongs to the process that made it, until it is closed. A forked child has neither its threads nor its locks."""

    def __init__(self) -> None:
        self.is_closing = False
        self._pid = os.getpid()

    @property
    def is_ours(self) -> bool:
        """Whether this is the process that it belongs to, and not a forked child."""
        return os.getpid() == self._pid

    def check_process(self) -> None:
        """Check that this is the process that it belongs to.

        Raises:
            ClosedError: it is a forked child.
        """
        check_process(self._pid)

    def check_open(self) -> None:
        """Check that it is not closing.

        Raises:
            ClosedError: it is.
        """
        if self.is_closing:
            raise pipeline_closed()


class StepHost(JobHost, Protocol):
    """Whose thread makes an engine's steps: ``OwnThread`` or ``HostedSteps``. Any thread may call."""

    is_closing: bool

    @property
    def is_ours(self) -> bool:
        """As ``OfOneProcess.is_ours``."""
        ...

    @property
    def host(self) -> JobHost | None:
        """The engine whose jobs the steps are; None for an engine with a thread of its own."""
        ...

    @property
    def is_busy(self) -> bool:
        """Whether a request has not ended, or a job source that was added here may have a job."""
        ...

    def check_process(self) -> None:
        """As ``OfOneProcess.check_process``."""
        ...

    def need(self) -> None:
        """Have a step made soon. The caller may hold the lock of the steps.

        Raises:
            ClosedError: the engine was closed, or belongs to another process.
        """
        ...

    def costs_awaited(self) -> AbstractContextManager[None]:
        """Measure costs in a block whatever else runs, because somebody waits for them."""
        ...

    def close(self, drain: bool = False) -> None:
        """Make no more steps, and end what is left: with ``drain`` after all requests and jobs have ended, else at once."""
        ...
