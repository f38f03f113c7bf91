"""The mask builder is the only code that decides which token sees which.

A mask row belongs to one token; its columns are the T arena slots, then the S rows of the step. A token sees the arena slots of
its own sequence and the rows of its own segment up to itself, both limited by the window of the mask kind. An idle row sees
itself, so that no softmax is empty.
"""

from __future__ import annotations

import weakref

import numpy as np
from numpy.typing import NDArray

from staticllm.core import MaskKind, Variant
from staticllm.ports import HIDDEN, VISIBLE

from .sequence import KVSequence
from .step import BufferPool, Segment, Step, StepBuffers

Mask = NDArray[np.float32]


class MaskBuilder:
    """Paints the masks of a step into its buffers; for a single decoding row it repaints only the changed cells."""

    def __init__(self) -> None:
        # the last step of each pool, if it had a single row: its variant, sequence, epoch and length
        self._painted: weakref.WeakKeyDictionary[BufferPool, tuple[Variant, KVSequence, int, int]]
        self._painted = weakref.WeakKeyDictionary()

    def paint(self, step: Step, buffers: StepBuffers) -> None:
        """Write the masks ``[1, 1, S, T+S]`` of a step into ``buffers``."""
        before = self._painted.pop(buffers.pool, None)  # all variants of a pool share the memory of their masks
        if before is not None and _is_continuation(step, before):
            _paint_continuation(step, buffers, before[3])
        else:
            for kind, mask in buffers.masks.items():
                _paint_all(step, mask[0, 0], kind)
        if step.variant.rows == 1:
            sequence = step.segments[0].sequence
            self._painted[buffers.pool] = (step.variant, sequence, sequence.epoch, len(sequence))


def _is_continuation(step: Step, painted: tuple[Variant, KVSequence, int, int]) -> bool:
    sequence = step.segments[0].sequence
    variant, owner, epoch, length = painted
    same = variant == step.variant and owner is sequence and epoch == sequence.epoch
    return same and length <= len(sequence)


def _paint_continuation(step: Step, buffers: StepBuffers, before: int) -> None:
    """Paint what has changed since the sequence had ``before`` tokens."""
    sequence = step.segments[0].sequence
    now = len(sequence)
    for kind, mask in buffers.masks.items():
        line = mask[0, 0, 0]
        line[sequence.slots[before:now]] = VISIBLE
        if not kind.sees_all:
            line[sequence.slots[kind.first(before) : kind.first(now)]] = HIDDEN


def _paint_all(step: Step, mask: Mask, kind: MaskKind) -> None:
    rows = step.variant.rows
    kv_len = step.variant.kv_len
    mask.fill(HIDDEN)
    own = mask[:, kv_len:]
    np.fill_diagonal(own, VISIBLE)
    for start, segment in step.placed():
        count = len(segment.tokens)
        if not count:
            continue
        stop = start + count
        assert stop <= rows
        first = None if kind.sees_all else _first_seen(segment, kind)
        _paint_own(own[start:stop, start:stop], first, len(segment.sequence))
        if len(segment.sequence):
            _paint_past(mask[start:stop, :kv_len], segment, first)


def _first_seen(segment: Segment, kind: MaskKind) -> NDArray[np.int64]:
    """Return the first position that each token of the segment sees: ``[count]``."""
    length = len(segment.sequence)
    return np.array([kind.first(length + index) for index in range(len(segment.tokens))])


def _paint_own(square: Mask, first: NDArray[np.int64] | None, length: int) -> None:
    """Paint the causal mask ``[count, count]`` among the tokens of one segment, which begins at position ``length``."""
    position = np.arange(len(square))
    seen = position[:, None] >= position[None, :]
    if first is not None:
        seen &= position[None, :] + length >= first[:, None]
    square[seen] = VISIBLE


def _paint_past(past: Mask, segment: Segment, first: NDArray[np.int64] | None) -> None:
    """Paint the arena slots that each token of the segment sees: ``past [count, T]``."""
    slots = segment.sequence.slots
    if first is None:
        past[:, slots] = VISIBLE
        return
    for line, position in zip(past, first, strict=True):
        line[slots[position:]] = VISIBLE


def paint_positions(step: Step, keys: NDArray[np.int32], queries: NDArray[np.int32]) -> None:
    """Write the positions of all slots and rows that the step sees, ``keys [T+S]``, and of its own rows, ``queries [S]``.

    Columns of other sequences keep their old values: a token that does not see a column does not use its position. An idle row
    has position 0.
    """
    kv_len = step.variant.kv_len
    keys[kv_len:] = 0
    queries[:] = 0
    for start, segment in step.placed():
        first = len(segment.sequence)
        count = len(segment.tokens)
        keys[segment.sequence.slots] = np.arange(first)
        positions = np.arange(first, first + count)
        keys[kv_len + start : kv_len + start + count] = positions
        queries[start : start + count] = positions
