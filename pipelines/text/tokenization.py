"""Turns the inputs of a call into token ids."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import openvino as ov
import openvino_genai as genai
from numpy.typing import NDArray

from staticllm.devices import read_first_tensor
from staticllm.errors import ModelError, PromptError, PromptTooLongError, last_line
from staticllm.pipelines.conversation.chat_template import render
from staticllm.pipelines.generation.options.tools import ToolOptions, function_of, is_tool

read_first_tensor()

Form = Literal["text", "texts", "history", "tokens"]
TokenInputs: TypeAlias = NDArray[Any] | ov.Tensor | genai.TokenizedInputs
"""Token ids ``[n]`` or ``[batch, n]``, of an integer type."""
Messages: TypeAlias = genai.ChatHistory | Sequence[Mapping[str, object]]
Inputs: TypeAlias = str | Sequence[str] | Messages | TokenInputs


MAX_ENDING_CHARS = 256
_HALF_PAIRS = re.compile("[\ud800-\udfff]")
"""Halves of surrogate pairs, which JSON can name and UTF-8 cannot hold: models write them into the arguments of calls."""


@dataclass(frozen=True)
class Prompt:
    """The token ids of one prompt.

    ``template_seconds`` is the time that the chat template took, None without a template; ``ending`` holds the last characters
    of its text. ``tools`` are the functions that it shows, ``chat_template`` is the template that made it.
    """

    ids: list[int]
    template_seconds: float | None = None
    ending: str = ""
    tools: tuple[Mapping[str, Any], ...] = ()
    chat_template: str = ""


def form_of(inputs: object) -> Form:
    """Return which of GenAI's input forms ``inputs`` has. Raises PromptError: it has none of them, or is an empty list."""
    if isinstance(inputs, str):
        return "text"
    if isinstance(inputs, genai.ChatHistory):
        return "history"
    if isinstance(inputs, (np.ndarray, ov.Tensor, genai.TokenizedInputs)):
        return "tokens"
    if isinstance(inputs, Sequence) and all(isinstance(item, str) for item in inputs):
        if not inputs:
            raise PromptError("the list of prompts is empty: give at least one str")
        return "texts"
    if isinstance(inputs, Sequence) and all(isinstance(item, Mapping) for item in inputs):
        return "history"
    raise PromptError(
        f"inputs are a {type(inputs).__name__}: must be a str, a list of str, token ids "
        "(numpy, openvino.Tensor or TokenizedInputs), a ChatHistory or a list of messages"
    )


def encode_text(
    tokenizer: genai.Tokenizer,
    text: str,
    apply_chat_template: bool,
    options: ToolOptions | None = None,
    tool_template: str = "",
) -> Prompt:
    """Return the ids of one prompt, with the chat template if ``apply_chat_template`` is set and the model has one.

    ``options`` and ``tool_template`` are as for ``encode_messages``. As in GenAI, an empty text is a prompt if a template makes
    tokens of it.

    Raises:
        PromptError: the prompt is empty or not valid text, or the chat template refuses it.
        ModelError: the tokenizer cannot encode the prompt.
    """
    _check_text(text)
    if apply_chat_template and tokenizer.chat_template:
        return _templated(tokenizer, [{"role": "user", "content": text}], options, tool_template)
    if not text:
        raise PromptError("the prompt is empty: give at least one character")
    return Prompt(_encoded(tokenizer, text)[0])


def encode_messages(
    tokenizer: genai.Tokenizer, messages: Messages, options: ToolOptions | None = None, tool_template: str = ""
) -> Prompt:
    """Return the ids of a conversation (a list of messages or a ChatHistory) up to the header of the assistant's answer.

    The tools and the extra context in ``options`` replace those of a ChatHistory, if there are any. ``tool_template`` takes the
    place of the tokenizer's chat template where there are tools; "" if there is none of its own.

    Raises:
        PromptError: the conversation is empty or malformed, or the model has no chat template, or it refuses the conversation.
        ModelError: the tokenizer cannot encode the conversation.
    """
    for turn in _parts_of(messages)[0]:
        _check_message(turn)
    return _templated(tokenizer, messages, options, tool_template)


def _templated(
    tokenizer: genai.Tokenizer, messages: Messages, options: ToolOptions | None, tool_template: str
) -> Prompt:
    turns, tools, extra = _parts_of(messages)
    if options is not None:
        tools = _tools_for(options) or tools
        extra = {**extra, **options.extra_context}
        if options.choice == "none":
            tools = []
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
    text = _HALF_PAIRS.sub("\ufffd", render(template, turns, tokens, tools, extra))
    seconds = time.perf_counter() - start
    ids = _encoded(tokenizer, text, add_special_tokens=False)[0]
    return Prompt(ids, seconds, text[-MAX_ENDING_CHARS:], tuple(filter(is_tool, tools)), template)


def _tools_for(options: ToolOptions) -> list[dict[str, Any]]:
    """Return the tools as templates take them."""
    return [{"type": "function", "function": dict(function_of(tool))} for tool in options.tools]


def _encoded(tokenizer: genai.Tokenizer, text: str, **options: Any) -> list[list[int]]:
    try:
        return _real_ids(tokenizer.encode(text, **options))
    except RuntimeError as error:
        if isinstance(error, PromptError):
            raise
        raise ModelError(f"the tokenizer cannot encode {len(text)} characters: {last_line(error)}") from error


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


def token_ids(inputs: TokenInputs) -> list[list[int]]:
    """Return the ids of each prompt in a numpy array or ``openvino.Tensor`` (``[n]`` or ``[batch, n]``) or ``TokenizedInputs``.

    Padding in ``TokenizedInputs`` is removed.

    Raises:
        PromptError: the type or the shape is wrong.
    """
    if isinstance(inputs, genai.TokenizedInputs):
        return _real_ids(inputs)
    array = np.asarray(inputs.data if isinstance(inputs, ov.Tensor) else inputs)
    if array.dtype.kind not in "iu":
        raise PromptError(f"token ids are {array.dtype}: must be whole numbers")
    return [[int(token) for token in row] for row in _as_rows(array)]


def check_ids(ids: list[int], vocab_size: int, limit: int, is_chat: bool = False) -> None:
    """Check the token ids of one prompt.

    Raises:
        PromptError: the prompt has no tokens, or an id outside the vocabulary.
        PromptTooLongError: it has more tokens than ``limit``.
    """
    if not ids:
        raise PromptError("the prompt has no tokens: give at least one")
    if len(ids) > limit:
        raise PromptTooLongError(len(ids), limit, is_chat)
    outside = [token for token in ids if not 0 <= token < vocab_size]
    if outside:
        raise PromptError(f"token id {outside[0]} is outside the vocabulary: ids go from 0 to {vocab_size - 1}")


def _real_ids(tokenized: genai.TokenizedInputs) -> list[list[int]]:
    ids = _as_rows(np.asarray(tokenized.input_ids.data))
    mask = _as_rows(np.asarray(tokenized.attention_mask.data))
    if ids.shape != mask.shape or ids.dtype.kind not in "iu":
        raise PromptError(
            f"TokenizedInputs with {ids.size} ids of {ids.dtype} and a mask of {mask.size}: "
            "must be whole numbers, with one mask value per id"
        )
    return [row[seen != 0].tolist() for row, seen in zip(ids, mask, strict=True)]


def _as_rows(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if array.ndim not in (1, 2) or (array.ndim == 2 and not array.shape[0]):
        raise PromptError(f"token ids have the shape {list(array.shape)}: must be [n] or [batch, n]")
    return np.atleast_2d(array)
