"""The sequences whose clients choose the next tokens, and the slots that they keep meanwhile."""

from __future__ import annotations

from staticllm.kvcache.cache import KVCache
from staticllm.kvcache.prefix import PrefixCache
from staticllm.kvcache.sequence import KVSequence
from staticllm.pipelines.engine.client_sequences.state import ClientState
from staticllm.pipelines.scheduling.interface import IdleView


class IdleSequences:
    """The client sequences without a feed in progress, those that have been idle longest first.

    Their slots can be evicted. An evicted sequence is cached like that of a request that has ended, so it is often copied back
    from the host pool when its client sends more tokens; otherwise its tokens are recomputed.

    Runs on the engine's thread.
    """

    def __init__(self, cache: KVCache, prefix: PrefixCache) -> None:
        self._cache = cache
        self._prefix = prefix
        self._states: dict[int, ClientState] = {}
        self._holding: dict[int, ClientState] = {}  # those with slots

    def __len__(self) -> int:
        return len(self._states)

    @property
    def sequences(self) -> list[KVSequence]:
        """The sequences that have slots in the arena."""
        return [state.sequence for state in self._holding.values() if state.sequence is not None]

    @property
    def has_slots(self) -> bool:
        """Whether a sequence has slots in the arena."""
        return bool(self._holding)

    @property
    def views(self) -> tuple[IdleView, ...]:
        """The sequences as a policy receives them."""
        return tuple(state.view for state in self._states.values())

    def expected_since(self, now: float) -> list[float]:
        """Return since when each sequence is idle that is expected back after the moment ``now``."""
        return [each.since for each in self.views if each.ready_at is not None and each.ready_at >= now]

    def add(self, state: ClientState) -> None:
        """Add a sequence that is idle from now on."""
        self._states[state.id] = state
        if state.sequence is not None:
            self._cache.mark_idle(state.sequence)
            self._holding[state.id] = state

    def remove(self, state: ClientState) -> None:
        """Remove a sequence; it keeps its slots, which others cannot take any more."""
        self._forget(state)
        if state.sequence is not None:
            self._cache.mark_active(state.sequence)

    def __contains__(self, state: ClientState) -> bool:
        return state.id in self._states

    def fork(self, source: ClientState) -> ClientState:
        """Add a copy of an idle sequence; both share the slots."""
        forked = source.forked()
        if source.sequence is not None:
            forked.sequence = self._cache.fork(source.sequence, len(source.sequence))
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
            state.sequence = None
        self._holding.clear()

    def take_over(self, other: IdleSequences) -> None:
        """Add all sequences of another KV cache, without their slots."""
        other.forget_slots()
        self._states = other._states
        other._states = {}

    def _forget(self, state: ClientState) -> None:
        del self._states[state.id]
        self._holding.pop(state.id, None)

    def _release(self, state: ClientState, is_reusable: bool) -> None:
        sequence = state.sequence
        state.sequence = None
        if sequence is not None and is_reusable:
            self._prefix.keep(sequence)
        elif sequence is not None:
            self._cache.close(sequence)
