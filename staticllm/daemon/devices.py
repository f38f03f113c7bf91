"""The devices of the daemon: one set of turns per device, and what each client and model used of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from staticllm.daemon.timeline import Timeline
from staticllm.pipelines.scheduling.device_turns import Ask, DeviceTurns

SMOOTHING = 0.2
"""The weight of the newest call in the expected duration of the next one of the same shapes."""
MAX_SHAPES = 256
"""The most shapes of a model whose durations are remembered."""


class CallCosts:
    """The expected duration of the calls of one model, by the shapes of their inputs. Any thread may call the methods."""

    def __init__(self) -> None:
        self._seconds: dict[object, float] = {}
        self._last = 0.0

    def expected(self, shapes: object) -> float:
        """Return the expected seconds of a call; that of the last call for new shapes."""
        return self._seconds.get(shapes, self._last)

    def add(self, shapes: object, seconds: float) -> None:
        """Learn from a call that took ``seconds``."""
        known = self._seconds.get(shapes)
        if known is None and len(self._seconds) >= MAX_SHAPES:
            self._seconds.clear()
        self._last = seconds if known is None else known + SMOOTHING * (seconds - known)
        self._seconds[shapes] = self._last


@dataclass
class Call:
    """One use of a device: what was waited for it and what it took, in seconds."""

    queued: float = 0.0
    taken: float = 0.0


class Devices:
    """The devices that the daemon uses, by the names that clients give: ``NPU``, ``GPU.1``."""

    def __init__(self) -> None:
        self.timeline = Timeline()
        self._turns: dict[str, DeviceTurns] = {}
        self._lock = threading.Lock()

    def turns(self, device: str) -> DeviceTurns:
        """Return the turns of a device."""
        with self._lock:
            return self._turns.setdefault(device, DeviceTurns(on_use=self._record_engine))

    def forget(self, owner: int) -> None:
        """Forget a client that has gone."""
        with self._lock:
            turns = tuple(self._turns.values())
        for each in turns:
            each.forget(owner)

    def _record_engine(self, ask: Ask, seconds: float) -> None:
        """Record the steps of engines, whose numbers as owners are negative; calls are recorded for their programs."""
        if ask.owner < 0:
            self.timeline.add(f"engine of model {-ask.owner}", "step", time.perf_counter() - seconds, seconds)

    @contextmanager
    def turn(self, device: str, ask: Ask) -> Iterator[Call]:
        """Wait for the device, and use it inside the ``with`` block."""
        turns = self.turns(device)
        call = Call(turns.take(ask))
        start = time.perf_counter()
        try:
            yield call
        finally:
            call.taken = time.perf_counter() - start
            turns.give(ask, call.taken)
