"""What ``submit`` gives back: read it, wait for it, or end it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator
from typing import Any

from staticllm.core import FinishReason
from staticllm.errors import StaticLLMError
from staticllm.pipelines.engine.request import End, Request, Token
from staticllm.pipelines.text.outcome import Outcome
from staticllm.pipelines.text.output_processor import Answer, OutputProcessor, TextDelta
from staticllm.threads import check_process, start_thread

POLL_SECONDS = 0.5
"""How long a reader waits at a time: where Ctrl-C cannot end a wait, it is seen when the wait is over."""


class ReaderRole:
    """Who reads: one thread at a time, which may enter again, or one task of an event loop. Any thread may leave for it.

    A lock would not do: an iterator may be begun in one thread and dropped in another, and a thread that ended has left.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._readers: dict[object, tuple[int, object]] = {}  # token → thread and task

    def enter(self, token: object, timeout: float | None = None) -> bool:
        """Wait for the role; False if another reader still has it after ``timeout`` seconds. ``token`` stands for this reader."""
        with self._changed:
            if not self._changed.wait_for(self._is_free, timeout):
                return False
            self._readers[token] = _here()
            return True

    def go_on(self, token: object) -> None:
        """An iterator goes on, perhaps in another thread than the one that began it."""
        self._readers[token] = _here()

    def leave(self, token: object) -> None:
        with self._changed:
            self._readers.pop(token, None)
            self._changed.notify_all()

    def _is_free(self) -> bool:
        me, alive = _here(), {thread.ident for thread in threading.enumerate()}
        return all(reader == me or reader[0] not in alive for reader in self._readers.values())


def _here() -> tuple[int, object]:
    """This thread, and its task where it runs an event loop."""
    try:
        return threading.get_ident(), asyncio.current_task()
    except RuntimeError:
        return threading.get_ident(), None


class GenerationHandle:
    """One request on its way. Read by one reader at a time: iterate text, or ``tokens()``, or ``async for``, or ``await``.

    A handle that is dropped before its end cancels its request.
    """

    def __init__(
        self,
        request: Request,
        output_processor: OutputProcessor,
        finish: Callable[[Answer], Outcome],
        result: Callable[[Outcome], Any],
        is_done: bool = False,
    ) -> None:
        self._request, self._output_processor, self._finish, self._build = request, output_processor, finish, result
        self._end: End | None = End(FinishReason.LENGTH) if is_done else None
        self._outcome: Outcome | None = None
        self._role, self._pid, self._finishing = ReaderRole(), os.getpid(), threading.Lock()
        self._thread: threading.Thread | None = None
        self._first: TextDelta | None = output_processor.echo
        if is_done:
            output_processor.finish(FinishReason.LENGTH)

    def __iter__(self) -> Iterator[str]:
        """Text as it comes."""
        self._output_processor.wants_text = True
        for piece in self.pieces():
            if piece.text:
                yield piece.text

    def tokens(self) -> Iterator[int]:
        """Token ids as they come."""
        for piece in self.pieces(wants_text=False):
            yield from piece.tokens

    def __await__(self) -> Generator[Any, None, Any]:
        """Wait for the end without holding up the event loop; the same value that ``generate`` returns."""

        async def read() -> Any:
            if self._thread is not None:  # a callback reads; waiting for it would hold up the loop
                return await asyncio.to_thread(self.result)
            async for _ in self._pieces_async():
                pass
            return self.result()

        return read().__await__()

    async def __aiter__(self) -> AsyncIterator[str]:
        """Text as it comes, without holding up the event loop. Leaving the loop early cancels."""
        self._output_processor.wants_text = True
        async with contextlib.aclosing(self._pieces_async()) as pieces:
            async for piece in pieces:
                if piece.text:
                    yield piece.text

    async def _pieces_async(self) -> AsyncGenerator[TextDelta, None]:
        check_process(self._pid)
        outputs, loop, token = asyncio.Event(), asyncio.get_running_loop(), object()
        if self.is_done:
            self._raise_error()
            return
        if not self._role.enter(token, 0):
            raise StaticLLMError("another thread or task reads this handle: a handle has one reader at a time")

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody listens any more
                loop.call_soon_threadsafe(outputs.set)

        output_queue = self._request.output_queue
        output_queue.listener = wake
        try:
            if (first := self._take_first()) is not None:
                yield first
            while not self.is_done:
                outputs.clear()
                output = output_queue.get(0)
                if output is None:
                    await outputs.wait()
                elif (piece := self._take(output)) is not None:
                    yield piece
        finally:
            output_queue.listener = None
            self._role.leave(token)
            if not self.is_done:
                self.cancel()
        self._raise_error()

    @property
    def is_done(self) -> bool:
        """Whether the end has been read."""
        return self._end is not None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended; None before."""
        return self._end.reason if self._end else None

    def cancel(self) -> None:
        """End it before the next device call; what came until then is the result. Afterwards, do nothing."""
        self._request.is_cancelled = True

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the end; the same value that ``generate`` returns.

        Raises:
            TimeoutError: it has not ended after ``timeout`` seconds, or another thread is still reading it; it goes on.
            StaticLLMError: the request failed.
            whatever the callback raised.
        """
        return self._build(self.outcome(timeout))

    def outcome(self, timeout: float | None = None) -> Outcome:
        """Wait for the end; the answer and its timings."""
        until = None if timeout is None else time.monotonic() + timeout
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)
        token = object()
        try:
            if not self._enter(token, until):
                raise TimeoutError(
                    "another thread is reading this handle, and the request has not ended yet; it goes on"
                )
            while not self.is_done:
                self._next(until)
        finally:
            self._role.leave(token)
        self._raise_error()
        with self._finishing:
            if self._outcome is None:
                self._outcome = self._finish(self._output_processor.answer)
        return self._outcome

    def _enter(self, token: object, until: float | None) -> bool:
        """Become the reader, or see that the end has been read; a wait that Ctrl-C cannot end is cut into short ones."""
        while not self.is_done:
            rest = POLL_SECONDS if until is None else min(POLL_SECONDS, max(until - time.monotonic(), 0))
            if self._role.enter(token, rest):
                return True
            if until is not None and time.monotonic() >= until:
                return self.is_done
        return True

    def call_back(self, callback: Callable[[str], Any]) -> None:
        """Let a thread of its own read, and call ``callback`` with text; what it raises ends the request and is the result's.

        Raises:
            StaticLLMError: the thread cannot be started; the request was cancelled.
        """

        def read() -> None:
            try:
                for text in self:
                    callback(text)
            except BaseException as error:  # SystemExit and CancelledError too: nobody else would hear of them
                self.cancel()
                self._end = End(FinishReason.ERROR, error)

        try:
            self._thread = start_thread(read, "staticllm-callback")
        except StaticLLMError:
            self.cancel()
            raise

    def stop(self, is_dropped: bool = False) -> None:
        """The reader has had enough: cancel, and take nothing more. Where the answer has ended by itself, do nothing."""
        if self.is_done or self._output_processor.has_ended:
            return
        self.cancel()
        self._output_processor.answer.is_dropped = is_dropped
        self._close(End(FinishReason.CANCELLED))

    def pieces(self, wants_text: bool = True) -> Iterator[TextDelta]:
        """Tokens together with the text that they add, as they come."""
        self._output_processor.wants_text |= wants_text
        token = object()
        self._enter(token, None)
        try:
            if (first := self._take_first()) is not None:
                yield first
            while not self.is_done:
                self._role.go_on(token)
                piece = self._next(None)
                if piece is not None:
                    yield piece
        finally:
            self._role.leave(token)
        self._raise_error()

    def _take_first(self) -> TextDelta | None:
        """The prompt, where it is part of the answer: once."""
        first, self._first = self._first, None
        return first

    def _raise_error(self) -> None:
        if self._end is not None and self._end.error is not None:
            raise self._end.error

    def _next(self, until: float | None) -> TextDelta | None:
        check_process(self._pid)
        while True:
            rest = POLL_SECONDS if until is None else min(POLL_SECONDS, until - time.monotonic())
            output = self._request.output_queue.get(max(rest, 0))
            if output is not None:
                return self._take(output)
            if until is not None and time.monotonic() >= until:
                raise TimeoutError("the request has not ended yet; it goes on")

    def _take(self, output: Token | End | None) -> TextDelta | None:
        if output is None:
            return None
        if isinstance(output, End):
            return self._close(output)
        piece = self._output_processor.push(output)
        if self._output_processor.is_stopped:
            self.cancel()
            rest = self._close(End(FinishReason.STOP))
            if piece and rest:
                return TextDelta([*piece.tokens, *rest.tokens], piece.text + rest.text)
            return piece or rest
        return piece

    def _close(self, end: End) -> TextDelta | None:
        piece = self._output_processor.finish(end.reason)
        self._end = end
        return piece

    def __del__(self) -> None:
        if getattr(self, "_end", None) is None and hasattr(self, "_request"):
            self._request.is_cancelled = True
