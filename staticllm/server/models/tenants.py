"""How much device time each client has had, in relation to its share: who had least is admitted next."""

from __future__ import annotations

from collections.abc import Mapping

MAX_KNOWN = 1024
"""Clients whose time is remembered. One that is forgotten begins again like a new one: it gains no more than it owed."""
LEARNING = 0.1
"""Weight of the last answer in the mean time of an answer."""
OTHERS = "others"
"""The name of all clients without an entry, in numbers that are shown."""


class TenantShares:
    """The device time of clients, in seconds divided by their shares: start-time fair queueing (Goyal, Vin, Cheng, 1996).

    A client that was idle begins where those that are served now are, so that nobody saves time up. ``shares``: of the clients
    with an entry, by name; every other has 1. Belongs to one event loop; ``seconds`` may be read by other threads.
    """

    def __init__(self, shares: Mapping[str, float] | None = None) -> None:
        self._shares = dict(shares or {})
        self._spent: dict[str, float] = {}  # in seconds per share; the one that was used last is the last one
        self._now = 0.0  # of the client that was admitted last, in seconds per share
        self._mean: float | None = None  # seconds of an answer
        self.seconds: dict[str, float] = {**dict.fromkeys(self._shares, 0.0), OTHERS: 0.0}

    @property
    def numbers(self) -> list[dict[str, object]]:
        """What clients with an entry, and all others together, have had, as JSON types. Any thread may call."""
        return [
            {"name": name, "share": self.share(name), "seconds": round(spent, 6)}
            for name, spent in self.seconds.items()
        ]

    def share(self, client: str) -> float:
        return self._shares.get(client, 1.0)

    def begin(self, client: str) -> None:
        """Note that a client that had nothing in a model comes with a request."""
        self._set(client, max(self._spent.get(client, 0.0), self._now))

    def admit(self, client: str) -> None:
        """Note that a request of a client begins to run."""
        self._now = max(self._now, self._spent.get(client, 0.0))

    def charge(self, client: str, seconds: float) -> None:
        """Add the device time of an answer, in seconds."""
        seconds = max(0.0, seconds)
        self._mean = seconds if self._mean is None else (1 - LEARNING) * self._mean + LEARNING * seconds
        self._set(client, self._spent.get(client, self._now) + seconds / self.share(client))
        self.seconds[client if client in self._shares else OTHERS] += seconds

    def rank(self, client: str, num_running: int) -> float:
        """Return what orders clients, the least first: the time that it had, and the expected time of what it has running."""
        mean = 1.0 if self._mean is None else self._mean
        return self._spent.get(client, self._now) + num_running * mean / self.share(client)

    def _set(self, client: str, spent: float) -> None:
        self._spent.pop(client, None)
        self._spent[client] = spent
        while len(self._spent) > MAX_KNOWN:
            del self._spent[next(iter(self._spent))]
