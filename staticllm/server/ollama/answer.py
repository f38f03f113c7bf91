"""Answers in Ollama's form: whole ones, and streams with one object per line."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic_core import from_json

from staticllm.core import FinishReason
from staticllm.events import ArgumentsDelta, CallBegin, CallBroken, CallEnd, ContentDelta, Event, ReasoningDelta, merged
from staticllm.pipelines.text.output_processor import RequestOutput, TextDelta
from staticllm.server.answers.answers import AnswerDelta, Part
from staticllm.server.answers.results import SpelledToken, Speller
from staticllm.server.answers.stream import ChunkStream
from staticllm.server.endpoint import ApiCall
from staticllm.server.http.errors import ApiError, to_json
from staticllm.server.ollama.fields import nanoseconds, timestamp

Form = Literal["chat", "generate"]
Object = dict[str, Any]
MICRO = 1e6


def part_of(form: Form, content: str = "", thinking: str = "", calls: list[Object] | None = None) -> Object:
    """Return the part of an object that holds text: of a chat a message, else the text itself."""
    if form == "generate":
        return {"response": content, **({"thinking": thinking} if thinking else {})}
    message: Object = {"role": "assistant", "content": content}
    if thinking:
        message["thinking"] = thinking
    if calls:
        message["tool_calls"] = calls
    return {"message": message}


@dataclass
class _BegunCall:
    id: str
    name: str
    arguments: list[str] = field(default_factory=list)


class AnswerForm:
    """Makes the objects of one answer. ``model`` is the name that the client sent, ``begin`` and ``loaded`` are moments of
    ``time.perf_counter``; ``speller`` is None without log-probabilities. ``is_parsed``: whether increments have events."""

    def __init__(
        self,
        form: Form,
        model: str,
        begin: float,
        loaded: float,
        speller: Speller | None,
        is_parsed: bool,
    ) -> None:
        self._form: Form = form
        self._model = model
        self._begin = begin
        self._loaded = loaded
        self._speller = speller
        self._is_parsed = is_parsed
        self._begun: dict[int, _BegunCall] = {}
        self._num_calls = 0
        self._logprobs: list[Object] = []  # of tokens that had no text yet

    def of(self, part: Part) -> Iterator[Object]:
        """Yield the objects of a part: of an increment, or of the end of the answer."""
        if isinstance(part, AnswerDelta):
            yield from self._pieces(part.delta)
        else:
            yield self._last(part.outputs[0])

    def _pieces(self, delta: TextDelta) -> Iterator[Object]:
        """Yield the objects of an increment. A call is one object, when its arguments are complete."""
        if self._speller is not None:
            self._logprobs += map(_logprob, self._speller.spell(delta))
        plain = [ContentDelta(delta.text)] if delta.text else []
        for event in merged(delta.events) if self._is_parsed else plain:
            part = self._part(event)
            if part is not None:
                yield {**self._head(), **part, "done": False, **self._taken_logprobs()}

    def _part(self, event: Event) -> Object | None:
        if isinstance(event, ContentDelta):
            return part_of(self._form, event.text)
        if isinstance(event, ReasoningDelta):
            return part_of(self._form, thinking=event.text)
        if isinstance(event, CallBegin):
            self._begun[event.index] = _BegunCall(event.id, event.name)
        elif isinstance(event, ArgumentsDelta):
            self._begun[event.index].arguments.append(event.text)
        elif isinstance(event, CallBroken):
            self._begun.pop(event.index, None)
        elif isinstance(event, CallEnd):
            begun = self._begun.pop(event.index)
            call = _call(self._num_calls, begun.id, begun.name, "".join(begun.arguments))
            self._num_calls += 1
            return part_of(self._form, calls=[call])
        return None

    def _last(self, output: RequestOutput) -> Object:
        """Return the last object of a stream."""
        return {**self._head(), **part_of(self._form), **self._taken_logprobs(), **self._end(output)}

    def whole(self, parts: Sequence[Part]) -> Object:
        """Return the whole of an answer: that of the objects that a stream would have."""
        *pieces, last = [piece for part in parts for piece in self.of(part)]
        texts = [piece if self._form == "generate" else piece["message"] for piece in pieces]
        content = "".join(text["response" if self._form == "generate" else "content"] for text in texts)
        thinking = "".join(text.get("thinking", "") for text in texts)
        calls = [call for text in texts for call in text.get("tool_calls", ())]
        logprobs = [entry for piece in (*pieces, last) for entry in piece.get("logprobs", ())]
        found = {} if self._speller is None else {"logprobs": logprobs}
        return {**last, **part_of(self._form, content, thinking, calls), **found}

    def _head(self) -> Object:
        return {"model": self._model, "created_at": timestamp(time.time())}

    def _taken_logprobs(self) -> Object:
        taken = self._logprobs
        self._logprobs = []
        return {"logprobs": taken} if taken else {}

    def _end(self, output: RequestOutput) -> Object:
        """Return the reason, the durations and the numbers of tokens.

        ``prompt_eval_count`` counts the whole prompt, also tokens that were cached.
        """
        metrics = output.metrics
        times = output.token_times
        first = sum(metrics.raw_metrics.m_times_to_first_token) / MICRO
        is_over = output.finish_reason in (FinishReason.STOP, FinishReason.TOOL_CALL)
        return {
            "done": True,
            "done_reason": "stop" if is_over else "length",
            "total_duration": nanoseconds(time.perf_counter() - self._begin),
            "load_duration": nanoseconds(self._loaded - self._begin),
            "prompt_eval_count": metrics.get_num_input_tokens(),
            "prompt_eval_duration": nanoseconds(first),
            "eval_count": len(times),
            "eval_duration": nanoseconds(times[-1] - times[0] if times else 0.0),
        }


def without_answer(form: Form, model: str, reason: str) -> Object:
    """Return the answer to a request that only loads or unloads a model."""
    return {
        "model": model, "created_at": timestamp(time.time()), **part_of(form), "done": True, "done_reason": reason
    }  # fmt: skip


def _call(index: int, id: str, name: str, arguments: str) -> Object:
    return {"id": id, "function": {"index": index, "name": name, "arguments": _parsed(arguments)}}


def _parsed(arguments: str) -> Object:
    """Return the arguments of a call as an object; a text that is none, such as one with NaN, stands below ``arguments``."""
    try:
        found = from_json(arguments or "{}", allow_inf_nan=False)
        to_json(found)  # refuses 1e999, which is read as infinite
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"arguments": arguments}


def _logprob(token: SpelledToken) -> Object:
    return {name: value for name, value in token.entry().items() if value or name != "top_logprobs"}


class LineStream(ChunkStream):
    """A stream of JSON objects, one per line, without lines between them: clients would take an empty one for an object."""

    END_MARK = ""

    def __init__(
        self, call: ApiCall, batches: AsyncGenerator[list[dict[str, Any]], None], close: Callable[[], Awaitable[None]]
    ) -> None:
        super().__init__(call, batches, close)
        self.ping_interval = 0
        self.headers["Content-Type"] = "application/x-ndjson"

    def _encoded(self, chunk: dict[str, Any]) -> bytes:
        return to_json(chunk).encode() + b"\n"

    def _chunk_of(self, error: ApiError) -> dict[str, Any]:
        return {"error": error.message}
