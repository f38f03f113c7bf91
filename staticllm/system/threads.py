"""Starts threads, and raises one of our errors if no thread can start or if the process is a forked child."""

from __future__ import annotations

import _thread
import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from staticllm.errors import ClosedError, StaticLLMError

POLL_SECONDS = 0.5
"""The longest single wait of a caller: Ctrl-C takes effect after this time where it cannot interrupt a wait."""
SOON_SECONDS = 0.05
"""After this time Ctrl-C comes again that came where no exception may be raised."""
CLOSE_SECONDS = 2.0
"""How long deleting a pipeline waits for it to close, in seconds."""
Result = TypeVar("Result")

_here = threading.local()
_closing: set[threading.Thread] = set()  # threads that close what was garbage-collected
_is_exiting = threading.Event()


def start_thread(run: Callable[[], None], name: str) -> threading.Thread:
    """Start and return a daemon thread.

    Raises:
        StaticLLMError: the system has no more threads, or the interpreter ends.
    """
    thread = _Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        if isinstance(error.__context__, KeyboardInterrupt):  # a lock of the interpreter was released twice after it
            raise error.__context__ from None
        raise _not_started(name, error) from error
    return thread


class _Thread(threading.Thread):
    """A thread whose ``start`` raises ``RuntimeError`` if it ends before it has begun, for which Python's own waits for ever.

    It does where memory is missing for its first frame. What it would have run is freed then, and nothing else tells of it.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._started = _Beginning(self)

    @property
    def _bootstrap(self) -> _Bootstrap:  # what ``start`` gives to a new thread of the system
        found = _Bootstrap(super()._bootstrap)  # type: ignore[misc]  # pyright: ignore
        self.bootstrap = weakref.ref(found)
        return found


class _Bootstrap:
    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run

    def __call__(self) -> None:
        self._run()


class _Beginning(threading.Event):
    """Set by the thread when it begins; a ``wait`` for it ends with the thread."""

    def __init__(self, thread: _Thread) -> None:
        super().__init__()
        self._thread = weakref.ref(thread)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the thread begins. Raises ``RuntimeError`` (it ended before that)."""
        while not super().wait(POLL_SECONDS if timeout is None else timeout):
            thread = self._thread()
            if timeout is not None:
                return False
            if thread is not None and thread.bootstrap() is None and not self.is_set():  # freed with its thread
                with threading._active_limbo_lock:  # type: ignore[attr-defined]  # pyright: ignore
                    threading._limbo.pop(thread, None)  # type: ignore[attr-defined]  # pyright: ignore
                raise _NoMemoryForThreadError
        return True


class _NoMemoryForThreadError(RuntimeError):
    """A thread ended before it began."""


def _not_started(name: str, error: RuntimeError) -> StaticLLMError:
    if (
        not threading.main_thread().is_alive()
    ):  # Python starts no threads any more, also for other threads that still run
        return ClosedError(
            f"the main thread has ended, so that the thread {name!r} cannot be started: load models before, and let the main "
            "thread wait for those that use them"
        )
    if isinstance(error, _NoMemoryForThreadError):
        return StaticLLMError(
            f"there is not enough memory for the thread {name!r}: end other programs, or load with a smaller MAX_PROMPT_LEN, "
            "KV_SLOTS or MAX_NUM_SEQS"
        )
    return StaticLLMError(
        f"the thread {name!r} cannot be started beside {threading.active_count()} others ({error}): end some, or raise "
        "the limit of threads (ulimit -u), and try again"
    )


class ThreadPool(ThreadPoolExecutor):
    """Threads that run functions. ``submit`` and ``map`` raise as ``start_thread`` does, if no thread can be started."""

    def submit(self, fn: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Future[Result]:
        """Run a function on one of the threads.

        Raises:
            StaticLLMError: the system has no more threads.
        """
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError as error:
            raise _not_started(str(self._thread_name_prefix), error) from error


class Condition(threading.Condition):
    """A condition for ``with`` statements of others, such as ``Future``: Ctrl-C in them does not leave its lock taken.

    ``threading.Condition.__enter__`` is Python code, where an exception may come after the lock was taken. These are the lock's
    own methods, which are looked up before.
    """

    __enter__ = property(lambda self: self._lock.__enter__)  # pyright: ignore
    __exit__ = property(lambda self: self._lock.__exit__)  # pyright: ignore


class InterruptibleFuture(Future[Result]):
    """A future that a thread of ours ends: Ctrl-C in its ``result`` does not leave the lock taken that the other thread needs."""

    def __init__(self) -> None:
        super().__init__()
        self._condition = Condition()


class _ThreadRun:
    """The run of a thread. An interrupted ``Thread.join`` of Python 3.11 takes a thread that runs for one that has ended."""

    def __init__(self) -> None:
        self.thread = threading.current_thread()
        self.has_ended = False
        self._pid = os.getpid()
        self._lock = threading.Lock()  # taken until the end
        self._lock.acquire()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs. In a forked child it does not exist."""
        return not self.has_ended and os.getpid() == self._pid

    def end(self) -> None:
        """Note the end, and wake those that wait for it."""
        self.has_ended = True
        self._lock.release()

    def wait(self, seconds: float) -> None:
        """Wait for the end, for at most ``seconds``. If this is interrupted, the lock may stay taken after the end."""
        if self._lock.acquire(timeout=seconds):
            self._lock.release()


class LazyThread:
    """A daemon thread that begins at most once, and whose end is known, whatever interrupts ``start`` and ``join``.

    A signal can raise ``KeyboardInterrupt`` in ``start`` when it is not known whether the thread begins; ``start`` may be called
    again then. So each thread asks itself whether it is the first: signals do not reach it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_started = False
        self._first: dict[str, _ThreadRun | None] = {}  # under one key; None: none may begin any more

    def start(self, run: Callable[[], None]) -> None:
        """Start the thread, unless it was, and wait until it runs; after ``join`` none does.

        Raises:
            StaticLLMError: the system has no more threads, or the thread ended before it began.
        """
        if self._is_started:
            return
        thread = start_thread(partial(self._begin, run), self._name)
        while not self._first and thread.is_alive():
            time.sleep(1e-4)  # no Event: one whose wait is interrupted can stay locked for the thread that sets it
        if not self._first:
            raise StaticLLMError(f"the thread {self._name!r} ended before it began: try again")
        self._is_started = True

    def _begin(self, run: Callable[[], None]) -> None:
        own = _ThreadRun()
        if self._first.setdefault("first", own) is own:
            try:
                run()
            finally:
                own.end()

    @property
    def has_begun(self) -> bool:
        return self._first.get("first") is not None

    @property
    def is_current(self) -> bool:
        first = self._first.get("first")
        return first is not None and first.thread is threading.current_thread()

    def is_alive(self) -> bool:
        first = self._first.get("first")
        return first is not None and first.is_alive

    def join(self, timeout: float | None = None) -> bool:
        """Let it not begin any more, and wait for its end, at most ``timeout`` seconds; return whether it has ended.

        On the thread itself this does not wait.
        """
        first = self._first.setdefault("first", None)
        if first is None or first.thread is threading.current_thread():
            return first is None
        until = None if timeout is None else time.monotonic() + timeout
        while first.is_alive:
            left = POLL_SECONDS if until is None else until - time.monotonic()
            if left <= 0:
                return False
            first.wait(min(POLL_SECONDS, left))
        first.thread.join(timeout)  # it ends now
        return True


def run_uninterrupted(work: Callable[[], None], name: str) -> None:
    """Run what Ctrl-C must not end in the middle, from the main thread on one of its own: Ctrl-C ends the wait for it alone."""
    if threading.current_thread() is not threading.main_thread():
        work()
        return
    thread = LazyThread(name)
    try:
        thread.start(work)
    except StaticLLMError:  # the system has no more threads, or the interpreter ends
        work()
    else:
        thread.join()


@contextmanager
def owned_device() -> Iterator[None]:
    """Say that the calling thread is the one of a device: in this block it must never wait for the device."""
    before = getattr(_here, "owns_device", False)  # in a block of the device's owner, another engine's step may run
    _here.owns_device = True
    try:
        yield
    finally:
        _here.owns_device = before


def check_may_wait() -> None:
    """Check that the calling thread may wait for a device, so is not a device's own.

    Raises:
        StaticLLMError: it is.
    """
    if getattr(_here, "owns_device", False):
        raise StaticLLMError(
            f"the thread {threading.current_thread().name!r} runs the calls of a device and would wait for itself, or let all "
            "requests wait: call this on another thread"
        )


def close_when_collected(owner: object, close: Callable[..., None], *arguments: object) -> weakref.finalize:  # type: ignore[type-arg]
    """Call ``close`` when ``owner`` is deleted, on a thread of its own, or at the end of the interpreter.

    The garbage collector runs at any moment on any thread, also on one that holds a lock which ``close`` or a thread that it
    joins needs. So the deleting thread waits for ``close``, but not longer than ``CLOSE_SECONDS``.
    """
    return weakref.finalize(owner, _close_elsewhere, partial(close, *arguments))


def _close_elsewhere(close: Callable[[], None]) -> None:
    if _is_exiting.is_set():
        close()
        return

    def run() -> None:
        try:
            close()
        finally:
            _closing.discard(thread)

    thread = threading.Thread(target=run, name="staticllm-close", daemon=True)
    _closing.add(thread)
    try:
        thread.start()
    except RuntimeError:  # the interpreter ends, or the system has no more threads
        run()
        return
    try:
        thread.join(CLOSE_SECONDS)
    except KeyboardInterrupt:  # in a finalizer it would be printed and lost: let it come once more, after it
        start_thread(_interrupt_soon, "staticllm-interrupt")


def _interrupt_soon() -> None:
    time.sleep(SOON_SECONDS)
    _thread.interrupt_main()


@atexit.register
def _wait_for_closing() -> None:
    _is_exiting.set()
    for thread in list(_closing):
        thread.join()


def check_process(pid: int) -> None:
    """Check that this is the process ``pid``, not its forked child.

    Raises:
        ClosedError: it is a child.
    """
    if os.getpid() != pid:
        raise ClosedError(
            f"the pipeline was loaded in process {pid} and this is a forked child, {os.getpid()}: load it in the child, or use "
            "multiprocessing's 'spawn' method"
        )
