"""Runs a queue of texts on several devices, each with a thread of its own."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Sequence
from functools import partial

from staticllm.errors import PromptError, as_ours
from staticllm.system.threads import LazyThread, check_process, owned_device, start_thread

from ..embedding_request import EmbeddingRequest
from ..queue.device_queue import QueuedText
from ..queue.drivers import QueueDriver, carry_out, hand_out, share_time
from .failures import DeviceBatch, DevicePool, PoolDevice

CLOSE_SECONDS = 10.0
"""The time that running batches have when the queue is closed."""


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
        self._threads = [LazyThread(f"staticllm-embedding-{device.instance.name}") for device in pool.devices]
        self._clock = LazyThread("staticllm-embedding-clock")
        self._max_tokens = min(device.instance.info.max_length for device in pool.devices)
        self._pid = os.getpid()

    @property
    def alive(self) -> tuple[str, ...]:
        with self._lock:
            return tuple(device.name for device in self._queue.devices if device.is_alive)

    @property
    def is_usable(self) -> bool:
        """Whether a device works, or is being started again."""
        with self._lock:
            return any(device.may_work for device in self._queue.devices)

    def submit(self, request: EmbeddingRequest) -> None:
        """Add a request, as ``QueueDriver.submit``; the threads start with the first one."""
        try:
            check_process(self._pid)
            longest = max(map(len, request.texts))
            if longest > self._max_tokens:
                raise PromptError(f"a text of {longest} tokens, the limit is {self._max_tokens}: truncate it")
            with self._lock:
                self._check_open()
                self._start_threads()
        except BaseException:
            request.future.cancel()  # without the lock, which a forked child may never get
            raise
        super().submit(request)

    def close(self) -> None:
        """End the threads after their current batches, then the instances; texts that wait end with a ``ClosedError``."""
        if self._holds_lock:  # threads that are joined would wait for the lock
            start_thread(self.close, "staticllm-close")
            return
        try:
            self.detach()
        finally:
            running = [number for number, thread in enumerate(self._threads) if thread.is_alive()]
            for device in self.pool.devices:
                if os.getpid() == self._pid and device.number not in running:
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
        for thread, device in zip(self._threads, self.pool.devices, strict=True):
            thread.join(max(0.0, until - time.perf_counter()))
            if thread.is_alive() and not thread.is_current and device.instance.interrupt():
                thread.join()
        self._clock.join()

    def _start_threads(self) -> None:
        """Start the threads, or those that could not be started before. The lock is held."""
        self._clock.start(self._watch)
        for thread, device in zip(self._threads, self.pool.devices, strict=True):
            thread.start(partial(self._serve, device))

    def _admitted(self, request: EmbeddingRequest, is_first: bool) -> None:
        self._notify()

    def _wake(self) -> None:
        """Do nothing: the threads are notified with the lock."""

    def _notify(self) -> None:
        """Wake the devices that have work now, and the clock if its next event is earlier. The lock is held."""
        for device in self.pool.devices:
            if self.pool.has_work(device):
                self._wakes[device.number].notify_all()
        if self.pool.next_event() < self._clock_until:
            self._clock_wake.notify_all()

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

    def _next_batch(self, device: PoolDevice) -> DeviceBatch | None:
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

    def _run(self, device: PoolDevice, batch: DeviceBatch) -> bool:
        """Run a batch; return whether the device embedded all its texts. Texts with which a device failed run alone."""
        others = [text for text in batch.texts if not text.num_failures]
        for part in [others, *([text] for text in batch.texts if text.num_failures)]:
            if not part:
                continue
            begin = time.perf_counter()
            before = device.instance.device_seconds
            try:
                priority = max(text.priority for text in part)
                vectors = device.instance.embed([text.tokens for text in part], priority)
            except BaseException as error:
                self._fail(device, batch, part, as_ours(error))
                return False
            after = device.instance.device_seconds
            share_time(part, time.perf_counter() - begin if before is None or after is None else after - before)
            with self._lock:
                is_ours = self.pool.take(device, batch, part)
            if not is_ours:  # the call took so long that others have them now
                return True
            for text, vector in zip(part, vectors, strict=True):
                hand_out(text, vector)
        return True

    def _fail(self, device: PoolDevice, batch: DeviceBatch, part: Sequence[QueuedText], error: Exception) -> None:
        with self._lock:
            ends = [] if self._is_closing else self.pool.fail(device, batch, part, error, time.perf_counter())
            self._notify()
        carry_out(ends)

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
        carry_out(ends)
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
            carry_out(ends)
