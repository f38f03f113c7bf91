"""The blocks of an answer in Anthropic's form, as events of a stream or as a whole."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

from staticllm.core import FinishReason
from staticllm.events import ArgumentsDelta, CallBegin, CallBroken, CallEnd, ContentDelta, Event, ReasoningDelta, merged
from staticllm.pipelines.text.output_processor import RequestOutput
from staticllm.server.answers.answers import AnswerDelta, AnswerEnd, Part

StreamEvent = dict[str, Any]
_DELTAS = {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}
_FIELDS = {"text": "text", "thinking": "thinking", "tool_use": "partial_json"}


class MessageMaker:
    """Makes the events of one answer. ``blocks``: those that have begun, each with its text so far.

    Blank text around calls is no block. An event cannot be taken back, so calls that are not certain are held until their ends:
    until then they may turn out to be none (``are_certain``: no call can).
    """

    def __init__(self, model: str, num_prompt: int, are_certain: bool = False) -> None:
        self._are_certain = are_certain
        self._held: list[str] | None = None  # the arguments of a call that is held
        self._call: dict[str, Any] = {}
        self._model = model
        self._id = f"msg_{uuid.uuid4().hex}"
        self._num_prompt = num_prompt
        self.blocks: list[dict[str, Any]] = []
        self._texts: list[str] = []
        self._is_open = False
        self._blank = ""

    def begin(self) -> Iterator[StreamEvent]:
        """Yield the first event: the message without content."""
        usage = {"input_tokens": self._num_prompt, "output_tokens": 0}
        yield {"type": "message_start", "message": self._message([], None, None, usage)}

    def of(self, part: Part) -> Iterator[StreamEvent]:
        """Yield the events of a part of the answer."""
        if isinstance(part, AnswerDelta):
            for event in merged(part.delta.events):
                yield from self._of_event(event)
        else:
            yield from self._of_end(part)

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        """Return the message of an answer whose parts were all given to ``of``."""
        return self._message(self._content(), *_reason(output), usage=_usage(output))

    def _of_event(self, event: Event) -> Iterator[StreamEvent]:
        if isinstance(event, ContentDelta):
            yield from self._add_text(event.text)
        elif isinstance(event, ReasoningDelta):
            yield from self._add("thinking", {"thinking": "", "signature": ""}, event.text)
        elif isinstance(event, CallBegin):
            self._call = {"type": "tool_use", "id": event.id, "name": event.name, "input": {}}
            self._held = None if self._are_certain else []
            yield from self._begin_call()
        elif isinstance(event, ArgumentsDelta):
            if self._held is None:
                yield self._delta(event.text)
            else:
                self._held.append(event.text)
        elif isinstance(event, CallEnd | CallBroken):
            yield from self._end_call(isinstance(event, CallBroken))

    def _begin_call(self) -> Iterator[StreamEvent]:
        if self._held is None:
            yield from self._stop()
            yield from self._start(self._call)

    def _end_call(self, is_broken: bool) -> Iterator[StreamEvent]:
        held = self._held
        self._held = None
        if held is not None and not is_broken:
            yield from self._begin_call()
            yield self._delta("".join(held))
        if held is None or not is_broken:
            yield from self._stop()

    def _add_text(self, text: str) -> Iterator[StreamEvent]:
        if not self._is_text_open and not text.strip():
            self._blank += text
            return
        text = text if self._is_text_open or not self.blocks else self._blank.lstrip() + text.lstrip()
        self._blank = ""
        yield from self._add("text", {"text": ""}, text)

    @property
    def _is_text_open(self) -> bool:
        return self._is_open and self.blocks[-1]["type"] == "text"

    def _add(self, kind: str, fields: dict[str, Any], text: str) -> Iterator[StreamEvent]:
        if not (self._is_open and self.blocks[-1]["type"] == kind):
            yield from self._stop()
            yield from self._start({"type": kind, **fields})
        if text:
            yield self._delta(text)

    def _start(self, block: dict[str, Any]) -> Iterator[StreamEvent]:
        self.blocks.append(block)
        self._texts.append("")
        self._is_open = True
        yield {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": block}

    def _delta(self, text: str) -> StreamEvent:
        kind = self.blocks[-1]["type"]
        self._texts[-1] += text
        delta = {"type": _DELTAS[kind], _FIELDS[kind]: text}
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}

    def _stop(self) -> Iterator[StreamEvent]:
        if self._is_open:
            self._is_open = False
            yield {"type": "content_block_stop", "index": len(self.blocks) - 1}

    def _of_end(self, part: AnswerEnd) -> Iterator[StreamEvent]:
        yield from self._stop()
        reason, stop = _reason(part.outputs[0])
        delta = {"stop_reason": reason, "stop_sequence": stop}
        yield {"type": "message_delta", "delta": delta, "usage": _usage(part.outputs[0])}
        yield {"type": "message_stop"}

    def _content(self) -> list[dict[str, Any]]:
        found = []
        for block, text in zip(self.blocks, self._texts, strict=True):
            kind = block["type"]
            found.append({**block, "input": _object(text)} if kind == "tool_use" else {**block, kind: text})
        return found

    def _message(
        self, content: list[dict[str, Any]], reason: str | None, stop: str | None, usage: dict[str, int]
    ) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": usage,
        }


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):  # a call that the limit has cut off
        return {}
    return found if isinstance(found, dict) else {}


def _reason(output: RequestOutput) -> tuple[str, str | None]:
    if output.finish_reason == FinishReason.TOOL_CALL:
        return "tool_use", None
    if output.finish_reason == FinishReason.STOP:
        return ("stop_sequence", output.stop_string) if output.stop_string else ("end_turn", None)
    return "max_tokens", None


def _usage(output: RequestOutput) -> dict[str, int]:
    """Return the tokens of an answer; those of the prompt that were cached are counted apart."""
    num_prompt = output.metrics.get_num_input_tokens()
    return {
        "input_tokens": num_prompt - output.num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": output.num_cached,
        "output_tokens": output.metrics.get_num_generated_tokens(),
    }
