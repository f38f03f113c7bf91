"""Allocates slots, the lowest first, because the highest slot in use determines the KV length and the cost of a step."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Slots = NDArray[np.intp]


class SlotAllocator:
    """Allocates slot indices ``0 .. num_slots - 1``, the lowest first. A slot of a shared prefix has several holders."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots))  # a sorted list is a heap
        self._holders = np.zeros(num_slots, np.int32)
        self.num_shared = 0  # slots with several holders
        self._high: int | None = 0  # None if it must be computed

    @property
    def num_free(self) -> int:
        """The number of slots without a holder."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """The number of slots with at least one holder."""
        return self.num_slots - len(self._free)

    @property
    def high_slot(self) -> int:
        """One more than the highest slot in use; 0 if none is."""
        if self._high is None:
            used = np.flatnonzero(self._holders)
            self._high = int(used[-1]) + 1 if used.size else 0
        return self._high

    def allocate(self, count: int) -> Slots:
        """Return slots ``[count]``, ascending, each with one holder. The caller has checked ``num_free``."""
        assert count <= self.num_free, f"{count} slots asked, {self.num_free} free"
        slots = np.array([heapq.heappop(self._free) for _ in range(count)], np.intp)
        self._holders[slots] = 1
        if self._high is not None and count:
            self._high = max(self._high, int(slots[-1]) + 1)
        return slots

    def share(self, slots: Slots) -> None:
        """Add a holder to ``slots [n]``, which are in use."""
        assert (self._holders[slots] > 0).all(), "a free slot is shared"
        self._holders[slots] += 1
        self.num_shared += int(np.count_nonzero(self._holders[slots] == 2))

    def free(self, slots: Slots) -> None:
        """Remove a holder of ``slots [n]``; slots without a holder are free again. Freeing a free slot is a bug."""
        assert (self._holders[slots] > 0).all(), "a slot is freed twice"
        self._holders[slots] -= 1
        self._high = None
        if self.num_shared:
            self.num_shared -= int(np.count_nonzero(self._holders[slots] == 1))
        for slot in slots[self._holders[slots] == 0].tolist():
            heapq.heappush(self._free, slot)

    def count_own(self, slots: Slots) -> int:
        """Return how many of ``slots [n]`` have exactly one holder."""
        return int(np.count_nonzero(self._holders[slots] == 1))

    def count_only(self, holders: Sequence[Slots]) -> int:
        """Return how many slots would be free without these holders, each given by its slots ``[n]``."""
        if len(holders) < 2:  # the usual case, and this runs before every call
            return self.count_own(holders[0]) if holders else 0
        slots, counts = np.unique(np.concatenate(holders), return_counts=True)
        return int(np.count_nonzero(self._holders[slots] == counts))

    def move_down(self) -> tuple[Slots, Slots]:
        """Exchange the highest used slots for the lowest free ones, so that no gap remains.

        Return the sources ``[n]`` and the targets ``[n]`` of the move.
        """
        used = np.flatnonzero(self._holders)
        sources = used[used >= used.size]
        targets = np.flatnonzero(self._holders[: used.size] == 0)
        self._holders[targets] = self._holders[sources]
        self._holders[sources] = 0
        self._free = list(range(used.size, self.num_slots))
        self._high = int(used.size)
        return sources, targets
