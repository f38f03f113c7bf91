"""The KV cache: arena, rows, sequences and masks, moved together. Nothing else writes a row, a mask cell or a position."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as List

import numpy as np
from numpy.typing import DTypeLike

from staticllm.core import ModelShape
from staticllm.kvcache.arena import Arena
from staticllm.kvcache.mask import MaskBuilder
from staticllm.kvcache.rows import RowAllocator
from staticllm.kvcache.sequence import Sequence
from staticllm.kvcache.step import Step, StepBuffers

PAD_TOKEN = 0  # idle rows hold it; nobody sees what becomes of them


class KVCache:
    """All that lives from one step to the next.

    ``capacities`` are the capacities that programs exist for, ascending; the arena grows along them.
    A step is ``fill`` (before the device runs) and ``commit`` (after); a failed step is simply not committed.
    """

    def __init__(self, shape: ModelShape, capacities: List[int], dtype: DTypeLike) -> None:
        self.capacities = sorted(set(capacities) - {0})
        self.max_rows = self.capacities[-1]
        self.arena = Arena(shape.row_states, self.max_rows, dtype)
        self.rows = RowAllocator(self.max_rows)
        self._masks = MaskBuilder()

    def open(self) -> Sequence:
        """A new, empty sequence. Costs nothing: stale rows are hidden by the mask, not zeroed."""
        return Sequence(self.max_rows)

    def fork(self, sequence: Sequence, length: int) -> Sequence:
        """A new sequence that begins with the first ``length`` tokens of another. Their rows are stored once."""
        assert length <= len(sequence)
        forked, rows = self.open(), sequence.rows[:length]
        self.rows.share(rows)
        forked.append(sequence.tokens[:length], rows)
        return forked

    def cut(self, sequence: Sequence, length: int) -> None:
        """Forget all tokens of a sequence but the first ``length``."""
        if length < len(sequence):
            self.rows.free(sequence.cut(length))

    def close(self, sequence: Sequence) -> None:
        """Give all rows of a sequence back."""
        self.cut(sequence, 0)

    def capacity_for(self, num_rows: int) -> int:
        """The smallest capacity that shows ``num_rows`` rows."""
        return self.capacities[bisect_left(self.capacities, num_rows)]

    def fill(self, step: Step, buffers: StepBuffers) -> None:
        """Write ids, positions, masks and logit rows of a step; give the arena the step's capacity."""
        if step.variant.capacity:
            self.arena.set_capacity(step.variant.capacity, self.rows.high_row)
        buffers.input_ids.fill(PAD_TOKEN)
        buffers.position_ids.fill(0)
        last_rows = []
        for start, segment in step.placed():
            count, first = len(segment.tokens), len(segment.sequence)
            buffers.input_ids[0, start : start + count] = segment.tokens
            buffers.position_ids[..., start : start + count] = np.arange(first, first + count)
            last_rows.append(start + count - 1)
        buffers.logit_rows[: len(last_rows)] = last_rows
        self._masks.paint(step, buffers)

    def commit(self, step: Step, buffers: StepBuffers) -> None:
        """Keep what a step computed: rows, tokens and positions, together. Grows the arena where the rows need it."""
        for start, segment in step.placed():
            count = len(segment.tokens)
            used = self.rows.high_row
            rows = self.rows.allocate(count)
            needed = max(used, int(rows[-1]) + 1)
            if needed > self.arena.capacity or not used:
                self.arena.set_capacity(self.capacity_for(needed), used)
            contiguous = int(rows[-1]) - int(rows[0]) + 1 == count
            target = slice(int(rows[0]), int(rows[-1]) + 1) if contiguous else rows
            self.arena.write(target, buffers.presents, slice(start, start + count))
            segment.sequence.append(segment.tokens.tolist(), rows)

    def reset(self) -> None:
        """Take all rows back and zero them, whatever an interrupted step left behind. Open sequences are void."""
        self.rows = RowAllocator(self.max_rows)
        self._masks = MaskBuilder()
        self.arena.clear()
