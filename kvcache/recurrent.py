"""Recurrent states: of fixed size, one set per sequence, replaced by every step.

Programs read one set and write another. A sequence that runs again and again stays *live*: after a step the new set is copied
over the old one, and nothing else. When another sequence runs, the one before takes its set along.
"""

from __future__ import annotations

from collections.abc import Sequence as List
from typing import Any

import numpy as np
from numpy.typing import NDArray

from staticllm.core import RecurrentState
from staticllm.kvcache.sequence import Sequence, StateSet


class StateBank:
    """``past`` is what programs read, ``present`` what they write: arrays of the states' shapes, bound once."""

    def __init__(self, states: List[RecurrentState]) -> None:
        self.past: list[NDArray[Any]] = [np.zeros(state.shape, state.dtype) for state in states]
        self.present: list[NDArray[Any]] = [np.zeros(state.shape, state.dtype) for state in states]
        self._live: Sequence | None = None

    def __bool__(self) -> bool:
        """Whether the model has any."""
        return bool(self.past)

    def enter(self, sequence: Sequence) -> None:
        """Before a step: its states become those that programs read. A new sequence begins with zeros."""
        if self._live is sequence:
            return
        if self._live is not None:
            self._live.states = _copies(self.past)
        for index, array in enumerate(self.past):
            array[:] = 0 if sequence.states is None else sequence.states[index]
        self._live, sequence.states = sequence, None

    def commit(self) -> None:
        """After a step: what it wrote is what the next one reads."""
        for past, present in zip(self.past, self.present, strict=True):
            past[:] = present

    def written(self) -> StateSet:
        """Copies of what the last step wrote."""
        return _copies(self.present)

    def of(self, sequence: Sequence) -> StateSet | None:
        """Copies of the states of a sequence; None where it has run nothing."""
        if self._live is sequence:
            return _copies(self.past)
        return None if sequence.states is None else _copies(sequence.states)

    def forget(self, sequence: Sequence) -> None:
        """Forget the states of a sequence; it begins with zeros again."""
        sequence.states = None
        if self._live is sequence:
            self._live = None

    def clear(self) -> None:
        """Forget everything, numbers that are not finite included."""
        self._live = None
        for array in (*self.past, *self.present):
            array[:] = 0


def _copies(arrays: List[NDArray[Any]]) -> StateSet:
    return tuple(array.copy() for array in arrays)
