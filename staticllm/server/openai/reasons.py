"""The reasons for the end of an answer, and log-probabilities, as OpenAI's API has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from staticllm.core import FinishReason

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
