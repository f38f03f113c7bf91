"""Submits the requests that were lost with a daemon again, in another one, while their readers wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from queue import Empty, SimpleQueue

from staticllm.core import FinishReason
from staticllm.errors import DeviceError, ProcessLostError, StaticLLMError
from staticllm.pipelines.daemon_client.engine_connection import EngineConnection
from staticllm.pipelines.daemon_client.live_request import MAX_LOSSES, LiveRequest
from staticllm.system.threads import start_thread

RECOVERY_SECONDS = 300.0
"""Seconds after the last loss in which requests must be accepted again; loading a model may take minutes."""


class Recovery:
    """Brings the requests of ``live`` that are lost into the daemon to which ``connect`` returns a connection.

    One thread connects and submits: it may wait for long, for a daemon that starts and for a model that is compiled. Meanwhile
    a second one ends at once what was cancelled, is past its deadline or has waited for ``RECOVERY_SECONDS``. Both end when no
    request is lost. A thread that reads a connection only starts them, and never waits for them.

    Any thread may call the methods. ``wake`` takes no lock, so finalizers may call it.
    """

    def __init__(self, live: Mapping[int, LiveRequest], connect: Callable[[], EngineConnection]) -> None:
        self._live, self._connect = live, connect
        self._lock = threading.Lock()  # of the two flags; nothing is called while it is held
        self._is_running = self._is_closed = False
        self._until = 0.0
        self._events: SimpleQueue[bool] = SimpleQueue()  # True ends the thread that gets it

    def begin(self) -> None:
        """Recover what is lost, beside the calling thread, which may be one that reads a connection."""
        self._end_hopeless()
        with self._lock:
            self._until = time.perf_counter() + RECOVERY_SECONDS
            self._events.put(False)  # the limit has changed
            if self._is_running or self._is_closed or not self.lost():
                return
            self._is_running, self._events = True, SimpleQueue()
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
        if self._is_running:
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
        except Exception as error:  # whatever it is, no reader may wait for ever
            self._end(error)
        events.put(True)

    def _goes_on(self) -> bool:
        """Return whether requests are lost; if not, the next loss starts threads again."""
        with self._lock:
            self._is_running = not self._is_closed and bool(self.lost())
            return self._is_running

    def _resume(self) -> None:
        """Connect, and submit what is lost."""
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
        """Return a connection to a daemon that has the model.

        Raises:
            StaticLLMError: there is none, or it refuses the model.
        """
        try:
            return self._connect()
        except DeviceError:  # a daemon that did not listen in time may do so by now
            return self._connect()

    def _submit(self, connection: EngineConnection, live: LiveRequest) -> None:
        if live.is_over:
            return
        live.begin_again()
        try:
            connection.submit(live.request, live)
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
            self._is_running = False
        for live in self.lost():
            live.fail(error)
