"""The host pool stores KV slots outside the arena, for swapped requests and for conversations kept for their prefix."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .sequence import PLAIN, Conditions, KVSequence, common_prefix, may_share
from .stored import StoredSequence

_Key = tuple[Conditions, tuple[int, ...]]
MAX_CLAIMS = 64
"""The most sessions that may claim a conversation each; the oldest claims of the owner with the most are dropped."""


@dataclass
class _Claim:
    """The conversation of a session, as it was when it claimed it last. ``keys``: what of it was kept; some may be dropped."""

    ids: NDArray[np.int64]
    conditions: Conditions
    keys: set[_Key] = field(default_factory=set)

    def covers(self, kept: StoredSequence | KVSequence) -> bool:
        """Return whether a kept conversation is the session's, up to a last turn that was cut or tokenized differently."""
        needed = len(self.ids) // 2 + 1
        if kept.conditions != self.conditions or not may_share(kept.tokens, self.ids, needed):
            return False
        return common_prefix(kept.tokens[:needed], self.ids[:needed]) == needed


class HostPool:
    """Stores at most ``num_slots`` slots. Swapped requests stay until they are taken. The oldest conversations are dropped.

    Those that a session has claimed are dropped after the others, as long as they have at most half of the slots. Conversations
    that stay in the arena count as if they were here, because both are memory of the host (``count_outside``).

    The recurrent states of one conversation count as ``state_slots`` slots. A conversation with such states can only be reused
    as a whole.

    Runs on the engine's thread.
    """

    def __init__(self, num_slots: int, state_slots: int = 0) -> None:
        self.num_slots = num_slots
        self._state_slots = state_slots
        self._swapped: dict[int, StoredSequence] = {}
        self._kept: OrderedDict[_Key, StoredSequence] = OrderedDict()
        self._claims: OrderedDict[tuple[str, str], _Claim] = OrderedDict()  # by owner and session, the newest last
        self.num_swapped_slots = 0
        self.num_kept_slots = 0
        self._num_outside = 0

    def claim(self, session: str, tokens: Sequence[int], conditions: Conditions = PLAIN, owner: str = "") -> None:
        """Drop the conversation that begins with ``tokens`` only after those that no session has claimed.

        It replaces the earlier claim of this session of ``owner``. Owners have equal shares of the claims that count.
        """
        self._claims.pop((owner, session), None)
        claim = _Claim(np.array(tokens, np.int64), conditions)
        self._claims[owner, session] = claim
        claim.keys = {key for key, stored in self._kept.items() if claim.covers(stored)}
        if len(self._claims) > MAX_CLAIMS:
            counts = Counter(owner for owner, _ in self._claims)
            del self._claims[max(self._claims, key=lambda name: counts[name[0]])]  # the oldest among equals

    def drop_claims(self, owner: str) -> None:
        """Drop all claims of an owner; its conversations are kept like others."""
        for name in [name for name in self._claims if name[0] == owner]:
            del self._claims[name]

    @property
    def free_slots(self) -> int:
        """The number of slots that the next swapped request may have; kept conversations are dropped for it."""
        return max(0, self.num_slots - self.num_swapped_slots - self._state_slots)

    def swap_out(self, owner: int, stored: StoredSequence) -> None:
        """Store the sequence of request ``owner``. The caller has checked ``free_slots``."""
        self.num_swapped_slots += self._size(stored.tokens)
        self._swapped[owner] = stored
        self._shrink()

    def conditions_of(self, owner: int) -> Conditions:
        """Return the conditions of the sequence of request ``owner``, which stays in the pool."""
        return self._swapped[owner].conditions

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
        self.drop_parts(stored)
        self._kept[_key(stored)] = stored
        for claim in self._claims.values():
            if claim.covers(stored):
                claim.keys.add(_key(stored))
        self.num_kept_slots += self._size(stored.tokens)
        self._shrink()
        return True

    def drop_parts(self, whole: StoredSequence | KVSequence) -> None:
        """Drop kept conversations that are a prefix of ``whole``; only equal ones if conversations are reused as a whole."""
        same = [old for old in self._kept.values() if old.conditions == whole.conditions]
        for old in same:
            length = len(old.tokens)
            if length and not may_share(old.tokens, whole.tokens, length):
                continue
            if common_prefix(old.ids, whole.tokens[:length]) < length:
                continue
            if not self._state_slots or length == len(whole.tokens):
                self._drop(_key(old))

    def count_outside(self, num_slots: int) -> int:
        """Let conversations have ``num_slots`` slots in the arena; the oldest here that no session has claimed are dropped.

        Return how many slots there are too many for all.
        """
        self._num_outside = num_slots
        self._shrink(drops_claimed=False)
        return max(0, self._num_used - self.num_slots)

    def unclaimed(self, sequences: Sequence[KVSequence]) -> KVSequence | None:
        """Return the first of ``sequences`` that no session has claimed within its share; None if all are claimed."""
        claimed = self._claimed(sequences) if self._claims else set()
        return next((each for each in sequences if _key(each) not in claimed), None)

    def drop_claimed(self) -> bool:
        """Drop conversations that sessions have claimed, as far as there is too little room. Return whether one was dropped."""
        before = self.num_kept_slots
        self._shrink()
        return self.num_kept_slots < before

    def longest(
        self, tokens: Sequence[int], is_whole: bool = False, conditions: Conditions = PLAIN
    ) -> tuple[StoredSequence | None, int]:
        """Return the kept conversation with the longest common prefix with ``tokens``, and the length of that prefix.

        Only those that were computed under ``conditions`` count. With ``is_whole`` the whole conversation must be a prefix of
        ``tokens``.
        """
        best = None
        length = 0
        ids = np.array(tokens, np.int64)
        for stored in self._kept.values():
            if stored.conditions != conditions or not may_share(stored.tokens, tokens, length + 1):
                continue
            common = common_prefix(stored.ids, ids)
            if common > length and (common == len(stored.tokens) or not is_whole):
                best = stored
                length = common
        return best, length

    def touch(self, stored: StoredSequence) -> None:
        """Note that a kept conversation was used: it is dropped after those that were used before."""
        self._kept.move_to_end(_key(stored))

    def clear(self) -> None:
        """Drop all swapped sequences and all conversations."""
        self._kept.clear()
        self._claims.clear()
        self._swapped.clear()
        self.num_kept_slots = 0
        self.num_swapped_slots = 0
        self._num_outside = 0

    @property
    def _num_used(self) -> int:
        return self.num_swapped_slots + self.num_kept_slots + self._num_outside

    def _shrink(self, drops_claimed: bool = True) -> None:
        if self._num_used <= self.num_slots:
            return
        claimed = self._claimed()
        for key in sorted(self._kept, key=lambda key: key in claimed):  # stable: the oldest first among equals
            if self._num_used <= self.num_slots or (key in claimed and not drops_claimed):
                return
            self._drop(key)

    def _claimed(self, outside: Sequence[KVSequence] = ()) -> set[_Key]:
        """Return the conversations, here and ``outside``, that sessions have claimed, as many as fit into half of the slots.

        The newest claim of each owner comes first, then the second of each, the newest first among equals.
        """
        found: set[_Key] = set()
        num_left = self.num_slots // 2
        ranks: Counter[str] = Counter()
        ranked: list[tuple[int, _Claim]] = []
        for (owner, _), claim in reversed(self._claims.items()):
            ranked.append((ranks[owner], claim))
            ranks[owner] += 1
        for _, claim in sorted(ranked, key=lambda each: each[0]):
            claim.keys &= self._kept.keys()
            for key in claim.keys.union(map(_key, filter(claim.covers, outside))) - found:
                if self._size(key[1]) <= num_left:
                    num_left -= self._size(key[1])
                    found.add(key)
        return found

    def _drop(self, key: _Key) -> None:
        self.num_kept_slots -= self._size(self._kept.pop(key).tokens)

    def _size(self, tokens: tuple[int, ...]) -> int:
        return len(tokens) + self._state_slots


def _key(kept: StoredSequence | KVSequence) -> _Key:
    return kept.conditions, tuple(kept.tokens)
