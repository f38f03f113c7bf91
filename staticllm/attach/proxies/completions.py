"""Runs the ends of asynchronous calls on a thread of their own, which ends with its owner."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable


class Completions:
    """A thread that runs functions one after the other; it starts with the first one."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._open = _Count()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._work.put, None)

    @property
    def is_busy(self) -> bool:
        """Whether a function runs or waits."""
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
        """Wait until no function runs; return whether that is so."""
        return self._open.join(seconds)


class _Count:
    """How many functions have not ended."""

    def __init__(self) -> None:
        self.value = 0
        self._changed = threading.Condition()

    def add(self, change: int) -> None:
        with self._changed:
            self.value += change
            self._changed.notify_all()

    def join(self, seconds: float | None) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self.value, seconds)


def _serve(work: queue.SimpleQueue[Callable[[], object] | None], count: _Count) -> None:
    while True:
        step = work.get()
        if step is None:
            return
        step()
        del step  # it keeps the request alive
        count.add(-1)
