"""The prefix cache reuses the KV slots of a sequence for a prompt that begins with the same tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from .cache import KVCache
from .host_pool import HostPool
from .sequence import PLAIN, Conditions, KVSequence, common_prefix, may_share
from .stored import SequenceCopy, StoredSequence

MIN_PREFIX = 16
"""Shorter prefixes are recomputed unless they are half of the prompt: a fresh prompt runs in cheaper programs."""
MAX_LOST = 64
"""A cached sequence is cut and continued in place if it loses at most this many tokens; otherwise its prefix is shared."""
OFFLOAD_SLOTS = 256
"""The number of slots that are offloaded during one call, so that decoding requests do not wait for a long copy."""


class PrefixCache:
    """Finds prefixes in running sequences, in finished ones (the *cached* ones), and in conversations of the host pool.

    Cached sequences stay in the arena. Where calls read idle slots, only the last finished one is cached, so that a single
    conversation is never copied; it is offloaded to the host pool when other sequences need its slots, or when their calls need
    a larger KV length because of it. The copy is made while the device runs or is idle, or immediately if the slots are needed
    now. Where calls read no idle slots, finished sequences stay until others need their slots, or until they and the host pool
    are larger than this may be.

    Runs on the engine's thread.
    """

    def __init__(self, cache: KVCache, host_pool: HostPool, is_enabled: bool = True) -> None:
        self._cache = cache
        self._host_pool = host_pool
        self._is_enabled = is_enabled
        self._is_whole = bool(cache.states)  # a recurrent state covers all tokens: only whole sequences can be reused
        self._cached: list[KVSequence] = []  # the oldest first
        self._offloading: deque[SequenceCopy] = deque()

    @property
    def idle_slots(self) -> int:
        """The number of slots that only cached sequences and those being offloaded hold."""
        return self._cache.slots.count_only([sequence.slots for sequence in self.idle_sequences()])

    @property
    def leaving_slots(self) -> int:
        """The slots in ``idle_slots`` that are free after the first chunk of a prompt, if more chunks follow.

        0 where a call reads no idle slots.
        """
        if not self._cache.reads_idle_slots:
            return 0
        leaves = all(map(self._can_leave, self._cached))
        sequences = self.idle_sequences() if leaves else [copy.sequence for copy in self._offloading]
        num_leaving = self._cache.slots.count_only([sequence.slots for sequence in sequences])
        return min(num_leaving, self._cache.num_past - self._cache.slots.num_active)

    def _can_leave(self, sequence: KVSequence) -> bool:
        return len(sequence) <= self._host_pool.free_slots

    @property
    def is_offloading(self) -> bool:
        """Whether a sequence is being offloaded to the host pool."""
        return bool(self._offloading)

    def keep(self, sequence: KVSequence) -> None:
        """Cache the sequence of a request that has ended, for the next request that begins with the same tokens."""
        if not self._is_enabled or not len(sequence):
            self._cache.close(sequence)
            return
        self._cache.mark_idle(sequence)
        for part in [part for part in self._cached if _begins(sequence, part)]:
            if not self._is_whole or len(part) == len(sequence):
                self._cached.remove(part)
                self._cache.close(part)
        self._cached.append(sequence)
        if self._cache.reads_idle_slots:
            while len(self._cached) > 1:
                self._offload(self._cached.pop(0))
        else:
            self._host_pool.drop_parts(sequence)
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        """Drop cached sequences until they and those of the host pool have no more slots than this may have."""
        while self._count_outside() and len(self._cached) > 1:
            oldest = self._host_pool.unclaimed(self._cached)
            if oldest is None and self._host_pool.drop_claimed():
                continue
            leaving = self._cached[0] if oldest is None else oldest
            self._cached.remove(leaving)
            self._cache.close(leaving)

    def _count_outside(self) -> int:
        """Let cached sequences count with those of the host pool; return how many slots they have too many."""
        return 0 if self._cache.reads_idle_slots else self._host_pool.count_outside(self.idle_slots)

    def attach(
        self, tokens: Sequence[int], running: Iterable[KVSequence], conditions: Conditions = PLAIN
    ) -> KVSequence:
        """Return a sequence with the longest prefix of ``tokens[:-1]`` that is cached under the same conditions.

        The last token must run for its logits.
        """
        wanted = tokens[:-1]
        if not self._is_enabled:
            return self._cache.open(conditions)
        longest, length = self._longest_in_arena(wanted, running, conditions)
        stored, stored_length = self._host_pool.longest(wanted, self._is_whole, conditions)
        if max(length, stored_length) < min(MIN_PREFIX, (len(tokens) + 1) // 2):
            return self._cache.open(conditions)
        if stored is not None and stored_length == max(length, stored_length):
            self._host_pool.touch(stored)
        if stored is not None and stored_length > length:
            if not self._cache.reads_idle_slots:
                self.offload_for(min(len(tokens) + 1, self._cache.num_slots))
            if self._cache.slots.num_free > len(tokens):
                return self._cache.bring_back(stored, stored_length)
            longest, length = self._longest_in_arena(wanted, running, conditions)
        if longest is None or not length:
            return self._cache.open(conditions)
        if longest in self._cached and len(longest) - length <= MAX_LOST and not self._is_whole:
            self._cached.remove(longest)
            self._cache.mark_active(longest)
            self._count_outside()
            self._cache.cut(longest, length)
            return longest
        return self._cache.fork(longest, length)

    def offload_for(self, num_slots: int = 0, num_followed: int = 0) -> None:
        """Offload cached sequences that make later calls larger, or if fewer than ``num_slots`` slots are free.

        ``num_followed``: the slots that the next call fills for prompts of which another chunk follows. The cached sequence can
        leave while that call runs, if the host pool has room for it. Offloads that have begun are completed only when their
        slots are needed now.
        """
        if not self._cache.reads_idle_slots:
            while self._cached and self._cache.slots.num_free < num_slots:
                leaving = self._host_pool.unclaimed(self._cached) or self._cached[0]
                self._cached.remove(leaving)
                self._offload(leaving)
                self._finish_all_offloads()
            return
        if self._cached:
            num_used = self._cache.slots.num_used
            idle = self.idle_slots
            can_leave = all(map(self._can_leave, self._cached))
            used = min(num_used + num_followed, self._cache.num_slots) if can_leave else num_used
            others = self._cache.kv_len_for(max(used - idle, 1))
            if self._cache.slots.num_free < num_slots or (used > idle and others < self._cache.kv_len_for(used)):
                self._offload(self._cached.pop())
        while self._offloading and self._cache.slots.num_free < num_slots:
            self._finish_offload()

    def advance(self) -> None:
        """Offload one chunk; the device may be reading the arena."""
        with self._cache.transaction():
            if self._offloading and self._offloading[0].advance(OFFLOAD_SLOTS):
                self._finish_offload()

    def finish_offloading(self) -> None:
        """Complete all offloads at once; the device may be reading the arena."""
        with self._cache.transaction():
            self._finish_all_offloads()

    def keep_prompt(self, sequence: KVSequence) -> None:
        """Keep a copy of the prompt alone, before its answer begins, if only whole conversations can be reused.

        A later prompt may begin with this prompt but not with the answer's tokens: the same question again, or an answer
        that is tokenized differently.
        """
        if self._is_enabled and self._is_whole and len(sequence) >= MIN_PREFIX:
            self._host_pool.keep(self._cache.copy_out(sequence))

    def restore(self, stored: StoredSequence) -> bool:
        """Keep a sequence in the host pool. Return False if it does not fit."""
        return self._host_pool.keep(stored)

    def find(
        self, tokens: Sequence[int], running: Iterable[KVSequence], conditions: Conditions = PLAIN
    ) -> StoredSequence | None:
        """Return a copy of the longest prefix of ``tokens`` that is cached under these conditions; None if there is none."""
        longest, length = self._longest_in_arena(tokens, running, conditions)
        stored, stored_length = self._host_pool.longest(tokens, self._is_whole, conditions)
        if stored is not None and stored_length > length:
            return stored.prefix(stored_length)
        if longest is None or not length:
            return None
        fork = self._cache.fork(longest, length)
        copied = self._cache.copy_out(fork)
        self._cache.close(fork)
        return copied

    def forget(self) -> None:
        """Forget the cached and outgoing sequences; called after the KV cache was reset."""
        self._cached.clear()
        self._offloading.clear()
        self._host_pool.count_outside(0)

    def _longest_in_arena(
        self, tokens: Sequence[int], running: Iterable[KVSequence], conditions: Conditions
    ) -> tuple[KVSequence | None, int]:
        best = None
        length = 0
        for sequence in (*self.idle_sequences(), *running):
            if sequence.conditions != conditions or not may_share(sequence.tokens, tokens, length + 1):
                continue
            common = common_prefix(sequence.tokens, tokens)
            if common > length and (common == len(sequence) or not self._is_whole):
                best = sequence
                length = common
        return best, length

    def idle_sequences(self) -> list[KVSequence]:
        """Return the cached sequences and those that are being offloaded."""
        return [*self._cached, *(copy.sequence for copy in self._offloading)]

    def _offload(self, sequence: KVSequence) -> None:
        if len(sequence) >= MIN_PREFIX:
            self._offloading.append(self._cache.begin_copy(sequence))
        else:
            self._cache.close(sequence)

    def _finish_all_offloads(self) -> None:
        while self._offloading:
            self._finish_offload()

    def _finish_offload(self) -> None:
        """Finish offloading the oldest outgoing sequence and free its slots."""
        copy = self._offloading.popleft()
        if self._can_leave(copy.sequence):
            copy.advance(len(copy.sequence))
            self._count_outside()
            self._host_pool.keep(copy.stored)
        self._cache.close(copy.sequence)


def _begins(sequence: KVSequence, other: KVSequence) -> bool:
    """Return whether ``sequence`` begins with all of ``other``."""
    is_alike = sequence.conditions == other.conditions
    return is_alike and common_prefix(other.tokens, sequence.tokens) == len(other)
