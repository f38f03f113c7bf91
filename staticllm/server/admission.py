"""Decides which request enters a model next, so that a client with many requests does not starve the others."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter, deque
from dataclasses import dataclass, field

from staticllm.server.api_error import busy


@dataclass(frozen=True)
class AdmissionLimits:
    """``max_running`` answers run at once, of one client ``max_per_client``; ``max_waiting`` others wait."""

    max_running: int
    max_per_client: int
    max_waiting: int

    @classmethod
    def of(cls, num_seqs: int, max_per_client: int | None, max_waiting: int) -> AdmissionLimits:
        """Return the limits for a model that decodes ``num_seqs`` answers together.

        A quarter more may enter, so that the engine always has a next request. By default one client gets three quarters of
        ``num_seqs``; the rest is free for others at any time.
        """
        share = max(1, num_seqs * 3 // 4) if max_per_client is None else max_per_client
        return cls(num_seqs + max(1, num_seqs // 4), share, max_waiting)


@dataclass
class _Client:
    """What one client has in a model. ``turn`` is the number of its last admission."""

    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)
    turn: int = 0


class Admission:
    """The requests of one model: those that run, and a queue per client. Belongs to one event loop.

    Of the clients below their limit, the one with the fewest running answers is next; among equals, the one that waited longest.
    """

    def __init__(self, limits: AdmissionLimits) -> None:
        self.limits = limits
        self._running: Counter[str] = Counter()
        self._clients: dict[str, _Client] = {}
        self._turns = itertools.count(1)
        self._since: dict[asyncio.Future[None], float] = {}
        self.num_running = self.num_waiting = 0

    async def enter(self, client: str) -> None:
        """Wait for a place; ``leave`` returns it.

        Raises:
            ApiError: ``max_waiting`` requests wait (status 429).
        """
        entry = self._clients.setdefault(client, _Client())
        if not entry.waiting and self._has_room(client):
            self._take(client)
            return
        if self.num_waiting >= self.limits.max_waiting:
            self._forget(client)
            raise busy(
                f"{self.num_waiting} requests wait, --max-waiting is {self.limits.max_waiting}: try again later, or serve with "
                "a larger --max-waiting"
            )
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry.waiting.append(place)
        self.num_waiting += 1
        self._since[place] = time.perf_counter()
        try:
            await place
        except asyncio.CancelledError:
            if not place.cancelled():  # it was admitted in the same moment
                self.leave(client)
            elif place in entry.waiting:
                entry.waiting.remove(place)
                self.num_waiting -= 1
                self._forget(client)
            raise
        finally:
            del self._since[place]

    @property
    def waiting_since(self) -> list[float]:
        """The moments (``time.perf_counter``) since which requests wait, in the order of their arrival."""
        return list(self._since.values())

    def leave(self, client: str) -> None:
        """Return a place, and admit the next request."""
        self._running[client] -= 1
        self.num_running -= 1
        if not self._running[client]:
            del self._running[client]
        self._admit()
        self._forget(client)

    def _admit(self) -> None:
        while True:
            ready = [name for name, entry in self._clients.items() if entry.waiting and self._has_room(name)]
            if not ready:
                return
            name = min(ready, key=lambda client: (self._running[client], self._clients[client].turn))
            place = self._clients[name].waiting.popleft()
            self.num_waiting -= 1
            if place.cancelled():  # its task has not run yet
                self._forget(name)
                continue
            self._take(name)
            place.set_result(None)

    def _has_room(self, client: str) -> bool:
        limits = self.limits
        return self.num_running < limits.max_running and self._running[client] < limits.max_per_client

    def _take(self, client: str) -> None:
        self._running[client] += 1
        self.num_running += 1
        self._clients[client].turn = next(self._turns)

    def _forget(self, client: str) -> None:
        """Drop a client that has nothing here, so that the table stays as small as the queue."""
        entry = self._clients.get(client)
        if entry is not None and not entry.waiting and not self._running[client]:
            del self._clients[client]
        if not self._running[client]:
            self._running.pop(client, None)
