"""One holder at a time, of all threads of all processes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

POLL_SECONDS = 0.5
"""How long a wait lasts that Ctrl-C cannot end."""


class _Holder:
    """The lock of one path within this process. ``thread`` holds it, or None where a background thread will give it back."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.thread: int | None = None


_holders: dict[Path, _Holder] = {}
_holders_lock = threading.Lock()


def _forget() -> None:
    """In a forked child: its parent's threads, which would give their locks back, do not live here."""
    global _holders_lock  # noqa: PLW0603
    _holders_lock = threading.Lock()
    _holders.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


class Lease:
    """A held lock. ``release`` gives it back, from any thread; again does nothing."""

    def __init__(self, holder: _Holder, lock: FileLock) -> None:
        self._holder, self._lock, self._is_held = holder, lock, True

    def hand_over(self) -> None:
        """Another thread will release it: from now on this thread may wait for it."""
        self._holder.thread = None

    def release(self) -> None:
        """Give the lock back. A second call does nothing."""
        if self._is_held:
            self._is_held = False
            self._lock.release()
            self._holder.thread = None
            self._holder.lock.release()


def acquire(path: Path, timeout: float = -1) -> Lease:
    """Wait until no other thread or process holds ``path``, and hold it.

    File locks know processes, not threads: within this process a lock of our own comes first.

    Raises:
        Timeout: another one holds it for longer than ``timeout`` seconds; or this very thread does, and would wait for ever.
        OSError: the file cannot be made.
    """
    with _holders_lock:
        holder = _holders.setdefault(path.resolve(), _Holder())
    if holder.thread == threading.get_ident():
        raise Timeout(str(path))
    _patiently(lambda seconds: holder.lock.acquire(timeout=seconds), timeout, path)
    lock = FileLock(path, thread_local=False)
    try:
        _patiently(lambda seconds: _try(lock, seconds), timeout, path)
    except BaseException:
        holder.lock.release()
        raise
    holder.thread = threading.get_ident()
    return Lease(holder, lock)


@contextmanager
def locked(path: Path, timeout: float = -1) -> Iterator[None]:
    """Hold ``path`` for a block.

    Raises:
        Timeout, OSError: as ``acquire``.
    """
    lease = acquire(path, timeout)
    try:
        yield
    finally:
        lease.release()


def _try(lock: FileLock, seconds: float) -> bool:
    try:
        lock.acquire(timeout=seconds)
    except Timeout:
        return False
    return True


def _patiently(attempt: Callable[[float], bool], timeout: float, path: Path) -> None:
    left = timeout
    while not attempt(POLL_SECONDS if timeout < 0 else max(min(POLL_SECONDS, left), 0)):
        left -= POLL_SECONDS
        if timeout >= 0 and left <= 0:
            raise Timeout(str(path))
