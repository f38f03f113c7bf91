"""Simulates what WINDVE leaves out: queries that arrive one by one or in bursts, texts of mixed lengths, and their limits.

The devices are the paper's, with the lines of ``windve_tables``. The load is 1.2 times what the main device alone embeds in
lockstep, depth / T queries per second. In the paper, the next queries come only after the last are answered, so none of them ever
waits for a running batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from windve_simulation import (
    SPREAD,
    SimulatedDevice,
    WindveSummary,
    burst_queries,
    poisson_queries,
    simulate,
)
from windve_tables import LIMITS_S, PAIRS, PublishedDevice

from staticllm.pipelines.embedding.queue.device_queue import Query
from staticllm.pipelines.embedding.queue.loads import Line
from staticllm.pipelines.embedding.queue.policies import Predicted, QueuePolicy, Windve, WindveQueued
from staticllm.pipelines.embedding.windve.queue_depth import depth

NUM_QUERIES = 8000
OVERLOAD = 1.2
Arrivals = Literal["poisson", "bursts", "mixed lengths"]
ARRIVALS: tuple[Arrivals, ...] = ("poisson", "bursts", "mixed lengths")
"""Poisson arrivals of texts of 75 tokens; the same in bursts; Poisson arrivals of lognormal lengths with mean 75."""


@dataclass(frozen=True)
class LoadRow:
    """One policy under one load: the main device alone, and with the CPU. ``rate`` is queries per second that arrive."""

    main: str
    helping: str
    limit_s: float
    arrivals: Arrivals
    rate: float
    policy: str
    alone: WindveSummary
    together: WindveSummary


@dataclass(frozen=True)
class _Contestant:
    """A policy, and the queue depth that it gives a device; 0 if it needs none."""

    name: str
    new_policy: Callable[[float], QueuePolicy]
    depth: Callable[[Line, float], int]


def _lowered_depth(line: Line, limit_s: float) -> int:
    """Return (T - 2 beta) / alpha: with it, a query that waits for a full batch still ends within the limit plus that batch."""
    return depth(line, limit_s - line.beta)


POLICIES = (
    _Contestant("windve", lambda limit_s: Windve(), depth),
    _Contestant("windve_q", lambda limit_s: WindveQueued(), depth),
    _Contestant("windve T-beta", lambda limit_s: Windve(), _lowered_depth),
    _Contestant("predicted", Predicted, lambda line, limit_s: 0),
)
"""Algorithm 1; with a length of waiting queries only; with queue depths for T - beta; admission by the predicted end."""
NUM_ROWS = len(PAIRS) * len(LIMITS_S) * len(ARRIVALS) * len(POLICIES)


def load_table(count: int = NUM_QUERIES, seed: int = 0, arrivals: tuple[Arrivals, ...] = ARRIVALS) -> Iterator[LoadRow]:
    """Yield one row per pair of devices, limit, load and policy, each of ``count`` queries."""
    for main, helping in PAIRS:
        for limit_s in LIMITS_S:
            rate = OVERLOAD * depth(main.line, limit_s) / limit_s
            for kind in arrivals:
                queries = _queries(kind, rate, count, seed)
                for contestant in POLICIES:
                    runs = (_run(pair, contestant, queries, limit_s) for pair in ((main,), (main, helping)))
                    yield LoadRow(main.name, helping.name, limit_s, kind, rate, contestant.name, *runs)


def _queries(kind: Arrivals, rate: float, count: int, seed: int) -> list[Query]:
    if kind == "bursts":
        return burst_queries(rate, count, seed)
    return poisson_queries(rate, count, seed, SPREAD if kind == "mixed lengths" else 0.0)


def _run(
    devices: tuple[PublishedDevice, ...], contestant: _Contestant, queries: list[Query], limit_s: float
) -> WindveSummary:
    simulated = [
        SimulatedDevice(device.name, device.line.new_load, contestant.depth(device.line, limit_s)) for device in devices
    ]
    return simulate(simulated, contestant.new_policy(limit_s), queries, limit_s)
