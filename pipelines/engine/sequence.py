"""A sequence of tokens that an engine core runs: an answer whose tokens it chooses, or tokens that a client sends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from staticllm.core import Clock, FinishReason

from ...kvcache.sequence import PLAIN, Conditions, KVSequence
from ..profiling.records import RequestProgress, RequestRecord
from ..programs.model_runner import SegmentResult
from ..scheduling.request_table import RequestInfo
from .overflow import OverflowRule


class Outcome(Enum):
    """What follows after tokens of a sequence have run."""

    CONTINUE = auto()
    """More of its tokens run."""
    CHOOSE = auto()
    """The engine chooses the next token."""
    RETURN = auto()
    """The client that chooses its tokens gets the logits."""
    FAIL = auto()
    """Its logits are not finite."""


@dataclass
class KVHold:
    """What a sequence holds of the KV cache. Only ``KVCacheManager`` and ``IdleSequences`` change it.

    Attributes:
        sequence: Its slots in the arena; None without any.
        is_shifted: Whether its keys are not those that the model would compute.
        num_cached: The prompt tokens that the prefix cache had.
        num_recomputed: The tokens that ran again because the model takes other RoPE factors for a longer text.
    """

    sequence: KVSequence | None = None
    is_shifted: bool = False
    num_cached: int = 0
    num_recomputed: int = 0

    @property
    def num_slots(self) -> int:
        """The number of its tokens with slots in the arena."""
        return 0 if self.sequence is None else len(self.sequence)


class SequenceState(ABC):
    """One sequence inside the engine. ``tokens`` are in the order of the KV slots; ``info`` is its entry in the request table.

    Used on the engine's thread, except ``cancel_reason``, which any thread may set.

    Args:
        info: Its entry, with the status, the counts, the priority and the deadline.
        request: The id of the request that it belongs to.
        tokens: Its first tokens.
        clock: The clock of the engine.
        owner: The client that pays for its device time; 0 without one.
        conditions: What its keys and values depend on beside tokens and positions.
    """

    overflow: OverflowRule = "stop"
    """The rule for a sequence that fills its slots."""
    index: int = 0
    """Which answer of its request it is."""
    is_exact: bool = False
    """Whether its logits must not depend on what runs beside it."""
    is_reusable: bool = True
    """Whether its slots stay cached when it ends."""

    def __init__(
        self,
        info: RequestInfo,
        request: int,
        tokens: Sequence[int],
        clock: Clock,
        owner: int = 0,
        conditions: Conditions = PLAIN,
    ) -> None:
        self.info = info
        self.id = info.id
        self.request_id = request
        self.tokens = list(tokens)
        self.clock = clock
        self.owner = owner
        self.conditions = conditions
        self.kv = KVHold()
        self.cancel_reason: FinishReason | None = None
        self.started: float | None = None
        self.token_times: list[float] = []

    @property
    def num_generated(self) -> int:
        """The number of tokens that were chosen, or for which a client has had logits."""
        return len(self.token_times)

    @property
    def reusable_tokens(self) -> list[int]:
        """The tokens that may have keys and values of other requests, except the last of them, which must run."""
        return self.tokens

    @property
    @abstractmethod
    def can_bypass_arena(self) -> bool:
        """Whether the keys and values of its prompt may go to the host pool at once."""

    @property
    def is_recorded(self) -> bool:
        """Whether the profiler records its end."""
        return True

    def num_logits(self, start: int, count: int) -> int:
        """Return how many logits a call needs that runs the tokens ``[start, start + count)``."""
        return 1

    @abstractmethod
    def take_result(self, result: SegmentResult, count: int) -> Outcome:
        """Count ``count`` tokens that a call has run, and return what follows."""

    @abstractmethod
    def prepare(self) -> None:
        """Prepare the choice of the next token, while the device computes its logits."""

    def replace_tokens(self, tokens: list[int]) -> None:
        """Replace the tokens, in a conversation that was shortened."""
        self.tokens = tokens

    def finish_reason_at(self, now: float) -> FinishReason | None:
        """Return why the sequence must end at the moment ``now``: cancelled or past its deadline. None if it may continue."""
        if self.cancel_reason is not None:
            return self.cancel_reason
        deadline = self.info.deadline
        return FinishReason.DEADLINE if deadline is not None and now >= deadline else None

    @abstractmethod
    def add_call(self, seconds: float, own_seconds: float) -> None:
        """Add the ``seconds`` of a device call that ran some of its tokens, and the part of them by its rows."""

    @abstractmethod
    def post(self) -> None:
        """Hand over what was computed since the last time; mostly called while the device runs, so that readers wake then."""

    @abstractmethod
    def finish(self, reason: FinishReason, error: Exception | None = None) -> None:
        """Post what is left, and then the end."""

    @abstractmethod
    def record(self, reason: FinishReason) -> RequestRecord:
        """Return the record of a sequence that ends now."""


class ActiveRequest(ABC):
    """What a core serves under one id: the answers of a request, or one feed of a client's sequence.

    Runs on the engine's thread, except ``cancel``, ``is_waiting`` and ``progress``, which any thread may call.
    """

    id: int
    owner: int

    @property
    @abstractmethod
    def priority(self) -> int:
        """Its priority now."""

    @property
    @abstractmethod
    def is_waiting(self) -> bool:
        """Whether it counts as a request that waits."""

    @abstractmethod
    def progress(self) -> Sequence[RequestProgress]:
        """Return how far its answers are; nothing for a feed."""

    @abstractmethod
    def set_priority(self, priority: int) -> None:
        """Change its priority."""

    @abstractmethod
    def cancel(self, index: int | None = None, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End one of its answers, or all of it, before the next device call."""

    @abstractmethod
    def finish(self, state: SequenceState, reason: FinishReason, error: Exception | None = None) -> bool:
        """End one of its sequences. Return whether all of it has ended."""

    @abstractmethod
    def finish_from(self, first: int, reason: FinishReason, error: Exception | None = None) -> bool:
        """End every answer from index ``first`` on, in any state that an exception left. Return whether all of it has ended."""
