"""Signals that end a command."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


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
