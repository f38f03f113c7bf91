"""What an engine needs of its device, and for which clients its steps run. ``daemon/sharing`` shares devices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from ..scheduling.request_table import Limits
from .batch import Batch
from .jobs import Asked
from .sequence import ActiveRequest


@dataclass(frozen=True)
class Rows:
    """The rows of one client (0: none) in a device call, of one phase; ``num_bytes``: its part of the keys and values read."""

    owner: int
    phase: str
    count: int
    num_bytes: int


@dataclass(frozen=True)
class Demand:
    """The highest priority of an engine's requests, and the clients of the requests that have it."""

    priority: int = 0
    owners: tuple[int, ...] = ()


class Worker(Protocol):
    """An engine's core: its next step, and the one that has just ended."""

    @property
    def demand(self) -> Demand:
        """The clients of the next step."""
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
    """The device of an engine that does not share it: no call waits."""

    @property
    def is_wanted(self) -> bool:
        """Whether another call waits for the device."""
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
        """Do nothing: the device is not shared."""


def demand_of(requests: Iterable[ActiveRequest], jobs: Iterable[Asked] = ()) -> Demand:
    """Return the highest priority of these requests and jobs, and their clients that have it."""
    asked = [*((each.priority, each.owner) for each in requests), *jobs]
    highest = max((priority for priority, _ in asked), default=0)
    return Demand(highest, tuple({owner for priority, owner in asked if priority == highest and owner}))


def rows_of(batches: Iterable[Batch], slot_bytes: int) -> list[Rows]:
    """Return the rows of each client and phase in each call; a slot of the KV cache has ``slot_bytes``."""
    return [rows for batch in batches for rows in _rows_of_one(batch, slot_bytes)]


def _rows_of_one(batch: Batch, slot_bytes: int) -> list[Rows]:
    counts: dict[tuple[int, str], int] = {}
    for entry in batch.entries:
        key = entry.state.owner, "prefill" if entry.is_prefill else "decode"
        counts[key] = counts.get(key, 0) + len(entry.segment.tokens)
    total = sum(counts.values())
    read = batch.variant.kv_len * slot_bytes
    return [Rows(owner, phase, count, read * count // total) for (owner, phase), count in counts.items()]
