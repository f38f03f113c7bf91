"""Simulates several devices on one virtual clock, co-located or with prefill and decode on different devices."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal

from staticllm.errors import ConfigError
from staticllm.pipelines.profiling.records import JobRecord, RequestRecord, StepRecord
from staticllm.pipelines.scheduling.interface import Policy
from staticllm.pipelines.simulator.simulated_device import DeviceModel, Ended, SimulatedDevice, SimulatedRequest
from staticllm.pipelines.simulator.workload import Arrival

Dispatch = Literal["least_loaded", "two_choices", "round_robin"]
"""Which device receives a request: that with the fewest requests, of all or of two drawn at random, or each in turn."""
ARRIVE, FINISH, BEGIN = range(3)
"""The order of events at the same moment: first arrivals, then calls that end, then calls that are planned."""


@dataclass(frozen=True)
class Run:
    """The records of a simulation: one per request, in the order of arrival, and the calls and jobs of each device."""

    requests: tuple[RequestRecord, ...]
    steps: tuple[tuple[StepRecord, ...], ...]
    jobs: tuple[tuple[JobRecord, ...], ...] = ()


@dataclass(frozen=True)
class Link:
    """The transfer of a request's KV slots from the prefilling to the decoding device; each transfer has the full bandwidth.

    ``latency`` is in seconds, ``slot_bytes`` in bytes per KV slot, ``bandwidth`` in bytes per second.
    """

    latency: float = 0.0
    slot_bytes: float = 0.0
    bandwidth: float = float("inf")

    def __call__(self, num_slots: int) -> float:
        """Return the seconds that the transfer of ``num_slots`` KV slots takes."""
        return self.latency + num_slots * self.slot_bytes / self.bandwidth


class Pool:
    """``size`` devices of one kind that serve the same queue, each with a policy object of its own."""

    def __init__(
        self, model: DeviceModel, policy: Callable[[], Policy], size: int, dispatch: Dispatch = "least_loaded"
    ) -> None:
        self.devices = [SimulatedDevice(model, policy()) for _ in range(size)]
        self._dispatch = dispatch
        self._turns = count()
        self._random = random.Random(0)

    def choose(self) -> SimulatedDevice:
        """Return the device that receives the next request."""
        if self._dispatch == "round_robin":
            return self.devices[next(self._turns) % len(self.devices)]
        devices = self.devices
        if self._dispatch == "two_choices":
            devices = self._random.sample(devices, min(2, len(devices)))
        return min(devices, key=lambda device: device.num_requests)


class Cluster:
    """One pool that serves whole requests, or one pool for prompts and a second one that decodes after the first token.

    At most ``concurrency`` requests are admitted at a time; the next one is admitted when another has ended. None means no limit.
    """

    def __init__(
        self, first: Pool, decode: Pool | None = None, link: Link | None = None, concurrency: int | None = None
    ) -> None:
        self._first, self._decode, self._link = first, decode, link or Link()
        self._num_admissible = float("inf") if concurrency is None else concurrency
        self._queue: deque[SimulatedRequest] = deque()
        self._events: list[tuple[float, int, int, Callable[[float], None]]] = []
        self._numbers = count()
        self._planned: set[SimulatedDevice] = set()
        self._records: dict[int, RequestRecord] = {}

    def run(self, arrivals: Iterable[Arrival]) -> Run:
        """Simulate until every request has ended. A cluster can run once.

        Raises:
            ConfigError: a request is too large for the devices.
        """
        for arrival in arrivals:
            if self._decode is not None and arrival.num_answers > 1:
                raise ConfigError(
                    "requests of several sequences on devices that only prefill or decode: they share KV slots; use devices that "
                    "do both"
                )
            limit = arrival.num_output if self._decode is None else 1
            self._at(arrival.time, ARRIVE, self._enqueue(SimulatedRequest(arrival, limit)))
        while self._events:
            now, _, _, action = heapq.heappop(self._events)
            action(now)
        pools: Sequence[Pool] = (self._first, self._decode) if self._decode else (self._first,)
        devices = [device for pool in pools for device in pool.devices]
        for device in devices:
            device.close()
        records = sorted(self._records.values(), key=lambda record: (record.arrival, record.id))
        steps = tuple(tuple(device.steps) for device in devices)
        jobs = tuple(tuple(device.jobs) for device in devices)
        return Run(tuple(records), steps, jobs)

    def _at(self, time: float, rank: int, action: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time, rank, next(self._numbers), action))

    def _enqueue(self, request: SimulatedRequest) -> Callable[[float], None]:
        def enqueue(now: float) -> None:
            self._queue.append(request)
            self._admit(now)

        return enqueue

    def _admit(self, now: float) -> None:
        while self._queue and self._num_admissible > 0:
            self._num_admissible -= 1
            self._submit(self._first, self._queue.popleft())(now)

    def _submit(self, pool: Pool, request: SimulatedRequest) -> Callable[[float], None]:
        def submit(now: float) -> None:
            device = pool.choose()
            device.submit(request)
            self._wake(device, now)

        return submit

    def _wake(self, device: SimulatedDevice, now: float) -> None:
        if not device.is_running and device not in self._planned:
            self._planned.add(device)
            self._at(now, BEGIN, lambda now: self._begin(device, now))

    def _begin(self, device: SimulatedDevice, now: float) -> None:
        self._planned.discard(device)
        end = device.step(now)
        if end is not None:
            self._at(end, FINISH, lambda now: self._finish(device, now))
            return
        self._collect(device, now)
        if (moment := device.wake_at(now)) is not None:
            self._at(moment, ARRIVE, lambda now: self._wake(device, now))

    def _finish(self, device: SimulatedDevice, now: float) -> None:
        self._collect(device, now)
        self._admit(now)
        self._wake(device, now)

    def _collect(self, device: SimulatedDevice, now: float) -> None:
        """Record the answers that leave a device, or hand their requests over to one that decodes."""
        for ended in device.finish():
            request, record = ended.request, ended.record
            is_short = len(record.token_times) < request.arrival.num_output
            has_room = record.num_prompt + len(record.token_times) <= device.model.max_seq_len
            if self._decode is not None and request.before is None and is_short and has_room:
                self._hand_over(self._decode, ended, now)
            else:
                self._records[record.id] = record
                self._num_admissible += record.id >= 0  # further answers have ids below

    def _hand_over(self, decode: Pool, ended: Ended, now: float) -> None:
        arrival = ended.request.arrival
        request = SimulatedRequest(arrival, arrival.num_output, ended.record)
        self._at(now + self._link(arrival.num_prompt), ARRIVE, self._submit(decode, request))


def colocated(
    model: DeviceModel, policy: Callable[[], Policy], size: int = 1, dispatch: Dispatch = "least_loaded"
) -> Cluster:
    """Return a cluster of ``size`` devices that prefill and decode."""
    return Cluster(Pool(model, policy, size, dispatch))
