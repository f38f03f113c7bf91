"""The texts of one call of a user, and the future of their vectors."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np

from staticllm.system.posix import after_fork
from staticllm.system.threads import POLL_SECONDS, InterruptibleFuture, check_may_wait

from .packing.encoder_buffers import Vectors
from .packing.tokenized_text import TokenizedText

IDLE_SECONDS = 0.05
"""Idle time after which the thread of callbacks ends: starting one for each would take as long as tokenizing a text."""

_numbers = count(1)


class _DoneCallbacks:
    """Runs the done-callbacks of users, one after another, on a thread that ends ``IDLE_SECONDS`` after the last one.

    The thread is no daemon: the interpreter waits for callbacks, as it does for those of a ``ThreadPoolExecutor``.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        # reentrant: the garbage collector may cancel a future, and thereby add, while it is held
        self._lock = threading.RLock()
        self._condition = threading.Condition(self._lock)
        self._is_running = False

    def add(self, function: Callable[[], None]) -> None:
        """Run a function soon. Any thread may call."""
        with self._lock:
            self._waiting.append(function)
            if self._is_running:
                self._condition.notify_all()
                return
        try:
            threading.Thread(target=self._run, args=(IDLE_SECONDS,), name="staticllm-callbacks", daemon=False).start()
        except RuntimeError:  # the interpreter ends, or the system has no more threads
            self._run(0.0)

    def _run(self, idle_seconds: float) -> None:
        with self._lock:
            if self._is_running:  # several were started before the first began, or after Ctrl-C in a start
                return
            self._is_running = True
        while (function := self._next(idle_seconds)) is not None:
            with contextlib.suppress(
                BaseException
            ):  # the future has logged an Exception; SystemExit must not stop the others
                function()
            function = None  # what it holds must not live as long as the thread

    def _next(self, idle_seconds: float) -> Callable[[], None] | None:
        with self._lock:
            if not self._waiting:
                self._condition.wait(idle_seconds)
            self._is_running = False  # first: what the garbage collector adds from here on finds a thread
            if not self._waiting:
                return None
            self._is_running = True
            return self._waiting.popleft()


_callbacks = _DoneCallbacks()
# the thread does not exist in a forked child, and the lock may be held forever
after_fork(_callbacks.__init__)  # type: ignore[misc]


class RequestFuture(InterruptibleFuture[Vectors]):
    """A future whose done-callbacks run on a separate thread, so that a callback that waits for the device cannot block it.

    Callbacks run in the order in which they became due. A callback that waits for another callback waits forever. As for every
    future, a callback that is added after the end runs immediately, on the thread that adds it.
    """

    def add_done_callback(self, fn: Callable[[Future[Vectors]], Any]) -> None:
        """Call ``fn`` with the future after its end."""
        if self.done():
            super().add_done_callback(fn)
        else:  # a future that has ended calls the function at once, and logs what it raises
            call = super().add_done_callback
            super().add_done_callback(lambda _: _callbacks.add(lambda: call(fn)))

    def add_quick_callback(self, function: Callable[[], None]) -> None:
        """Call a function of ours, which does not wait, on the thread that ends the future."""
        super().add_done_callback(lambda _: function())


@dataclass(eq=False)
class EmbeddingRequest:
    """The texts of one call of a user."""

    texts: Sequence[TokenizedText]
    width: int
    priority: int = 0
    deadline: float | None = None
    """A moment of ``time.perf_counter`` after which texts are not run any more."""
    arrival: float = field(default_factory=time.perf_counter)
    future: RequestFuture = field(default_factory=RequestFuture)
    """Gets the vectors ``[n, width]``, or the error of the first text that failed."""
    id: int = field(default_factory=lambda: next(_numbers))

    def __post_init__(self) -> None:
        self.vectors: Vectors = np.zeros((len(self.texts), self.width), np.float32)
        self.num_done = 0
        self.device_seconds = 0.0
        self.news: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # the texts of one request may run on several devices
        self._is_ending = False

    @property
    def is_over(self) -> bool:
        """Whether the vectors are no longer wanted: the request was cancelled, or has failed."""
        return self.future.done()

    def is_late(self, now: float) -> bool:
        """Whether the deadline has passed at the moment ``now``."""
        return self.deadline is not None and now >= self.deadline

    def put(self, index: int, vector: Vectors) -> None:
        """Store the vector ``[width]`` of one text; after the last one, deliver all vectors."""
        self.vectors[index] = vector
        with self._lock:
            self.num_done += 1
            is_last = self.num_done == len(self.texts)
        if is_last and self._may_end():
            self.future.set_result(self.vectors)
        self.news.put(None)

    def spend(self, seconds: float) -> None:
        """Count device time; call it before ``put``, so that the time is known at the end."""
        with self._lock:
            self.device_seconds += seconds

    def fail(self, error: BaseException) -> None:
        """End the request with an error, unless it is over."""
        if self._may_end():
            self.future.set_exception(error)
        self.news.put(None)

    def tell_cancelled(self) -> None:
        """Wake the threads that wait for the request, if it was cancelled; ``cancel`` of a future does not."""
        if self.future.cancelled():
            self._may_end()
            self.news.put(None)

    def wait(self, on_progress: Callable[[int, int], None] | None = None) -> Vectors:
        """Return the vectors ``[n, width]`` as ``collect`` does; an exception, also of ``on_progress`` and Ctrl-C, cancels the
        request.
        """
        try:
            return self.collect(on_progress)
        except BaseException:
            self.future.cancel()
            raise

    def collect(self, on_progress: Callable[[int, int], None] | None = None) -> Vectors:
        """Return the vectors when all are there. After an exception the request goes on.

        ``on_progress`` gets the number of texts that are done, and of all texts, on this thread.

        Raises:
            StaticLLMError: a text failed, the deadline passed, or this is the thread of a device, which would wait for itself.
        """
        num_told = 0
        check_may_wait()
        while not self.future.done():
            with contextlib.suppress(queue.Empty):
                self.news.get(timeout=POLL_SECONDS)
            if on_progress is not None and num_told < self.num_done:
                num_told = self.num_done
                on_progress(num_told, len(self.texts))
        vectors = self.future.result()
        if on_progress is not None and num_told < len(self.texts):
            on_progress(len(self.texts), len(self.texts))
        return vectors

    def _may_end(self) -> bool:
        """Return True for the first end of a request that was not cancelled; tell waiting threads of one that was."""
        with self._lock:  # devices, and a thread that closes the queue, may end a request at the same time
            is_first = not self._is_ending
            self._is_ending = True
        return is_first and self.future.set_running_or_notify_cancel()
