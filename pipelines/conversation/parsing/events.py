"""The events of a parser: pieces of content, of reasoning, and of calls. Their texts concatenate to the message."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from staticllm.results import AssistantMessage, ToolCall


@dataclass(frozen=True)
class ContentDelta:
    """A piece of the text that is meant for the user."""

    text: str


@dataclass(frozen=True)
class ReasoningDelta:
    """A piece of the model's reasoning."""

    text: str


@dataclass(frozen=True)
class CallBegin:
    """The beginning of call ``index`` of the message. Its name is complete, its arguments follow."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ArgumentsDelta:
    """A piece of the arguments of call ``index``, which are the text of a JSON object."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnd:
    """The end of call ``index``: its arguments are complete, or a required call was cut off."""

    index: int


@dataclass(frozen=True)
class CallBroken:
    """Call ``index`` turned out to be malformed or was cut off: it is none, and its whole text follows as content."""

    index: int


Event = ContentDelta | ReasoningDelta | CallBegin | ArgumentsDelta | CallEnd | CallBroken


def merged(events: Iterable[Event]) -> list[Event]:
    """Return the events with neighbouring pieces of the same text joined."""
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, ContentDelta) and isinstance(last, ContentDelta):
            joined[-1] = ContentDelta(last.text + event.text)
        elif isinstance(event, ReasoningDelta) and isinstance(last, ReasoningDelta):
            joined[-1] = ReasoningDelta(last.text + event.text)
        elif isinstance(event, ArgumentsDelta) and isinstance(last, ArgumentsDelta) and last.index == event.index:
            joined[-1] = ArgumentsDelta(event.index, last.text + event.text)
        else:
            joined.append(event)
    return joined


def message_of(events: Iterable[Event]) -> AssistantMessage:
    """Return the message that all events of an answer make."""
    content: list[str] = []
    reasoning: list[str] = []
    begun: dict[int, CallBegin] = {}
    arguments: dict[int, list[str]] = {}
    for event in events:
        if isinstance(event, ContentDelta):
            content.append(event.text)
        elif isinstance(event, ReasoningDelta):
            reasoning.append(event.text)
        elif isinstance(event, CallBegin):
            begun[event.index], arguments[event.index] = event, []
        elif isinstance(event, ArgumentsDelta):
            arguments[event.index].append(event.text)
        elif isinstance(event, CallBroken):
            del begun[event.index]
    calls = tuple(ToolCall(call.id, call.name, "".join(arguments[index])) for index, call in begun.items())
    return AssistantMessage("".join(content), "".join(reasoning), calls)
