"""The mask builder: the only truth about who sees what.

A mask row belongs to one token; its columns are the T arena rows, then the S rows of the step itself. A token sees the
arena rows of its own sequence and the step's rows of its own segment up to itself, both cut by the window of the mask kind.
An idle row sees itself, so that no softmax is empty.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from staticllm.core import Variant
from staticllm.kvcache.sequence import Sequence
from staticllm.kvcache.step import HIDDEN, Segment, Step, StepBuffers

VISIBLE = 0.0
Mask = NDArray[np.float32]


class MaskBuilder:
    """Paints the masks of a step into its buffers, repainting only what changed for a decoding sequence."""

    def __init__(self) -> None:
        self._painted: tuple[Variant, Sequence, int, int] | None = None  # a single row: whose, in which epoch, how far

    def paint(self, step: Step, buffers: StepBuffers) -> None:
        """Write every cell that differs from what the step needs."""
        if step.variant.rows == 1 and self._is_continuation(step):
            self._paint_continuation(step, buffers)
        else:
            for kind, mask in buffers.masks.items():
                _paint_all(step, mask[0, 0], kind.window)
        self._painted = None  # all variants share the memory of their masks
        if step.variant.rows == 1:
            sequence = step.segments[0].sequence
            self._painted = (step.variant, sequence, sequence.epoch, len(sequence))

    def _is_continuation(self, step: Step) -> bool:
        if self._painted is None:
            return False
        sequence = step.segments[0].sequence
        variant, owner, epoch, length = self._painted
        same = variant == step.variant and owner is sequence and epoch == sequence.epoch
        return same and length <= len(sequence)

    def _paint_continuation(self, step: Step, buffers: StepBuffers) -> None:
        assert self._painted is not None
        sequence = step.segments[0].sequence
        before, now = self._painted[3], len(sequence)
        for kind, mask in buffers.masks.items():
            line = mask[0, 0, 0]
            line[sequence.rows[before:now]] = VISIBLE
            if kind.window is not None:
                line[sequence.rows[_first_seen(before, kind.window) : _first_seen(now, kind.window)]] = HIDDEN


def _first_seen(query: int, window: int | None) -> int:
    """The first position that the token at position ``query`` sees."""
    return 0 if window is None else max(0, query - window + 1)


def _paint_all(step: Step, mask: Mask, window: int | None) -> None:
    rows, capacity = step.variant.rows, step.variant.capacity
    mask.fill(HIDDEN)
    own = mask[:, capacity:]
    np.fill_diagonal(own, VISIBLE)
    for start, segment in step.placed():
        count = len(segment.tokens)
        if not count:
            continue
        stop = start + count
        assert stop <= rows
        _paint_own(own[start:stop, start:stop], window)
        if len(segment.sequence):
            _paint_past(mask[start:stop, :capacity], segment, window)


def _paint_own(square: Mask, window: int | None) -> None:
    """Causal among the tokens of one segment."""
    position = np.arange(len(square))
    distance = position[:, None] - position[None, :]
    seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    square[seen] = VISIBLE


def _paint_past(past: Mask, segment: Segment, window: int | None) -> None:
    """The arena rows that each token of the segment sees."""
    length, rows = len(segment.sequence), segment.sequence.rows
    if window is None:
        past[:, rows] = VISIBLE
        return
    for index in range(len(segment.tokens)):
        past[index, rows[_first_seen(length + index, window) :]] = VISIBLE


def paint_positions(step: Step, keys: NDArray[np.int32], queries: NDArray[np.int32]) -> None:
    """The positions of all rows that the step sees, ``keys [T+S]``, and of its own, ``queries [S]``, in their sequences.

    Rows of others keep what they hold: whoever does not see them does not see their positions. An idle row is at 0.
    """
    capacity = step.variant.capacity
    keys[capacity:] = queries[:] = 0
    for start, segment in step.placed():
        first, count = len(segment.sequence), len(segment.tokens)
        keys[segment.sequence.rows] = np.arange(first)
        positions = np.arange(first, first + count)
        keys[capacity + start : capacity + start + count] = positions
        queries[start : start + count] = positions
