"""What one device call processes, and the memory that it reads and writes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from staticllm.core import MaskKind, ModelShape, Variant
from staticllm.kvcache.arena import group_states
from staticllm.kvcache.sequence import Sequence

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

    Variants of equal rows never run at once: they share all of it (``make_buffers``), their masks being fronts of one array.
    """

    def __init__(
        self, variant: Variant, shape: ModelShape, dtype: DTypeLike, larger: StepBuffers | None = None
    ) -> None:
        self.variant = variant
        self._groups = group_states(shape.row_states)
        if larger is None:
            self._allocate(shape, dtype)
        else:
            self._share(larger)

    def _allocate(self, shape: ModelShape, dtype: DTypeLike) -> None:
        rows, num_logit_rows = self.variant.rows, shape.num_logit_rows(self.variant)
        lead = {0: (1,), 2: (1,), 3: (shape.position_copies, 1)}[shape.position_rank]
        self.input_ids = np.zeros((1, rows), np.int64)
        self.position_ids = np.zeros((*lead, rows), np.int64)
        self.masks: dict[MaskKind, NDArray[np.float32]] = {
            kind: np.full((1, 1, rows, self.variant.capacity + rows), HIDDEN, np.float32) for kind in shape.masks
        }
        self.logit_rows = np.zeros(num_logit_rows, np.int64)
        self.logits = np.zeros((1, num_logit_rows, shape.vocab_size), np.float32)
        self.presents: list[NDArray[Any]] = [
            np.zeros((len(members), heads, rows, head_dim), dtype) for members, heads, head_dim in self._groups
        ]

    def _share(self, larger: StepBuffers) -> None:
        rows, columns = self.variant.rows, self.variant.capacity + self.variant.rows
        assert larger.variant.rows == rows and larger.variant.capacity >= self.variant.capacity
        self.input_ids, self.position_ids = larger.input_ids, larger.position_ids
        self.logit_rows, self.logits, self.presents = larger.logit_rows, larger.logits, larger.presents
        self.masks = {
            kind: mask.reshape(-1)[: rows * columns].reshape(1, 1, rows, columns) for kind, mask in larger.masks.items()
        }

    def present_of(self, index: int) -> NDArray[Any]:
        """The new rows of state ``index``: ``[1, heads, S, head_dim]``."""
        for (members, _, _), present in zip(self._groups, self.presents, strict=True):
            if index in members:
                line = members.index(index)
                return present[line : line + 1]
        raise IndexError(index)


def make_buffers(variants: Iterable[Variant], shape: ModelShape, dtype: DTypeLike) -> dict[Variant, StepBuffers]:
    """Buffers for all variants; those with the same number of rows share the memory of the largest of them."""
    largest: dict[int, StepBuffers] = {}
    buffers = {}
    for variant in sorted(variants, key=lambda variant: -variant.capacity):
        buffers[variant] = StepBuffers(variant, shape, dtype, largest.get(variant.rows))
        largest.setdefault(variant.rows, buffers[variant])
    return buffers


def buffer_bytes(variants: Iterable[Variant], shape: ModelShape, row_bytes: int) -> int:
    """Bytes that ``make_buffers`` takes, without taking them. ``row_bytes`` are those of one token's keys and values."""
    capacities: dict[int, int] = {}
    for variant in variants:
        capacities[variant.rows] = max(capacities.get(variant.rows, 0), variant.capacity)
    masks = sum(rows * (rows + capacity) * 4 for rows, capacity in capacities.items()) * len(shape.masks)
    logits = sum(shape.num_logit_rows(Variant(rows, 0)) * shape.vocab_size * 4 for rows in capacities)
    return masks + logits + sum(rows * row_bytes for rows in capacities)
