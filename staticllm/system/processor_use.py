"""How much the processors of this process are used, by all or by other processes."""

from __future__ import annotations

import os
import time

import psutil

SHORTEST = 0.1
"""The shortest time, in seconds, of which the use can be told: systems count it in steps of about 10 ms."""
BUSY_FIELDS = ("user", "nice", "system", "steal")


class ProcessorUse:
    """Measures which share of the processors that this process may use has been in use. For one thread."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Measure from now on."""
        self._start = time.perf_counter()
        self._busy = _busy_seconds(own_processors())
        self._own = time.process_time()

    def share(self, with_own: bool) -> float:
        """Return the share, 0 to 1, that other processes have used since ``begin`` or the last answer, or all (``with_own``).

        It is 0 if that was less than ``SHORTEST`` ago, or if the system does not say.
        """
        elapsed = time.perf_counter() - self._start
        if elapsed < SHORTEST:
            return 0.0
        processors = own_processors()
        before = self._busy
        now = _busy_seconds(processors)
        own = 0.0 if with_own else time.process_time() - self._own
        self.begin()
        if before is None or now is None:
            return 0.0
        used = now - before - own
        return min(1.0, max(0.0, used / (elapsed * max(1, len(processors)))))


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
    except OSError:
        return None
    chosen = [each for number, each in enumerate(times) if number in processors] or times
    return float(sum(getattr(each, name, 0.0) for each in chosen for name in BUSY_FIELDS))
