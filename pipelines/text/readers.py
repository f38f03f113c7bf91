"""How the engine's thread wakes the readers of an event loop.

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
        self._is_called = True
        loop = self._loop()
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


class OutputSignal:
    """Tells one reader of an event loop that outputs have come: at once, or once per ``least_gap`` seconds and at the end.

    The reader calls ``clear``, takes what is there, and awaits ``wait`` if there was nothing, else ``pause``. A wake-up of the
    loop takes the processor for longer than the decoding of a token, and takes it from the engine.
    """

    def __init__(self, waker: LoopWaker, least_gap: float = 0.0) -> None:
        self._waker = waker
        self._least_gap = least_gap
        self._event = waker.event()
        self._until = 0.0
        self._is_pausing = False
        self._has_ended = False

    def set(self, is_end: bool) -> None:
        """Say that an output has come, or the last one. Any thread may call."""
        self._has_ended |= is_end
        if not self._event.is_set() and (is_end or not self._is_pausing):
            self._waker.wake(self._event)

    def clear(self) -> None:
        """Forget the outputs so far. To be called before they are taken, so that later ones are not missed."""
        self._event.clear()

    async def wait(self) -> None:
        """Wait for an output that came after ``clear``."""
        await self._event.wait()

    async def pause(self) -> None:
        """Wait until ``least_gap`` seconds have passed since the previous pause was over, or until the last output has come."""
        import asyncio

        loop = asyncio.get_running_loop()
        self._is_pausing = self._least_gap > 0
        while self._until > loop.time() and not self._has_ended:
            self._event.clear()
            timer = loop.call_at(self._until, self._event.set)
            try:
                await self._event.wait()
            finally:
                timer.cancel()
        self._is_pausing = False
        self._until = loop.time() + self._least_gap


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
