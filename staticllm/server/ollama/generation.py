"""``/api/chat`` and ``/api/generate``: conversations are answered and prompts continued, as lines of JSON or as one object."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.responses import Response

from staticllm.server.answers.answers import Answers, Close, respond
from staticllm.server.answers.asks import AnswerFields, Ask, numbers_of
from staticllm.server.answers.results import speller_of
from staticllm.server.answers.work import is_proactive
from staticllm.server.catalog import ModelFacts, current_facts
from staticllm.server.endpoint import ApiCall
from staticllm.server.http.errors import ApiError, json_response
from staticllm.server.models.served import ServedModel
from staticllm.server.ollama.answer import AnswerForm, Form, LineStream, without_answer
from staticllm.server.ollama.fields import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaGeneration,
    OllamaMessage,
    OllamaTool,
    seconds_of,
    served_name,
)

_log = logging.getLogger("staticllm.server")


def asked_of(
    body: OllamaGeneration, max_seq_len: int, tools: Sequence[OllamaTool] = (), is_raw: bool = False
) -> AnswerFields:
    """Return what a request asks for.

    ``max_seq_len``: the most tokens of a sequence of the model; ``is_raw``: whether the chat template is left out.

    As in Ollama, a prompt that is too long is shortened unless ``truncate`` is false, an answer that reaches the end of the
    context goes on unless ``shift`` is false, and without ``num_predict`` it has at most ten times the context's tokens.

    Raises:
        ApiError: fields contradict each other, or ask for what is not there.
    """
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs without logprobs: set logprobs to true")
    is_truncated = body.truncate and body.shift
    limit = body.options.num_predict
    if limit is not None and limit <= 0:
        limit = None if is_truncated else -1
    return AnswerFields(
        numbers=numbers_of(body.options, "ollama"),
        stop=body.options.stop,
        max_tokens=10 * max_seq_len if limit is None and is_truncated else limit,
        json_schema=_schema_of(body.format),
        wants_logprobs=body.logprobs,
        num_top_logprobs=body.top_logprobs if body.logprobs else 0,
        is_chat=not is_raw,
        tools=[tool.model_dump(exclude_none=True) for tool in tools],
        context=_thinking(body.think),
        is_truncated=is_truncated,
        more={"suffix": body.suffix} if isinstance(body, OllamaGenerateRequest) and body.suffix else {},
    )


def _schema_of(format: str | dict[str, Any] | None) -> dict[str, Any] | None:
    if not format:
        return None
    return {"type": "object"} if isinstance(format, str) else format


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


async def chat(call: ApiCall, body: OllamaChatRequest) -> Response:
    """Answer a conversation."""
    if not body.messages:
        return await _without_answer(call, body, "chat")
    return await _answer(call, body, "chat", template_messages(body.messages), body.tools)


async def generate(call: ApiCall, body: OllamaGenerateRequest) -> Response:
    """Continue a prompt: as the user's message in a conversation, or as it stands (``raw``)."""
    for name, value in (("template", body.template), ("images", body.images)):
        if value:
            raise ApiError(400, f"{name} is not supported: leave it out")
    if body.context:
        raise ApiError(400, "context is not supported: send the conversation to /api/chat")
    if not body.prompt:
        return await _without_answer(call, body, "generate")
    if body.raw or body.suffix:
        if body.system:
            raise ApiError(400, "system with raw or suffix: leave one of them out")
        return await _answer(call, body, "generate", body.prompt, is_raw=True)
    system = [{"role": "system", "content": body.system}] if body.system else []
    return await _answer(call, body, "generate", [*system, {"role": "user", "content": body.prompt}])


def find_chat_model(call: ApiCall, name: str) -> ServedModel:
    """Return the chat model of a request.

    Raises:
        ApiError: there is none of this name (404), or it is of another kind (400).
    """
    return call.state.hub.find(served_name(call.state.hub, name), "chat")


async def _answer(
    call: ApiCall,
    body: OllamaGeneration,
    form: Form,
    inputs: Any,
    tools: Sequence[OllamaTool] = (),
    is_raw: bool = False,
) -> Response:
    model = find_chat_model(call, body.model)
    begin = time.perf_counter()
    seconds = None if body.keep_alive is None else seconds_of(body.keep_alive)
    await call.acquire(model)
    try:
        loaded = time.perf_counter()
        call.state.hub.keep_alive(model, seconds)
        _say_ignored(call, model, body)
        if body.think or tools:
            _check(body, tools, await call.state.workers.run(lambda: current_facts(model)))
        speller = (await call.state.workers.run(lambda: speller_of(model)))() if body.logprobs else None
        asked = asked_of(body, model.chat.config.max_seq_len, tools, is_raw)
        asks = [Ask.of(inputs, asked, is_proactive=is_proactive(call, model))]
        maker = AnswerForm(form, body.model, begin, loaded, speller, not is_raw)
    except BaseException:
        call.state.hub.release(model)
        raise

    def stream(answers: Answers, close: Close) -> Response:
        return LineStream(call, _pieces(maker, answers), close)

    field = "prompt" if form == "generate" else "messages"
    return await respond(call, model, asks, field, maker.whole, stream if body.stream else None)


def _say_ignored(call: ApiCall, model: ServedModel, body: OllamaGeneration) -> None:
    """Log a context that is longer than the model's, once per model: clients send the same one with every request."""
    wanted = body.options.num_ctx or 0
    config = model.chat.config
    if wanted > config.max_seq_len and call.state.is_first(f"num_ctx {model.spec.name}"):
        _log.warning(
            "num_ctx=%d has no effect: %r has a context of %d tokens, %d of them for prompts; serve with --max-prompt-len %d",
            wanted,
            model.spec.name,
            config.max_seq_len,
            config.max_prompt_len,
            wanted,
        )


def _check(body: OllamaGeneration, tools: Sequence[OllamaTool], facts: ModelFacts) -> None:
    """Check that the model can do what a request asks for.

    Raises:
        ApiError: it does not reason, or its template shows it no tools.
    """
    if body.think and not facts.has_reasoning:
        raise ApiError(400, f"{body.model!r} does not support thinking: leave think out")
    if tools and not facts.has_tools:
        raise ApiError(400, f"{body.model!r} does not support tools: its chat template does not show them")


async def _pieces(maker: AnswerForm, answers: Answers) -> AsyncGenerator[list[dict[str, Any]], None]:
    async with contextlib.aclosing(answers.batches()) as batches:
        async for parts in batches:
            ready = [piece for part in parts for piece in maker.of(part)]
            if ready:
                yield ready


async def _without_answer(call: ApiCall, body: OllamaGeneration, form: Form) -> Response:
    """Load a model, or with ``keep_alive`` 0 unload it as soon as it is unused."""
    hub = call.state.hub
    model = find_chat_model(call, body.model)
    seconds = None if body.keep_alive is None else seconds_of(body.keep_alive)
    if seconds != 0:
        await call.acquire(model)
        hub.release(model)
    hub.keep_alive(model, seconds)
    return json_response(without_answer(form, body.model, "unload" if seconds == 0 else "load"))
