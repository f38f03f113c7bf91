"""Plans the calls of one device in this process: the texts that wait for it, packed, and the order of their priorities."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import cast

from staticllm.core import EncoderVariant

from ...scheduling.device_share import TimeCredit
from ..embedding_request import EmbeddingRequest
from ..encoder_runner import EncoderRunner, calls_of
from ..packing.chunks import ContinuedText
from ..packing.tokenized_text import TokenizedText
from .device_queue import DeviceQueue, QueuedText

WINDOW = 512
"""The number of texts that are packed together. More would fill the calls hardly better."""
SMALL_PLAN = 64
"""A plan of fewer texts is made again when others arrive: they fill its calls, and packing so few takes little time."""
NEARLY = 1.1
"""A variant stays in use until its cost exceeds the limit by this factor: costs fluctuate, and planning takes time."""
TOO_LONG = 1e6
"""Cost penalty for variants above the limit: only texts that fit nowhere else choose them."""
DELAY_SHARE, LONGEST_DELAY = 0.15, 0.02
"""The longest wait for clients that ask again: as a share of the call before, and in seconds."""


@dataclass(frozen=True)
class EncoderCall:
    """A call of ``variant`` with packed texts, as its ``sequences`` say; or the next call of one text that runs in chunks."""

    texts: list[QueuedText]
    variant: EncoderVariant | None = None
    sequences: Sequence[Sequence[TokenizedText]] = ()
    chunk: ContinuedText | None = None


@dataclass
class CallPlan:
    """The next calls of one priority."""

    alone: deque[EncoderCall] = field(default_factory=deque)
    """Texts that have begun, or whose vectors were not finite beside others; they run first, each in calls of its own."""
    calls: deque[EncoderCall] = field(default_factory=deque)
    variants: Sequence[EncoderVariant] = ()
    """The variants that the other ``calls`` were planned with."""
    is_stale: bool = False
    """Whether it is made again, with later texts."""

    def __bool__(self) -> bool:
        return bool(self.alone or self.calls)

    @property
    def head(self) -> EncoderCall:
        """The call that runs next."""
        return self.alone[0] if self.alone else self.calls[0]

    def pop(self) -> EncoderCall:
        """Remove and return the call that runs next."""
        return self.alone.popleft() if self.alone else self.calls.popleft()


class CallPlanner:
    """Chooses the next call of a device. Texts stay in its queue until they run. The lock of the queue is held around methods.

    Higher priorities go first, then earlier texts. While higher priorities always wait, the lower ones get ``BEHIND_SHARE`` of
    the device time.
    """

    def __init__(self, device: DeviceQueue, runner: EncoderRunner) -> None:
        self._device = device
        self._runner = runner
        self._plans: dict[int, CallPlan] = {}
        self._credit = TimeCredit()
        self._max_seconds: float | None = None

    def limit(self, max_seconds: float | None) -> None:
        """Plan calls that take at most this time, as far as their texts allow it; None for no limit."""
        self._max_seconds = max_seconds

    def come(self, priority: int) -> None:
        """Take notice of new texts of a priority."""
        plan = self._plans.get(priority)
        if plan is not None and sum(len(planned.texts) for planned in plan.calls) < SMALL_PLAN:
            plan.is_stale = True

    def next(self) -> EncoderCall | None:
        """Return the call that runs next; None if no text waits."""
        priority = self._turn()
        return None if priority is None else self._plans[priority].head

    def pop(self) -> EncoderCall | None:
        """Return the call that runs now, and count its time."""
        priority = self._turn()
        if priority is None:
            return None
        plan = self._plans[priority]
        seconds = self.seconds(plan.head)
        priorities = self._device.bulk.priorities
        if priority < priorities[0]:
            self._credit.pay(seconds)
        else:
            self._credit.lead(seconds, is_followed=len(priorities) > 1)
        planned = plan.pop()
        if not plan:
            del self._plans[priority]
        if planned.chunk is not None:
            planned.texts[0].chunk = planned.chunk
        return planned

    def seconds(self, planned: EncoderCall) -> float:
        return self._runner.cost(self.variant(planned))

    def variant(self, planned: EncoderCall) -> EncoderVariant:
        if planned.chunk is not None:
            return self._runner.next_chunk(planned.chunk, self._max_seconds)
        assert planned.variant is not None
        return planned.variant

    def run_alone(self, texts: Iterable[QueuedText]) -> None:
        """Let texts that are back in the queue be the next ones of their priority, the first one first, each by itself."""
        variants = self._variants(())
        for text in reversed(list(texts)):
            is_begun = text.chunk is not None
            calls = [EncoderCall([text], chunk=text.chunk)] if is_begun else self._packed([text], variants)
            self._plans.setdefault(text.priority, CallPlan()).alone.extendleft(calls)

    def _turn(self) -> int | None:
        """Return the priority whose next call runs, after planning it; None if no text waits."""
        while priorities := self._device.bulk.priorities:
            first, *behind = priorities
            self._plan(first)
            if not behind or not self._credit.covers(self._runner.cost(self._runner.variants[0])):
                return first
            oldest = min(behind, key=lambda priority: self._device.bulk.first(priority, 1)[0].arrival)
            self._plan(oldest)
            return oldest if self._credit.covers(self.seconds(self._plans[oldest].head)) else first
        self._plans = {}
        return None

    def _plan(self, priority: int) -> None:
        """Plan the next texts of a priority, unless its plan is still good."""
        plan = self._plans.setdefault(priority, CallPlan())
        variants = self._variants(plan.variants)
        if plan.is_stale or variants != plan.variants:
            plan.calls.clear()
            plan.variants = variants
            plan.is_stale = False
        while True:
            if not plan:
                plan.calls.extend(self._packed(self._window(priority), variants))
            waiting = [text for text in plan.head.texts if text in self._device.bulk]
            if len(waiting) == len(plan.head.texts):
                return
            plan.pop()
            plan.calls.extendleft(reversed(self._packed(waiting, variants)))

    def _window(self, priority: int) -> list[QueuedText]:
        texts = cast("list[QueuedText]", self._device.bulk.first(priority, WINDOW))
        return [text for text in texts if not text.runs_alone] or texts[:1]

    def _packed(self, texts: list[QueuedText], allowed: Sequence[EncoderVariant]) -> list[EncoderCall]:
        """Return the calls of these texts, the one with the oldest text first."""
        runner = self._runner
        most = max((variant.rows for variant in allowed), default=0)
        lengths = {text.num_tokens for text in texts}
        needed = {self._cheapest(length) for length in lengths if most < length <= runner.max_rows}

        def cost(variant: EncoderVariant) -> float:
            return runner.cost(variant) * (TOO_LONG if variant in needed else 1.0)

        calls = calls_of(runner, [text.tokens for text in texts], (*allowed, *needed), cost)
        packed = [
            EncoderCall(
                [texts[index] for index in call.texts],
                call.variant,
                [[texts[index].tokens for index in sequence] for sequence in call.sequences],
            )
            for call in calls.packed
        ]
        chunked = [EncoderCall([texts[index]], chunk=chunk) for index, chunk in calls.chunks.items()]
        return sorted((*packed, *chunked), key=lambda planned: min(text.id for text in planned.texts))

    def _cheapest(self, num_tokens: int) -> EncoderVariant:
        """Return the cheapest variant that holds a text of that many tokens."""
        return min((variant for variant in self._runner.variants if variant.rows >= num_tokens), key=self._runner.cost)

    def _variants(self, planned: Sequence[EncoderVariant]) -> Sequence[EncoderVariant]:
        """Return the variants that keep the limit; those of the plan keep it as long as they nearly do."""
        runner = self._runner
        limit = self._max_seconds
        if limit is None:
            return runner.variants
        return tuple(v for v in runner.variants if runner.cost(v) <= limit * (NEARLY if v in planned else 1))


class BatchingDelay:
    """Lets a call wait a moment for the clients that got their vectors together, because they may ask again together.

    Without it, the first of n clients would get a call alone, and the others the next one, which takes nearly as long with n
    texts as with n - 1. A request with a deadline or a higher priority is not delayed, and there is no delay after one client.
    """

    def __init__(self) -> None:
        self._num_expected = 0
        self._num_come = 0
        self._num_served = 0
        self._until = 0.0
        self._is_urgent = False

    def come(self, request: EmbeddingRequest) -> None:
        self._num_come += 1
        self._is_urgent = self._is_urgent or request.priority > 0 or request.deadline is not None

    def serve(self, num_requests: int, seconds: float, is_last: bool, now: float) -> None:
        """Count the requests of a call that took ``seconds``, before they end.

        Args:
            is_last: Whether nothing else waits.
        """
        self._num_served = num_requests + (0 if self._num_come else self._num_served)
        self._num_come = 0
        self._is_urgent = False
        self._num_expected = self._num_served if is_last else 0
        self._until = now + min(DELAY_SHARE * seconds, LONGEST_DELAY)

    def seconds(self, now: float) -> float:
        """Return how much longer the next call should wait; 0 if all have come."""
        is_complete = self._is_urgent or self._num_come >= self._num_expected
        return 0.0 if is_complete else max(0.0, self._until - now)
