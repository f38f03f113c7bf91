"""What goes on after a pipeline can already serve: further programs, or those of another device. One thread, one error."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable

from staticllm.core import ProgressEvent
from staticllm.errors import ClosedError
from staticllm.threads import start_thread

CLOSE_TIMEOUT = 5.0
"""Seconds that closing waits for the part that is under way: a compiler cannot be interrupted."""


class BackgroundLoader:
    """Runs ``parts`` one after another in a thread of its own; stops at the first that raises, and keeps what it raised."""

    def __init__(
        self,
        parts: Callable[[], list[Callable[[], None]]],
        on_progress: Callable[[ProgressEvent], None],
        release: Callable[[], object] = lambda: None,
    ) -> None:
        self._parts, self._on_progress, self._release = parts, on_progress, release
        self._is_closing = False
        self._error: BaseException | None = None
        self._started = time.perf_counter()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """
        Raises:
            StaticLLMError: the thread cannot be started.
        """
        self._thread = start_thread(self._run, "staticllm-background")

    @property
    def is_done(self) -> bool:
        """Whether nothing more will come: all is there, or a part has failed."""
        return self._thread is not None and not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> bool:
        """Until all is there. False if that takes longer than ``timeout`` seconds.

        Raises:
            whatever stopped it.
        """
        if self._thread is not None:
            self._thread.join(timeout)
        if not self.is_done:
            return False
        if self._error is not None:
            raise self._error
        return True

    def close(self) -> None:
        """Begin nothing more. The part under way ends by itself if it takes long."""
        self._is_closing = True
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_TIMEOUT)

    def _run(self) -> None:
        try:
            for part in self._parts():
                if self._is_closing:
                    return
                part()
            self._on_progress(ProgressEvent("complete", 1, 1, time.perf_counter() - self._started))
        except ClosedError:
            return  # the pipeline has gone, and with it who would want the rest
        except BaseException as error:  # a program's, or one of the user's callback: whoever waits must hear of it
            self._error = error
            message = f"{type(error).__name__}: {error}"
            warnings.warn(f"not everything was loaded, what is there goes on: {message}", RuntimeWarning, stacklevel=1)
            try:
                self._on_progress(ProgressEvent("error", 1, 1, time.perf_counter() - self._started, message=message))
            except Exception:  # the callback failed before: once is enough
                return
        finally:
            self._parts = list  # what they hold, graphs and weights, is needed no longer
            self._release()
