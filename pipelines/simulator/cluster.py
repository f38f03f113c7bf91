"""Simulates devices on one virtual clock, co-located or with prefill and decode apart, and scenarios that compare policies."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Literal

from staticllm.config import StaticLLMConfig
from staticllm.core import ProgramLayout, ProgramMode
from staticllm.errors import ConfigError

from ...compiler_passes.compiling.variants import choose_variants
from ..profiling.records import RequestRecord
from ..programs.variant_index import VariantIndex
from ..scheduling.interface import Policy
from ..scheduling.planner import make_policy
from ..scheduling.request_table import Limits
from .cost_model import Cost, HostCost
from .npu_costs import NpuCosts
from .simulated_clients import BulkJobs
from .simulated_device import DeviceModel, Ended, SimulatedDevice, SimulatedRequest
from .summary import Run, summarize
from .workload import Arrival

Dispatch = Literal["least_loaded", "two_choices", "round_robin"]
"""Which device receives a request: that with the fewest requests, of all or of two drawn at random, or each in turn."""
ARRIVE, FINISH, BEGIN = range(3)
"""The order of events at the same moment: first arrivals, then calls that end, then calls that are planned."""


@dataclass(frozen=True)
class Link:
    """The transfer of a request's KV slots from the prefilling to the decoding device; each transfer has the full bandwidth."""

    latency: float = 0.0
    """In seconds."""
    slot_bytes: float = 0.0
    """In bytes per KV slot."""
    bandwidth: float = float("inf")
    """In bytes per second."""

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
        self._numbers = count()
        self._random = random.Random(0)

    def choose(self) -> SimulatedDevice:
        """Return the device that receives the next request."""
        if self._dispatch == "round_robin":
            return self.devices[next(self._numbers) % len(self.devices)]
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
        self._first = first
        self._decode = decode
        self._link = link or Link()
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
            self._at(arrival.time, ARRIVE, partial(self._enqueue, SimulatedRequest(arrival, limit)))
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

    def _enqueue(self, request: SimulatedRequest, now: float) -> None:
        self._queue.append(request)
        self._admit(now)

    def _admit(self, now: float) -> None:
        while self._queue and self._num_admissible > 0:
            self._num_admissible -= 1
            self._submit(self._first, self._queue.popleft(), now)

    def _submit(self, pool: Pool, request: SimulatedRequest, now: float) -> None:
        device = pool.choose()
        device.submit(request)
        self._wake(device, now)

    def _wake(self, device: SimulatedDevice, now: float) -> None:
        if not device.is_running and device not in self._planned:
            self._planned.add(device)
            self._at(now, BEGIN, partial(self._begin, device))

    def _begin(self, device: SimulatedDevice, now: float) -> None:
        self._planned.discard(device)
        end = device.step(now)
        if end is not None:
            self._at(end, FINISH, partial(self._finish, device))
            return
        self._collect(device, now)
        if (moment := device.wake_at(now)) is not None:
            self._at(moment, ARRIVE, partial(self._wake, device))

    def _finish(self, device: SimulatedDevice, now: float) -> None:
        self._collect(device, now)
        self._admit(now)
        self._wake(device, now)

    def _collect(self, device: SimulatedDevice, now: float) -> None:
        """Record the answers that leave a device, or hand their requests over to one that decodes."""
        for ended in device.finish():
            request = ended.request
            record = ended.record
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
        self._at(now + self._link(arrival.num_prompt), ARRIVE, partial(self._submit, decode, request))


def colocated(
    model: DeviceModel, policy: Callable[[], Policy], size: int = 1, dispatch: Dispatch = "least_loaded"
) -> Cluster:
    """Return a cluster of ``size`` devices that prefill and decode."""
    return Cluster(Pool(model, policy, size, dispatch))


BUSY_REQUESTS = 64
"""The number of requests per device that measure its maximum rate, so that filling and draining are a small part of the run."""


@dataclass(frozen=True)
class Scenario:
    """A workload and the devices that serve it."""

    model: DeviceModel
    arrivals: tuple[Arrival, ...]
    num_devices: int = 1
    """They prefill and decode; with ``num_decode_devices`` they only prefill."""
    num_decode_devices: int = 0
    """They decode after the transfer over ``link``."""
    link: Link = field(default_factory=Link)
    dispatch: Dispatch = "least_loaded"
    concurrency: int | None = None
    """The most requests that are admitted at a time; None for no limit."""

    def with_jobs(self, seconds: float) -> Scenario:
        """Return the same scenario with calls of another model, of ``seconds`` each, that always wait until the last arrival."""
        jobs = BulkJobs(seconds, max(arrival.time for arrival in self.arrivals))
        return replace(self, model=replace(self.model, jobs=jobs))

    def run(self, policy: str) -> Run:
        """Simulate every request from its arrival to its end, under the policy with this name.

        Raises:
            ConfigError: the policy is unknown, or a request is too large for the devices.
        """

        def make() -> Policy:
            return make_policy(policy)

        first = Pool(self.model, make, self.num_devices, self.dispatch)
        decode = Pool(self.model, make, self.num_decode_devices, self.dispatch) if self.num_decode_devices else None
        return Cluster(first, decode, self.link, self.concurrency).run(self.arrivals)


def max_rate(scenario: Scenario) -> float:
    """Return the requests per second that the devices serve under ``fcfs`` while requests are always waiting."""
    devices = scenario.num_devices + scenario.num_decode_devices
    count = max(1, min(len(scenario.arrivals), BUSY_REQUESTS * devices))
    at_once = tuple(replace(arrival, time=0.0) for arrival in scenario.arrivals[:count])
    answers = summarize(replace(scenario, arrivals=at_once).run("fcfs").requests).requests_per_second
    return answers * count / sum(arrival.num_answers for arrival in at_once)


def offered_rate(arrivals: Sequence[Arrival]) -> float:
    """Return the number of requests that arrive per second; infinite if they all arrive at once."""
    span = max(arrival.time for arrival in arrivals) - min(arrival.time for arrival in arrivals)
    return (len(arrivals) - 1) / span if span > 0 else float("inf")


def longest(arrivals: Sequence[Arrival]) -> tuple[int, int]:
    """Return the lengths of the longest prompt and of the longest answer, in tokens."""
    return max(arrival.num_prompt for arrival in arrivals), max(arrival.num_output for arrival in arrivals)


def npu_model(config: StaticLLMConfig, costs: NpuCosts, host: HostCost) -> DeviceModel:
    """Return a device with the programs in blocks, ``max_num_seqs`` and KV slots that the pipeline would have on an NPU."""
    model = configured_model(config, "separate", costs, host, "blocks")
    return replace(model, blocks=costs.divided)


def configured_model(
    config: StaticLLMConfig, mode: ProgramMode, cost: Cost, host: HostCost, layout: ProgramLayout | None = None
) -> DeviceModel:
    """Return a device with the programs, ``max_num_seqs`` and KV slots that the pipeline would have with this config."""
    limits = Limits(config.num_seqs(mode), config.ttft_ms, config.tpot_ms, config.gap_ms)
    index = VariantIndex(choose_variants(config, mode, None, layout))
    return DeviceModel(index, cost, limits, config.num_kv_slots(mode), config.num_host_slots, config.max_seq_len, host)


def tabled_model(config: StaticLLMConfig, index: VariantIndex, cost: Cost, host: HostCost) -> DeviceModel:
    """Return a device with exactly the programs of a table. By default its arena has as many KV slots as the largest ``kv_len``.

    Raises:
        ConfigError: no program for one sequence can read all KV slots, or a sequence needs more KV slots than the arena has.
    """
    kv_slots = config.kv_slots or max(variant.kv_len for variant in index.variants)
    if not any(variant.sequences == 1 and variant.kv_len >= kv_slots for variant in index.variants):
        raise ConfigError(
            f"no program for one sequence has a kv_len of {kv_slots}: add one to the costs, or lower KV_SLOTS"
        )
    if config.max_seq_len > kv_slots:
        raise ConfigError(
            f"prompt and answer of {config.max_seq_len} tokens, the costs have programs for {kv_slots} KV slots: "
            "shorten them or measure with longer ones"
        )
    num_seqs = config.max_num_seqs or index.max_decoding(0)
    limits = Limits(num_seqs, config.ttft_ms, config.tpot_ms, config.gap_ms)
    return DeviceModel(index, cost, limits, kv_slots, config.num_host_slots, config.max_seq_len, host)
