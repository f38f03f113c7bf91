"""Turns Ollama's options into those of ``StaticLLMPipeline.submit``, and its messages into those of chat templates."""

from __future__ import annotations

import json
from typing import Any

from staticllm.server.api_error import ApiError
from staticllm.server.ollama.fields import OllamaGeneration, OllamaMessage, OllamaOptions
from staticllm.server.openai.fields import SamplingFields
from staticllm.server.openai.sampling import max_new_tokens, sampling_options

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repeat_penalty", "presence_penalty",
             "frequency_penalty", "mirostat", "mirostat_tau", "mirostat_eta", "stop", "seed")  # fmt: skip


def generation_options(body: OllamaGeneration, max_seq_len: int) -> dict[str, Any]:
    """Return the options of an answer. ``max_seq_len``: the most tokens of a sequence of the model.

    As in Ollama, a prompt that is too long is shortened unless ``truncate`` is false, an answer that reaches the end of the
    context goes on unless ``shift`` is false, and without ``num_predict`` it has at most ten times the context's tokens.

    Raises:
        ApiError: fields contradict each other, or ask for what is not there.
    """
    if body.top_logprobs:
        raise ApiError(400, "top_logprobs is not supported: only the chosen tokens have log-probabilities")
    options = {**_sampling(body.options), **_format(body.format), "parse_tools": True}
    limit = body.options.num_predict
    if body.truncate and body.shift:
        options["overflow"] = "truncate_middle"
        options |= max_new_tokens(limit if limit is not None and limit > 0 else 10 * max_seq_len)
    elif limit is not None:
        options |= max_new_tokens(limit if limit > 0 else -1)
    if body.logprobs:
        options["logprobs"] = 1
    if (context := _thinking(body.think)) and not getattr(body, "raw", False):
        options["extra_context"] = context
    return options


def _sampling(given: OllamaOptions) -> dict[str, Any]:
    fields = {name: value for name in _SAMPLING if (value := getattr(given, name)) is not None}
    return sampling_options(SamplingFields.model_construct(**fields))


def _format(format: str | dict[str, Any] | None) -> dict[str, Any]:
    if not format:
        return {}
    return {"json_schema": {"type": "object"} if format == "json" else format}


def _thinking(think: bool | str | None) -> dict[str, Any]:
    """Return the variables by which chat templates turn reasoning on or off, or say how much of it."""
    if think is None:
        return {}
    context: dict[str, Any] = {"enable_thinking": bool(think), "thinking": bool(think)}
    return {**context, "reasoning_effort": think} if isinstance(think, str) else context


def template_messages(messages: list[OllamaMessage]) -> list[dict[str, Any]]:
    """Return a conversation as chat templates take it: OpenAI's messages, in which arguments are text.

    Raises:
        ApiError: a message has images.
    """
    return [_template_message(message, index) for index, message in enumerate(messages)]


def _template_message(message: OllamaMessage, index: int) -> dict[str, Any]:
    if message.images:
        raise ApiError(400, f"messages.{index}.images: only text is supported")
    found: dict[str, Any] = {"role": message.role, "content": message.content or (None if message.tool_calls else "")}
    if name := message.tool_name or message.name:
        found["name"] = name
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    if message.thinking:
        found["reasoning_content"] = message.thinking
    if message.tool_calls:
        found["tool_calls"] = [
            {
                "id": call.id or f"call_{index}_{number}",
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": json.dumps(call.function.arguments, ensure_ascii=False),
                },
            }
            for number, call in enumerate(message.tool_calls)
        ]
    return found
