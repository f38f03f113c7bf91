"""Which slots are free. Low slots go first: the highest slot in use decides the KV length, and so the cost, of a step."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Slots = NDArray[np.intp]


class SlotAllocator:
    """Hands out slot indices ``0 .. num_slots - 1``, lowest first. A slot may have several holders: a shared prefix."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots))  # a sorted list is a heap
        self._holders = np.zeros(num_slots, np.int32)
        self.num_shared = 0  # slots with several holders
        self._high: int | None = 0  # None when it must be looked up

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_slots - len(self._free)

    @property
    def high_slot(self) -> int:
        """One more than the highest slot in use; 0 if none is."""
        if self._high is None:
            used = np.flatnonzero(self._holders)
            self._high = int(used[-1]) + 1 if used.size else 0
        return self._high

    def allocate(self, count: int) -> Slots:
        """``count`` slots ``[count]``, ascending, with one holder. The caller has checked ``num_free``."""
        assert count <= self.num_free, f"{count} slots asked, {self.num_free} free"
        slots = np.array([heapq.heappop(self._free) for _ in range(count)], np.intp)
        self._holders[slots] = 1
        if self._high is not None and count:
            self._high = max(self._high, int(slots[-1]) + 1)
        return slots

    def share(self, slots: Slots) -> None:
        """Add a holder to slots that are in use."""
        assert (self._holders[slots] > 0).all(), "a free slot is shared"
        self._holders[slots] += 1
        self.num_shared += int(np.count_nonzero(self._holders[slots] == 2))

    def free(self, slots: Slots) -> None:
        """Remove a holder; slots without a holder are free again. Freeing a free slot is a bug."""
        assert (self._holders[slots] > 0).all(), "a slot is freed twice"
        self._holders[slots] -= 1
        self._high = None
        if self.num_shared:
            self.num_shared -= int(np.count_nonzero(self._holders[slots] == 1))
        for slot in slots[self._holders[slots] == 0].tolist():
            heapq.heappush(self._free, slot)

    def count_own(self, slots: Slots) -> int:
        """How many of ``slots`` have one holder, and would be free without it."""
        return int(np.count_nonzero(self._holders[slots] == 1))

    def count_only(self, holders: Sequence[Slots]) -> int:
        """How many slots would be free without these holders."""
        if len(holders) < 2:  # asked before every call, and most often there is one
            return self.count_own(holders[0]) if holders else 0
        slots, counts = np.unique(np.concatenate(holders), return_counts=True)
        return int(np.count_nonzero(self._holders[slots] == counts))

    def move_down(self) -> tuple[Slots, Slots]:
        """Exchange the highest used slots for the lowest free ones, so that no hole is left: (sources, targets)."""
        used = np.flatnonzero(self._holders)
        sources = used[used >= used.size]
        targets = np.flatnonzero(self._holders[: used.size] == 0)
        self._holders[targets] = self._holders[sources]
        self._holders[sources] = 0
        self._free = list(range(used.size, self.num_slots))
        self._high = int(used.size)
        return sources, targets
