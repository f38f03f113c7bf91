"""Lets the steps of an engine take turns with other programs on its device, and tells what each client had of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from staticllm.pipelines.engine.batch import Batch
from staticllm.pipelines.engine.request import RequestState
from staticllm.pipelines.scheduling.device_turns import Ask, DeviceTurns, Share
from staticllm.pipelines.scheduling.request_table import Limits

SMOOTHING = 0.2
"""The weight of the newest step in the expected duration of the next one."""


@dataclass(frozen=True)
class Rows:
    """The rows of one client in a device call, of one phase; ``num_bytes``: its part of the keys and values that were read."""

    owner: int
    phase: str
    count: int
    num_bytes: int


@dataclass(frozen=True)
class Demand:
    """For whom an engine wants the device: the highest priority of its requests, and the clients of those that have it."""

    priority: int = 0
    owners: tuple[int, ...] = ()


class Worker(Protocol):
    """What an engine's core tells about its next step, and about the one that has just ended."""

    @property
    def demand(self) -> Demand:
        """For whom the next step runs."""
        ...

    @property
    def rows(self) -> Sequence[Rows]:
        """The rows of the last device call."""
        ...

    def post(self) -> None:
        """Hand tokens to their readers."""
        ...

    def last_token_times(self) -> Iterable[float]:
        """Return the moments of the running requests' last tokens (of the engine's clock)."""
        ...


class SoleUse:
    """The device of an engine that shares it with nobody: nothing is waited for."""

    @property
    def is_wanted(self) -> bool:
        """Whether somebody waits for the device."""
        return False

    def turn(self, worker: Worker, limits: Limits) -> AbstractContextManager[None]:
        """Do nothing around a step."""
        return nullcontext()

    def measure(self) -> AbstractContextManager[None]:
        """Do nothing around a measurement."""
        return nullcontext()

    def hurry(self, priority: int, client: int) -> None:
        """Do nothing: the engine never waits for the device."""

    def close(self) -> None:
        """Do nothing: nobody else wants the device."""


class DeviceUse(SoleUse):
    """The place of one engine, ``owner``, among those who use a device. Runs on the engine's thread.

    The engine asks with the highest priority of its requests. After each step the clients pay for their rows, and the engine
    says by when it needs the device for the next token, which its own prompts delay by no more than ``token_bound`` either.

    Args:
        turns: Those of the device.
        owner: The engine; it pays for requests of no client.
        weight_bytes: The weights that each call reads.
    """

    def __init__(self, turns: DeviceTurns, owner: int, weight_bytes: int = 0) -> None:
        self.turns, self.owner, self.weight_bytes = turns, owner, weight_bytes
        self._step_seconds = 0.0

    @property
    def is_wanted(self) -> bool:
        """Whether somebody waits for the device."""
        return self.turns.is_wanted

    @contextmanager
    def turn(self, worker: Worker, limits: Limits) -> Iterator[None]:
        """Use the device for one step inside the ``with`` block. Tokens are posted first if somebody else may have it."""
        if self.turns.is_busy:
            worker.post()
        demand, known = worker.demand, self._step_seconds
        ask = Ask(self.owner, known, demand.priority, payers=demand.owners)
        self.turns.take(ask)
        start = self.turns.clock()
        try:
            yield
        finally:
            seconds = self.turns.clock() - start
            self._step_seconds = known + SMOOTHING * (seconds - known) if known else seconds
            shares = self._shares(worker.rows, seconds)
            self.turns.give(ask, seconds, self._due(worker.last_token_times(), limits), shares)

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Use the device for a measurement inside the ``with`` block; the engine pays for it."""
        with self.turns.turn(Ask(self.owner, self._step_seconds)):
            yield

    def hurry(self, priority: int, client: int) -> None:
        """Ask with a higher priority, if the engine waits for the device with a lower one. Any thread may call."""
        self.turns.hurry(self.owner, priority, (client,) if client else ())

    def close(self) -> None:
        """Leave the device to the others."""
        self.turns.forget(self.owner)

    def _shares(self, rows: Sequence[Rows], seconds: float) -> list[Share]:
        """Return what each client had of a step: its part of the time by its rows."""
        total = sum(each.count for each in rows)
        return [
            Share(
                each.owner, each.phase, seconds * each.count / total, each.count,
                self.weight_bytes * each.count // total + each.num_bytes,
            )
            for each in rows
        ]  # fmt: skip

    def _due(self, last_tokens: Iterable[float], limits: Limits) -> float | None:
        """Return the latest moment at which the next step should begin; None if no request waits for a next token."""
        oldest = min(last_tokens, default=None)
        if oldest is None:
            return None
        step = self._step_seconds
        return oldest + limits.token_bound.of(step, limits.tpot_ms) - step


def demand_of(requests: Iterable[RequestState]) -> Demand:
    """Return for whom an engine with these requests wants the device."""
    asked = [each.request for each in requests]
    highest = max((request.priority for request in asked), default=0)
    return Demand(highest, tuple({request.owner for request in asked if request.priority == highest and request.owner}))


def rows_of(batch: Batch | None, slot_bytes: int) -> list[Rows]:
    """Return the rows of each client and phase in a call, none without one; a slot of the KV cache has ``slot_bytes``."""
    if batch is None:
        return []
    counts: dict[tuple[int, str], int] = {}
    for entry in batch.entries:
        key = entry.state.request.owner, "prefill" if entry.is_prefill else "decode"
        counts[key] = counts.get(key, 0) + len(entry.segment.tokens)
    total, read = sum(counts.values()), batch.variant.kv_len * slot_bytes
    return [Rows(owner, phase, count, read * count // total) for (owner, phase), count in counts.items()]
