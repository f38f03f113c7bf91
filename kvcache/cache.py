"""The KV cache is the only code that writes a slot, a mask cell or a position, and it changes all of them together."""

from __future__ import annotations

import sys
import weakref
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from staticllm.core import ModelShape
from staticllm.ports import HIDDEN, VISIBLE

from .arena import Allocate, Arena
from .cross_bank import CrossBank
from .finite import is_finite
from .mask import MaskBuilder, paint_positions
from .recurrent import StateBank
from .rotation import KeyRotations
from .sequence import PLAIN, Conditions, KVSequence
from .slot_allocator import SlotAllocator
from .step import Segment, Step, StepBuffers
from .stored import SequenceCopy, StoredLayout, StoredSequence, as_index

PAD_TOKEN = 0  # the token of idle rows; no other row sees them


class KVCache:
    """The state between two steps: arena, slots, sequences, recurrent states and masks.

    ``kv_lens`` holds the KV lengths of the programs, ascending; the stride of the arena is always one of them. A step calls
    ``fill`` before the device runs and ``commit`` after it; a failed step is not committed. After an exception inside a
    transaction ``is_void`` is True: slots and sequences may be inconsistent until ``reset``. ``allocate`` gives the memory of the
    slots; by default it is the host's.

    Runs on the engine's thread.
    """

    def __init__(self, shape: ModelShape, kv_lens: Sequence[int], allocate: Allocate | None = None) -> None:
        self.kv_lens = sorted(set(kv_lens) - {0})
        self.num_slots = self.kv_lens[-1]
        self.kv_states = shape.kv_states
        self.rope_limits = shape.rope_limits
        self.slot_bytes = shape.slot_bytes
        self.arena = self._make_arena(shape, allocate)
        self.slots = self._make_slots()
        self.states = StateBank(shape.recurrent_states)
        self.cross = CrossBank(shape, allocate)
        self._masks = MaskBuilder()
        state_specs = tuple((array.shape, array.dtype) for array in self.states.past)
        self.layout = StoredLayout(self.arena.groups, state_specs, shape.vocab_size, len(shape.rope_limits) + 1)
        self.is_void = False
        self._open: weakref.WeakSet[KVSequence] = weakref.WeakSet()

    def _make_arena(self, shape: ModelShape, allocate: Allocate | None) -> Arena:
        return Arena(shape.kv_states, self.num_slots, allocate)

    def _make_slots(self) -> SlotAllocator:
        return SlotAllocator(self.num_slots)

    @property
    def num_past(self) -> int:
        """The number of slots that a call reads: all up to the highest one in use."""
        return self.slots.high_slot

    @property
    def idle_page(self) -> int:
        """The page that no sequence has, for calls without a request. Only slots in pages have one."""
        return 0

    @property
    def reads_idle_slots(self) -> bool:
        """Whether a call reads slots of sequences that are not in it, so that idle ones cost time where they are."""
        return True

    @property
    def least_exact(self) -> int:
        """The fewest rows, and rows with logits, of a call whose results do not depend on what else it has."""
        return 1

    def transaction(self) -> Transaction:
        """A block in which slots change hands. If it raises, ``is_void`` is True until ``reset``."""
        return Transaction(self)

    def open(self, conditions: Conditions = PLAIN) -> KVSequence:
        """Return a new, empty sequence. No slot is zeroed: the mask hides stale ones."""
        sequence = KVSequence(conditions)
        self._open.add(sequence)
        return sequence

    def factors_of(self, length: int) -> int:
        """Return which RoPE factors the model takes for a text of ``length`` tokens: the number of limits that it exceeds."""
        return bisect_left(self.rope_limits, length)

    def conditions_at(self, conditions: Conditions, length: int) -> Conditions:
        """Return the conditions of keys in a text of ``length`` tokens, whatever factors the given ones have."""
        return replace(conditions, factors=self.factors_of(length))

    def left_of_factors(self, length: int) -> int:
        """Return how many tokens may follow ``length`` ones before the model takes other RoPE factors."""
        factors = self.factors_of(length)
        return self.rope_limits[factors] - length if factors < len(self.rope_limits) else sys.maxsize

    def has_outgrown(self, conditions: Conditions, length: int) -> bool:
        """Return whether the model takes other RoPE factors for ``length`` tokens than those of keys under these conditions."""
        return conditions.factors != self.factors_of(length)

    def renew(self, sequence: KVSequence, length: int) -> None:
        """Free the tokens of an active sequence, so that they are computed with the factors of a text of ``length`` tokens."""
        self.cut(sequence, 0)
        sequence.conditions = self.conditions_at(sequence.conditions, length)

    def fork(self, sequence: KVSequence, length: int) -> KVSequence:
        """Return a new sequence with the first ``length`` tokens of another. Both share the slots of these tokens."""
        assert length <= len(sequence) and (length == len(sequence) or not self.states)
        forked = self.open(sequence.conditions)
        slots = sequence.slots[:length]
        self.slots.share(slots)
        forked.append(sequence.tokens[:length], slots)
        forked.states = self.states.of(sequence) if self.states else None
        return forked

    def cut(self, sequence: KVSequence, length: int) -> None:
        """Keep the first ``length`` tokens of an active sequence; with recurrent states, which cannot be cut, keep none."""
        assert not sequence.is_idle, "an idle sequence is changed"
        if length < len(sequence):
            self.slots.free(sequence.cut(0 if self.states else length))
            self.states.forget(sequence)

    def shift(self, sequence: KVSequence, start: int, count: int, rotations: KeyRotations) -> None:
        """Remove ``count`` tokens from ``start`` on, and move the keys of the tokens after them to the positions that are free.

        The keys and values of these have seen the removed tokens, so they are not those that the model would compute.
        """
        assert not self.states, "a recurrent state cannot be cut"
        end = start + count
        tokens = sequence.tokens[end:]
        slots = sequence.slots[end:].copy()
        memory = self.arena.host_memory(len(tokens))
        with self.transaction():
            self.arena.read(as_index(slots), memory, slice(0, len(tokens)))
            rotations.turn(memory, -count)
            self.cut(sequence, start)
            fresh = self._allocate(sequence, len(tokens))
            self.arena.write(as_index(fresh), memory, slice(0, len(tokens)))
            sequence.append(tokens, fresh)

    def close(self, sequence: KVSequence) -> None:
        """Free all slots of a sequence, active or idle."""
        self.mark_active(sequence)
        self.cut(sequence, 0)

    def mark_idle(self, sequence: KVSequence) -> None:
        """Let the slots of a sequence be taken for others when they are needed. Until ``mark_active`` it must not change."""
        if not sequence.is_idle:
            self.slots.mark_idle(sequence.slots)
            sequence.is_idle = True

    def mark_active(self, sequence: KVSequence) -> None:
        """Let a sequence go on; nothing happens unless it is idle."""
        if sequence.is_idle:
            self.slots.mark_active(sequence.slots)
            sequence.is_idle = False

    def copy_out(self, sequence: KVSequence) -> StoredSequence:
        """Return a copy of a sequence in host memory; the sequence stays in the arena."""
        copy = self.begin_copy(sequence)
        copy.advance(len(sequence))
        return copy.stored

    def begin_copy(self, sequence: KVSequence) -> SequenceCopy:
        """Begin a copy like ``copy_out`` that is made in chunks."""
        return SequenceCopy(self.arena, sequence, self.states.of(sequence) or ())

    def bring_back(self, stored: StoredSequence, length: int) -> KVSequence:
        """Return a new sequence in the arena with the first ``length`` tokens of a stored one."""
        assert length == len(stored.tokens) or not self.states
        sequence = self.open(stored.conditions)
        sequence.states = stored.states or None
        slots = self._allocate(sequence, length)
        self.arena.write(as_index(slots), stored.kv, slice(0, length))
        sequence.append(stored.tokens[:length], slots)
        return sequence

    def compact(self) -> bool:
        """Move high slots into low free ones, if a smaller KV length is then enough. Return whether any slot was moved."""
        count = self.slots.num_used
        if not count or self.kv_len_for(self.slots.high_slot) == self.kv_len_for(count):
            return False
        old, new = self.slots.move_down()
        self.arena.move(old, new)
        places = np.arange(self.num_slots)
        places[old] = new
        for sequence in self._open:
            sequence.move(places)
        return True

    def give_back(self) -> None:
        """Let the system have the memory of free slots, where they lie together. No call may be in flight."""

    def kv_len_for(self, num_slots: int) -> int:
        """Return the smallest KV length of at least ``num_slots`` slots."""
        return self.kv_lens[bisect_left(self.kv_lens, num_slots)]

    def fill(self, step: Step, buffers: StepBuffers) -> None:
        """Write the inputs of a step except keys and values, and set the strides of the arenas. Called before the device runs."""
        if step.variant.kv_len:
            self.arena.set_stride(step.variant.kv_len, self.slots.high_slot)
        if self.states:
            self.states.enter(step.segments[0].sequence)
        buffers.input_ids.fill(PAD_TOKEN)
        buffers.position_ids.fill(0)
        buffers.logit_rows.fill(0)
        buffers.adapter_scales.fill(0)
        if buffers.rope_factors is not None:
            buffers.rope_factors.fill(0)
        if buffers.cross_mask is not None:
            self.cross.show(self.cross.num_cross_windows if buffers.sees_all_cross_windows else self.cross.num_seen)
            buffers.see_cross_windows(self.cross.num_shown)
            buffers.cross_mask.fill(HIDDEN)
        logit_rows: list[int] = []
        for start, segment in step.placed():
            count = len(segment.tokens)
            first = len(segment.sequence)
            buffers.input_ids[0, start : start + count] = segment.tokens
            buffers.position_ids[..., start : start + count] = np.arange(first, first + count)
            conditions = segment.sequence.conditions
            if conditions.adapters:
                buffers.adapter_scales[0, start : start + count] = conditions.adapters
            if buffers.rope_factors is not None:
                buffers.rope_factors[0, start : start + count] = conditions.factors
            if buffers.cross_mask is not None and conditions.cross_window:
                buffers.cross_mask[0, 0, start : start + count, self.cross.frames_of(conditions.cross_window)] = VISIBLE
            logit_rows.extend(range(start + count - segment.num_logits, start + count))
        buffers.logit_rows[: len(logit_rows)] = logit_rows
        self._masks.paint(step, buffers)
        if buffers.key_positions is not None and buffers.query_positions is not None:
            paint_positions(step, buffers.key_positions[0, 0, 0], buffers.query_positions[0, 0, :, 0])

    def new_rows(self, step: Step, buffers: StepBuffers) -> list[NDArray[Any]]:
        """Return copies of what a step that ran wrote for its first segment: per group ``[n, heads, rows, head_dim]``."""
        count = len(step.segments[0].tokens)
        return [present[:, :, :count].copy() for present in buffers.presents]

    def are_finite(self, step: Step, buffers: StepBuffers) -> list[bool]:
        """Return for each segment of a step that ran whether its new keys, values and states are finite and may be kept."""
        count = sum(len(segment.tokens) for segment in step.segments)
        if self.states and not all(map(is_finite, self.states.present)):
            return [False] * len(step.segments)
        if all(is_finite(present[:, :, :count]) for present in buffers.presents):
            return [True] * len(step.segments)
        return [
            all(is_finite(present[:, :, start : start + len(segment.tokens)]) for present in buffers.presents)
            for start, segment in step.placed()
        ]

    def commit(
        self, step: Step, buffers: StepBuffers, accepted: Sequence[int] | None = None
    ) -> list[StoredSequence | None]:
        """Keep the results of a step: keys and values, tokens, positions and recurrent states together.

        Args:
            step: The step that ``fill`` was called with.
            buffers: The memory that the program wrote to.
            accepted: For each segment the number of its first tokens that are kept: 0 for a segment that failed, fewer than
                all for a partly accepted draft. None keeps all. With recurrent states only all or 0 is possible.

        Returns:
            One entry per segment: its stored sequence, which never enters the arena, with ``to_host``; else None.
        """
        stored: list[StoredSequence | None] = []
        with self.transaction():
            for index, (start, segment) in enumerate(step.placed()):
                count = len(segment.tokens) if accepted is None else accepted[index]
                assert count in (0, len(segment.tokens)) or not self.states, "a recurrent state cannot be cut"
                rows = slice(start, start + count)
                stored.append(self._to_host(segment, buffers, rows) if count and segment.to_host else None)
                if not count or segment.to_host:
                    continue
                self.append(segment.sequence, segment.tokens[:count].tolist(), buffers.presents, rows)
                self.states.commit()
        return stored

    def append(
        self, sequence: KVSequence, tokens: Sequence[int], presents: Sequence[NDArray[Any]], rows: slice
    ) -> None:
        """Add tokens to a sequence, with rows ``rows`` of each group's presents, ``[n, heads, S, head_dim]``."""
        slots = self._allocate(sequence, len(tokens))
        self.arena.write(as_index(slots), presents, rows)
        sequence.append(tokens, slots)

    def _to_host(self, segment: Segment, buffers: StepBuffers, rows: slice) -> StoredSequence:
        """Return a stored sequence with the tokens of a segment and with rows ``rows`` of the program's outputs."""
        kv = tuple(present[:, :, rows].copy() for present in buffers.presents)
        return StoredSequence(tuple(segment.tokens.tolist()), kv, self.states.written(), segment.sequence.conditions)

    def _allocate(self, sequence: KVSequence, count: int) -> NDArray[np.intp]:
        """Allocate slots ``[count]`` for more tokens of a sequence, and grow the arena's stride if they need it."""
        del sequence  # any slots will do
        used = self.slots.high_slot
        slots = self.slots.allocate(count)
        needed = max(used, int(slots[-1]) + 1) if count else used
        if needed > self.arena.stride or not used:
            self.arena.set_stride(self.kv_len_for(needed), used)
        return slots

    def reset(self) -> None:
        """Free and zero all slots, in any state that an interrupted step left. Open sequences must not be used any more."""
        self.slots = self._make_slots()
        self._masks = MaskBuilder()
        self._open = weakref.WeakSet()
        self.arena.clear()
        self.states.clear()
        self.is_void = False

    def release(self) -> None:
        """Give the memory of slots, states and masks back. The cache must not be used any more."""
        self._masks = MaskBuilder()
        self.arena.release()
        self.states.release()
        self.cross.release()


class Transaction:
    """A block in which slots change hands: ``is_void`` is True inside it, and stays True if it raises."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache

    def __enter__(self) -> None:
        self._cache.is_void = True

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._cache.is_void = kind is not None
