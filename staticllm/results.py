"""The results of ``generate``, with the attributes of openvino_genai's results and with truthful finish reasons."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field, fields
from typing import Any

from staticllm.core import FinishReason
from staticllm.metrics import PerfMetrics, SpeculativePerfMetrics


@dataclass(frozen=True)
class ToolCall:
    """A function that the model wants to be called."""

    id: str
    name: str
    arguments: str
    """The text of a JSON object, as the model wrote it."""

    @property
    def parsed_arguments(self) -> dict[str, object]:
        """The arguments as a dict."""
        values: dict[str, object] = json.loads(self.arguments)
        return values

    def to_dict(self) -> dict[str, object]:
        """Return the call as OpenAI's API has it in a message of the assistant."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class AssistantMessage:
    """An answer in its parts: the text for the user, the reasoning, and the calls of tools."""

    content: str = ""
    reasoning_content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """Return the message as OpenAI's API has it, to be appended to a conversation; parts that are empty are left out.

        Beside calls, ``content`` is None if there is no text.
        """
        content = None if self.tool_calls and not self.content.strip() else self.content
        message: dict[str, object] = {"role": "assistant", "content": content}
        if self.reasoning_content:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = [call.to_dict() for call in self.tool_calls]
        return message


class _Common:
    """Attributes that all results share."""

    perf_metrics: PerfMetrics
    messages: list[AssistantMessage]

    @property
    def extended_perf_metrics(self) -> SpeculativePerfMetrics | None:
        """The timings of answers with drafts; also those of a draft model that proposed none. None otherwise."""
        metrics = self.perf_metrics
        return SpeculativePerfMetrics(metrics) if metrics.may_draft or metrics.get_num_draft_tokens() else None

    @property
    def tool_calls(self) -> list[list[ToolCall]]:
        """The calls of tools in each answer; empty unless the answers were parsed (``tools`` or ``parse_tools``)."""
        return [list(message.tool_calls) for message in self.messages]

    @property
    def reasoning_content(self) -> list[str]:
        """The reasoning in each answer; empty unless the answers were parsed."""
        return [message.reasoning_content for message in self.messages]


Parsed = list[dict[str, object]]
"""What ``parsers`` or an ``openvino_genai.TextParserStreamer`` made of each answer."""


def _class_in_genai(own: type) -> type:
    """Return GenAI's class of the same name if the program has imported GenAI, else our own class."""
    modules = (sys.modules.get(name) for name in ("openvino_genai", "openvino_genai.py_openvino_genai"))
    found = (getattr(module, own.__name__, None) for module in modules)  # the first has not all of the second's classes
    return next((each for each in found if isinstance(each, type)), own)


class LikeGenAI:
    """A dataclass that is an instance of GenAI's class of the same name if the program has imported GenAI."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _class_in_genai(type(self))

    def __reduce__(self) -> tuple[Any, ...]:
        own: Any = type(self)
        return own, tuple(getattr(self, item.name) for item in fields(own))


@dataclass(frozen=True)
class EncodedResults(LikeGenAI, _Common):
    """The answers to token ids, one entry per answer.

    ``tokens[i]`` holds the generated ids, ``scores[i]`` the sum of their log-probabilities (0.0 unless ``logprobs`` is set),
    and ``finish_reasons[i]`` is ``stop``, ``length``, ``cancelled``, ``deadline`` or ``tool_call``.
    """

    tokens: list[list[int]]
    scores: list[float]
    finish_reasons: list[FinishReason]
    perf_metrics: PerfMetrics = field(repr=False)
    messages: list[AssistantMessage] = field(default_factory=list, repr=False)
    parsed: Parsed = field(default_factory=list, repr=False)


@dataclass(frozen=True)
class DecodedResults(LikeGenAI, _Common):
    """The answers to a list of strings or to a chat history, or several answers to a ``str``.

    The fields are those of ``EncodedResults``, and these:
    """

    texts: list[str]
    """The answers; if they were parsed, all that the model wrote."""
    tokens: list[list[int]]
    scores: list[float]
    finish_reasons: list[FinishReason]
    perf_metrics: PerfMetrics = field(repr=False)
    messages: list[AssistantMessage] = field(default_factory=list, repr=False)
    """The parts of each answer that was parsed (``tools`` or ``parse_tools``)"""
    parsed: Parsed = field(default_factory=list, repr=False)
    """What ``parsers`` or an ``openvino_genai.TextParserStreamer`` made of each answer."""

    def __str__(self) -> str:
        """Return the text; of several ones a line each, after its score, as GenAI's results do."""
        if len(self.texts) == 1:
            return self.texts[0]
        return "\n".join(f"{score:f}: {text}" for score, text in zip(self.scores, self.texts, strict=True))


class GeneratedText(str, _Common):
    """The only answer to a plain ``str``: a ``str`` as openvino_genai returns, which also carries the results' attributes."""

    texts: list[str]
    tokens: list[list[int]]
    scores: list[float]
    finish_reasons: list[FinishReason]
    perf_metrics: PerfMetrics
    messages: list[AssistantMessage]
    parsed: Parsed

    @classmethod
    def of(cls, results: DecodedResults) -> GeneratedText:
        """Return the first text of ``results`` with all their attributes."""
        text = cls(results.texts[0])
        for item in fields(DecodedResults):
            setattr(text, item.name, getattr(results, item.name))
        return text
