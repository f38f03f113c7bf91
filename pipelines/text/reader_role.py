"""Gives the right to read a handle to one thread or one asyncio task at a time; the same reader may enter again."""

from __future__ import annotations

import sys
import threading


class ReaderRole:
    """The right to read, held by one thread or task at a time. Any thread may return it on the reader's behalf.

    A lock is not enough: an iterator may begin in one thread and be dropped in another, and a thread that ends must release
    the role.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._readers: dict[object, tuple[int, object]] = {}  # token → thread and task

    def enter(self, token: object, timeout: float | None = None) -> bool:
        """Wait for the role; return False if another reader holds it after ``timeout`` seconds. ``token`` identifies this one."""
        with self._changed:
            if not self._changed.wait_for(self._is_free, timeout):
                return False
            self._readers[token] = _here()
            return True

    def move_here(self, token: object) -> None:
        """Move the role of ``token`` to this thread, as an iterator may continue in another thread than it began in."""
        self._readers[token] = _here()

    def leave(self, token: object) -> None:
        """Release the role of ``token``; without it, do nothing."""
        with self._changed:
            self._readers.pop(token, None)
            self._changed.notify_all()

    def _is_free(self) -> bool:
        me, alive = _here(), {thread.ident for thread in threading.enumerate()}
        return all(reader == me or reader[0] not in alive for reader in self._readers.values())


def _here() -> tuple[int, object]:
    """Return the current thread's id, and its asyncio task if it runs an event loop."""
    asyncio = sys.modules.get("asyncio")  # without it, no event loop runs
    try:
        return threading.get_ident(), asyncio.current_task() if asyncio is not None else None
    except RuntimeError:
        return threading.get_ident(), None
