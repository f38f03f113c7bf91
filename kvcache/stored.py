"""A sequence outside the arena: in the host pool, in a snapshot on disk, or on its way there."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from staticllm.kvcache.arena import Arena
from staticllm.kvcache.groups import StateGroup
from staticllm.kvcache.sequence import Sequence, StateSet

ArraySpec = tuple[tuple[int, ...], np.dtype[Any]]
"""Shape and element type of an array."""


@dataclass(frozen=True)
class StoredSequence:
    """Tokens, and for each group of states their keys or values ``[n, heads, length, head_dim]``.

    ``states`` are the recurrent ones after the last token.
    """

    tokens: tuple[int, ...]
    kv: tuple[NDArray[Any], ...]
    states: StateSet = ()

    @cached_property
    def ids(self) -> NDArray[np.int64]:
        """The tokens ``[length]``, ready to be compared."""
        return np.array(self.tokens, np.int64)

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in (*self.kv, *self.states))

    def prefix(self, length: int) -> StoredSequence:
        """The first ``length`` tokens; all of them where there are recurrent states."""
        assert length == len(self.tokens) or not self.states
        return StoredSequence(self.tokens[:length], tuple(array[:, :, :length] for array in self.kv), self.states)


@dataclass(frozen=True)
class StoredLayout:
    """The arrays that a stored sequence of this model must have. ``states``: shape and type of each recurrent state."""

    groups: tuple[StateGroup, ...]
    states: tuple[ArraySpec, ...]
    vocab_size: int

    def kv_shapes(self, count: int) -> list[ArraySpec]:
        """Shape ``[n, heads, count, head_dim]`` and type of the keys or values of each group."""
        return [(group.shape(count), np.dtype(group.dtype)) for group in self.groups]

    def fits(self, stored: StoredSequence) -> bool:
        """Whether a stored sequence has these shapes and types."""
        kv = [(array.shape, array.dtype) for array in stored.kv]
        states = [(array.shape, array.dtype) for array in stored.states]
        return kv == self.kv_shapes(len(stored.tokens)) and states == list(self.states)


class SequenceCopy:
    """A sequence on its way out of the arena, in chunks. Nothing may change the sequence meanwhile; its slots may move."""

    def __init__(self, arena: Arena, sequence: Sequence, states: StateSet) -> None:
        self.sequence, self._states = sequence, states
        self._arena, self._arrays, self._done = arena, arena.host_memory(len(sequence)), 0

    def advance(self, count: int) -> bool:
        """Copy the next ``count`` slots. True if none are left."""
        start, self._done = self._done, min(self._done + count, len(self.sequence))
        self._arena.read(as_index(self.sequence.slots[start : self._done]), self._arrays, slice(start, self._done))
        return self._done == len(self.sequence)

    @property
    def stored(self) -> StoredSequence:
        """The whole copy, once ``advance`` has returned True."""
        assert self._done == len(self.sequence), "slots are missing"
        return StoredSequence(tuple(self.sequence.tokens), self._arrays, self._states)


def as_index(slots: NDArray[np.intp]) -> slice | NDArray[np.intp]:
    """A slice where the slots are contiguous: copying through a slice is several times faster."""
    if slots.size and int(slots[-1]) - int(slots[0]) + 1 == slots.size and (slots[1:] > slots[:-1]).all():
        return slice(int(slots[0]), int(slots[-1]) + 1)
    return slots
