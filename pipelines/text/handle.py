"""The handle that ``submit`` returns reads, awaits or cancels a request."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from staticllm.core import FinishReason
from staticllm.errors import BusyError, GenerationConfigError, StaticLLMError
from staticllm.events import Event
from staticllm.system.threads import POLL_SECONDS, check_may_wait, check_process, start_thread

from ..engine.client import EngineClient
from ..engine.request import Finished, Output, OutputQueue
from .call import PreparedRequest
from .chat_prompt import Prompt
from .output_processor import (
    OutputProcessor,
    RequestOutput,
    Results,
    TextDelta,
    kept_outputs,
    results_of,
)
from .readers import OutputSignal, in_thread, running_waker

MAX_BATCH = 64
"""Outputs that an asynchronous reader takes before other tasks of its event loop run."""
END_SECONDS = 2.0
"""How long an error of one prompt waits for the ends of the others of its call."""
Part = TypeVar("Part")


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


class GenerationHandle:
    """One submitted request. It has one reader at a time: ``for``, ``tokens()``, ``async for``, ``await`` or ``result()``.

    A request for several answers cannot be iterated: wait for its ``result()``. A handle that is garbage-collected before the
    end cancels its request. Its methods run on the reader's thread; ``cancel`` may be called on any thread.
    """

    def __init__(
        self,
        client: EngineClient,
        prepared: PreparedRequest,
        queue: OutputQueue,
        load_ms: float = 0.0,
        owner: object = None,
    ) -> None:
        self._owner = owner  # keeps the pipeline alive as long as the handle
        self._client = client
        self._prepared = prepared
        self._queue = queue
        self._processors = [
            OutputProcessor(prepared, load_ms, index) for index in range(prepared.request.num_sequences)
        ]
        self._ends: list[Finished | None] = [None] * len(self._processors)
        self._outputs: dict[int, RequestOutput] = {}  # of the answers that have ended
        self._error: BaseException | None = None
        self._role = ReaderRole()
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None
        self._first: TextDelta | None = self._processors[0].echo
        if prepared.request.max_new_tokens == 0:  # nothing to generate: the request never reaches the engine
            for index in range(len(self._processors)):
                self._close(Finished(FinishReason.LENGTH, index=index))

    def deltas(self, wants_text: bool = True) -> Iterator[TextDelta]:
        """Yield tokens together with the text that they add, as they are generated.

        Raises:
            GenerationConfigError: several answers were requested.
            StaticLLMError: the request failed.
        """
        self._check_single()
        if wants_text:
            self._processors[0].want_text()
        yield from self._read(None, has_echo=True)

    def __iter__(self) -> Iterator[str]:
        """Yield text as it is generated."""
        return (delta.text for delta in self.deltas() if delta.text)

    def tokens(self) -> Iterator[int]:
        """Yield token ids as they are generated.

        Raises:
            GenerationConfigError, StaticLLMError: as for ``deltas``.
        """
        return (token for delta in self.deltas(wants_text=False) for token in delta.tokens)

    def events(self) -> Iterator[Event]:
        """Yield the parts of the answer as they are generated: content, reasoning, calls and their arguments.

        The request must be parsed: it has ``tools`` or ``parse_tools=True``.

        Raises:
            GenerationConfigError: it is not parsed, or several answers were requested.
            StaticLLMError: the request failed.
        """
        self._check_parsed()
        for delta in self.deltas():
            yield from delta.events

    def batches_async(self, least_gap: float = 0.0) -> AsyncGenerator[list[TextDelta], None]:
        """Yield the increments like ``deltas_async``, in lists of those that are ready at once.

        From the third list on there are ``least_gap`` seconds between two lists, except before the end, which comes at once.

        Raises:
            GenerationConfigError, StaticLLMError: as for ``deltas``.
        """
        self._check_single()
        self._processors[0].want_text()
        return self._read_async(least_gap)

    def deltas_async(self) -> AsyncGenerator[TextDelta, None]:
        """Yield increments like ``deltas``, without blocking the event loop. Leaving early cancels the request.

        Raises:
            GenerationConfigError, StaticLLMError: as for ``deltas``.
        """
        return self._parts_async(lambda delta: [delta])

    def __aiter__(self) -> AsyncIterator[str]:
        """Yield text as it is generated, without blocking the event loop. Leaving the loop early cancels the request."""
        return self._parts_async(lambda delta: [delta.text] if delta.text else [])

    def events_async(self) -> AsyncGenerator[Event, None]:
        """Yield the parts of the answer like ``events``, without blocking the event loop. Leaving early cancels the request.

        Raises:
            GenerationConfigError, StaticLLMError: as for ``events``.
        """
        self._check_parsed()
        return self._parts_async(lambda delta: delta.events)

    async def _parts_async(self, parts_of: Callable[[TextDelta], Iterable[Part]]) -> AsyncGenerator[Part, None]:
        async with contextlib.aclosing(self.batches_async()) as batches:
            async for batch in batches:
                for delta in batch:
                    for part in parts_of(delta):
                        yield part

    def __await__(self) -> Generator[object, None, Results]:
        """Wait for the end without blocking the event loop, and return the value that ``generate`` returns."""

        async def read() -> Results:
            if self._thread is not None:  # the callback's thread reads; waiting for it would block the loop
                return await in_thread(self.result)
            async for _ in self._read_async():
                pass
            return self.result()

        return read().__await__()

    async def _read_async(self, least_gap: float = 0.0) -> AsyncGenerator[list[TextDelta], None]:
        check_process(self._pid)
        waker = running_waker()
        token = object()
        signal = OutputSignal(waker, least_gap)
        if self.is_done:  # nothing was to be generated, or another reader has read it
            if first := self._take_first():
                yield first
            self._raise_error()
            return
        if not self._role.enter(token, 0):
            raise StaticLLMError("another thread or task reads this handle: a handle has one reader at a time")

        def wake(output: Output) -> None:
            signal.set(is_end=isinstance(output, Finished))

        self._queue.add_listener(wake)
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
            self._queue.remove_listener(wake)
            self._role.leave(token)
            if not self.is_done:
                self.cancel()
        self._raise_error()

    def _take_ready(self, batch: list[TextDelta]) -> int:
        """Take the outputs that have come, at most ``MAX_BATCH``, and add their increments to ``batch``. Return their number."""
        for number in range(MAX_BATCH):
            if self.is_done or not self._queue.wait(0):
                return number
            if (delta := self._take_next()) is not None:
                batch.append(delta)
        return MAX_BATCH

    @property
    def request_id(self) -> int:
        """The number of the request in its engine, as in ``Engine.progress``."""
        return self._prepared.request.id

    @property
    def prompt_tokens(self) -> tuple[int, ...]:
        """The tokens of the prompt."""
        return self._prepared.request.prompt

    @property
    def num_dropped(self) -> int:
        """The number of tokens of the prompt that were left out, because it was too long (``overflow``)."""
        return self._prepared.num_dropped

    @property
    def num_cached(self) -> int | None:
        """The number of prompt tokens that the prefix cache had; None before the first token of the first answer."""
        return self._processors[0].num_cached

    def keep(self, session: str) -> None:
        """Keep the keys and values of this conversation longer than others, until ``session`` keeps another one.

        The first answer must have ended.

        Raises:
            ClosedError: the engine was closed.
        """
        tokens = [*self.prompt_tokens, *self._outputs[0].tokens]
        self._client.claim(session, tokens, self._prepared.request.adapters)

    @property
    def adapter_scales(self) -> tuple[float, ...]:
        """The factor of each adapter that the model was loaded with; empty if the request uses none."""
        return self._prepared.request.adapters

    @property
    def is_done(self) -> bool:
        """Whether the reader has read the end of every answer."""
        return self._error is not None or all(self._ends)

    @property
    def finish_reason(self) -> FinishReason | None:
        """The reason why the request ended, for several answers that of the first; None while it runs."""
        if self._error is not None:
            return FinishReason.ERROR
        return self._ends[0].reason if self._ends[0] else None

    def cancel(self) -> None:
        """End the request before the next device call; the tokens so far are the result. After the end this does nothing."""
        self._client.cancel(self._prepared.request.id)

    def result(self, timeout: float | None = None) -> Results:
        """Wait for the end and return the value that ``generate`` returns.

        Raises:
            TimeoutError: the request has not ended after ``timeout`` seconds, or another thread reads it; it continues.
            StaticLLMError: the request failed.
            Exception: the callback raised it.
        """
        parsers = self._prepared.options.parsers
        return results_of(self._prepared.call.form, self.outputs(timeout), self._prepared.decode, parsers)

    def outputs(self, timeout: float | None = None) -> list[RequestOutput]:
        """Wait for the end and return each answer with its timings: with ``best_of`` the most likely, best first.

        A beam search may find fewer than were requested.

        Raises:
            TimeoutError, StaticLLMError: as for ``result``.
        """
        until = None if timeout is None else time.monotonic() + timeout
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)
        for _ in self._read(until):
            pass
        found = [index for index, end in enumerate(self._ends) if not index or (end is not None and end.is_found)]
        return kept_outputs([self._outputs[index] for index in found], self._prepared.options)

    def output(self, timeout: float | None = None) -> RequestOutput:
        """Wait for the end and return the first answer with its timings.

        Raises:
            TimeoutError, StaticLLMError: as for ``result``.
        """
        return self.outputs(timeout)[0]

    def call_back(self, callback: Callable[[str], object]) -> None:
        """Read on a new thread that calls ``callback`` with each text.

        An exception in the callback cancels the request; ``result`` raises it.

        Raises:
            StaticLLMError: the thread cannot be started; the request was cancelled.
        """

        self._check_single()

        def read() -> None:
            try:
                for text in self:
                    callback(text)
            except BaseException as error:  # SystemExit and CancelledError too: no other code would see them
                self.cancel()
                self._error = error

        try:
            self._thread = start_thread(read, "staticllm-callback")
        except BaseException:  # Ctrl-C while the thread begins: nobody gets the handle
            self.cancel()
            raise

    def stop(self, reason: FinishReason = FinishReason.CANCELLED, is_dropped: bool = False) -> None:
        """Cancel the request and take no more tokens; ``reason`` is that of the answer. If it has ended by itself, do nothing.

        ``is_dropped``: a chat must forget the turn.
        """
        if not (self.is_done or self._processors[0].has_ended):
            self.cancel()
            self._close(Finished(reason), is_dropped)

    def _check_single(self) -> None:
        if len(self._processors) > 1:
            raise GenerationConfigError(
                f"num_return_sequences={len(self._processors)}: several answers cannot be read as one text; call result()"
            )

    def _check_parsed(self) -> None:
        if self._prepared.new_parser is None:
            raise GenerationConfigError("events of an answer that is not parsed: pass tools, or parse_tools=True")

    def _take_first(self) -> list[TextDelta]:
        """Return the prompt as the first delta, once, if it is part of the answer (``echo``)."""
        first = self._first
        self._first = None
        return [] if first is None else [first]

    def _raise_error(self) -> None:
        error = self._error or next((end.error for end in self._ends if end and end.error), None)
        if error is not None:
            raise error

    def _read(self, until: float | None, has_echo: bool = False) -> Iterator[TextDelta]:
        """Yield the increments of all answers as this thread's reader; raise TimeoutError after the moment ``until``.

        ``has_echo``: the prompt comes first if it is part of the answer and was not read yet.
        """
        token = object()
        try:
            if not self._enter(token, until):
                raise TimeoutError(
                    "another thread is reading this handle, and the request has not ended yet; it goes on"
                )
            if has_echo:
                if not self.is_done:
                    check_process(self._pid)
                yield from self._take_first()
            while not self.is_done:
                self._role.move_here(token)
                check_process(self._pid)
                if self._queue.wait(_poll_seconds(until)):
                    if (delta := self._take_next()) is not None:
                        yield delta
                elif until is not None and time.monotonic() >= until:
                    raise TimeoutError("the request has not ended yet; it goes on")
        finally:
            self._role.leave(token)
        self._raise_error()

    def _enter(self, token: object, until: float | None) -> bool:
        """Wait until this is the reader or the end has been read; False after ``until``. Not on the engine's thread."""
        if not self.is_done:
            check_may_wait()
        while not self.is_done:
            if self._role.enter(token, _poll_seconds(until)):
                return True
            if until is not None and time.monotonic() >= until:
                return self.is_done
        return True

    def _take_next(self) -> TextDelta | None:
        """Take and decode the next output. If that fails, or Ctrl-C comes meanwhile, every later reader gets an error too."""
        try:
            return self._take(self._queue.take())
        except BaseException as error:
            self._error = error if isinstance(error, StaticLLMError) else _torn(error)
            self.cancel()
            raise

    def _discard(self, seconds: float) -> None:
        """Take what is left without decoding it, until every answer has ended, for at most ``seconds``."""
        ended = {index for index, end in enumerate(self._ends) if end is not None}
        until = time.monotonic() + seconds
        while len(ended) < len(self._ends) and self._queue.wait(max(0.0, until - time.monotonic())):
            output = self._queue.take()
            if isinstance(output, Finished):
                ended.add(output.index)

    def _take(self, output: Output) -> TextDelta | None:
        if self._ends[output.index] is not None:  # computed before the engine saw that the reader had stopped
            return None
        if isinstance(output, Finished):
            return self._close(output)
        processor = self._processors[output.index]
        delta = processor.push(output)
        if not processor.is_stopped:
            return delta
        self._client.cancel(self._prepared.request.id, output.index, FinishReason.STOP)
        rest = self._close(Finished(FinishReason.STOP, index=output.index))
        return delta + rest if delta and rest else delta or rest

    def _close(self, end: Finished, is_dropped: bool = False) -> TextDelta | None:
        """Record the end of one answer, and return its last increment."""
        ending = self._processors[end.index].finish(end.reason, is_dropped, self._queue.compile_times)
        self._outputs[end.index] = ending.output
        self._ends[end.index] = replace(end, reason=ending.output.finish_reason)
        return ending.delta

    def __del__(self) -> None:
        if not all(getattr(self, "_ends", [True])) and hasattr(self, "_client"):
            self._client.cancel(self._prepared.request.id)


def _torn(error: BaseException) -> StaticLLMError:
    what = type(error).__name__
    return StaticLLMError(
        f"the reader was interrupted by {what} while it took a token, which may be lost: submit the request again"
    )


def _poll_seconds(until: float | None) -> float:
    """Return how long a reader waits at a time."""
    return POLL_SECONDS if until is None else max(min(POLL_SECONDS, until - time.monotonic()), 0)


Begin = Callable[[Prompt], GenerationHandle]
"""Submits one prompt."""


def answers_of(begin: Begin, prompts: Sequence[Prompt]) -> list[RequestOutput]:
    """Submit prompts, at most ``MAX_WAITING`` at a time, and wait for their answers, in the order of the prompts.

    Raises:
        BusyError: the queue is full of other requests.
        StaticLLMError: a request failed; all are cancelled then, and have ended, if the device does not take longer.
    """
    handles: list[GenerationHandle] = []
    try:
        for prompt in prompts:
            handles.append(_begin_when_possible(begin, prompt, handles))
        return [output for handle in handles for output in handle.outputs()]
    except BaseException as error:
        for handle in handles:
            handle.cancel()
        if isinstance(error, StaticLLMError):
            until = time.monotonic() + END_SECONDS
            for handle in handles:
                handle._discard(max(0.0, until - time.monotonic()))
        raise


def _begin_when_possible(begin: Begin, prompt: Prompt, before: Sequence[GenerationHandle]) -> GenerationHandle:
    """Submit a prompt. If the queue is full and holds prompts of this call, wait for the first of them."""
    while True:
        try:
            return begin(prompt)
        except BusyError:
            unfinished = [handle for handle in before if not handle.is_done]
            if not unfinished:
                raise
            unfinished[0].outputs()
