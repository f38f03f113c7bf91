"""The KV cache: arena, slots, sequences and masks, moved together. Nothing else writes a slot, a mask cell or a position."""

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
from staticllm.kvcache.slot_allocator import SlotAllocator
from staticllm.kvcache.step import Step, StepBuffers

PAD_TOKEN = 0  # idle slots hold it; nobody sees what becomes of them


@dataclass(frozen=True)
class StoredSequence:
    """A sequence outside the arena: its tokens, and for each group of states their slots ``[n, heads, length, head_dim]``.

    ``states`` are the recurrent ones after the last token.
    """

    tokens: tuple[int, ...]
    kv: tuple[NDArray[Any], ...]
    states: StateSet = ()

    @cached_property
    def ids(self) -> NDArray[np.int64]:
        """The tokens, ready to be compared."""
        return np.array(self.tokens, np.int64)

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in (*self.kv, *self.states))


@dataclass(frozen=True)
class StoredLayout:
    """What a sequence of this model is outside the arena. ``groups``: ``(n, heads, head_dim, type)`` of each group of states,
    ``states``: shape and type of each recurrent one."""

    groups: tuple[tuple[int, int, int, np.dtype[Any]], ...]
    states: tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]
    vocab_size: int

    def kv_shapes(self, count: int) -> list[tuple[tuple[int, ...], np.dtype[Any]]]:
        """Shape ``[n, heads, count, head_dim]`` and type of the slots of each group."""
        return [((members, heads, count, head_dim), dtype) for members, heads, head_dim, dtype in self.groups]

    def fits(self, stored: StoredSequence) -> bool:
        """Whether stored slots have these shapes and types."""
        kv = [(array.shape, array.dtype) for array in stored.kv]
        states = [(array.shape, array.dtype) for array in stored.states]
        return kv == self.kv_shapes(len(stored.tokens)) and states == list(self.states)


class SequenceCopy:
    """The slots of a sequence on their way out of the arena. Nothing may change the sequence meanwhile; its slots may move."""

    def __init__(self, arena: Arena, sequence: Sequence, states: StateSet) -> None:
        self.sequence, self._states = sequence, states
        self._arena, self._arrays, self._done = arena, arena.host_memory(len(sequence)), 0

    def advance(self, count: int) -> bool:
        """Copy the next ``count`` slots. True if none are left."""
        start, self._done = self._done, min(self._done + count, len(self.sequence))
        self._arena.read(_as_index(self.sequence.slots[start : self._done]), self._arrays, slice(start, self._done))
        return self._done == len(self.sequence)

    @property
    def stored(self) -> StoredSequence:
        """What was copied, all of it."""
        assert self._done == len(self.sequence), "slots are missing"
        return StoredSequence(tuple(self.sequence.tokens), self._arrays, self._states)


class KVCache:
    """All that lives from one step to the next.

    ``kv_lens`` are the KV lengths that programs exist for, ascending; the arena grows along them.
    A step is ``fill`` (before the device runs) and ``commit`` (after); a failed step is simply not committed.
    """

    def __init__(self, shape: ModelShape, kv_lens: List[int]) -> None:
        self.kv_lens = sorted(set(kv_lens) - {0})
        self.num_slots = self.kv_lens[-1]
        self.arena = Arena(shape.kv_states, self.num_slots)
        self.slots = SlotAllocator(self.num_slots)
        self.states = StateBank(shape.recurrent_states)
        self._masks = MaskBuilder()
        self.layout = StoredLayout(
            tuple((len(g.members), g.heads, g.head_dim, g.storage.dtype) for g in self.arena.groups),
            tuple((array.shape, array.dtype) for array in self.states.past),
            shape.vocab_size,
        )
        self.is_settled = True  # False while slots change hands, and after an exception ended that
        self._open: weakref.WeakSet[Sequence] = weakref.WeakSet()

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
        """The same, to be done piece by piece."""
        return SequenceCopy(self.arena, sequence, self.states.of(sequence) or ())

    def bring_back(self, stored: StoredSequence, length: int) -> Sequence:
        """A new sequence in the arena that begins with the first ``length`` tokens of a stored one."""
        assert length == len(stored.tokens) or not self.states
        sequence = self.open()
        sequence.states = stored.states or None
        slots = self._allocate(length)
        self.arena.write(_as_index(slots), stored.kv, slice(0, length))
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
        """Write ids, positions, masks and logit slots of a step; give the arena the step's KV length."""
        if step.variant.kv_len:
            self.arena.set_stride(step.variant.kv_len, self.slots.high_slot)
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
        """For each segment of a step that ran: whether its new slots, and the new states, are finite and may be kept."""
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
    ) -> dict[int, StoredSequence]:
        """Keep what a step computed: slots, tokens and positions, together. ``keep`` leaves out segments that failed.

        The slots of segments in ``aside``, fresh ones, are returned and never enter the arena.
        """
        self.is_settled, stored = False, {}
        for index, (start, segment) in enumerate(step.placed()):
            if keep and not keep[index]:
                continue
            count = len(segment.tokens)
            if index in aside:
                assert not len(segment.sequence), "only a fresh sequence can be set aside"
                taken = tuple(present[:, :, start : start + count].copy() for present in buffers.presents)
                stored[index] = StoredSequence(tuple(segment.tokens.tolist()), taken, self.states.written())
                continue
            slots = self._allocate(count)
            self.arena.write(_as_index(slots), buffers.presents, slice(start, start + count))
            segment.sequence.append(segment.tokens.tolist(), slots)
            self.states.commit()
        self.is_settled = True
        return stored

    def _allocate(self, count: int) -> NDArray[np.intp]:
        """Rows for ``count`` tokens. Grows the arena where they need it."""
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
        self.is_settled = True


def _as_index(slots: NDArray[np.intp]) -> slice | NDArray[np.intp]:
    """A slice where the slots are contiguous: copying through one is several times faster."""
    if slots.size and int(slots[-1]) - int(slots[0]) + 1 == slots.size and (slots[1:] > slots[:-1]).all():
        return slice(int(slots[0]), int(slots[-1]) + 1)
    return slots
