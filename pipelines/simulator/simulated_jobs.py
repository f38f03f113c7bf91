"""Calls of another model that share a simulated device with the requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from staticllm.pipelines.engine.jobs import new_source_id
from staticllm.pipelines.scheduling.interface import JobView
from staticllm.pipelines.simulator.simulated_programs import VirtualClock


@dataclass(frozen=True)
class BulkJobs:
    """Calls of another model, such as packed documents, of which one always waits until the moment ``end``.

    ``seconds`` is the duration of one call; calls are shorter if the device's policy asks for it, at no cost.
    """

    seconds: float
    end: float


class SimulatedJobs:
    """The source of these calls; ``num_calls`` counts those that ran."""

    def __init__(self, jobs: BulkJobs, clock: VirtualClock) -> None:
        self.id = new_source_id()
        self.num_calls = 0
        self._jobs, self._clock = jobs, clock
        self._next_seconds = jobs.seconds

    @property
    def has_jobs(self) -> bool:
        """Whether a call waits."""
        return self._clock.now < self._jobs.end

    @property
    def wait_seconds(self) -> float:
        """Calls never wait for more texts."""
        return 0.0

    def attach(self, wake: Callable[[], None]) -> None:
        """Do nothing: a call always waits."""

    def next_job(self, max_seconds: float | None = None) -> JobView | None:
        """Return the next call, which takes ``max_seconds`` at most."""
        if not self.has_jobs:
            return None
        seconds = self._jobs.seconds
        self._next_seconds = seconds if max_seconds is None else min(seconds, max_seconds)
        return JobView(self.id, self._next_seconds, 0.0)

    def run_next(self, meanwhile: Callable[[], None] | None = None) -> int:
        """Let the time of one call pass."""
        if meanwhile is not None:
            meanwhile()
        self._clock.advance(self._next_seconds)
        self.num_calls += 1
        return 1

    def close(self) -> None:
        """Do nothing: no part of a call waits for its result."""
