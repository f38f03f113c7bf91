"""Ctrl-C at a moment that a test chooses."""

import threading


def interrupt_in_enter(monkeypatch):
    """Let Ctrl-C come in every ``__enter__`` of a condition that is Python code, after the lock was taken."""
    main = threading.current_thread()

    def enter(self):
        taken = self._lock.__enter__()
        if threading.current_thread() is main:
            raise KeyboardInterrupt
        return taken

    monkeypatch.setattr(threading.Condition, "__enter__", enter)
