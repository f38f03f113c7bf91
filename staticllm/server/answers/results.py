"""What answers say about themselves in OpenAI's and llamacpp's forms: usage, reasons, log-probabilities, progress and timings."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from staticllm.core import FinishReason
from staticllm.pipelines.engine.engine import Engine
from staticllm.pipelines.text.handle import GenerationHandle
from staticllm.pipelines.text.output_processor import RequestOutput
from staticllm.server.answers.answers import Answers, Part

_NAMES = {FinishReason.STOP: "stop", FinishReason.TOOL_CALL: "tool_calls"}


def finish_reason(reason: FinishReason) -> str:
    """Return the name of a reason. ``length`` is that of every answer that was cut off, also by a server that stops."""
    return next((name for known, name in _NAMES.items() if reason is known), "length")


def token_logprobs(
    tokens: Sequence[int], logprobs: Sequence[float], decode: Callable[[list[int]], str]
) -> list[dict[str, Any]]:
    """Return the entries of ``logprobs.content`` of a chat."""
    entries = []
    for token, logprob in zip(tokens, logprobs, strict=True):
        text = decode([token])
        is_whole = "\ufffd" not in text
        entries.append(
            {
                "token": text,
                "logprob": max(logprob, -9999.0),
                "bytes": list(text.encode()) if is_whole else None,
                "top_logprobs": [],
            }
        )
    return entries


POLL_SECONDS = 0.05
"""Seconds between two looks at a prompt that runs."""


@dataclass(frozen=True)
class PromptProgress:
    """Of ``total`` tokens of a prompt, ``cached`` were found in the prefix cache, and ``processed``, those included, have run."""

    total: int
    cached: int
    processed: int
    seconds: float

    def as_dict(self) -> dict[str, int]:
        """Return it as llamacpp's ``prompt_progress``."""
        milliseconds = round(self.seconds * 1e3)
        return {"total": self.total, "cache": self.cached, "processed": self.processed, "time_ms": milliseconds}


async def with_progress(
    engine: Engine | None, answers: Answers
) -> AsyncGenerator[Sequence[Part | PromptProgress], None]:
    """Yield the batches of answers, and before the first one the progress of its prompt whenever that has changed, the last time
    when all of it has run."""
    begin, last = time.perf_counter(), PromptProgress(len(answers.first_handle.prompt_tokens), 0, -1, 0.0)
    async with contextlib.aclosing(answers.batches()) as batches:
        first = asyncio.ensure_future(anext(batches))
        try:
            while not first.done():
                found = _progress_of(engine, answers.first_handle, begin)
                if found is not None and found.processed != last.processed:
                    last = found
                    yield [found]
                await asyncio.wait({first}, timeout=POLL_SECONDS)
        finally:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
        batch = first.result()
        if last.processed < last.total:
            cached = answers.first_handle.num_cached or 0
            yield [PromptProgress(last.total, cached, last.total, time.perf_counter() - begin)]
        yield batch
        async for batch in batches:
            yield batch


def _progress_of(engine: Engine | None, handle: GenerationHandle, begin: float) -> PromptProgress | None:
    """Return how far the prompt of a request is; None once it has ended, or if its engine is in another process."""
    for request in () if engine is None else engine.progress().requests:
        if request.id == handle.request_id:
            seconds = time.perf_counter() - begin
            processed = min(max(request.num_computed, request.num_cached), request.num_prompt)
            return PromptProgress(request.num_prompt, request.num_cached, processed, seconds)
    return None


def timings_of(output: RequestOutput) -> dict[str, float]:
    """Return how long the parts of an answer took, as llamacpp's ``timings``.

    ``prompt_n`` counts the tokens of the prompt that ran, ``cache_n`` those that the prefix cache had; ``prompt_ms`` is the time
    of their device calls, which other requests may share. ``predicted_ms`` is the time from the first token to the last.
    """
    num_run, num_predicted = output.metrics.get_num_input_tokens() - output.num_cached, len(output.token_times)
    prompt_ms = sum(output.device_seconds[:1]) * 1e3
    predicted_ms = (output.token_times[-1] - output.token_times[0]) * 1e3 if output.token_times else 0.0
    return {
        "cache_n": output.num_cached,
        "prompt_n": num_run,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": _ratio(prompt_ms, num_run),
        "prompt_per_second": _ratio(num_run * 1e3, prompt_ms),
        "predicted_n": num_predicted,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": _ratio(predicted_ms, num_predicted - 1),
        "predicted_per_second": _ratio((num_predicted - 1) * 1e3, predicted_ms),
    }


def _ratio(amount: float, by: float) -> float:
    return amount / by if by > 0 else 0.0
