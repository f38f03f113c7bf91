"""The arena holds pre-allocated KV slots in one block of memory per group of states, and shows them at any stride.

States of equal shape share one array, so that a commit over all layers is one assignment. The storage of a group of n states
is ``[n, heads * num_slots * head_dim]``; at stride T the front of each line is read as ``[heads, T, head_dim]``. A program
always gets a contiguous ``[1, heads, T, head_dim]`` that starts at the same address for every T.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from staticllm.core import KVState

from .groups import StateGroup, group_states, place_of

Array = NDArray[Any]
Allocate = Callable[[int], NDArray[np.uint8]]
"""Returns an array of so many bytes. Raises ``MemoryError``."""


class Arena:
    """The slots of all KV states of a model. ``stride`` is the current number of slots per head in memory.

    ``allocate`` gives the memory; by default it is the host's.

    ``is_read``: whether a call whose blocks run one by one reads slots, so that none may be at another place before it ends.

    Pages enter memory when they are first written.

    Runs on the engine's thread.
    """

    def __init__(self, states: Sequence[KVState], num_slots: int, allocate: Allocate | None = None) -> None:
        self.num_slots = num_slots
        self.num_states = len(states)
        self.groups = group_states(tuple(states))
        self._storage: list[Array] = []
        self._memory: list[mmap.mmap | None] = []  # of each storage; None for an array of numpy's own
        for group in self.groups:
            size = group.heads * num_slots * group.head_dim
            shape = (len(group.members), size)
            memory, storage = (
                _untouched(shape, group.dtype) if allocate is None else _zeros(shape, group.dtype, allocate)
            )
            self._memory.append(memory)
            self._storage.append(storage)
        self.stride = num_slots
        self.is_read = False
        self._views = self._views_at(num_slots)

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots; constant for the life of the arena."""
        return sum(storage.nbytes for storage in self._storage)

    @property
    def blocks(self) -> tuple[Array, ...]:
        """The memory of each group, ``[n, heads * num_slots * head_dim]``; the same arrays for the life of the arena."""
        return tuple(self._storage)

    @property
    def addresses(self) -> list[int]:
        """The address of each group's memory; constant for the life of the arena."""
        return [storage.ctypes.data for storage in self._storage]

    def state_view(self, index: int, stride: int) -> Array:
        """Return state ``index`` as a program sees it: ``[1, heads, stride, head_dim]``, contiguous."""
        number, line = place_of(self.groups, index)
        return _view(self._storage[number], self.groups[number], stride)[line : line + 1]

    @property
    def views(self) -> tuple[Array, ...]:
        """The slots of each group at the current stride: ``[n, heads, stride, head_dim]``."""
        return tuple(self._views)

    def set_stride(self, stride: int, used_slots: int) -> None:
        """Change the stride in place and keep slots ``0 .. used_slots - 1``. Copies nothing if none is in use."""
        assert used_slots <= min(stride, self.num_slots) and stride <= self.num_slots
        if stride == self.stride:
            return
        assert not self.is_read, "a call in flight reads the slots at their old places"
        views = self._views_at(stride)
        if used_slots:
            for old, new in zip(self._views, views, strict=True):
                restride(old, new, used_slots)
        self.stride = stride
        self._views = views

    def write(self, slots: slice | Array, presents: Sequence[Array], rows: slice) -> None:
        """Copy rows ``rows`` of each group's presents, ``[n, heads, S, head_dim]``, to arena slots ``slots``."""
        places = (slice(None), slice(None), *self._places(slots))
        for view, present in zip(self._views, presents, strict=True):
            view[places] = present[:, :, rows]

    def _places(self, slots: slice | Array) -> tuple[slice | Array, ...]:
        """Return the index of slots behind the axes of states and heads of a view."""
        return (slots,)

    def host_memory(self, count: int) -> tuple[Array, ...]:
        """Return memory for ``count`` slots outside the arena: per group ``[n, heads, count, head_dim]``, uninitialised."""
        return tuple(np.empty(group.shape(count), group.dtype) for group in self.groups)

    def read(self, slots: slice | Array, into: Sequence[Array], target: slice) -> None:
        """Copy arena slots ``slots`` to slots ``target`` of ``into``, per group ``[n, heads, count, head_dim]``."""
        for view, copied in zip(self._views, into, strict=True):
            part = copied[:, :, target]
            if isinstance(slots, slice) or view.ndim > part.ndim:
                part[:] = view[(slice(None), slice(None), *self._places(slots))]
                continue
            for line, lines in zip(view, part, strict=True):  # several times as fast as view[:, :, slots]
                np.take(line, slots, axis=1, out=lines, mode="clip")

    def move(self, old: Array, new: Array) -> None:
        """Copy slots ``old [n]`` to slots ``new [n]``."""
        assert not self.is_read, "a call in flight reads the slots at their old places"
        for view in self._views:
            view[(slice(None), slice(None), *self._places(new))] = view[(slice(None), slice(None), *self._places(old))]

    def clear(self) -> None:
        """Zero all slots. Needed only after non-finite values: a masked NaN still makes a weighted sum NaN.

        Pages of a mapping are given back, and are zero when they are read again; filling them would bring all into memory.
        """
        for memory, storage in zip(self._memory, self._storage, strict=True):
            if not give_back(memory, 0, storage.nbytes):
                storage.fill(0)

    def release(self) -> None:
        """Give the memory of all slots back. The arena must not be used any more."""
        self._storage = []
        self._memory = []
        self._views = []

    def _views_at(self, stride: int) -> list[Array]:
        return [_view(storage, group, stride) for storage, group in zip(self._storage, self.groups, strict=True)]


def give_back(memory: mmap.mmap | None, start: int, end: int) -> bool:
    """Give the pages between two bytes of a mapping, ``end`` not included, back to the system; they read as zeros.

    A page of which a part lies outside stays. Return False if there is no mapping, or it cannot.
    """
    if memory is None:
        return False
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    last = end if end == len(memory) else end // mmap.PAGESIZE * mmap.PAGESIZE
    if first >= last:
        return True
    try:
        memory.madvise(mmap.MADV_DONTNEED, first, last - first)
    except (OSError, AttributeError):
        return False
    return True


def _untouched(shape: tuple[int, int], dtype: type[np.generic]) -> tuple[mmap.mmap | None, Array]:
    """Return zeros that take no memory before they are written, page by page; and the mapping behind them, if there is one.

    Numpy asks Linux for pages of 2 MiB. The used slots are at the front of each line of an arena, and one such page holds most
    of a line, so nearly all of them would be in memory after the first prompt.

    Raises:
        MemoryError: there is not enough.
    """
    count = math.prod(shape)
    if sys.platform != "linux" or not count:
        return None, np.zeros(shape, dtype)
    num_bytes = count * np.dtype(dtype).itemsize
    try:
        memory = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{num_bytes / 1e9:.1f} GB cannot be allocated") from error
    with suppress(OSError, AttributeError):  # a system without such pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory, np.frombuffer(memory, dtype, count).reshape(shape)


def _zeros(shape: tuple[int, int], dtype: type[np.generic], allocate: Allocate) -> tuple[None, Array]:
    """Return zeros in memory that ``allocate`` gives. Raises ``MemoryError``."""
    storage = allocate(math.prod(shape) * np.dtype(dtype).itemsize).view(dtype).reshape(shape)
    storage.fill(0)
    return None, storage


def _view(storage: Array, group: StateGroup, stride: int) -> Array:
    """Return all members of a group at ``stride``: ``[n, heads, stride, head_dim]``."""
    item = storage.itemsize
    line = group.head_dim * storage.itemsize
    front = storage[:, : group.heads * stride * group.head_dim]
    return np.lib.stride_tricks.as_strided(front, group.shape(stride), (storage.strides[0], stride * line, line, item))


def restride(old: Array, new: Array, used_slots: int) -> None:
    """Move head by head, from the last one when growing, so that no slot is overwritten before it has moved."""
    heads = old.shape[1]
    is_growing = new.shape[2] > old.shape[2]
    for head in range(heads - 1, 0, -1) if is_growing else range(1, heads):
        new[:, head, :used_slots] = old[:, head, :used_slots]
