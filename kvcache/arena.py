"""The pre-allocated rows: one block of memory for each state, allocated once, viewed at any stride.

States of equal shape share one array, so that a commit over all layers is one assignment. Storage of a group of n states is
``[n, heads * num_slots * head_dim]``; at stride T the front of each line is read as ``[heads, T, head_dim]``. A program
always gets a contiguous ``[1, heads, T, head_dim]`` that starts at the same address, whatever T is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from staticllm.core import KVState, KVType

Array = NDArray[Any]
HOST_TYPES: dict[KVType, type[np.generic]] = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16, "u8": np.uint8}
"""What numpy holds rows in. It has no bf16, and the host only moves rows, never reads them."""


@dataclass(frozen=True)
class StateGroup:
    """States with the same heads, head size and type: their places in the model's list, and their common storage."""

    members: tuple[int, ...]
    heads: int
    head_dim: int
    storage: Array  # [n, heads * num_slots * head_dim]

    def view(self, stride: int) -> Array:
        """All members at ``stride``: ``[n, heads, stride, head_dim]``."""
        front = self.storage[:, : self.heads * stride * self.head_dim]
        return np.lib.stride_tricks.as_strided(
            front,
            (len(self.members), self.heads, stride, self.head_dim),
            (
                self.storage.strides[0],
                stride * self.head_dim * self.storage.itemsize,
                self.head_dim * self.storage.itemsize,
                self.storage.itemsize,
            ),
        )


def group_states(states: Sequence[KVState]) -> list[tuple[tuple[int, ...], int, int, type[np.generic]]]:
    """``(members, heads, head_dim, type)`` for each distinct shape and type, in order of first appearance."""
    groups: dict[tuple[int, int, type[np.generic]], list[int]] = {}
    for index, state in enumerate(states):
        groups.setdefault((state.heads, state.head_dim, HOST_TYPES[state.kv_type]), []).append(index)
    return [(tuple(members), *key) for key, members in groups.items()]


class Arena:
    """Rows for all states of a model. ``stride`` is the stride that the memory has now."""

    def __init__(self, states: Sequence[KVState], num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_states = len(states)
        self.groups = []
        for members, heads, head_dim, dtype in group_states(states):
            storage = np.empty((len(members), heads * num_slots * head_dim), dtype)
            storage.fill(0)  # touch every page now: memory must not grow while generating
            self.groups.append(StateGroup(members, heads, head_dim, storage))
        self.stride = num_slots
        self._views = [group.view(num_slots) for group in self.groups]

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows; constant for the life of the arena."""
        return sum(group.storage.nbytes for group in self.groups)

    def state_view(self, index: int, stride: int) -> Array:
        """State ``index`` as a program sees it: ``[1, heads, stride, head_dim]``, contiguous."""
        for group in self.groups:
            if index in group.members:
                line = group.members.index(index)
                return group.view(stride)[line : line + 1]
        raise IndexError(index)

    def set_stride(self, stride: int, used_slots: int) -> None:
        """Re-stride in place, keeping rows ``0 .. used_slots``. Costs nothing if they are none or nothing changes."""
        assert used_slots <= min(stride, self.num_slots) and stride <= self.num_slots
        if stride == self.stride:
            return
        targets = [group.view(stride) for group in self.groups]
        if used_slots:
            for source, target in zip(self._views, targets, strict=True):
                _restride(source, target, used_slots)
        self.stride, self._views = stride, targets

    def write(self, slots: slice | Array, presents: Sequence[Array], source: slice) -> None:
        """Copy rows ``source`` of each group's presents, ``[n, heads, S, head_dim]``, to arena slots ``slots``."""
        for view, present in zip(self._views, presents, strict=True):
            view[:, :, slots] = present[:, :, source]

    def host_memory(self, count: int) -> tuple[Array, ...]:
        """Memory for ``count`` rows outside the arena, for each group ``[n, heads, count, head_dim]``."""
        return tuple(np.empty((*view.shape[:2], count, view.shape[3]), view.dtype) for view in self._views)

    def read(self, slots: slice | Array, into: Sequence[Array], target: slice) -> None:
        """Copy arena slots ``slots`` to rows ``target`` of such memory."""
        for view, copied in zip(self._views, into, strict=True):
            copied[:, :, target] = view[:, :, slots]

    def move(self, sources: Array, targets: Array) -> None:
        """Copy rows ``sources`` to rows ``targets``."""
        for view in self._views:
            view[:, :, targets] = view[:, :, sources]

    def clear(self) -> None:
        """Zero everything. Only needed after non-finite numbers: a hidden NaN still poisons a weighted sum."""
        for group in self.groups:
            group.storage.fill(0)


def _restride(source: Array, target: Array, used_slots: int) -> None:
    """Move head by head, from the far end when growing, so that nothing is overwritten before it has moved."""
    heads = source.shape[1]
    growing = target.shape[2] > source.shape[2]
    for head in range(heads - 1, 0, -1) if growing else range(1, heads):
        target[:, head, :used_slots] = source[:, head, :used_slots]
