"""Decides which request enters a model next, so that a client with many requests does not starve the others."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter, deque
from dataclasses import dataclass, field

from staticllm.server.http.errors import ApiError, busy
from staticllm.server.models.tenants import TenantShares


@dataclass(frozen=True)
class AdmissionLimits:
    """``max_running`` answers run at once, of one client ``max_per_client``; ``max_waiting`` others wait.

    A client has up to ``max_alone`` while no other is known; None for ``max_per_client``.
    """

    max_running: int
    max_per_client: int
    max_waiting: int
    max_alone: int | None = None

    @classmethod
    def of(cls, num_seqs: int, max_per_client: int | None, max_waiting: int) -> AdmissionLimits:
        """Return the limits for a model that decodes ``num_seqs`` answers together.

        A quarter more may enter, so that the engine always has a next request. By default one client gets three quarters of
        ``num_seqs``, and all while it is alone. Its running answers are not interrupted for a newcomer, but the quarter is free
        for it: it enters at once, and decodes when the first of them has ended.
        """
        max_running = num_seqs + max(1, num_seqs // 4)
        if max_per_client is not None:
            return cls(max_running, max_per_client, max_waiting)
        return cls(max_running, max(1, num_seqs * 3 // 4), max_waiting, max_alone=num_seqs)


KNOWN_SECONDS = 60.0
"""Seconds after its last request for which a client is known, so that places are kept for it."""


@dataclass
class _Client:
    """What one client has in a model. ``turn`` is the number of its last admission; ``num_queued`` requests wait, not counting
    the further answers of requests that run."""

    waiting: deque[_Place] = field(default_factory=deque)
    turn: int = 0
    num_queued: int = 0

    def add(self, place: _Place) -> None:
        """Let a place wait, before those with a lower priority."""
        index = len(self.waiting)
        while index and self.waiting[index - 1].priority < place.priority:
            index -= 1
        self.waiting.insert(index, place)
        self.num_queued += place.is_request


@dataclass(eq=False, frozen=True)
class _Place:
    """What waits: a request with its first answer, or a further answer of a request that runs.

    ``admitted`` becomes the number of places that it takes; it asks for ``weight``.
    """

    admitted: asyncio.Future[int]
    is_request: bool
    priority: int
    weight: int
    since: float = field(default_factory=time.perf_counter)


class Admission:
    """The requests of one model: those that run, and a queue per client. Belongs to one event loop.

    A client is known while it has something here, and for ``KNOWN_SECONDS`` afterwards. Of the clients below their limit, the one
    that had least device time for its share is next, what runs included; among equals, the one that waited longest. If it needs
    more places than are free, they are kept for it.

    An answer takes one place, and a beam search as many as it has beams, but no more than its client may have.
    """

    def __init__(self, limits: AdmissionLimits, shares: TenantShares | None = None) -> None:
        """``shares``: the clients' shares and times, which several models have in common."""
        self.limits = limits
        self.shares = TenantShares() if shares is None else shares
        self._running: Counter[str] = Counter()
        self._clients: dict[str, _Client] = {}
        self._turns = itertools.count(1)
        self._places: dict[_Place, None] = {}  # in the order of their arrival
        self._last_seen: dict[str, float] = {}  # the last two clients: one of them is not the one that asks
        self.num_running = 0

    async def enter(self, client: str, is_request: bool = True, priority: int = 0, weight: int = 1) -> int:
        """Wait for ``weight`` places, or as many as the client may have, and return their number; ``leave`` returns them.

        Without ``is_request`` they are for a further answer of a request that runs. ``priority`` orders those of this client: no
        client goes before another by saying so. If the queue is full, the client with the most waiting requests loses its last
        one, if this client would have fewer.

        Raises:
            ApiError: 429: ``max_waiting`` requests wait.
        """
        if client not in self._clients:
            self.shares.begin(client)
        entry = self._clients.setdefault(client, _Client())
        self._see(client)
        count = self._num_places(client, weight)
        if not entry.waiting and self._next() is None and self._has_room(client, count):
            self._take(client, count)
            return count
        if is_request and self._num_queued >= self.limits.max_waiting and not self._make_room(entry.num_queued + 1):
            self._forget(client)
            raise self._full()
        self._clients[client] = entry  # the room may have been that of its cancelled request
        place = _Place(asyncio.get_running_loop().create_future(), is_request, priority, weight)
        entry.add(place)
        self._places[place] = None
        try:
            return await place.admitted
        except asyncio.CancelledError:
            if not place.admitted.cancelled():
                if place.admitted.exception() is None:  # it was admitted in the same moment
                    self.leave(client, place.admitted.result())
            elif place in entry.waiting:
                entry.waiting.remove(place)
                self._drop(entry, place)
                self._admit()  # places may have been kept for it
                self._forget(client)
            raise

    @property
    def num_waiting(self) -> int:
        return len(self._places)

    @property
    def _num_queued(self) -> int:
        return sum(entry.num_queued for entry in self._clients.values())

    def _full(self) -> ApiError:
        return busy(
            f"{self.limits.max_waiting} requests wait, --max-waiting is {self.limits.max_waiting}: try again later, or serve "
            "with a larger --max-waiting"
        )

    def _make_room(self, num_queued: int) -> bool:
        """Refuse the last request of the client with the most, if these are more than ``num_queued``. Return whether one was."""
        name, entry = max(self._clients.items(), key=lambda item: item[1].num_queued)
        if entry.num_queued <= num_queued:
            return False
        place = next(place for place in reversed(entry.waiting) if place.is_request)
        entry.waiting.remove(place)
        self._drop(entry, place)
        if not place.admitted.done():
            place.admitted.set_exception(self._full())
        self._admit()
        self._forget(name)
        return True

    def _drop(self, entry: _Client, place: _Place) -> None:
        """Count a place as one that no longer waits."""
        entry.num_queued -= place.is_request
        del self._places[place]

    @property
    def waiting_since(self) -> list[float]:
        """The moments (``time.perf_counter``) since which requests wait, in the order of their arrival."""
        return [place.since for place in self._places]

    def leave(self, client: str, count: int = 1) -> None:
        """Return ``count`` places, and admit the next requests."""
        self._running[client] -= count
        self.num_running -= count
        if not self._running[client]:
            del self._running[client]
        self._see(client)
        self._admit()
        self._forget(client)

    def _admit(self) -> None:
        while (name := self._next()) is not None:
            entry = self._clients[name]
            count = self._num_places(name, entry.waiting[0].weight)
            if not self._has_room(name, count):
                return
            place = entry.waiting.popleft()
            self._drop(entry, place)
            if place.admitted.cancelled():  # its task has not run yet
                self._forget(name)
                continue
            self._take(name, count)
            place.admitted.set_result(count)

    def _next(self) -> str | None:
        """Return the client that is next: one below its own limit, for which places may have to become free; None without one."""
        ready = [
            name
            for name, entry in self._clients.items()
            if entry.waiting and self._is_below_limit(name, self._num_places(name, entry.waiting[0].weight))
        ]
        return min(ready, key=self._rank, default=None)

    def _rank(self, client: str) -> tuple[float, int]:
        return self.shares.rank(client, self._running[client]), self._clients[client].turn

    def _num_places(self, client: str, weight: int) -> int:
        """Return how many places something of this weight takes: no more than the client may have while it has nothing else."""
        return max(1, min(weight, self._limit(client), self.limits.max_running))

    def _limit(self, client: str) -> int:
        """Return how many places a client may have now."""
        limits = self.limits
        if limits.max_alone is None or limits.max_alone <= limits.max_per_client:
            return limits.max_per_client
        has_more = self.shares.share(client) > 1
        return limits.max_alone if has_more or self._is_alone(client) else limits.max_per_client

    def _is_below_limit(self, client: str, count: int) -> bool:
        return self._running[client] + count <= self._limit(client)

    def _has_room(self, client: str, count: int) -> bool:
        return self._is_below_limit(client, count) and self.num_running + count <= self.limits.max_running

    def _is_alone(self, client: str) -> bool:
        now = time.monotonic()
        is_known = any(name != client and now - seen < KNOWN_SECONDS for name, seen in self._last_seen.items())
        return not is_known and all(name == client for name in self._clients)

    def _see(self, client: str) -> None:
        self._last_seen.pop(client, None)
        while len(self._last_seen) > 1:
            del self._last_seen[next(iter(self._last_seen))]
        self._last_seen[client] = time.monotonic()

    def _take(self, client: str, count: int) -> None:
        self.shares.admit(client)
        self._running[client] += count
        self.num_running += count
        self._clients[client].turn = next(self._turns)

    def _forget(self, client: str) -> None:
        """Drop a client that has nothing here, so that the table stays as small as the queue."""
        entry = self._clients.get(client)
        if entry is not None and not entry.waiting and not self._running[client]:
            del self._clients[client]
        if not self._running[client]:
            self._running.pop(client, None)
