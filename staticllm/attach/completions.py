"""Runs the ends of asynchronous calls on a thread of their own, which ends with its owner."""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable

EXIT_SECONDS = 10.0
"""The longest time for which the end of the interpreter waits for functions that run. Natively they are cut off there."""


class Completions:
    """A thread that runs functions one after the other; it starts with the first one."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._open = _Count()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._work.put, None).atexit = False

    @property
    def is_busy(self) -> bool:
        return self._open.value > 0

    def is_current_thread(self) -> bool:
        """Return whether the caller is such a function."""
        return threading.current_thread() is self._thread

    def put(self, work: Callable[[], object]) -> None:
        """Run a function, which must not raise."""
        if self._thread is None or not self._thread.is_alive():  # a forked child has the object without the thread
            self._open = _Count()
            self._thread = threading.Thread(
                target=_serve, args=(self._work, self._open), name="staticllm-attach", daemon=True
            )
            self._thread.start()
        self._open.add(1)
        self._work.put(work)

    def join(self, seconds: float | None) -> bool:
        return self._open.join(seconds)


class _Count:
    """How many functions have not ended."""

    def __init__(self) -> None:
        self.value = 0
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    def add(self, change: int) -> None:
        with self._lock:
            self.value += change
            self._changed.notify_all()

    def join(self, seconds: float | None) -> bool:
        with self._lock:
            return self._changed.wait_for(lambda: not self.value, seconds)


_running: set[tuple[threading.Thread, queue.SimpleQueue[Callable[[], object] | None]]] = set()


def _serve(work: queue.SimpleQueue[Callable[[], object] | None], count: _Count) -> None:
    entry = threading.current_thread(), work
    _running.add(entry)
    while True:
        step = work.get()
        if step is None:
            _running.discard(entry)
            return
        step()
        del step  # it keeps the request alive
        count.add(-1)


@atexit.register
def _end_all() -> None:
    """End the threads: the process is aborted if one of them frees a native object while the interpreter ends."""
    end = time.monotonic() + EXIT_SECONDS
    threads = list(_running)
    for _, work in threads:
        work.put(None)
    for thread, _ in threads:
        thread.join(max(end - time.monotonic(), 0.0))
