"""The handle of a decision that was submitted: waits for it, awaits it, or cancels it."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, suppress

from staticllm.system.threads import POLL_SECONDS, start_thread

from .answers import Decision
from .decider import Decider, DecisionOrder
from .tree import TreeRun


class DecisionHandle:
    """One submitted decision. Any thread may call the methods. A handle that is garbage-collected before the end cancels it."""

    def __init__(self, decider: Decider, order: DecisionOrder, priority: int, deadline_ms: float | None) -> None:
        running = decider.running(priority, deadline_ms)
        self._run = running.__enter__()
        self._found = _Outcome()
        try:
            self._thread = start_thread(_reader(decider, order, self._run, running, self._found), "staticllm-decision")
        except BaseException:
            running.__exit__(None, None, None)
            raise
        weakref.finalize(self, self._run.cancel).atexit = False

    @property
    def is_done(self) -> bool:
        """Whether it has ended."""
        return self._found.is_done

    def result(self, timeout: float | None = None) -> Decision:
        """Wait for the answers.

        Raises:
            TimeoutError: there are none after ``timeout`` seconds; the decision goes on.
            StaticLLMError: it failed, was cancelled, or took longer than its deadline.
        """
        until = None if timeout is None else time.monotonic() + timeout
        while not self._found.is_done:
            left = POLL_SECONDS if until is None else min(POLL_SECONDS, until - time.monotonic())
            if left <= 0:
                raise TimeoutError(f"the decision has no answers after {timeout} s; it goes on")
            self._thread.join(left)
        if self._found.error is not None:
            raise self._found.error
        assert self._found.decision is not None
        return self._found.decision

    def __await__(self) -> Generator[object, None, Decision]:
        """Wait for the answers without blocking the event loop. A task that is cancelled cancels the decision."""
        import asyncio  # 1 MB, which only programs with an event loop need

        async def read() -> Decision:
            ended = asyncio.Event()
            loop = asyncio.get_running_loop()

            def wake() -> None:
                with suppress(RuntimeError):  # the loop was closed
                    loop.call_soon_threadsafe(ended.set)

            self._found.when_done(wake)
            try:
                await ended.wait()
            except BaseException:
                self.cancel()
                raise
            return self.result()

        return read().__await__()

    def cancel(self) -> None:
        """End the decision before the next device call; the rows of the state stay cached. After the end this does nothing."""
        if not self.is_done:
            self._run.cancel()

    def set_priority(self, priority: int) -> None:
        """Change the priority, before the next device call."""
        self._run.set_priority(priority)


class _Outcome:
    """What the thread of a handle has found."""

    def __init__(self) -> None:
        self.decision: Decision | None = None
        self.error: BaseException | None = None
        self._waiting: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    @property
    def is_done(self) -> bool:
        return self.decision is not None or self.error is not None

    def end(self, decision: Decision | None, error: BaseException | None) -> None:
        """Note what was found, and tell those that wait."""
        with self._lock:
            self.decision = decision
            self.error = error
            waiting = self._waiting
            self._waiting = []
        for wake in waiting:
            wake()

    def when_done(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` at the end, at once if that is over."""
        with self._lock:
            if not self.is_done:
                self._waiting.append(wake)
                return
        wake()


def _reader(
    decider: Decider, order: DecisionOrder, run: TreeRun, running: AbstractContextManager[TreeRun], found: _Outcome
) -> Callable[[], None]:
    """Return what the thread runs. It does not hold the handle, which would then never be collected."""

    def read() -> None:
        decision = None
        error: BaseException | None = None
        try:
            decision = decider.answer(run, order)
        except BaseException as raised:
            error = raised
        finally:
            running.__exit__(None, None, None)
        found.end(decision, error)

    return read
