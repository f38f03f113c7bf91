"""Decides which of several programs may use a device next: the engines of language models, and the calls of other models."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar

from staticllm.core import Clock
from staticllm.pipelines.engine.device_use import Rows, SoleUse, Worker
from staticllm.pipelines.scheduling.request_table import Limits

MIN_CALL_SHARE = 0.15
"""The least share of device time for calls that would delay an engine's next token."""
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


@dataclass(frozen=True, slots=True)
class ClientId:
    """A client of the daemon, by its number from 1 on."""

    number: int
    is_engine: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class EngineId:
    """An engine, by the number of its model."""

    model: int
    is_engine: ClassVar[bool] = True


Owner = ClientId | EngineId
"""Pays for the use of a device."""


@dataclass(slots=True)
class Share:
    """What one client, ``owner``, had of a use of the device.

    Attributes:
        owner: The client; None for requests of no client.
        phase: ``prefill`` and ``decode`` of a language model, ``call`` of another one.
        seconds: Its part of the duration: that of its rows among all rows of the call.
        rows: The rows of the call that were its own.
        num_bytes: What the call read for it: its part of the weights, and the keys and values of its sequences.
    """

    owner: ClientId | None
    phase: str
    seconds: float
    rows: int = 0
    num_bytes: int = 0


@dataclass
class Call:
    """One use of a device: the seconds before it, and the seconds that it took."""

    queued: float = 0.0
    taken: float = 0.0


@dataclass
class Ask:
    """A request for the device.

    Attributes:
        owner: Asks, and pays for the time: a client, or an engine for requests of no client.
        seconds: The expected duration.
        priority: Asks with a higher priority go first.
        model: The model that runs. Up to ``width`` calls of one model may run at once, in streams that its user asked for.
        phase, rows, num_bytes: As in ``Share``, of a call for ``owner``.
        payers: The clients that an engine asks for; each pays for its share. Empty if ``owner`` pays.
        arrival: The moment of the ask, on the clock of the ``DeviceTurns``.
    """

    owner: Owner
    seconds: float
    priority: int = 0
    model: int = 0
    width: int = 1
    phase: str = "call"
    rows: int = 0
    num_bytes: int = 0
    payers: Sequence[ClientId] = ()
    arrival: float = 0.0
    is_granted: bool = False
    _signal: threading.Lock | None = field(default=None, repr=False)  # of an ask that waits

    @property
    def payers_or_owner(self) -> Sequence[Owner]:
        """The owners that pay."""
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


class Turn:
    """A use of a device as a ``with`` block, which gives the ``Call``. A class, because generators take longer than turns."""

    __slots__ = ("_ask", "_call", "_start", "_turns")

    def __init__(self, turns: DeviceTurns, ask: Ask) -> None:
        self._turns = turns
        self._ask = ask
        self._call = Call()
        self._start = 0.0

    def __enter__(self) -> Call:
        self._call.queued = self._turns.take(self._ask)
        self._start = time.perf_counter()
        return self._call

    def __exit__(self, *_: object) -> None:
        self._call.taken = time.perf_counter() - self._start
        self._turns.give(self._ask, self._call.taken)


@dataclass(frozen=True)
class Due:
    """The moment at which an engine must have the device for the next token of a request of this ``priority``.

    It counts until the moment ``until`` if the engine does not ask for the device before.
    """

    moment: float
    priority: int
    until: float


OnUse = Callable[[Ask, float, Sequence[Share]], None]


class DeviceTurns:
    """Gives the device to one ask after the other. Any thread may call the methods.

    The highest priority goes first, and among equals the owner with the least device time, measured, not promised. An engine
    asks for the clients of its requests: the one with the least time counts, and each pays for its share of the rows.

    An engine with running requests sets ``due``, the moment at which it must have the device for the next token. A call of the
    same priority that would end after it waits, until it has waited long enough for its ``MIN_CALL_SHARE`` of the time. One of a
    lower priority has no such share, and for one of a higher priority ``due`` does not count. A moment that has passed while its
    engine does not ask counts no more: the client of the sequence has not come back.
    """

    def __init__(self, clock: Clock = time.perf_counter, on_use: OnUse | None = None) -> None:
        """Take a clock, and a function that is called with each ask that gives the device back, its seconds, and its shares."""
        self.clock = clock
        self._on_use = on_use
        self._lock = threading.Lock()
        self._waiting: list[Ask] = []
        self._running: list[Ask] = []
        self._used: dict[Owner, float] = {}  # seconds of each owner, as far as they count for turns
        self._floor = 0.0  # what a new or returning owner has used at least, so that rest gives no credit
        self._due: dict[Owner, Due] = {}
        self._held: Ask | None = None  # the last ask that gave the device back, and until when it is waited for
        self._held_until = float("-inf")
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
        ask.arrival = self.clock()
        with self._lock:
            if self._is_idle_for(ask):
                return 0.0
            ask.prepare()
            for owner in ask.payers_or_owner:
                self._used[owner] = max(self._used.get(owner, 0.0), self._floor)
            self._waiting.append(ask)
            self._grant()
            seconds = 0.0 if ask.is_granted else self._next_look()
        while not ask.is_granted:
            ask.wait(seconds)
            with self._lock:
                self._grant()
                seconds = self._next_look()
        return self.clock() - ask.arrival

    def _is_idle_for(self, ask: Ask) -> bool:
        """Grant an ask at once if no other waits or runs; ``_grant`` would do the same, more slowly."""
        if self._waiting or self._running or self._due or ask.payers:
            return False
        standing = max(self._used.get(ask.owner, 0.0), self._floor)
        last = self._held
        if last is not None and last.owner != ask.owner and self._is_held_for_another(ask, ask.arrival):
            return False
        self._used[ask.owner] = self._floor = standing
        self._running.append(ask)
        self._held = None
        ask.is_granted = True
        return True

    def give(self, ask: Ask, seconds: float, due: float | None = None, shares: Sequence[Share] = ()) -> None:
        """Give the device back after ``seconds`` of use; at the moment ``due`` this owner needs it again.

        The owners of ``shares`` pay for their seconds, and the owner of the ask for what is left.
        """
        if self._on_use is not None:
            self._on_use(ask, seconds, shares)
        with self._lock:
            self._running.remove(ask)
            left = seconds
            for share in shares:
                if share.owner is not None:
                    self._pay(share.owner, share.seconds)
                    left -= share.seconds
            if not ask.payers or left > 0:
                self._pay(ask.owner, max(0.0, left) / max(ask.width, 1))
            self._forget_some()
            self._set_due(ask.owner, due, ask.priority)
            self._held = ask
            self._held_until = self.clock() + HOLD_SECONDS
            self._grant()
            for each in self._waiting:  # until when they wait has changed
                each.wake()

    def hurry(self, owner: Owner, priority: int, payers: Sequence[ClientId]) -> None:
        """Give an ask of ``owner`` that waits with a lower priority this one, and its payers."""
        with self._lock:
            for ask in self._waiting:
                if ask.owner == owner and ask.priority < priority:
                    ask.priority = priority
                    ask.payers = payers
            self._grant()

    def turn(self, ask: Ask) -> Turn:
        """Wait for the device, and use it inside the ``with`` block."""
        return Turn(self, ask)

    def set_due(self, owner: Owner, due: float | None, priority: int = 0) -> None:
        """Set the moment at which an owner needs the device again; None if it does not."""
        with self._lock:
            self._set_due(owner, due, priority)
            self._grant()

    def forget(self, owner: Owner) -> None:
        """Forget an owner that has gone."""
        with self._lock:
            self._used.pop(owner, None)
            self._set_due(owner, None, 0)
            self._grant()

    def used(self, owner: Owner) -> float:
        """Return the seconds of an owner that count for its next turn."""
        return max(self._used.get(owner, 0.0), self._floor)

    def _pay(self, owner: Owner, seconds: float) -> None:
        self._used[owner] = self._used.get(owner, self._floor) + seconds

    def _forget_some(self) -> None:
        """Forget the owners at the floor, where newcomers begin."""
        if len(self._used) > MAX_OWNERS:
            waiting = {owner for ask in (*self._waiting, *self._running) for owner in ask.payers_or_owner}
            self._used = {owner: used for owner, used in self._used.items() if used > self._floor or owner in waiting}

    def _set_due(self, owner: Owner, due: float | None, priority: int) -> None:
        if due is None:
            self._due.pop(owner, None)
        else:
            self._due[owner] = Due(due, priority, max(due, self.clock() + LATE_SECONDS))

    def _standing(self, ask: Ask) -> float:
        """Return the seconds by which asks of one priority are ordered: the least of their payers'."""
        if not ask.payers:
            return self._used.get(ask.owner, self._floor)
        return min(self._used.get(owner, self._floor) for owner in ask.payers)

    def _grant(self) -> None:
        """Grant every ask that may run now. The caller holds the lock."""
        while self._waiting:
            now = self.clock()
            possible = [ask for ask in self._waiting if self._fits(ask) and self._may_run(ask, now)]
            if not possible:
                return
            ask = possible[0]
            if len(possible) > 1:
                ask = min(possible, key=lambda ask: (-ask.priority, self._standing(ask), ask.arrival))
            if self._is_held_for_another(ask, now):
                return
            self._waiting.remove(ask)
            self._running.append(ask)
            self._held = None
            self._floor = max(self._floor, self._standing(ask))
            if not self._is_in_time(ask, now, ask.priority):
                self._last_late = now + ask.seconds
            ask.is_granted = True
            ask.wake()

    def _is_held_for_another(self, ask: Ask, now: float) -> bool:
        """Whether the previous owner should have the device before ``ask``, and may still come back."""
        last = self._held
        if last is None or now >= self._held_until or last.priority < ask.priority or self._running:
            return False
        is_back = any(each.owner == last.owner for each in self._waiting)
        return not is_back and self._standing(last) + HOLD_DEFICIT < self._standing(ask)

    def _next_look(self) -> float:
        """Return the seconds after which a waiting ask might be granted although the device is not given back."""
        now = self.clock()
        moments = [self._held_until, *(due.until for due in self._due.values())]
        seconds = min((moment - now for moment in moments if moment > now), default=RECHECK_SECONDS)
        return min(seconds + MARGIN_SECONDS, RECHECK_SECONDS)

    def _fits(self, ask: Ask) -> bool:
        return not self._running or (
            self._running[0].model == ask.model and ask.model != 0 and len(self._running) < ask.width
        )

    def _is_in_time(self, ask: Ask, now: float, priority: int) -> bool:
        """Whether a call would end before every engine with a ``priority`` of at least this one needs the device."""
        if not self._due:
            return True
        asking = {each.owner for each in (*self._waiting, *self._running)}
        dues = (
            due.moment
            for owner, due in self._due.items()
            if owner != ask.owner and due.priority >= priority and (due.until >= now or owner in asking)
        )
        return now + ask.seconds <= min(dues, default=float("inf"))

    def _may_run(self, ask: Ask, now: float) -> bool:
        if self._is_in_time(ask, now, ask.priority):
            return True
        waited = now - max(ask.arrival, self._last_late)
        has_waited = waited * MIN_CALL_SHARE >= ask.seconds * (1 - MIN_CALL_SHARE)
        return has_waited and self._is_in_time(ask, now, ask.priority + 1)


SMOOTHING = 0.2
"""The weight of the newest step in the expected duration of the next one."""


class DeviceUse(SoleUse):
    """One engine among the users of a device. Runs on the engine's thread.

    The engine asks with the highest priority of its requests. After each step the clients pay for their rows, and the engine
    says by when it needs the device for the next token, which its own prompts delay by no more than ``token_bound`` either.

    Args:
        turns: Those of the device.
        engine: Pays for requests of no client.
        weight_bytes: The weights that each call reads.
    """

    def __init__(self, turns: DeviceTurns, engine: EngineId, weight_bytes: int = 0) -> None:
        self._turns = turns
        self._engine = engine
        self._weight_bytes = weight_bytes
        self._step_seconds = 0.0

    @property
    def is_wanted(self) -> bool:
        return self._turns.is_wanted

    @contextmanager
    def turn(self, worker: Worker, limits: Limits) -> Iterator[None]:
        """Use the device for one step inside the ``with`` block. Tokens are posted first if the device may be busy."""
        if self._turns.is_busy:
            worker.post()
        demand = worker.demand
        known = self._step_seconds
        payers = tuple(map(ClientId, demand.owners))
        ask = Ask(self._engine, known, demand.priority, self._engine.model, payers=payers)
        self._turns.take(ask)
        start = self._turns.clock()
        try:
            yield
        finally:
            seconds = self._turns.clock() - start
            self._step_seconds = known + SMOOTHING * (seconds - known) if known else seconds
            shares = self._shares(worker.rows, seconds)
            self._turns.give(ask, seconds, self._due(worker.last_token_times(), limits), shares)

    @contextmanager
    def measure(self) -> Iterator[None]:
        with self._turns.turn(Ask(self._engine, self._step_seconds, model=self._engine.model)):
            yield

    def hurry(self, priority: int, client: int) -> None:
        """Raise the priority of a waiting step, and let ``client`` (0: none) pay for it. Any thread may call."""
        self._turns.hurry(self._engine, priority, (ClientId(client),) if client else ())

    def close(self) -> None:
        self._turns.forget(self._engine)

    def _shares(self, rows: Sequence[Rows], seconds: float) -> list[Share]:
        """Return each client's part of a step, by its rows."""
        total = sum(each.count for each in rows)
        return [
            Share(
                ClientId(each.owner) if each.owner else None, each.phase, seconds * each.count / total, each.count,
                self._weight_bytes * each.count // total + each.num_bytes,
            )
            for each in rows
        ]  # fmt: skip

    def _due(self, last_tokens: Iterable[float], limits: Limits) -> float | None:
        """Return the latest moment at which the next step should begin; None if no request waits for a next token."""
        oldest = min(last_tokens, default=None)
        if oldest is None:
            return None
        step = self._step_seconds
        return oldest + limits.token_bound.of(step, limits.tpot_ms) - step
