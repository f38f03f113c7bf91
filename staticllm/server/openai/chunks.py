"""The chunks of streamed chats and completions, and the stream that both make of them."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from typing import Any

from starlette.responses import Response

from staticllm.pipelines.conversation.events import (
    ArgumentsDelta,
    CallBegin,
    ContentDelta,
    Event,
    ReasoningDelta,
    merged,
)
from staticllm.pipelines.text.output_processor import RequestOutput, TextDelta
from staticllm.server.answers.answers import AnswerDelta, AnswerEnd, Answers, Part, Usage
from staticllm.server.answers.respond import Close
from staticllm.server.answers.results import PromptProgress, finish_reason, timings_of, token_logprobs, with_progress
from staticllm.server.answers.stream import ChunkStream
from staticllm.server.endpoint import Call
from staticllm.server.models.served import ServedModel
from staticllm.server.openai.fields import SamplingFields

Chunk = dict[str, Any]
Decode = Callable[[list[int]], str]


class ChatChunks:
    """Makes the chunks of one stream, which share an id. ``decode`` is None without log-probabilities."""

    def __init__(self, model: str, has_usage: bool, decode: Callable[[list[int]], str] | None) -> None:
        self._head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model,
        }
        self._has_usage = has_usage
        self._decode = decode
        self._logprobs: dict[int, list[dict[str, Any]]] = {}  # of tokens that had no text yet, by answer

    def begin(self, index: int) -> Iterable[Chunk]:
        """Return the chunk with the role."""
        return [self._chunk(index, {"role": "assistant", "content": ""})]

    def of(self, part: Part | PromptProgress) -> Iterator[Chunk]:
        """Yield the chunks of a part: of an increment, of the end of an answer, or of a prompt that runs."""
        if isinstance(part, AnswerDelta):
            yield from self._of_delta(part.index, part.delta)
        elif isinstance(part, AnswerEnd):
            yield self._of_end(part.index, part.outputs[0])
        else:
            yield {**self._chunk(0, {}), "prompt_progress": part.as_dict()}

    def _of_delta(self, index: int, delta: TextDelta) -> Iterator[Chunk]:
        if self._decode is not None:
            self._logprobs.setdefault(index, []).extend(token_logprobs(delta.tokens, delta.logprobs, self._decode))
        for event in merged(delta.events):
            fields = _fields_of(event)
            if fields:
                yield self._chunk(index, fields, logprobs=self._logprobs.pop(index, []))

    def _of_end(self, index: int, output: RequestOutput) -> Chunk:
        """Return the last chunk of an answer. Its tokens without text, such as that of the end, are in it."""
        rest = self._logprobs.pop(index, [])
        chunk = self._chunk(index, {}, finish_reason(output.finish_reason), rest)
        return chunk if self._has_usage else {**chunk, "timings": timings_of(output)}

    def usage(self, usage: Usage, first: RequestOutput) -> Chunk:
        """Return the chunk about tokens, with the times of the ``first`` answer."""
        return {**self._head, "choices": [], "usage": usage.as_dict(), "timings": timings_of(first)}

    def _chunk(
        self, index: int, delta: Chunk, reason: str | None = None, logprobs: list[dict[str, Any]] | None = None
    ) -> Chunk:
        shown = {"content": logprobs, "refusal": None} if logprobs else None
        choice = {"index": index, "delta": delta, "logprobs": shown, "finish_reason": reason}
        chunk: Chunk = {**self._head, "choices": [choice]}
        if self._has_usage:
            chunk["usage"] = None
        return chunk


def _fields_of(event: Event) -> Chunk:
    """Return the ``delta`` of an event; empty if there is nothing to say."""
    if isinstance(event, ContentDelta):
        return {"content": event.text}
    if isinstance(event, ReasoningDelta):
        return {"reasoning_content": event.text}
    if isinstance(event, CallBegin):
        function = {"name": event.name, "arguments": ""}
        return {"tool_calls": [{"index": event.index, "id": event.id, "type": "function", "function": function}]}
    if isinstance(event, ArgumentsDelta):
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
    return {}


class TextChunks:
    """Makes the chunks of one completion, which share an id. ``decode`` is None without log-probabilities."""

    def __init__(self, model: str, has_usage: bool, decode: Decode | None) -> None:
        self._head = {**text_head(model), **({"usage": None} if has_usage else {})}
        self._has_usage = has_usage
        self._decode = decode
        self._lengths: dict[int, int] = {}  # characters of each answer that were sent

    def begin(self, index: int) -> Iterable[Chunk]:
        """Return nothing: a text has no role."""
        return []

    def of(self, part: Part | PromptProgress) -> Iterator[Chunk]:
        """Yield the chunks of a part."""
        if isinstance(part, PromptProgress):
            yield {**self._chunk(0, ""), "prompt_progress": part.as_dict()}
        elif isinstance(part, AnswerEnd):
            last = self._chunk(part.index, "", reason=finish_reason(part.outputs[0].finish_reason))
            yield last if self._has_usage else {**last, "timings": timings_of(part.outputs[0])}
        else:
            delta = part.delta
            start = self._lengths.get(part.index, 0)
            self._lengths[part.index] = start + len(delta.text)
            logprobs = None if self._decode is None else text_logprobs(delta, self._decode, start)
            if delta.text or logprobs:
                yield self._chunk(part.index, delta.text, logprobs)

    def usage(self, usage: Usage, first: RequestOutput) -> Chunk:
        """Return the chunk about tokens, with the times of the ``first`` answer."""
        return {**self._head, "choices": [], "usage": usage.as_dict(), "timings": timings_of(first)}

    def _chunk(self, index: int, text: str, logprobs: Chunk | None = None, reason: str | None = None) -> Chunk:
        return {**self._head, "choices": [text_choice(index, text, logprobs, reason)]}


def text_head(model: str) -> Chunk:
    """Return what all objects of a completion have."""
    return {
        "id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time()), "model": model
    }  # fmt: skip


def text_choice(index: int, text: str, logprobs: Chunk | None, reason: str | None) -> Chunk:
    """Return a choice of a completion."""
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def text_logprobs(delta: TextDelta | RequestOutput, decode: Callable[[list[int]], str], start: int) -> dict[str, Any]:
    """Return the log-probabilities of tokens whose text begins at character ``start`` of the answer."""
    texts = [decode([token]) for token in delta.tokens]
    offsets = [start + sum(map(len, texts[:index])) for index in range(len(texts))]
    return {
        "tokens": texts,
        "token_logprobs": [max(logprob, -9999.0) for logprob in delta.logprobs],
        "top_logprobs": None,
        "text_offset": offsets,
    }


def stream_of(
    call: Call,
    body: SamplingFields,
    model: ServedModel,
    answers: Answers,
    close: Close,
    chunks: ChatChunks | TextChunks,
) -> Response:
    """Return the stream of a request's answers, which ends with a chunk about tokens if the request has asked for it."""

    async def generate() -> AsyncGenerator[list[Chunk], None]:
        begin = [chunk for index in range(body.num_handles) for chunk in chunks.begin(index)]
        if begin:
            yield begin
        handles: dict[int, list[RequestOutput]] = {}
        found = with_progress(model.local_engine, answers) if body.return_progress else answers.batches()
        async with contextlib.aclosing(found) as batches:
            async for parts in batches:
                ready = [chunk for part in parts for chunk in chunks.of(part)]
                handles |= {part.index: part.outputs for part in parts if isinstance(part, AnswerEnd)}
                if body.has_usage_chunk and len(handles) == body.num_handles:
                    usage = Usage.of([handles[index] for index in sorted(handles)], body.num_handles)
                    ready.append(chunks.usage(usage, handles[0][0]))
                if ready:
                    yield ready

    return ChunkStream(call, generate(), close)
