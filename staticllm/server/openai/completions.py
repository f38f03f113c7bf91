"""``/v1/completions``: texts or token ids are continued, without a chat template."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any

import numpy as np
from pydantic import ConfigDict, Field
from starlette.responses import Response

from staticllm.core import MAX_ANSWERS
from staticllm.pipelines.text.output_processor import RequestOutput, TextDelta
from staticllm.server.answers.answers import AnswerEnd, Answers, Close, Handles, Part, Usage, respond
from staticllm.server.answers.asks import Ask
from staticllm.server.answers.fields import Ids
from staticllm.server.answers.results import PromptProgress, finish_reason, timings_of
from staticllm.server.answers.work import is_proactive
from staticllm.server.endpoint import ApiCall
from staticllm.server.http.errors import ApiError
from staticllm.server.models.served import ServedModel
from staticllm.server.openai.generation import Chunk, Chunks, Decode, SamplingFields, head_of, stream_of

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


async def completions(call: ApiCall, body: CompletionRequest) -> Response:
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
    is_behind = is_proactive(call, model, body.service_tier, body.priority)
    shown = body.tier_shown(is_behind)
    asks = [
        Ask.of(prompt if isinstance(prompt, str) else np.array(prompt), asked, index, body.priority, is_behind)
        for prompt in prompts
        for index in range(body.num_handles)
    ]

    def stream(answers: Answers, close: Close) -> Response:
        decode = None if body.logprobs is None else model.chat.get_tokenizer().decode
        chunks = TextChunks(model.spec.name, body.has_usage_chunk, decode, shown)
        return stream_of(call, body, model, answers, close, chunks)

    await call.acquire(model)
    return await respond(
        call, model, asks, "prompt", partial(_completion, body, model, shown), stream if body.stream else None
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


def _completion(body: CompletionRequest, model: ServedModel, shown: dict[str, str], handles: Handles) -> dict[str, Any]:
    decode = model.chat.get_tokenizer().decode
    choices = []
    for index, output in enumerate(output for outputs in handles for output in outputs):
        text = (decode(output.echo) if output.echo else "") + output.text
        logprobs = None if body.logprobs is None else _logprobs_of(output, decode, 0)
        choices.append(_choice_of(index, text, logprobs, finish_reason(output.finish_reason)))
    usage = Usage.of(handles, body.num_handles).as_dict()
    head = head_of("cmpl", "text_completion", model.spec.name)
    return {**head, **shown, "choices": choices, "usage": usage, "timings": timings_of(handles[0][0])}


class TextChunks(Chunks):
    """Makes the chunks of a streamed completion."""

    def __init__(self, model: str, has_usage: bool, decode: Decode | None, shown: dict[str, str]) -> None:
        """``shown``: the tier, if the request named one."""
        head = {**head_of("cmpl", "text_completion", model), **shown}
        super().__init__({**head, "usage": None} if has_usage else head, has_usage, decode)
        self._lengths: dict[int, int] = {}  # characters of each answer that were sent

    def of(self, part: Part | PromptProgress) -> Iterator[Chunk]:
        if isinstance(part, PromptProgress):
            yield {**self._chunk(0, ""), "prompt_progress": part.as_dict()}
        elif isinstance(part, AnswerEnd):
            last = self._chunk(part.index, "", reason=finish_reason(part.outputs[0].finish_reason))
            yield last if self._has_usage else {**last, "timings": timings_of(part.outputs[0])}
        else:
            delta = part.delta
            start = self._lengths.get(part.index, 0)
            self._lengths[part.index] = start + len(delta.text)
            logprobs = None if self._decode is None else _logprobs_of(delta, self._decode, start)
            if delta.text or logprobs:
                yield self._chunk(part.index, delta.text, logprobs)

    def _chunk(self, index: int, text: str, logprobs: Chunk | None = None, reason: str | None = None) -> Chunk:
        return {**self._head, "choices": [_choice_of(index, text, logprobs, reason)]}


def _choice_of(index: int, text: str, logprobs: Chunk | None, reason: str | None) -> Chunk:
    """Return a choice of a completion."""
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def _logprobs_of(delta: TextDelta | RequestOutput, decode: Decode, start: int) -> dict[str, Any]:
    """Return the log-probabilities of tokens whose text begins at character ``start`` of the answer."""
    texts = [decode([token]) for token in delta.tokens]
    offsets = [start + sum(map(len, texts[:index])) for index in range(len(texts))]
    return {
        "tokens": texts,
        "token_logprobs": [max(logprob, -9999.0) for logprob in delta.logprobs],
        "top_logprobs": None,
        "text_offset": offsets,
    }
