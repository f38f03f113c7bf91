"""Ctrl-C at a moment that a test chooses."""

import os
import signal
import threading
from contextlib import contextmanager

import pytest

MAIN_THREAD_GETS_SIGINT = pytest.mark.skipif(os.name == "nt", reason="sends SIGINT to itself")


@contextmanager
def sigint_after(seconds):
    """Let Ctrl-C come in this block, in the main thread."""
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        yield
    finally:
        timer.join()


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
