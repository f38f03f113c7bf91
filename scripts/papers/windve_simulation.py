"""Simulates devices that embed texts behind WINDVE's queue manager: the same queues and policies, on a virtual clock."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from staticllm.errors import ConfigError
from staticllm.pipelines.embedding.queue.device_queue import DeviceQueue, Query
from staticllm.pipelines.embedding.queue.loads import LENGTH, NewLoad
from staticllm.pipelines.embedding.queue.policies import QueuePolicy, Windve
from staticllm.pipelines.embedding.queue.text_queue import TextQueue

BURST = 16
"""Queries that arrive at once, on average, in ``bursts``."""
SPREAD = 0.7
"""The standard deviation of the logarithm of mixed lengths: the longest of a hundred is about 4 times as long as the mean."""
LONGEST = 512


@dataclass(frozen=True)
class SimulatedDevice:
    """A device of the simulator: its costs, and its queue depth for the policies that use one."""

    name: str
    new_load: NewLoad
    depth: int = 0


@dataclass(frozen=True)
class WindveSummary:
    """What became of the queries of one run. Rates are queries per second of arrivals; ``late`` is a share of those admitted.

    ``worst_s`` is the longest latency, ``mean_s`` the mean of the admitted queries, both in seconds.
    """

    num_queries: int
    num_admitted: int
    in_time_rate: float
    late: float
    busy: float
    mean_s: float
    worst_s: float


def poisson_queries(rate: float, count: int, seed: int, spread: float = 0.0) -> list[Query]:
    """Return ``count`` queries with exponential gaps, the last at ``count / rate`` seconds; ``lengths`` explains ``spread``.

    Raises:
        ConfigError: ``rate`` is not positive.
    """
    rng = np.random.default_rng(seed)
    return _queries(np.cumsum(rng.exponential(1.0, count)), rate, lengths(count, spread, rng))


def burst_queries(rate: float, count: int, seed: int, spread: float = 0.0) -> list[Query]:
    """Return ``count`` queries in bursts of a geometric size with mean ``BURST``, with exponential gaps between the bursts.

    Raises:
        ConfigError: ``rate`` is not positive.
    """
    rng = np.random.default_rng(seed)
    sizes = rng.geometric(1 / BURST, count)
    times = np.repeat(np.cumsum(rng.exponential(1.0, count)), sizes)[:count]
    return _queries(times, rate, lengths(count, spread, rng))


def _queries(times: NDArray[np.float64], rate: float, num_tokens: Sequence[int]) -> list[Query]:
    """Return queries at ``times``, stretched to the mean ``rate``."""
    if not 0 < rate < math.inf:
        raise ConfigError(f"rate={rate:g}: must be more than 0")
    stretched = times * (len(num_tokens) / rate / times[-1])
    return [Query(n, float(time), tokens) for n, (time, tokens) in enumerate(zip(stretched, num_tokens, strict=True))]


def lengths(count: int, spread: float, rng: np.random.Generator) -> list[int]:
    """Return lengths in tokens with mean 75: all equal, or lognormal with this standard deviation of the logarithm."""
    drawn = LENGTH * np.exp(rng.normal(-(spread**2) / 2, spread, count)) if spread else np.full(count, float(LENGTH))
    return [int(length) for length in np.clip(np.rint(drawn), 1, LONGEST)]


def simulate(
    devices: Sequence[SimulatedDevice], policy: QueuePolicy, queries: Sequence[Query], limit_s: float
) -> WindveSummary:
    """Serve ``queries``, in order of arrival, and count what was in time (``limit_s``, seconds), late and refused.

    A device begins its next batch as soon as it has work and no batch. What arrives at one moment is admitted before.
    """
    clock = _Clock(devices, policy)
    latencies = clock.run(queries)
    in_time = sum(latency <= limit_s + 1e-9 for latency in latencies)
    span = max(queries[-1].arrival - queries[0].arrival, limit_s)
    served = len(latencies)
    return WindveSummary(
        len(queries),
        served,
        in_time / span,
        1 - in_time / served if served else 0.0,
        1 - served / len(queries),
        math.fsum(latencies) / served if served else 0.0,
        max(latencies, default=0.0),
    )


def lockstep_concurrency(devices: Sequence[SimulatedDevice]) -> int:
    """Return the most queries at once that Algorithm 1 admits without a busy reply, as the paper's load: all at one moment."""
    most = sum(device.depth for device in devices)
    run = simulate(devices, Windve(), [Query(number, 0.0, LENGTH) for number in range(most + 1)], 1.0)
    return run.num_admitted


def lockstep_seconds(devices: Sequence[SimulatedDevice], concurrency: int) -> float:
    """Return the longest latency of ``concurrency`` queries that arrive at one moment, under Algorithm 1."""
    return simulate(devices, Windve(), [Query(number, 0.0, LENGTH) for number in range(concurrency)], 1.0).worst_s


class _Clock:
    """The virtual clock of one run, and the ends of the running batches."""

    def __init__(self, devices: Sequence[SimulatedDevice], policy: QueuePolicy) -> None:
        self._devices = devices
        self._manager = TextQueue([DeviceQueue(d.name, d.new_load, d.depth) for d in devices], policy)
        self._ends: list[tuple[float, int]] = []
        self._latencies: list[float] = []

    def run(self, queries: Sequence[Query]) -> list[float]:
        """Return the latencies of the admitted queries, seconds."""
        place = 0
        while place < len(queries) or self._ends:
            arrival = queries[place].arrival if place < len(queries) else math.inf
            now = min(arrival, self._ends[0][0] if self._ends else math.inf)
            while self._ends and self._ends[0][0] <= now:
                self._finish()
            while place < len(queries) and queries[place].arrival <= now:
                self._manager.place(queries[place], now)
                place += 1
            self._begin(now)
        return self._latencies

    def _begin(self, now: float) -> None:
        for index, device in enumerate(self._devices):
            batch = self._manager.begin(index, now)
            if batch:
                load = device.new_load()
                for query in batch:
                    load.add(query.num_tokens)
                heapq.heappush(self._ends, (now + load.seconds, index))

    def _finish(self) -> None:
        end, index = heapq.heappop(self._ends)
        self._latencies += [end - query.arrival for query in self._manager.finish(index, end)]
