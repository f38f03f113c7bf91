"""Puts a plan's moves into practice: whose slots lie in the arena, whose in the host pool, whose nowhere."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from staticllm.kvcache.cache import KVCache, StoredSequence
from staticllm.kvcache.host_pool import HostPool
from staticllm.kvcache.prefix import PrefixCache
from staticllm.kvcache.sequence import Sequence
from staticllm.pipelines.engine.overflow import shorten
from staticllm.pipelines.engine.request import Request
from staticllm.pipelines.scheduling.request_table import Limits, RequestTable


@dataclass(frozen=True)
class EngineOptions:
    """What an engine is told about slots and requests.

    ``max_seq_len``: slots that one sequence can have. ``max_waiting``: requests that may wait; ``host_kv_slots``: the host pool;
    ``state_slots``: how many slots the recurrent states of one sequence are worth there."""

    limits: Limits
    max_seq_len: int
    max_waiting: int = 128
    host_kv_slots: int = 0
    prefix_caching: bool = True
    state_slots: int = 0


class KVCacheManager:
    """Rows of the requests in a book. A request that decodes or prefills has a sequence in the arena."""

    def __init__(self, cache: KVCache, table: RequestTable, host_pool: HostPool, prefix: PrefixCache) -> None:
        self.cache, self.table, self.host_pool, self.prefix = cache, table, host_pool, prefix
        self.requests: dict[int, Request] = {}
        self._was_sharing = False

    @property
    def free_slots(self) -> int:
        """Rows that a plan can count on; the idle conversations make way."""
        return self.cache.slots.num_free + self.prefix.idle_slots

    def sequences(self) -> Iterable[Sequence]:
        """Those in the arena."""
        return [request.sequence for request in self.requests.values() if request.sequence is not None]

    def allocate(self, request: Request) -> None:
        """Before its first chunk: give a request a sequence that begins with whatever is known of its tokens."""
        if request.sequence is None:
            request.sequence = self.prefix.attach(request.tokens, self.sequences())
            if not request.num_generated:
                request.num_cached = len(request.sequence)
            computed = len(request.sequence)
            self.table[request.id].change(num_computed=computed, state="prefilling" if computed else "waiting")
        self.count_own_slots()

    def swap_out(self, request: Request) -> None:
        """Move the slots of a swapped out request to the host pool; they stay where they are if the host pool has no room."""
        if request.sequence is None or len(request.sequence) > self.host_pool.free_slots:
            return
        self.host_pool.swap_out(request.id, self.cache.copy_out(request.sequence))
        self._close_sequence(request)
        self.table[request.id].change(in_arena=False, own_slots=0)

    def set_aside(self, request: Request, stored: StoredSequence) -> None:
        """Shelve the slots of a prompt that has just run and never lay in the arena."""
        self.host_pool.swap_out(request.id, stored)
        self._close_sequence(request)
        self.table[request.id].change(in_arena=False, own_slots=0)

    def swap_in(self, request: Request) -> None:
        """Bring the slots of a swapped out request back, if they were moved."""
        self.table.swap_in(request.id)
        if request.sequence is None:
            stored = self.host_pool.take(request.id)
            self.prefix.evict(len(stored.tokens))
            request.sequence = self.cache.bring_back(stored, len(stored.tokens))
            self.table[request.id].change(own_slots=len(stored.tokens))

    def preempt(self, request: Request) -> None:
        """Take the slots of a request; it waits again, with all its tokens to run."""
        self._drop(request)
        self.table.preempt(request.id)

    def end(self, request: Request, is_kept: bool) -> None:
        """A request is over. Its slots are kept for whoever begins like it, unless they cannot be trusted."""
        entry = self.table[request.id]
        if request.sequence is not None and is_kept:
            self.prefix.keep(request.sequence)
            request.sequence = None
        elif not entry.in_arena and is_kept:
            self.prefix.restore(self.host_pool.take(request.id))
        else:
            self._drop(request)
        self.table.remove(request.id)
        del self.requests[request.id]
        self.count_own_slots()

    def shorten(self, request: Request, limit: int) -> bool:
        """A conversation has filled its slots: keep what its rule keeps and run that anew. False if the rule is to stop."""
        kept = shorten(request.tokens, limit, request.overflow)
        if len(kept) == len(request.tokens):
            return False
        if request.sequence is None:  # set aside: its slots never lay in the arena
            self._drop(request)
            request.tokens = kept
            self.table.preempt(request.id)
            self.table[request.id].change(num_tokens=len(kept))
            return True
        shared = next((i for i, pair in enumerate(zip(kept, request.tokens, strict=False)) if pair[0] != pair[1]), 0)
        request.tokens = kept
        self.cache.cut(request.sequence, min(shared, len(kept) - 1))
        computed = len(request.sequence)
        self.table[request.id].change(
            state="prefilling", num_tokens=len(kept), num_computed=computed, own_slots=computed
        )
        return True

    def make_room(self, num_slots: int) -> bool:
        """Whether ``num_slots`` are free now; the idle conversations make way."""
        self.prefix.evict(num_slots)
        return self.cache.slots.num_free >= num_slots

    def compact_when_idle(self) -> None:
        """While nobody wants anything: one piece of who leaves; then slots together, so that the next call sees few."""
        self.prefix.advance()
        if not self.prefix.is_offloading:
            self.cache.compact()

    def discard_slots(self) -> list[int]:
        """After an exception inside the bookkeeping: every row in the arena is lost. Whose they were is computed anew."""
        self.cache.reset()
        self.prefix.forget()
        preempted = [request.id for request in self.requests.values() if request.sequence is not None]
        for request in preempted:
            self.requests[request].sequence = None
            self.table.preempt(request)
        return preempted

    def clear(self) -> list[Request]:
        """Forget every request and every row, whatever state they are in; who they were."""
        requests = list(self.requests.values())
        self.requests.clear()
        self.table.clear()
        self.cache.reset()
        self.prefix.forget()
        self.host_pool.clear()
        return requests

    def count_own_slots(self) -> None:
        """Say in the request table how many slots each would free. Without shared slots the request table knows by itself."""
        if not self._is_sharing():
            return
        for request in self.requests.values():
            if request.sequence is not None:
                own = self.cache.slots.count_own(request.sequence.slots)
                self.table[request.id].change(own_slots=own)

    def _is_sharing(self) -> bool:
        was, self._was_sharing = self._was_sharing, self.cache.slots.num_shared > 0
        return was or self._was_sharing

    def _drop(self, request: Request) -> None:
        if not self.table[request.id].in_arena:
            self.host_pool.take(request.id)
        self._close_sequence(request)

    def _close_sequence(self, request: Request) -> None:
        if request.sequence is not None:
            self.cache.close(request.sequence)
            request.sequence = None


def make_kv_manager(cache: KVCache, table: RequestTable, options: EngineOptions) -> KVCacheManager:
    """With an empty host pool."""
    host_pool = HostPool(options.host_kv_slots, options.state_slots)
    return KVCacheManager(cache, table, host_pool, PrefixCache(cache, host_pool, options.prefix_caching))
