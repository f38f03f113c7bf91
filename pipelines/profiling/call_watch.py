"""What an engine does, call by call, as JSON for readers in this process and in others."""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import Any

from staticllm.core import Clock

from .records import KEPT_RECORDS, EngineProgress, RecordRing, RequestRecord, StepRecord
from .stats import Stats

KEPT = KEPT_RECORDS
"""The calls and answers that are kept, so that a log takes all that a ring has; of those that were not read before they were
replaced, only the number is known."""
MAX_KNOWN = 8192
"""Requests whose last token is remembered; more can only be those whose end was dropped."""
MAX_BYTES = 256 << 10
"""About the most bytes of the calls in an answer, and of its requests; the next answer has the next calls."""
MAX_ENTRIES = 256
MAX_REQUESTS = 512
Choice = Callable[[list[dict[str, Any]]], list[dict[str, Any]]]


@dataclass(frozen=True)
class Entries:
    """Entries of a log, the number to go on from, and how many up to there are missing because they were dropped."""

    entries: list[dict[str, Any]]
    cursor: int
    num_dropped: int
    has_more: bool = False
    """Whether the log has later entries."""


class RecentCalls:
    """The last calls and ended answers as JSON objects, numbered from 1 on. Any thread may call the methods."""

    def __init__(self) -> None:
        self._entries: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._end = 0
        self._lock = threading.Lock()

    def add(self, entry: Mapping[str, Any]) -> None:
        """Keep an entry; its ``number`` is set."""
        with self._lock:
            self._end += 1
            self._entries.append({**entry, "number": self._end})

    def skip(self, count: int) -> None:
        with self._lock:
            self._end += count

    def after(self, number: int, first_of: Choice = list) -> Entries:
        """Return what came after the entry of this number; all that is kept if there is no such entry yet.

        ``first_of`` chooses how many of the first entries are told; those behind them are not dropped, but come later.
        """
        with self._lock:
            end = self._end
            number = number if number <= end else 0
            new = list(takewhile(lambda entry: entry["number"] > number, reversed(self._entries)))
        new.reverse()
        found = first_of(new)
        cursor = end if len(found) == len(new) else found[-1]["number"]
        return Entries(found, cursor, cursor - number - len(found), len(found) < len(new))


class CallWatch:
    """Makes a log of an engine's records when somebody asks; until then only the engine's ring of records is kept.

    Any thread may ask. Moments are those of the engine's clock. Jobs are left out, but those that the ring dropped count as
    dropped: their kind is not known.
    """

    def __init__(self, ring: RecordRing, clock: Clock) -> None:
        self._ring = ring
        self._clock = clock
        self._name = secrets.token_hex(8)  # of the numbers: another process begins again
        self._log = RecentCalls()
        self._taken = 0
        self._lock = threading.Lock()
        self.last_tokens: dict[int, float] = {}  # the moment of each request's last token
        self.decoding: set[int] = set()
        self._ended: list[int] = []  # their last call is recorded after them

    def after(self, number: int, progress: EngineProgress, stats: Stats) -> dict[str, Any]:
        """Return the calls and answers after a number, beside the requests that run and the statistics, as JSON types.

        ``now`` is this moment. ``cursor`` is the number for the next reading; what is more than an answer may hold comes then.
        """
        self._take()
        known = self._log.after(number, _first_of)
        return {
            "watch": self._name,
            "now": self._clock(),
            "entries": known.entries,
            "more": known.has_more,
            "cursor": known.cursor,
            "dropped": known.num_dropped,
            "requests": [asdict(request) for request in progress.requests[:MAX_REQUESTS]],
            "num_slots": progress.num_slots,
            "stats": asdict(stats),
        }

    def _take(self) -> None:
        """Number the records that came since the last reading."""
        with self._lock:
            new = self._ring.after(self._taken)
            self._taken = new.end
            if new.num_dropped:
                self._log.skip(new.num_dropped)
                self._forget_tokens()
            for record in new.records:
                if isinstance(record, StepRecord):
                    self._log.add(self._call(record))
                elif isinstance(record, RequestRecord):
                    self._log.add(self._answer(record))

    def _call(self, step: StepRecord) -> dict[str, Any]:
        return {
            "start": step.start,
            "ms": _ms(step.seconds),
            "rows": step.variant.rows,
            "kv_len": step.variant.kv_len,
            "prefill": [list(pair) for pair in step.prefill],
            "decode": list(step.decode),
            "proactive": step.proactive_rows,
            "drafted": sum(count for _, count, _ in step.drafts),
            "accepted": sum(count for _, _, count in step.drafts),
            "waiting": step.num_waiting,
            "swapped": step.num_swapped,
            "preempted": list(step.preempted),
            "slots_in_use": step.slots_in_use,
            "gap_ms": self._gap(step),
            "failed": step.has_failed,
            "inserted": step.num_inserted,
            "is_inserted": step.is_inserted,
        }

    def _gap(self, step: StepRecord) -> float | None:
        """Return the longest time (ms) from the previous token of a request that decoded in this call; None without one."""
        if step.has_failed:
            return None
        if len(self.last_tokens) > MAX_KNOWN:
            self._forget_tokens()
        gaps = [step.end - self.last_tokens[number] for number in step.decode if number in self.last_tokens]
        for number in step.decode:
            self.last_tokens[number] = step.end
            self.decoding.add(number)
        for number, _ in step.prefill:
            if number not in self.decoding:  # a preempted request has a last token
                self.last_tokens[number] = step.end
        for number in self._ended:
            self.last_tokens.pop(number, None)
            self.decoding.discard(number)
        self._ended.clear()
        return _ms(max(gaps, default=None))

    def _forget_tokens(self) -> None:
        self.last_tokens.clear()
        self.decoding.clear()
        self._ended.clear()

    def _answer(self, request: RequestRecord) -> dict[str, Any]:
        self._ended.append(request.id)
        return {
            "id": request.id,
            "end": request.ended,
            "reason": str(request.reason),
            "prompt_tokens": request.num_prompt,
            "cached_tokens": request.num_cached,
            "output_tokens": len(request.token_times),
            "queue_ms": _ms(request.queueing),
            "ttft_ms": _ms(request.ttft),
            "tpot_ms": _ms(request.tpot),
            "longest_gap_ms": _ms(request.longest_gap),
            "class": "proactive" if request.is_proactive else "reactive",
        }


def _first_of(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return as many of the first entries as one message may hold."""
    size = 0
    for index, entry in enumerate(entries[:MAX_ENTRIES]):
        size += _size_of(entry)
        if index and size > MAX_BYTES:
            return entries[:index]
    return entries[:MAX_ENTRIES]


def _size_of(entry: Mapping[str, Any]) -> int:
    """Return about the bytes of an entry as JSON."""
    num_ids = sum(len(entry.get(name, ())) for name in ("decode", "preempted"))
    return 400 + 12 * num_ids + 30 * len(entry.get("prefill", ()))


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)
