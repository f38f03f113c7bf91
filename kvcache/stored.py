"""Holds a sequence outside the arena, for the host pool and for snapshots, and copies it there in chunks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .arena import Arena
from .groups import StateGroup
from .sequence import PLAIN, Conditions, KVSequence, StateSet

ArraySpec = tuple[tuple[int, ...], np.dtype[Any]]
"""Shape and element type of an array."""


@dataclass(frozen=True)
class StoredSequence:
    """A sequence in host memory: ``tokens``, and ``kv`` with one array ``[n, heads, length, head_dim]`` per group of states.

    ``states`` holds the recurrent states after the last token, ``conditions`` those under which it was computed.
    """

    tokens: tuple[int, ...]
    kv: tuple[NDArray[Any], ...]
    states: StateSet = ()
    conditions: Conditions = PLAIN

    @cached_property
    def ids(self) -> NDArray[np.int64]:
        """The tokens as an array ``[length]``, for comparisons."""
        return np.array(self.tokens, np.int64)

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in (*self.kv, *self.states))

    def prefix(self, length: int) -> StoredSequence:
        """Return the first ``length`` tokens without a copy; with recurrent states ``length`` must be all of them."""
        assert length == len(self.tokens) or not self.states
        kv = tuple(array[:, :, :length] for array in self.kv)
        return StoredSequence(self.tokens[:length], kv, self.states, self.conditions)


@dataclass(frozen=True)
class StoredLayout:
    """The shapes and types that a stored sequence of a model must have. ``states`` has one entry per recurrent state.

    ``num_factors``: how many sets of RoPE factors the model has.
    """

    groups: tuple[StateGroup, ...]
    states: tuple[ArraySpec, ...]
    vocab_size: int
    num_factors: int = 1

    def kv_shapes(self, count: int) -> list[ArraySpec]:
        """Return the shape ``[n, heads, count, head_dim]`` and the type of each group's keys or values."""
        return [(group.shape(count), np.dtype(group.dtype)) for group in self.groups]

    def fits(self, stored: StoredSequence) -> bool:
        """Return whether a stored sequence has these shapes and types."""
        kv = [(array.shape, array.dtype) for array in stored.kv]
        states = [(array.shape, array.dtype) for array in stored.states]
        return kv == self.kv_shapes(len(stored.tokens)) and states == list(self.states)


class SequenceCopy:
    """Copies a sequence out of the arena in chunks. Meanwhile its tokens must not change; its slots may move."""

    def __init__(self, arena: Arena, sequence: KVSequence, states: StateSet) -> None:
        self.sequence = sequence
        self._states = states
        self._arena = arena
        self._arrays = arena.host_memory(len(sequence))
        self._done = 0

    def advance(self, count: int) -> bool:
        """Copy the next ``count`` slots. Return whether the copy is complete."""
        start = self._done
        self._done = min(self._done + count, len(self.sequence))
        self._arena.read(as_index(self.sequence.slots[start : self._done]), self._arrays, slice(start, self._done))
        return self._done == len(self.sequence)

    @property
    def stored(self) -> StoredSequence:
        """The complete copy; to be read after ``advance`` has returned True."""
        assert self._done == len(self.sequence), "slots are missing"
        return StoredSequence(tuple(self.sequence.tokens), self._arrays, self._states, self.sequence.conditions)


def as_index(slots: NDArray[np.intp]) -> slice | NDArray[np.intp]:
    """Return ``slots [n]`` as a slice if they are contiguous and ascending, because a slice is copied several times faster."""
    if slots.size == 1:
        return slice(int(slots[0]), int(slots[0]) + 1)
    if slots.size and int(slots[-1]) - int(slots[0]) + 1 == slots.size and (slots[1:] > slots[:-1]).all():
        return slice(int(slots[0]), int(slots[-1]) + 1)
    return slots
