"""The answers of one HTTP request: each waits for its turn, enters the engine, and is read to its end or given up."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.responses import Response

from staticllm.core import FinishReason
from staticllm.errors import ClosedError, PromptTooLongError
from staticllm.events import events_of
from staticllm.pipelines.conversation.sandbox import MAX_CHARS
from staticllm.pipelines.text.handle import GenerationHandle
from staticllm.pipelines.text.output_processor import RequestOutput, TextDelta, joined
from staticllm.results import AssistantMessage
from staticllm.server.answers.asks import Ask, with_defaults
from staticllm.server.endpoint import ApiCall
from staticllm.server.http.errors import json_response, prompt_too_long, too_long
from staticllm.server.metrics import AnswerTimer
from staticllm.server.models.served import ServedModel
from staticllm.server.state import ServerState
from staticllm.server.telemetry import current_record

STREAM_GAP = 0.005
"""Shortest time between two messages of a stream, in seconds; tokens that come faster are sent together.

Each wake-up of the event loop slows the engine: with one per token, the embedded model has 0.74 of its speed, with one per 5 ms
0.98 (``scripts/bench_server.py``).
"""
_log = logging.getLogger("staticllm.server")
Close = Callable[[], Awaitable[None]]


@dataclass(frozen=True)
class AnswerDelta:
    """An increment of answer ``index``."""

    index: int
    delta: TextDelta


@dataclass(frozen=True)
class AnswerEnd:
    """The end of answer ``index``; of a beam search that of all its answers, of which this is the first."""

    index: int
    outputs: list[RequestOutput]


Part = AnswerDelta | AnswerEnd
Whole = Callable[[Sequence[Part]], dict[str, Any]]
"""Makes the body of all answers of their parts, as a stream makes its chunks; runs in a thread."""


class Answers:
    """Runs the asks of one request on an acquired model. ``begin``, then ``batches``; ``close`` in any case."""

    def __init__(self, state: ServerState, model: ServedModel, client: str, asks: Sequence[Ask]) -> None:
        assert model.admission is not None, "the model is not loaded"
        self._state = state
        self._model = model
        self._client = client
        self._asks = with_defaults(asks, model.spec)
        self._admission = model.admission_of(asks[0].is_proactive)
        self._first: _Answer | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._running: set[_Answer] = set()
        self._arrival = time.perf_counter()

    async def begin(self) -> None:
        """Wait until the first answer is in the engine and all prompts are checked, so that errors of the request can still be
        its status.

        Raises:
            ApiError: too many requests wait.
            StaticLLMError: the request is refused.
        """
        self._first = await self._enter(0)
        others = {id(ask.prompt): ask for ask in self._asks if ask.prompt is not self._asks[0].prompt}
        for ask in others.values():
            await self._state.workers.run(partial(self._check, ask))

    def _check(self, ask: Ask) -> None:
        self._model.chat.check(ask.prompt, **ask.options)

    async def _enter(self, index: int) -> _Answer:
        name = self._model.spec.name
        metrics = self._state.metrics
        start = time.perf_counter()
        timer = metrics.timer(name)
        ask = self._asks[index]
        num_places = await self._admission.enter(self._client, index == 0, ask.priority, ask.num_beams)
        metrics.queue_time.labels(name).observe(time.perf_counter() - start)
        try:
            handle = await self._state.workers.run(lambda: self._submit(ask), GenerationHandle.cancel, owner=name)
        except BaseException:
            self._admission.leave(self._client, num_places)
            raise
        if handle.num_dropped:
            _say_shortened(name, len(handle.prompt_tokens), handle.num_dropped)
        answer = _Answer(index * ask.num_outputs, ask, handle, timer, num_places)
        self._running.add(answer)
        self._state.lifecycle.add(handle)
        metrics.running.labels(name).inc()
        return answer

    def _submit(self, ask: Ask) -> GenerationHandle:
        return self._model.chat.submit(ask.prompt, **{**ask.options, "priority": ask.engine_priority})

    def _leave(self, answer: _Answer) -> None:
        if answer not in self._running:
            return
        self._running.discard(answer)
        answer.handle.cancel()  # does nothing after the end
        if not answer.is_charged:  # its time is not told: as if all that ran had had the same
            seconds = time.perf_counter() - answer.begin
            self._charge(answer, seconds * answer.num_places / max(1, self._admission.num_running))
        self._state.lifecycle.remove(answer.handle)
        self._state.metrics.running.labels(self._model.spec.name).dec()
        self._admission.leave(self._client, answer.num_places)

    def batches(self) -> AsyncGenerator[list[Part], None]:
        """Yield the increments and ends of all answers as they come, in lists of those that are ready at once.

        Raises:
            StaticLLMError: an answer failed.
        """
        assert self._first is not None, "begin was not called"
        return self._read(self._first) if len(self._asks) == 1 else self._read_all()

    async def _read_all(self) -> AsyncGenerator[list[Part], None]:
        queue: asyncio.Queue[Part | BaseException] = asyncio.Queue()
        self._tasks = [asyncio.create_task(self._run(index, queue)) for index in range(len(self._asks))]
        num_left = len(self._tasks)
        while num_left:
            found = [await queue.get()]
            while not queue.empty():
                found.append(queue.get_nowait())
            parts = [part for part in found if not isinstance(part, BaseException)]
            if parts:
                yield parts
            for error in found:
                if isinstance(error, BaseException):
                    raise error
            num_left -= sum(isinstance(part, AnswerEnd) for part in parts)

    @property
    def num_answers(self) -> int:
        """How many answers there are, if they are not those of beam searches."""
        return len(self._asks)

    @property
    def first_handle(self) -> GenerationHandle:
        """The handle of the first answer, after ``begin``."""
        assert self._first is not None, "begin was not called"
        return self._first.handle

    async def parts(self) -> list[Part]:
        """Return all that ``batches`` yields, answer by answer, each with its increments as one unless they are tokens.

        Raises:
            StaticLLMError: an answer failed.
        """
        deltas: dict[int, list[TextDelta]] = {}
        is_by_token = self._asks[0].is_by_token
        ends: list[AnswerEnd] = []
        async with contextlib.aclosing(self.batches()) as batches:
            async for parts in batches:
                for part in parts:
                    if isinstance(part, AnswerEnd):
                        ends.append(part)
                    else:
                        deltas.setdefault(part.index, []).append(part.delta)
        sections = [
            AnswerDelta(index, section)
            for index, found in sorted(deltas.items())
            for section in (found if is_by_token else [joined(found)])
        ]
        return [*sections, *sorted(ends, key=lambda part: part.index)]

    async def _run(self, index: int, queue: asyncio.Queue[Part | BaseException]) -> None:
        try:
            answer = self._first if index == 0 and self._first is not None else await self._enter(index)
            async with contextlib.aclosing(self._read(answer)) as batches:
                async for parts in batches:
                    for part in parts:
                        queue.put_nowait(part)
        except Exception as error:  # the reader raises it
            queue.put_nowait(error)

    async def _read(self, answer: _Answer) -> AsyncGenerator[list[Part], None]:
        handle = answer.handle
        last: list[Part] = []
        try:
            if answer.ask.is_search:
                await handle
                last = [
                    AnswerDelta(answer.index + place, self._whole_delta(output))
                    for place, output in enumerate(handle.outputs(0))
                ]
            else:
                async with contextlib.aclosing(handle.batches_async(STREAM_GAP)) as batches:
                    async for batch in batches:
                        answer.timer.begin()
                        current_record().note_token()
                        deltas = batch if answer.ask.is_by_token else [joined(batch)]
                        last = [AnswerDelta(answer.index, delta) for delta in deltas]
                        if not handle.is_done or handle.finish_reason is FinishReason.ERROR:
                            yield last
                            last = []
            outputs = handle.outputs(0)
            for output in [] if answer.ask.is_search else outputs:
                answer.timer.end(output.token_times)
            self._count(outputs)
            self._charge(answer, sum(output.own_seconds for output in outputs))
            self._keep(handle)
            yield [*last, AnswerEnd(answer.index, outputs)]
        finally:
            self._leave(answer)

    def _whole_delta(self, output: RequestOutput) -> TextDelta:
        """Return an answer of a beam search, of which no increments are known, as one."""
        echo = self._model.chat.get_tokenizer().decode(output.echo) if output.echo else ""
        message = output.message or AssistantMessage(output.text)
        return TextDelta(output.tokens, echo + output.text, events_of(message), output.logprobs)

    def _charge(self, answer: _Answer, seconds: float) -> None:
        self._admission.shares.charge(self._client, seconds)
        answer.is_charged = True

    def _count(self, outputs: list[RequestOutput]) -> None:
        name = self._model.spec.name
        metrics = self._state.metrics
        usage = Usage.of([outputs], 1)
        metrics.prompt_tokens.labels(name).inc(usage.prompt_tokens)
        metrics.output_tokens.labels(name).inc(usage.completion_tokens)
        metrics.cached_tokens.labels(name).inc(usage.cached_tokens)
        current_record().note_outputs(outputs)

    def _keep(self, handle: GenerationHandle) -> None:
        """Keep the conversation of a session that the client has named (``x-session-affinity``) longer than others."""
        session = current_record().session
        if session is not None:
            with contextlib.suppress(ClosedError):
                handle.keep(f"{self._client}\n{session}")

    async def close(self) -> None:
        """Give up what still runs: each answer is cancelled before the next device call, and its place is free."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        for answer in list(self._running):
            self._leave(answer)


@dataclass(eq=False)
class _Answer:
    index: int
    ask: Ask
    handle: GenerationHandle
    timer: AnswerTimer
    num_places: int
    begin: float = field(default_factory=time.perf_counter)
    is_charged: bool = False


@dataclass(frozen=True)
class Usage:
    """The tokens of answers: of the prompt, how many of them were cached, and those that were generated, also what a stop string
    cut off, as OpenAI counts them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    @classmethod
    def of_ends(cls, ends: Sequence[AnswerEnd], per_prompt: int) -> Usage:
        """Return the tokens of answers that have ended; each prompt has ``per_prompt`` ends and is counted once."""
        return cls.of([end.outputs for end in sorted(ends, key=lambda end: end.index)], per_prompt)

    @classmethod
    def of(cls, handles: Sequence[Sequence[RequestOutput]], per_prompt: int) -> Usage:
        """Return the tokens of the answers of each handle; each prompt has ``per_prompt`` handles and is counted once."""
        firsts = [outputs[0] for outputs in handles[::per_prompt]]
        return cls(
            sum(first.metrics.get_num_input_tokens() for first in firsts),
            sum(len(output.token_times) for outputs in handles for output in outputs),
            sum(first.num_cached for first in firsts),
        )

    def as_dict(self) -> dict[str, object]:
        """Return the usage as OpenAI's API has it."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


def _say_shortened(name: str, num_kept: int, num_dropped: int) -> None:
    num_given = num_kept + num_dropped
    _log.warning(
        "a prompt of %d tokens for %r lost its middle: %d tokens are read; serve with --max-prompt-len %d or more",
        num_given,
        name,
        num_kept,
        num_given,
    )


Stream = Callable[[Answers, Close], Response]
"""Makes a response that must await ``Close``."""


async def respond(
    call: ApiCall, model: ServedModel, asks: Sequence[Ask], field: str, whole: Whole, stream: Stream | None
) -> Response:
    """Run answers on a model that the caller has acquired, and release it at the end, however the request ends.

    Return a stream if ``stream`` is given, else a whole response. ``field`` has the prompt; errors name it.

    Raises:
        ApiError, StaticLLMError: the request is refused, or an answer failed.
        ClientDisconnect: the client has closed the connection.
    """
    answers: Answers | None = None
    is_handed_over = False

    async def close() -> None:
        try:
            if answers is not None:
                await answers.close()
        finally:
            call.state.hub.release(model)

    try:
        _check_chars(asks, model.chat.config.max_prompt_len, field)
        answers = Answers(call.state, model, call.client, asks)
        await call.connected(answers.begin())
        if stream is not None:
            response = stream(answers, close)
            is_handed_over = True
            return response
        parts = await call.connected(answers.parts())
        return await call.state.workers.run(lambda: json_response(whole(parts)))
    except PromptTooLongError as error:
        raise prompt_too_long(error, field) from None
    finally:
        if not is_handed_over:
            await close()


def _check_chars(asks: Sequence[Ask], limit: int, field: str) -> None:
    """Check that no prompt with its tools has more characters than a chat template may make, before it is rendered.

    Raises:
        ApiError: one has.
    """
    for ask in asks:
        num_chars = sum(map(len, _texts_in([ask.prompt, ask.options.get("tools")])))
        if num_chars > MAX_CHARS:
            raise too_long(limit, field, f"{num_chars} characters, of which at most {MAX_CHARS} are read", "send less")


def _texts_in(value: Any) -> Iterator[str]:
    """Yield the texts in a prompt: in messages and their parts, in calls, and in tools."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, Mapping):
            waiting += each.values()
        elif isinstance(each, (list, tuple)):
            waiting += each
