"""Functions of systems that other systems lack, each with what holds there. No other module of the library asks for them.

Two places have their own, because programs without staticllm load them: ``wire/`` and ``attach/``, and ``export/tool.py``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterable

_PARENT_DEATH_SIGNAL = 1


def after_fork(action: Callable[[], object]) -> None:
    """Run an action in each process that is forked from this one; without ``fork`` there is none."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=action)


def affinity() -> set[int] | None:
    """Return the logical processors that this thread may use; None if the system does not tell."""
    return set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


def set_affinity(thread: int, processors: Iterable[int]) -> None:
    """Bind a thread, 0 for the calling one, to logical processors; only where ``affinity`` tells them.

    Raises:
        OSError, OverflowError, ValueError: there is no such processor, or no such thread.
    """
    if sys.platform == "linux":
        os.sched_setaffinity(thread, processors)


def kill_group(pid: int) -> None:
    """End the processes of the group that a process leads; it may have ended. Windows has no such groups."""
    if sys.platform != "win32":
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def end_with_parent() -> None:
    """Let Linux end this process with the thread that started it, which must wait for it.

    Calls of libraries may keep the thread for seconds from running that sees the end of the parent's pipe.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, int(signal.SIGKILL))


def is_read_only(descriptor: int) -> bool:
    """Return whether an inherited file descriptor is open for reading only.

    Raises:
        OSError, OverflowError: it is not open.
        NotImplementedError: this is Windows, where programs inherit handles, not descriptors.
    """
    if sys.platform == "win32":
        raise NotImplementedError
    import fcntl

    return fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
