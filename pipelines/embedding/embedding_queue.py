"""Queues the texts of many callers, and runs them in packed calls, the urgent ones first."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

import numpy as np

from staticllm.core import EncoderVariant
from staticllm.errors import BusyError, ClosedError, NumericalError, StaticLLMError, as_ours
from staticllm.pipelines.embedding.encoder_runner import EncoderRunner, TokenizedText, Vectors
from staticllm.pipelines.embedding.packing import PackedCall, plan_calls
from staticllm.pipelines.engine.jobs import new_source_id
from staticllm.pipelines.scheduling.interface import JobView

WINDOW = 512
"""The number of texts that are packed together. More would fill the calls hardly better."""
SMALL_PLAN = 64
"""A plan of fewer texts is made again when others arrive: they fill its calls, and packing so few takes little time."""

_numbers = count(1)


@dataclass
class EmbeddingRequest:
    """The texts of one call of a user. ``future`` gets their vectors ``[n, width]``, or the error of the first that failed.

    ``deadline`` is a moment of ``time.perf_counter`` after which texts are not run any more. ``has_progressed`` is set whenever
    ``num_done`` texts have become more, and at the end.
    """

    texts: Sequence[TokenizedText]
    width: int
    priority: int = 0
    deadline: float | None = None
    arrival: float = field(default_factory=time.perf_counter)
    future: Future[Vectors] = field(default_factory=Future)
    id: int = field(default_factory=lambda: next(_numbers))

    def __post_init__(self) -> None:
        self.vectors: Vectors = np.zeros((len(self.texts), self.width), np.float32)
        self.num_done = 0
        self.has_progressed = threading.Event()
        self._lock = threading.Lock()  # the texts of one request may run on several devices
        self._is_ending = False

    @property
    def is_over(self) -> bool:
        """Whether nobody waits for the texts any more: the request was cancelled, or has failed."""
        return self.future.done()

    def is_late(self, now: float) -> bool:
        """Whether the deadline has passed at the moment ``now``."""
        return self.deadline is not None and now >= self.deadline

    def put(self, index: int, vector: Vectors) -> None:
        """Take the vector of one text; after the last one, hand all of them out."""
        self.vectors[index] = vector
        with self._lock:
            self.num_done += 1
            is_last = self.num_done == len(self.texts)
        if is_last and self._may_end():
            self.future.set_result(self.vectors)
        self.has_progressed.set()

    def fail(self, error: BaseException) -> None:
        """End the request with an error, unless it is over."""
        if self._may_end():
            self.future.set_exception(error)
        self.has_progressed.set()

    def wait(self, on_progress: Callable[[int, int], None] | None = None) -> Vectors:
        """Return the vectors when all are there; an exception, also of ``on_progress`` and Ctrl-C, cancels the request.

        ``on_progress`` gets the number of texts that are done, and of all texts, on this thread.

        Raises:
            StaticLLMError: a text failed, or the deadline passed.
        """
        num_told = 0
        try:
            while on_progress is not None and not self.future.done():
                self.has_progressed.wait()
                self.has_progressed.clear()
                num_told = self.num_done
                on_progress(num_told, len(self.texts))
            vectors = self.future.result()
            if on_progress is not None and num_told < len(self.texts):
                on_progress(len(self.texts), len(self.texts))
            return vectors
        except BaseException:
            self.future.cancel()
            raise

    def _may_end(self) -> bool:
        """Return True for the first end of a request that was not cancelled; tell waiting threads of one that was."""
        with self._lock:  # devices, and a thread that closes the queue, may end a request at the same time
            is_first, self._is_ending = not self._is_ending, True
        return is_first and self.future.set_running_or_notify_cancel()


@dataclass(frozen=True)
class _Text:
    """One text of a request."""

    request: EmbeddingRequest
    index: int

    @property
    def tokens(self) -> TokenizedText:
        return self.request.texts[self.index]

    def is_over(self, now: float) -> bool:
        """Whether nobody waits for the text any more at the moment ``now``."""
        return self.request.is_over or self.request.is_late(now)


class _Planned(NamedTuple):
    """A call and its texts, in the order of the call."""

    call: PackedCall
    texts: list[_Text]


class EmbeddingQueue:
    """The texts that wait for one device: the ``JobSource`` of an encoder. Any thread submits and closes.

    Texts of a higher priority come first, then those that arrived first. ``max_waiting`` is the most texts that may wait.
    """

    def __init__(self, runner: EncoderRunner, max_waiting: int) -> None:
        self.runner, self.id = runner, new_source_id()
        self._max_waiting = max_waiting
        self._wake: Callable[[], None] = lambda: None
        self._max_seconds: float | None = None
        self._lock = threading.Lock()
        self._is_running = threading.RLock()  # held during a call; a callback at its end may close the queue
        self._waiting: dict[int, deque[_Text]] = {}  # priority -> texts in the order of arrival
        self._num_waiting = 0
        self._is_closed = False
        self._plans: dict[int, list[_Planned]] = {}  # priority -> calls, none of them empty
        self._stale: set[int] = set()  # priorities whose plan is made again
        self._alone: deque[_Planned] = (
            deque()
        )  # texts whose vectors were not finite beside others; these calls come first
        self._dropped: list[EmbeddingRequest] = []  # late or cancelled; they end without the lock

    def attach(self, wake: Callable[[], None], max_seconds: float | None) -> None:
        """Take the function that wakes the device's thread; it is called, without a lock, after a request was added.

        ``max_seconds``: no call with fewer texts than that would take longer; None for no limit.
        """
        self._wake, self._max_seconds = wake, max_seconds

    def submit(self, request: EmbeddingRequest) -> None:
        """Add a request.

        Raises:
            BusyError: the queue has no room for its texts.
            ClosedError: the queue was closed.
        """
        with self._lock:
            if self._is_closed:
                raise ClosedError("the pipeline is closed: load the model again")
            num_waiting = self._num_waiting
            if num_waiting and num_waiting + len(request.texts) > self._max_waiting:
                raise BusyError(
                    f"{num_waiting} texts wait, {len(request.texts)} more would exceed MAX_WAITING {self._max_waiting}: try "
                    "again later, or load with a larger MAX_WAITING"
                )
            texts = self._waiting.setdefault(request.priority, deque())
            texts.extend(_Text(request, index) for index in range(len(request.texts)))
            self._num_waiting += len(request.texts)
            if sum(len(planned.texts) for planned in self._plans.get(request.priority, ())) < SMALL_PLAN:
                self._stale.add(request.priority)
        self._wake()

    @property
    def num_waiting(self) -> int:
        """The number of texts that wait."""
        return self._num_waiting

    @property
    def has_jobs(self) -> bool:
        """Whether texts wait."""
        return self._num_waiting > 0

    def next_job(self) -> JobView | None:
        """Return the next call as a policy sees it; None if no text waits."""
        self._prepare()
        with self._lock:
            if not self._alone and not self._plans:
                return None
            call, texts = self._alone[0] if self._alone else self._plans[max(self._plans)][0]
            requests = [text.request for text in texts]
            arrival = min(request.arrival for request in requests)
            deadline = min((r.deadline for r in requests if r.deadline is not None), default=None)
            return JobView(self.id, self.runner.cost(call.variant), arrival, requests[0].priority, deadline)

    def run_next(self, meanwhile: Callable[[], None] | None = None) -> int:
        """Run one call, if texts wait, and hand their vectors out. Return its number of texts."""
        with self._is_running:
            self._prepare()
            with self._lock:
                if not self._alone and not self._plans:
                    return 0
                call, texts = self._pop()
            try:
                self._run(call, texts, meanwhile)
            except BaseException as error:  # the texts of this call must end, or their readers would wait for ever
                for text in texts:
                    text.request.fail(as_ours(error))
            return len(texts)

    def close(self) -> None:
        """End all requests, and return after the call that runs now; later requests are refused."""
        with self._lock:
            self._is_closed = True
            left = [text for texts in self._waiting.values() for text in texts]
            plans = [self._alone, *self._plans.values()]
            left += [text for plan in plans for planned in plan for text in planned.texts]
            self._waiting.clear()
            self._plans.clear()
            self._alone.clear()
            self._num_waiting = 0
        for request in {text.request.id: text.request for text in left}.values():
            request.fail(ClosedError("the pipeline was closed before these texts were embedded"))
        with self._is_running:
            pass

    def _prepare(self) -> None:
        """Plan, and end late requests without the lock, because their callbacks may submit texts or close the queue."""
        with self._lock:
            self._replan()
            dropped, self._dropped = self._dropped, []
        for request in dropped:
            request.fail(StaticLLMError("the deadline passed before all texts were embedded"))

    def _replan(self) -> None:
        """Plan the calls of the next texts of the highest priority, unless its plan is still good. The lock is held."""
        now = time.perf_counter()
        while self._alone:
            if self._living(self._alone[0].texts, now):
                return
            self._alone.popleft()
        while priorities := self._plans.keys() | self._waiting.keys():
            priority = max(priorities)
            if priority in self._stale:
                self._stale.discard(priority)
                texts = [text for planned in self._plans.pop(priority, ()) for text in planned.texts]
                self._waiting.setdefault(priority, deque()).extendleft(reversed(texts))
            if priority in self._plans:
                if self._has_living_call(priority):
                    return
            elif chosen := self._take(priority):
                self._plans[priority] = self._packed(chosen)
                return

    def _has_living_call(self, priority: int) -> bool:
        """Return whether the next call of a plan has no text that nobody waits for; such a call is planned without them."""
        plan, now = self._plans[priority], time.perf_counter()
        if not any(text.is_over(now) for text in plan[0].texts):
            return True
        texts = self._living(plan.pop(0).texts, now)
        plan[:0] = self._packed(texts) if texts else []
        if not plan:
            del self._plans[priority]
        return bool(texts)

    def _pop(self) -> _Planned:
        """Remove the next call. The lock is held."""
        if self._alone:
            planned = self._alone.popleft()
        else:
            priority = max(self._plans)
            planned = self._plans[priority].pop(0)
            if not self._plans[priority]:
                del self._plans[priority]
        self._num_waiting -= len(planned.texts)
        return planned

    def _take(self, priority: int) -> list[_Text]:
        """Remove the next texts of a priority, and drop those that nobody waits for or whose deadline has passed."""
        chosen: list[_Text] = []
        waiting, now = self._waiting[priority], time.perf_counter()
        while waiting and len(chosen) < WINDOW:
            chosen += self._living([waiting.popleft()], now)
        if not waiting:
            del self._waiting[priority]
        return chosen

    def _living(self, texts: Sequence[_Text], now: float) -> list[_Text]:
        """Return the texts that somebody waits for; the others are no longer counted, and end later without the lock."""
        living = [text for text in texts if not text.is_over(now)]
        self._num_waiting -= len(texts) - len(living)
        self._dropped += [text.request for text in texts if text.is_over(now)]
        return living

    def _packed(self, texts: list[_Text]) -> list[_Planned]:
        """Return the calls of these texts, the one with the oldest text first."""
        runner = self.runner
        lengths = [len(text.tokens) for text in texts]
        calls = plan_calls(lengths, self._variants(max(lengths, default=0)), runner.cost, runner.shape.is_packable)
        calls.sort(key=lambda call: min(call.texts))
        return [_Planned(call, [texts[index] for index in call.texts]) for call in calls]

    def _variants(self, longest: int) -> Sequence[EncoderVariant]:
        """Return the variants that keep ``max_seconds``, and the cheapest one that holds the longest text."""
        runner, limit = self.runner, self._max_seconds
        if limit is None:
            return runner.variants
        least = min((v for v in runner.variants if v.rows >= longest), key=runner.cost)
        return [v for v in runner.variants if v == least or runner.cost(v) <= limit]

    def _run(self, call: PackedCall, texts: list[_Text], meanwhile: Callable[[], None] | None) -> None:
        places = iter(texts)
        sequences = [[next(places).tokens for _ in sequence] for sequence in call.sequences]
        vectors = self.runner.run(call.variant, sequences, meanwhile)
        suspects = []
        for text, vector in zip(texts, vectors, strict=True):
            if np.isfinite(vector).all():
                text.request.put(text.index, vector)
            elif len(texts) > 1:
                suspects.append(text)
            else:
                text.request.fail(_not_finite(text.index))
        self._run_alone_later(suspects)

    def _run_alone_later(self, texts: list[_Text]) -> None:
        """Plan texts whose vectors were not finite as calls of their own, because another text of the call may be the cause."""
        with self._lock:
            closed = texts if self._is_closed else []
            for text in [] if self._is_closed else texts:
                self._alone.extend(self._packed([text]))
                self._num_waiting += 1
        for text in closed:
            text.request.fail(ClosedError("the pipeline was closed before these texts were embedded"))


def _not_finite(index: int) -> NumericalError:
    return NumericalError(
        f"text {index}: its embedding is not finite: try INFERENCE_PRECISION_HINT='f32', or check the weights"
    )
