"""Loads further programs, or those of another device, on one thread while the pipeline already serves."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from typing import Protocol

from staticllm.core import OnProgress, ProgressEvent
from staticllm.errors import ClosedError
from staticllm.system.threads import start_thread

CLOSE_TIMEOUT = 5.0
"""Seconds that closing waits for the running part, because a compiler cannot be interrupted."""


class BackgroundWork(Protocol):
    """The work of a ``BackgroundLoader``: it runs the parts in order, and the release at the end, also after an error."""

    def parts(self) -> list[Callable[[], None]]:
        """Return the parts of the work, in order."""
        ...

    def release(self) -> None:
        """Release what the work holds; called once, on the thread that ran the parts."""
        ...


class BackgroundLoader:
    """Runs the parts of some work on a thread of its own, stops at the first one that raises, and keeps the exception."""

    def __init__(self, work: BackgroundWork, on_progress: OnProgress) -> None:
        self._work: BackgroundWork | None = work
        self._on_progress = on_progress
        self._is_closing = False
        self._error: BaseException | None = None
        self._started = time.perf_counter()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread.

        Raises:
            StaticLLMError: the thread cannot be started.
        """
        self._thread = start_thread(self._run, "staticllm-background")

    @property
    def is_done(self) -> bool:
        """Whether the thread has ended: everything is loaded, or a part has failed."""
        return self._thread is not None and not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until everything is loaded; return False if that takes longer than ``timeout`` seconds.

        Raises:
            Exception: a part raised it and stopped the work; a ``StaticLLMError`` unless a callback raised it.
        """
        if self._thread is not None:
            self._thread.join(timeout)
        if not self.is_done:
            return False
        if self._error is not None:
            raise self._error
        return True

    def close(self) -> None:
        """Start no further part, and wait up to ``CLOSE_TIMEOUT`` seconds for the running part."""
        self._is_closing = True
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_TIMEOUT)

    def _run(self) -> None:
        work, self._work = self._work, None  # the work holds graphs and weights, which are freed when this ends
        assert work is not None, "started twice"
        try:
            for part in work.parts():
                if self._is_closing:
                    return
                part()
            self._on_progress(ProgressEvent("complete", 1, 1, time.perf_counter() - self._started))
        except ClosedError:
            return  # the pipeline was closed: the remaining programs are not needed
        except BaseException as error:  # raised by a program or by the user's callback; ``wait`` raises it again
            self._error = error
            message = f"{type(error).__name__}: {error}"
            text = f"background loading failed; the loaded programs keep serving: {message}"
            warnings.warn(text, RuntimeWarning, stacklevel=1)
            try:
                self._on_progress(ProgressEvent("error", 1, 1, time.perf_counter() - self._started, message=message))
            except Exception:  # the callback failed before; one report is enough
                return
        finally:
            work.release()
