"""The devices of a pool: their batches, their measured costs, and the handling of their texts if a device fails."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

from staticllm.errors import DeviceError

from ...costs.model import NEW_SHARE, averaged
from ..queue.device_queue import Busy, DeviceQueue, Health, QueuedText
from ..queue.loads import Costs, load_of
from ..queue.text_queue import REST_SECONDS, Moved, RequestEnding, TextQueue
from ..windve.queue_depth import Recalibration
from .instances import Instance, WorkerLostError

HANG_SECONDS, HANG_RATIO = 30.0, 20.0
"""A batch that takes longer than both this time and this multiple of its prediction hangs."""
MAX_RUNS = 2
"""A text with which a device failed this often gets the error. After the first failure it runs alone."""
MAX_FAILURES = 3
"""A device that fails this often without an embedded batch in between is not used any more."""
MAX_LOST = 8
"""A worker process that ended this often without an embedded batch in between rests: its texts get an error."""
RETRY_SECONDS, LONGEST_RETRY = 0.2, 3.0
"""The time between two attempts to recover: it doubles, up to the longest."""
CHANGED_COST = 0.05
"""Relative change of a cost above which the queue predicts with the new one."""
MAX_RATIO = 4.0
"""Largest ratio of measured to predicted seconds."""


@dataclass
class PoolDevice:
    """An instance, and its queue with the same ``number``."""

    number: int
    instance: Instance
    queue: DeviceQueue
    recalibration: Recalibration | None = None
    call: int = 0
    """The number of its batch."""
    ends_by: float = math.inf
    """The moment after which that batch hangs."""
    num_failures: int = 0
    is_recovering: bool = False
    is_lost: bool = False
    """Whether its worker process ended, and no batch was embedded since."""
    ratio: float = 1.0
    costs: Costs = field(default_factory=dict)

    @property
    def retry_seconds(self) -> float:
        """How long to wait before the next attempt to recover."""
        is_resting = self.queue.health is Health.RESTING
        return REST_SECONDS if is_resting else min(LONGEST_RETRY, RETRY_SECONDS * 2.0**self.num_failures)


@dataclass(frozen=True)
class DeviceBatch:
    """What a device runs now. Times are in seconds."""

    call: int
    texts: tuple[QueuedText, ...]
    begin: float
    predicted: float


class DevicePool:
    """The instances behind a queue of texts. It has no thread. Callers hold the lock of the queue around every method.

    ``hang_seconds``: the least time after which a batch hangs. ``recalibrations`` adapt the queue depths to measured seconds.
    """

    def __init__(
        self,
        instances: Sequence[Instance],
        queue: TextQueue,
        recalibrations: Sequence[Recalibration] = (),
        hang_seconds: float = HANG_SECONDS,
    ) -> None:
        pairs = zip(instances, queue.devices, strict=True)
        each = [*recalibrations, *[None] * (len(instances) - len(recalibrations))]
        self.devices = [
            PoolDevice(number, instance, device, each[number], costs=dict(instance.costs))
            for number, (instance, device) in enumerate(pairs)
        ]
        self.queue = queue
        self._hang_seconds = hang_seconds

    def has_work(self, device: PoolDevice) -> bool:
        """Return whether the device could begin a batch.

        A failed device takes no bulk texts from other devices, because it would take back its own texts.
        """
        return self.queue.has_work(device.number) and (device.queue.num_waiting > 0 or not device.num_failures)

    def begin(self, device: PoolDevice, now: float) -> DeviceBatch | None:
        """Return the next batch of a device, without texts that are no longer wanted; None if there is no work."""
        while self.has_work(device) and (queries := self.queue.begin(device.number, now)):
            texts = cast("tuple[QueuedText, ...]", tuple(filter(self.queue.is_wanted, queries)))
            if texts:
                device.call += 1
                predicted = device.queue.left(now)
                device.ends_by = now + max(self._hang_seconds, HANG_RATIO * predicted)
                return DeviceBatch(device.call, texts, now, predicted)
            self.queue.finish(device.number)
        return None

    def take(self, device: PoolDevice, batch: DeviceBatch, texts: Sequence[QueuedText]) -> bool:
        """Take texts of a batch that are embedded; return False if other devices have them by now."""
        if device.call != batch.call:
            return False
        for text in texts:
            text.is_done = True
        device.queue.num_embedded += len(texts)
        return True

    def finish(self, device: PoolDevice, batch: DeviceBatch, now: float) -> None:
        """End a batch all of whose texts are embedded."""
        if device.call != batch.call:  # the device was thought to hang
            self._revive(device, now)
            return
        self.queue.finish(device.number, now)
        device.ends_by = math.inf
        device.num_failures = 0
        device.is_lost = False
        self._follow(device, len(batch.texts), now - batch.begin, batch.predicted)
        self.queue.place_held(now)

    def _follow(self, device: PoolDevice, num_texts: int, seconds: float, predicted: float) -> None:
        """Adapt the costs and the queue depth of a device to the measured seconds of a batch."""
        if predicted > 0:
            newest = min(MAX_RATIO, seconds / predicted * device.ratio)
            device.ratio = averaged(device.ratio, newest, NEW_SHARE)
        costs = {variant: cost * device.ratio for variant, cost in device.instance.costs.items()}
        if any(abs(cost - device.costs.get(variant, 0.0)) > CHANGED_COST * cost for variant, cost in costs.items()):
            device.costs = costs
            device.queue.replace_costs(load_of(costs, device.instance.info.is_packable))
        if device.recalibration is not None:
            device.recalibration.update(num_texts, seconds)
            device.queue.depth = device.recalibration.estimate.depth

    def fail(
        self, device: PoolDevice, batch: DeviceBatch, part: Sequence[QueuedText], error: Exception, now: float
    ) -> list[RequestEnding]:
        """Stop using a device until it recovers, after it failed with a part of its batch."""
        device.is_recovering = True
        device.is_lost = device.is_lost or isinstance(error, WorkerLostError)
        if device.call != batch.call:
            device.queue.health = Health.RECOVERING
            return []
        for text in part:
            text.num_failures += 1
        return list(self._take_out(device, Health.RECOVERING, error, now))

    def hangs(self, device: PoolDevice, now: float) -> list[RequestEnding]:
        """Stop using a device of this process whose call does not return. If the call returns later, use the device again."""
        error = DeviceError(f"{device.instance.name} has not answered for {self._hang_seconds:g} s")
        for text in cast("tuple[QueuedText, ...]", device.queue.running):
            text.num_failures += 1
        ends = list(self._take_out(device, Health.DEAD, error, now))
        if not any(other.may_work for other in self.queue.devices):
            ends += self._ends_of_held(error)
        return ends

    def recovered(self, device: PoolDevice, problem: Exception | None, now: float) -> list[RequestEnding]:
        """Take the result of an attempt to recover: None, or the problem.

        After ``MAX_FAILURES`` the device is dead. A worker process, which may have been killed from outside, rests after
        ``MAX_LOST``.
        """
        if device.queue.health is Health.RESTING and problem is None:
            device.num_failures = 0
        else:
            device.num_failures += problem is not None
        if device.num_failures < (MAX_LOST if device.is_lost else MAX_FAILURES):
            if problem is None:
                self._revive(device, now)
            return []
        device.queue.problem = problem or DeviceError("it fails in every call")
        device.queue.health = Health.RESTING if device.is_lost else Health.DEAD
        device.is_recovering = device.is_lost
        try:
            self.queue.check_works()
        except DeviceError as error:
            return self._ends_of_held(error)
        return []

    def next_event(self) -> float:
        """Return the moment of the next deadline or limit of a batch; infinite if there is none."""
        return min(self.queue.next_deadline(), *(device.ends_by for device in self.devices))

    def _ends_of_held(self, error: Exception) -> list[RequestEnding]:
        return [RequestEnding(text.request, error) for text in cast("tuple[QueuedText, ...]", self.queue.held)]

    def _take_out(self, device: PoolDevice, health: Health, error: Exception, now: float) -> Iterator[RequestEnding]:
        """Give what a device ran and what waited for it to the others, or to itself later."""
        device.call += 1
        device.ends_by = math.inf
        device.num_failures += 1
        for moved in self.queue.take_out(device.number, health, error, now):
            text = cast("QueuedText", moved.query)
            if not self.queue.is_wanted(text) or text.request.is_over:
                self.queue.cancel(text.id)
            elif text.num_failures >= MAX_RUNS:
                self.queue.cancel(text.id)
                yield RequestEnding(text.request, error)
            elif isinstance(moved.place, Busy):
                yield from self._move_late(text, moved, error, now)

    def _move_late(self, text: QueuedText, moved: Moved, error: Exception, now: float) -> Iterator[RequestEnding]:
        """Place a text that no device can embed in time without a limit, or refuse it with ``BusyError``.

        The texts of a worker process are not lost: they run late. If another device works, the texts of a dead device are
        refused.
        """
        assert isinstance(moved.place, Busy)
        if any(device.is_alive for device in self.queue.devices) and not isinstance(error, WorkerLostError):
            yield RequestEnding(text.request, moved.place.error())
        elif isinstance(self.queue.place_late(text, now), Busy):
            self.queue.hold(text)

    def _revive(self, device: PoolDevice, now: float) -> None:
        """Use a device again that failed or was thought to hang."""
        device.is_recovering = False
        self.queue.revive(device.number, now)
