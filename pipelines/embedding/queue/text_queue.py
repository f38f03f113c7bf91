"""The queue of texts of one encoder: a queue per device, and a policy that decides which device takes a text."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from staticllm.errors import BusyError, DeviceError, PromptError, StaticLLMError

from ..embedding_request import EmbeddingRequest
from .device_queue import DOCUMENT, Busy, DeviceQueue, Health, Query, QueuedText
from .policies import QueuePolicy

REST_SECONDS = 30.0
"""A worker process that ended too often is started again after this time."""
_LATE = "the deadline passed before all texts were embedded"


@dataclass(frozen=True)
class Excess:
    """Texts that idle devices do not take together: they take the first ``num_taken``, and are busy for the next one."""

    num_taken: int
    busy: Busy


@dataclass(frozen=True)
class Moved:
    """A text of a device that failed: the index of the device that has it now, or why none took it."""

    query: Query
    place: int | Busy


@dataclass(frozen=True)
class RequestEnding:
    """A request that ends with an error. Its caller ends it without a lock, because that runs functions of the user."""

    request: EmbeddingRequest
    error: Exception

    def carry_out(self) -> None:
        self.request.fail(self.error)


class TextQueue:
    """The texts that wait for one or more devices, or run on them. It has no thread, clock or lock of its own.

    ``devices`` are in order of preference, the fastest first. Callers pass ``now``, seconds on the clock of the arrival times,
    and hold one lock around every method. For each device, ``begin`` and ``finish`` alternate. ``max_waiting``: the most texts
    that may wait, unless they are of one request.
    """

    def __init__(self, devices: Sequence[DeviceQueue], policy: QueuePolicy, max_waiting: int = 1 << 62) -> None:
        self.devices = tuple(devices)
        self._policy = policy
        self._max_waiting = max_waiting
        self._places: dict[int, tuple[Query, int]] = {}  # what waits or runs, and the index of its device
        self._held: dict[int, Query] = {}  # admitted, but no device works at the moment
        self._requests: dict[int, tuple[EmbeddingRequest, range]] = {}  # with the ids of its texts
        self._coming: dict[int, int] = {}  # request -> its texts that have ids and are not admitted yet
        self._deadlines: list[tuple[float, int]] = []  # a heap; entries of texts that have left stay until they pass
        self._next_id = 0

    @property
    def num_waiting(self) -> int:
        """The number of texts that have not begun."""
        return sum(device.num_waiting for device in self.devices) + len(self._held)

    def requests(self) -> list[EmbeddingRequest]:
        """Return the requests that have not ended."""
        return [request for request, _ in self._requests.values()]

    def waiting_requests(self) -> set[EmbeddingRequest]:
        """Return the requests with texts that have not begun."""
        waiting = [*self.held, *(query for device in self.devices for query in device.waiting())]
        return {query.request for query in waiting if isinstance(query, QueuedText)}

    def is_wanted(self, query: Query) -> bool:
        """Whether the result of a text that waits or runs is still wanted."""
        return not isinstance(query, QueuedText) or (not query.is_done and query.request.id in self._requests)

    def number(self, request: EmbeddingRequest, now: float) -> range:
        """Take a new request, and return the ids of its texts.

        Raises:
            BusyError: others wait, and with these texts more than ``max_waiting`` would.
        """
        num_new = len(request.texts)
        num_waiting = self.num_waiting + sum(self._coming.values())
        if num_waiting and num_waiting + num_new > self._max_waiting:
            left = max(device.left(now) + device.waiting_seconds for device in self.devices)
            share = min(1.0, (num_waiting + num_new - self._max_waiting) / num_waiting)
            raise BusyError(
                f"{num_waiting} texts wait, {num_new} more would exceed max_waiting {self._max_waiting}: try again later, or "
                "load with a larger max_waiting",
                left * share,
            )
        ids = range(self._next_id, self._next_id + num_new)
        self._next_id = ids.stop
        self._coming[request.id] = num_new
        self._requests[request.id] = request, ids
        return ids

    def admit(self, request: EmbeddingRequest, ids: range, now: float) -> None:
        """Admit some texts of a request that has its ids. If one is refused, all texts of the request are removed.

        Raises:
            BusyError: no device takes a text in time.
            PromptError: these are more texts than the devices ever take at once.
            DeviceError: no device works, nor will.
        """
        first = self._requests[request.id][1].start
        self._coming[request.id] -= len(ids)
        if not self._coming[request.id]:
            del self._coming[request.id]
        try:
            for text_id in ids:
                text = QueuedText.of(request, text_id - first, text_id)
                place = self.place(text, now)
                if isinstance(place, Busy):
                    self.check_works()
                    if any(device.is_alive for device in self.devices):
                        self._check_size(request)
                        raise place.error()
                    self._held[text_id] = text
        except StaticLLMError:
            self.drop(request)
            raise

    def place(self, query: Query, now: float) -> int | Busy:
        """Put a text into the queue of a device; return the index of the device, or why none takes it."""
        assert query.id not in self._places, f"text {query.id} is in a queue"
        place = self._policy.choose(query, self.devices, now)
        if not isinstance(place, Busy):
            self.devices[place].push(query, self._policy.limit(query))
            self._places[query.id] = query, place
            if query.deadline is not None:
                heapq.heappush(self._deadlines, (query.deadline, query.id))
        return place

    def hold(self, query: Query) -> None:
        """Keep a text until a device works again."""
        self._held[query.id] = query

    @property
    def held(self) -> tuple[Query, ...]:
        """The texts that no device had when they came, and that wait for one to recover."""
        return tuple(self._held.values())

    def place_held(self, now: float) -> None:
        """Give the texts that are held to devices, without a limit if it cannot be met any more."""
        for query in self.held:
            if not isinstance(self.place(query, now), Busy) or not isinstance(self.place_late(query, now), Busy):
                del self._held[query.id]

    def place_late(self, query: Query, now: float) -> int | Busy:
        """Place a text as bulk work, because its limit cannot be met any more; one that no device takes stays what it is."""
        priority = query.priority
        query.priority = min(priority, DOCUMENT)
        place = self.place(query, now)
        if isinstance(place, Busy):
            query.priority = priority
        return place

    def excess(self, queries: Iterable[Query], devices: Iterable[int]) -> Excess | None:
        """Return why these devices, if all were idle, would not take texts that arrive together; None if they would."""
        given = [self.devices[device] for device in devices]
        idle = [DeviceQueue(queue.name, queue.new_load, queue.depth) for queue in given]
        for num_taken, query in enumerate(queries):
            place = self._policy.choose(query, idle, query.arrival)
            if isinstance(place, Busy):
                return Excess(num_taken, place)
            idle[place].push(query, self._policy.limit(query))
        return None

    def check_works(self) -> None:
        """Check that a device works, or will.

        Raises:
            DeviceError: none does.
        """
        if not any(device.may_work for device in self.devices):
            errors = "; ".join(f"{device.name}: {device.problem}" for device in self.devices)
            remedy = "load the pipeline again"
            if any(device.health is Health.RESTING for device in self.devices):
                remedy = f"try again later, a worker process is started again every {REST_SECONDS:g} s, or {remedy}"
            raise DeviceError(f"no device works any more ({errors}): {remedy}")

    def has_work(self, device: int) -> bool:
        """Return whether the device could begin a batch: of its own queue, or with bulk texts of another one."""
        queue = self.devices[device]
        if queue.running or not queue.is_alive:
            return False
        return queue.num_waiting > 0 or (self._policy.moves_bulk and any(other.bulk for other in self.devices))

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

    def take(self, texts: Iterable[QueuedText]) -> None:
        """Remove texts that wait, because they run now in a call of their own."""
        for text in texts:
            self.cancel(text.id)

    def put_back(self, text: QueuedText) -> bool:
        """Let a text that was taken wait again for the first device, before later ones. Return False if its request is over."""
        if not self.is_wanted(text):
            return False
        self.devices[0].bulk.add_first(text)
        self._places[text.id] = text, 0
        if text.deadline is not None:
            heapq.heappush(self._deadlines, (text.deadline, text.id))
        return True

    def cancel(self, query_id: int) -> bool:
        """Remove a text that waits. Return False if it runs, whose result the caller drops, or if there is none."""
        if self._held.pop(query_id, None) is not None:
            return True
        query, device = self._places.get(query_id, (None, 0))
        if query is None or not self.devices[device].remove(query):
            return False
        del self._places[query_id]
        return True

    def drop(self, request: EmbeddingRequest) -> None:
        """Forget a request, and remove its texts that have not begun."""
        self._coming.pop(request.id, None)
        _, ids = self._requests.pop(request.id, (request, range(0)))
        for query_id in ids:
            self.cancel(query_id)

    def expire(self, now: float) -> list[Query]:
        """Remove and return the texts that wait and whose deadlines have passed."""
        expired = [query for query in self.held if query.deadline is not None and query.deadline <= now]
        for query in expired:
            del self._held[query.id]
        while self._deadlines and self._deadlines[0][0] <= now:
            _, query_id = heapq.heappop(self._deadlines)
            late, _ = self._places.get(query_id, (None, 0))
            if late is not None and self.cancel(query_id):
                expired.append(late)
        return expired

    def end_late(self, now: float) -> list[RequestEnding]:
        """Remove texts that wait after their deadlines, and return the ends of their requests, also of those that run."""
        late = [
            *self.expire(now),
            *(query for query in self._running_with_deadline() if (query.deadline or 0.0) <= now),
        ]
        requests = {query.request.id: query.request for query in late if isinstance(query, QueuedText)}
        return [RequestEnding(request, StaticLLMError(_LATE)) for request in requests.values()]

    def next_deadline(self) -> float:
        """Return the moment for the next ``end_late``; infinite if there is none."""
        queries = (*self.held, *self._running_with_deadline())
        deadlines = [query.deadline for query in queries if query.deadline is not None]
        return min([*deadlines, self._deadlines[0][0] if self._deadlines else math.inf])

    def take_out(self, device: int, health: Health, problem: Exception | None, now: float) -> tuple[Moved, ...]:
        """Take a device out of use, and place everything that it ran or that waited for it again.

        The texts keep their arrival times and limits. What no other device takes leaves the queues.
        """
        queue = self.devices[device]
        queue.health = health
        queue.problem = problem
        queries = queue.clear()
        for query in queries:
            del self._places[query.id]
        return tuple(Moved(query, self.place(query, now)) for query in sorted(queries, key=_order))

    def revive(self, device: int, now: float) -> None:
        """Use a device again."""
        self.devices[device].health = Health.ALIVE
        self.devices[device].problem = None
        self.place_held(now)

    def _check_size(self, request: EmbeddingRequest) -> None:
        """Raise an error for texts that even idle devices refuse: trying again would never end."""
        texts = (QueuedText.of(request, index, index) for index in range(len(request.texts)))
        excess = self.excess(texts, [number for number, device in enumerate(self.devices) if device.may_work])
        if excess is None:
            return
        if not excess.num_taken:
            raise BusyError(excess.busy.reason, math.inf)
        raise PromptError(
            f"a call of {len(request.texts)} texts: also when they are idle, the devices take only the first {excess.num_taken} "
            "of them within the limit: split the call, or raise LATENCY_MS or the deadline"
        )

    def _running_with_deadline(self) -> list[Query]:
        """Return the texts in running batches that have a deadline, and whose requests go on."""
        running = [query for device in self.devices for query in device.running if query.deadline is not None]
        return [query for query in running if self.is_wanted(query)]

    def _take_bulk(self, device: int, now: float) -> None:
        """Move bulk texts of the longest queue to an idle device, as many as one batch, if they would end sooner there."""
        idle = self.devices[device]
        others = [other for other in self.devices if other.bulk]
        if not others:
            return
        other = max(others, key=lambda other: _seconds(other, now))
        sooner = min(self._policy.most_seconds, _seconds(other, now))
        load = idle.new_load()
        moved = []
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
            self._places[query.id] = query, device


def _seconds(queue: DeviceQueue, now: float) -> float:
    """Return the predicted seconds until the queue is empty."""
    return queue.left(now) + queue.waiting_seconds


def _order(query: Query) -> tuple[int, float, int]:
    return -query.priority, query.arrival, query.id
