"""A transcription that was submitted: it runs on a thread of its own, which waits for the device."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from concurrent.futures import CancelledError, Future
from typing import Any

from staticllm.system.threads import InterruptibleFuture, start_thread

from .results import WhisperDecodedResults
from .transcription_watch import Cancellation


class TranscriptionHandle:
    """What was submitted: ``result`` waits for it, ``await`` too, and ``cancel`` ends it.

    Raises:
        StaticLLMError: the system has no more threads.
    """

    def __init__(self, run: Callable[[], WhisperDecodedResults], cancellation: Cancellation) -> None:
        """Begin ``run`` on a thread; it returns early once ``cancellation`` was cancelled."""
        self._cancellation = cancellation
        self._future = InterruptibleFuture[WhisperDecodedResults]()
        self._future.set_running_or_notify_cancel()  # it ends when its thread does, and not before
        self._run = run
        try:
            start_thread(self._work, "staticllm-transcription")
        except BaseException:  # Ctrl-C while the thread begins: nobody gets the handle
            cancellation.cancel()
            raise

    def result(self, timeout: float | None = None) -> WhisperDecodedResults:
        """Return the result.

        Raises:
            StaticLLMError: the transcription failed.
            TimeoutError: it took longer than ``timeout`` seconds.
            concurrent.futures.CancelledError: it was cancelled.
        """
        return self._future.result(timeout)

    def cancel(self) -> None:
        """End the transcription before its next device call. After its end this does nothing."""
        self._cancellation.cancel()

    @property
    def future(self) -> Future[WhisperDecodedResults]:
        """The future of the result, for ``concurrent.futures`` and ``asyncio.wrap_future``."""
        return self._future

    def __await__(self) -> Generator[Any, None, WhisperDecodedResults]:
        ended = asyncio.wrap_future(self._future)
        ended.add_done_callback(_retrieved)
        yield from asyncio.wait([ended]).__await__()
        return self.result(0)

    def _work(self) -> None:
        try:
            found = self._run()
            if self._cancellation.is_cancelled:
                raise CancelledError
        except BaseException as error:  # the reader raises it
            self._future.set_exception(error)
        else:
            self._future.set_result(found)
        del self._run  # which holds the pipeline and the samples


def _retrieved(future: asyncio.Future[WhisperDecodedResults]) -> None:
    """Take the exception of a future of which nobody may read it any more, so that asyncio does not complain."""
    if not future.cancelled():
        future.exception()
