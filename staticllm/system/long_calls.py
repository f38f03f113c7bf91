"""Long calls of native code, such as compiling: they cannot be interrupted, so they run on threads of their own.

The thread that waits looks up every ``LOOK_SECONDS``: it tells how far the work is, and it may leave, because the work is no
longer wanted or by Ctrl-C. The call then runs to its end alone, and its result is dropped. A thread in native code must not see
the interpreter end: it would be ended inside of C++ frames, which aborts the process. So the process ends without the teardown,
also if a daemon thread of the program's own is in code of ours then: it may load a model.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Generic, NoReturn, TypeVar

from staticllm.core import OnProgress, ProgressEvent
from staticllm.errors import ClosedError
from staticllm.system.threads import start_thread

LOOK_SECONDS = 0.05
"""Seconds until a waiting thread sees that a call is no longer wanted."""
TICK_SECONDS = 0.25
"""Seconds between two reports of how far a part of loading is."""
EXIT_SECONDS = 0.1
"""How long the end of the process waits for calls that run, in seconds."""
SECONDS_TO_HALF = 5.0
"""After this time a part is taken for half done, unless its size says more."""
Result = TypeVar("Result")

_here = threading.local()  # ``looks``: what the thread does when it looks up
_running: set[_LongCall[Any]] = set()
_is_exiting = threading.Event()
_pid = os.getpid()


class _LongCall(Generic[Result]):
    """A call on a thread of its own. ``drop`` gets the result if nobody waits for it any more."""

    def __init__(self, function: Callable[[], Result], drop: Callable[[Result], object]) -> None:
        self._function: Callable[[], Result] | None = function
        self._drop = drop
        self._has_ended = threading.Lock()  # taken until the end
        self._has_ended.acquire()
        self._lock = threading.Lock()  # between the end and the leaving
        self.is_left = False
        self._results: list[Result] = []
        self._error: BaseException | None = None

    def start(self) -> None:
        """Start the thread.

        Raises:
            StaticLLMError: the system has no more threads.
        """
        _running.add(self)
        try:
            start_thread(self._run, "staticllm-long-call")
        except BaseException:
            _running.discard(self)
            raise

    def _run(self) -> None:
        function = self._function
        self._function = None
        assert function is not None, "started twice"
        try:
            result = function()
            del function
            with self._lock:
                is_left = self.is_left
                if not is_left:
                    self._results.append(result)
            if is_left:
                self._drop(result)
            del result
        except BaseException as error:  # raised again where it is waited for
            self._error = error
        finally:
            _running.discard(self)
            self._has_ended.release()

    def wait(self, seconds: float) -> bool:
        """Wait for the end, for at most ``seconds``; return whether it has come."""
        if not self._has_ended.acquire(timeout=max(seconds, 0)):
            return False
        self._has_ended.release()
        return True

    def result(self) -> Result:
        """Return the result of a call that has ended, once. Raises what it has raised."""
        error = self._error
        self._error = None
        if error is not None:
            try:
                raise error
            finally:
                del error  # else it and this frame hold each other, and programs, until the collector runs
        return self._results.pop()

    def leave(self) -> None:
        """Drop the result, if it is there or when it comes."""
        with self._lock:
            self.is_left = True
            results = self._results
            self._results = []
        for result in results:
            self._drop(result)


def attended(
    call: Callable[[], Result],
    on_leave: Callable[[], object] = lambda: None,
    drop: Callable[[Result], object] = lambda result: None,
) -> Result:
    """Return the result of a long call, which the calling thread can leave.

    If the thread leaves, ``on_leave`` may hasten the end of the call, and ``drop`` gets a result that comes nevertheless. A
    thread that has nothing to look at and gets no signals runs the call itself.

    Raises:
        ClosedError: the result is no longer wanted, or the interpreter ends.
        Exception: what the call raises.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main and not _looks():
        return call()
    (result,) = attended_each([call], on_leave, drop)
    return result


def attended_each(
    calls: Sequence[Callable[[], Result]],
    on_leave: Callable[[], object] = lambda: None,
    drop: Callable[[Result], object] = lambda result: None,
    num_parallel: int = 1 << 10,
) -> Generator[Result, None, None]:
    """Run long calls, ``num_parallel`` at a time, and yield their results in their order.

    A caller that does not take all of them leaves the others.

    Raises:
        Exception: as for ``attended``.
    """
    checkpoint()
    waiting = [_LongCall(call, drop) for call in reversed(calls)]
    started: list[_LongCall[Result]] = []

    def start() -> None:
        while waiting and sum(not each.wait(0) for each in started) < num_parallel:
            started.append(waiting.pop())
            started[-1].start()

    try:
        for index in range(len(calls)):
            start()
            while not started[index].wait(LOOK_SECONDS):
                checkpoint()
                start()
            yield started[index].result()
    except BaseException:
        for each in started:
            each.leave()
        on_leave()
        raise


@contextmanager
def beside(call: Callable[[], Result]) -> Iterator[Callable[[], Result]]:
    """Run a long call while a block runs. What the block gets waits for the result, once, and can be left; so can the block.

    Raises:
        StaticLLMError: the system has no more threads.
    """
    running = _LongCall(call, lambda result: None)
    running.start()

    def result() -> Result:
        while not running.wait(LOOK_SECONDS):
            checkpoint()
        return running.result()

    try:
        yield result
    finally:
        running.leave()


def wait_for_left() -> None:
    """Wait until no call runs that was left: pipelines that are opened and closed in turn leave no more than one each.

    Raises:
        ClosedError: as for ``checkpoint``.
    """
    while any(call.is_left for call in tuple(_running)):
        checkpoint()
        time.sleep(LOOK_SECONDS)


class _Leave(BaseException):
    """Leaves the block of a ``look``, whatever errors are caught inside of it; there it becomes the error again."""

    def __init__(self, look: Callable[[], None], error: Exception) -> None:
        super().__init__(str(error))
        self.look = look
        self.errors = [error]  # taken out when it is raised: the two would hold each other


def checkpoint() -> None:
    """Look up: tell how far the work of this thread is, if it is time. What that raises leaves the block that asked for it.

    Raises:
        ClosedError: the interpreter ends.
    """
    looks = tuple(_looks())
    if _is_exiting.is_set():
        error = ClosedError("the interpreter ends")
        raise _Leave(looks[0], error) if looks else error
    for look in looks:
        try:
            look()
        except Exception as error:
            raise _Leave(look, error) from None


def _looks() -> list[Callable[[], None]]:
    found: list[Callable[[], None]] = _here.__dict__.setdefault("looks", [])
    return found


@contextmanager
def _looking(look: Callable[[], None]) -> Iterator[None]:
    looks = _looks()
    looks.append(look)
    error: Exception | None = None
    try:
        yield
    except _Leave as leave:
        if leave.look is not look:
            raise
        error = leave.errors.pop()
    finally:
        looks.remove(look)
    if error is not None:
        try:
            raise error
        finally:
            del error  # as in ``_LongCall.result``


@contextmanager
def unless(is_unwanted: Callable[[], bool], reason: str = "the model is no longer wanted") -> Iterator[None]:
    """Let the calling thread leave the long calls of a block with a ``ClosedError`` as soon as ``is_unwanted()``."""

    def look() -> None:
        if is_unwanted():
            raise ClosedError(reason)

    with _looking(look):
        yield


@contextmanager
def told(on_progress: OnProgress, event: ProgressEvent, half: float = SECONDS_TO_HALF) -> Iterator[None]:
    """Tell how far a part of loading is, every ``TICK_SECONDS`` while the calling thread waits for long calls in a block.

    No compiler says how far it is, so this is an estimate by the time that has passed: after ``half`` seconds it is one half.
    What ``on_progress`` raises leaves the block.
    """
    begin = time.perf_counter()
    due = begin + TICK_SECONDS

    def look() -> None:
        nonlocal due
        now = time.perf_counter()
        if now >= due:
            due = now + TICK_SECONDS
            seconds = now - begin
            on_progress(replace(event, seconds=seconds, is_done=False, part=seconds / (seconds + half)))

    with _looking(look):
        yield


def exit_process(code: int | str | None) -> NoReturn:
    """End this process, a command of ours that has closed everything, as ``sys.exit`` does, but without the teardown.

    That takes longer than closing did, and no thread may be in native code then.
    """
    if isinstance(code, str):
        sys.exit(code)
    _is_exiting.set()
    atexit.unregister(_skip_teardown)
    with suppress(Exception):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or nobody reads any more
            stream.flush()
    os._exit(code or 0)


def _wait_for_calls() -> None:
    until = time.monotonic() + EXIT_SECONDS
    for call in tuple(_running):
        call.wait(until - time.monotonic())


def _is_in_use() -> bool:
    """Return whether another thread is in code of ours, so that there may be native code on its stack."""
    others = [frame for thread, frame in sys._current_frames().items() if thread != threading.get_ident()]
    names = {str(frame.f_globals.get("__name__")) for other in others for frame, _ in traceback.walk_stack(other)}
    return any(name.partition(".")[0] == __name__.partition(".")[0] for name in names)


@atexit.register
def _skip_teardown() -> None:
    """Let no thread be in native code when the interpreter ends.

    Where the C library tells its exit handlers the exit code, the process ends before the destructors of C++; elsewhere it waits
    for the calls. So does a forked child: the threads of C++ objects that it has copies of do not exist in it.
    """
    _is_exiting.set()
    _wait_for_calls()
    if not _running and not _is_in_use() and os.getpid() == _pid:
        return
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    if library is None or not hasattr(library, "on_exit"):
        for call in tuple(_running):
            call.wait(threading.TIMEOUT_MAX)
        return
    gc.freeze()  # else the interpreter looks for cycles among all objects first, beside the calls that run
    # a thread that returns to an interpreter that ends is unwound, which C++ takes for an error: it stops there, until the exit
    set_terminate = ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE
    set_terminate(ctypes.cast(library.pause, ctypes.c_void_p))
    library.fflush(None)
    library.on_exit(ctypes.cast(library._exit, ctypes.c_void_p), None)


if hasattr(os, "register_at_fork"):  # a forked child has no other threads: it must not wait for their calls
    os.register_at_fork(after_in_child=_running.clear)
