"""When an idle engine measures costs: after a rest, for a short time, and less while others use the processors."""

from __future__ import annotations

import time
from collections.abc import Callable

from staticllm.system.processor_use import ProcessorUse

IDLE_SECONDS = 0.5
"""Seconds without work after which the engine measures costs."""
SERIES_SECONDS = 2.0
"""Seconds of measurements after which the engine rests again, to see what else runs in this process."""
LONGEST_SECONDS = 30.0
"""The longest rest."""
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
        self._until = 0.0  # no measurement begins before this moment
        self._start: float | None = None  # of the first measurement after the rest

    def begin(self, is_awaited: bool = False) -> float:
        """Begin a rest, and return its length in seconds. Work may end it early, so that no measurement follows.

        It is short if somebody waits for the costs (``is_awaited``).
        """
        self._start = None
        self.use.begin()
        return IDLE_SECONDS if is_awaited else max(IDLE_SECONDS, self._until - time.perf_counter())

    def measure(self, run: Callable[[], None], is_awaited: bool = False) -> bool:
        """Run a measurement, after a rest or another one, and return whether the engine must rest before the next.

        It need not if somebody waits for the costs, whatever else runs.
        """
        is_busy = self.use.share(with_own=self._start is None) > BUSY and not is_awaited
        begin = time.perf_counter()
        if self._start is None:
            self._start = begin
        run()
        end = time.perf_counter()
        if is_busy:
            self._until = end + min(LONGEST_SECONDS, (end - begin) * (1 - SHARE_WHILE_BUSY) / SHARE_WHILE_BUSY)
        return not is_awaited and (is_busy or end - self._start > SERIES_SECONDS)
