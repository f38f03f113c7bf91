"""Opens, feeds and closes the client sequences of an engine core, for clients and for beam searches."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from staticllm.core import FinishReason
from staticllm.errors import PromptError

from ....kvcache.sequence import PLAIN, AdapterScales, Conditions
from ..serving import Serving
from .state import (
    BeamState,
    ClientState,
    FeedOrder,
    FeedRequest,
    FeedResult,
    State,
    closed_error,
)


class Feeds:
    """The client sequences of a core. Runs on the engine's thread.

    Attributes:
        is_holding: Whether new feeds wait until another runner was installed; only ``hold`` and ``release`` change it.
    """

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self.is_holding = False
        self._held: list[tuple[ClientState, FeedOrder]] = []
        self._running: dict[int, ClientState] = {}  # the sequences with a feed in progress

    def open(self, priority: int = 0, conditions: Conditions = PLAIN, owner: int = 0) -> ClientState:
        """Return a new sequence, which is idle; the arguments are as in ``EngineRequest``."""
        return self._opened(ClientState, priority, conditions, owner)

    def open_beam(self, priority: int, conditions: Conditions, owner: int) -> BeamState:
        """Return the first beam of a search, which is idle; the arguments are as in ``EngineRequest``."""
        return self._opened(BeamState, priority, conditions, owner)

    def _opened(self, kind: type[State], priority: int, conditions: Conditions, owner: int) -> State:
        state = kind(self._serving.vocab_size, priority, None, conditions, owner, self._serving.clock)
        self._serving.device.kv_manager.idle.add(state)
        return state

    def open_exact(
        self, tokens: Sequence[int], priority: int = 0, owner: int = 0, adapters: AdapterScales = ()
    ) -> ClientState:
        """Return a new sequence, which is idle, with the longest prefix of ``tokens`` that is cached: all of them, if they are.

        Its logits do not depend on what runs beside it, where the device lets that be. ``adapters``: the factor of each.
        """
        manager = self._serving.device.kv_manager
        own = Conditions(adapters)
        conditions = self._serving.device.runner.cache.conditions_at(own, len(tokens))
        # nothing is computed before the last token, so there is one more
        found = manager.prefix.attach([*tokens, tokens[-1]], manager.sequences(), conditions)
        state = ClientState(self._serving.vocab_size, priority, None, own, owner, self._serving.clock)
        state.is_exact = True
        state.take_cached(found)
        manager.idle.add(state)
        return state

    def fork(self, original: State) -> State:
        """Return another sequence with the tokens and slots of ``original``, which is idle."""
        return self._serving.device.kv_manager.idle.fork(original)

    def feed(self, state: ClientState, order: FeedOrder) -> None:
        """Begin a feed of an idle sequence; steps serve it from now on. One that can never run ends with an error."""
        length = len(state.tokens) + len(order.tokens)
        limit = self._serving.device.options.max_seq_len
        if length > limit:
            error = PromptError(
                f"a sequence of {length} tokens, it can have MAX_PROMPT_LEN + MIN_RESPONSE_LEN = {limit}: begin a new one, "
                "or load the model with a larger length"
            )
            order.on_done(FeedResult(None, error))
            return
        if state.is_closed:  # while the feed waited
            order.on_done(FeedResult(None, closed_error(FinishReason.CANCELLED)))
            return
        if self.is_holding and state.can_wait:
            self._held.append((state, order))
            return
        state.begin(order)
        self._serving.requests[state.id] = FeedRequest(state, self._end)
        self._running[state.id] = state
        self._serving.device.kv_manager.come_back(state)
        if state.is_suspect:
            self._serving.device.quarantine.add(state.id)

    def complete(self, id: int) -> None:
        """Let a sequence be idle whose feed has run. Only a beam's result is handed over at once; its search may go on or end."""
        state = self._running.pop(id)
        self._serving.device.kv_manager.leave(state)
        del self._serving.requests[state.id]
        if not state.can_wait:
            state.post()
        if state.is_closed and state in self._serving.device.kv_manager.idle:  # the search ended while the call ran
            self._serving.device.kv_manager.idle.close(state, is_reusable=False)

    def _end(self, state: ClientState) -> None:
        """Let a sequence be idle whose feed ends without a result, unless it is closed."""
        if self._running.pop(state.id, None) is not None and not state.is_closed:
            self._serving.device.kv_manager.idle.add(state)

    def hold(self) -> None:
        """Let new feeds wait, those of beams excepted."""
        self.is_holding = True

    def release(self) -> None:
        """Begin the feeds that waited for another runner."""
        self.is_holding = False
        held = self._held
        self._held = []
        for state, order in held:
            self.feed(state, order)

    def end_held(self, reason: FinishReason, error: Exception | None) -> None:
        """End the feeds that waited for another runner."""
        held = self._held
        self._held = []
        for _, order in held:
            order.on_done(FeedResult(None, error or closed_error(reason)))

    def drop(self, error: Exception) -> None:
        """Forget all feeds, after ending them has failed."""
        self._running.clear()
        with suppress(Exception):
            self.end_held(FinishReason.ERROR, error)

    def set_priority(self, state: ClientState, priority: int) -> None:
        """Change the priority of a sequence, and of its feed in progress."""
        state.info.set_priority(priority)

    def close(self, state: ClientState, is_reusable: bool) -> None:
        """Close a sequence; a feed in progress ends before the next device call.

        Its slots stay cached for other requests if that ``is_reusable``.
        """
        state.is_closed = True
        state.is_reusable = is_reusable
        if state in self._serving.device.kv_manager.idle:
            self._serving.device.kv_manager.idle.close(state, is_reusable)
            if state.is_recorded:
                self._serving.profiler.record(state.record(FinishReason.STOP))
        elif state.id in self._serving.requests:
            self._serving.requests[state.id].cancel()

    def forget(self, state: ClientState) -> None:
        """Close a sequence whose slots are gone, in any state that an exception left."""
        state.is_closed = True
        if state in self._serving.device.kv_manager.idle:
            self._serving.device.kv_manager.idle.remove(state)
