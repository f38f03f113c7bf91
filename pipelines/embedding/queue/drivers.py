"""Takes requests for a queue of texts, and runs it as jobs of the engine that owns its only device."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from staticllm.core import EncoderVariant
from staticllm.errors import ClosedError, NumericalError, as_ours, pipeline_closed
from staticllm.system.threads import run_uninterrupted, start_thread

from ...engine.jobs import new_source_id
from ...scheduling.interface import JobView
from ..embedding_request import EmbeddingRequest
from ..encoder_runner import EncoderRunner
from ..packing.encoder_buffers import Vectors
from .device_queue import DeviceQueue, DeviceState, QueuedText
from .loads import load_of
from .planned_calls import BatchingDelay, CallPlanner, EncoderCall
from .policies import OneDevice
from .text_queue import RequestEnding, TextQueue

SLICE = 512
"""Texts that are admitted under one lock."""
_CLOSED = "the pipeline was closed before these texts were embedded"


class QueueDriver(ABC):
    """Takes requests of any thread for a queue of texts, and hands their vectors out. Subclasses run the devices."""

    def __init__(self, queue: TextQueue) -> None:
        self._queue = queue
        self._lock = threading.RLock()
        self._over: deque[EmbeddingRequest] = deque()  # ended while the lock was held, by the garbage collector
        self._is_closing = False

    @property
    def num_waiting(self) -> int:
        with self._lock:
            self._drop_over()
            return self._queue.num_waiting

    def devices(self) -> tuple[DeviceState, ...]:
        """Return what waits for each device and runs on it now, in order of preference."""
        with self._lock:
            return tuple(map(DeviceState.of, self._queue.devices))

    @property
    @abstractmethod
    def is_usable(self) -> bool:
        """Whether a device works, or is being started again."""

    def submit(self, request: EmbeddingRequest) -> None:
        """Add a request: all its texts are admitted, or none.

        Raises:
            BusyError: too many texts wait, or no device takes a text in time; ``retry_after`` says when to try again.
            DeviceError: no device works any more.
            PromptError: a text has more tokens than the programs, or these are more texts than the devices ever take at once.
            ClosedError: the queue was closed, or the engine that runs it.
        """
        try:
            self._end_late()
            with self._lock:
                self._check_open()
                ids = self._queue.number(request, time.perf_counter())
            for start in range(0, len(ids), SLICE):
                with self._lock:
                    self._check_open()
                    self._queue.admit(request, ids[start : start + SLICE], time.perf_counter())
                    self._admitted(request, start == 0)
            self._wake()
        except BaseException:  # also Ctrl-C: the texts are no longer wanted
            self._refused(request)
            raise
        request.future.add_quick_callback(lambda: self._ended(request))

    @abstractmethod
    def close(self) -> None:
        """End all requests with a ``ClosedError``, and release the devices after what they run now."""

    @abstractmethod
    def _admitted(self, request: EmbeddingRequest, is_first: bool) -> None:
        """Take notice of texts of a request, maybe the first ones, that were admitted. The lock is held."""

    @abstractmethod
    def _wake(self) -> None:
        """Wake what runs the devices, without the lock."""

    def _ended(self, request: EmbeddingRequest) -> None:
        request.tell_cancelled()
        self._forget(request)

    def _refused(self, request: EmbeddingRequest) -> None:
        request.future.cancel()
        self._forget(request)

    def _check_open(self) -> None:
        if self._is_closing:
            raise pipeline_closed()

    def _forget(self, request: EmbeddingRequest) -> None:
        """Remove what is left of a request that is over."""
        if self._holds_lock:  # the state is being changed
            self._over.append(request)
            return
        with self._lock:
            self._queue.drop(request)

    @property
    def _holds_lock(self) -> bool:
        """Whether the calling thread holds the lock: then the garbage collector runs something of the user."""
        return bool(self._lock._is_owned())  # type: ignore[attr-defined]

    def _drop_over(self) -> None:
        """Remove the requests that ended while the lock was held. The lock is held."""
        while self._over:
            self._queue.drop(self._over.popleft())

    def _end_late(self) -> None:
        """End requests whose deadlines have passed, without the lock: that may submit texts or close the queue."""
        with self._lock:
            self._drop_over()
            ends = self._queue.end_late(time.perf_counter())
        carry_out(ends)

    def _end(self, requests: Callable[[], Iterable[EmbeddingRequest]]) -> None:
        """End requests, because the queue is closed. ``requests`` finds them, with the lock."""
        with self._lock:
            found = list(requests())

        def end() -> None:
            for request in found:
                request.fail(ClosedError(_CLOSED))

        if found:
            run_uninterrupted(end, "staticllm-close")


class JobDriver(QueueDriver):
    """Runs the texts of one device as jobs of the engine that owns it: the ``JobSource`` of an encoder."""

    def __init__(self, runner: EncoderRunner, max_waiting: int, name: str = "") -> None:
        """``name``: that of the device, for ``devices``."""
        costs = {variant: runner.cost(variant) for variant in runner.variants}
        device = DeviceQueue(name, load_of(costs, runner.shape.is_packable))
        device.is_shared = True
        super().__init__(TextQueue([device], OneDevice(), max_waiting))
        self.runner = runner
        self.id = new_source_id()
        self._wake_engine: Callable[[], None] = lambda: None
        self._is_running = threading.RLock()  # held during a call; what it ends may close the queue
        self._planner = CallPlanner(device, runner)
        self._delay = BatchingDelay()

    @property
    def is_usable(self) -> bool:
        """Whether the device works: errors of calls end only their own texts."""
        return True

    def attach(self, wake: Callable[[], None]) -> None:
        """Take the function that wakes the device's thread; it is called, without a lock, after a request was added."""
        self._wake_engine = wake

    @property
    def has_jobs(self) -> bool:
        return self._queue.num_waiting > 0

    @property
    def wait_seconds(self) -> float:
        """How much longer the next call should wait for texts that come soon, in seconds."""
        with self._lock:
            return self._delay.seconds(time.perf_counter())

    def next_job(self, max_seconds: float | None = None) -> JobView | None:
        """Return the next call as a policy sees it; None if no text waits.

        The job has the highest priority of all texts that wait, because they wait for its end.

        Args:
            max_seconds: No call with fewer texts than that would take longer; None for no limit.
        """
        self._end_late()
        with self._lock:
            self._planner.limit(max_seconds)
            planned = self._planner.next()
            if planned is None:
                return None
            arrival = min(text.arrival for text in planned.texts)
            deadline = min((text.deadline for text in planned.texts if text.deadline is not None), default=None)
            priority = self._queue.devices[0].bulk.priorities[0]
            return JobView(self.id, self._planner.seconds(planned), arrival, priority, deadline)

    def run_next(self, meanwhile: Callable[[], None] | None = None) -> int:
        """Run one call, if texts wait, and hand their vectors out. Return its number of texts."""
        with self._is_running:
            self._end_late()
            with self._lock:
                planned = self._planner.pop()
                if planned is None:
                    return 0
                variant = self._planner.variant(planned)
                self._queue.take(planned.texts)
            try:
                self._run(planned, variant, meanwhile)
            except BaseException as error:  # the texts of this call must end, or their readers would wait forever
                for text in planned.texts:
                    text.request.fail(as_ours(error))
            return len(planned.texts)

    def close(self) -> None:
        """End all requests, and drop the programs after the call that runs now; later requests are refused."""
        if self._holds_lock:  # the garbage collector closes a pipeline of the user
            start_thread(self.close, "staticllm-close")
            return
        with self._lock:
            self._is_closing = True
        self._end(self._queue.waiting_requests)
        with self._is_running:
            self.runner.close()

    def _admitted(self, request: EmbeddingRequest, is_first: bool) -> None:
        if is_first:
            self._delay.come(request)
        self._planner.come(request.priority)

    def _wake(self) -> None:
        wake = self._wake_engine
        try:
            wake()
        except ClosedError:
            if wake is self._wake_engine:
                raise
            self._wake_engine()  # another engine has taken the texts meanwhile

    def _run(self, planned: EncoderCall, variant: EncoderVariant, meanwhile: Callable[[], None] | None) -> None:
        begin = time.perf_counter()
        if planned.chunk is not None:
            vector = self.runner.run_chunk(planned.chunk, variant, meanwhile)
            share_time(planned.texts, time.perf_counter() - begin)
            if vector is None:
                self._wait_again(planned.texts)
                return
            vectors = vector[None]
        else:
            vectors = self.runner.run(variant, planned.sequences, meanwhile)
            share_time(planned.texts, time.perf_counter() - begin)
        self._queue.devices[0].num_embedded += len(planned.texts)
        self._note_served(planned.texts, begin)
        suspects = []
        for text, vector in zip(planned.texts, vectors, strict=True):
            if np.isfinite(vector).all() or len(planned.texts) == 1:
                hand_out(text, vector)
            else:  # another text of the call may be the cause
                text.num_failures += 1
                suspects.append(text)
        self._wait_again(suspects)

    def _wait_again(self, texts: Sequence[QueuedText]) -> None:
        """Let these texts be the next ones of their priorities, each in a call of its own."""
        if not texts:
            return
        with self._lock:
            self._drop_over()
            latest_first = sorted(texts, key=lambda text: text.id, reverse=True)
            waiting = [text for text in latest_first if self._queue.put_back(text)]
            self._planner.run_alone(reversed(waiting))
            is_closing = self._is_closing
        if is_closing:
            self._end(self._queue.waiting_requests)

    def _note_served(self, texts: Sequence[QueuedText], begin: float) -> None:
        """Note a call that began at the moment ``begin``, before its clients are told: they may ask again at once."""
        with self._lock:
            now = time.perf_counter()
            num_requests = len({text.request.id for text in texts})
            self._delay.serve(num_requests, now - begin, not self._queue.num_waiting, now)


def carry_out(ends: Iterable[RequestEnding]) -> None:
    """End requests, without a lock."""
    for end in ends:
        end.carry_out()


def share_time(texts: Sequence[QueuedText], seconds: float) -> None:
    """Count the device time of a call for the requests of its texts, by their tokens."""
    total = sum(len(text.tokens) for text in texts) or 1
    for text in texts:
        text.request.spend(seconds * len(text.tokens) / total)


def hand_out(text: QueuedText, vector: Vectors) -> None:
    """Give a vector ``[width]`` to the request of its text, or an error if it is not finite."""
    if np.isfinite(vector).all():
        text.request.put(text.index, vector)
    else:
        text.request.fail(
            NumericalError(
                f"text {text.index}: its embedding is not finite: try INFERENCE_PRECISION_HINT='f32', or check the weights"
            )
        )
