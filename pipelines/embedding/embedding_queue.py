"""Queues the texts of many callers, and runs them in packed calls, the urgent ones first."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from staticllm.core import EncoderVariant
from staticllm.errors import BusyError, ClosedError, NumericalError, StaticLLMError, as_ours
from staticllm.pipelines.embedding.encoder_runner import EncoderRunner, TokenizedText, Vectors
from staticllm.pipelines.embedding.packing import PackedCall, plan_calls
from staticllm.pipelines.engine.jobs import new_source_id
from staticllm.pipelines.scheduling.interface import JobView

WINDOW = 512
"""The number of texts that are packed together. More would fill the calls hardly better."""

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
        self._plan: list[tuple[PackedCall, list[_Text]]] = []
        self._planned_priority: int | None = None
        self._is_stale = True
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
            self._is_stale = True
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
            if not self._plan:
                return None
            call, texts = self._plan[0]
            requests = [text.request for text in texts]
            arrival = min(request.arrival for request in requests)
            deadline = min((r.deadline for r in requests if r.deadline is not None), default=None)
            return JobView(self.id, self.runner.cost(call.variant), arrival, requests[0].priority, deadline)

    def run_next(self, meanwhile: Callable[[], None] | None = None) -> int:
        """Run one call, if texts wait, and hand their vectors out. Return its number of texts."""
        with self._is_running:
            self._prepare()
            with self._lock:
                if not self._plan:
                    return 0
                call, texts = self._plan.pop(0)
                self._num_waiting -= len(texts)
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
            left += [text for _, texts in self._plan for text in texts]
            self._waiting.clear()
            self._plan.clear()
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
        """Plan the calls of the next texts, if texts were added since the last plan or it is used up. The lock is held.

        Texts of the next call that nobody waits for any more are a reason too.
        """
        if self._plan and not self._is_stale:
            now = time.perf_counter()
            if not any(text.request.is_over or text.request.is_late(now) for text in self._plan[0][1]):
                return
        for _, texts in self._plan:
            assert self._planned_priority is not None
            self._waiting.setdefault(self._planned_priority, deque()).extendleft(reversed(texts))
        self._plan.clear()
        self._is_stale = False
        while self._waiting and not self._plan:
            priority = max(self._waiting)
            chosen = self._take(self._waiting[priority])
            if not self._waiting[priority]:
                del self._waiting[priority]
            self._planned_priority = priority
            self._plan = self._packed(chosen)

    def _take(self, waiting: deque[_Text]) -> list[_Text]:
        """Remove the next texts, and drop those that nobody waits for or whose deadline has passed."""
        chosen: list[_Text] = []
        now = time.perf_counter()
        while waiting and len(chosen) < WINDOW:
            text = waiting.popleft()
            request = text.request
            if request.is_over or request.is_late(now):
                self._num_waiting -= 1
                self._dropped.append(request)
                continue
            chosen.append(text)
        return chosen

    def _packed(self, texts: list[_Text]) -> list[tuple[PackedCall, list[_Text]]]:
        """Return the calls of these texts, the one with the oldest text first."""
        runner = self.runner
        lengths = [len(text.tokens) for text in texts]
        calls = plan_calls(lengths, self._variants(max(lengths, default=0)), runner.cost, runner.shape.is_packable)
        calls.sort(key=lambda call: min(call.texts))
        return [(call, [texts[index] for index in call.texts]) for call in calls]

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
        for text, vector in zip(texts, vectors, strict=True):
            if np.isfinite(vector).all():
                text.request.put(text.index, vector)
            else:
                self._run_alone(text)

    def _run_alone(self, text: _Text) -> None:
        """Run a text whose vector was not finite again without others, because one of those may be the cause."""
        call = plan_calls([len(text.tokens)], self.runner.variants, self.runner.cost)[0]
        (vector,) = self.runner.run(call.variant, [[text.tokens]])
        if np.isfinite(vector).all():
            text.request.put(text.index, vector)
        else:
            text.request.fail(
                NumericalError(
                    f"text {text.index}: its embedding is not finite: try INFERENCE_PRECISION_HINT='f32', or check the weights"
                )
            )
