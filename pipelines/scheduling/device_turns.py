"""Decides which of several programs may use a device next: the engines of language models, and the calls of other models."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

MIN_CALL_SHARE = 0.15
"""The least share of device time for calls that no engine's next token leaves room for."""
RECHECK_SECONDS = 0.25
"""The longest time between two looks at the calls that wait for an engine."""


@dataclass
class Ask:
    """A wish to use the device.

    Attributes:
        owner: Who pays for the time: a client or an engine.
        seconds: The expected duration.
        priority: Asks with a higher priority go first.
        model: The model that runs. Up to ``width`` calls of one model may run at once, in streams that its user asked for.
        arrival: The moment of the ask, on the clock of the ``DeviceTurns``.
    """

    owner: int
    seconds: float
    priority: int = 0
    model: int = 0
    width: int = 1
    arrival: float = 0.0
    _granted: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __post_init__(self) -> None:
        self._granted.acquire()

    def grant(self) -> None:
        """Let the thread that waits go on."""
        self._granted.release()

    def wait(self, seconds: float) -> bool:
        """Wait until the ask is granted; return False after ``seconds``."""
        return self._granted.acquire(timeout=seconds)


class DeviceTurns:
    """Gives the device to one ask after the other. Any thread may call the methods.

    The highest priority goes first, and among equals the owner who has used the least device time, measured, not promised.
    An engine with running requests sets ``due``, the moment at which it must have the device for the next token. A call that
    would end after it waits, until it has waited long enough for its ``MIN_CALL_SHARE`` of the time.
    """

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, on_use: Callable[[Ask, float], None] | None = None
    ) -> None:
        """Take a clock, and a function that is called with each ask that gives the device back, and the seconds of its use."""
        self._clock, self._on_use = clock, on_use
        self._lock = threading.Lock()
        self._waiting: list[Ask] = []
        self._running: list[Ask] = []
        self._used: dict[int, float] = {}  # seconds of each owner, as far as they count for turns
        self._floor = 0.0  # what an owner who comes, or comes back, has used at least, so that rest gives no credit
        self._due: dict[int, float] = {}
        self._last_late = float("-inf")  # the expected end of the last call that was allowed in spite of ``due``

    @property
    def is_busy(self) -> bool:
        """Whether an ask has the device, or waits for it."""
        return bool(self._running or self._waiting)

    @property
    def is_wanted(self) -> bool:
        """Whether an ask waits."""
        return bool(self._waiting)

    def take(self, ask: Ask) -> float:
        """Wait for the device, and return how long it took in seconds. ``give`` must follow."""
        ask.arrival = self._clock()
        with self._lock:
            self._used[ask.owner] = max(self._used.get(ask.owner, 0.0), self._floor)
            self._waiting.append(ask)
            self._grant()
        while not ask.wait(RECHECK_SECONDS):
            with self._lock:
                self._grant()
        return self._clock() - ask.arrival

    def give(self, ask: Ask, seconds: float, due: float | None = None) -> None:
        """Give the device back after ``seconds`` of use; at the moment ``due`` this owner needs it again."""
        if self._on_use is not None:
            self._on_use(ask, seconds)
        with self._lock:
            self._running.remove(ask)
            self._used[ask.owner] = self._used.get(ask.owner, 0.0) + seconds / max(ask.width, 1)
            self._set_due(ask.owner, due)
            self._grant()

    def set_due(self, owner: int, due: float | None) -> None:
        """Set the moment at which an owner needs the device again; None if it does not."""
        with self._lock:
            self._set_due(owner, due)
            self._grant()

    def forget(self, owner: int) -> None:
        """Forget an owner who has gone."""
        with self._lock:
            self._used.pop(owner, None)
            self._set_due(owner, None)
            self._grant()

    def _set_due(self, owner: int, due: float | None) -> None:
        if due is None:
            self._due.pop(owner, None)
        else:
            self._due[owner] = due

    def _grant(self) -> None:
        """Grant every ask that may run now. The caller holds the lock."""
        while self._waiting:
            now = self._clock()
            possible = [ask for ask in self._waiting if self._fits(ask) and self._may_run(ask, now)]
            if not possible:
                return
            ask = min(possible, key=lambda ask: (-ask.priority, self._used.get(ask.owner, 0.0), ask.arrival))
            self._waiting.remove(ask)
            self._running.append(ask)
            self._floor = max(self._floor, self._used[ask.owner])
            if not self._is_in_time(ask, now):
                self._last_late = now + ask.seconds
            ask.grant()

    def _fits(self, ask: Ask) -> bool:
        return not self._running or (
            self._running[0].model == ask.model and ask.model != 0 and len(self._running) < ask.width
        )

    def _is_in_time(self, ask: Ask, now: float) -> bool:
        dues = (due for owner, due in self._due.items() if owner != ask.owner)
        return now + ask.seconds <= min(dues, default=float("inf"))

    def _may_run(self, ask: Ask, now: float) -> bool:
        waited = now - max(ask.arrival, self._last_late)
        has_waited = waited * MIN_CALL_SHARE >= ask.seconds * (1 - MIN_CALL_SHARE)
        return has_waited or self._is_in_time(ask, now)
