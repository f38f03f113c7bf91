"""The results of ``generate``, with the attributes of openvino_genai's results and with truthful finish reasons."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, fields
from typing import Any

from staticllm.core import FinishReason
from staticllm.metrics import PerfMetrics, SpeculativePerfMetrics


class _Common:
    """Attributes of GenAI's results that all forms of results have."""

    perf_metrics: PerfMetrics

    @property
    def extended_perf_metrics(self) -> SpeculativePerfMetrics | None:
        """The timings of an answer whose tokens were drafted; None without drafts."""
        metrics = self.perf_metrics
        return SpeculativePerfMetrics(metrics) if metrics.get_num_draft_tokens() else None

    @property
    def parsed(self) -> list[object]:
        """Always empty: parsers are not supported."""
        return []


def _class_in_genai(name: str, own: type) -> type:
    """Return GenAI's class of this name, for ``isinstance``, if the program has imported GenAI; else our own class."""
    found = getattr(sys.modules.get("openvino_genai"), name, own)
    return found if isinstance(found, type) else own


@dataclass(frozen=True)
class EncodedResults(_Common):
    """The answers to token ids, one entry per answer.

    ``tokens[i]`` holds the generated ids, ``scores[i]`` the sum of their log-probabilities (0.0 unless ``logprobs`` is set),
    and ``finish_reasons[i]`` is ``stop``, ``length``, ``cancelled``, ``deadline`` or ``tool_call``.
    """

    tokens: list[list[int]]
    scores: list[float]
    finish_reasons: list[FinishReason]
    perf_metrics: PerfMetrics = field(repr=False)

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _class_in_genai("EncodedResults", EncodedResults)

    def __reduce__(self) -> tuple[Any, ...]:
        return EncodedResults, tuple(getattr(self, item.name) for item in fields(EncodedResults))


@dataclass(frozen=True)
class DecodedResults(_Common):
    """The answers to a list of strings or to a chat history: the fields of ``EncodedResults``, and ``texts``."""

    texts: list[str]
    tokens: list[list[int]]
    scores: list[float]
    finish_reasons: list[FinishReason]
    perf_metrics: PerfMetrics = field(repr=False)

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _class_in_genai("DecodedResults", DecodedResults)

    def __reduce__(self) -> tuple[Any, ...]:
        return DecodedResults, tuple(getattr(self, item.name) for item in fields(DecodedResults))

    def __str__(self) -> str:
        return "\n".join(self.texts)


class GeneratedText(str, _Common):
    """The answer to a plain ``str``: a ``str`` as openvino_genai returns, which also carries the results' attributes."""

    texts: list[str]
    tokens: list[list[int]]
    scores: list[float]
    finish_reasons: list[FinishReason]
    perf_metrics: PerfMetrics

    @classmethod
    def of(cls, results: DecodedResults) -> GeneratedText:
        """Return the first text of ``results`` with all their attributes."""
        text = cls(results.texts[0])
        text.texts, text.tokens, text.scores = results.texts, results.tokens, results.scores
        text.finish_reasons, text.perf_metrics = results.finish_reasons, results.perf_metrics
        return text
