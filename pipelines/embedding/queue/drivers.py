"""Runs a queue of texts: as jobs of the engine that owns a device, or with a thread for each of several devices."""

from __future__ import annotations

import math
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from staticllm.core import EncoderVariant
from staticllm.errors import ClosedError, NumericalError, PromptError, as_ours, pipeline_closed
from staticllm.pipelines.embedding.embedding_request import EmbeddingRequest
from staticllm.pipelines.embedding.encoder_runner import EncoderRunner
from staticllm.pipelines.embedding.packing.encoder_buffers import Vectors
from staticllm.pipelines.embedding.queue.device_queue import DeviceQueue, Text
from staticllm.pipelines.embedding.queue.failures import Batch, DevicePool, PoolDevice
from staticllm.pipelines.embedding.queue.loads import load_of
from staticllm.pipelines.embedding.queue.planned_calls import BatchingDelay, CallPlanner, PlannedCall
from staticllm.pipelines.embedding.queue.policies import OneDevice
from staticllm.pipelines.embedding.queue.text_queue import Ending, TextQueue
from staticllm.pipelines.engine.jobs import new_source_id
from staticllm.pipelines.scheduling.interface import JobView
from staticllm.system.threads import check_process, owned_device, start_thread

CLOSE_SECONDS = 10.0
"""The time that running batches have when the queue is closed."""
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
        """The number of texts that wait."""
        with self._lock:
            self._drop_over()
            return self._queue.num_waiting

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
                    self._admitted(request)
            self._wake()
        except BaseException:  # also Ctrl-C: nobody waits for the texts
            self._refused(request)
            raise
        request.future.add_quick_callback(lambda: self._ended(request))

    @abstractmethod
    def close(self) -> None:
        """End all requests with a ``ClosedError``, and release the devices after what they run now."""

    @abstractmethod
    def _admitted(self, request: EmbeddingRequest) -> None:
        """Take notice of texts of a request that were admitted. The lock is held."""

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
        _carry_out(ends)

    def _end(self, requests: Callable[[], Iterable[EmbeddingRequest]]) -> None:
        """End requests, because the queue is closed. ``requests`` finds them, with the lock."""
        with self._lock:
            found = list(requests())
        for request in found:
            request.fail(ClosedError(_CLOSED))


class JobDriver(QueueDriver):
    """Runs the texts of one device as jobs of the engine that owns it: the ``JobSource`` of an encoder."""

    def __init__(self, runner: EncoderRunner, max_waiting: int) -> None:
        costs = {variant: runner.cost(variant) for variant in runner.variants}
        device = DeviceQueue("", load_of(costs, runner.shape.is_packable))
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
        """Whether texts wait."""
        return self._queue.num_waiting > 0

    @property
    def wait_seconds(self) -> float:
        """How much longer the next call should wait for texts that come soon, in seconds."""
        with self._lock:
            return self._delay.seconds(time.perf_counter())

    def next_job(self, max_seconds: float | None = None) -> JobView | None:
        """Return the next call as a policy sees it; None if no text waits.

        ``max_seconds``: no call with fewer texts than that would take longer; None for no limit. The job has the highest
        priority of all texts that wait, because they wait for its end.
        """
        self._end_late()
        with self._lock:
            self._planner.limit(max_seconds)
            planned = self._planner.next()
            if planned is None:
                return None
            arrival = min(text.arrival for text in planned.texts)
            deadline = min((text.deadline for text in planned.texts if text.deadline is not None), default=None)
            priority = self._queue.devices[0].bulk_priorities[0]
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
            except BaseException as error:  # the texts of this call must end, or their readers would wait for ever
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

    def _admitted(self, request: EmbeddingRequest) -> None:
        self._planner.come(request.priority)

    def _wake(self) -> None:
        self._wake_engine()

    def _run(self, planned: PlannedCall, variant: EncoderVariant, meanwhile: Callable[[], None] | None) -> None:
        begin = time.perf_counter()
        if planned.chunk is not None:
            vector = self.runner.run_chunk(planned.chunk, variant, meanwhile)
            if vector is None:
                self._wait_again(planned.texts)
                return
            vectors = vector[None]
        else:
            vectors = self.runner.run(variant, planned.sequences, meanwhile)
        self._note_served(planned.texts, begin)
        suspects = []
        for text, vector in zip(planned.texts, vectors, strict=True):
            if np.isfinite(vector).all() or len(planned.texts) == 1:
                _hand_out(text, vector)
            else:  # another text of the call may be the cause
                text.num_failures += 1
                suspects.append(text)
        self._wait_again(suspects)

    def _wait_again(self, texts: Sequence[Text]) -> None:
        """Let these texts be the next ones of their priorities, each in a call of its own."""
        if not texts:
            return
        with self._lock:
            self._drop_over()
            self._planner.run_alone([text for text in texts if self._queue.put_back(text)])
            is_closing = self._is_closing
        if is_closing:
            self._end(self._queue.waiting_requests)

    def _note_served(self, texts: Sequence[Text], begin: float) -> None:
        """Note a call that began at the moment ``begin``, before its clients are told: they may ask again at once."""
        with self._lock:
            now = time.perf_counter()
            num_requests = len({text.request.id for text in texts})
            self._delay.serve(num_requests, now - begin, not self._queue.num_waiting, now)


class ThreadDriver(QueueDriver):
    """Embeds texts with the instances of a pool, each on a thread of its own.

    Nothing polls: the thread of a device waits for texts, and one more thread waits for deadlines and for batches that hang.
    All threads start with the first text.
    """

    def __init__(self, pool: DevicePool) -> None:
        super().__init__(pool.queue)
        self.pool = pool
        self._wakes = [threading.Condition(self._lock) for _ in pool.devices]
        self._clock_wake = threading.Condition(self._lock)
        self._clock_until = math.inf
        self._threads: list[threading.Thread] = []
        self._clock: threading.Thread | None = None
        self._max_tokens = min(device.instance.info.max_length for device in pool.devices)
        self._pid = os.getpid()

    @property
    def alive(self) -> tuple[str, ...]:
        """The names of the devices that work."""
        with self._lock:
            return tuple(device.name for device in self._queue.devices if device.is_alive)

    @property
    def is_usable(self) -> bool:
        """Whether a device works, or is being started again."""
        with self._lock:
            return any(device.may_work for device in self._queue.devices)

    def submit(self, request: EmbeddingRequest) -> None:
        """Add a request, as ``QueueDriver.submit``; the threads start with the first one."""
        check_process(self._pid)
        longest = max(map(len, request.texts))
        if longest > self._max_tokens:
            raise PromptError(f"a text of {longest} tokens, the limit is {self._max_tokens}: truncate it")
        with self._lock:
            self._check_open()
            self._start_threads()
        super().submit(request)

    def close(self) -> None:
        """End the threads after their current batches, then the instances; texts that wait end with a ``ClosedError``."""
        if self._holds_lock:  # threads that are joined would wait for the lock
            start_thread(self.close, "staticllm-close")
            return
        try:
            self.detach()
        finally:
            running = [thread.is_alive() for thread in self._threads] or [False] * len(self.pool.devices)
            for device in self.pool.devices:
                if os.getpid() == self._pid and not running[device.number]:
                    device.instance.close()

    def detach(self) -> None:
        """End the threads like ``close``, but leave the instances open, for another driver."""
        if os.getpid() != self._pid:  # a forked child: threads, locks and worker processes belong to the parent
            return
        with self._lock:
            self._is_closing = True
            for condition in (*self._wakes, self._clock_wake):
                condition.notify_all()
            recovering = [device for device in self.pool.devices if device.is_recovering]
        for device in recovering:
            device.instance.interrupt()
        try:
            self._join()
        finally:
            self._end(self._queue.requests)

    def _join(self) -> None:
        """Wait for the threads; calls that hang are interrupted."""
        until = time.perf_counter() + CLOSE_SECONDS
        own = threading.current_thread()
        for thread, device in zip(self._threads, self.pool.devices, strict=False):
            if thread is not own:
                thread.join(max(0.0, until - time.perf_counter()))
                if thread.is_alive() and device.instance.interrupt():
                    thread.join()
        if self._clock is not None and self._clock is not own:
            self._clock.join()

    def _start_threads(self) -> None:
        if self._clock is None:
            self._clock = start_thread(self._watch, "staticllm-embedding-clock")
            for device in self.pool.devices:
                name = f"staticllm-embedding-{device.instance.name}"
                self._threads.append(start_thread(lambda device=device: self._serve(device), name))  # type: ignore[misc]

    def _admitted(self, request: EmbeddingRequest) -> None:
        self._notify()

    def _wake(self) -> None:
        """Do nothing: the threads are notified with the lock."""

    def _notify(self) -> None:
        """Wake the devices that have work now, and the clock if its next event is earlier. The lock is held."""
        for device in self.pool.devices:
            if self.pool.has_work(device):
                self._wakes[device.number].notify()
        if self.pool.next_event() < self._clock_until:
            self._clock_wake.notify()

    def _serve(self, device: PoolDevice) -> None:
        """Run the batches of a device until the queue is closed or the device is dead."""
        while (batch := self._next_batch(device)) is not None:
            with owned_device():
                is_done = self._run(device, batch)
            if is_done:
                with self._lock:
                    self.pool.finish(device, batch, time.perf_counter())
                    self._notify()
            while device.is_recovering and not self._is_closing:
                self._recover(device)

    def _next_batch(self, device: PoolDevice) -> Batch | None:
        """Return the next batch of a device, or None at the end."""
        with self._lock:
            while not self._is_closing and device.queue.is_alive:
                self._drop_over()
                batch = self.pool.begin(device, time.perf_counter())
                if batch is not None:
                    self._notify()
                    return batch
                self._wakes[device.number].wait()
        return None

    def _run(self, device: PoolDevice, batch: Batch) -> bool:
        """Run a batch; return whether the device embedded all its texts. Texts with which a device failed run alone."""
        others = [text for text in batch.texts if not text.num_failures]
        for part in [others, *([text] for text in batch.texts if text.num_failures)]:
            if not part:
                continue
            try:
                vectors = device.instance.embed([text.tokens for text in part])
            except BaseException as error:
                self._fail(device, batch, part, as_ours(error))
                return False
            with self._lock:
                is_ours = self.pool.take(device, batch, part)
            if not is_ours:  # the call took so long that others have them now
                return True
            for text, vector in zip(part, vectors, strict=True):
                _hand_out(text, vector)
        return True

    def _fail(self, device: PoolDevice, batch: Batch, part: Sequence[Text], error: Exception) -> None:
        with self._lock:
            ends = [] if self._is_closing else self.pool.fail(device, batch, part, error, time.perf_counter())
            self._notify()
        _carry_out(ends)

    def _recover(self, device: PoolDevice) -> None:
        """Try once to use a device again that failed."""
        problem: Exception | None = None
        try:
            device.instance.recover()
        except BaseException as error:
            problem = as_ours(error)
        with self._lock:
            if self._is_closing:
                return
            ends = self.pool.recovered(device, problem, time.perf_counter())
            self._notify()
        _carry_out(ends)
        with self._lock:
            if device.is_recovering and not self._is_closing:
                self._wakes[device.number].wait(device.retry_seconds)

    def _watch(self) -> None:
        """Wait for the next deadline or for the limit of a batch, and act on it."""
        while True:
            with self._lock:
                if self._is_closing:
                    return
                now = time.perf_counter()
                ends = self._queue.end_late(now)
                for device in self.pool.devices:
                    if device.ends_by <= now:
                        device.ends_by = math.inf
                        if not device.instance.interrupt():  # else its own thread gets the error
                            ends += self.pool.hangs(device, now)
                if not ends:
                    self._clock_until = self.pool.next_event()
                    seconds = self._clock_until - now
                    self._notify()
                    longest = threading.TIMEOUT_MAX  # a deadline may be later than any wait can end
                    self._clock_wake.wait(None if math.isinf(seconds) else min(max(0.0, seconds), longest))
                    self._clock_until = -math.inf
            _carry_out(ends)


def _carry_out(ends: Iterable[Ending]) -> None:
    for end in ends:
        end.carry_out()


def _hand_out(text: Text, vector: Vectors) -> None:
    """Give a vector to the request of its text, or an error if it is not finite."""
    if np.isfinite(vector).all():
        text.request.put(text.index, vector)
    else:
        text.request.fail(
            NumericalError(
                f"text {text.index}: its embedding is not finite: try INFERENCE_PRECISION_HINT='f32', or check the weights"
            )
        )
