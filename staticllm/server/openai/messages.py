"""The messages of a conversation as clients send them, and as chat templates take them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from staticllm.server.api_error import ApiError
from staticllm.server.openai.fields import Fields

MAX_MESSAGES = 10_000


class ContentPart(Fields):
    """A part of a message. Only text is there; the other fields are named so that the refusal can say it."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    cache_control: Any = None


class FunctionCall(Fields):
    """The name of a function, and the text of a JSON object."""

    name: str
    arguments: str


class MessageToolCall(Fields):
    """A call that the model made before. ``index`` is what some clients keep from a stream."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Message(Fields):
    """A message. ``refusal``, ``annotations``, ``audio`` and ``function_call`` are what clients send back of an answer: null."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[MessageToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None

    def as_template(self, where: str) -> dict[str, Any]:
        """Return the message as chat templates take it. ``where`` names it in errors.

        Raises:
            ApiError: a part is not text.
        """
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": _text_of(self.content, f"{where}.content") or (None if self.tool_calls else ""),
        }
        for name in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump(exclude={"index"}) for call in self.tool_calls]
        return message


def template_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Return a conversation as chat templates take it.

    Raises:
        ApiError: a part of a message is not text.
    """
    return [message.as_template(f"messages.{index}") for index, message in enumerate(messages)]


def _text_of(content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None, where: str) -> str:
    if not isinstance(content, list):
        return content or ""
    texts = []
    for index, part in enumerate(content):
        text = part.text if part.type in ("text", "input_text", "output_text") else None
        if text is None:
            raise ApiError(
                400,
                f"{where}.{index} is of type {part.type[:50]!r}: only text is supported",
                param=f"{where}.{index}",
                code="unsupported_content",
            )
        texts.append(text)
    return "".join(texts)
