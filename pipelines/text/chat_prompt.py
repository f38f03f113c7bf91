"""Makes token ids of texts and of conversations."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import openvino_genai as genai

from staticllm.errors import PromptError, encoding

from ..generation.options.extra import ToolOptions, function_of, is_tool
from .conversations import Conversations
from .infill import infill_prompt
from .inputs import Messages, real_ids

MAX_ENDING_CHARS = 256
_HALF_PAIRS = re.compile("[\ud800-\udfff]")
"""Halves of surrogate pairs, which JSON can name and UTF-8 cannot hold: models write them into the arguments of calls."""


@dataclass(frozen=True)
class Prompt:
    """The token ids of one prompt."""

    ids: list[int]
    template_seconds: float | None = None
    """The time that the chat template took, None without a template."""
    ending: str = ""
    """The last characters of its text."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """The functions that it shows."""
    chat_template: str = ""
    """The template that made it."""
    stops: frozenset[int] = frozenset()
    """Tokens that end its answer, beside those of the options."""


def encode_text(tokenizer: genai.Tokenizer, text: str) -> Prompt:
    """Return the ids of a text without a chat template.

    Raises:
        PromptError: it is empty or not valid text.
        ModelError: the tokenizer cannot encode it.
    """
    _check_text(text)
    if not text:
        raise PromptError("the prompt is empty: give at least one character")
    return Prompt(_ids_of(tokenizer, text)[0])


def encode_infill(tokenizer: genai.Tokenizer, before: str, after: str) -> Prompt:
    """Return the ids of the prompt for the text between two others, as ``infill_prompt``.

    Raises:
        PromptError, ModelError: as for ``infill_prompt``.
    """
    found = infill_prompt(tokenizer, before, after)
    return Prompt(list(found.ids), stops=found.stops)


_NO_TOOLS = ToolOptions()


def encode_messages(
    tokenizer: genai.Tokenizer,
    conversations: Conversations,
    messages: Messages,
    options: ToolOptions = _NO_TOOLS,
    tool_template: str = "",
) -> Prompt:
    """Return the ids of a conversation (a list of messages or a ChatHistory) up to the header of the assistant's answer.

    The tools and the extra context in ``options`` replace those of a ChatHistory, if there are any. ``tool_template`` takes the
    place of the tokenizer's chat template where there are tools; "" if there is none of its own. As in GenAI, an empty text of
    the user is a prompt if the template makes tokens of it.

    Raises:
        PromptError: the conversation is empty or malformed, or the model has no chat template, or it refuses the conversation.
        ModelError: the tokenizer cannot encode the conversation.
    """
    turns, tools, extra = _parts_of(messages)
    for turn in turns:
        _check_message(turn)
    tools = [] if options.choice == "none" else _tools_for(options) or tools
    if not turns:
        raise PromptError("the chat history is empty: append a message of the user")
    if not tokenizer.chat_template:
        raise PromptError("the model has no chat template: pass the prompt as a str, or set one on the tokenizer")
    start = time.perf_counter()
    tokens = {
        "bos_token": tokenizer.get_bos_token(),
        "eos_token": tokenizer.get_eos_token(),
        "pad_token": tokenizer.get_pad_token(),
    }
    template = tool_template if tools and tool_template else str(tokenizer.chat_template)
    text = _HALF_PAIRS.sub(
        "\ufffd", conversations.render(template, turns, tokens, tools, {**extra, **options.extra_context})
    )
    seconds = time.perf_counter() - start
    ids = _ids_of(tokenizer, text, add_special_tokens=False)[0]
    return Prompt(ids, seconds, text[-MAX_ENDING_CHARS:], tuple(filter(is_tool, tools)), template)


def _tools_for(options: ToolOptions) -> list[dict[str, Any]]:
    """Return the tools as templates take them."""
    return [{"type": "function", "function": dict(function_of(tool))} for tool in options.tools]


def _ids_of(tokenizer: genai.Tokenizer, text: str, **options: Any) -> list[list[int]]:
    with encoding(f"{len(text)} characters"):
        return real_ids(tokenizer.encode(text, **options))


def _parts_of(messages: Any) -> tuple[list[dict[str, Any]], list[Any], dict[str, Any]]:
    """Return the messages, the tools and the extra context."""
    if isinstance(messages, genai.ChatHistory):
        return messages.get_messages(), messages.get_tools(), messages.get_extra_context()
    return list(messages), [], {}


def _check_message(message: Mapping[str, Any]) -> None:
    if not isinstance(message.get("role"), str):
        raise PromptError(f"a message has the keys {sorted(map(str, message))}: it needs a 'role', and a 'content'")
    content = message.get("content")
    if isinstance(content, str):
        _check_text(content)


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        broken = text[error.start]
        raise PromptError(
            f"the prompt has {broken!r} at index {error.start}, half a character (a lone surrogate): remove it"
        ) from error
