"""Signals that end a command."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))

CLOSE, LOGOFF, SHUTDOWN = 2, 5, 6
"""Events of a console on Windows (CTRL_CLOSE_EVENT and others). A process ends as soon as it has handled one, or 5 s later."""
CONSOLE_SECONDS = 30.0
"""How long such an event is held back: longer than Windows waits."""


@contextmanager
def unwound_at_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP leave a block by ``SystemExit``, as Ctrl-C does, so that its processes and files are removed.

    The exit code is 128 and the signal's number. A signal that is ignored (``nohup``) stays so; on other threads than the main
    one, which get no signals, nothing is changed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.getsignal(number) for number in ENDING}
    taken = [number for number, handler in before.items() if handler == signal.SIG_DFL]
    for number in taken:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def ended_while_importing() -> Iterator[None]:
    """Let Ctrl-C end the process at once, with exit code 130, while a block imports modules, and has nothing to clean up.

    An exception inside of an import may leave Python's lock of imports held, and every other thread that imports would wait
    forever; extensions make an ``ImportError`` of it. If Ctrl-C is ignored or handled, or on another thread, nothing is changed.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(number: int, frame: FrameType | None) -> None:
    os.write(2, os.linesep.encode())
    os._exit(128 + number)


def end_with_console() -> None:
    """On Windows, let a process whose console window is closed end as by Ctrl-C, with the seconds that Windows gives it.

    Else it would be ended at once: a server would leave its ready file, requests would get no answer. The same at a log-off and
    a shutdown. Elsewhere SIGHUP says so, and nothing is done here.
    """
    if sys.platform == "win32":
        _handlers.append(ctypes.WINFUNCTYPE(ctypes.c_int, ctypes.c_uint32)(on_console_event))
        ctypes.WinDLL("kernel32").SetConsoleCtrlHandler(_handlers[-1], True)


_handlers: list[object] = []  # the system keeps their addresses only


def on_console_event(event: int) -> int:
    """Handle an event of the console, on a thread of the system. Returns whether it was handled."""
    if event not in (CLOSE, LOGOFF, SHUTDOWN):
        return False
    signal.raise_signal(signal.SIGINT)
    time.sleep(CONSOLE_SECONDS)  # the process ends meanwhile
    return True
