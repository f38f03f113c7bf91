"""Locks a file for one thread at a time, among all threads of all processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from staticllm.system.posix import after_fork
from staticllm.system.threads import POLL_SECONDS


class _Holder:
    """The lock of one path within this process. ``thread``: the thread that holds it; None if a background thread releases it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.thread: int | None = None


_holders: dict[Path, _Holder] = {}
_holders_lock = threading.Lock()


def _forget() -> None:
    """Forget all locks in a forked child: the threads that would release them do not exist in this process."""
    global _holders_lock  # noqa: PLW0603
    _holders_lock = threading.Lock()
    _holders.clear()


after_fork(_forget)


class Lease:
    """A held lock, which any thread may release; as a block, it is released at the end."""

    def __init__(self, holder: _Holder, lock: FileLock) -> None:
        self._holder = holder
        self._lock = lock
        self._is_held = True

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def hand_over(self) -> None:
        """Let another thread release the lock. From now on this thread may wait for it."""
        self._holder.thread = None

    def release(self) -> None:
        """Release the lock. A second call does nothing."""
        if self._is_held:
            self._is_held = False
            self._lock.release()
            self._holder.thread = None
            self._holder.lock.release()


def acquire(path: Path, timeout: float = -1) -> Lease:
    """Wait until no other thread or process holds the lock of ``path``, and acquire it.

    File locks distinguish processes, not threads, so a lock within this process is acquired first.

    Raises:
        Timeout: another holder keeps it for more than ``timeout`` seconds, or this thread holds it and would wait forever.
        OSError: the lock file cannot be created.
    """
    with _holders_lock:
        holder = _holders.setdefault(path.resolve(), _Holder())
    if holder.thread == threading.get_ident():
        raise Timeout(str(path))
    _acquire_in_slices(lambda seconds: holder.lock.acquire(timeout=seconds), timeout, path)
    lock = FileLock(path, thread_local=False)
    try:
        _acquire_in_slices(lambda seconds: _try(lock, seconds), timeout, path)
    except BaseException:
        holder.lock.release()
        raise
    holder.thread = threading.get_ident()
    return Lease(holder, lock)


def _try(lock: FileLock, seconds: float) -> bool:
    try:
        lock.acquire(timeout=seconds)
    except Timeout:
        return False
    return True


def _acquire_in_slices(attempt: Callable[[float], bool], timeout: float, path: Path) -> None:
    left = timeout
    while not attempt(POLL_SECONDS if timeout < 0 else max(min(POLL_SECONDS, left), 0)):
        left -= POLL_SECONDS
        if timeout >= 0 and left <= 0:
            raise Timeout(str(path))
