"""Keeps the last device calls and answers of an engine, for the page and the feeds that show them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from staticllm.pipelines.profiling.records import Record, RequestRecord, StepRecord

KEPT = 1024
"""The calls and answers that are kept; of those that were not read before they were replaced, only the number is known."""
MAX_PENDING = 4096
"""The records that the engine's thread appends between two readings; more replace the oldest."""
MAX_KNOWN = 8192
"""Requests whose last token is remembered; more can only be those whose end was dropped."""


@dataclass(frozen=True)
class Watched:
    """Calls and ended answers as JSON objects, the number of the last one, and how many were dropped before they were read."""

    calls: list[dict[str, Any]]
    ended: list[dict[str, Any]]
    cursor: int
    num_dropped: int


class CallLog:
    """The last calls and answers as JSON objects, numbered from ``first`` on. Any thread may call the methods."""

    def __init__(self, first: int) -> None:
        self._entries: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._next = first
        self._lock = threading.Lock()

    @property
    def next_number(self) -> int:
        """The number of the next entry."""
        return self._next

    def add(self, entry: dict[str, Any]) -> None:
        """Keep an entry; its ``number`` is set."""
        with self._lock:
            self._entries.append({**entry, "number": self._next})
            self._next += 1

    def skip(self, count: int) -> None:
        """Number entries that were lost."""
        with self._lock:
            self._next += count

    def since(self, after: int) -> Watched:
        """Return what came after the entry of this number; all that is kept if there is no such entry yet."""
        entries, cursor, num_dropped = self.entries_after(after)
        calls = [entry for entry in entries if "rows" in entry]
        ended = [entry for entry in entries if "rows" not in entry]
        return Watched(calls, ended, cursor, num_dropped)

    def entries_after(self, after: int) -> tuple[list[dict[str, Any]], int, int]:
        """Return the same in one list, the number of the last entry, and how many were dropped."""
        with self._lock:
            entries = list(self._entries)
            cursor = self._next - 1
        after = after if after <= cursor else 0
        oldest = entries[0]["number"] if entries else cursor + 1
        found = [entry for entry in entries if entry["number"] > after]
        return found, cursor, max(0, oldest - after - 1) if after else 0


class EngineWatch:
    """A ``Recorder`` whose records are numbered from ``first`` on. ``origin`` is the moment (``time.perf_counter``) that is 0.

    The engine's thread only appends; any other thread may read.
    """

    def __init__(self, first: int, origin: float) -> None:
        self._pending: deque[Record] = deque(maxlen=MAX_PENDING)
        self._num_lost = 0  # records that were replaced while they were pending; only the engine's thread counts
        self._num_known_lost = 0
        self._log = CallLog(first)
        self._origin = origin
        self._lock = threading.Lock()  # held while records are numbered
        self._last_tokens: dict[int, float] = {}  # the moment of each request's last token
        self._decoding: set[int] = set()
        self._ended: list[int] = []  # their last call is recorded after them

    def append(self, record: Record) -> None:
        """Keep a record. Runs on the engine's thread."""
        if len(self._pending) == MAX_PENDING:
            self._num_lost += 1
        self._pending.append(record)

    def restart(self) -> None:
        """Forget what is pending: between it and what comes next there are calls that were not recorded."""
        with self._lock:
            self._pending.clear()
            self._forget_tokens()

    @property
    def next_number(self) -> int:
        """The number of the next record."""
        return self._numbered().next_number

    def since(self, after: int) -> Watched:
        """Return what came after the record of this number; all that is kept if there is no such record yet."""
        return self._numbered().since(after)

    def entries_after(self, after: int) -> tuple[list[dict[str, Any]], int, int]:
        """Return the same in one list, the number of the last record, and how many were dropped."""
        return self._numbered().entries_after(after)

    def _numbered(self) -> CallLog:
        """Return the log with all records that are pending."""
        with self._lock:
            num_lost = self._num_lost
            self._log.skip(num_lost - self._num_known_lost)
            self._num_known_lost = num_lost
            for record in _taken(self._pending):
                if isinstance(record, StepRecord):
                    self._log.add(self._call(record))
                elif isinstance(record, RequestRecord):
                    self._log.add(self._answer(record))
        return self._log

    def _call(self, step: StepRecord) -> dict[str, Any]:
        return {
            "start": round(step.start - self._origin, 6),
            "ms": _ms(step.seconds),
            "rows": step.variant.rows,
            "kv_len": step.variant.kv_len,
            "prefill": [list(pair) for pair in step.prefill],
            "decode": list(step.decode),
            "drafted": sum(count for _, count, _ in step.drafts),
            "accepted": sum(count for _, _, count in step.drafts),
            "waiting": step.num_waiting,
            "swapped": step.num_swapped,
            "preempted": list(step.preempted),
            "slots_in_use": step.slots_in_use,
            "gap_ms": self._gap(step),
            "failed": step.has_failed,
        }

    def _gap(self, step: StepRecord) -> float | None:
        """Return the longest time (ms) from the previous token of a request that decoded in this call; None without one."""
        if step.has_failed:
            return None
        if len(self._last_tokens) > MAX_KNOWN:
            self._forget_tokens()
        gaps = [step.end - self._last_tokens[number] for number in step.decode if number in self._last_tokens]
        for number in step.decode:
            self._last_tokens[number] = step.end
            self._decoding.add(number)
        for number, _ in step.prefill:
            if number not in self._decoding:  # a preempted request has a last token
                self._last_tokens[number] = step.end
        for number in self._ended:
            self._last_tokens.pop(number, None)
            self._decoding.discard(number)
        self._ended.clear()
        return _ms(max(gaps)) if gaps else None

    def _forget_tokens(self) -> None:
        self._last_tokens.clear()
        self._decoding.clear()
        self._ended.clear()

    def _answer(self, request: RequestRecord) -> dict[str, Any]:
        self._ended.append(request.id)
        times = request.token_times
        gaps = [after - before for before, after in pairwise(times)]
        return {
            "id": request.id,
            "end": None if request.ended is None else round(request.ended - self._origin, 6),
            "reason": str(request.reason),
            "prompt_tokens": request.num_prompt,
            "cached_tokens": request.num_cached,
            "output_tokens": len(times),
            "queue_ms": None if request.started is None else _ms(request.started - request.arrival),
            "ttft_ms": _ms(times[0] - request.arrival) if times else None,
            "tpot_ms": _ms((times[-1] - times[0]) / len(gaps)) if gaps else None,
            "longest_gap_ms": _ms(max(gaps)) if gaps else None,
        }


def _taken(pending: deque[Record]) -> Iterator[Record]:
    """Yield and remove what is pending. The engine's thread may append meanwhile."""
    for _ in range(len(pending)):
        yield pending.popleft()


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
