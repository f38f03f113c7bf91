"""The windows of recordings that a daemon encodes for this program; a window goes to the next daemon when its own has ended."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from staticllm.errors import ProcessLostError, PromptError, pipeline_closed
from staticllm.system.threads import InterruptibleFuture, check_process, start_thread

from .engine_connection import EngineConnection

Result = TypeVar("Result")
MAX_RELEASED = 64
"""The last windows that were removed; a new one, which has the place of one of them, may go out before the message about it."""


@dataclass(eq=False)
class RemoteWindow:
    """A window whose block has not ended: its features ``[bands, columns]``, and the connection on which it was encoded."""

    number: int
    features: NDArray[np.float32]
    priority: int
    connection: EngineConnection | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


class RemoteWindows:
    """Encodes windows in the daemon that ``connected`` returns a connection to, and finds there what texts look at.

    The numbers of windows are this program's. ``num_places``: the windows of a program that the daemon takes at a time; the
    others wait here, the highest priority first. A window that another daemon has encoded is encoded again before a request about
    it goes to this one. Any thread may call the methods.
    """

    def __init__(self, connected: Callable[[], EngineConnection], num_places: int) -> None:
        self._connected = connected
        self._num_places = num_places
        self._numbers = count(1)
        self.windows: dict[int, RemoteWindow] = {}  # that have a place, by number
        self.waiting: list[RemoteWindow] = []
        self._released = deque[int](maxlen=MAX_RELEASED)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self.is_closed = False
        self._pid = os.getpid()
        self.seconds = 0.0
        """The seconds of device time that a window takes."""

    def encode(self, features: NDArray[np.float32], priority: int = 0) -> Future[int]:
        """Return the future number of a window, ``features [bands, columns]``; ``remove`` must follow once it is there.

        Cancelling the future gives the window up. The future raises ``ClosedError``, ``ProcessLostError`` if the daemon ended
        twice, and what the daemon raises.

        Raises:
            ClosedError: this is a forked child.
        """
        check_process(self._pid)
        window = RemoteWindow(next(self._numbers), np.ascontiguousarray(features, np.float32), priority)
        return self._begun(lambda future: self._encode(window, future), lambda: self.remove(window.number))

    def remove(self, window: int) -> None:
        """Release a window, or give up one that waits; an unknown one is ignored."""
        with self._lock:
            found = self.windows.pop(window, None)
            if found is not None:
                self._released.append(window)
            self._changed.notify_all()
        if found is not None and (connection := found.connection) is not None:
            connection.release_window(window)

    def align(self, window: int, tokens: Sequence[int], priority: int = 0) -> Future[NDArray[np.float32]]:
        """Return the future weights ``[heads, tokens, cross_window_len]`` of a text about a window that was encoded."""
        check_process(self._pid)

        def ask(connection: EngineConnection) -> NDArray[np.float32]:
            self.bring(connection, window)
            return connection.align(window, tokens, priority)

        return self._begun(lambda future: future.set_result(self._once_again(ask)))

    def bring(self, connection: EngineConnection, number: int) -> None:
        """Let the daemon of a connection encode a window, if it has not.

        Raises:
            PromptError: the window was removed.
            ProcessLostError: the daemon has ended.
            StaticLLMError: what the daemon raises.
        """
        window = self.windows.get(number)
        if window is None:
            raise _removed()
        with window.lock:
            if window.connection is connection:
                return
            window.connection = connection  # so that ``remove`` gives up what the daemon encodes
            try:
                self.seconds = connection.encode(number, window.features, window.priority, tuple(self._released))
            except BaseException:
                window.connection = None
                raise
        if number not in self.windows:
            connection.release_window(number)
            raise _removed()

    def close(self) -> None:
        """End what waits for a place with a ``ClosedError``."""
        with self._lock:
            self.is_closed = True
            self._changed.notify_all()

    def _encode(self, window: RemoteWindow, future: Future[int]) -> None:
        if not self._has_place(window, future):
            return
        try:
            self._once_again(lambda connection: self.bring(connection, window.number))
            future.set_result(window.number)
        except BaseException:
            self.remove(window.number)
            raise

    def _has_place(self, window: RemoteWindow, future: Future[int]) -> bool:
        """Wait for a place, and return True; False if the window was given up. Raises ``ClosedError``."""
        with self._lock:
            self.waiting.append(window)
            try:
                self._changed.wait_for(lambda: self.is_closed or future.cancelled() or self._is_next(window))
            finally:
                self.waiting.remove(window)
                self._changed.notify_all()
            if self.is_closed:
                raise pipeline_closed()
            if not future.cancelled():
                self.windows[window.number] = window
            return not future.cancelled()

    def _is_next(self, window: RemoteWindow) -> bool:
        first = max(self.waiting, key=lambda each: (each.priority, -each.number))
        return len(self.windows) < self._num_places and window is first

    def _once_again(self, ask: Callable[[EngineConnection], Result]) -> Result:
        """Ask the daemon, and if it has ended before it answered the next one. Raises what ``ask`` raises."""
        try:
            return ask(self._connected())
        except ProcessLostError:
            return ask(self._connected())

    @staticmethod
    def _begun(run: Callable[[Future[Any]], object], on_cancel: Callable[[], object] = lambda: None) -> Future[Any]:
        """Return a future that a thread of its own sets with ``run``, which may wait for a daemon that starts."""
        future: Future[Any] = InterruptibleFuture()
        future.add_done_callback(lambda done: on_cancel() if done.cancelled() else None)

        def work() -> None:
            try:
                run(future)
            except BaseException as error:
                with suppress(InvalidStateError):  # it was cancelled
                    future.set_exception(error)

        try:
            start_thread(work, "staticllm-remote-window")
        except BaseException:  # Ctrl-C while the thread starts: nobody gets the future, and its work goes on
            if not future.cancel():
                on_cancel()
            raise
        return future


def _removed() -> PromptError:
    return PromptError("the request has no window, or its window was removed")
