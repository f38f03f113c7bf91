"""Puts a plan's moves into practice: whose rows lie in the arena, whose on the shelf, whose nowhere."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from staticllm.kvcache.cache import KVCache, StoredRows
from staticllm.kvcache.host_pool import Shelf
from staticllm.kvcache.prefix import PrefixCache
from staticllm.kvcache.sequence import Sequence
from staticllm.pipelines.engine.overflow import shorten
from staticllm.pipelines.engine.request import Request
from staticllm.pipelines.scheduling.request_table import Book, Limits


@dataclass(frozen=True)
class EngineOptions:
    """What an engine is told about rows and requests.

    ``capacity``: rows that one sequence can have. ``max_waiting``: requests that may wait; ``parked_rows``: the shelf;
    ``state_rows``: how many rows the recurrent states of one sequence are worth there."""

    limits: Limits
    capacity: int
    max_waiting: int = 128
    parked_rows: int = 0
    prefix_caching: bool = True
    state_rows: int = 0


class Tenancy:
    """Rows of the requests in a book. A request that decodes or prefills has a sequence in the arena."""

    def __init__(self, cache: KVCache, book: Book, shelf: Shelf, prefix: PrefixCache) -> None:
        self.cache, self.book, self.shelf, self.prefix = cache, book, shelf, prefix
        self.requests: dict[int, Request] = {}
        self._was_sharing = False

    @property
    def free_rows(self) -> int:
        """Rows that a plan can count on; the idle conversations make way."""
        return self.cache.rows.num_free + self.prefix.idle_rows

    def sequences(self) -> Iterable[Sequence]:
        """Those in the arena."""
        return [request.sequence for request in self.requests.values() if request.sequence is not None]

    def settle(self, request: Request) -> None:
        """Before its first chunk: give a request a sequence that begins with whatever is known of its tokens."""
        if request.sequence is None:
            request.sequence = self.prefix.attach(request.tokens, self.sequences())
            if not request.num_generated:
                request.num_cached = len(request.sequence)
            rows = len(request.sequence)
            self.book[request.id].change(num_rows=rows, state="prefilling" if rows else "waiting")
        self.count_own_rows()

    def park(self, request: Request) -> None:
        """Move the rows of a parked request to the shelf; they stay where they are if the shelf has no room."""
        if request.sequence is None or len(request.sequence) > self.shelf.free_rows:
            return
        self.shelf.park(request.id, self.cache.copy_out(request.sequence))
        self._leave(request)
        self.book[request.id].change(in_arena=False, own_rows=0)

    def set_aside(self, request: Request, stored: StoredRows) -> None:
        """Shelve the rows of a prompt that has just run and never lay in the arena."""
        self.shelf.park(request.id, stored)
        self._leave(request)
        self.book[request.id].change(in_arena=False, own_rows=0)

    def resume(self, request: Request) -> None:
        """Bring the rows of a parked request back, if they were moved."""
        self.book.resume(request.id)
        if request.sequence is None:
            stored = self.shelf.take(request.id)
            self.prefix.make_way(len(stored.tokens))
            request.sequence = self.cache.bring_back(stored, len(stored.tokens))
            self.book[request.id].change(own_rows=len(stored.tokens))

    def evict(self, request: Request) -> None:
        """Take the rows of a request; it waits again, with all its tokens to run."""
        self._drop(request)
        self.book.evict(request.id)

    def end(self, request: Request, is_kept: bool) -> None:
        """A request is over. Its rows are kept for whoever begins like it, unless they cannot be trusted."""
        entry = self.book[request.id]
        if request.sequence is not None and is_kept:
            self.prefix.keep(request.sequence)
            request.sequence = None
        elif not entry.in_arena and is_kept:
            self.prefix.restore(self.shelf.take(request.id))
        else:
            self._drop(request)
        self.book.remove(request.id)
        del self.requests[request.id]
        self.count_own_rows()

    def shorten(self, request: Request, limit: int) -> bool:
        """A conversation has filled its rows: keep what its rule keeps and run that anew. False if the rule is to stop."""
        kept = shorten(request.tokens, limit, request.overflow)
        if len(kept) == len(request.tokens):
            return False
        if request.sequence is None:  # set aside: its rows never lay in the arena
            self._drop(request)
            request.tokens = kept
            self.book.evict(request.id)
            self.book[request.id].change(num_tokens=len(kept))
            return True
        shared = next((i for i, pair in enumerate(zip(kept, request.tokens, strict=False)) if pair[0] != pair[1]), 0)
        request.tokens = kept
        self.cache.cut(request.sequence, min(shared, len(kept) - 1))
        rows = len(request.sequence)
        self.book[request.id].change(state="prefilling", num_tokens=len(kept), num_rows=rows, own_rows=rows)
        return True

    def make_room(self, num_rows: int) -> bool:
        """Whether ``num_rows`` are free now; the idle conversations make way."""
        self.prefix.make_way(num_rows)
        return self.cache.rows.num_free >= num_rows

    def tidy(self) -> None:
        """While nobody wants anything: one piece of who leaves; then rows together, so that the next call sees few."""
        self.prefix.advance()
        if not self.prefix.is_leaving:
            self.cache.compact()

    def reset(self) -> list[int]:
        """After an exception inside the bookkeeping: every row in the arena is lost. Whose they were is computed anew."""
        self.cache.reset()
        self.prefix.forget()
        evicted = [request.id for request in self.requests.values() if request.sequence is not None]
        for request in evicted:
            self.requests[request].sequence = None
            self.book.evict(request)
        return evicted

    def abandon(self) -> list[Request]:
        """Forget every request and every row, whatever state they are in; who they were."""
        requests = list(self.requests.values())
        self.requests.clear()
        self.book.clear()
        self.cache.reset()
        self.prefix.forget()
        self.shelf.clear()
        return requests

    def count_own_rows(self) -> None:
        """Say in the book how many rows each would free. Without shared rows the book knows by itself."""
        if not self._is_sharing():
            return
        for request in self.requests.values():
            if request.sequence is not None:
                own = self.cache.rows.count_own(request.sequence.rows)
                self.book[request.id].change(own_rows=own)

    def _is_sharing(self) -> bool:
        was, self._was_sharing = self._was_sharing, self.cache.rows.num_shared > 0
        return was or self._was_sharing

    def _drop(self, request: Request) -> None:
        if not self.book[request.id].in_arena:
            self.shelf.take(request.id)
        self._leave(request)

    def _leave(self, request: Request) -> None:
        if request.sequence is not None:
            self.cache.close(request.sequence)
            request.sequence = None


def make_tenancy(cache: KVCache, book: Book, options: EngineOptions) -> Tenancy:
    """With an empty shelf."""
    shelf = Shelf(options.parked_rows, options.state_rows)
    return Tenancy(cache, book, shelf, PrefixCache(cache, shelf, options.prefix_caching))
