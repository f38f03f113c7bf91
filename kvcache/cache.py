"""The KV cache: arena, rows, sequences and masks, moved together. Nothing else writes a row, a mask cell or a position."""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Collection
from collections.abc import Sequence as List
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from staticllm.core import ModelShape
from staticllm.kvcache.arena import Arena
from staticllm.kvcache.finite import is_finite
from staticllm.kvcache.mask import MaskBuilder, paint_positions
from staticllm.kvcache.recurrent import StateBank
from staticllm.kvcache.sequence import Sequence, StateSet
from staticllm.kvcache.slot_allocator import RowAllocator
from staticllm.kvcache.step import Step, StepBuffers

PAD_TOKEN = 0  # idle rows hold it; nobody sees what becomes of them


@dataclass(frozen=True)
class StoredRows:
    """A sequence outside the arena: its tokens, and for each group of states their rows ``[n, heads, length, head_dim]``.

    ``states`` are the recurrent ones after the last token.
    """

    tokens: tuple[int, ...]
    rows: tuple[NDArray[Any], ...]
    states: StateSet = ()

    @cached_property
    def ids(self) -> NDArray[np.int64]:
        """The tokens, ready to be compared."""
        return np.array(self.tokens, np.int64)

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in (*self.rows, *self.states))


@dataclass(frozen=True)
class RowLayout:
    """What a sequence of this model is outside the arena. ``groups``: ``(n, heads, head_dim, type)`` of each group of states,
    ``states``: shape and type of each recurrent one."""

    groups: tuple[tuple[int, int, int, np.dtype[Any]], ...]
    states: tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]
    vocab_size: int

    def rows(self, count: int) -> list[tuple[tuple[int, ...], np.dtype[Any]]]:
        """Shape ``[n, heads, count, head_dim]`` and type of the rows of each group."""
        return [((members, heads, count, head_dim), dtype) for members, heads, head_dim, dtype in self.groups]

    def fits(self, stored: StoredRows) -> bool:
        """Whether stored rows have these shapes and types."""
        rows = [(array.shape, array.dtype) for array in stored.rows]
        states = [(array.shape, array.dtype) for array in stored.states]
        return rows == self.rows(len(stored.tokens)) and states == list(self.states)


class RowsCopy:
    """The rows of a sequence on their way out of the arena. Nothing may change the sequence meanwhile; its rows may move."""

    def __init__(self, arena: Arena, sequence: Sequence, states: StateSet) -> None:
        self.sequence, self._states = sequence, states
        self._arena, self._rows, self._done = arena, arena.rows_for(len(sequence)), 0

    def advance(self, count: int) -> bool:
        """Copy the next ``count`` rows. True if none are left."""
        start, self._done = self._done, min(self._done + count, len(self.sequence))
        self._arena.read(_as_index(self.sequence.rows[start : self._done]), self._rows, slice(start, self._done))
        return self._done == len(self.sequence)

    @property
    def stored(self) -> StoredRows:
        """What was copied, all of it."""
        assert self._done == len(self.sequence), "rows are missing"
        return StoredRows(tuple(self.sequence.tokens), self._rows, self._states)


class KVCache:
    """All that lives from one step to the next.

    ``capacities`` are the capacities that programs exist for, ascending; the arena grows along them.
    A step is ``fill`` (before the device runs) and ``commit`` (after); a failed step is simply not committed.
    """

    def __init__(self, shape: ModelShape, capacities: List[int]) -> None:
        self.capacities = sorted(set(capacities) - {0})
        self.max_rows = self.capacities[-1]
        self.arena = Arena(shape.row_states, self.max_rows)
        self.rows = RowAllocator(self.max_rows)
        self.states = StateBank(shape.recurrent_states)
        self._masks = MaskBuilder()
        self.layout = RowLayout(
            tuple((len(g.members), g.heads, g.head_dim, g.storage.dtype) for g in self.arena.groups),
            tuple((array.shape, array.dtype) for array in self.states.past),
            shape.vocab_size,
        )
        self.is_settled = True  # False while rows change hands, and after an exception ended that
        self._open: weakref.WeakSet[Sequence] = weakref.WeakSet()

    def open(self) -> Sequence:
        """A new, empty sequence. Costs nothing: stale rows are hidden by the mask, not zeroed."""
        sequence = Sequence(self.max_rows)
        self._open.add(sequence)
        return sequence

    def fork(self, sequence: Sequence, length: int) -> Sequence:
        """A new sequence that begins with the first ``length`` tokens of another. Their rows are stored once."""
        assert length <= len(sequence) and (length == len(sequence) or not self.states)
        forked, rows = self.open(), sequence.rows[:length]
        self.rows.share(rows)
        forked.append(sequence.tokens[:length], rows)
        forked.states = self.states.of(sequence) if self.states else None
        return forked

    def cut(self, sequence: Sequence, length: int) -> None:
        """Forget all tokens of a sequence but the first ``length``; all of them where a recurrent state knows them."""
        if length < len(sequence):
            self.rows.free(sequence.cut(0 if self.states else length))
            self.states.forget(sequence)

    def close(self, sequence: Sequence) -> None:
        """Give all rows of a sequence back."""
        self.cut(sequence, 0)

    def copy_out(self, sequence: Sequence) -> StoredRows:
        """The rows of a sequence, copied out of the arena; the sequence stays."""
        copy = self.begin_copy(sequence)
        copy.advance(len(sequence))
        return copy.stored

    def begin_copy(self, sequence: Sequence) -> RowsCopy:
        """The same, to be done piece by piece."""
        return RowsCopy(self.arena, sequence, self.states.of(sequence) or ())

    def bring_back(self, stored: StoredRows, length: int) -> Sequence:
        """A new sequence in the arena that begins with the first ``length`` tokens of a stored one."""
        assert length == len(stored.tokens) or not self.states
        sequence = self.open()
        sequence.states = stored.states or None
        rows = self._allocate(length)
        self.arena.write(_as_index(rows), stored.rows, slice(0, length))
        sequence.append(stored.tokens[:length], rows)
        return sequence

    def compact(self) -> None:
        """Move high rows into low free ones, if a smaller capacity then shows all of them."""
        count = self.rows.num_used
        if not count or self.capacity_for(self.rows.high_row) == self.capacity_for(count):
            return
        sources, targets = self.rows.move_down()
        self.arena.move(sources, targets)
        places = np.arange(self.max_rows)
        places[sources] = targets
        for sequence in self._open:
            sequence.move(places)

    def capacity_for(self, num_rows: int) -> int:
        """The smallest capacity that shows ``num_rows`` rows."""
        return self.capacities[bisect_left(self.capacities, num_rows)]

    def fill(self, step: Step, buffers: StepBuffers) -> None:
        """Write ids, positions, masks and logit rows of a step; give the arena the step's capacity."""
        if step.variant.capacity:
            self.arena.set_capacity(step.variant.capacity, self.rows.high_row)
        if self.states:
            self.states.enter(step.segments[0].sequence)
        buffers.input_ids.fill(PAD_TOKEN)
        buffers.position_ids.fill(0)
        buffers.logit_rows.fill(0)
        last_rows = []
        for start, segment in step.placed():
            count, first = len(segment.tokens), len(segment.sequence)
            buffers.input_ids[0, start : start + count] = segment.tokens
            buffers.position_ids[..., start : start + count] = np.arange(first, first + count)
            last_rows.append(start + count - 1)
        buffers.logit_rows[: len(last_rows)] = last_rows
        self._masks.paint(step, buffers)
        if buffers.key_positions is not None and buffers.query_positions is not None:
            paint_positions(step, buffers.key_positions[0, 0, 0], buffers.query_positions[0, 0, :, 0])

    def are_finite(self, step: Step, buffers: StepBuffers) -> list[bool]:
        """For each segment of a step that ran: whether its new rows, and the new states, are finite and may be kept."""
        count = sum(len(segment.tokens) for segment in step.segments)
        if not all(map(is_finite, self.states.present)):
            return [False] * len(step.segments)
        if all(is_finite(present[:, :, :count]) for present in buffers.presents):
            return [True] * len(step.segments)
        return [
            all(is_finite(present[:, :, start : start + len(segment.tokens)]) for present in buffers.presents)
            for start, segment in step.placed()
        ]

    def commit(
        self,
        step: Step,
        buffers: StepBuffers,
        keep: List[bool] | None = None,
        aside: Collection[int] = (),
    ) -> dict[int, StoredRows]:
        """Keep what a step computed: rows, tokens and positions, together. ``keep`` leaves out segments that failed.

        The rows of segments in ``aside``, fresh ones, are returned and never enter the arena.
        """
        self.is_settled, stored = False, {}
        for index, (start, segment) in enumerate(step.placed()):
            if keep and not keep[index]:
                continue
            count = len(segment.tokens)
            if index in aside:
                assert not len(segment.sequence), "only a fresh sequence can be set aside"
                taken = tuple(present[:, :, start : start + count].copy() for present in buffers.presents)
                stored[index] = StoredRows(tuple(segment.tokens.tolist()), taken, self.states.written())
                continue
            rows = self._allocate(count)
            self.arena.write(_as_index(rows), buffers.presents, slice(start, start + count))
            segment.sequence.append(segment.tokens.tolist(), rows)
            self.states.commit()
        self.is_settled = True
        return stored

    def _allocate(self, count: int) -> NDArray[np.intp]:
        """Rows for ``count`` tokens. Grows the arena where they need it."""
        used = self.rows.high_row
        rows = self.rows.allocate(count)
        needed = max(used, int(rows[-1]) + 1) if count else used
        if needed > self.arena.capacity or not used:
            self.arena.set_capacity(self.capacity_for(needed), used)
        return rows

    def reset(self) -> None:
        """Take all rows back and zero them, whatever an interrupted step left behind. Open sequences are void."""
        self.rows = RowAllocator(self.max_rows)
        self._masks = MaskBuilder()
        self._open = weakref.WeakSet()
        self.arena.clear()
        self.states.clear()
        self.is_settled = True


def _as_index(rows: NDArray[np.intp]) -> slice | NDArray[np.intp]:
    """A slice where the rows are contiguous: copying through one is several times faster."""
    if rows.size and int(rows[-1]) - int(rows[0]) + 1 == rows.size and (rows[1:] > rows[:-1]).all():
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return rows
