"""Decides which of several programs may use a device next: the engines of language models, and the calls of other models."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from staticllm.core import Clock
from staticllm.pipelines.scheduling.device_share import wait_for_share

RECHECK_SECONDS = 0.25
"""Re-evaluate waiting calls at least this often."""
MARGIN_SECONDS = 1e-4
"""Wake this much after the computed moment."""
HOLD_SECONDS = 0.002
"""Grace period for the previous owner, in seconds. Without it, owners with one call each alternate, whatever they have used."""
HOLD_DEFICIT = 0.02
"""The grace period is granted only if the previous owner has used this many seconds less than the waiting owners."""
LATE_SECONDS = 0.01
"""The shortest time for which an engine's next token counts before the engine asks."""
MAX_OWNERS = 64
"""Prune the table of used time above this size: owners at the floor count as newcomers, so nothing is lost."""


class ClientId(NamedTuple):
    """A client of the daemon, by its number from 1 on. A tuple, because a dataclass computes its hash in Python."""

    number: int
    is_engine: bool = False


class EngineId(NamedTuple):
    """An engine, by the number of its model."""

    model: int
    is_engine: bool = True


Owner = ClientId | EngineId
"""Pays for the use of a device."""


@dataclass(slots=True)
class Share:
    """What one client, ``owner``, had of a use of the device."""

    owner: ClientId | None
    """The client; None for requests of no client."""
    phase: str
    """``prefill`` and ``decode`` of a language model, ``call`` of another one."""
    seconds: float
    """Its part of the duration: that of its rows among all rows of the call."""
    rows: int = 0
    """The rows of the call that were its own."""
    num_bytes: int = 0
    """What the call read for it: its part of the weights, and the keys and values of its sequences."""


@dataclass
class DeviceCall:
    """One use of a device: the seconds before it, and the seconds that it took."""

    queued: float = 0.0
    taken: float = 0.0


@dataclass
class DeviceRequest:
    """A request for the device."""

    owner: Owner
    """Asks, and pays for the time: a client, or an engine for requests of no client."""
    seconds: float
    """The expected duration."""
    priority: int = 0
    """Higher ones go first."""
    model: int = 0
    """The model that runs. Up to ``width`` calls of one model may run at once, in streams that its user asked for."""
    width: int = 1
    phase: str = "call"
    """As in ``Share``, of a call for ``owner``; so are ``rows`` and ``num_bytes``."""
    rows: int = 0
    num_bytes: int = 0
    payers: Sequence[ClientId] = ()
    """The clients that an engine asks for; each pays for its share. Empty if ``owner`` pays."""
    arrival: float = 0.0
    """The moment of the request, on the clock of the ``DeviceScheduler``."""
    is_granted: bool = False
    _signal: threading.Lock | None = field(default=None, repr=False)  # of a request that waits

    @property
    def payers_or_owner(self) -> Sequence[Owner]:
        return self.payers or (self.owner,)

    def wake(self) -> None:
        """Let the waiting thread look again; one thread at a time may call."""
        if self._signal is not None and self._signal.locked():
            self._signal.release()

    def prepare(self) -> None:
        """Get ready to wait; called before another thread may call ``wake``."""
        self._signal = threading.Lock()
        self._signal.acquire()

    def wait(self, seconds: float) -> None:
        """Wait for ``wake``, at most ``seconds``."""
        assert self._signal is not None
        self._signal.acquire(timeout=seconds)


class DeviceGrant:
    """A use of a device as a ``with`` block, which gives the ``DeviceCall``. A generator would be slower than a short call."""

    __slots__ = ("_call", "_request", "_scheduler", "_start")

    def __init__(self, scheduler: DeviceScheduler, request: DeviceRequest) -> None:
        self._scheduler = scheduler
        self._request = request
        self._call = DeviceCall()
        self._start = 0.0

    def __enter__(self) -> DeviceCall:
        self._call.queued = self._scheduler.acquire(self._request)
        self._start = time.perf_counter()
        return self._call

    def __exit__(self, *_: object) -> None:
        self._call.taken = time.perf_counter() - self._start
        self._scheduler.release(self._request, self._call.taken)


@dataclass(frozen=True)
class Due:
    """The moment at which an engine must have the device for the next token of a request of this ``priority``."""

    moment: float
    priority: int
    until: float
    """The due counts until this moment if the engine does not ask for the device before."""


OnUse = Callable[[DeviceRequest, float, Sequence[Share]], None]


class DeviceScheduler:
    """Gives the device to one request after the other. Any thread may call the methods.

    The highest priority goes first, and among equals the owner with the least device time, measured, not promised. An engine
    asks for the clients of its requests: the one with the least time counts, and each pays for its share of the rows.

    An engine with running requests sets ``due``, the moment at which it must have the device for the next token. A call of the
    same priority that would end after it waits, until it has waited long enough for its ``MIN_SHARE`` of the time. One of a
    lower priority has no such share, and for one of a higher priority ``due`` does not count. A moment that has passed while its
    engine does not ask counts no more: the client of the sequence has not come back.
    """

    def __init__(self, clock: Clock = time.perf_counter, on_use: OnUse | None = None) -> None:
        """``on_use`` is called with each request that releases the device, its seconds, and its shares."""
        self.clock = clock
        self._on_use = on_use
        self._lock = threading.Lock()
        self.waiting: list[DeviceRequest] = []
        self.running: list[DeviceRequest] = []
        self._used: dict[Owner, float] = {}  # seconds of each owner, as far as they count
        self._floor = 0.0  # what a new or returning owner has used at least, so that idle time gives no credit
        self.due: dict[Owner, Due] = {}
        self._held: DeviceRequest | None = (
            None  # the last request that gave the device back, and until when it is waited for
        )
        self._held_until = float("-inf")
        self._last_late = float("-inf")  # the expected end of the last call that was allowed in spite of ``due``

    @property
    def is_busy(self) -> bool:
        """Whether a request has the device, or waits for it."""
        return bool(self.running or self.waiting)

    @property
    def is_wanted(self) -> bool:
        return bool(self.waiting)

    def acquire(self, request: DeviceRequest) -> float:
        """Wait for the device, and return how long it took in seconds. ``release`` must follow."""
        request.arrival = self.clock()
        with self._lock:
            if self._is_idle_for(request):
                return 0.0
            request.prepare()
            for owner in request.payers_or_owner:
                self._used[owner] = max(self._used.get(owner, 0.0), self._floor)
            self.waiting.append(request)
            self._grant()
            seconds = 0.0 if request.is_granted else self._next_look()
        while not request.is_granted:
            request.wait(seconds)
            with self._lock:
                self._grant()
                seconds = self._next_look()
        return self.clock() - request.arrival

    def _is_idle_for(self, request: DeviceRequest) -> bool:
        """Grant a request at once if no other waits or runs; ``_grant`` would do the same, more slowly."""
        if self.waiting or self.running or self.due or request.payers:
            return False
        standing = max(self._used.get(request.owner, 0.0), self._floor)
        last = self._held
        if last is not None and last.owner != request.owner and self._is_held_for_another(request, request.arrival):
            return False
        self._used[request.owner] = standing
        self._floor = standing
        self.running.append(request)
        self._held = None
        request.is_granted = True
        return True

    def release(
        self, request: DeviceRequest, seconds: float, due: float | None = None, shares: Sequence[Share] = ()
    ) -> None:
        """Give the device back after ``seconds`` of use; at the moment ``due`` this owner needs it again.

        The owners of ``shares`` pay for their seconds, and the owner of the request for what is left.
        """
        if self._on_use is not None:
            self._on_use(request, seconds, shares)
        with self._lock:
            self.running.remove(request)
            left = seconds
            for share in shares:
                if share.owner is not None:
                    self._pay(share.owner, share.seconds)
                    left -= share.seconds
            if not request.payers or left > 0:
                self._pay(request.owner, max(0.0, left) / max(request.width, 1))
            self._forget_some()
            self._set_due(request.owner, due, request.priority)
            self._held = request
            self._held_until = self.clock() + HOLD_SECONDS
            self._grant()
            for each in self.waiting:  # until when they wait has changed
                each.wake()

    def set_priority(self, owner: Owner, priority: int) -> None:
        """Change the priority of the waiting requests of ``owner``."""
        with self._lock:
            for request in self.waiting:
                if request.owner == owner:
                    request.priority = priority
            self._grant()

    def raise_priority(self, owner: Owner, priority: int, payers: Sequence[ClientId]) -> None:
        """Give a request of ``owner`` that waits with a lower priority this one, and its payers."""
        with self._lock:
            for request in self.waiting:
                if request.owner == owner and request.priority < priority:
                    request.priority = priority
                    request.payers = payers
            self._grant()

    def use(self, request: DeviceRequest) -> DeviceGrant:
        """Wait for the device, and use it inside the ``with`` block."""
        return DeviceGrant(self, request)

    def set_due(self, owner: Owner, due: float | None, priority: int = 0) -> None:
        """Set the moment at which an owner needs the device again; None if it does not."""
        with self._lock:
            self._set_due(owner, due, priority)
            self._grant()

    def forget(self, owner: Owner) -> None:
        with self._lock:
            self._used.pop(owner, None)
            self._set_due(owner, None, 0)
            self._grant()

    def used(self, owner: Owner) -> float:
        """Return the seconds of an owner that count for its order."""
        return max(self._used.get(owner, 0.0), self._floor)

    def _pay(self, owner: Owner, seconds: float) -> None:
        self._used[owner] = self._used.get(owner, self._floor) + seconds

    def _forget_some(self) -> None:
        """Forget the owners at the floor, where newcomers begin."""
        if len(self._used) > MAX_OWNERS:
            waiting = {owner for request in (*self.waiting, *self.running) for owner in request.payers_or_owner}
            self._used = {owner: used for owner, used in self._used.items() if used > self._floor or owner in waiting}

    def _set_due(self, owner: Owner, due: float | None, priority: int) -> None:
        if due is None:
            self.due.pop(owner, None)
        else:
            self.due[owner] = Due(due, priority, max(due, self.clock() + LATE_SECONDS))

    def _standing(self, request: DeviceRequest) -> float:
        """Return the seconds by which requests of one priority are ordered: the least of their payers'."""
        if not request.payers:
            return self._used.get(request.owner, self._floor)
        return min(self._used.get(owner, self._floor) for owner in request.payers)

    def _grant(self) -> None:
        """Grant every request that may run now. The caller holds the lock."""
        while self.waiting:
            now = self.clock()
            possible = [request for request in self.waiting if self._fits(request) and self._may_run(request, now)]
            if not possible:
                return
            request = possible[0]
            if len(possible) > 1:
                request = min(
                    possible, key=lambda request: (-request.priority, self._standing(request), request.arrival)
                )
            if self._is_held_for_another(request, now):
                return
            self.waiting.remove(request)
            self.running.append(request)
            self._held = None
            self._floor = max(self._floor, self._standing(request))
            if not self._is_in_time(request, now, request.priority):
                self._last_late = now + request.seconds
            request.is_granted = True
            request.wake()

    def _is_held_for_another(self, request: DeviceRequest, now: float) -> bool:
        """Whether the previous owner should have the device before ``request``, and may still come back."""
        last = self._held
        if last is None or now >= self._held_until or last.priority < request.priority or self.running:
            return False
        is_back = any(each.owner == last.owner for each in self.waiting)
        return not is_back and self._standing(last) + HOLD_DEFICIT < self._standing(request)

    def _next_look(self) -> float:
        """Return the seconds after which a waiting request might be granted although the device is not given back."""
        now = self.clock()
        moments = [self._held_until, *(due.until for due in self.due.values())]
        seconds = min((moment - now for moment in moments if moment > now), default=RECHECK_SECONDS)
        return min(seconds + MARGIN_SECONDS, RECHECK_SECONDS)

    def _fits(self, request: DeviceRequest) -> bool:
        return not self.running or (
            self.running[0].model == request.model and request.model != 0 and len(self.running) < request.width
        )

    def _is_in_time(self, request: DeviceRequest, now: float, priority: int) -> bool:
        """Whether a call would end before every engine with a ``priority`` of at least this one needs the device."""
        if not self.due:
            return True
        asking = {each.owner for each in (*self.waiting, *self.running)}
        dues = (
            due.moment
            for owner, due in self.due.items()
            if owner != request.owner and due.priority >= priority and (due.until >= now or owner in asking)
        )
        return now + request.seconds <= min(dues, default=float("inf"))

    def _may_run(self, request: DeviceRequest, now: float) -> bool:
        if self._is_in_time(request, now, request.priority):
            return True
        waited = now - max(request.arrival, self._last_late)
        return waited >= wait_for_share(request.seconds) and self._is_in_time(request, now, request.priority + 1)
