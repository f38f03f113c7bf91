"""Which rows are free. Low rows go first: the highest row in use decides the capacity, and so the cost, of a step."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.intp]


class RowAllocator:
    """Hands out row indices ``0 .. max_rows - 1``, lowest first. A row may have several holders: a shared prefix."""

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self._free = list(range(max_rows))  # a sorted list is a heap
        self._holders = np.zeros(max_rows, np.int32)
        self.num_shared = 0  # rows with several holders
        self._high: int | None = 0  # None when it must be looked up

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.max_rows - len(self._free)

    @property
    def high_row(self) -> int:
        """One more than the highest row in use; 0 if none is."""
        if self._high is None:
            used = np.flatnonzero(self._holders)
            self._high = int(used[-1]) + 1 if used.size else 0
        return self._high

    def allocate(self, count: int) -> Rows:
        """``count`` rows, ascending, held once. The caller has checked ``num_free``."""
        assert count <= self.num_free, f"{count} rows asked, {self.num_free} free"
        rows = np.array([heapq.heappop(self._free) for _ in range(count)], np.intp)
        self._holders[rows] = 1
        if self._high is not None and count:
            self._high = max(self._high, int(rows[-1]) + 1)
        return rows

    def share(self, rows: Rows) -> None:
        """One more holder for rows that are in use."""
        assert (self._holders[rows] > 0).all(), "a free row is shared"
        self._holders[rows] += 1
        self.num_shared += int(np.count_nonzero(self._holders[rows] == 2))

    def free(self, rows: Rows) -> None:
        """One holder less; rows without a holder are free again. Freeing a free row is a bug."""
        assert (self._holders[rows] > 0).all(), "a row is freed twice"
        self._holders[rows] -= 1
        self._high = None
        if self.num_shared:
            self.num_shared -= int(np.count_nonzero(self._holders[rows] == 1))
        for row in rows[self._holders[rows] == 0].tolist():
            heapq.heappush(self._free, row)

    def count_own(self, rows: Rows) -> int:
        """How many of ``rows`` would be free without the holder who asks."""
        return int(np.count_nonzero(self._holders[rows] == 1))

    def count_only(self, holders: Sequence[Rows]) -> int:
        """How many rows would be free without these holders."""
        if len(holders) < 2:  # asked before every call, and most often there is one
            return self.count_own(holders[0]) if holders else 0
        rows, counts = np.unique(np.concatenate(holders), return_counts=True)
        return int(np.count_nonzero(self._holders[rows] == counts))

    def move_down(self) -> tuple[Rows, Rows]:
        """Exchange the highest used rows for the lowest free ones, so that no hole is left: (sources, targets)."""
        used = np.flatnonzero(self._holders)
        sources = used[used >= used.size]
        targets = np.flatnonzero(self._holders[: used.size] == 0)
        self._holders[targets] = self._holders[sources]
        self._holders[sources] = 0
        self._free = list(range(used.size, self.max_rows))
        self._high = int(used.size)
        return sources, targets
