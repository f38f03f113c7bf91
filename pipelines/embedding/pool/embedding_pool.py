"""Serves texts on several devices: one thread per instance, and one queue manager before them."""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Sequence

import numpy as np

from staticllm.errors import ClosedError, NumericalError, PromptError, as_ours, pipeline_closed
from staticllm.pipelines.embedding.embedding_request import EmbeddingRequest
from staticllm.pipelines.embedding.packing.encoder_buffers import Vectors
from staticllm.pipelines.embedding.pool.pool_state import Batch, Ending, PoolDevice, PoolState, PoolText
from staticllm.system.threads import check_process, owned_device, start_thread

CLOSE_SECONDS = 10.0
"""The time that running batches have when the pool is closed."""
SLICE = 512
"""Texts that are admitted under one lock."""


class EmbeddingPool:
    """Owns instances of an encoder and embeds texts with them. Texts are submitted as to an ``EmbeddingQueue``.

    Nothing polls: the thread of a device waits for texts, and one more thread waits for deadlines and for batches that hang.
    All threads start with the first text.
    """

    def __init__(self, state: PoolState) -> None:
        self._state = state
        self._lock = threading.RLock()
        # ended by the thread that holds the lock, when it collects garbage
        self._over: deque[EmbeddingRequest] = deque()
        self._wakes = [threading.Condition(self._lock) for _ in state.devices]
        self._clock_wake = threading.Condition(self._lock)
        self._clock_until = math.inf
        self._threads: list[threading.Thread] = []
        self._clock: threading.Thread | None = None
        self._max_tokens = min(device.instance.info.max_length for device in state.devices)
        self._is_closing = False
        self._pid = os.getpid()

    @property
    def num_waiting(self) -> int:
        """The number of texts that wait."""
        with self._lock:
            self._drop_over()
            return self._state.num_waiting

    @property
    def alive(self) -> tuple[str, ...]:
        """The names of the devices that work."""
        with self._lock:
            return tuple(device.instance.name for device in self._state.devices if device.queue.is_alive)

    @property
    def is_usable(self) -> bool:
        """Whether a device works, or is being started again."""
        with self._lock:
            return any(device.may_work for device in self._state.devices)

    def submit(self, request: EmbeddingRequest) -> None:
        """Add a request: all its texts are admitted, or none.

        Raises:
            BusyError: no device takes a text in time, or too many texts wait; ``retry_after`` says when to try again.
            DeviceError: no device works any more.
            PromptError: a text has more tokens than the programs, or these are more texts than the devices ever take at once.
            ClosedError: the pool was closed.
        """
        check_process(self._pid)
        longest = max(map(len, request.texts))
        if longest > self._max_tokens:
            raise PromptError(f"a text of {longest} tokens, the limit is {self._max_tokens}: truncate it")
        try:
            with self._lock:
                self._check_open()
                self._start_threads()
                self._drop_over()
                ids = self._state.number(request, time.perf_counter())
            for start in range(0, len(ids), SLICE):
                with self._lock:
                    self._check_open()
                    self._state.admit(request, ids[start : start + SLICE], time.perf_counter())
                    self._wake()
        except BaseException:  # also Ctrl-C: nobody waits for the texts
            request.future.cancel()
            self._forget(request)
            raise
        request.future.add_quick_callback(lambda: self._forget(request))

    def close(self) -> None:
        """End the threads after their current batches, then the instances; texts that wait end with a ``ClosedError``."""
        if self._holds_lock:  # threads that are joined would wait for the lock
            start_thread(self.close, "staticllm-close")
            return
        try:
            self.detach()
        finally:
            running = [thread.is_alive() for thread in self._threads] or [False] * len(self._state.devices)
            for device in self._state.devices:
                if os.getpid() == self._pid and not running[device.number]:
                    device.instance.close()

    def detach(self) -> None:
        """End the threads like ``close``, but leave the instances open, for another pool."""
        if os.getpid() != self._pid:  # a forked child: threads, locks and worker processes belong to the parent
            return
        with self._lock:
            self._is_closing = True
            for condition in (*self._wakes, self._clock_wake):
                condition.notify_all()
            recovering = [device for device in self._state.devices if device.is_recovering]
        for device in recovering:
            device.instance.interrupt()
        try:
            self._join()
        finally:
            with self._lock:
                requests = self._state.requests()
            for request in requests:
                request.fail(ClosedError("the pipeline was closed before these texts were embedded"))

    def _join(self) -> None:
        """Wait for the threads; calls that hang are interrupted."""
        until = time.perf_counter() + CLOSE_SECONDS
        own = threading.current_thread()
        for thread, device in zip(self._threads, self._state.devices, strict=False):
            if thread is not own:
                thread.join(max(0.0, until - time.perf_counter()))
                if thread.is_alive() and device.instance.interrupt():
                    thread.join()
        if self._clock is not None and self._clock is not own:
            self._clock.join()

    def _check_open(self) -> None:
        if self._is_closing:
            raise pipeline_closed()

    def _start_threads(self) -> None:
        if self._clock is None:
            self._clock = start_thread(self._watch, "staticllm-embedding-clock")
            for device in self._state.devices:
                name = f"staticllm-embedding-{device.instance.name}"
                self._threads.append(start_thread(lambda device=device: self._serve(device), name))  # type: ignore[misc]

    def _forget(self, request: EmbeddingRequest) -> None:
        """Remove what is left of a request that is over."""
        if self._holds_lock:  # the state is being changed
            self._over.append(request)
            return
        with self._lock:
            self._state.drop(request)

    @property
    def _holds_lock(self) -> bool:
        """Whether the calling thread holds the lock: then the garbage collector runs something of the user."""
        return bool(self._lock._is_owned())  # type: ignore[attr-defined]

    def _drop_over(self) -> None:
        """Remove the requests that ended while the lock was held. The lock is held."""
        while self._over:
            self._state.drop(self._over.popleft())

    def _wake(self) -> None:
        """Wake the devices that have work now, and the clock if its next event is earlier. The lock is held."""
        for device in self._state.devices:
            if self._state.has_work(device):
                self._wakes[device.number].notify()
        if self._state.next_event() < self._clock_until:
            self._clock_wake.notify()

    def _serve(self, device: PoolDevice) -> None:
        """Run the batches of a device until the pool is closed or the device is dead."""
        while (batch := self._next_batch(device)) is not None:
            with owned_device():
                is_done = self._run(device, batch)
            if is_done:
                with self._lock:
                    self._state.finish(device, batch, time.perf_counter())
                    self._wake()
            while device.is_recovering and not self._is_closing:
                self._recover(device)

    def _next_batch(self, device: PoolDevice) -> Batch | None:
        """Return the next batch of a device, or None at the end."""
        with self._lock:
            while not self._is_closing and device.queue.is_alive:
                self._drop_over()
                batch = self._state.begin(device, time.perf_counter())
                if batch is not None:
                    self._wake()
                    return batch
                self._wakes[device.number].wait()
        return None

    def _run(self, device: PoolDevice, batch: Batch) -> bool:
        """Run a batch; return whether the device embedded all its texts. Texts with which a device failed run alone."""
        suspects = [query_id for query_id, text in batch.texts.items() if text.num_failures]
        others = [query_id for query_id, text in batch.texts.items() if not text.num_failures]
        for part in [others, *([query_id] for query_id in suspects)]:
            if not part:
                continue
            texts = [batch.texts[query_id] for query_id in part]
            try:
                vectors = device.instance.embed([text.tokens for text in texts])
            except BaseException as error:
                with self._lock:
                    ends = [] if self._is_closing else self._state.fail(
                        device, batch, part, as_ours(error), time.perf_counter()
                    )  # fmt: skip
                    self._wake()
                _carry_out(ends)
                return False
            with self._lock:
                is_ours = self._state.take(device, batch, part)
            if not is_ours:  # the call took so long that others have them now
                return True
            _hand_out(texts, vectors)
        return True

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
            ends = self._state.recovered(device, problem, time.perf_counter())
            self._wake()
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
                ends = self._state.expire(now)
                for device in self._state.devices:
                    if device.ends_by <= now:
                        device.ends_by = math.inf
                        if not device.instance.interrupt():  # else its own thread gets the error
                            ends += self._state.hangs(device, now)
                if not ends:
                    self._clock_until = self._state.next_event()
                    seconds = self._clock_until - now
                    self._wake()
                    longest = threading.TIMEOUT_MAX  # a deadline may be later than any wait can end
                    self._clock_wake.wait(None if math.isinf(seconds) else min(max(0.0, seconds), longest))
                    self._clock_until = -math.inf
            _carry_out(ends)


def _carry_out(ends: Sequence[Ending]) -> None:
    for end in ends:
        end.carry_out()


def _hand_out(texts: Sequence[PoolText], vectors: Vectors) -> None:
    for text, vector in zip(texts, vectors, strict=True):
        if np.isfinite(vector).all():
            text.request.put(text.index, vector)
        else:
            text.request.fail(
                NumericalError(
                    f"text {text.index}: its embedding is not finite: try INFERENCE_PRECISION_HINT='f32', or check the weights"
                )
            )
