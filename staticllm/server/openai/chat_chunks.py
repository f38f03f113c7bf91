"""The chunks of a streamed chat: the role, pieces of content, reasoning and calls, the end, and the usage."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from staticllm.pipelines.conversation.events import (
    ArgumentsDelta,
    CallBegin,
    ContentDelta,
    Event,
    ReasoningDelta,
    merged,
)
from staticllm.pipelines.text.output_processor import RequestOutput, TextDelta
from staticllm.server.answers import AnswerDelta, AnswerEnd, Part, Usage
from staticllm.server.openai.progress import PromptProgress, timings_of
from staticllm.server.openai.reasons import finish_reason, token_logprobs

Chunk = dict[str, Any]


class ChatChunks:
    """Makes the chunks of one stream, which share an id. ``decode`` is None without log-probabilities."""

    def __init__(self, model: str, has_usage: bool, decode: Callable[[list[int]], str] | None) -> None:
        self._head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model,
        }
        self._has_usage, self._decode = has_usage, decode
        self._logprobs: dict[int, list[dict[str, Any]]] = {}  # of tokens that had no text yet, by answer

    def role(self, index: int) -> Chunk:
        """Return the first chunk of an answer."""
        return self._chunk(index, {"role": "assistant", "content": ""})

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
