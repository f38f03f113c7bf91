"""A sequence whose tokens are chosen outside the engine: its client feeds tokens, and gets the logits after them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeVar

import numpy as np

from staticllm.core import Clock, FinishReason
from staticllm.errors import ClosedError, StaticLLMError

from ....kvcache.sequence import PLAIN, Conditions, KVSequence
from ...costs.model import SMOOTHING, averaged
from ...generation.beam_search import BeamMask
from ...generation.filters import Logits
from ...profiling.records import RequestProgress, RequestRecord
from ...programs.model_runner import SegmentResult
from ...scheduling.interface import IdleView
from ...scheduling.request_table import RequestInfo
from ..request import new_id
from ..sequence import ActiveRequest, Outcome, SequenceState

Wanted = Literal["last", "all"]
"""After which of its tokens a feed gets logits."""
MAX_THINK_SECONDS = 0.25
"""Longest think time that counts; longer ones are pauses of the user."""


@dataclass(frozen=True)
class FeedResult:
    """What a feed computed: ``logits [n, vocab]`` f32 after all of its tokens, or after the last one (n = 1).

    They may be NaN; ``is_finite`` then is False, and the keys of the feed were not kept. After ``error``, ``logits`` is None, and
    the sequence is as it was before the feed. ``device_seconds`` is the time of the calls that the feed was part of, and
    ``queued_seconds`` the time before the first of them.
    """

    logits: Logits | None
    error: Exception | None = None
    is_finite: bool = True
    device_seconds: float = 0.0
    queued_seconds: float = 0.0


@dataclass(frozen=True)
class FeedOrder:
    """Tokens for a sequence, sent at the moment ``sent_at`` of the engine's clock.

    ``on_done`` is called once, on the engine's thread, and must return quickly.
    """

    tokens: tuple[int, ...]
    wanted: Wanted
    on_done: Callable[[FeedResult], None]
    sent_at: float


class ThinkTime:
    """Expects how long a client takes between logits and its next tokens, in seconds: a moving average and its deviation."""

    def __init__(self) -> None:
        self._mean: float | None = None
        self._deviation = 0.0

    @property
    def expected(self) -> float | None:
        """The time within which the next tokens usually come; None before the first time."""
        return None if self._mean is None else self._mean + self._deviation

    def add(self, seconds: float) -> None:
        """Count a think time."""
        if seconds > MAX_THINK_SECONDS:
            return
        if self._mean is None:
            self._mean = seconds
            self._deviation = seconds / 2
            return
        self._deviation = averaged(self._deviation, abs(seconds - self._mean), SMOOTHING)
        self._mean = averaged(self._mean, seconds, SMOOTHING)


State = TypeVar("State", bound="ClientState")


class ClientState(SequenceState):
    """A client sequence inside the engine. While a feed is in progress, it is a request of the table; otherwise it is *idle*.

    ``tokens`` are those of all feeds. Used on the engine's thread.
    """

    can_wait: ClassVar[bool] = True
    """Whether its results may wait until the next call runs, and its feeds until another runner was installed."""

    def __init__(
        self,
        vocab_size: int,
        priority: int = 0,
        think: ThinkTime | None = None,
        conditions: Conditions = PLAIN,
        owner: int = 0,
        clock: Clock = time.perf_counter,
    ) -> None:
        now = clock()
        info = RequestInfo(new_id(), now, 0, priority, is_client_driven=True)
        super().__init__(info, info.id, (), clock, owner, conditions)
        self.think = think or ThinkTime()
        self.idle_since = now
        self.is_suspect = False  # its last tokens had logits that are not finite, and are not kept
        self.is_closed = False
        self._vocab_size = vocab_size
        self._first_sent_at = now
        self._num_prompt = 0  # tokens of the first feed
        self._order: FeedOrder | None = None
        self._result: FeedResult | None = None
        self._logits: Logits | None = None
        self._num_before = 0
        self._first_wanted = 0
        self._num_rows = 0
        self._device_seconds = 0.0
        self._is_answering = False  # the client has had logits

    def prepare(self) -> None:
        """Do nothing: the client chooses."""

    def forked(self: State) -> State:
        """Return another sequence of the same client with the same tokens, and without slots."""
        other = type(self)(self._vocab_size, self.info.priority, self.think, self.conditions, self.owner, self.clock)
        other._first_sent_at = self._first_sent_at
        other._num_prompt = self._num_prompt
        other.tokens = list(self.tokens)
        other.is_suspect = self.is_suspect
        other.is_exact = self.is_exact
        other.token_times = list(self.token_times)
        return other

    def take_cached(self, sequence: KVSequence) -> None:
        """Have the tokens of a cached sequence, before any feed."""
        assert not self.tokens, "it has tokens"
        self.kv.sequence = sequence
        self.kv.num_cached = len(sequence)
        self.tokens = list(sequence.tokens)

    @property
    def ready_at(self) -> float | None:
        """The moment by which the next feed is expected; None if it cannot be known."""
        expected = self.think.expected
        return self.idle_since + expected if expected is not None and self._is_answering else None

    @property
    def view(self) -> IdleView:
        """The sequence as a policy receives it while it is idle."""
        return IdleView(self.id, self.idle_since, self.ready_at, self.kv.num_slots, self.info.priority)

    def begin(self, order: FeedOrder) -> None:
        """Begin a feed: its tokens follow those of earlier feeds."""
        now = order.sent_at  # the engine may have been busy since
        if self._is_answering:
            self.think.add(now - self.idle_since)
        if not self.tokens:
            self._first_sent_at = now
            self._num_prompt = len(order.tokens)
        self._order = order
        self._num_before = len(self.tokens)
        self.tokens += order.tokens
        self._first_wanted = self._num_before if order.wanted == "all" else len(self.tokens) - 1
        self._num_rows = 0
        self._logits = np.empty((len(self.tokens) - self._first_wanted, self._vocab_size), np.float32)
        self.started = None
        self._device_seconds = 0.0
        num_new = len(self.tokens) - self.kv.num_slots
        arrival = now if num_new > 1 or not self.token_times else self.info.arrival
        self.info = RequestInfo(self.id, arrival, len(self.tokens), self.info.priority, is_client_driven=True)

    @property
    def reusable_tokens(self) -> list[int]:
        """The tokens that may have keys and values of other requests, and one more: nothing is computed before it."""
        return self.tokens[: self._first_wanted + self._num_rows + 1]

    @property
    def can_bypass_arena(self) -> bool:
        """Never: its next token may come at once."""
        return False

    def num_logits(self, start: int, count: int) -> int:
        """Return how many logits the tokens ``[start, start + count)`` need."""
        return max(1, start + count - max(self._first_wanted + self._num_rows, start))

    @property
    def is_recorded(self) -> bool:
        """Whether the profiler records its end: only when it is closed."""
        return self.is_closed

    def add_call(self, seconds: float, own_seconds: float) -> None:
        """Add the ``seconds`` of a device call that the feed was part of."""
        del own_seconds
        self._device_seconds += seconds

    def take_result(self, result: SegmentResult, count: int) -> Outcome:
        """Keep the logits of ``count`` tokens that were fed. With the last ones, or NaN, the feed is complete."""
        is_finite = result.argmax is not None
        self._keep(result.logits, self.info.num_computed + count)
        if not self.info.add_computed(result.num_accepted) and is_finite:
            return Outcome.CONTINUE
        self._complete(is_finite)
        return Outcome.RETURN

    def _keep(self, logits: Logits, end: int) -> None:
        """Keep those of ``logits [n, vocab]`` that are wanted; the last one is after token ``end - 1``."""
        assert self._logits is not None, "no feed"
        count = end - self._first_wanted - self._num_rows
        if count > 0:
            self._logits[self._num_rows : self._num_rows + count] = logits[-count:]
            self._num_rows += count

    def _complete(self, is_finite: bool) -> None:
        """End the feed: all logits are there, or are not finite. ``post`` hands them to the client."""
        assert self._logits is not None, "no feed"
        self._logits[self._num_rows :] = np.nan
        self.is_suspect = not is_finite
        self.idle_since = self.clock()
        self.token_times.append(self.idle_since)
        self._is_answering = True
        self._result = self._finished(self._logits, is_finite=is_finite)

    def post(self) -> None:
        """Hand the result of a completed feed to its client. The time until its next feed counts from now."""
        if self._result is not None and self._order is not None:
            order = self._order
            result = self._result
            self._order = None
            self._result = None
            self._logits = None
            self.idle_since = self.clock()
            order.on_done(result)

    def finish(self, reason: FinishReason, error: Exception | None = None) -> None:
        """End a feed that cannot be completed; without its tokens, the sequence is as before."""
        self.post()
        if self._order is not None:
            del self.tokens[self._num_before :]
            self._result = self._finished(None, error or closed_error(reason))
            self.post()

    def record(self, reason: FinishReason) -> RequestRecord:
        """Return the record of the sequence, which ends now. Its prompt is the first feed."""
        return RequestRecord(
            id=self.id,
            arrival=self._first_sent_at,
            started=self.started,
            token_times=tuple(self.token_times),
            num_prompt=self._num_prompt,
            num_cached=self.kv.num_cached,
            reason=reason,
            ended=self.clock(),
        )

    def _finished(self, logits: Logits | None, error: Exception | None = None, is_finite: bool = True) -> FeedResult:
        assert self._order is not None, "no feed"
        queued = (self.started or self.clock()) - self._order.sent_at
        return FeedResult(logits, error, is_finite, self._device_seconds, queued)


class BeamState(ClientState):
    """A beam of a search, which chooses its tokens on the engine's thread. ``mask``: what may follow; None for anything."""

    can_wait = False
    mask: BeamMask | None = None

    @property
    def is_recorded(self) -> bool:
        """Never: its search is recorded."""
        return False

    @property
    def ready_at(self) -> float | None:
        """Never known: the search feeds it when all beams have run."""
        return None

    def prepare(self) -> None:
        """Find what may follow, while the device runs."""
        if self.mask is not None:
            self.mask.prepare()


class FeedRequest(ActiveRequest):
    """One feed in a core; it ends with the feed. ``on_end`` is called before a feed ends that has no result."""

    def __init__(self, state: ClientState, on_end: Callable[[ClientState], None]) -> None:
        self.id = state.id
        self.owner = state.owner
        self._state = state
        self._on_end = on_end

    @property
    def priority(self) -> int:
        """The priority of the sequence."""
        return self._state.info.priority

    @property
    def is_waiting(self) -> bool:
        """Never: its client waits for it, and no other request is refused for that."""
        return False

    def progress(self) -> tuple[RequestProgress, ...]:
        """Return nothing: its client knows how far it is."""
        return ()

    def set_priority(self, priority: int) -> None:
        """Change the priority of the sequence."""
        self._state.info.set_priority(priority)

    def cancel(self, index: int | None = None, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End the feed before the next device call."""
        self._state.cancel_reason = reason

    def finish(self, state: SequenceState, reason: FinishReason, error: Exception | None = None) -> bool:
        """End the feed."""
        self._on_end(self._state)
        return self.finish_from(0, reason, error)

    def finish_from(self, first: int, reason: FinishReason, error: Exception | None = None) -> bool:
        """End the feed, in any state that an exception left."""
        self._state.finish(reason, error)
        return True


def closed_error(reason: FinishReason) -> StaticLLMError:
    """Return the error of a feed that ends because its sequence or the engine was closed."""
    return ClosedError(f"the tokens were not run ({reason}): the sequence or the engine was closed")
