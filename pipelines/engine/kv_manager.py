"""Gives requests their slots in the arena or in the host pool, and frees them; idle sequences keep theirs meanwhile."""

from __future__ import annotations

from collections.abc import Callable

from staticllm.core import Clock

from ...kvcache.cache import KVCache
from ...kvcache.host_pool import HostPool
from ...kvcache.prefix import PrefixCache
from ...kvcache.rotation import KeyRotations
from ...kvcache.sequence import Conditions, KVSequence, common_prefix
from ...kvcache.stored import StoredSequence
from ..costs.model import averaged
from ..scheduling.interface import IdleView, RequestStatus
from ..scheduling.request_table import RequestTable
from .client_sequences.state import ClientState, State
from .options import EngineOptions
from .overflow import SINKS, shorten
from .sequence import SequenceState

SWAP_WEIGHT = 0.1
"""Weight of a slower copy in ``KVCacheManager.swap_seconds``."""
MAX_SLOWER = 2.0
"""Factor by which a copy may be slower there; what is above does not count."""


class IdleSequences:
    """The client sequences without a feed in progress, those that have been idle longest first.

    Their slots can be evicted. An evicted sequence is cached like that of a request that has ended, so it is often copied back
    from the host pool when its client sends more tokens; otherwise its tokens are recomputed.

    Runs on the engine's thread.
    """

    def __init__(self, cache: KVCache, prefix: PrefixCache) -> None:
        self._cache = cache
        self._prefix = prefix
        self.states: dict[int, ClientState] = {}
        self._holding: dict[int, ClientState] = {}  # those with slots

    def __len__(self) -> int:
        return len(self.states)

    @property
    def sequences(self) -> list[KVSequence]:
        """The sequences that have slots in the arena."""
        return [state.kv.sequence for state in self._holding.values() if state.kv.sequence is not None]

    @property
    def has_slots(self) -> bool:
        """Whether a sequence has slots in the arena."""
        return bool(self._holding)

    @property
    def views(self) -> tuple[IdleView, ...]:
        """The sequences as a policy receives them."""
        return tuple(state.view for state in self.states.values())

    def expected_since(self, now: float) -> list[float]:
        """Return since when each sequence is idle that is expected back after the moment ``now``."""
        return [each.since for each in self.views if each.ready_at is not None and each.ready_at >= now]

    def add(self, state: ClientState) -> None:
        """Add a sequence that is idle from now on."""
        self.states[state.id] = state
        if state.kv.sequence is not None:
            self._cache.mark_idle(state.kv.sequence)
            self._holding[state.id] = state

    def remove(self, state: ClientState) -> None:
        """Remove a sequence; it keeps its slots, which others cannot take any more."""
        self._forget(state)
        if state.kv.sequence is not None:
            self._cache.mark_active(state.kv.sequence)

    def __contains__(self, state: ClientState) -> bool:
        return state.id in self.states

    def fork(self, original: State) -> State:
        """Add a copy of an idle sequence; both share the slots."""
        forked = original.forked()
        if original.kv.sequence is not None:
            forked.kv.sequence = self._cache.fork(original.kv.sequence, len(original.kv.sequence))
        self.add(forked)
        return forked

    def close(self, state: ClientState, is_reusable: bool) -> None:
        """Remove a sequence. Its slots stay cached for their prefix if that ``is_reusable``; otherwise they are freed."""
        self._forget(state)
        self._release(state, is_reusable)

    def evict_oldest(self) -> bool:
        """Take the slots of the sequence that has been idle longest. Return False if none has slots."""
        if not self._holding:
            return False
        state = self._holding.pop(next(iter(self._holding)))
        self._release(state, is_reusable=True)
        return True

    def forget_slots(self) -> None:
        """Forget all slots; called after the KV cache was reset or replaced. The sequences are recomputed."""
        for state in self._holding.values():
            state.kv.sequence = None
        self._holding.clear()

    def take_over(self, other: IdleSequences) -> None:
        """Add all sequences of another KV cache, without their slots."""
        other.forget_slots()
        self.states = other.states
        other.states = {}

    def _forget(self, state: ClientState) -> None:
        del self.states[state.id]
        self._holding.pop(state.id, None)

    def _release(self, state: ClientState, is_reusable: bool) -> None:
        sequence = state.kv.sequence
        state.kv.sequence = None
        if sequence is not None and is_reusable:
            self._prefix.keep(sequence)
        elif sequence is not None:
            self._cache.close(sequence)


class KVCacheManager:
    """Manages the slots of the requests in the table. A request that prefills or decodes has a sequence in the arena.

    ``swap_seconds`` is the time in which one slot is copied between arena and host pool; 0 before the first copy. A faster copy
    counts at once, because a slow one is usually delayed by other work. If that lasted, prompts would be held back, so that no
    further copy could correct it. ``rotations`` gives how keys are moved to other positions; None if they cannot be.

    Runs on the engine's thread.
    """

    def __init__(
        self,
        cache: KVCache,
        table: RequestTable,
        host_pool: HostPool,
        prefix: PrefixCache,
        clock: Clock,
        rotations: Callable[[], KeyRotations | None] = lambda: None,
    ) -> None:
        self.cache = cache
        self.table = table
        self.host_pool = host_pool
        self.prefix = prefix
        self._clock = clock
        self._rotations = rotations
        self.states: dict[int, SequenceState] = {}
        self.idle = IdleSequences(cache, prefix)
        self.swap_seconds = 0.0

    @property
    def free_slots(self) -> int:
        """The number of slots that a plan may use: free ones, and those of cached and idle sequences, which it evicts."""
        return self.cache.num_slots - self.cache.slots.num_active

    def sequences(self) -> list[KVSequence]:
        """Return the requests' sequences in the arena whose keys are the model's own, and those of idle requests."""
        states = [state for state in self.states.values() if not state.kv.is_shifted]
        return [*(state.kv.sequence for state in states if state.kv.sequence is not None), *self.idle.sequences]

    def add(self, state: SequenceState) -> None:
        """Add a request, without slots, to the table."""
        self.states[state.id] = state
        self.table.add(state.info)

    def add_swapped(self, state: SequenceState, stored: StoredSequence) -> None:
        """Add a request that another device has served up to now; ``stored`` has the slots of all tokens but the last."""
        self.host_pool.swap_out(state.id, stored)
        state.info.arrive_swapped(len(stored.tokens), state.num_generated, state.token_times[-1])
        self.add(state)

    def leave(self, state: ClientState) -> None:
        """Remove a client request whose tokens have run from the table; it is idle, and keeps its slots."""
        self._remove(state)
        self.idle.add(state)

    def come_back(self, state: ClientState) -> None:
        """Add an idle request to the table: its client sent tokens."""
        self.idle.remove(state)
        sequence = state.kv.sequence
        if sequence is not None and self.cache.has_outgrown(sequence.conditions, len(state.tokens)):
            state.kv.num_recomputed += len(sequence)
            self._close_sequence(state)
        num_computed = state.kv.num_slots
        state.info.come_back(num_computed, self._clock(), self.table.num_free_for_clients > 0)
        self.add(state)

    def fork(self, original: SequenceState, sibling: SequenceState) -> None:
        """Add another answer to a prompt that has just run. It shares the slots of the first answer, which exist once."""
        assert original.kv.sequence is not None
        forked = self.cache.fork(original.kv.sequence, len(original.kv.sequence))
        self.add(sibling)
        sibling.kv.sequence = forked
        sibling.info.begin(len(forked))

    def conditions_of(self, state: SequenceState) -> Conditions:
        """Return the conditions of the keys and values of a request that is as long as this one is now."""
        return self.cache.conditions_at(state.conditions, len(state.tokens))

    def recompute_outgrown(self, state: SequenceState) -> bool:
        """Let all tokens of a request run again if it has become so long that the model takes other RoPE factors.

        Return whether that is so.
        """
        if state.kv.sequence is not None:
            known = state.kv.sequence.conditions
        elif not state.info.in_arena:
            known = self.host_pool.conditions_of(state.id)
        else:
            return False
        if not self.cache.has_outgrown(known, len(state.tokens)):
            return False
        state.kv.num_recomputed += state.info.num_computed
        self.preempt(state)
        return True

    def allocate(self, state: SequenceState) -> None:
        """Give a request a sequence that begins with the longest cached prefix of its tokens; called before each chunk."""
        if state.kv.sequence is None:
            if self.idle.has_slots:  # their slots are free for a prefix of the host pool, too
                self.make_room(min(len(state.tokens) + 1, self.cache.num_slots))
            conditions = self.conditions_of(state)
            state.kv.sequence = self.prefix.attach(state.reusable_tokens, self.sequences(), conditions)
            if not state.num_generated:
                state.kv.num_cached = len(state.kv.sequence)
            state.info.begin(len(state.kv.sequence))

    def allocate_alone(self) -> None:
        """Give the only request its sequence before its first call is planned, so that the plan is for what is not cached.

        Beside others it waits for its call: meanwhile, they may need the slots, or bring a longer prefix.
        """
        if len(self.states) == 1:
            (state,) = self.states.values()
            if state.info.status is RequestStatus.WAITING:
                self.allocate(state)

    def swap_out(self, state: SequenceState) -> None:
        """Stop a running request and move its slots to the host pool."""
        state.info.swap_out()
        self.offload(state)

    def offload(self, state: SequenceState) -> None:
        """Move the slots of a swapped request to the host pool; without room there they stay in the arena."""
        if state.kv.sequence is not None and len(state.kv.sequence) <= self.host_pool.free_slots:
            start = self._clock()
            stored = self.cache.copy_out(state.kv.sequence)
            self.count_swap(len(stored.tokens), self._clock() - start)
            self.put_in_host_pool(state, stored)

    def put_in_host_pool(self, state: SequenceState, stored: StoredSequence) -> None:
        """Put a copy of a request's sequence into the host pool, and free its arena slots if it has any."""
        self.host_pool.swap_out(state.id, stored)
        self._close_sequence(state)
        state.info.leave_arena()

    def swap_in(self, state: SequenceState) -> None:
        """Let a swapped request decode again; its slots are copied back if they were moved to the host pool."""
        own_slots = None
        if state.kv.sequence is None:
            stored = self.host_pool.take(state.id)
            own_slots = len(stored.tokens)
            self.make_room(own_slots)
            start = self._clock()
            state.kv.sequence = self.cache.bring_back(stored, own_slots)
            self.count_swap(own_slots, self._clock() - start)
        state.info.swap_in(own_slots)

    def preempt(self, state: SequenceState) -> None:
        """Free the slots of a request. It waits again, and all its tokens are recomputed."""
        self._drop(state)
        state.kv.is_shifted = False
        state.info.preempt()

    def free(self, state: SequenceState) -> None:
        """Remove a request that has ended. Its slots stay cached for requests that begin with the same tokens.

        Keys that were moved are not cached: the model would compute others.
        """
        if state.kv.is_shifted or not state.is_reusable:
            self._drop(state)
        elif state.kv.sequence is not None:
            self.prefix.keep(state.kv.sequence)
            state.kv.sequence = None
        elif not state.info.in_arena:
            self.prefix.restore(self.host_pool.take(state.id))
        self._remove(state)

    def discard(self, state: SequenceState) -> None:
        """Remove a request that has ended and whose keys and values cannot be trusted; its slots are freed."""
        self._drop(state)
        self._remove(state)

    def shorten(self, state: SequenceState, limit: int) -> bool:
        """Shorten a conversation that fills its slots by its overflow rule, to ``limit`` tokens, which are recomputed.

        Return False if the rule is ``stop``.
        """
        kept = shorten(state.tokens, limit, state.overflow)
        if len(kept) == len(state.tokens):
            return False
        if state.overflow == "context_shift" and state.kv.sequence is not None and self._shift(state, kept):
            return True
        if state.kv.sequence is None:  # its prompt is in the host pool
            self._drop(state)
            state.replace_tokens(kept)
            state.info.preempt(len(kept))
            return True
        shared = common_prefix(kept, state.tokens)
        state.replace_tokens(kept)
        self.cache.cut(state.kv.sequence, min(shared, len(kept) - 1))
        state.info.restart(len(kept), len(state.kv.sequence))
        return True

    def _shift(self, state: SequenceState, kept: list[int]) -> bool:
        """Remove the tokens between the attention sinks and the newest ones, without computing anything.

        Return False if the model's keys cannot be moved, or if there are no slots for them beside those that others share.
        """
        rotations = self._rotations()
        sequence = state.kv.sequence
        count = len(state.tokens) - len(kept)
        if (
            rotations is None or sequence is None or self.cache.rope_limits
        ):  # keys are turned by the factors of short texts
            return False
        start = min(SINKS, len(kept) // 2)
        needed = len(sequence) - start - count - self.cache.slots.count_own(sequence.slots[start:])
        if needed > 0 and not self.make_room(needed):  # the slots that are cut are shared, and stay in use
            return False
        self.cache.shift(sequence, start, count, rotations)
        state.kv.is_shifted = True
        state.replace_tokens(kept)
        state.info.restart(len(kept), len(sequence))
        return True

    def make_room(self, num_slots: int, num_followed: int = 0) -> bool:
        """Evict cached and idle sequences as needed, and return whether ``num_slots`` slots are free now.

        ``num_followed`` of them are for chunks of prompts after which another chunk follows.
        """
        self.prefix.offload_for(num_slots, num_followed)
        while self.cache.slots.num_free < num_slots and self.idle.evict_oldest():
            self.prefix.offload_for(num_slots)
        return self.cache.slots.num_free >= num_slots

    def run_idle_work(self) -> None:
        """When idle: offload one chunk, then compact, so that the next step can use a smaller variant; give memory back."""
        self.prefix.advance()
        if not self.prefix.is_offloading:
            self.cache.compact()
            self.cache.give_back()

    def discard_slots(self) -> list[int]:
        """Discard all slots after an exception inside a transaction; their requests are preempted and recomputed.

        Return the ids of these requests.
        """
        self.cache.reset()
        self.prefix.forget()
        self.idle.forget_slots()
        preempted = [state.id for state in self.states.values() if state.kv.sequence is not None]
        for request in preempted:
            self.states[request].kv.sequence = None
            self.states[request].kv.is_shifted = False
            self.states[request].info.preempt()
        return preempted

    def clear(self) -> list[SequenceState]:
        """Remove every request and free every slot, in any state. Return the requests."""
        states = list(self.states.values())
        for state in states:  # those of client requests go on without their slots
            state.kv.sequence = None
        self.states.clear()
        self.table.clear()
        self.cache.reset()
        self.prefix.forget()
        self.idle.forget_slots()
        self.host_pool.clear()
        return states

    def count_own_slots(self) -> None:
        """Update the number of slots that each request would free; called before a policy sees them.

        Slots that it shares only with cached or idle sequences count: those are evicted when slots are needed.
        """
        for state in self.states.values():
            if state.kv.sequence is not None:
                state.info.set_own_slots(self.cache.slots.count_freed(state.kv.sequence.slots))

    def count_swap(self, num_slots: int, seconds: float) -> None:
        """Let a copy of ``num_slots`` slots change ``swap_seconds``."""
        if not num_slots:
            return
        newest = seconds / num_slots
        known = self.swap_seconds
        is_faster = not known or newest < known
        self.swap_seconds = newest if is_faster else averaged(known, min(newest, MAX_SLOWER * known), SWAP_WEIGHT)

    def _remove(self, state: SequenceState) -> None:
        self.table.remove(state.id)
        del self.states[state.id]

    def _drop(self, state: SequenceState) -> None:
        if not state.info.in_arena:
            self.host_pool.take(state.id)
        self._close_sequence(state)

    def _close_sequence(self, state: SequenceState) -> None:
        if state.kv.sequence is not None:
            self.cache.close(state.kv.sequence)
            state.kv.sequence = None


def make_kv_manager(
    cache: KVCache,
    table: RequestTable,
    options: EngineOptions,
    clock: Clock,
    rotations: Callable[[], KeyRotations | None] = lambda: None,
) -> KVCacheManager:
    """Return a manager with an empty host pool of ``options.host_kv_slots`` slots."""
    host_pool = HostPool(options.host_kv_slots, options.state_slots)
    prefix = PrefixCache(cache, host_pool, options.prefix_caching)
    return KVCacheManager(cache, table, host_pool, prefix, clock, rotations)
