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

from staticllm.errors import BusyError, ClosedError, NumericalError, StaticLLMError, as_ours
from staticllm.pipelines.embedding.encoder_runner import EncoderRunner, TokenizedText, Vectors
from staticllm.pipelines.embedding.packing import PackedCall, plan_calls

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

    def _may_end(self) -> bool:
        with self._lock:
            if self._is_ending or self.future.done():
                return False
            self._is_ending = True
        return self.future.set_running_or_notify_cancel()


@dataclass(frozen=True)
class _Text:
    """One text of a request."""

    request: EmbeddingRequest
    index: int

    @property
    def tokens(self) -> TokenizedText:
        return self.request.texts[self.index]


class EmbeddingQueue:
    """The texts that wait for one device. Any thread submits; the thread that owns the device calls ``run_next``.

    Texts of a higher priority come first, then those that arrived first. ``on_submit`` is called, without a lock, after a
    request was added. ``max_waiting`` is the most texts that may wait.
    """

    def __init__(self, runner: EncoderRunner, max_waiting: int, on_submit: Callable[[], None] = lambda: None) -> None:
        self.runner, self.on_submit = runner, on_submit
        self._max_waiting = max_waiting
        self._lock = threading.Lock()
        self._waiting: dict[int, deque[_Text]] = {}  # priority -> texts in the order of arrival
        self._num_waiting = 0
        self._is_closed = False
        self._plan: list[tuple[PackedCall, list[_Text]]] = []
        self._planned_priority: int | None = None
        self._is_stale = True

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
        self.on_submit()

    @property
    def num_waiting(self) -> int:
        """The number of texts that wait."""
        return self._num_waiting

    def next_call(self) -> tuple[float, int, float] | None:
        """Return the next call's seconds, priority and the arrival of its oldest text; None if no text waits."""
        with self._lock:
            self._replan()
            if not self._plan:
                return None
            call, texts = self._plan[0]
            return self.runner.cost(call.variant), texts[0].request.priority, min(t.request.arrival for t in texts)

    def run_next(self, meanwhile: Callable[[], None] | None = None) -> bool:
        """Run one call, if texts wait, and hand their vectors out. Return whether one ran."""
        with self._lock:
            self._replan()
            if not self._plan:
                return False
            call, texts = self._plan.pop(0)
            self._num_waiting -= len(texts)
        try:
            self._run(call, texts, meanwhile)
        except BaseException as error:  # the texts of this call must end, or their readers would wait for ever
            for text in texts:
                text.request.fail(as_ours(error))
        return True

    def close(self) -> None:
        """End all requests; later ones are refused."""
        with self._lock:
            self._is_closed = True
            left = [text for texts in self._waiting.values() for text in texts]
            left += [text for _, texts in self._plan for text in texts]
            self._waiting.clear()
            self._plan.clear()
            self._num_waiting = 0
        for request in {text.request.id: text.request for text in left}.values():
            request.fail(ClosedError("the pipeline was closed before these texts were embedded"))

    def _replan(self) -> None:
        """Plan the calls of the next texts, if texts were added since the last plan or it is used up. The lock is held."""
        if not self._is_stale and self._plan:
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
            if request.deadline is not None and now >= request.deadline:
                request.fail(StaticLLMError("the deadline passed before all texts were embedded"))
            if request.is_over:
                self._num_waiting -= 1
                continue
            chosen.append(text)
        return chosen

    def _packed(self, texts: list[_Text]) -> list[tuple[PackedCall, list[_Text]]]:
        """Return the calls of these texts, the one with the oldest text first."""
        runner = self.runner
        lengths = [len(text.tokens) for text in texts]
        calls = plan_calls(lengths, runner.variants, runner.cost, runner.shape.is_packable)
        calls.sort(key=lambda call: min(call.texts))
        return [(call, [texts[index] for index in call.texts]) for call in calls]

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
