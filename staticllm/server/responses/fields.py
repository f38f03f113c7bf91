"""The body of a request to ``/v1/responses``."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from staticllm.server.answers.fields import (
    Fields,
    Function,
    IgnoredFields,
    MessageFields,
    Priority,
    Stop,
    Text,
    number_fields,
)
from staticllm.server.answers.messages import MAX_MESSAGES, TextPart
from staticllm.server.answers.work import TierFields


class InputPart(TextPart):
    """A part of a message: a text, or the text of a refusal."""

    TEXTS: ClassVar[tuple[str, ...]] = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


Parts = Annotated[list[InputPart], Field(fail_fast=True, max_length=1000)]


class InputItem(MessageFields):
    """An item of a conversation: a message, a call of a function, its result, reasoning, or the ``id`` of an item that the server
    remembers. Which fields it has depends on ``type``; without one it is a message."""

    type: Literal["message", "function_call", "function_call_output", "reasoning", "item_reference"] = "message"
    id: str | None = None
    status: str | None = None
    phase: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | Parts | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | Parts | None = None
    summary: list[Any] | None = None
    encrypted_content: str | None = None


class _FunctionKind(MessageFields):
    """The field that is checked first: other tools have other fields."""

    type: Literal["function"]


class FunctionTool(Function, _FunctionKind):
    """A function that the model may call, in the flat form of this API."""


class TextFormat(Fields):
    """What the text must be: anything, any JSON object, or JSON that satisfies a schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


def any_text() -> TextFormat:
    """Return the format of a text that may be anything."""
    return TextFormat.model_construct()


class TextOptions(Fields):
    """How the text is written. ``verbosity`` is accepted without effect."""

    format: TextFormat = Field(default_factory=any_text)
    verbosity: Any = None


class ReasoningOptions(Fields):
    """How much the model reasons. Summaries are accepted without effect: the reasoning itself is returned."""

    effort: str | None = None
    summary: Any = None
    generate_summary: Any = None


LOGPROBS = "message.output_text.logprobs"
Included = Literal["reasoning.encrypted_content", "message.output_text.logprobs"]
"""What an answer may have beside its items. Reasoning is never encrypted: it is there as text."""


class ResponsesStreamOptions(Fields):
    """What a stream has beside its events."""

    include_obfuscation: bool = False


class ResponsesRequest(number_fields(IgnoredFields, "responses"), TierFields):  # type: ignore[misc]
    """The body of a request for an answer that the server remembers. Some of its numbers are not OpenAI's."""

    model_config = ConfigDict(title="ResponsesRequest")

    model: Text | None = None
    input: str | Annotated[list[InputItem], Field(fail_fast=True, max_length=MAX_MESSAGES)] = ""
    instructions: str | None = None
    previous_response_id: Text | None = None
    store: bool = True
    stream: bool = False
    stream_options: ResponsesStreamOptions | None = None
    background: Literal[False] = False
    max_tool_calls: Any = None  # of the tools of OpenAI's own servers
    max_output_tokens: int | None = Field(None, ge=1, lt=2**31)
    top_logprobs: int = Field(0, ge=0, le=20)
    text: TextOptions = Field(default_factory=TextOptions)
    reasoning: ReasoningOptions = Field(default_factory=ReasoningOptions)
    tools: Annotated[list[FunctionTool], Field(fail_fast=True)] = Field(default_factory=list, max_length=512)
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    truncation: Literal["auto", "disabled"] = "disabled"
    include: Annotated[list[Included], Field(max_length=16)] | None = None
    stop: Stop | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    priority: Priority = 0

    @property
    def wants_logprobs(self) -> bool:
        """Whether each token of a text has its log-probability."""
        return LOGPROBS in (self.include or ())
