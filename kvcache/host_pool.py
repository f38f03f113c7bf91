"""The host pool stores KV slots outside the arena, for swapped requests and for conversations kept for their prefix."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from staticllm.kvcache.sequence import AdapterScales, common_prefix
from staticllm.kvcache.stored import StoredSequence

_Key = tuple[AdapterScales, tuple[int, ...]]


class HostPool:
    """Stores at most ``num_slots`` slots. Swapped requests stay until they are taken. The oldest conversations are dropped.

    The recurrent states of one conversation count as ``state_slots`` slots. A conversation with such states can only be reused
    as a whole.

    Runs on the engine's thread.
    """

    def __init__(self, num_slots: int, state_slots: int = 0) -> None:
        self.num_slots, self._state_slots = num_slots, state_slots
        self._swapped: dict[int, StoredSequence] = {}
        self._kept: OrderedDict[_Key, StoredSequence] = OrderedDict()
        self.num_swapped_slots = 0
        self.num_kept_slots = 0

    @property
    def free_slots(self) -> int:
        """The number of slots that the next swapped request may have; kept conversations are dropped for it."""
        return max(0, self.num_slots - self.num_swapped_slots - self._state_slots)

    def swap_out(self, owner: int, stored: StoredSequence) -> None:
        """Store the sequence of request ``owner``. The caller has checked ``free_slots``."""
        self.num_swapped_slots += self._size(stored.tokens)
        self._swapped[owner] = stored
        self._shrink()

    def take(self, owner: int) -> StoredSequence:
        """Remove the sequence of request ``owner`` from the pool and return it."""
        stored = self._swapped.pop(owner)
        self.num_swapped_slots -= self._size(stored.tokens)
        return stored

    def keep(self, stored: StoredSequence) -> bool:
        """Keep a conversation for its prefix. Return False if the pool has no room for it.

        A kept conversation that is a prefix of it is dropped, unless conversations can only be reused as a whole.
        """
        if self._size(stored.tokens) > self.num_slots - self.num_swapped_slots:
            return False
        same = [old for old in self._kept.values() if old.adapters == stored.adapters]
        for old in same:
            if common_prefix(old.ids, stored.ids) < len(old.tokens):
                continue
            if not self._state_slots or old.tokens == stored.tokens:
                self._drop(_key(old))
        self._kept[_key(stored)] = stored
        self.num_kept_slots += self._size(stored.tokens)
        self._shrink()
        return True

    def longest(
        self, tokens: Sequence[int], is_whole: bool = False, adapters: AdapterScales = ()
    ) -> tuple[StoredSequence | None, int]:
        """Return the kept conversation with the longest common prefix with ``tokens``, and the length of that prefix.

        Only those that were computed with ``adapters`` count. With ``is_whole`` the whole conversation must be a prefix of
        ``tokens``.
        """
        best, length, ids = None, 0, np.array(tokens, np.int64)
        for stored in self._kept.values():
            if stored.adapters != adapters:
                continue
            common = common_prefix(stored.ids, ids)
            if common > length and (common == len(stored.tokens) or not is_whole):
                best, length = stored, common
        if best is not None:
            self._kept.move_to_end(_key(best))
        return best, length

    def clear(self) -> None:
        """Drop all swapped sequences and all conversations."""
        self._kept.clear()
        self._swapped.clear()
        self.num_kept_slots = self.num_swapped_slots = 0

    def _shrink(self) -> None:
        while self._kept and self.num_swapped_slots + self.num_kept_slots > self.num_slots:
            self._drop(next(iter(self._kept)))

    def _drop(self, key: _Key) -> None:
        self.num_kept_slots -= self._size(self._kept.pop(key).tokens)

    def _size(self, tokens: tuple[int, ...]) -> int:
        return len(tokens) + self._state_slots


def _key(stored: StoredSequence) -> _Key:
    return stored.adapters, stored.tokens
