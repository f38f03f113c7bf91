"""Wakes the readers of an event loop from the engine's thread, with one call into the loop for all that become ready together.

Only programs with an event loop load asyncio, which takes 1 MB: functions import it here.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import asyncio

Result = TypeVar("Result")


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

    def event(self) -> asyncio.Event:
        """Return a new event of the loop."""
        import asyncio

        return asyncio.Event()

    async def yield_to_loop(self) -> None:
        """Let the other tasks of the loop run."""
        import asyncio

        await asyncio.sleep(0)

    def _run(self) -> None:
        self._is_called = False
        while self._events:
            self._events.popleft().set()


_WAKERS: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopWaker] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


def running_waker() -> LoopWaker:
    """Return the waker of the event loop that runs in this thread."""
    import asyncio

    loop = asyncio.get_running_loop()
    with _LOCK:
        if loop not in _WAKERS:
            _WAKERS[loop] = LoopWaker(loop)
        return _WAKERS[loop]


async def in_thread(function: Callable[[], Result]) -> Result:
    """Return what ``function`` returns on another thread, without blocking the event loop."""
    import asyncio

    return await asyncio.to_thread(function)
