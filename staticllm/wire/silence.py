"""Finds out whether a daemon that lets its callers wait still runs: its process may be suspended."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from . import endpoint
from .endpoint import SilentError


class SilenceWatch:
    """Looks whether the daemon of a folder answers new connections, for all who wait for it. Any thread may call ``check``.

    The thread that answers them does nothing else, so a daemon that computes or compiles, however long, is not silent.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._looked = float("-inf")
        self._found: SilentError | None = None

    def check(self) -> None:
        """Return if the daemon answers, or if it has ended, which connections tell by themselves.

        What another thread has found within ``endpoint.PROBE_SECONDS`` counts as well.

        Raises:
            SilentError: it does not answer in time.
        """
        with self._lock:
            if time.monotonic() - self._looked >= endpoint.PROBE_SECONDS:
                try:
                    self._found = None
                    endpoint.check_answers(self._folder)
                except SilentError as error:
                    self._found = error
                self._looked = time.monotonic()
            if self._found is not None:
                raise SilentError(str(self._found))
