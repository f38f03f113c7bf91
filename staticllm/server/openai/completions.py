"""``/v1/completions``: texts or token ids are continued, without a chat template."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Annotated, Any

import numpy as np
from pydantic import ConfigDict, Field
from starlette.responses import Response

from staticllm.core import MAX_ANSWERS
from staticllm.pipelines.text.output_processor import RequestOutput, TextDelta
from staticllm.server.answers.answers import AnswerEnd, Answers, Part, Usage
from staticllm.server.answers.asks import Ask
from staticllm.server.answers.fields import Ids
from staticllm.server.answers.respond import Close, Handles, respond
from staticllm.server.answers.results import PromptProgress, finish_reason, timings_of, with_progress
from staticllm.server.answers.stream import ChunkStream
from staticllm.server.endpoint import Call
from staticllm.server.http.errors import ApiError
from staticllm.server.models.served import ServedModel
from staticllm.server.openai.fields import SamplingFields

Texts = Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_ANSWERS)]
Prompts = str | Texts | Ids | Annotated[list[Ids], Field(fail_fast=True, min_length=1, max_length=MAX_ANSWERS)]
DEFAULT_TOKENS = 16
"""OpenAI's number of tokens for requests that do not say it."""


class CompletionRequest(SamplingFields):
    """The body of a request to continue prompts: a text, token ids, or a list of either."""

    model_config = ConfigDict(title="CompletionRequest")

    prompt: Prompts
    max_tokens: int = Field(DEFAULT_TOKENS, ge=-1, lt=2**31)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=5)
    best_of: int | None = Field(None, ge=1, le=MAX_ANSWERS)
    suffix: str | None = None


async def completions(call: Call, body: CompletionRequest) -> Response:
    """Continue prompts."""
    model = call.state.hub.find(body.model, "chat")
    _check(body)
    prompts = _prompts_of(body.prompt)
    if len(prompts) * body.n > MAX_ANSWERS:
        raise ApiError(400, f"{len(prompts)} prompts with n={body.n}: at most {MAX_ANSWERS} answers", param="prompt")
    if body.is_search and not isinstance(prompts[0], str):
        raise ApiError(400, "num_beams with token ids: give the prompt as text", param="num_beams")
    asked = body.asked(
        max_tokens=body.max_tokens, wants_logprobs=body.logprobs is not None, is_chat=False, more={"echo": body.echo}
    )
    asks = [
        Ask.of(prompt if isinstance(prompt, str) else np.array(prompt), asked, index, body.priority)
        for prompt in prompts
        for index in range(body.num_handles)
    ]
    stream = partial(_stream, call, body, model) if body.stream else None
    return await respond(call, model, asks, "prompt", partial(_completion, body, model), stream)


def _check(body: CompletionRequest) -> None:
    if body.suffix:
        raise ApiError(400, "suffix is not supported: leave it out", param="suffix", code="unsupported_parameter")
    if body.best_of not in (None, body.n):
        raise ApiError(
            400,
            "best_of is not supported: leave it out, or try num_beams",
            param="best_of",
            code="unsupported_parameter",
        )
    if body.logprobs:
        raise ApiError(
            400, f"logprobs is {body.logprobs}: only the chosen tokens have log-probabilities, so give 0",
            param="logprobs", code="unsupported_parameter",
        )  # fmt: skip
    if body.logprobs is not None and (body.echo or body.is_search):
        raise ApiError(400, "logprobs with echo or num_beams: leave one out", param="logprobs")
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens is 0: give at least 1, or -1 for as many as fit", param="max_tokens")


def _prompts_of(prompt: Prompts) -> list[str] | list[list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    texts = [each for each in prompt if isinstance(each, str)]
    ids = [each for each in prompt if isinstance(each, int)]
    if texts or ids:
        return texts or [ids]
    return [each for each in prompt if isinstance(each, list)]


def _logprobs(delta: TextDelta | RequestOutput, decode: Callable[[list[int]], str], start: int) -> dict[str, Any]:
    """Return the log-probabilities of tokens whose text begins at character ``start`` of the answer."""
    texts = [decode([token]) for token in delta.tokens]
    offsets = [start + sum(map(len, texts[:index])) for index in range(len(texts))]
    return {
        "tokens": texts,
        "token_logprobs": [max(logprob, -9999.0) for logprob in delta.logprobs],
        "top_logprobs": None,
        "text_offset": offsets,
    }


def _head(model: ServedModel) -> dict[str, Any]:
    return {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": model.spec.name,
    }


def _choice(index: int, text: str, logprobs: dict[str, Any] | None, reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def _completion(body: CompletionRequest, model: ServedModel, handles: Handles) -> dict[str, Any]:
    decode = model.chat.get_tokenizer().decode
    choices = []
    for index, output in enumerate(output for outputs in handles for output in outputs):
        text = (decode(output.echo) if output.echo else "") + output.text
        logprobs = None if body.logprobs is None else _logprobs(output, decode, 0)
        choices.append(_choice(index, text, logprobs, finish_reason(output.finish_reason)))
    usage = Usage.of(handles, body.num_handles).as_dict()
    return {**_head(model), "choices": choices, "usage": usage, "timings": timings_of(handles[0][0])}


def _stream(call: Call, body: CompletionRequest, model: ServedModel, answers: Answers, close: Close) -> Response:
    head, decode = _head(model), model.chat.get_tokenizer().decode
    if body.has_usage_chunk:
        head["usage"] = None

    lengths: dict[int, int] = {}

    def chunk_of(part: Part | PromptProgress) -> dict[str, Any] | None:
        if isinstance(part, PromptProgress):
            return {**head, "choices": [_choice(0, "", None, None)], "prompt_progress": part.as_dict()}
        if isinstance(part, AnswerEnd):
            reason = finish_reason(part.outputs[0].finish_reason)
            last = {**head, "choices": [_choice(part.index, "", None, reason)]}
            return last if body.has_usage_chunk else {**last, "timings": timings_of(part.outputs[0])}
        delta, start = part.delta, lengths.get(part.index, 0)
        logprobs = None if body.logprobs is None else _logprobs(delta, decode, start)
        lengths[part.index] = start + len(delta.text)
        if not (delta.text or logprobs):
            return None
        return {**head, "choices": [_choice(part.index, delta.text, logprobs, None)]}

    async def generate() -> AsyncGenerator[list[dict[str, Any]], None]:
        handles: dict[int, list[RequestOutput]] = {}
        found = with_progress(model.local_engine, answers) if body.return_progress else answers.batches()
        async with contextlib.aclosing(found) as batches:
            async for parts in batches:
                handles |= {part.index: part.outputs for part in parts if isinstance(part, AnswerEnd)}
                ready = [chunk for part in parts if (chunk := chunk_of(part)) is not None]
                if ready:
                    yield ready
        if body.has_usage_chunk:
            usage = Usage.of([handles[index] for index in sorted(handles)], body.num_handles)
            yield [{**head, "choices": [], "usage": usage.as_dict(), "timings": timings_of(handles[0][0])}]

    return ChunkStream(call, generate(), close)
