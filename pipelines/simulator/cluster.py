"""Many simulated devices on one virtual clock: co-located, or prefill and decode apart."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal

from staticllm.pipelines.profiling.records import RequestRecord, StepRecord
from staticllm.pipelines.scheduling.interface import Policy
from staticllm.pipelines.simulator.simulated_device import DeviceModel, Job, SimulatedDevice
from staticllm.pipelines.simulator.workload import Arrival

Dispatch = Literal["least_loaded", "round_robin"]
ARRIVE, FINISH, BEGIN = range(3)
"""At one moment everybody who arrives is seen before a call ends, and all that before the next call is planned."""


@dataclass(frozen=True)
class Run:
    """What a simulation did: a record for each request in the order of arrival, and the calls of each device."""

    requests: tuple[RequestRecord, ...]
    steps: tuple[tuple[StepRecord, ...], ...]


@dataclass(frozen=True)
class Link:
    """Between devices that prefill and those that decode: seconds that the rows of a request travel. Links are not shared."""

    latency: float = 0.0
    slot_bytes: float = 0.0
    bandwidth: float = float("inf")  # bytes a second

    def __call__(self, num_rows: int) -> float:
        return self.latency + num_rows * self.slot_bytes / self.bandwidth


class Pool:
    """Devices that do the same; each has a policy of its own."""

    def __init__(
        self, model: DeviceModel, policy: Callable[[], Policy], size: int, dispatch: Dispatch = "least_loaded"
    ) -> None:
        self.devices = [SimulatedDevice(model, policy()) for _ in range(size)]
        self._dispatch = dispatch
        self._turns = count()

    def choose(self) -> SimulatedDevice:
        """Who takes the next request."""
        if self._dispatch == "round_robin":
            return self.devices[next(self._turns) % len(self.devices)]
        return min(self.devices, key=lambda device: device.num_requests)


class Cluster:
    """A pool that serves requests from prompt to end; or one for prompts and another that takes over with the first token.

    With ``concurrency``, so many requests are inside at most; who arrives then comes in when another has ended.
    """

    def __init__(
        self, first: Pool, decode: Pool | None = None, link: Link | None = None, concurrency: int | None = None
    ) -> None:
        self._first, self._decode, self._link = first, decode, link or Link()
        self._num_free = float("inf") if concurrency is None else concurrency
        self._outside: deque[Job] = deque()
        self._events: list[tuple[float, int, int, Callable[[float], None]]] = []
        self._numbers = count()
        self._planned: set[SimulatedDevice] = set()
        self._records: dict[int, RequestRecord] = {}

    def run(self, arrivals: Iterable[Arrival]) -> Run:
        """Until every request has ended. A cluster runs once."""
        for arrival in arrivals:
            limit = arrival.num_output if self._decode is None else 1
            self._at(arrival.time, ARRIVE, self._knock(Job(arrival, limit)))
        while self._events:
            now, _, _, action = heapq.heappop(self._events)
            action(now)
        pools: Sequence[Pool] = (self._first, self._decode) if self._decode else (self._first,)
        devices = [device for pool in pools for device in pool.devices]
        for device in devices:
            device.planner.close()
        records = sorted(self._records.values(), key=lambda record: (record.arrival, record.id))
        return Run(tuple(records), tuple(tuple(device.steps) for device in devices))

    def _at(self, time: float, rank: int, action: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time, rank, next(self._numbers), action))

    def _knock(self, job: Job) -> Callable[[float], None]:
        def knock(now: float) -> None:
            self._outside.append(job)
            self._let_in(now)

        return knock

    def _let_in(self, now: float) -> None:
        while self._outside and self._num_free > 0:
            self._num_free -= 1
            self._arrive(self._first, self._outside.popleft())(now)

    def _arrive(self, pool: Pool, job: Job) -> Callable[[float], None]:
        def arrive(now: float) -> None:
            device = pool.choose()
            device.submit(job)
            self._wake(device, now)

        return arrive

    def _wake(self, device: SimulatedDevice, now: float) -> None:
        if not device.is_running and device not in self._planned:
            self._planned.add(device)
            self._at(now, BEGIN, lambda now: self._begin(device, now))

    def _begin(self, device: SimulatedDevice, now: float) -> None:
        self._planned.discard(device)
        end = device.begin(now)
        if end is not None:
            self._at(end, FINISH, lambda now: self._finish(device, now))

    def _finish(self, device: SimulatedDevice, now: float) -> None:
        for job in device.finish(now):
            goes_on = self._decode is not None and len(job.token_times) < job.arrival.num_output and not job.has_slots
            if goes_on and job.num_tokens <= device.model.max_seq_len:
                self._hand_over(job, now)
            else:
                self._records[job.arrival.id] = job.record()
                self._num_free += 1
        self._let_in(now)
        self._wake(device, now)

    def _hand_over(self, job: Job, now: float) -> None:
        assert self._decode is not None
        job.limit, job.has_slots = job.arrival.num_output, True
        self._at(now + self._link(job.arrival.num_prompt), ARRIVE, self._arrive(self._decode, job))


def colocated(
    model: DeviceModel, policy: Callable[[], Policy], size: int = 1, dispatch: Dispatch = "least_loaded"
) -> Cluster:
    """Devices that do both."""
    return Cluster(Pool(model, policy, size, dispatch))
