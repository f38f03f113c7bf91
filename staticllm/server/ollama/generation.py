"""``/api/chat`` and ``/api/generate``: conversations are answered and prompts continued, as lines of JSON or as one object."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncGenerator
from typing import Any

from starlette.responses import Response

from staticllm.server.answers.answers import Answers
from staticllm.server.answers.asks import max_new_tokens, sampling_options
from staticllm.server.answers.fields import SamplingFields
from staticllm.server.answers.respond import Close, Handles, respond_with
from staticllm.server.catalog.facts import ModelFacts, current_facts
from staticllm.server.endpoint import Call
from staticllm.server.http.errors import ApiError, json_response
from staticllm.server.models.served import ServedModel
from staticllm.server.ollama.answer import AnswerForm, Form, LineStream, without_answer
from staticllm.server.ollama.fields import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaGeneration,
    OllamaMessage,
    OllamaOptions,
    seconds_of,
    served_name,
)

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


async def chat(call: Call, body: OllamaChatRequest) -> Response:
    """Answer a conversation."""
    if not body.messages:
        return await _without_answer(call, body, "chat")
    return await _answer(call, body, "chat", template_messages(body.messages))


async def generate(call: Call, body: OllamaGenerateRequest) -> Response:
    """Continue a prompt: as the user's message in a conversation, or as it stands (``raw``)."""
    for name, value in (("suffix", body.suffix), ("template", body.template), ("images", body.images)):
        if value:
            raise ApiError(400, f"{name} is not supported: leave it out")
    if body.context:
        raise ApiError(400, "context is not supported: send the conversation to /api/chat")
    if not body.prompt:
        return await _without_answer(call, body, "generate")
    if body.raw:
        if body.system:
            raise ApiError(400, "system with raw: leave one of them out")
        return await _answer(call, body, "generate", body.prompt)
    system = [{"role": "system", "content": body.system}] if body.system else []
    return await _answer(call, body, "generate", [*system, {"role": "user", "content": body.prompt}])


def find_chat_model(call: Call, name: str) -> ServedModel:
    """Return the chat model of a request.

    Raises:
        ApiError: there is none of this name (404), or it is of another kind (400).
    """
    return call.state.hub.find(served_name(call.state.hub, name), "chat")


async def _answer(call: Call, body: OllamaGeneration, form: Form, inputs: Any) -> Response:
    model, begin = find_chat_model(call, body.model), time.perf_counter()
    seconds = None if body.keep_alive is None else seconds_of(body.keep_alive)
    await call.acquire(model)
    try:
        loaded = time.perf_counter()
        call.state.hub.keep_alive(model, seconds)
        if body.think or getattr(body, "tools", None):
            _check(body, await call.state.workers.run(lambda: current_facts(model)))
        tokenizer = model.chat.get_tokenizer()
        decode, options = tokenizer.decode if body.logprobs else None, _options(body, model)
        maker = AnswerForm(form, body.model, begin, loaded, decode, options["parse_tools"])
    except BaseException:
        call.state.hub.release(model)
        raise

    def whole(handles: Handles) -> dict[str, Any]:
        return maker.whole(handles[0][0])

    def stream(answers: Answers, close: Close) -> Response:
        return LineStream(call, _pieces(maker, answers), close)

    return await respond_with(call, body, model, [(inputs, options)], whole, stream)


def _options(body: OllamaGeneration, model: ServedModel) -> dict[str, Any]:
    options = generation_options(body, model.chat.config.max_seq_len)
    if isinstance(body, OllamaChatRequest) and body.tools:
        options["tools"] = [tool.model_dump(exclude_none=True) for tool in body.tools]
    else:
        options["tool_choice"] = "none"  # without tools nothing is a call, whatever it looks like
    if isinstance(body, OllamaGenerateRequest) and body.raw:
        options |= {"apply_chat_template": False, "parse_tools": False}
    return options


def _check(body: OllamaGeneration, facts: ModelFacts) -> None:
    """Check that the model can do what a request asks for.

    Raises:
        ApiError: it does not reason, or its template shows it no tools.
    """
    if body.think and not facts.has_reasoning:
        raise ApiError(400, f"{body.model!r} does not support thinking: leave think out")
    if isinstance(body, OllamaChatRequest) and body.tools and not facts.has_tools:
        raise ApiError(400, f"{body.model!r} does not support tools: its chat template does not show them")


async def _pieces(maker: AnswerForm, answers: Answers) -> AsyncGenerator[list[dict[str, Any]], None]:
    async with contextlib.aclosing(answers.batches()) as batches:
        async for parts in batches:
            ready = [piece for part in parts for piece in maker.of(part)]
            if ready:
                yield ready


async def _without_answer(call: Call, body: OllamaGeneration, form: Form) -> Response:
    """Load a model, or with ``keep_alive`` 0 unload it as soon as nobody uses it."""
    hub, model = call.state.hub, find_chat_model(call, body.model)
    seconds = None if body.keep_alive is None else seconds_of(body.keep_alive)
    if seconds != 0:
        await call.acquire(model)
        hub.release(model)
    hub.keep_alive(model, seconds)
    return json_response(without_answer(form, body.model, "unload" if seconds == 0 else "load"))
