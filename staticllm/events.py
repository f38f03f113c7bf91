"""The events of an answer that is parsed while it is written, whose texts concatenate to the message."""

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
    found: list[Event] = []
    for event in events:
        match (found[-1] if found else None), event:
            case ContentDelta(text), ContentDelta(more):
                found[-1] = ContentDelta(text + more)
            case ReasoningDelta(text), ReasoningDelta(more):
                found[-1] = ReasoningDelta(text + more)
            case ArgumentsDelta(index, text), ArgumentsDelta(other, more) if index == other:
                found[-1] = ArgumentsDelta(index, text + more)
            case _:
                found.append(event)
    return found


def message_of(events: Iterable[Event]) -> AssistantMessage:
    """Return the message that all events of an answer make."""
    content: list[str] = []
    reasoning: list[str] = []
    begun: dict[int, CallBegin] = {}
    arguments: dict[int, list[str]] = {}
    for event in events:
        match event:
            case ContentDelta(text):
                content.append(text)
            case ReasoningDelta(text):
                reasoning.append(text)
            case CallBegin(index):
                begun[index] = event
                arguments[index] = []
            case ArgumentsDelta(index, text):
                arguments[index].append(text)
            case CallBroken(index):
                del begun[index]
    calls = tuple(ToolCall(call.id, call.name, "".join(arguments[index])) for index, call in begun.items())
    return AssistantMessage("".join(content), "".join(reasoning), calls)


def events_of(message: AssistantMessage) -> list[Event]:
    """Return events that make a message, its reasoning first and its calls last."""
    found: list[Event] = [
        *([ReasoningDelta(message.reasoning_content)] if message.reasoning_content else []),
        *([ContentDelta(message.content)] if message.content else []),
    ]
    for index, call in enumerate(message.tool_calls):
        found += [CallBegin(index, call.id, call.name), ArgumentsDelta(index, call.arguments), CallEnd(index)]
    return found
