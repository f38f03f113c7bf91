"""Keeps the stack of a thread's signal handlers, which OpenVINO's CPU plugin replaces when it is loaded on that thread.

The plugin unmaps its own stack when it is unloaded, and on another thread it does not register the earlier one again: the next
Ctrl-C would kill the process. Seen with the tokenizers of OpenVINO GenAI 2026.4.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager


class _Stack(ctypes.Structure):
    """``stack_t`` on Linux."""

    _fields_ = (("address", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


@contextmanager
def kept_signal_stack() -> Iterator[None]:
    """Give the calling thread the signal stack back that it had before a block. Elsewhere than on Linux this does nothing."""
    register = getattr(ctypes.CDLL(None), "sigaltstack", None) if sys.platform == "linux" else None
    before = _Stack()
    if register is None or register(None, ctypes.byref(before)):
        yield
        return
    try:
        yield
    finally:
        register(ctypes.byref(before), None)
