"""The client's side of client sequences: any thread opens them, feeds them tokens, forks and closes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from staticllm.errors import BusyError, ClosedError, PromptError, as_ours

from ....kvcache.sequence import AdapterScales
from ..engine_core import EngineCore
from .state import ClientState, FeedOrder, FeedResult, Wanted


class SequenceEngine(Protocol):
    """What a client sequence uses of its engine."""

    @property
    def core(self) -> EngineCore:
        """What runs the sequence; used on the engine's thread."""
        ...

    def call_soon(self, function: Callable[[], object]) -> None:
        """Call ``function`` on the engine's thread between two device calls."""
        ...


@dataclass(frozen=True)
class ExactPrefix:
    """What a sequence begins with. Its logits, and those of its forks, do not depend on what runs beside it.

    That holds where the device lets it be. ``adapters``: the factor of each; () for none. ``on_open`` gets the number of
    ``tokens`` that are cached, which the sequence has from the beginning, or why it could not be opened. It is called on the
    engine's thread, before any feed runs.
    """

    tokens: Sequence[int]
    on_open: Callable[[int | Exception], object]
    adapters: AdapterScales = ()


class ClientSequence:
    """A sequence of an engine whose tokens its client chooses. Any thread may call, one at a time.

    ``length`` is the number of tokens that were fed. While a feed is in progress, only ``close`` may be called.
    """

    def __init__(
        self,
        engine: SequenceEngine,
        priority: int = 0,
        owner: int = 0,
        original: ClientSequence | None = None,
        exact: ExactPrefix | None = None,
    ) -> None:
        """``exact``: what the sequence begins with as far as it is cached; see there."""
        self._engine = engine
        self._core = engine.core
        self.priority = priority
        self.owner = owner
        self.vocab_size = engine.core.device.runner.cache.layout.vocab_size
        self._state: ClientState | None = None  # made on the engine's thread
        self._is_busy = False
        self._is_closed = False
        self.length: int = 0 if original is None else original.length
        engine.call_soon(lambda: self._open(original, exact))

    def fork(self, priority: int | None = None) -> ClientSequence:
        """Return another sequence with the same tokens; both share the KV slots of these. None: of the same priority.

        Raises:
            BusyError: a feed is in progress.
            ClosedError: the sequence or the engine was closed.
        """
        self.check_free()
        return ClientSequence(self._engine, self.priority if priority is None else priority, self.owner, self)

    def set_priority(self, priority: int) -> None:
        """Change the priority of the sequence, also of a feed in progress, before the next device call."""
        if priority != self.priority:
            self.priority = priority
            with suppress(ClosedError):  # the engine has released everything
                self._engine.call_soon(lambda: self._core.feeds.set_priority(self._opened, priority))

    def close(self, is_reusable: bool = True) -> None:
        """Release the sequence; a second call does nothing. A feed in progress ends with a ``ClosedError``.

        Its KV slots stay cached for sequences and prompts that begin with the same tokens, if that ``is_reusable``.
        """
        if self._is_closed:
            return
        self._is_closed = True
        with suppress(ClosedError):  # the engine has released everything
            self._engine.call_soon(lambda: self._close(is_reusable))

    def check_free(self) -> None:
        """Check that a feed or a fork may begin.

        Raises:
            BusyError: a feed is in progress.
            ClosedError: the sequence was closed.
        """
        if self._is_closed:
            raise ClosedError("the sequence is closed: open another one")
        if self._is_busy:
            raise BusyError("a feed of this sequence is in progress: wait for its logits")

    def check_tokens(self, tokens: Sequence[int]) -> None:
        """Check the tokens of a feed.

        Raises:
            PromptError: there are none, or one is outside the vocabulary.
        """
        if not tokens:
            raise PromptError("a feed has no token: send at least one")
        if min(tokens) < 0 or max(tokens) >= self.vocab_size:
            bad = next(token for token in tokens if not 0 <= token < self.vocab_size)
            raise PromptError(f"token id {bad} is outside the vocabulary: ids go from 0 to {self.vocab_size - 1}")

    def begin(self, feed: Feed) -> Callable[[], None]:
        """Mark the sequence as busy, and return the function that begins the feed on the engine's thread."""
        self._is_busy = True

        def on_done(result: FeedResult) -> None:
            if result.error is None:
                self.length += len(feed.tokens)
            self._is_busy = False
            feed.on_done(result)

        order = FeedOrder(tuple(feed.tokens), feed.wanted, on_done, self._core.clock())

        def run() -> None:
            try:
                self._core.feeds.feed(self._opened, order)
            except BaseException as error:  # a bug of ours; the client must not wait forever
                on_done(FeedResult(None, as_ours(error)))

        return run

    def give_up(self) -> None:
        """Mark the sequence as free again, because its feed could not be handed over."""
        self._is_busy = False

    @property
    def _opened(self) -> ClientState:
        assert self._state is not None, "used before it was opened"
        return self._state

    def _close(self, is_reusable: bool) -> None:
        if self._state is not None:  # else it could not be opened
            self._core.feeds.close(self._state, is_reusable)

    def _open(self, original: ClientSequence | None, exact: ExactPrefix | None) -> None:
        feeds = self._core.feeds
        if exact is not None:
            try:
                self._state = feeds.open_exact(exact.tokens, self.priority, self.owner, exact.adapters)
            except Exception as error:
                exact.on_open(as_ours(error))
                return
            self.length = len(self._state.tokens)
            exact.on_open(self.length)
        elif original is None:
            self._state = feeds.open(self.priority, owner=self.owner)
        else:
            self._state = self._core.device.kv_manager.idle.fork(original._opened)
            self._state.info.set_priority(self.priority)


@dataclass(frozen=True)
class Feed:
    """Tokens for one sequence. ``on_done`` is called once with the result, on the engine's thread, and must return quickly.

    ``wanted``: logits after the last token, or after all of them.
    """

    sequence: ClientSequence
    tokens: Sequence[int]
    on_done: Callable[[FeedResult], None]
    wanted: Wanted = "all"


def begin_feeds(engine: SequenceEngine, feeds: Iterable[Feed]) -> None:
    """Check feeds and hand them to the engine together, so that they can share calls.

    Raises:
        PromptError: a feed has no token, or one outside the vocabulary.
        BusyError: a sequence has a feed in progress.
        ClosedError: a sequence or the engine was closed.
    """
    feeds = list(feeds)
    if len({feed.sequence for feed in feeds}) < len(feeds):
        raise BusyError("two feeds of one sequence at once: wait for the logits of the first")
    for feed in feeds:
        feed.sequence.check_free()
        feed.sequence.check_tokens(feed.tokens)
    begins = [feed.sequence.begin(feed) for feed in feeds]

    def begin_all() -> None:
        for begin in begins:
            begin()

    try:
        engine.call_soon(begin_all)
    except BaseException:
        for feed in feeds:
            feed.sequence.give_up()
        raise
