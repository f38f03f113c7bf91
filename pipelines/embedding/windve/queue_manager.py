"""WINDVE's queue manager: one queue per device, and a policy that decides which device takes a query."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from staticllm.pipelines.embedding.windve.device_queue import Busy, DeviceQueue, Query
from staticllm.pipelines.embedding.windve.queue_policies import QueuePolicy


@dataclass(frozen=True)
class Excess:
    """Queries that idle devices do not take together: they take the first ``num_taken``, and are busy for the next one."""

    num_taken: int
    busy: Busy


@dataclass(frozen=True)
class Moved:
    """A text of a device that died: the index of the device that has it now, or why none took it."""

    query: Query
    place: int | Busy


class QueueManager:
    """Admits queries to the queues of several devices, and hands out their batches. It has no thread, clock or lock of its own.

    ``devices`` are in order of preference, the fastest first. Callers pass ``now``, seconds on the clock of the arrival times,
    and hold one lock around every method. For each device, ``begin`` and ``finish`` alternate.
    """

    def __init__(self, devices: Sequence[DeviceQueue], policy: QueuePolicy) -> None:
        self.devices = tuple(devices)
        self._policy = policy
        self._places: dict[int, tuple[Query, int]] = {}
        self._deadlines: list[
            tuple[float, int]
        ] = []  # a heap; entries of queries that have left or begun stay until they pass

    @property
    def num_waiting(self) -> int:
        """The number of texts that have not begun."""
        return sum(device.num_waiting for device in self.devices)

    def admit(self, query: Query, now: float) -> int | Busy:
        """Put a query into a queue; return the index of its device, or why no device takes it."""
        assert query.id not in self._places, f"query {query.id} is in a queue"
        place = self._policy.choose(query, self.devices, now)
        if not isinstance(place, Busy):
            self.devices[place].push(query, self._policy.limit(query))
            self._places[query.id] = (query, place)
            if query.deadline is not None:
                heapq.heappush(self._deadlines, (query.deadline, query.id))
        return place

    def excess(self, queries: Iterable[Query], devices: Iterable[int]) -> Excess | None:
        """Return why these devices, if all were idle, would not take queries that arrive together; None if they would."""
        given = [self.devices[device] for device in devices]
        idle = [DeviceQueue(queue.name, queue.new_load, queue.depth) for queue in given]
        for num_taken, query in enumerate(queries):
            place = self._policy.choose(query, idle, query.arrival)
            if isinstance(place, Busy):
                return Excess(num_taken, place)
            idle[place].push(query, self._policy.limit(query))
        return None

    def begin(self, device: int, now: float) -> tuple[Query, ...]:
        """Return the batch that the device runs next, which has now begun; empty if the device runs, is dead or has no work."""
        queue = self.devices[device]
        if queue.running or not queue.is_alive:
            return ()
        if not queue.num_waiting and self._policy.moves_bulk:
            self._take_bulk(device, now)
        return queue.begin(now, self._policy.most_seconds) if queue.num_waiting else ()

    def finish(self, device: int, now: float | None = None) -> tuple[Query, ...]:
        """End the batch of the device, and return it. The policy learns the moment ``now`` at which it ended, if it is given."""
        batch = self.devices[device].finish()
        for query in batch:
            del self._places[query.id]
            if now is not None:
                self._policy.learn(query, now)
        return batch

    def cancel(self, query_id: int) -> bool:
        """Remove a query that waits. Return False if it runs, whose result the caller drops, or if there is none."""
        query, device = self._places.get(query_id, (None, 0))
        if query is None or not self.devices[device].remove(query):
            return False
        del self._places[query_id]
        return True

    def expire(self, now: float) -> tuple[Query, ...]:
        """Remove and return the queries that wait and whose deadlines have passed."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, query_id = heapq.heappop(self._deadlines)
            query, _ = self._places.get(query_id, (None, 0))
            if query is not None and query.deadline == deadline and self.cancel(query_id):
                expired.append(query)
        return tuple(expired)

    def next_deadline(self) -> float | None:
        """Return the moment for the next ``expire``: a worker without work waits until then or for an event, it never polls."""
        return self._deadlines[0][0] if self._deadlines else None

    def fail(self, device: int, now: float) -> tuple[Moved, ...]:
        """Take a device that died out of use, and admit everything that it ran or that waited for it again.

        The queries keep their arrival times and limits. What no other device takes leaves the queues.
        """
        queue = self.devices[device]
        queue.is_alive = False
        queries = queue.clear()
        for query in queries:
            del self._places[query.id]
        return tuple(Moved(query, self.admit(query, now)) for query in sorted(queries, key=_order))

    def revive(self, device: int) -> None:
        """Use a device again whose worker was restarted."""
        self.devices[device].is_alive = True

    def _take_bulk(self, device: int, now: float) -> None:
        """Move bulk texts of the longest queue to an idle device, as many as one batch, if they would end sooner there."""
        idle = self.devices[device]
        others = [other for other in self.devices if other.num_bulk]
        if not others:
            return
        other = max(others, key=lambda other: _seconds(other, now))
        sooner = min(self._policy.most_seconds, _seconds(other, now))
        load, moved = idle.new_load(), []
        for query in other.waiting():
            if self._policy.limit(query) is not None:
                continue
            if load.seconds_with(query.num_tokens) > sooner:
                break
            load.add(query.num_tokens)
            moved.append(query)
        for query in moved:
            other.remove(query)
            idle.push(query, None)
            self._places[query.id] = (query, device)


def _seconds(queue: DeviceQueue, now: float) -> float:
    """Return the predicted seconds until the queue is empty."""
    return queue.left(now) + queue.waiting_seconds


def _order(query: Query) -> tuple[int, float, int]:
    return -query.priority, query.arrival, query.id
