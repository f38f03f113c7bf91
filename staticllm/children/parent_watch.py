"""Watches another process, usually the parent, and tells when it has ended."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import psutil

from staticllm.errors import ConfigError
from staticllm.system.threads import start_thread

LOOK_SECONDS = 1.0
"""The longest time that ``close`` waits; the end of the process itself is reported by the system at once."""


class ParentWatch:
    """Calls ``on_end`` once, on a thread of its own, when process ``pid`` has ended.

    The system wakes the thread (a pidfd on Linux, kqueue on macOS, a handle on Windows). The process is known by its start
    time as well, so that another one that gets its number later is not taken for it.

    Raises:
        ConfigError: there is no such process.
    """

    def __init__(self, pid: int, on_end: Callable[[], object]) -> None:
        try:
            self._process = psutil.Process(pid)
        except (psutil.NoSuchProcess, OverflowError):
            raise ConfigError(f"--parent-pid {pid}: there is no such process") from None
        except psutil.AccessDenied:
            raise ConfigError(f"--parent-pid {pid}: this user may not watch that process") from None
        self._on_end = on_end
        self._is_closed = threading.Event()
        self._thread = start_thread(self._watch, "staticllm-parent-watch")

    def close(self) -> None:
        """Stop watching. A second call does nothing."""
        self._is_closed.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _watch(self) -> None:
        while not self._is_closed.is_set():
            with contextlib.suppress(psutil.TimeoutExpired):
                if self._process.is_running():
                    self._process.wait(LOOK_SECONDS)
                if not self._is_closed.is_set():
                    self._on_end()
                return
