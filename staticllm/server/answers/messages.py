"""The messages of a conversation as clients send them, and as chat templates take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from staticllm.server.answers.fields import MessageFields
from staticllm.server.http.errors import ApiError

MAX_MESSAGES = 10_000
_REASONING = ("thinking", "reasoning", "redacted_thinking")
"""Parts of an assistant's message with reasoning, as clients of other servers call them."""


class TextPart(MessageFields):
    """A part of a message: a text, or the text of a refusal. ``TEXTS``: the types of parts with text."""

    TEXTS: ClassVar[tuple[str, ...]] = ("text", "input_text", "output_text")
    type: str
    text: str | None = None
    refusal: str | None = None

    @property
    def shown(self) -> str | None:
        """What the part adds to the content; None if it is no text."""
        return self.refusal if self.type == "refusal" else self.text if self.type in self.TEXTS else None


class ContentPart(TextPart):
    """A part of a message: a text, the text of a refusal, or reasoning, which adds nothing to the content."""

    thinking: str | Annotated[list[Any], Field(fail_fast=True)] | None = None
    reasoning: str | None = None

    @property
    def shown(self) -> str | None:
        return "" if self.type in _REASONING else super().shown

    @property
    def thought(self) -> str:
        """What the part adds to the reasoning."""
        if self.type not in _REASONING:
            return ""
        if isinstance(self.thinking, list):
            return "".join(text for each in self.thinking if isinstance(text := _text_in(each), str))
        return self.thinking or self.reasoning or self.text or ""


class FunctionCall(MessageFields):
    """The name of a function, and the text of a JSON object."""

    name: str
    arguments: str = "{}"


class MessageToolCall(MessageFields):
    """A call that the model made before."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(MessageFields):
    """A message. ``reasoning`` is another name of ``reasoning_content``. Only text is there: ``audio`` and the old
    ``function_call`` must be null."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[MessageToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None
    refusal: str | None = None
    audio: None = None
    function_call: None = None

    def as_template(self, where: str) -> dict[str, Any]:
        """Return the message as chat templates take it. ``where`` names it in errors.

        Raises:
            ApiError: a part is not text.
        """
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": text_of(self.content, f"{where}.content") or self.refusal or (None if self.tool_calls else ""),
        }
        for name, value in (
            ("name", self.name),
            ("tool_call_id", self.tool_call_id),
            ("reasoning_content", self._thought()),
        ):
            if value is not None:
                message[name] = value
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        return message

    def _thought(self) -> str | None:
        """Return the reasoning, by whichever name it was sent."""
        if self.reasoning_content is not None:
            return self.reasoning_content
        if isinstance(self.reasoning, str):
            return self.reasoning
        parts = self.content if isinstance(self.content, list) else []
        return "".join(part.thought for part in parts) or None


def template_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Return a conversation as chat templates take it.

    Raises:
        ApiError: a part of a message is not text.
    """
    return [message.as_template(f"messages.{index}") for index, message in enumerate(messages)]


def text_of(content: str | Sequence[TextPart] | None, where: str) -> str:
    """Return the text of a message. ``where`` names it in errors.

    Raises:
        ApiError: a part is not text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    found = []
    for index, part in enumerate(content):
        if part.shown is None:
            raise _no_text(part, f"{where}.{index}")
        found.append(part.shown)
    return "".join(found)


def _no_text(part: TextPart, where: str) -> ApiError:
    if part.type == "refusal" or part.type in part.TEXTS:
        missing = f"{where}.{'refusal' if part.type == 'refusal' else 'text'}"
        text = f"Missing required parameter: {missing!r}"
        return ApiError(400, text, param=missing, code="missing_required_parameter")
    text = f"{where} is of type {part.type[:50]!r}: only text is supported"
    return ApiError(400, text, param=where, code="unsupported_content")


def _text_in(part: Any) -> Any:
    return part.get("text") if isinstance(part, dict) else None
