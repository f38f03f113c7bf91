"""Prefix reuse: a prompt that begins as something known begins does not compute that part again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as TokenList

from staticllm.kvcache.cache import KVCache, RowsCopy, StoredRows
from staticllm.kvcache.host_pool import Shelf
from staticllm.kvcache.sequence import Sequence, common_prefix

WORTH_IT = 16
"""Shorter prefixes are computed again, unless they are half of the prompt: a fresh prompt runs in cheaper programs."""
SHORT_REST = 64
"""A conversation that would lose no more than this is continued in place; else its prefix is shared and the rest kept."""


PIECE = 256
"""Rows that go to the shelf during a call in which somebody decodes: who streams must not wait for a long copy."""


class PrefixCache:
    """Knows the tokens of every row: of running sequences, of the last finished one (resident), and of those on the shelf.

    The last finished sequence stays in the arena, so that a conversation with one user at a time is never copied. It is
    offloaded to the host pool when other sequences need its slots or pay for them with a larger KV length: while the device
    runs or is idle, unless its slots are needed at once.
    """

    def __init__(self, cache: KVCache, shelf: Shelf, is_enabled: bool = True) -> None:
        self._cache, self._shelf, self._is_enabled = cache, shelf, is_enabled
        self._is_whole = bool(cache.states)  # a recurrent state is that of all tokens: no part of them can be used
        self._resident: Sequence | None = None
        self._leaving: deque[RowsCopy] = deque()

    @property
    def idle_rows(self) -> int:
        """Rows that would be free without the resident and those that are leaving."""
        return self._cache.rows.count_only([sequence.rows for sequence in self._idle()])

    @property
    def is_leaving(self) -> bool:
        """Whether a conversation is on its way to the shelf."""
        return bool(self._leaving)

    def keep(self, sequence: Sequence) -> None:
        """A request has ended: hold its rows for the next that begins like it."""
        if not self._is_enabled or not len(sequence):
            self._cache.close(sequence)
            return
        previous, self._resident = self._resident, sequence
        is_part = previous is not None and common_prefix(previous.tokens, sequence.tokens) == len(previous)
        if previous is not None and is_part and (not self._is_whole or len(previous) == len(sequence)):
            self._cache.close(previous)
        elif previous is not None:
            self._leave(previous)

    def attach(self, tokens: TokenList[int], running: Iterable[Sequence]) -> Sequence:
        """A sequence that begins with as much of ``tokens`` as is known; the last one always runs."""
        wanted = tokens[:-1]
        if not self._is_enabled:
            return self._cache.open()
        source, length = self._longest_in_arena(wanted, running)
        stored, stored_length = self._shelf.longest(wanted, self._is_whole)
        if max(length, stored_length) < min(WORTH_IT, (len(tokens) + 1) // 2):
            return self._cache.open()
        if stored is not None and stored_length > length and self._cache.rows.num_free > len(tokens):
            return self._cache.bring_back(stored, stored_length)
        if source is None or not length:
            return self._cache.open()
        if source is self._resident and len(source) - length <= SHORT_REST and not self._is_whole:
            self._resident = None
            self._cache.cut(source, length)
            return source
        return self._cache.fork(source, length)

    def make_way(self, num_rows: int = 0) -> None:
        """Before a call: the resident leaves if it costs everybody else a larger capacity, or if ``num_rows`` are not free.

        Who leaves has left before that only if these rows are needed.
        """
        if self._resident is not None:
            used, idle = self._cache.rows.num_used, self.idle_rows
            others = self._cache.capacity_for(max(used - idle, 1))
            if self._cache.rows.num_free < num_rows or (used > idle and others < self._cache.capacity_for(used)):
                resident, self._resident = self._resident, None
                self._leave(resident)
        while self._leaving and self._cache.rows.num_free < num_rows:
            self._shelve()

    def advance(self, is_hurried: bool = False) -> None:
        """Move one piece of who leaves to the shelf, or all of them; the device may be reading the arena."""
        self._cache.is_settled = False
        while self._leaving and is_hurried:
            self._shelve()
        if self._leaving and self._leaving[0].advance(PIECE):
            self._shelve()
        self._cache.is_settled = True

    def remember_prompt(self, sequence: Sequence) -> None:
        """A prompt has just run, and nothing of its answer: where only whole conversations can be used, hold it by itself.

        Whoever asks again, or whose answer comes back in other tokens, begins there.
        """
        if self._is_enabled and self._is_whole and len(sequence) >= WORTH_IT:
            self._shelf.keep(self._cache.copy_out(sequence))

    def restore(self, stored: StoredRows) -> None:
        """Hold rows that were saved."""
        self._shelf.keep(stored)

    def find(self, tokens: TokenList[int], running: Iterable[Sequence]) -> StoredRows | None:
        """A copy of the rows with the longest prefix of ``tokens``; None if nothing begins like them."""
        source, length = self._longest_in_arena(tokens, running)
        stored, stored_length = self._shelf.longest(tokens, self._is_whole)
        if stored is not None and stored_length > length:
            rows = tuple(rows[:, :, :stored_length] for rows in stored.rows)
            return StoredRows(stored.tokens[:stored_length], rows, stored.states)
        if source is None or not length:
            return None
        fork = self._cache.fork(source, length)
        copied = self._cache.copy_out(fork)
        self._cache.close(fork)
        return copied

    def forget(self) -> None:
        """Forget everything, after the cache was reset."""
        self._resident = None
        self._leaving.clear()

    def _longest_in_arena(self, tokens: TokenList[int], running: Iterable[Sequence]) -> tuple[Sequence | None, int]:
        best, length = None, 0
        for sequence in (*self._idle(), *running):
            common = common_prefix(sequence.tokens, tokens)
            if common > length and (common == len(sequence) or not self._is_whole):
                best, length = sequence, common
        return best, length

    def _idle(self) -> list[Sequence]:
        return [*([self._resident] if self._resident else []), *(copy.sequence for copy in self._leaving)]

    def _leave(self, sequence: Sequence) -> None:
        if len(sequence) >= WORTH_IT:
            self._leaving.append(self._cache.begin_copy(sequence))
        else:
            self._cache.close(sequence)

    def _shelve(self) -> None:
        """The first that leaves has left."""
        copy = self._leaving.popleft()
        if len(copy.sequence) <= self._shelf.free_rows:
            copy.advance(len(copy.sequence))
            self._shelf.keep(copy.stored)
        self._cache.close(copy.sequence)
