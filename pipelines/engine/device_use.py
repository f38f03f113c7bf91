"""Lets the steps of an engine take turns with other programs on its device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from staticllm.pipelines.scheduling.device_turns import Ask, DeviceTurns
from staticllm.pipelines.scheduling.policies.dynamic import GAP_SECONDS, GAP_STEPS

SMOOTHING = 0.2
"""The weight of the newest step in the expected duration of the next one."""


class DeviceUse:
    """The place of one engine, ``owner``, among those who use a device. Runs on the engine's thread.

    After each step the engine says by when it needs the device for the next token: as late as ``dynamic`` lets prompts delay it.
    """

    def __init__(self, turns: DeviceTurns, owner: int) -> None:
        self._turns, self._owner = turns, owner
        self._step_seconds = 0.0

    @property
    def is_wanted(self) -> bool:
        """Whether somebody waits for the device."""
        return self._turns.is_wanted

    @contextmanager
    def turn(
        self, before_waiting: Callable[[], None], last_tokens: Callable[[], Iterable[float]], tpot_ms: float | None
    ) -> Iterator[None]:
        """Use the device inside the ``with`` block; ``before_waiting`` is called first if somebody else may have it.

        ``last_tokens`` returns the moments of the running requests' last tokens (``time.perf_counter``), after the step.
        """
        if self._turns.is_busy:
            before_waiting()
        ask = Ask(self._owner, self._step_seconds)
        self._turns.take(ask)
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            known = self._step_seconds
            self._step_seconds = known + SMOOTHING * (seconds - known) if known else seconds
            self._turns.give(ask, seconds, self._due(last_tokens(), tpot_ms))

    def close(self) -> None:
        """Leave the device to the others."""
        self._turns.forget(self._owner)

    def _due(self, last_tokens: Iterable[float], tpot_ms: float | None) -> float | None:
        """Return the latest moment at which the next step should begin; None if no request waits for a next token."""
        oldest = min(last_tokens, default=None)
        if oldest is None:
            return None
        step = self._step_seconds
        bound = max(GAP_STEPS * step, GAP_SECONDS) if tpot_ms is None else tpot_ms / 1e3
        return oldest + bound - step
