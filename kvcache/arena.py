"""The pre-allocated rows: one block of memory for each state, allocated once, viewed at any capacity.

States of equal shape share one array, so that a commit over all layers is one assignment. Storage of a group of n states is
``[n, heads * max_capacity * head_dim]``; at capacity T the front of each line is read as ``[heads, T, head_dim]``. A program
always gets a contiguous ``[1, heads, T, head_dim]`` that starts at the same address, whatever T is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from staticllm.core import RowState, RowType

Array = NDArray[Any]
HOST_TYPES: dict[RowType, type[np.generic]] = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16, "u8": np.uint8}
"""What numpy holds rows in. It has no bf16, and the host only moves rows, never reads them."""


@dataclass(frozen=True)
class RowGroup:
    """States with the same heads, head size and type: their places in the model's list, and their common storage."""

    members: tuple[int, ...]
    heads: int
    head_dim: int
    storage: Array  # [n, heads * max_capacity * head_dim]

    def view(self, capacity: int) -> Array:
        """All members at ``capacity``: ``[n, heads, capacity, head_dim]``."""
        front = self.storage[:, : self.heads * capacity * self.head_dim]
        return np.lib.stride_tricks.as_strided(
            front,
            (len(self.members), self.heads, capacity, self.head_dim),
            (
                self.storage.strides[0],
                capacity * self.head_dim * self.storage.itemsize,
                self.head_dim * self.storage.itemsize,
                self.storage.itemsize,
            ),
        )


def group_states(states: Sequence[RowState]) -> list[tuple[tuple[int, ...], int, int, type[np.generic]]]:
    """``(members, heads, head_dim, type)`` for each distinct shape and type, in order of first appearance."""
    groups: dict[tuple[int, int, type[np.generic]], list[int]] = {}
    for index, state in enumerate(states):
        groups.setdefault((state.heads, state.head_dim, HOST_TYPES[state.row_type]), []).append(index)
    return [(tuple(members), *key) for key, members in groups.items()]


class Arena:
    """Rows for all states of a model. ``capacity`` is the stride that the memory has now."""

    def __init__(self, states: Sequence[RowState], max_capacity: int) -> None:
        self.max_capacity = max_capacity
        self.num_states = len(states)
        self.groups = []
        for members, heads, head_dim, dtype in group_states(states):
            storage = np.empty((len(members), heads * max_capacity * head_dim), dtype)
            storage.fill(0)  # touch every page now: memory must not grow while generating
            self.groups.append(RowGroup(members, heads, head_dim, storage))
        self.capacity = max_capacity
        self._views = [group.view(max_capacity) for group in self.groups]

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows; constant for the life of the arena."""
        return sum(group.storage.nbytes for group in self.groups)

    def state_view(self, index: int, capacity: int) -> Array:
        """State ``index`` as a program sees it: ``[1, heads, capacity, head_dim]``, contiguous."""
        for group in self.groups:
            if index in group.members:
                line = group.members.index(index)
                return group.view(capacity)[line : line + 1]
        raise IndexError(index)

    def set_capacity(self, capacity: int, used_rows: int) -> None:
        """Re-stride in place, keeping rows ``0 .. used_rows``. Costs nothing if they are none or nothing changes."""
        assert used_rows <= min(capacity, self.max_capacity) and capacity <= self.max_capacity
        if capacity == self.capacity:
            return
        targets = [group.view(capacity) for group in self.groups]
        if used_rows:
            for source, target in zip(self._views, targets, strict=True):
                _restride(source, target, used_rows)
        self.capacity, self._views = capacity, targets

    def write(self, rows: slice | Array, presents: Sequence[Array], source: slice) -> None:
        """Copy rows ``source`` of each group's presents, ``[n, heads, S, head_dim]``, to arena rows ``rows``."""
        for view, present in zip(self._views, presents, strict=True):
            view[:, :, rows] = present[:, :, source]

    def rows_for(self, count: int) -> tuple[Array, ...]:
        """Memory for ``count`` rows outside the arena, for each group ``[n, heads, count, head_dim]``."""
        return tuple(np.empty((*view.shape[:2], count, view.shape[3]), view.dtype) for view in self._views)

    def read(self, rows: slice | Array, into: Sequence[Array], target: slice) -> None:
        """Copy arena rows ``rows`` to rows ``target`` of such memory."""
        for view, copied in zip(self._views, into, strict=True):
            copied[:, :, target] = view[:, :, rows]

    def move(self, sources: Array, targets: Array) -> None:
        """Copy rows ``sources`` to rows ``targets``."""
        for view in self._views:
            view[:, :, targets] = view[:, :, sources]

    def clear(self) -> None:
        """Zero everything. Only needed after non-finite numbers: a hidden NaN still poisons a weighted sum."""
        for group in self.groups:
            group.storage.fill(0)


def _restride(source: Array, target: Array, used_rows: int) -> None:
    """Move head by head, from the far end when growing, so that nothing is overwritten before it has moved."""
    heads = source.shape[1]
    growing = target.shape[2] > source.shape[2]
    for head in range(heads - 1, 0, -1) if growing else range(1, heads):
        target[:, head, :used_rows] = source[:, head, :used_rows]
