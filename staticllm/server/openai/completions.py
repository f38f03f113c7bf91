"""``/v1/completions``: texts or token ids are continued, without a chat template."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Any

import numpy as np
from pydantic import ConfigDict, Field
from starlette.responses import Response

from staticllm.core import MAX_ANSWERS
from staticllm.server.answers.answers import AnswerEnd, Part
from staticllm.server.answers.asks import Ask
from staticllm.server.answers.fields import Ids
from staticllm.server.answers.results import PromptProgress, SpelledToken, finish_reason, timings_of
from staticllm.server.answers.work import is_proactive
from staticllm.server.endpoint import ApiCall
from staticllm.server.http.errors import ApiError
from staticllm.server.openai.generation import Chunk, Chunks, SamplingFields, answered, head_of

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

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None


async def completions(call: ApiCall, body: CompletionRequest) -> Response:
    """Continue prompts."""
    model = call.state.hub.find(body.model, "chat")
    _check(body)
    prompts = _prompts_of(body.prompt)
    if len(prompts) * body.n > MAX_ANSWERS:
        raise ApiError(400, f"{len(prompts)} prompts with n={body.n}: at most {MAX_ANSWERS} answers", param="prompt")
    if body.is_search and not isinstance(prompts[0], str):
        raise ApiError(400, "num_beams with token ids: give the prompt as text", param="num_beams")
    if body.suffix and not isinstance(prompts[0], str):
        raise ApiError(400, "suffix with token ids: give the prompt as text", param="suffix")
    asked = body.asked(
        max_tokens=body.max_tokens,
        is_chat=False,
        num_top_logprobs=body.logprobs or 0,
        more={"echo": body.echo, "suffix": body.suffix or None},
    )
    is_behind = is_proactive(call, model, body.service_tier, body.priority)
    asks = [
        Ask.of(prompt, asked, index, body.priority, is_behind)
        for prompt in (prompt if isinstance(prompt, str) else np.array(prompt) for prompt in prompts)
        for index in range(body.num_handles)
    ]
    head = {**head_of("cmpl", "text_completion", model.spec.name), **body.tier_shown(is_behind)}
    await call.acquire(model)
    return await answered(call, body, model, asks, "prompt", partial(TextChunks, head, body))


def _check(body: CompletionRequest) -> None:
    if body.suffix and body.echo:
        raise ApiError(400, "suffix with echo: leave one out", param="suffix")
    if body.best_of not in (None, body.n):
        raise ApiError(
            400,
            "best_of is not supported: leave it out, or try num_beams",
            param="best_of",
            code="unsupported_parameter",
        )
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


class TextChunks(Chunks):
    """Makes the chunks of a completion."""

    WHOLE = "text_completion"

    def of(self, part: Part | PromptProgress) -> Iterator[Chunk]:
        if isinstance(part, PromptProgress):
            yield {**self._chunk(0, ""), "prompt_progress": part.as_dict()}
        elif isinstance(part, AnswerEnd):
            for place, output in enumerate(part.outputs):
                last = self._chunk(part.index + place, "", reason=finish_reason(output.finish_reason))
                yield last if self._has_usage else {**last, "timings": timings_of(output)}
        else:
            tokens = self._spelled(part)
            if part.delta.text or tokens:
                yield self._chunk(part.index, part.delta.text, _logprobs_of(tokens) if tokens else None)

    def _chunk(self, index: int, text: str, logprobs: Chunk | None = None, reason: str | None = None) -> Chunk:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return {**self._head, **({"usage": None} if self._has_usage else {}), "choices": [choice]}

    def joined(self, index: int, choices: Sequence[Chunk]) -> Chunk:
        logprobs = None if self._new_speller is None else _logprobs_of([])
        for found in (choice["logprobs"] for choice in choices if choice["logprobs"] is not None):
            logprobs = {name: value and [*((logprobs or {})[name] or ()), *value] for name, value in found.items()}
        text = "".join(choice["text"] for choice in choices)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": choices[-1]["finish_reason"]}


def _logprobs_of(tokens: Sequence[SpelledToken]) -> dict[str, Any]:
    """Return the log-probabilities of tokens. One that is a part of a character is written as OpenAI does it, by its bytes."""
    has_top = any(token.top for token in tokens)
    return {
        "tokens": [_written(token) for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [{_written(each): each.logprob for each in token.top} for token in tokens] if has_top else None,
        "text_offset": [token.offset for token in tokens],
        "bytes": [token.entry()["bytes"] for token in tokens],
    }


def _written(token: SpelledToken) -> str:
    if token.is_text or token.bytes is None:
        return token.text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.bytes)
