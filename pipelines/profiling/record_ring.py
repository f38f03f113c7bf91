"""The last records of an engine, by number: statistics, the page and other processes read them, each from its own place on."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from staticllm.pipelines.profiling.records import Record

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
