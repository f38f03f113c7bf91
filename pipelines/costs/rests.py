"""When an idle engine measures costs: after a rest, for a short time, and less while others use the processors."""

from __future__ import annotations

import time
from collections.abc import Callable

from staticllm.system.processor_use import ProcessorUse

IDLE_SECONDS = 0.5
"""Seconds without work after which the engine measures costs."""
SERIES_SECONDS = 2.0
"""Seconds of measurements after which the engine rests again, to see what else runs in this process."""
BUSY, SHARE_WHILE_BUSY = 0.25, 0.1
"""Others that use more than the first share of the processors leave the second share of the time to measurements, which would
slow them, and measure wrong."""


class Rests:
    """The rests of one engine. For its thread.

    While the engine rests it does nothing, so whatever uses the processors then is other work: of other processes, of other
    pipelines in this one, or of the program itself. Between measurements only other processes can be told from the engine.
    """

    def __init__(self) -> None:
        self.use = ProcessorUse()
        self._seconds = 0.0  # what the next rest takes at least
        self._start: float | None = None  # of the first measurement after the rest

    def begin(self) -> float:
        """Begin a rest, and return its length in seconds. Work may end it early, so that no measurement follows."""
        seconds = max(IDLE_SECONDS, self._seconds)
        self._seconds = 0.0
        self._start = None
        self.use.begin()
        return seconds

    def measure(self, run: Callable[[], None]) -> bool:
        """Run a measurement, after a rest or another one, and return whether the engine must rest before the next."""
        is_busy = self.use.share(with_own=self._start is None) > BUSY
        begin = time.perf_counter()
        if self._start is None:
            self._start = begin
        run()
        end = time.perf_counter()
        if is_busy:
            self._seconds = (end - begin) * (1 - SHARE_WHILE_BUSY) / SHARE_WHILE_BUSY
        return is_busy or end - self._start > SERIES_SECONDS
