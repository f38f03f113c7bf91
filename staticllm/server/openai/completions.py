"""``/v1/completions``: texts or token ids are continued, without a chat template."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import numpy as np
from pydantic import ConfigDict, Field
from starlette.responses import Response

from staticllm.core import MAX_ANSWERS
from staticllm.server.answers.answers import Answers, Usage
from staticllm.server.answers.asks import Ask
from staticllm.server.answers.fields import Ids
from staticllm.server.answers.respond import Close, Handles, respond
from staticllm.server.answers.results import finish_reason, timings_of
from staticllm.server.endpoint import Call
from staticllm.server.http.errors import ApiError
from staticllm.server.models.served import ServedModel
from staticllm.server.openai.chunks import TextChunks, stream_of, text_choice, text_head, text_logprobs
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

    def stream(answers: Answers, close: Close) -> Response:
        decode = None if body.logprobs is None else model.chat.get_tokenizer().decode
        return stream_of(call, body, model, answers, close, TextChunks(model.spec.name, body.has_usage_chunk, decode))

    await call.acquire(model)
    return await respond(
        call, model, asks, "prompt", partial(_completion, body, model), stream if body.stream else None
    )


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


def _completion(body: CompletionRequest, model: ServedModel, handles: Handles) -> dict[str, Any]:
    decode = model.chat.get_tokenizer().decode
    choices = []
    for index, output in enumerate(output for outputs in handles for output in outputs):
        text = (decode(output.echo) if output.echo else "") + output.text
        logprobs = None if body.logprobs is None else text_logprobs(output, decode, 0)
        choices.append(text_choice(index, text, logprobs, finish_reason(output.finish_reason)))
    usage = Usage.of(handles, body.num_handles).as_dict()
    return {**text_head(model.spec.name), "choices": choices, "usage": usage, "timings": timings_of(handles[0][0])}
