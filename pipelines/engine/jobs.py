"""The jobs of a device: calls of other models that run between the calls of requests."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Sequence
from itertools import count
from typing import NamedTuple, Protocol, cast

from staticllm.errors import ClosedError, ConfigError

from ..scheduling.interface import JobView

_source_ids = count(1)


def new_source_id() -> int:
    """Return a number that no other job source of this process has."""
    return next(_source_ids)


def job_priority(priority: int) -> int:
    """Return the priority of a job whose request has a priority: documents have 0, and somebody waits for what has 1."""
    return priority + 1 if priority >= 0 else priority


def request_priority(priority: int) -> int:
    """Return the priority of the request of a job with a priority: the inverse of ``job_priority``."""
    return priority - 1 if priority > 0 else priority


class JobSource(Protocol):
    """Composes jobs, such as calls with packed texts, and runs them on the thread that owns the device.

    ``id`` is its number in plans. Any thread may call ``has_jobs``, ``wait_seconds`` and ``close``.
    """

    @property
    def id(self) -> int:
        """The number of the job source in plans; ``new_source_id`` gives one."""
        ...

    @property
    def has_jobs(self) -> bool:
        """Whether something may wait; found without composing a job."""
        ...

    @property
    def wait_seconds(self) -> float:
        """How much longer the next job should wait for parts that come soon, in seconds; 0 if the device may begin it."""
        ...

    def attach(self, wake: Callable[[], None]) -> None:
        """Take the function that wakes the device's thread, to be called after a job was added; it may raise our errors."""
        ...

    def next_job(self, max_seconds: float | None = None) -> JobView | None:
        """Return the job that ``run_next`` would run; None if there is none. It must return quickly.

        ``max_seconds``: the longest time that the job should take, as far as possible; None for no limit.
        """
        ...

    def run_next(self, meanwhile: Callable[[], None] | None = None) -> int:
        """Run one job, and return its number of texts or other parts; 0 if there was none. Errors do not leave it.

        ``meanwhile`` is called once the device has begun.
        """
        ...

    def close(self) -> None:
        """End everything that waits, with a ``ClosedError``, and return after the job that runs now."""
        ...


class JobHost(Protocol):
    """Owns a device whose thread runs jobs. Any thread may call the methods."""

    def add_jobs(self, source: JobSource) -> None:
        """Run the jobs of a job source from now on, until the host is closed or ``remove_jobs`` is called.

        Raises:
            ClosedError: the host was closed, or belongs to another process.
        """
        ...

    def remove_jobs(self, source: JobSource) -> None:
        """Close a job source after its current job. Nothing happens if the host has closed it already."""
        ...

    def detach_jobs(self, source: JobSource) -> None:
        """Begin no more jobs of a job source, which stays open for another host. One that runs now goes on."""
        ...

    def close(self) -> None:
        """Close every job source, and end the thread."""
        ...


def checked_host(engine: object) -> JobHost:
    """Return an engine that a user gave.

    Raises:
        ConfigError: it is not one.
    """
    if not callable(getattr(engine, "add_jobs", None)):
        raise ConfigError(
            f"engine is a {type(engine).__name__}: must be the engine of a pipeline, such as engine=llm.engine"
        )
    return cast("JobHost", engine)


class Asked(NamedTuple):
    """The priority of a request, and the client of the daemon that pays for it; 0 without one."""

    priority: int
    owner: int


def _asked(source: object) -> Sequence[Asked]:
    """Return for whom the next job of a job source is; nothing for those of other models, which no client pays for."""
    found: Sequence[Asked] = getattr(source, "asked", ())
    return found


class JobSources:
    """The job sources of one host. Any thread may call them, but ``views`` and ``run`` are for the thread of the device."""

    def __init__(self) -> None:
        self._sources: dict[int, JobSource] = {}  # replaced and never changed, so that reading it needs no lock
        self._lock = threading.RLock()  # the garbage collector may close a pipeline of the user while it is held
        self._is_closed = False

    def add(self, source: JobSource) -> None:
        """Add a job source.

        Raises:
            ClosedError: the job sources were closed.
        """
        with self._lock:
            if self._is_closed:
                raise ClosedError("the pipeline that owns the device is closed: load it again")
            self._sources = {**self._sources, source.id: source}

    def views(self, max_seconds: float | None = None) -> tuple[JobView, ...]:
        """Return the next job of each job source that has one. One that fails is closed, with a warning.

        ``max_seconds``: as for ``next_job``.
        """
        sources = self._sources.values()
        return tuple(job for source in sources if (job := self._next_job(source, max_seconds)) is not None)

    @property
    def has_jobs(self) -> bool:
        """Whether a job source may have a job."""
        return any(source.has_jobs for source in self._sources.values())

    @property
    def asked(self) -> list[Asked]:
        """For whom the next job of each job source uses the device, of those that serve clients of the daemon."""
        return [each for source in self._sources.values() for each in _asked(source)]

    def owner_of(self, id: int) -> int:
        """Return the client of the daemon that pays for the next job of a job source; 0 without one."""
        return next((each.owner for each in _asked(self._sources.get(id))), 0)

    @property
    def wait_seconds(self) -> float:
        """How long a device without other work should wait before the next job, in seconds."""
        return min((source.wait_seconds for source in self._sources.values() if source.has_jobs), default=0.0)

    def run(self, id: int, meanwhile: Callable[[], None] | None = None) -> int:
        """Run the next job of a job source, and return its number of parts. One that fails is closed, with a warning."""
        source = self._sources.get(id)
        if source is None:
            return 0
        try:
            return source.run_next(meanwhile)
        except BaseException as error:  # a bug of the job source, which must not end the requests of the device
            self._close_failed(source, error)
            return 0

    def _next_job(self, source: JobSource, max_seconds: float | None) -> JobView | None:
        try:
            return source.next_job(max_seconds)
        except BaseException as error:  # a bug of the job source, as above
            self._close_failed(source, error)
            return None

    def _close_failed(self, source: JobSource, error: BaseException) -> None:
        self.remove(source)
        with contextlib.suppress(RuntimeWarning):  # where warnings are errors, the thread of the device must go on
            warnings.warn(f"a source of jobs is closed, because it raised {error!r}", RuntimeWarning, stacklevel=3)

    def detach(self, source: JobSource) -> None:
        """Begin no more jobs of a job source."""
        with self._lock:
            self._sources = {id: other for id, other in self._sources.items() if other is not source}

    def remove(self, source: JobSource) -> None:
        """Close a job source."""
        self.detach(source)
        source.close()

    def close(self) -> None:
        """Close all job sources; a second call does nothing, unless the first was interrupted."""
        with self._lock:
            self._is_closed = True
        for source in self._sources.values():
            source.close()
            self.detach(source)  # not before it is closed: Ctrl-C may come between
