"""The handle that ``submit`` returns reads, awaits or cancels a request."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterable, Iterator, Sequence
from typing import TypeVar

from staticllm.core import FinishReason
from staticllm.errors import BusyError, StaticLLMError
from staticllm.events import Event
from staticllm.system.threads import start_thread

from ..engine.client import EngineClient
from ..engine.request import OutputQueue
from .answer_reader import AnswerReader
from .call import PreparedRequest
from .chat_prompt import Prompt
from .output_processor import (
    RequestOutput,
    Results,
    TextDelta,
    kept_outputs,
    results_of,
)
from .readers import in_thread

END_SECONDS = 2.0
"""How long an error of one prompt waits for the ends of the others of its call."""
Part = TypeVar("Part")


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
        self._client = client
        self._prepared = prepared
        self._reader = AnswerReader(client, prepared, queue, load_ms, owner)
        self._thread: threading.Thread | None = None

    def deltas(self, wants_text: bool = True) -> Iterator[TextDelta]:
        """Yield tokens together with the text that they add, as they are generated.

        Raises:
            GenerationConfigError: several answers were requested.
            StaticLLMError: the request failed.
        """
        self._reader.check_single()
        if wants_text:
            self._reader.want_text()
        yield from self._reader.read(None, has_echo=True)

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
        self._reader.check_parsed()
        for delta in self.deltas():
            yield from delta.events

    def batches_async(self, least_gap: float = 0.0) -> AsyncGenerator[list[TextDelta], None]:
        """Yield the increments like ``deltas_async``, in lists of those that are ready at once.

        From the third list on there are ``least_gap`` seconds between two lists, except before the end, which comes at once.

        Raises:
            GenerationConfigError, StaticLLMError: as for ``deltas``.
        """
        self._reader.check_single()
        self._reader.want_text()
        return self._reader.read_async(least_gap)

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
        self._reader.check_parsed()
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
            async for _ in self._reader.read_async():
                pass
            return self.result()

        return read().__await__()

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
        return self._reader.num_cached

    def keep(self, session: str) -> None:
        """Keep the keys and values of this conversation longer than others, until ``session`` keeps another one.

        The first answer must have ended.

        Raises:
            ClosedError: the engine was closed.
        """
        tokens = [*self.prompt_tokens, *self._reader.outputs[0].tokens]
        self._client.claim(session, tokens, self._prepared.request.adapters)

    @property
    def adapter_scales(self) -> tuple[float, ...]:
        """The factor of each adapter that the model was loaded with; empty if the request uses none."""
        return self._prepared.request.adapters

    @property
    def is_done(self) -> bool:
        """Whether the reader has read the end of every answer."""
        return self._reader.is_done

    @property
    def finish_reason(self) -> FinishReason | None:
        """The reason why the request ended, for several answers that of the first; None while it runs."""
        return self._reader.finish_reason

    def cancel(self) -> None:
        """End the request before the next device call; the tokens so far are the result. After the end this does nothing."""
        self._reader.cancel()

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
        for _ in self._reader.read(until):
            pass
        return kept_outputs(self._reader.found(), self._prepared.options)

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

        self._reader.check_single()

        def read() -> None:
            try:
                for text in self:
                    callback(text)
            except BaseException as error:  # SystemExit and CancelledError too: no other code would see them
                self._reader.fail(error)

        try:
            self._thread = start_thread(read, "staticllm-callback")
        except BaseException:  # Ctrl-C while the thread begins: nobody gets the handle
            self.cancel()
            raise

    def stop(self, reason: FinishReason = FinishReason.CANCELLED, is_dropped: bool = False) -> None:
        """Cancel the request and take no more tokens; ``reason`` is that of the answer. If it has ended by itself, do nothing.

        Args:
            is_dropped: Whether a chat must forget the turn.
        """
        self._reader.stop(reason, is_dropped)


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
                handle._reader.discard(max(0.0, until - time.monotonic()))
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
