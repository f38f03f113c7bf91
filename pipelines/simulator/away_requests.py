"""Simulates clients that choose tokens themselves: their requests are away from the device while they think."""

from __future__ import annotations

from dataclasses import dataclass

from staticllm.pipelines.engine.fed.state import ThinkTime
from staticllm.pipelines.scheduling.interface import AwayView
from staticllm.pipelines.scheduling.request_table import RequestInfo


@dataclass
class AwayRequest:
    """A request that its client continues with one token at the moment ``back``; ``num_slots`` tokens have KV slots."""

    info: RequestInfo
    since: float
    back: float
    num_slots: int
    think: ThinkTime

    def came_back(self, now: float, can_run: bool) -> RequestInfo:
        """Return the entry of the request in the table when it is back."""
        self.think.add(self.back - self.since)
        known = self.info
        info = RequestInfo(known.id, known.arrival, known.num_tokens + 1, known.priority, is_fed=True)
        info.come_back(self.num_slots, now, can_run)
        return info


class AwayRequests:
    """The requests whose clients think, those that have been away longest first. Their KV slots can be evicted."""

    def __init__(self) -> None:
        self._requests: dict[int, AwayRequest] = {}
        self._thinks: dict[int, ThinkTime] = {}

    @property
    def num_slots(self) -> int:
        """The KV slots of all of them."""
        return sum(away.num_slots for away in self._requests.values())

    @property
    def next_back(self) -> float | None:
        """The moment at which the next one comes back; None without one."""
        return min((away.back for away in self._requests.values()), default=None)

    @property
    def views(self) -> tuple[AwayView, ...]:
        """The requests as a policy receives them: it does not know their think times, but expects them as the engine does."""
        return tuple(
            AwayView(
                away.info.id,
                away.since,
                None if away.think.expected is None else away.since + away.think.expected,
                away.num_slots,
                away.info.priority,
            )
            for away in self._requests.values()
        )

    def add(self, info: RequestInfo, think: float, now: float) -> None:
        """Add a request whose client thinks for ``think`` seconds from ``now`` on."""
        known = self._thinks.setdefault(info.id, ThinkTime())
        self._requests[info.id] = AwayRequest(info, now, now + think, info.num_computed, known)

    def back_at(self, now: float) -> list[AwayRequest]:
        """Remove the requests that are back at the moment ``now``, and return them in the order in which they came."""
        back = sorted((away for away in self._requests.values() if away.back <= now), key=lambda away: away.back)
        for away in back:
            del self._requests[away.info.id]
        return back

    def evict_oldest(self) -> int:
        """Take the KV slots of the request that has been away longest. Return their number."""
        away = next(away for away in self._requests.values() if away.num_slots)
        num_slots, away.num_slots = away.num_slots, 0
        return num_slots
