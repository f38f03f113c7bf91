"""Slots in pages, for programs that write and read the slots themselves, by the table of pages of each sequence.

A page has ``page_size`` slots. Token i of a sequence lies in slot i % page_size of the page ``table[i // page_size]``. Forked
sequences share slots as they do elsewhere; the first of them that goes on fills the page that they share, and the others get a
copy of its used slots, fewer than a page.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from staticllm.core import KVState, ModelShape

from .arena import Allocate, Arena, Array, give_back
from .cache import KVCache
from .groups import StateGroup, place_of
from .sequence import KVSequence
from .slot_allocator import SlotAllocator, Slots
from .step import Step, StepBuffers
from .stored import StoredSequence

SPARE_SHARE = 4
"""One more of so many pages is spare: the last page of a sequence is rarely full. A page that is never used takes no memory."""
SPARE_PER_SEQUENCE = 1
"""Spare pages of each sequence of a call, the branches of a decision among them."""


class PagedArena(Arena):
    """The slots of all KV states in pages: ``[pages, heads, page_size, head_dim]`` per state. There is no stride."""

    def __init__(
        self, states: Sequence[KVState], num_pages: int, page_size: int, allocate: Allocate | None = None
    ) -> None:
        self.page_size = page_size
        super().__init__(states, num_pages * page_size, allocate)

    def state_view(self, index: int, stride: int = 0) -> Array:
        """Return the pages of state ``index``: ``[pages, heads, page_size, head_dim]``, contiguous."""
        del stride
        number, line = place_of(self.groups, index)
        (pages,) = self._pages(self._storage[number][line : line + 1], self.groups[number])
        return np.asarray(pages)

    def set_stride(self, stride: int, used_slots: int) -> None:
        """Do nothing: each slot has one place."""

    def zero(self, slots: Slots) -> None:
        """Zero ``slots [n]``: a program that reads a page may multiply what lies behind its last token by 0."""
        for view in self._views:
            view[(slice(None), slice(None), *self._places(slots))] = 0

    def give_back(self, pages: Sequence[int]) -> None:
        """Give the memory of ``pages``, ascending and free, back to the system, where the arena is a mapping of it.

        They read as zeros afterwards.
        """
        runs = np.split(np.array(pages, np.intp), np.flatnonzero(np.diff(pages) > 1) + 1)
        for memory, storage, group in zip(self._memory, self._storage, self.groups, strict=True):
            size = group.heads * self.page_size * group.head_dim * storage.itemsize
            for line in range(len(storage)):
                for run in runs:
                    start = line * storage.strides[0] + int(run[0]) * size
                    give_back(memory, start, start + len(run) * size)

    def _places(self, slots: slice | Array) -> tuple[slice | Array, ...]:
        places = np.arange(slots.start, slots.stop) if isinstance(slots, slice) else slots
        return places // self.page_size, places % self.page_size

    def _views_at(self, stride: int) -> list[Array]:
        """Return the slots of each group: ``[n, heads, pages, page_size, head_dim]``."""
        del stride
        found = zip(self._storage, self.groups, strict=True)
        return [self._pages(storage, group).transpose(0, 2, 1, 3, 4) for storage, group in found]

    def _pages(self, storage: Array, group: StateGroup) -> Array:
        return storage.reshape(len(storage), -1, group.heads, self.page_size, group.head_dim)


class PagedSlotAllocator(SlotAllocator):
    """Allocates the slots of a sequence in its last page, and then in the lowest free pages.

    ``num_slots``: the most slots in use. ``num_pages``: those that exist; they hold more. As many tokens as ``num_free`` can be
    added to any ``num_sequences`` sequences, each of which may need a page of which it uses one slot.
    """

    def __init__(self, num_slots: int, num_pages: int, page_size: int, num_sequences: int) -> None:
        super().__init__(num_pages * page_size)
        self.page_size = page_size
        self._most_used = num_slots
        self._reserved = num_sequences * page_size
        self._in_page = np.zeros(num_pages, np.int32)  # slots in use
        self._free_pages = list(range(num_pages))  # a heap
        self._written = np.zeros(num_pages, np.bool_)  # since they were taken from ``free_written_pages``

    @property
    def num_free(self) -> int:
        """The number of slots that may be allocated."""
        in_pages = len(self._free_pages) * self.page_size - self._reserved
        return max(0, min(self._most_used - self.num_used, in_pages))

    def free_written_pages(self) -> list[int]:
        """Return the free pages, ascending, that were in use since they were returned last."""
        found = np.flatnonzero(self._written & (self._in_page == 0))
        self._written[found] = False
        return [int(page) for page in found]

    def extend(self, slots: Slots, count: int) -> tuple[Slots, Slots]:
        """Return the slots of ``count > 0`` more tokens of a sequence that has ``slots [n]``, each with one active holder.

        They begin with those of the tokens of its last page if another sequence has filled that one; these must be copied, and
        the sequence has them instead. Returns ``(copied [m], slots [m + count])``: the slots that are copied, and the new ones.
        """
        num_in_last = len(slots) % self.page_size
        found = list[Slots]()
        copied = slots[:0]
        if num_in_last:
            first = int(slots[-1]) + 1
            room = min(count, self.page_size - num_in_last)
            if self._is_free[first : first + room].all():
                found.append(np.arange(first, first + room))
            else:
                copied = slots[len(slots) - num_in_last :].copy()
        needed = len(copied) + count - sum(map(len, found))
        for start in range(0, needed, self.page_size):
            assert self._free_pages, "no page is free"
            page = heapq.heappop(self._free_pages) * self.page_size
            found.append(np.arange(page, page + min(self.page_size, needed - start)))
        taken = np.concatenate(found)
        self._take(taken)
        if len(copied):
            self.free(copied)
        return copied, taken

    def _take(self, slots: Slots) -> None:
        super()._take(slots)
        pages = slots // self.page_size
        self._written[pages] = True
        np.add.at(self._in_page, pages, 1)

    def _give_back(self, slots: Slots) -> None:
        super()._give_back(slots)
        pages = slots // self.page_size
        np.subtract.at(self._in_page, pages, 1)
        for page in np.unique(pages):
            if not self._in_page[page]:
                heapq.heappush(self._free_pages, int(page))


@dataclass
class _Rows:
    """The slots that the rows of a segment are written to; they belong to no sequence before they are committed."""

    sequence: KVSequence
    slots: Slots = field(default_factory=lambda: np.zeros(0, np.intp))


class PagedKVCache(KVCache):
    """A KV cache whose programs write the slots of a step themselves, so that a commit copies nothing."""

    def __init__(
        self, shape: ModelShape, kv_lens: Sequence[int], allocate: Allocate | None = None, num_sequences: int = 1
    ) -> None:
        self._page_size = shape.page_size
        self._num_sequences = num_sequences
        self._rows: list[_Rows] = []
        super().__init__(shape, kv_lens, allocate)

    @property
    def idle_page(self) -> int:
        """The page that no sequence has, for calls without a request."""
        return self._num_pages

    @property
    def reads_idle_slots(self) -> bool:
        """False: a call reads the pages of its own sequences."""
        return False

    @property
    def least_exact(self) -> int:
        """2: with one row, the CPU plugin adds products in another order than with several, whose number does not matter."""
        return 2

    @property
    def num_past(self) -> int:
        """The number of slots that calls may read: those of sequences that go on."""
        return min(self.slots.num_active, self.num_slots)

    def kv_len_for(self, num_slots: int) -> int:
        """Return the same for any number: a call reads the slots of its own sequences only."""
        del num_slots
        return self.num_slots

    def compact(self) -> bool:
        """Do nothing: no place is better than another."""
        return False

    def give_back(self) -> None:
        """As ``KVCache.give_back``: free pages that were used are memory of the system again."""
        if pages := self._slots.free_written_pages():
            self._arena.give_back(pages)

    def fill(self, step: Step, buffers: StepBuffers) -> None:
        """Write the inputs of a step, and allocate the slots of its rows."""
        self._free_rows()  # of a step that failed
        super().fill(step, buffers)
        with self.transaction():
            for segment in step.segments:
                sequence = segment.sequence
                self._rows.append(_Rows(sequence, self._allocate(sequence, len(segment.tokens))))
        past = [len(rows.sequence) for rows in self._rows]
        counts = [len(rows.slots) for rows in self._rows]
        num_logits = sum(segment.num_logits for segment in step.segments)
        tables = [self._table(rows) for rows in self._rows]
        if step.is_exact:
            if sum(counts) < self.least_exact <= min(step.variant.rows, step.variant.sequences):
                past.append(0)
                counts.append(1)  # a row of no sequence, in a page that none has
                tables.append(np.array([self.idle_page]))
            if num_logits < self.least_exact <= step.variant.num_logits:
                buffers.logit_rows[1] = buffers.logit_rows[0]
                num_logits = self.least_exact
        buffers.pool.pages.write(past, counts, tables, num_logits)

    def _table(self, rows: _Rows) -> NDArray[np.intp]:
        """Return the pages of a sequence and of its new rows."""
        size = self._page_size
        behind = -len(rows.sequence) % size  # rows in a page that has tokens
        return np.concatenate([rows.sequence.slots[::size], rows.slots[behind::size]]) // size

    def new_rows(self, step: Step, buffers: StepBuffers) -> list[Array]:
        """Return copies of what a step that ran wrote for its first segment: per group ``[n, heads, rows, head_dim]``."""
        rows = self._rows[0]
        memory = self.arena.host_memory(len(rows.slots))
        self.arena.read(rows.slots, memory, slice(0, len(rows.slots)))
        return list(memory)

    def commit(
        self, step: Step, buffers: StepBuffers, accepted: Sequence[int] | None = None
    ) -> list[StoredSequence | None]:
        """Let the slots that a step wrote belong to its sequences, as the base class does by a copy."""
        stored: list[StoredSequence | None] = []
        with self.transaction():
            for index, (segment, rows) in enumerate(zip(step.segments, self._rows, strict=True)):
                count = len(segment.tokens) if accepted is None else accepted[index]
                if not count:
                    self._arena.zero(rows.slots)  # they may not be finite
                stored.append(self._copied(segment.tokens, rows) if count and segment.to_host else None)
                if count and not segment.to_host:
                    segment.sequence.append(segment.tokens[:count].tolist(), rows.slots[:count])
                    rows.slots = rows.slots[count:]
            self._free_rows()
        return stored

    def _copied(self, tokens: NDArray[np.int64], rows: _Rows) -> StoredSequence:
        """Return a stored sequence of the tokens of a segment, which was empty before."""
        memory = self.arena.host_memory(len(tokens))
        self.arena.read(rows.slots, memory, slice(0, len(tokens)))
        return StoredSequence(tuple(tokens.tolist()), memory, (), rows.sequence.conditions)

    def _free_rows(self) -> None:
        """Free the slots of rows that no sequence has."""
        for rows in self._rows:
            if len(rows.slots):
                self.slots.free(rows.slots)
        self._rows = []

    def _allocate(self, sequence: KVSequence, count: int) -> Slots:
        """Allocate slots ``[count]`` behind those of a sequence; used slots of a page that others fill are copied."""
        if not count:
            return np.zeros(0, np.intp)
        copied, slots = self._slots.extend(sequence.slots, count)
        if len(copied):
            kept = slots[: len(copied)]
            self.arena.move(copied, kept)
            sequence.replace_last(kept)
        return slots[len(copied) :]

    def reset(self) -> None:
        """Free and zero all slots, as the base class does."""
        self._rows = []
        super().reset()

    def _make_arena(self, shape: ModelShape, allocate: Allocate | None) -> Arena:
        self._arena = PagedArena(shape.kv_states, self._num_pages + 1, self._page_size, allocate)
        return self._arena

    def _make_slots(self) -> SlotAllocator:
        self._slots = PagedSlotAllocator(self.num_slots, self._num_pages, self._page_size, self._num_sequences)
        return self._slots

    @property
    def _num_pages(self) -> int:
        full = -(-self.num_slots // self._page_size)
        return full + full // SPARE_SHARE + SPARE_PER_SEQUENCE * self._num_sequences


def kv_cache(
    shape: ModelShape, kv_lens: Sequence[int], allocate: Allocate | None = None, num_sequences: int = 1
) -> KVCache:
    """Return the KV cache for the programs of a model; in pages, if these use them.

    ``num_sequences``: the most sequences of a call.

    Raises:
        MemoryError: there is not enough for the slots.
    """
    if shape.page_size:
        return PagedKVCache(shape, kv_lens, allocate, num_sequences)
    return KVCache(shape, kv_lens, allocate)
