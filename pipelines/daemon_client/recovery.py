"""Requests whose daemon was lost: what their readers have got is known, and another daemon submits the rest again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from queue import Empty, SimpleQueue

from staticllm.core import FinishReason
from staticllm.errors import DeviceError, ProcessLostError, StaticLLMError
from staticllm.system.threads import start_thread
from staticllm.wire.endpoint import SilentError

from ..engine.request import EngineRequest, Finished, Output, OutputQueue, TokenOutput
from .daemon_link import GONE
from .delivered import Delivered, DivergedError
from .engine_connection import EngineConnection

RECOVERY_SECONDS = 300.0
"""Seconds after the last loss in which requests must be accepted again; loading a model may take minutes."""
MAX_LOSSES = 2
"""A request that was lost with this many daemons ends with an error: it may be what ended them."""


class LiveRequest(OutputQueue):
    """Takes the outputs of a request from the connection, and passes them on to the reader's ``queue``.

    ``put`` takes the end of a connection as a loss, not as the end of the request. After ``begin_again`` the outputs come once
    more from their beginning: those that were delivered are compared by their tokens and dropped. If a token differs, the
    request ends with a ``ProcessLostError``, since its answer would be made of two. ``on_end`` is called with the request's id
    at its end.

    Any thread may call the methods. Finalizers may call ``cancel``: it takes no lock.
    """

    def __init__(self, request: EngineRequest, queue: OutputQueue, on_end: Callable[[int], object]) -> None:
        super().__init__()
        self.request = request
        self.queue = queue
        self._on_end = on_end
        self.cancelled: dict[int | None, FinishReason] = {}  # by the index of the answer; None for all
        self.num_losses = 0
        self.delivered = [Delivered[list[int]]([]) for _ in range(request.num_sequences)]  # tokens, by answer
        self._ended: set[int] = set()
        self._is_connected = True
        self._is_accepted = True
        self._lock = threading.RLock()  # a listener of the queue may call back

    @property
    def is_over(self) -> bool:
        return len(self._ended) == self.request.num_sequences

    @property
    def is_lost(self) -> bool:
        """Whether it waits for a daemon that accepts it again."""
        return not (self._is_connected and self._is_accepted)

    def put(self, output: Output) -> None:
        """Take an output of the current submission. Runs on the connection's thread."""
        with self._lock:
            if output.index in self._ended:
                return
            if isinstance(output, TokenOutput):
                self._put_token(output)
            elif isinstance(output.error, ProcessLostError):
                self.lose()
            elif self._is_short(output):
                self.fail()
            else:
                self.end(output.reason, output.error, output.index)

    def lose(self) -> None:
        """Note that the current submission is lost with its connection. Further calls until ``begin_again`` do nothing."""
        with self._lock:
            if self._is_connected:
                self._is_connected = False
                self.num_losses += 1

    def rewind(self) -> None:
        """Expect the outputs from their beginning; called before the request is submitted again."""
        with self._lock:
            for each in self.delivered:
                each.restart()

    def begin_again(self) -> None:
        """Rewind a request that was lost; it counts as lost until ``accept`` is called."""
        with self._lock:
            self._is_connected = True
            self._is_accepted = False
            self.rewind()

    def accept(self) -> None:
        """Note that the daemon has accepted it again."""
        self._is_accepted = True

    def cancel(self, index: int | None, reason: FinishReason) -> None:
        """Note that one answer, or with None all of them, were cancelled. Takes no lock."""
        self.cancelled[index] = reason

    def end_what_is_due(self, now: float) -> None:
        """End the answers that were cancelled, and all of them if the deadline is before the moment ``now``."""
        for index, reason in list(self.cancelled.items()):
            self.end(reason, None, index)
        if self.request.deadline is not None and self.request.deadline <= now:
            self.end(FinishReason.DEADLINE)

    def fail(self, cause: BaseException | None = None) -> None:
        """End it with a ``ProcessLostError``, which says so if the daemon does not answer."""
        silence = None if cause is None else cause.__cause__
        error = ProcessLostError(str(silence) if isinstance(silence, SilentError) else GONE)
        error.__cause__ = cause
        self.end(FinishReason.ERROR, error)

    def end(self, reason: FinishReason, error: BaseException | None = None, index: int | None = None) -> None:
        """End one answer, or with None all that have not ended."""
        with self._lock:
            if self.is_over:
                return
            for each in range(self.request.num_sequences):
                if each not in self._ended and index in (None, each):
                    self._ended.add(each)
                    if self.is_over:  # before the reader knows it: it may close the pipeline
                        self._on_end(self.request.id)
                    self.queue.put(Finished(reason, error, each))

    def _put_token(self, token: TokenOutput) -> None:
        try:
            if self.delivered[token.index].take([token.id]):
                self.queue.put(token)
        except DivergedError:
            self.fail()

    def _is_short(self, end: Finished) -> bool:
        """Return whether an answer ended by itself before all tokens came that were delivered: it is another answer."""
        is_cancelled = end.index in self.cancelled or None in self.cancelled
        is_behind = self.delivered[end.index].is_behind
        return end.reason in (FinishReason.STOP, FinishReason.LENGTH) and is_behind and not is_cancelled


class Recovery:
    """Brings the requests of ``live`` that are lost into the daemon to which ``connect`` returns a connection, by ``submit``.

    One thread connects and submits: it may wait for long, for a daemon that starts and for a model that is compiled. Meanwhile
    a second one ends at once what was cancelled, is past its deadline or has waited for ``RECOVERY_SECONDS``. Both end when no
    request is lost. A thread that reads a connection only starts them, and never waits for them.

    Any thread may call the methods. ``wake`` takes no lock, so finalizers may call it.
    """

    def __init__(
        self,
        live: Mapping[int, LiveRequest],
        connect: Callable[[], EngineConnection],
        submit: Callable[[EngineConnection, LiveRequest], object],
    ) -> None:
        self._live = live
        self._connect = connect
        self._submit_to = submit
        self._lock = threading.Lock()  # of the two flags; nothing is called while it is held
        self.is_running = False
        self._is_closed = False
        self._until = 0.0
        self._events: SimpleQueue[bool] = SimpleQueue()  # True ends the thread that gets it

    def begin(self) -> None:
        """Recover what is lost, beside the calling thread, which may be one that reads a connection."""
        self._end_hopeless()
        with self._lock:
            self._until = time.perf_counter() + RECOVERY_SECONDS
            self._events.put(False)  # the limit has changed
            if self.is_running or self._is_closed or not self.lost():
                return
            self.is_running = True
            self._events = SimpleQueue()
            events = self._events
        try:
            start_thread(lambda: self._watch(events), "staticllm-remote-watch")
            start_thread(lambda: self._run(events), "staticllm-remote-recovery")
        except StaticLLMError as error:
            self._end(error)
            events.put(True)

    def lost(self) -> list[LiveRequest]:
        """Return the requests that wait for a daemon, in the order in which they were submitted."""
        return [live for live in list(self._live.values()) if live.is_lost]

    def wake(self) -> None:
        """Let what was cancelled end now. Takes no lock."""
        if self.is_running:
            self._events.put(False)

    def close(self) -> None:
        """End all requests that are lost, and recover nothing more."""
        with self._lock:
            self._is_closed = True
        for live in self.lost():
            live.end(FinishReason.CANCELLED)

    def _run(self, events: SimpleQueue[bool]) -> None:
        try:
            while self._goes_on():
                self._resume()
                self._end_hopeless()
        except Exception as error:  # whatever it is, every reader gets an end
            self._end(error)
        events.put(True)

    def _goes_on(self) -> bool:
        """Return whether requests are lost; if not, the next loss starts threads again."""
        with self._lock:
            self.is_running = not self._is_closed and bool(self.lost())
            return self.is_running

    def _resume(self) -> None:
        waiting = self.lost()
        try:
            connection = self._connection()
        except ProcessLostError:  # the next daemon ended while it loaded the model
            for live in waiting:
                live.num_losses += 1
            return
        except StaticLLMError as error:
            for live in waiting:
                live.fail(error)
            return
        for live in waiting:
            self._submit(connection, live)

    def _connection(self) -> EngineConnection:
        """Return a connection to a daemon that has the model. Raises ``StaticLLMError``."""
        try:
            return self._connect()
        except DeviceError:  # a daemon that did not listen in time may do so by now
            return self._connect()

    def _submit(self, connection: EngineConnection, live: LiveRequest) -> None:
        if live.is_over:
            return
        live.begin_again()
        try:
            self._submit_to(connection, live)
        except ProcessLostError:
            live.lose()
        except StaticLLMError as error:
            live.fail(error)
        else:
            live.accept()
            for index, reason in list(live.cancelled.items()):  # cancelled before the daemon knew it
                connection.cancel(live.request.id, index, reason)
            if live.is_over:
                connection.cancel(live.request.id)

    def _watch(self, events: SimpleQueue[bool]) -> None:
        while True:
            now = time.perf_counter()
            moments = [self._until]
            for live in self.lost():
                live.end_what_is_due(now)
                if now >= self._until:
                    live.fail()
                if live.request.deadline is not None and not live.is_over:
                    moments.append(live.request.deadline)
            rest = min(moments) - now
            try:
                if events.get(timeout=rest if rest > 0 else None):
                    return
            except Empty:
                pass

    def _end_hopeless(self) -> None:
        """End the requests that were lost too often."""
        for live in self.lost():
            if live.num_losses >= MAX_LOSSES:
                live.fail()

    def _end(self, error: Exception) -> None:
        """End all that is lost with an error."""
        with self._lock:
            self.is_running = False
        for live in self.lost():
            live.fail(error)
