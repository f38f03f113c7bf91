"""The right to read a handle: one thread at a time has it, and may enter again, or one task of an event loop."""

from __future__ import annotations

import asyncio
import threading


class ReaderRole:
    """The right to read. Any thread may give it back for the reader.

    A lock would not do: an iterator may be begun in one thread and dropped in another, and a thread that has ended gives the
    role back.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._readers: dict[object, tuple[int, object]] = {}  # token → thread and task

    def enter(self, token: object, timeout: float | None = None) -> bool:
        """Wait for the role; False if another reader still has it after ``timeout`` seconds. ``token`` stands for this reader."""
        with self._changed:
            if not self._changed.wait_for(self._is_free, timeout):
                return False
            self._readers[token] = _here()
            return True

    def move_here(self, token: object) -> None:
        """An iterator goes on, perhaps in another thread than the one that began it."""
        self._readers[token] = _here()

    def leave(self, token: object) -> None:
        with self._changed:
            self._readers.pop(token, None)
            self._changed.notify_all()

    def _is_free(self) -> bool:
        me, alive = _here(), {thread.ident for thread in threading.enumerate()}
        return all(reader == me or reader[0] not in alive for reader in self._readers.values())


def _here() -> tuple[int, object]:
    """This thread, and its task if it runs an event loop."""
    try:
        return threading.get_ident(), asyncio.current_task()
    except RuntimeError:
        return threading.get_ident(), None
