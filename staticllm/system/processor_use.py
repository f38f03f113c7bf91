"""How much the processors of this process are used, by all or by other processes."""

from __future__ import annotations

import os
import time

import psutil

SHORTEST = 0.1
"""The shortest time, in seconds, of which the use can be told: systems count it in steps of 10 to 16 ms."""
BUSY_FIELDS = ("user", "nice", "system", "steal")


class ProcessorUse:
    """Measures which share of the processors that this process may use has been in use. For one thread."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self._start = time.perf_counter()
        self._own = time.process_time()
        self._busy = _busy_seconds(own_processors())

    def share(self, with_own: bool) -> float:
        """Return the share, 0 to 1, that other processes have used since ``begin`` or the last answer, or all (``with_own``).

        It is 0, and the time goes on, if that was less than ``SHORTEST`` ago. It is also 0 if the system does not say. A limit of
        processor time, as containers have, is not known: the share is one of the processors.
        """
        start = self._start
        own = self._own
        before = self._busy
        if time.perf_counter() - start < SHORTEST:
            return 0.0
        self.begin()
        if before is None or self._busy is None:
            return 0.0
        used = self._busy - before - (0.0 if with_own else self._own - own)
        return min(1.0, max(0.0, used / ((self._start - start) * max(1, len(own_processors())))))


def own_processors() -> frozenset[int]:
    """Return the numbers of the processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _busy_seconds(processors: frozenset[int]) -> float | None:
    """Return how long these processors have been busy, with any process, since the machine was started.

    None if the system does not say: a process without free file descriptors cannot ask.
    """
    try:
        times = psutil.cpu_times(percpu=True)
    except Exception:  # OSError, RuntimeError on macOS, …: whoever asks only estimates, and must go on
        return None
    chosen = [each for number, each in enumerate(times) if number in processors] or times
    return float(sum(getattr(each, name, 0.0) for each in chosen for name in BUSY_FIELDS))
