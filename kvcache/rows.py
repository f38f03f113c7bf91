"""Which rows are free. Low rows go first: the highest row in use decides the capacity, and so the cost, of a step."""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray


class RowAllocator:
    """Hands out row indices ``0 .. max_rows - 1``, lowest first, and takes them back."""

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self._free = list(range(max_rows))  # a sorted list is a heap
        self._used = np.zeros(max_rows, bool)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.max_rows - len(self._free)

    @property
    def high_row(self) -> int:
        """One more than the highest row in use; 0 if none is."""
        used = np.flatnonzero(self._used)
        return int(used[-1]) + 1 if used.size else 0

    def allocate(self, count: int) -> NDArray[np.intp]:
        """``count`` rows, ascending. The caller has checked ``num_free``."""
        assert count <= self.num_free, f"{count} rows asked, {self.num_free} free"
        rows = np.array([heapq.heappop(self._free) for _ in range(count)], np.intp)
        self._used[rows] = True
        return rows

    def free(self, rows: NDArray[np.intp]) -> None:
        """Take rows back. Freeing a free row is a bug."""
        assert self._used[rows].all(), "a row is freed twice"
        self._used[rows] = False
        for row in rows.tolist():
            heapq.heappush(self._free, row)
