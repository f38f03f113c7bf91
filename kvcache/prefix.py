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
    """Finds prefixes in running sequences, in the last finished one (the *cached* one), and in conversations of the host pool.

    The cached sequence stays in the arena, so that a single conversation is never copied. It is offloaded to the host pool when
    other sequences need its slots, or when their calls need a larger KV length because of it. The copy is made while the device
    runs or is idle, or immediately if the slots are needed now.

    Runs on the engine's thread.
    """

    def __init__(self, cache: KVCache, host_pool: HostPool, is_enabled: bool = True) -> None:
        self._cache = cache
        self._host_pool = host_pool
        self._is_enabled = is_enabled
        self._is_whole = bool(cache.states)  # a recurrent state covers all tokens: only whole sequences can be reused
        self._cached: KVSequence | None = None
        self._offloading: deque[SequenceCopy] = deque()

    @property
    def idle_slots(self) -> int:
        """The number of slots that only the cached sequence and the sequences being offloaded hold."""
        return self._cache.slots.count_only([sequence.slots for sequence in self.idle_sequences()])

    @property
    def leaving_slots(self) -> int:
        """The slots in ``idle_slots`` that are free after the first chunk of a prompt, if more chunks follow.

        0 where a call reads no idle slots.
        """
        leaves = self._cached is None or self._can_leave(self._cached)
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
        previous = self._cached
        self._cached = sequence
        is_part = previous is not None and _begins(sequence, previous)
        if previous is not None and is_part and (not self._is_whole or len(previous) == len(sequence)):
            self._cache.close(previous)
        elif previous is not None:
            self._offload(previous)

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
        if stored is not None and stored_length > length and self._cache.slots.num_free > len(tokens):
            return self._cache.bring_back(stored, stored_length)
        if longest is None or not length:
            return self._cache.open(conditions)
        if longest is self._cached and len(longest) - length <= MAX_LOST and not self._is_whole:
            self._cached = None
            self._cache.mark_active(longest)
            self._cache.cut(longest, length)
            return longest
        return self._cache.fork(longest, length)

    def offload_for(self, num_slots: int = 0, num_followed: int = 0) -> None:
        """Offload the cached sequence if it makes later calls larger, or if fewer than ``num_slots`` slots are free.

        ``num_followed``: the slots that the next call fills for prompts of which another chunk follows. The cached sequence can
        leave while that call runs, if the host pool has room for it. Offloads that have begun are completed only when their
        slots are needed now.
        """
        if self._cached is not None:
            num_used = self._cache.slots.num_used
            idle = self.idle_slots
            used = min(num_used + num_followed, self._cache.num_slots) if self._can_leave(self._cached) else num_used
            others = self._cache.kv_len_for(max(used - idle, 1))
            if self._cache.slots.num_free < num_slots or (used > idle and others < self._cache.kv_len_for(used)):
                cached = self._cached
                self._cached = None
                self._offload(cached)
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
            while self._offloading:
                self._finish_offload()

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
        self._cached = None
        self._offloading.clear()

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
        """Return the cached sequence and those that are being offloaded."""
        return [*([self._cached] if self._cached else []), *(copy.sequence for copy in self._offloading)]

    def _offload(self, sequence: KVSequence) -> None:
        if len(sequence) >= MIN_PREFIX:
            self._offloading.append(self._cache.begin_copy(sequence))
        else:
            self._cache.close(sequence)

    def _finish_offload(self) -> None:
        """Finish offloading the oldest outgoing sequence and free its slots."""
        copy = self._offloading.popleft()
        if self._can_leave(copy.sequence):
            copy.advance(len(copy.sequence))
            self._host_pool.keep(copy.stored)
        self._cache.close(copy.sequence)


def _begins(sequence: KVSequence, other: KVSequence) -> bool:
    """Return whether ``sequence`` begins with all of ``other``."""
    is_alike = sequence.conditions == other.conditions
    return is_alike and common_prefix(other.tokens, sequence.tokens) == len(other)
