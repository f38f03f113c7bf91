"""Allocates slots, the lowest first, because the highest slot in use determines the KV length and the cost of a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Slots = NDArray[np.intp]


class SlotAllocator:
    """Allocates slot indices ``0 .. num_slots - 1``, the lowest first. A slot of a shared prefix has several holders.

    A holder is *active*, or *idle* while its slots may be taken for others at any time. Both are counted per slot when a holder
    changes, so that no count looks at the slots of all holders.

    Several slots are consecutive where that does not need a higher slot: consecutive slots are copied several times faster.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._num_unused = num_slots  # slots without a holder
        self._is_free = np.ones(num_slots, np.bool_)
        self._lowest = 0  # no slot below it is free
        self._holders = np.zeros(num_slots, np.int32)
        self._active = np.zeros(num_slots, np.int32)  # the active ones among the holders
        self.num_active = 0  # slots with an active holder
        self.num_shared = 0  # slots with several holders
        self._high: int | None = 0  # None if it must be computed

    @property
    def num_free(self) -> int:
        """The number of slots that may be allocated."""
        return self._num_unused

    @property
    def num_used(self) -> int:
        """The number of slots with at least one holder."""
        return self.num_slots - self._num_unused

    @property
    def high_slot(self) -> int:
        """One more than the highest slot in use; 0 if none is."""
        if self._high is None:
            used = np.flatnonzero(self._holders)
            self._high = int(used[-1]) + 1 if used.size else 0
        return self._high

    def allocate(self, count: int) -> Slots:
        """Return slots ``[count]``, ascending, each with one active holder. The caller has checked ``num_free``."""
        assert count <= self.num_free, f"{count} slots asked, {self.num_free} free"
        if not count:
            return np.zeros(0, np.intp)
        slots = self._find(count)
        self._take(slots)
        return slots

    def _take(self, slots: Slots) -> None:
        """Give free ``slots [n]``, n > 0, an active holder each."""
        self._holders[slots] = 1
        self._active[slots] = 1
        self.num_active += len(slots)
        self._is_free[slots] = False
        self._num_unused -= len(slots)
        if self._high is not None:
            self._high = max(self._high, int(slots[-1]) + 1)

    def _find(self, count: int) -> Slots:
        """Return the lowest free slots ``[count]``; the lowest consecutive ones, if they are no higher than what is in use."""
        first = self._lowest + int(self._is_free[self._lowest :].argmax())
        self._lowest = first
        if count == 1:
            return np.array([first], np.intp)
        end = max(self.high_slot, first) + count  # all slots from ``high_slot`` on are free
        free = np.flatnonzero(self._is_free[first:end]) + first
        starts = np.flatnonzero(free[count - 1 :] - free[: free.size - count + 1] == count - 1)
        if starts.size and free[starts[0] + count - 1] < max(self.high_slot, int(free[count - 1]) + 1):
            return free[starts[0] : starts[0] + count]
        return free[:count]

    def share(self, slots: Slots) -> None:
        """Add an active holder to ``slots [n]``, which are in use."""
        counts = self._holders[slots] + 1
        assert (counts > 1).all(), "a free slot is shared"
        self._holders[slots] = counts
        self.num_shared += int(np.count_nonzero(counts == 2))
        self.mark_active(slots)

    def free(self, slots: Slots) -> None:
        """Remove an active holder of ``slots [n]``; slots without a holder are free again. Freeing a free slot is a bug."""
        counts = self._holders[slots] - 1
        assert (counts >= 0).all(), "a slot is freed twice"
        self.mark_idle(slots)
        self._holders[slots] = counts
        self._high = None
        if self.num_shared:
            self.num_shared -= int(np.count_nonzero(counts == 1))
        freed = slots[counts == 0]
        if freed.size:
            self._give_back(freed)

    def _give_back(self, slots: Slots) -> None:
        """Let ``slots [n]``, n > 0, which have lost their last holders, be free."""
        self._is_free[slots] = True
        self._num_unused += len(slots)
        self._lowest = min(self._lowest, int(slots.min()))

    def mark_idle(self, slots: Slots) -> None:
        """Let an active holder of ``slots [n]`` be idle."""
        counts = self._active[slots] - 1
        assert (counts >= 0).all(), "a slot has no active holder"
        self._active[slots] = counts
        self.num_active -= int(np.count_nonzero(counts == 0))

    def mark_active(self, slots: Slots) -> None:
        """Let an idle holder of ``slots [n]`` be active."""
        counts = self._active[slots] + 1
        self._active[slots] = counts
        self.num_active += int(np.count_nonzero(counts == 1))

    def count_own(self, slots: Slots) -> int:
        """Return how many of ``slots [n]`` have exactly one holder."""
        return int(np.count_nonzero(self._holders[slots] == 1))

    def count_freed(self, slots: Slots) -> int:
        """Return how many of the ``slots [n]`` of an active holder would have no active one without it."""
        return int(np.count_nonzero(self._active[slots] == 1)) if self.num_shared else len(slots)

    def count_only(self, holders: Sequence[Slots]) -> int:
        """Return how many slots would be free without these holders, each given by its slots ``[n]``."""
        if len(holders) < 2:  # the usual case, and this runs before every call
            return self.count_own(holders[0]) if holders else 0
        counts = np.zeros(self.num_slots, np.int32)
        for slots in holders:
            counts[slots] += 1
        return int(np.count_nonzero((counts == self._holders) & (counts > 0)))

    def move_down(self) -> tuple[Slots, Slots]:
        """Exchange the highest used slots for the lowest free ones, so that no gap remains.

        Return the old slots ``[n]`` and the new ones ``[n]`` of the move.
        """
        used = np.flatnonzero(self._holders)
        old = used[used >= used.size]
        new = np.flatnonzero(self._holders[: used.size] == 0)
        for counts in (self._holders, self._active):
            counts[new] = counts[old]
            counts[old] = 0
        self._is_free[: used.size] = False
        self._is_free[used.size :] = True
        self._lowest = int(used.size)
        self._high = int(used.size)
        return old, new
