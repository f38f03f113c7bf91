"""What ``generate`` returns: the attributes of openvino_genai's results, with truthful finish reasons."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, fields
from typing import Any

from staticllm.core import FinishReason
from staticllm.metrics import PerfMetrics


class _Common:
    """Attributes that GenAI's results have, and that have nothing to say here."""

    extended_perf_metrics = None

    @property
    def parsed(self) -> list[object]:
        return []


def _class_in_genai(name: str, own: type) -> type:
    """GenAI's class of this name for ``isinstance``, where a program has imported GenAI."""
    found = getattr(sys.modules.get("openvino_genai"), name, own)
    return found if isinstance(found, type) else own


@dataclass(frozen=True)
class EncodedResults(_Common):
    """For token inputs. ``tokens[i]`` are the generated ids, ``scores[i]`` the sum of their log-probabilities (0.0 unless
    ``logprobs`` is set), ``finish_reasons[i]`` one of ``stop``, ``length``, ``cancelled``."""

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
    """For a list of strings or a chat history: the same with ``texts``; ``tokens`` are there as well."""

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
        text = cls(results.texts[0])
        text.texts, text.tokens, text.scores = results.texts, results.tokens, results.scores
        text.finish_reasons, text.perf_metrics = results.finish_reasons, results.perf_metrics
        return text
