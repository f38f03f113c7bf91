"""Decides which device takes a query: WINDVE's Algorithm 1, its variant with shorter counts, and prediction of the end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from staticllm.errors import ConfigError

from .device_queue import QUERY, Busy, DeviceQueue, Query

MARGIN, LEAST_MARGIN, MOST_MARGIN = 0.9, 0.5, 0.97
"""The share of the latency limit that ``Predicted`` fills; the rest is for errors of the predicted costs."""
LATE_SHARE, MARGIN_STEP = 0.005, 0.02
"""The share of queries that may end late, and by how much the margin shrinks for each of them."""
BULK_SHARE = 0.25
"""The share of the latency limit that a batch with bulk documents may take, and that a query may have to wait for it."""
BULK_SECONDS = 0.25
"""The longest batch of bulk documents if there is no latency limit, s."""
NO_DEVICE = "no device works any more: load the pipeline again"
LONG_SHARE = 0.25
"""A text is long for a device that takes more than this share of the latency limit for it alone."""


class QueuePolicy(Protocol):
    """Chooses a device for each query. ``queues`` are in order of preference, the fastest first; dead devices take nothing.

    A policy changes no queue. It is called while the lock of the queue is held, so it must be quick.
    """

    most_seconds: float
    """A batch gets bulk documents while its predicted seconds are at most this."""
    moves_bulk: bool
    """Whether an idle device takes bulk documents from another device's queue."""

    def limit(self, query: Query) -> float | None:
        """Return the moment by which the query must end; None for bulk work."""
        ...

    def choose(self, query: Query, queues: Sequence[DeviceQueue], now: float) -> int | Busy:
        """Return the index of the device that takes the query, or why none does."""
        ...

    def learn(self, query: Query, end: float) -> None:
        """Take the moment at which a query ended."""
        ...


class Unlimited:
    """What the policies without a latency limit have in common: every text is bulk work, and there is nothing to learn."""

    most_seconds = math.inf
    moves_bulk = False

    def limit(self, query: Query) -> float | None:
        """Return None: no text has a limit."""
        return None

    def learn(self, query: Query, end: float) -> None:
        """Do nothing: there is no limit."""


class Windve(Unlimited):
    """Algorithm 1 of the paper: the first device whose queue is not full takes the query; if all are full, it is busy.

    The length of a queue counts the queries that wait and those that run. It shrinks only when a batch ends. Every batch takes
    the whole queue. The length of the text does not matter, nor does its priority. The queue depths stand for the latency limit.
    """

    def choose(self, query: Query, queues: Sequence[DeviceQueue], now: float) -> int | Busy:
        """Return the first device whose queue is not full."""
        for index, queue in enumerate(queues):
            if queue.is_alive and self.length(queue) < queue.depth:
                return index
        depths = ", ".join(f"{queue.name} {queue.depth}" for queue in queues if queue.is_alive)
        wait = min((self.wait(queue, now) for queue in queues if queue.is_alive and queue.depth), default=math.inf)
        return Busy(
            wait, f"the queues of all devices are full (queue depths: {depths or 'no device works'}): try again later"
        )

    def length(self, queue: DeviceQueue) -> int:
        """Return the length that is compared with the queue depth."""
        return queue.num_waiting + len(queue.running)

    def wait(self, queue: DeviceQueue, now: float) -> float:
        """Return the predicted seconds until the queue is shorter."""
        return queue.left(now) if queue.running else queue.waiting_seconds


class WindveQueued(Windve):
    """Algorithm 1 with a length that counts only the queries that wait. For study: it misses the limit under load."""

    def length(self, queue: DeviceQueue) -> int:
        return queue.num_waiting

    def wait(self, queue: DeviceQueue, now: float) -> float:
        """Return the predicted seconds until the next batch takes the queue."""
        return queue.left(now)


class OneDevice(Unlimited):
    """The only device takes every text, and runs it before or after its deadline."""

    def choose(self, query: Query, queues: Sequence[DeviceQueue], now: float) -> int | Busy:
        return 0


class Plain(Unlimited):
    """Queues without a latency limit: the device that would end first takes a text."""

    most_seconds = BULK_SECONDS
    moves_bulk = True

    def choose(self, query: Query, queues: Sequence[DeviceQueue], now: float) -> int | Busy:
        """Return the device whose queue would end first with this text."""
        ends = {index: _bulk_end(queue, query, now) for index, queue in enumerate(queues) if queue.is_alive}
        if not ends:
            return Busy(math.inf, NO_DEVICE)
        first = min(ends, key=ends.__getitem__)
        if query.deadline is not None and ends[first] > query.deadline:
            return Busy(ends[first] - query.deadline, _too_late(ends[first] - now, query.deadline - now))
        return first


class Predicted:
    """Takes a query only if its predicted end meets the latency limit, at the first device that can; the default.

    A device can take a query if its running batch, and after it the timed queries with this one, are predicted to end within
    a margin of the limit of the oldest. The margin begins at ``margin``, shrinks with each query that ends late, and grows slowly
    with the others, so that ``LATE_SHARE`` of them end late in the long run, however much the costs vary (Robbins and Monro: A
    stochastic approximation method, 1951). Costs count tokens and shapes. A text that is long for the first device that can take
    it goes to the one that needs the least time for it. Bulk documents go where they would end first, and wait for queries.
    """

    moves_bulk = True

    def __init__(self, limit_s: float, margin: float = MARGIN) -> None:
        """Take the latency limit T, seconds.

        Raises:
            ConfigError: the limit is not positive.
        """
        if not 0 < limit_s < math.inf:
            raise ConfigError(f"a latency limit of {limit_s:g} s: must be more than 0")
        self._limit_s = limit_s
        self._margin = margin
        self._most = max(margin, MOST_MARGIN)
        self.most_seconds = BULK_SHARE * limit_s
        self._plain = Plain()

    def limit(self, query: Query) -> float | None:
        """Return the arrival plus a share of T, or the deadline if it is earlier; None for bulk work."""
        if query.priority < QUERY:
            return None
        limit = query.arrival + self._margin * self._limit_s
        return limit if query.deadline is None else min(limit, query.deadline)

    def choose(self, query: Query, queues: Sequence[DeviceQueue], now: float) -> int | Busy:
        """Return the first device on which the query and all before it are predicted to end in time."""
        limit = self.limit(query)
        if limit is None:
            return self._plain.choose(query, queues, now)
        able = [
            index for index, queue in enumerate(queues) if queue.is_alive and self._can_take(queue, query, limit, now)
        ]
        if not able:
            return self._busy(query, queues, now, limit)
        if len(able) > 1 and queues[able[0]].alone(query.num_tokens) > LONG_SHARE * self._limit_s:
            return min(able, key=lambda index: queues[index].alone(query.num_tokens))
        return able[0]

    def learn(self, query: Query, end: float) -> None:
        """Adapt the margin to whether a query met the latency limit. One whose limit is its own deadline does not count."""
        if query.priority < QUERY or (query.deadline or math.inf) < query.arrival + self._limit_s:
            return
        is_late = end > query.arrival + self._limit_s
        changed = self._margin + MARGIN_STEP * (LATE_SHARE - is_late)
        self._margin = min(self._most, max(LEAST_MARGIN, changed))

    def _can_take(self, queue: DeviceQueue, query: Query, limit: float, now: float) -> bool:
        end = now + queue.left(now) + queue.timed.load.seconds_with(query.num_tokens)
        return end <= min(queue.timed.oldest_limit, limit)

    def _busy(self, query: Query, queues: Sequence[DeviceQueue], now: float, limit: float) -> Busy:
        """Return after how many seconds a query like this one would be taken if no other came."""
        room = limit - query.arrival
        waits = [self._wait(queue, query.num_tokens, room, now) for queue in queues if queue.is_alive]
        wait = min(waits, default=math.inf)
        if waits and math.isinf(wait):
            return Busy(
                wait,
                f"a text of {query.num_tokens} tokens takes longer than the limit of {room:.3g} s: raise the limit",
            )
        if not waits:
            return Busy(wait, NO_DEVICE)
        return Busy(wait, f"no device can embed the text within {room:.3g} s: try again in {wait:.3g} s")

    def _wait(self, queue: DeviceQueue, num_tokens: int, room: float, now: float) -> float:
        alone = queue.alone(num_tokens)
        if alone > room:
            return math.inf
        left = queue.left(now)
        waiting = queue.timed.load.seconds
        if queue.timed:  # until they begin, the oldest of them decides
            return left + max(0.0, waiting + alone - room)
        return max(0.0, left + alone - room)


def _bulk_end(queue: DeviceQueue, query: Query, now: float) -> float:
    own = max(queue.bulk_seconds(query.num_tokens), queue.alone(query.num_tokens))
    return now + queue.left(now) + queue.timed.load.seconds + own


def _too_late(needed: float, allowed: float) -> str:
    return f"the text would end in {needed:.3g} s, its deadline is in {allowed:.3g} s: extend it, or try again later"
