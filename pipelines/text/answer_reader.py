"""The one reader of a request: takes its outputs in their order, decodes them, and knows how it ended."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace

from staticllm.core import FinishReason
from staticllm.errors import GenerationConfigError, StaticLLMError
from staticllm.system.threads import POLL_SECONDS, check_may_wait, check_process

from ..engine.client import EngineClient
from ..engine.request import Finished, Output, OutputQueue
from .call import PreparedRequest
from .output_processor import OutputProcessor, RequestOutput, TextDelta
from .readers import OutputSignal, running_waker

MAX_BATCH = 64
"""Outputs that an asynchronous reader takes before other tasks of its event loop run."""


class ReaderRole:
    """The right to read, held by one thread or task at a time. Any thread may return it on the reader's behalf.

    It is no lock: an iterator may be dropped in another thread than it began in, and a thread that ends releases it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._readers: dict[object, tuple[int, object]] = {}  # token → thread and task

    def enter(self, token: object, timeout: float | None = None) -> bool:
        """Wait for the role; return False if another reader holds it after ``timeout`` seconds. ``token`` identifies this one."""
        with self._lock:
            if not self._changed.wait_for(self._is_free, timeout):
                return False
            self._readers[token] = _here()
            return True

    def move_here(self, token: object) -> None:
        """Move the role of ``token`` to this thread, as an iterator may continue in another thread than it began in."""
        self._readers[token] = _here()

    def leave(self, token: object) -> None:
        """Release the role of ``token``; without it, do nothing."""
        with self._lock:
            self._readers.pop(token, None)
            self._changed.notify_all()

    def _is_free(self) -> bool:
        me = _here()
        alive = {thread.ident for thread in threading.enumerate()}
        return all(reader == me or reader[0] not in alive for reader in self._readers.values())


def _here() -> tuple[int, object]:
    """Return the current thread's id, and its asyncio task if it runs an event loop."""
    asyncio = sys.modules.get("asyncio")  # without it, no event loop runs
    try:
        return threading.get_ident(), asyncio.current_task() if asyncio is not None else None
    except RuntimeError:
        return threading.get_ident(), None


class AnswerReader:
    """Reads the answers of one request, on one thread or task at a time. One that is dropped before the end cancels the request.

    Attributes:
        processors: What makes text of the tokens, for each answer.
        outputs: The answers that have ended, by index.
        error: Why reading failed, or what a callback raised.
    """

    def __init__(
        self, client: EngineClient, prepared: PreparedRequest, queue: OutputQueue, load_ms: float, owner: object
    ) -> None:
        self._owner = owner  # keeps the pipeline alive as long as somebody reads
        self._client = client
        self._prepared = prepared
        self._request = prepared.request
        self.queue = queue
        self.processors = [OutputProcessor(prepared, load_ms, index) for index in range(self._request.num_sequences)]
        self._ends: list[Finished | None] = [None] * len(self.processors)
        self.outputs: dict[int, RequestOutput] = {}
        self.error: BaseException | None = None
        self.role = ReaderRole()
        self.pid = os.getpid()
        self.first: TextDelta | None = self.processors[0].echo
        if self._request.max_new_tokens == 0:  # nothing to generate: the request never reaches the engine
            for index in range(len(self.processors)):
                self._close(Finished(FinishReason.LENGTH, index=index))

    @property
    def is_done(self) -> bool:
        """Whether the reader has read the end of every answer."""
        return self.error is not None or all(self._ends)

    @property
    def finish_reason(self) -> FinishReason | None:
        """The reason why the first answer ended; None while it runs."""
        if self.error is not None:
            return FinishReason.ERROR
        return self._ends[0].reason if self._ends[0] else None

    @property
    def num_cached(self) -> int | None:
        """As ``GenerationHandle.num_cached``."""
        return self.processors[0].num_cached

    def want_text(self) -> None:
        """Have the first answer decoded as it comes, not at its end."""
        self.processors[0].want_text()

    def fail(self, error: BaseException) -> None:
        """Cancel the request; every later reader gets ``error``."""
        self.cancel()
        self.error = error

    def found(self) -> list[RequestOutput]:
        """Return the answers: the first, and those others that a beam search has found."""
        ends = enumerate(self._ends)
        return [self.outputs[index] for index, end in ends if not index or (end is not None and end.is_found)]

    def check_single(self) -> None:
        """Check that there is one answer.

        Raises:
            GenerationConfigError: there are several, which cannot be read as one text.
        """
        if (num_answers := len(self.processors)) > 1:
            raise GenerationConfigError(
                f"num_return_sequences={num_answers}: several answers cannot be read as one text; call result()"
            )

    def check_parsed(self) -> None:
        """Check that the answer is parsed.

        Raises:
            GenerationConfigError: it is not, so it has no events.
        """
        if self._prepared.new_parser is None:
            raise GenerationConfigError("events of an answer that is not parsed: pass tools, or parse_tools=True")

    def cancel(self) -> None:
        """End the request before the next device call. After its end this does nothing."""
        self._client.cancel(self._request.id)

    def stop(self, reason: FinishReason, is_dropped: bool) -> None:
        """As ``GenerationHandle.stop``."""
        if not (self.is_done or self.processors[0].has_ended):
            self.cancel()
            self._close(Finished(reason), is_dropped)

    def read(self, until: float | None, has_echo: bool = False) -> Iterator[TextDelta]:
        """Yield the increments of all answers as this thread's reader; raise TimeoutError after the moment ``until``.

        Args:
            has_echo: Whether the prompt comes first if it is part of the answer and was not read yet.
        """
        token = object()
        try:
            if not self._enter(token, until):
                raise TimeoutError(
                    "another thread is reading this handle, and the request has not ended yet; it goes on"
                )
            if has_echo:
                if not self.is_done:
                    check_process(self.pid)
                yield from self._take_first()
            while not self.is_done:
                self.role.move_here(token)
                check_process(self.pid)
                if self.queue.wait(_poll_seconds(until)):
                    if (delta := self._take_next()) is not None:
                        yield delta
                elif until is not None and time.monotonic() >= until:
                    raise TimeoutError("the request has not ended yet; it goes on")
        finally:
            self.role.leave(token)
        self._raise_error()

    async def read_async(self, least_gap: float = 0.0) -> AsyncGenerator[list[TextDelta], None]:
        """Yield the increments as ``GenerationHandle.batches_async`` says, as this task's reader.

        Raises:
            ClosedError: this is a forked child.
            StaticLLMError: another thread or task reads, or the request failed.
        """
        check_process(self.pid)
        waker = running_waker()
        token = object()
        signal = OutputSignal(waker, least_gap)
        if self.is_done:  # nothing was to be generated, or another reader has read it
            if first := self._take_first():
                yield first
            self._raise_error()
            return
        if not self.role.enter(token, 0):
            raise StaticLLMError("another thread or task reads this handle: a handle has one reader at a time")

        def wake(output: Output) -> None:
            signal.set(is_end=isinstance(output, Finished))

        self.queue.add_listener(wake)
        try:
            if first := self._take_first():
                yield first
            while not self.is_done:
                signal.clear()
                batch: list[TextDelta] = []
                try:
                    num_taken = self._take_ready(batch)
                finally:
                    if batch:
                        yield batch
                if num_taken == MAX_BATCH:
                    await waker.yield_to_loop()  # a long backlog must not hold up the loop
                elif num_taken:
                    await signal.pause()
                elif not self.is_done:  # ``stop`` takes no output: the signal of the last one may have been cleared
                    await signal.wait()
        finally:
            self.queue.remove_listener(wake)
            self.role.leave(token)
            if not self.is_done:
                self.cancel()
        self._raise_error()

    def _take_ready(self, batch: list[TextDelta]) -> int:
        """Take the outputs that have come, at most ``MAX_BATCH``, and add their increments to ``batch``. Return their number."""
        for number in range(MAX_BATCH):
            if self.is_done or not self.queue.wait(0):
                return number
            if (delta := self._take_next()) is not None:
                batch.append(delta)
        return MAX_BATCH

    def _take_first(self) -> list[TextDelta]:
        """Return the prompt as the first delta, once, if it is part of the answer (``echo``)."""
        first = self.first
        self.first = None
        return [] if first is None else [first]

    def _raise_error(self) -> None:
        error = self.error or next((end.error for end in self._ends if end and end.error), None)
        if error is not None:
            raise error

    def _enter(self, token: object, until: float | None) -> bool:
        """Wait until this is the reader or the end has been read; False after ``until``. Not on the engine's thread."""
        if not self.is_done:
            check_may_wait()
        while not self.is_done:
            if self.role.enter(token, _poll_seconds(until)):
                return True
            if until is not None and time.monotonic() >= until:
                return self.is_done
        return True

    def _take_next(self) -> TextDelta | None:
        """Take and decode the next output. If that fails, or Ctrl-C comes meanwhile, every later reader gets an error too."""
        try:
            return self._take(self.queue.take())
        except BaseException as error:
            self.error = error if isinstance(error, StaticLLMError) else _torn(error)
            self.cancel()
            raise

    def discard(self, seconds: float) -> None:
        """Take what is left without decoding it, until every answer has ended, for at most ``seconds``."""
        ended = {index for index, end in enumerate(self._ends) if end is not None}
        until = time.monotonic() + seconds
        while len(ended) < len(self._ends) and self.queue.wait(max(0.0, until - time.monotonic())):
            output = self.queue.take()
            if isinstance(output, Finished):
                ended.add(output.index)

    def _take(self, output: Output) -> TextDelta | None:
        if self._ends[output.index] is not None:  # computed before the engine saw that the reader had stopped
            return None
        if isinstance(output, Finished):
            return self._close(output)
        processor = self.processors[output.index]
        delta = processor.push(output)
        if not processor.is_stopped:
            return delta
        self._client.cancel(self._request.id, output.index, FinishReason.STOP)
        rest = self._close(Finished(FinishReason.STOP, index=output.index))
        return delta + rest if delta and rest else delta or rest

    def _close(self, end: Finished, is_dropped: bool = False) -> TextDelta | None:
        """Record the end of one answer, and return its last increment."""
        ending = self.processors[end.index].finish(end.reason, is_dropped, self.queue.compile_times)
        self.outputs[end.index] = ending.output
        self._ends[end.index] = replace(end, reason=ending.output.finish_reason)
        return ending.delta

    def __del__(self) -> None:
        if hasattr(self, "pid") and not all(self._ends):
            self.cancel()


def _torn(error: BaseException) -> StaticLLMError:
    what = type(error).__name__
    return StaticLLMError(
        f"the reader was interrupted by {what} while it took a token, which may be lost: submit the request again"
    )


def _poll_seconds(until: float | None) -> float:
    """Return how long a reader waits at a time."""
    return POLL_SECONDS if until is None else max(min(POLL_SECONDS, until - time.monotonic()), 0)
