"""The shelf: rows outside the arena, in host memory. Those of parked requests, and of conversations that may go on."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as TokenList

import numpy as np

from staticllm.kvcache.cache import StoredRows
from staticllm.kvcache.sequence import common_prefix


class Shelf:
    """At most ``max_rows`` rows. Parked ones stay until they are taken; kept conversations go, the oldest first.

    ``state_rows``: the recurrent states of one conversation take as much memory as so many rows. Where there are any, a
    conversation can only be used as a whole.
    """

    def __init__(self, max_rows: int, state_rows: int = 0) -> None:
        self.max_rows, self._state_rows = max_rows, state_rows
        self._parked: dict[int, StoredRows] = {}
        self._kept: OrderedDict[tuple[int, ...], StoredRows] = OrderedDict()
        self.num_parked_rows = 0
        self.num_kept_rows = 0

    @property
    def free_rows(self) -> int:
        """Rows that the next request to be parked can have; kept conversations make way."""
        return max(0, self.max_rows - self.num_parked_rows - self._state_rows)

    def park(self, owner: int, stored: StoredRows) -> None:
        """Hold the rows of a request. The caller has asked ``free_rows``."""
        self.num_parked_rows += self._size(stored.tokens)
        self._parked[owner] = stored
        self._shrink()

    def take(self, owner: int) -> StoredRows:
        """The rows of a request, which leave the shelf."""
        stored = self._parked.pop(owner)
        self.num_parked_rows -= self._size(stored.tokens)
        return stored

    def keep(self, stored: StoredRows) -> None:
        """Hold a conversation for whoever goes on with it; what it begins with need not be held apart, if it can be cut."""
        begins = [old.tokens for old in self._kept.values() if common_prefix(old.ids, stored.ids) == len(old.tokens)]
        for tokens in begins:
            if not self._state_rows or tokens == stored.tokens:
                self._drop(tokens)
        self._kept[stored.tokens] = stored
        self.num_kept_rows += self._size(stored.tokens)
        self._shrink()

    def longest(self, tokens: TokenList[int], is_whole: bool = False) -> tuple[StoredRows | None, int]:
        """The kept conversation with the longest common prefix, and its length; ``is_whole``: only one that is all prefix."""
        best, length, ids = None, 0, np.array(tokens, np.int64)
        for stored in self._kept.values():
            common = common_prefix(stored.ids, ids)
            if common > length and (common == len(stored.tokens) or not is_whole):
                best, length = stored, common
        if best is not None:
            self._kept.move_to_end(best.tokens)
        return best, length

    def clear(self) -> None:
        """Forget everything."""
        self._kept.clear()
        self._parked.clear()
        self.num_kept_rows = self.num_parked_rows = 0

    def _shrink(self) -> None:
        while self._kept and self.num_parked_rows + self.num_kept_rows > self.max_rows:
            self._drop(next(iter(self._kept)))

    def _drop(self, tokens: tuple[int, ...]) -> None:
        del self._kept[tokens]
        self.num_kept_rows -= self._size(tokens)

    def _size(self, tokens: tuple[int, ...]) -> int:
        return len(tokens) + self._state_rows
