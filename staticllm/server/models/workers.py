"""Runs what would block the event loop in a bounded number of threads: long JSON, templates, tokenizers, grammars."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from staticllm.server.http.errors import SERVER, ApiError, busy

Result = TypeVar("Result")
WAITING_PER_THREAD = 64


class Workers:
    """A pool of threads with a bounded queue.

    Calls of one ``owner``, such as a model, have at most half of the threads: one whose process hangs leaves the rest to others.
    """

    def __init__(self, num_threads: int) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="staticllm-server")
        self._limit = num_threads * (WAITING_PER_THREAD + 1)
        self._num_calls = 0
        self._turns: defaultdict[str, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(max(1, num_threads // 2))
        )

    async def run(
        self,
        function: Callable[[], Result],
        on_abandoned: Callable[[Result], object] | None = None,
        owner: str | None = None,
    ) -> Result:
        """Call ``function`` in a thread and return what it returns.

        ``on_abandoned`` gets the result if the caller was cancelled meanwhile.

        Raises:
            ApiError: 429: too many calls wait.
            Exception: ``function`` raised it.
        """
        if self._num_calls >= self._limit:
            raise busy(f"{self._num_calls} requests are being read or tokenized: try again later", knob="")
        self._num_calls += 1
        with contextlib.ExitStack() as stack:
            stack.callback(self._end_call)
            if owner is not None:
                await self._turns[owner].acquire()
                stack.callback(self._turns[owner].release)
            future = self._pool.submit(function)
            at_end = stack.pop_all()
        ended = asyncio.wrap_future(future)
        ended.add_done_callback(lambda _: at_end.close())  # the shield prevents its cancellation
        try:
            return await asyncio.shield(ended)
        except asyncio.CancelledError:
            if not future.cancel() and on_abandoned is not None:
                future.add_done_callback(lambda done: _hand_over(done, on_abandoned))
            raise

    async def run_within(self, seconds: float, function: Callable[[], Result]) -> Result:
        """As ``run``, for what asks another process: one that does not answer in time holds its thread, but not the caller.

        Raises:
            ApiError: it took longer (status 503), or too many calls wait (429).
        """
        try:
            return await asyncio.wait_for(self.run(function), seconds)
        except TimeoutError:
            raise ApiError(
                503, f"the process of a model has not answered within {seconds:g} s: try again later", kind=SERVER,
                code="process_silent", headers={"Retry-After": "5"},
            ) from None  # fmt: skip

    def _end_call(self) -> None:
        self._num_calls -= 1

    def close(self) -> None:
        """End the threads after their calls; calls that wait are dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _hand_over(future: Future[Result], function: Callable[[Result], object]) -> None:
    if not future.cancelled() and future.exception() is None:
        function(future.result())
