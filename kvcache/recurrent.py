"""Recurrent states have a fixed size, exist once per sequence and are replaced by every step.

Programs read one set of arrays and write another. A sequence that runs in consecutive steps stays *live*: after each step the
new set is copied over the old one, and nothing else is copied. When another sequence runs, the previous one saves its set.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from staticllm.core import RecurrentState

from .sequence import KVSequence, StateSet


class StateBank:
    """The arrays that programs read (``past``) and write (``present``), in the states' shapes; programs bind them once."""

    def __init__(self, states: Sequence[RecurrentState]) -> None:
        self.past: list[NDArray[Any]] = [np.zeros(state.shape, state.dtype) for state in states]
        self.present: list[NDArray[Any]] = [np.zeros(state.shape, state.dtype) for state in states]
        self._live: KVSequence | None = None

    def __bool__(self) -> bool:
        return bool(self.past)

    def release(self) -> None:
        """Give the memory of all states back. They must not be used any more."""
        self.past = []
        self.present = []
        self._live = None

    def enter(self, sequence: KVSequence) -> None:
        """Make the states of a sequence the ones that programs read; zeros for a new sequence. Called before a step."""
        if self._live is sequence:
            return
        if self._live is not None:
            self._live.states = _copies(self.past)
        for index, array in enumerate(self.past):
            array[:] = 0 if sequence.states is None else sequence.states[index]
        self._live = sequence
        sequence.states = None

    def commit(self) -> None:
        """Copy the states that the step wrote to those that the next step reads. Called after a step."""
        for past, present in zip(self.past, self.present, strict=True):
            past[:] = present

    def written(self) -> StateSet:
        """Return copies of the states that the last step wrote, in the states' shapes."""
        return _copies(self.present)

    def of(self, sequence: KVSequence) -> StateSet | None:
        """Return copies of the states of a sequence; None if it has not run yet."""
        if self._live is sequence:
            return _copies(self.past)
        return None if sequence.states is None else _copies(sequence.states)

    def forget(self, sequence: KVSequence) -> None:
        """Drop the states of a sequence; it begins with zeros again."""
        sequence.states = None
        if self._live is sequence:
            self._live = None

    def clear(self) -> None:
        """Zero all arrays and drop the live sequence."""
        self._live = None
        for array in (*self.past, *self.present):
            array[:] = 0


def _copies(arrays: Sequence[NDArray[Any]]) -> StateSet:
    return tuple(array.copy() for array in arrays)
