"""The KV cache: arena, slots, sequences and masks, moved together. Nothing else writes a slot, a mask cell or a position."""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Iterator
from collections.abc import Sequence as List
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from staticllm.core import ModelShape
from staticllm.kvcache.arena import Arena
from staticllm.kvcache.finite import is_finite
from staticllm.kvcache.mask import MaskBuilder, paint_positions
from staticllm.kvcache.recurrent import StateBank
from staticllm.kvcache.sequence import Sequence
from staticllm.kvcache.slot_allocator import SlotAllocator
from staticllm.kvcache.step import Step, StepBuffers
from staticllm.kvcache.stored import SequenceCopy, StoredLayout, StoredSequence, as_index

PAD_TOKEN = 0  # idle rows hold it; no token sees what becomes of them


class KVCache:
    """Everything that lives from one step to the next: arena, slots, sequences, recurrent states and masks.

    ``kv_lens`` are the KV lengths that programs exist for, ascending; the arena grows along them.
    A step is ``fill`` (before the device runs) and ``commit`` (after); a failed step is simply not committed. After an exception
    inside a transaction ``is_void`` is True: slots and sequences may disagree, and only ``reset`` helps.

    Runs on the engine's thread.
    """

    def __init__(self, shape: ModelShape, kv_lens: List[int]) -> None:
        self.kv_lens = sorted(set(kv_lens) - {0})
        self.num_slots = self.kv_lens[-1]
        self.arena = Arena(shape.kv_states, self.num_slots)
        self.slots = SlotAllocator(self.num_slots)
        self.states = StateBank(shape.recurrent_states)
        self._masks = MaskBuilder()
        state_specs = tuple((array.shape, array.dtype) for array in self.states.past)
        self.layout = StoredLayout(self.arena.groups, state_specs, shape.vocab_size)
        self.is_void = False
        self._open: weakref.WeakSet[Sequence] = weakref.WeakSet()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """A block in which slots change hands. If it raises, ``is_void`` is True until ``reset``."""
        self.is_void = True
        yield
        self.is_void = False

    def open(self) -> Sequence:
        """A new, empty sequence. Costs nothing: stale slots are hidden by the mask, not zeroed."""
        sequence = Sequence(self.num_slots)
        self._open.add(sequence)
        return sequence

    def fork(self, sequence: Sequence, length: int) -> Sequence:
        """A new sequence that begins with the first ``length`` tokens of another. Their slots are stored once."""
        assert length <= len(sequence) and (length == len(sequence) or not self.states)
        forked, slots = self.open(), sequence.slots[:length]
        self.slots.share(slots)
        forked.append(sequence.tokens[:length], slots)
        forked.states = self.states.of(sequence) if self.states else None
        return forked

    def cut(self, sequence: Sequence, length: int) -> None:
        """Forget all tokens of a sequence but the first ``length``; all of them where a recurrent state knows them."""
        if length < len(sequence):
            self.slots.free(sequence.cut(0 if self.states else length))
            self.states.forget(sequence)

    def close(self, sequence: Sequence) -> None:
        """Give all slots of a sequence back."""
        self.cut(sequence, 0)

    def copy_out(self, sequence: Sequence) -> StoredSequence:
        """The slots of a sequence, copied out of the arena; the sequence stays."""
        copy = self.begin_copy(sequence)
        copy.advance(len(sequence))
        return copy.stored

    def begin_copy(self, sequence: Sequence) -> SequenceCopy:
        """The same copy, to be made in chunks."""
        return SequenceCopy(self.arena, sequence, self.states.of(sequence) or ())

    def bring_back(self, stored: StoredSequence, length: int) -> Sequence:
        """A new sequence in the arena that begins with the first ``length`` tokens of a stored one."""
        assert length == len(stored.tokens) or not self.states
        sequence = self.open()
        sequence.states = stored.states or None
        slots = self._allocate(length)
        self.arena.write(as_index(slots), stored.kv, slice(0, length))
        sequence.append(stored.tokens[:length], slots)
        return sequence

    def compact(self) -> None:
        """Move high slots into low free ones, if a smaller KV length then shows all of them."""
        count = self.slots.num_used
        if not count or self.kv_len_for(self.slots.high_slot) == self.kv_len_for(count):
            return
        sources, targets = self.slots.move_down()
        self.arena.move(sources, targets)
        places = np.arange(self.num_slots)
        places[sources] = targets
        for sequence in self._open:
            sequence.move(places)

    def kv_len_for(self, num_slots: int) -> int:
        """The smallest KV length that shows ``num_slots`` slots."""
        return self.kv_lens[bisect_left(self.kv_lens, num_slots)]

    def fill(self, step: Step, buffers: StepBuffers) -> None:
        """Before the device runs: write ids, positions, masks and logit rows of a step, and give the arena the step's stride."""
        if step.variant.kv_len:
            self.arena.set_stride(step.variant.kv_len, self.slots.high_slot)
        if self.states:
            self.states.enter(step.segments[0].sequence)
        buffers.input_ids.fill(PAD_TOKEN)
        buffers.position_ids.fill(0)
        buffers.logit_rows.fill(0)
        logit_rows: list[int] = []
        for start, segment in step.placed():
            count, first = len(segment.tokens), len(segment.sequence)
            buffers.input_ids[0, start : start + count] = segment.tokens
            buffers.position_ids[..., start : start + count] = np.arange(first, first + count)
            logit_rows.extend(range(start + count - segment.num_logits, start + count))
        buffers.logit_rows[: len(logit_rows)] = logit_rows
        self._masks.paint(step, buffers)
        if buffers.key_positions is not None and buffers.query_positions is not None:
            paint_positions(step, buffers.key_positions[0, 0, 0], buffers.query_positions[0, 0, :, 0])

    def are_finite(self, step: Step, buffers: StepBuffers) -> list[bool]:
        """For each segment of a step that ran: whether its new keys, values and states are finite and may be kept."""
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
        self, step: Step, buffers: StepBuffers, accepted: List[int] | None = None
    ) -> list[StoredSequence | None]:
        """Keep what a step computed: keys and values, tokens and positions, together.

        Args:
            step: The step that ``fill`` was called with.
            buffers: The memory that the program wrote to.
            accepted: For each segment, how many of its tokens are kept, from the front; 0 for a segment that failed, fewer
                than all for a draft that was accepted in part. None for all. A recurrent state cannot be cut: all or 0.

        Returns:
            For each segment with ``to_host`` its stored sequence, which never enters the arena; None for the others.
        """
        stored: list[StoredSequence | None] = []
        with self.transaction():
            for index, (start, segment) in enumerate(step.placed()):
                count = len(segment.tokens) if accepted is None else accepted[index]
                assert count in (0, len(segment.tokens)) or not self.states, "a recurrent state cannot be cut"
                rows = slice(start, start + count)
                stored.append(self._to_host(segment.tokens, buffers, rows) if count and segment.to_host else None)
                if not count or segment.to_host:
                    continue
                slots = self._allocate(count)
                self.arena.write(as_index(slots), buffers.presents, rows)
                segment.sequence.append(segment.tokens[:count].tolist(), slots)
                self.states.commit()
        return stored

    def _to_host(self, tokens: NDArray[np.int64], buffers: StepBuffers, rows: slice) -> StoredSequence:
        """A whole fresh sequence, taken from the program's outputs."""
        kv = tuple(present[:, :, rows].copy() for present in buffers.presents)
        return StoredSequence(tuple(tokens.tolist()), kv, self.states.written())

    def _allocate(self, count: int) -> NDArray[np.intp]:
        """Slots for ``count`` tokens. Grows the arena where they need it."""
        used = self.slots.high_slot
        slots = self.slots.allocate(count)
        needed = max(used, int(slots[-1]) + 1) if count else used
        if needed > self.arena.stride or not used:
            self.arena.set_stride(self.kv_len_for(needed), used)
        return slots

    def reset(self) -> None:
        """Take all slots back and zero them, whatever an interrupted step left behind. Open sequences are void."""
        self.slots = SlotAllocator(self.num_slots)
        self._masks = MaskBuilder()
        self._open = weakref.WeakSet()
        self.arena.clear()
        self.states.clear()
        self.is_void = False
