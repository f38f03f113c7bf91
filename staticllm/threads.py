"""Starts threads, and raises one of our errors if no thread can start or if the process is a forked child."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from staticllm.errors import ClosedError, StaticLLMError


def start_thread(run: Callable[[], None], name: str) -> threading.Thread:
    """Start a daemon thread that runs ``run``, and return it.

    Raises:
        StaticLLMError: the system cannot start another thread.
    """
    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise StaticLLMError(
            f"the thread {name!r} cannot be started beside {threading.active_count()} others ({error}): end some, or raise "
            "the limit of threads (ulimit -u), and try again"
        ) from error
    return thread


def check_process(pid: int) -> None:
    """Check that this is the process ``pid``, in which our threads run.

    Raises:
        ClosedError: this is another process, a forked child.
    """
    if os.getpid() != pid:
        raise ClosedError(
            f"the pipeline was loaded in process {pid} and this is a forked child, {os.getpid()}: load it in the child, or use "
            "multiprocessing's 'spawn' method"
        )
