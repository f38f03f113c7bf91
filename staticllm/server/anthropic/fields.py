"""The bodies of Anthropic's API, and the conversations that they hold as chat templates take them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError

from staticllm.server.answers.fields import Fields, MessageFields, Text
from staticllm.server.answers.messages import MAX_MESSAGES
from staticllm.server.http.errors import ApiError

MAX_TOOLS = 512
Message = dict[str, Any]


class ContentBlock(MessageFields):
    """A part of a message. Which fields count depends on ``type``; ``cache_control`` and citations are ignored."""

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: Any = None
    tool_use_id: str | None = None
    content: Any = None
    is_error: bool | None = None
    thinking: str | None = None


Content = str | Annotated[list[ContentBlock], Field(fail_fast=True, max_length=MAX_MESSAGES)]


class AnthropicMessage(MessageFields):
    """A message of the user or of the model."""

    role: Literal["user", "assistant", "system"]
    content: Content


class AnthropicTool(MessageFields):
    """A function that the model may call. Tools that Anthropic's servers run are refused."""

    type: str | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class ToolChoice(MessageFields):
    """Whether the model calls tools, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(MessageFields):
    """Whether the model thinks before its answer, where its template lets that be chosen."""

    type: Literal["enabled", "disabled", "adaptive"]


class CountRequest(Fields):
    """The body of a request for the number of a prompt's tokens."""

    model_config = ConfigDict(title="CountTokensRequest", extra="ignore")

    model: Text
    messages: Annotated[list[AnthropicMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    system: Content | None = None
    tools: Annotated[list[AnthropicTool], Field(fail_fast=True)] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None

    def conversation(self) -> list[Message]:
        """Return the conversation as chat templates take it.

        Raises:
            ApiError: a part is neither text nor a call or its result.
        """
        system = _text_of(self.system, "system") if self.system is not None else ""
        found: list[Message] = [{"role": "system", "content": system}] if system else []
        for place, message in enumerate(self.messages):
            found += _messages_of(message, f"messages.{place}")
        return found

    def functions(self) -> list[dict[str, Any]]:
        """Return the tools as chat templates take them.

        Raises:
            ApiError: one is run by Anthropic's servers, or has no schema.
        """
        found = []
        for place, tool in enumerate(self.tools or ()):
            if tool.type not in (None, "custom"):
                where = f"tools.{place}"
                raise ApiError(400, f"{where} is of type {tool.type[:50]!r}: only custom tools run here", param=where)
            function = {"name": tool.name, "parameters": tool.input_schema or {"type": "object"}}
            if tool.description is not None:
                function["description"] = tool.description
            found.append({"type": "function", "function": function})
        return found

    def choice(self) -> Any:
        """Return ``tool_choice`` as OpenAI's API has it.

        Raises:
            ApiError: it is a tool without its name.
        """
        given = self.tool_choice
        if given is None:
            return None
        if given.type == "tool":
            if not given.name:
                raise ApiError(400, "tool_choice of type tool needs a name", param="tool_choice.name")
            return {"type": "function", "function": {"name": given.name}}
        return {"auto": "auto", "any": "required", "none": "none"}[given.type]

    @property
    def context(self) -> dict[str, Any]:
        """Variables of the chat template: whether the model thinks."""
        if self.thinking is None:
            return {}
        thinks = self.thinking.type != "disabled"
        return {"enable_thinking": thinks, "thinking": thinks}


class MessagesRequest(CountRequest):
    """The body of a request for an answer."""

    model_config = ConfigDict(title="MessagesRequest", extra="ignore")

    max_tokens: int = Field(ge=1, lt=2**31)
    stop_sequences: Annotated[list[Text], Field(fail_fast=True)] | None = Field(None, max_length=16)
    stream: bool = False
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0, lt=2**31)


def _messages_of(message: AnthropicMessage, where: str) -> list[Message]:
    """Return the messages that a chat template has for one of Anthropic's: results of tools are messages of their own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    if message.role == "assistant":
        return [_answer_of(message.content, f"{where}.content")]
    found: list[Message] = []
    texts: list[str] = []
    for place, block in enumerate(message.content):
        here = f"{where}.content.{place}"
        if block.type == "tool_result":
            result = _result_of(block, here)
            found.append({"role": "tool", "tool_call_id": block.tool_use_id or "", "content": result})
        else:
            texts.append(_block_text(block, here))
    if texts or not found:
        found.append({"role": message.role, "content": "\n".join(texts)})
    return found


def _answer_of(blocks: Sequence[ContentBlock], where: str) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for place, block in enumerate(blocks):
        if block.type == "tool_use":
            function = {"name": block.name or "", "arguments": json.dumps(block.input or {}, ensure_ascii=False)}
            calls.append({"id": block.id or "", "type": "function", "function": function})
        elif block.type in ("thinking", "redacted_thinking"):
            thoughts.append(block.thinking or "")
        else:
            texts.append(_block_text(block, f"{where}.{place}"))
    message: Message = {"role": "assistant", "content": "".join(texts)}
    if any(thoughts):
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message |= {"content": message["content"] or None, "tool_calls": calls}
    return message


def _result_of(block: ContentBlock, where: str) -> str:
    content = block.content
    if content is None:
        text = ""
    elif isinstance(content, str):
        text = content
    elif isinstance(content, list):
        parts = [_block(part, f"{where}.content.{place}") for place, part in enumerate(content)]
        text = _text_of(parts, f"{where}.content")
    else:
        raise ApiError(400, f"{where}.content must be a text or a list of blocks", param=f"{where}.content")
    return f"Error: {text}" if block.is_error else text


def _block(part: Any, where: str) -> ContentBlock:
    try:
        return ContentBlock.model_validate(part)
    except ValidationError:
        raise ApiError(400, f"{where} is no block with a type and its fields", param=where) from None


def _text_of(content: Content, where: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(_block_text(block, f"{where}.{place}") for place, block in enumerate(content))


def _block_text(block: ContentBlock, where: str) -> str:
    if block.type != "text" or block.text is None:
        message = f"{where} is of type {block.type[:50]!r}: this model reads texts, calls and their results"
        raise ApiError(400, message, param=where, code="unsupported_content")
    return block.text
