"""Ctrl-C at a moment that a test chooses."""

import threading


class InterruptionError(Exception):
    """Ctrl-C. An exception that is no KeyboardInterrupt, which would end the whole run of a test that fails."""


def interrupt_in_enter(monkeypatch):
    """Let Ctrl-C come in every ``__enter__`` of a condition that is Python code, after the lock was taken."""
    main = threading.get_ident()

    def enter(self):
        taken = self._lock.__enter__()
        if threading.get_ident() == main:
            raise InterruptionError
        return taken

    monkeypatch.setattr(threading.Condition, "__enter__", enter)
