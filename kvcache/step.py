"""What one device call processes, and the memory that it reads and writes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray
from staticllm.kvcache.arena import group_states
from staticllm.kvcache.sequence import Sequence

from staticllm.core import MaskKind, ModelShape, Variant

HIDDEN = float(np.finfo(np.float16).min)
"""What hides a key. Finite in every type a device may convert it to, and exp() of it is 0 in all of them."""


@dataclass(frozen=True)
class Segment:
    """The next tokens of one sequence, placed side by side in a step's rows."""

    sequence: Sequence
    tokens: NDArray[np.int64]


@dataclass(frozen=True)
class Step:
    """One call of one variant: the segments fill its rows from the front, idle rows follow."""

    variant: Variant
    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        assert sum(len(segment.tokens) for segment in self.segments) <= self.variant.rows

    def placed(self) -> Iterator[tuple[int, Segment]]:
        """Each segment with its first row."""
        start = 0
        for segment in self.segments:
            yield start, segment
            start += len(segment.tokens)


class StepBuffers:
    """The host memory of one variant's ports, allocated once; programs bind it, ``KVCache`` fills it.

    ``input_ids [1, S]`` and ``position_ids [..., S]`` int64, ``masks[kind] [1, 1, S, T+S]`` f32, ``logit_rows [R]`` int64,
    ``logits [1, R, vocab]`` f32, ``presents``: for each group of states ``[n, heads, S, head_dim]``.
    """

    def __init__(self, variant: Variant, shape: ModelShape, dtype: DTypeLike) -> None:
        rows, columns = variant.rows, variant.capacity + variant.rows
        self.variant = variant
        self.input_ids = np.zeros((1, rows), np.int64)
        lead = {0: (1,), 2: (1,), 3: (shape.position_copies, 1)}[shape.position_rank]
        self.position_ids = np.zeros((*lead, rows), np.int64)
        self.masks: dict[MaskKind, NDArray[np.float32]] = {
            kind: np.full((1, 1, rows, columns), HIDDEN, np.float32) for kind in shape.masks
        }
        num_logit_rows = shape.num_logit_rows(variant)
        self.logit_rows = np.zeros(num_logit_rows, np.int64)
        self.logits = np.zeros((1, num_logit_rows, shape.vocab_size), np.float32)
        self._members = [members for members, _, _ in group_states(shape.row_states)]
        self.presents: list[NDArray[Any]] = [
            np.zeros((len(members), heads, rows, head_dim), dtype)
            for members, heads, head_dim in group_states(shape.row_states)
        ]

    def present_of(self, index: int) -> NDArray[Any]:
        """The new rows of state ``index``: ``[1, heads, S, head_dim]``."""
        for members, present in zip(self._members, self.presents, strict=True):
            if index in members:
                line = members.index(index)
                return present[line : line + 1]
        raise IndexError(index)
