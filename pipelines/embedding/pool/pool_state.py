"""Keeps the texts that wait for a pool of devices or run on it, and decides what happens to them if a device fails."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from staticllm.errors import BusyError, DeviceError, PromptError, StaticLLMError
from staticllm.pipelines.embedding.embedding_request import EmbeddingRequest
from staticllm.pipelines.embedding.packing.tokenized_text import TokenizedText
from staticllm.pipelines.embedding.pool.instances import Costs, Instance, WorkerLostError, load_of
from staticllm.pipelines.embedding.windve.device_queue import DOCUMENT, Busy, DeviceQueue, Query
from staticllm.pipelines.embedding.windve.queue_depth import Recalibration
from staticllm.pipelines.embedding.windve.queue_manager import QueueManager

HANG_SECONDS, HANG_RATIO = 30.0, 20.0
"""A batch that takes longer than both this time and this multiple of its prediction hangs."""
MAX_RUNS = 2
"""A text with which a device failed so often gets the error. After the first failure it runs alone."""
MAX_FAILURES = 3
"""A device that fails so often without an embedded batch in between is not used any more."""
MAX_LOST, REST_SECONDS = 8, 30.0
"""A worker process that ended so often without an embedded batch in between rests: its texts get an error, and it is started
again after so many seconds."""
RETRY_SECONDS, LONGEST_RETRY = 0.2, 3.0
"""The time between two attempts to use a device again: it doubles, up to the longest."""
NEW_SHARE, CHANGED_COST, MAX_RATIO = 0.1, 0.05, 4.0
"""Weight of a batch in the ratio of measured to predicted seconds, the change of a cost that counts, and the largest ratio."""


@dataclass
class PoolText:
    """A text that waits or runs."""

    request: EmbeddingRequest
    index: int
    num_failures: int = 0

    @property
    def tokens(self) -> TokenizedText:
        """The token ids."""
        return self.request.texts[self.index]


@dataclass
class PoolDevice:
    """An instance and its queue. ``call`` is the number of its present batch, which hangs after ``ends_by``.

    ``is_lost``: its worker process ended, and no batch was embedded since. ``is_resting``: it is recovering, but so seldom that
    no text waits for it.
    """

    number: int
    instance: Instance
    queue: DeviceQueue
    recalibration: Recalibration | None = None
    call: int = 0
    ends_by: float = math.inf
    num_failures: int = 0
    is_recovering: bool = False
    is_lost: bool = False
    is_resting: bool = False
    ratio: float = 1.0
    costs: Costs = field(default_factory=dict)
    error: Exception | None = None

    @property
    def may_work(self) -> bool:
        """Whether the device works, or is about to work again."""
        return self.queue.is_alive or (self.is_recovering and not self.is_resting)

    @property
    def retry_seconds(self) -> float:
        """How long to wait before the next attempt to use the device again."""
        return REST_SECONDS if self.is_resting else min(LONGEST_RETRY, RETRY_SECONDS * 2.0**self.num_failures)


@dataclass(frozen=True)
class Batch:
    """What a device runs now: the texts by the ids of their queries. Times are in seconds."""

    call: int
    texts: dict[int, PoolText]
    begin: float
    predicted: float


@dataclass(frozen=True)
class Ending:
    """A request that ends with an error. The caller ends it without its lock, because that runs functions of the user."""

    request: EmbeddingRequest
    error: Exception

    def carry_out(self) -> None:
        """End the request."""
        self.request.fail(self.error)


class PoolState:
    """The devices and texts of a pool. It has no thread. Callers hold one lock around every method.

    ``now`` is a time of ``time.perf_counter``.

    ``manager`` has one queue per instance, in the same order. ``hang_seconds`` is the least time after which a batch hangs.
    ``recalibrations`` adapt the queue depths to the measured seconds of batches.
    """

    def __init__(
        self,
        instances: Sequence[Instance],
        manager: QueueManager,
        max_waiting: int,
        hang_seconds: float = HANG_SECONDS,
        recalibrations: Sequence[Recalibration] = (),
    ) -> None:
        assert len(instances) == len(manager.devices), "one queue per instance"
        self.devices = [
            PoolDevice(number, instance, queue, costs=dict(instance.costs))
            for number, (instance, queue) in enumerate(zip(instances, manager.devices, strict=True))
        ]
        for device, recalibration in zip(self.devices, recalibrations, strict=False):
            device.recalibration = recalibration
        self.manager, self._max_waiting, self._hang_seconds = manager, max_waiting, hang_seconds
        self._texts: dict[int, PoolText] = {}
        self._ids: dict[int, range] = {}  # request -> its queries
        self._coming: dict[int, int] = {}  # request -> its texts that have ids and are not admitted yet
        self._held: dict[int, Query] = {}  # admitted, but no device works at the moment
        self._next_id = 0

    @property
    def num_waiting(self) -> int:
        """The number of texts that wait."""
        return self.manager.num_waiting + len(self._held)

    def requests(self) -> list[EmbeddingRequest]:
        """Return the requests with texts that wait or run."""
        return list({text.request.id: text.request for text in self._texts.values()}.values())

    def has_work(self, device: PoolDevice) -> bool:
        """Return whether the device could begin a batch: of its own queue, or with bulk documents of another one."""
        if device.queue.running or not device.queue.is_alive:
            return False
        takes_bulk = not device.num_failures and any(other.queue.num_bulk for other in self.devices)
        return device.queue.num_waiting > 0 or takes_bulk

    def number(self, request: EmbeddingRequest, now: float) -> range:
        """Give the texts of a new request their ids.

        Raises:
            BusyError: others wait, and with these texts more than ``max_waiting`` would.
        """
        num_new, num_waiting = len(request.texts), self.num_waiting + sum(self._coming.values())
        if num_waiting and num_waiting + num_new > self._max_waiting:
            left = max(device.queue.left(now) + device.queue.waiting_seconds for device in self.devices)
            share = min(1.0, (num_waiting + num_new - self._max_waiting) / num_waiting)
            raise BusyError(
                f"{num_waiting} texts wait, {num_new} more would exceed max_waiting {self._max_waiting}: try again later, or "
                "load with a larger max_waiting",
                left * share,
            )
        self._coming[request.id] = num_new
        ids = self._ids[request.id] = range(self._next_id, self._next_id + num_new)
        self._next_id += num_new
        return ids

    def admit(self, request: EmbeddingRequest, ids: range, now: float) -> None:
        """Admit some texts of a request that has its ids. If one is refused, all texts of the request are removed.

        Raises:
            BusyError: no device takes a text in time.
            PromptError: these are more texts than the devices ever take at once.
            DeviceError: no device works, nor will.
        """
        try:
            self._admit(request, ids, now)
        except StaticLLMError:
            self.drop(request)
            raise

    def _admit(self, request: EmbeddingRequest, ids: range, now: float) -> None:
        first = self._ids[request.id][0]
        self._coming[request.id] -= len(ids)
        if not self._coming[request.id]:
            del self._coming[request.id]
        for query_id in ids:
            query = _query(request, query_id - first, query_id)
            place = self.manager.admit(query, now)
            if isinstance(place, Busy):
                self._check_works()
                if any(device.queue.is_alive for device in self.devices):
                    self._check_size(request)
                    raise place.error()
                self._held[query_id] = query
            self._texts[query_id] = PoolText(request, query_id - first)

    def _check_size(self, request: EmbeddingRequest) -> None:
        """Raise an error for texts that even idle devices refuse: trying again would never end."""
        queries = (_query(request, index, index) for index in range(len(request.texts)))
        excess = self.manager.excess(queries, [device.number for device in self.devices if device.may_work])
        if excess is None:
            return
        if not excess.num_taken:
            raise BusyError(excess.busy.reason, math.inf)
        raise PromptError(
            f"a call of {len(request.texts)} texts: also when they are idle, the devices take only the first {excess.num_taken} "
            "of them within the limit: split the call, or raise LATENCY_MS or the deadline"
        )

    def _check_works(self) -> None:
        """Raise a ``DeviceError`` if no device works and none will."""
        if not any(device.may_work for device in self.devices):
            errors = "; ".join(f"{device.instance.name}: {device.error}" for device in self.devices)
            remedy = "load the pipeline again"
            if any(device.is_resting for device in self.devices):
                remedy = f"try again later, a worker process is started again every {REST_SECONDS:g} s, or {remedy}"
            raise DeviceError(f"no device works any more ({errors}): {remedy}")

    def drop(self, request: EmbeddingRequest) -> None:
        """Forget the texts of a request, and remove those that have not begun."""
        self._coming.pop(request.id, None)
        for query_id in self._ids.pop(request.id, ()):
            if self._texts.pop(query_id, None) is not None and self._held.pop(query_id, None) is None:
                self.manager.cancel(query_id)

    def begin(self, device: PoolDevice, now: float) -> Batch | None:
        """Return the next batch of a device, without texts that nobody waits for any more; None if there is no work."""
        # a device that failed does not take back the documents that it left to others
        while self.has_work(device) and (queries := self.manager.begin(device.number, now)):
            texts = {query.id: self._texts[query.id] for query in queries if query.id in self._texts}
            if texts:
                device.call += 1
                predicted = device.queue.left(now)
                device.ends_by = now + max(self._hang_seconds, HANG_RATIO * predicted)
                return Batch(device.call, texts, now, predicted)
            self.manager.finish(device.number)
        return None

    def take(self, device: PoolDevice, batch: Batch, ids: Sequence[int]) -> bool:
        """Remove texts of a batch that are embedded; return False if other devices have them by now."""
        if device.call != batch.call:
            return False
        for query_id in ids:
            self._texts.pop(query_id, None)
        return True

    def finish(self, device: PoolDevice, batch: Batch, now: float) -> None:
        """End a batch all of whose texts are embedded."""
        if device.call != batch.call:  # the device was thought to hang
            self.revive(device, now)
            return
        self.manager.finish(device.number, now)
        device.ends_by, device.num_failures, device.is_lost = math.inf, 0, False
        self._follow(device, len(batch.texts), now - batch.begin, batch.predicted)
        self._admit_held(now)

    def _follow(self, device: PoolDevice, num_texts: int, seconds: float, predicted: float) -> None:
        """Adapt the costs and the queue depth of a device to the measured seconds of a batch."""
        if predicted > 0:
            wanted = min(MAX_RATIO, seconds / predicted * device.ratio)
            device.ratio += NEW_SHARE * (wanted - device.ratio)
        costs = {variant: cost * device.ratio for variant, cost in device.instance.costs.items()}
        if any(abs(cost - device.costs.get(variant, 0.0)) > CHANGED_COST * cost for variant, cost in costs.items()):
            device.costs = costs
            device.queue.replace_costs(load_of(costs, device.instance.info.is_packable))
        if device.recalibration is not None:
            device.recalibration.update(num_texts, seconds)
            device.queue.depth = device.recalibration.estimate.depth

    def fail(self, device: PoolDevice, batch: Batch, part: Sequence[int], error: Exception, now: float) -> list[Ending]:
        """Take a device out of use until it recovers, after it failed with a part of its batch."""
        device.is_recovering = True
        device.is_lost = device.is_lost or isinstance(error, WorkerLostError)
        if device.call != batch.call:
            return []
        for query_id in part:
            batch.texts[query_id].num_failures += 1
        return list(self._move(device, error, now))

    def hangs(self, device: PoolDevice, now: float) -> list[Ending]:
        """Take a device of this process out of use whose call does not return. If it does later, the device is used again."""
        error = DeviceError(f"{device.instance.name} has not answered for {self._hang_seconds:g} s")
        device.error = error
        for query in device.queue.running:
            if query.id in self._texts:
                self._texts[query.id].num_failures += 1
        ends = list(self._move(device, error, now))
        if not any(other.may_work for other in self.devices):
            ends += [Ending(self._texts[query_id].request, error) for query_id in self._held]
        return ends

    def _move(self, device: PoolDevice, error: Exception, now: float) -> Iterator[Ending]:
        """Admit what a device ran and what waited for it again, on the others."""
        device.call += 1
        device.ends_by = math.inf
        device.num_failures += 1
        for moved in self.manager.fail(device.number, now):
            text, query = self._texts.get(moved.query.id), moved.query
            if text is None or text.request.is_over:
                self.manager.cancel(query.id)
            elif text.num_failures >= MAX_RUNS:
                self.manager.cancel(query.id)
                yield Ending(text.request, error)
            elif isinstance(moved.place, Busy):
                yield from self._move_late(query, text, moved.place, error, now)

    def _move_late(self, query: Query, text: PoolText, busy: Busy, error: Exception, now: float) -> Iterator[Ending]:
        """Admit a text that no device can embed in time any more, without a limit, or answer busy.

        A worker process loses nothing: its texts run late. What a dead device leaves is answered busy, if another one works.
        """
        if any(device.queue.is_alive for device in self.devices) and not isinstance(error, WorkerLostError):
            yield Ending(text.request, busy.error())
            return
        late = _without_limit(query)
        if isinstance(self.manager.admit(late, now), Busy):
            self._held[query.id] = late

    def revive(self, device: PoolDevice, now: float) -> None:
        """Use a device again that failed or was thought to hang."""
        device.is_recovering = device.is_resting = False
        device.error = None
        self.manager.revive(device.number)
        self._admit_held(now)

    def recovered(self, device: PoolDevice, problem: Exception | None, now: float) -> list[Ending]:
        """Take the result of an attempt to use a device again: None, or the problem.

        After ``MAX_FAILURES`` it is dead. A worker process, which may have been killed from outside, rests after ``MAX_LOST``.
        """
        device.num_failures = (
            0 if device.is_resting and problem is None else device.num_failures + (problem is not None)
        )
        if device.num_failures < (MAX_LOST if device.is_lost else MAX_FAILURES):
            if problem is None:
                self.revive(device, now)
            return []
        device.error = problem or DeviceError("it fails in every call")
        device.is_recovering = device.is_resting = device.is_lost
        try:
            self._check_works()
        except DeviceError as error:
            return [Ending(self._texts[query_id].request, error) for query_id in self._held]
        return []

    def _admit_held(self, now: float) -> None:
        """Admit the texts for which no device worked, without a limit if it cannot be met any more."""
        for query in list(self._held.values()):
            place = self.manager.admit(query, now)
            if isinstance(place, Busy):
                place = self.manager.admit(_without_limit(query), now)
            if not isinstance(place, Busy):
                del self._held[query.id]

    def expire(self, now: float) -> list[Ending]:
        """Remove the texts whose deadlines have passed before they began, and end the requests of those that run."""
        late = [query.id for query in self._held.values() if query.deadline is not None and query.deadline <= now]
        found = [*(query.id for query in self.manager.expire(now)), *late]
        for query_id in found:
            self._held.pop(query_id, None)
        texts = [self._texts.pop(query_id) for query_id in found if query_id in self._texts]
        texts += [self._texts[query.id] for query in self._running_with_deadline() if (query.deadline or 0.0) <= now]
        error = StaticLLMError("the deadline passed before all texts were embedded")
        return [Ending(text.request, error) for text in texts]

    def _running_with_deadline(self) -> list[Query]:
        """Return the queries in running batches that have a deadline, and that somebody still waits for."""
        running = [query for device in self.devices for query in device.queue.running if query.deadline is not None]
        return [query for query in running if query.id in self._texts and not self._texts[query.id].request.is_over]

    def next_event(self) -> float:
        """Return the moment of the next deadline or limit of a batch; infinite if there is none."""
        queries = (*self._held.values(), *self._running_with_deadline())
        deadlines = [query.deadline for query in queries if query.deadline is not None]
        waiting = self.manager.next_deadline()
        limits = [device.ends_by for device in self.devices]
        return min([*limits, *deadlines, math.inf if waiting is None else waiting])


def _query(request: EmbeddingRequest, index: int, query_id: int) -> Query:
    """Return what stands for a text of a request in the queues."""
    return Query(query_id, request.arrival, len(request.texts[index]), request.priority, request.deadline)


def _without_limit(query: Query) -> Query:
    return replace(query, priority=min(query.priority, DOCUMENT))
