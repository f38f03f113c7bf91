"""The records of the engine and the simulator, one per device call, job and request that has ended, and the ring of the last."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Literal, TypeAlias

from staticllm.core import FinishReason, Variant


@dataclass(frozen=True)
class HostTimes:
    """The seconds that the engine's thread spent on one device call, outside the call itself."""

    plan: float
    """Before the call: runs the policy and moves KV slots to and from the host pool."""
    prepare: float
    """Before the call: writes token ids, positions and masks."""
    commit: float
    """After the call: writes new keys and values into the arena."""
    sampling: float
    """After the call: chooses tokens."""

    @property
    def total(self) -> float:
        """The sum of all parts, in seconds."""
        return self.plan + self.prepare + self.commit + self.sampling


@dataclass(frozen=True)
class StepRecord:
    """One device call."""

    start: float
    """A moment of ``time.perf_counter``, or of the virtual clock in simulations."""
    seconds: float
    """The duration."""
    variant: Variant
    decode: tuple[int, ...]
    """The ids of requests that decoded."""
    prefill: tuple[tuple[int, int], ...]
    """Pairs of a request's id and its number of prompt tokens in the call."""
    slots_in_use: int
    """KV slots of the arena in use after the call."""
    num_waiting: int = 0
    """Requests that waited during the call."""
    num_swapped: int = 0
    """Requests that were swapped during the call."""
    num_running: int = 0
    """Requests that ran."""
    swapped: tuple[int, ...] = ()
    """The ids of the swapped requests."""
    preempted: tuple[int, ...] = ()
    """The ids of requests that lost their KV slots before the call."""
    has_failed: bool = False
    """Whether no keys and values of the call were kept."""
    host: HostTimes | None = None
    drafts: tuple[tuple[int, int, int], ...] = ()
    """For each decoding request with drafts: its id, the drafted tokens that the call checked, and how many of them were
    accepted."""
    draft_seconds: float = 0.0
    """What a draft model took for them before the call."""
    paused_seconds: float = 0.0
    """What the inserted calls took; not in ``seconds``."""
    num_inserted: int = 0
    """Other calls that ran between the blocks of the call."""
    is_inserted: bool = False
    """Whether it ran between the blocks of another call."""
    proactive_rows: int = 0
    """Rows of proactive requests."""

    @property
    def end(self) -> float:
        """The moment at which the call returned."""
        return self.start + self.seconds + self.paused_seconds

    @property
    def padding_rows(self) -> int:
        """Rows of the variant that processed no token."""
        return self.variant.rows - self.prefill_rows - self.decode_rows

    @property
    def decode_rows(self) -> int:
        """Rows that decoded: one per decoding request, and one per drafted token."""
        return len(self.decode) + sum(count for _, count, _ in self.drafts)

    @property
    def prefill_rows(self) -> int:
        """Rows that processed prompt tokens."""
        return sum(count for _, count in self.prefill)


@dataclass(frozen=True)
class RequestRecord:
    """One request that has ended.

    Moments are those of ``time.perf_counter``, or of the virtual clock in simulations.
    """

    id: int
    arrival: float
    started: float | None
    """The start of the request's first device call, or None if it never ran."""
    token_times: tuple[float, ...]
    """The moment of each generated token."""
    num_prompt: int
    """Prompt tokens, of which ``num_cached`` were not computed because the prefix cache had their KV slots."""
    num_cached: int
    reason: FinishReason
    ended: float | None = None
    is_proactive: bool = False
    """Whether its class of work is proactive."""

    @property
    def queueing(self) -> float | None:
        """The seconds from arrival to the first device call; None if it never ran."""
        return None if self.started is None else self.started - self.arrival

    @property
    def ttft(self) -> float | None:
        """The seconds from arrival to the first token; None without a token."""
        return self.token_times[0] - self.arrival if self.token_times else None

    @property
    def tpot(self) -> float | None:
        """The mean seconds per token after the first; None without one."""
        times = self.token_times
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None

    @property
    def longest_gap(self) -> float | None:
        """The longest time between two tokens, in seconds; None without two."""
        return max((after - before for before, after in pairwise(self.token_times)), default=None)


@dataclass(frozen=True)
class JobRecord:
    """One call of another model, such as packed texts to embed. ``start`` and ``seconds`` are as in ``StepRecord``."""

    start: float
    seconds: float
    source: int
    """The number of the ``JobSource`` that composed it."""
    num_parts: int
    """Its number of texts."""

    @property
    def end(self) -> float:
        """The moment at which the call returned."""
        return self.start + self.seconds


Record: TypeAlias = StepRecord | RequestRecord | JobRecord


Status: TypeAlias = Literal["waiting", "prefilling", "running", "swapped"]


@dataclass(frozen=True)
class RequestProgress:
    """One answer that has not ended. Moments are those of ``time.perf_counter``, None before they come."""

    id: int
    status: Status
    arrival: float
    started: float | None
    """The moment of its first device call."""
    first_token: float | None
    """The moment of its first token."""
    num_prompt: int
    """Prompt tokens, of which ``num_cached`` were in the prefix cache."""
    num_cached: int
    num_computed: int
    """Tokens that have keys and values, those of the answer included."""
    num_generated: int
    max_new_tokens: int | None
    """None if only the slots limit the answer."""
    priority: int


@dataclass(frozen=True)
class EngineProgress:
    """The answers that an engine has not ended, in the order of arrival, and the number of KV slots of its arena."""

    requests: tuple[RequestProgress, ...]
    num_slots: int


KEPT_RECORDS = 8192


@dataclass(frozen=True)
class NewRecords:
    """The records after some number, the number of the last one, and how many were dropped before they were read."""

    records: Sequence[Record]
    end: int
    num_dropped: int


class RecordRing:
    """The last ``KEPT_RECORDS`` records, numbered from 1 on. The engine's thread appends, and any thread reads."""

    def __init__(self) -> None:
        self._records: deque[Record] = deque(maxlen=KEPT_RECORDS)
        self._end = 0
        self._lock = threading.Lock()

    @property
    def end(self) -> int:
        """The number of the last record; 0 before the first."""
        return self._end

    def append(self, record: Record) -> None:
        """Add a record; if the ring is full, the oldest is dropped."""
        with self._lock:
            self._records.append(record)
            self._end += 1

    def after(self, number: int) -> NewRecords:
        """Return the records after the one of this number."""
        with self._lock:
            num_new = self._end - number
            num_kept = min(num_new, len(self._records))
            found = list(islice(self._records, len(self._records) - num_kept, None))
            return NewRecords(found, self._end, num_new - num_kept)
