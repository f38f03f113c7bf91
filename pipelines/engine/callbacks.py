"""Runs functions of other threads on the engine's thread, between two device calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")


class Callbacks:
    """Functions that wait for the engine's thread, and the futures of their results."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()

    def __bool__(self) -> bool:
        """Whether a function is waiting."""
        return bool(self._waiting)

    def add(self, function: Callable[[], Result]) -> Future[Result]:
        """Queue ``function``. The future receives its result, or its exception. Any thread may call."""
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except BaseException as error:  # raised again in the caller
                future.set_exception(error)

        self._waiting.append(run)
        return future

    def run(self) -> None:
        """Call the waiting functions. Runs on the engine's thread."""
        while self._waiting:
            self._waiting.popleft()()
