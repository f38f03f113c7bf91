"""Wakes the readers of an event loop from the engine's thread, with one call into the loop for all that become ready together."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio


class LoopWaker:
    """Sets events of one event loop from other threads.

    A call into a loop writes to a socket, which costs more than the rest of handing over a token; so there is one for all events
    until the loop runs.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._events: deque[asyncio.Event] = deque()
        self._is_called = False

    def wake(self, event: asyncio.Event) -> None:
        """Set an event of the loop soon; nothing happens if the loop was closed. Any thread may call."""
        self._events.append(event)  # before the flag is read: a loop that has cleared it sees this event
        if self._is_called:
            return
        self._is_called, loop = True, self._loop()
        with contextlib.suppress(RuntimeError):  # it was closed
            if loop is not None:
                loop.call_soon_threadsafe(self._run)

    def _run(self) -> None:
        self._is_called = False
        while self._events:
            self._events.popleft().set()


_WAKERS: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopWaker] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


def running_waker() -> LoopWaker:
    """Return the waker of the event loop that runs in this thread."""
    import asyncio  # only programs with an event loop load it

    loop = asyncio.get_running_loop()
    with _LOCK:
        if loop not in _WAKERS:
            _WAKERS[loop] = LoopWaker(loop)
        return _WAKERS[loop]
