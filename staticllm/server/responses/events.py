"""The events of a streamed answer: items are added, grow piece by piece, and are done."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal

from staticllm.events import ArgumentsDelta, CallBegin, CallBroken, CallEnd, ContentDelta, ReasoningDelta, merged
from staticllm.pipelines.text.output_processor import TextDelta
from staticllm.server.answers.results import SpelledToken, Speller
from staticllm.server.responses.items import Item, call_item, message_item, new_id, reasoning_item

StreamEvent = dict[str, Any]
Kind = Literal["message", "reasoning", "call"]


@dataclass
class _Open:
    """The item that grows now. ``call_id`` and ``name`` are those of a call."""

    kind: Kind
    id: str
    index: int
    text: str = ""
    call_id: str = ""
    name: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    def item(self, status: str) -> Item:
        if self.kind == "message":
            return message_item(self.id, self.text, status, self.logprobs)
        if self.kind == "reasoning":
            return reasoning_item(self.id, self.text, status)
        return call_item(self.id, self.call_id, self.name, self.text, status)

    def empty(self) -> Item:
        """Return the item as it is added: without its text, and without parts."""
        item = self.item("in_progress")
        return {**item, "content": []} if "content" in item else item

    @property
    def part(self) -> dict[str, Any]:
        """The only part of a message or of reasoning, with the text so far."""
        part: dict[str, Any] = self.item("")["content"][0]
        return part


class EventMaker:
    """Makes the events of one answer from the events of its parser. ``items`` are those that are done.

    Blank text between two items is no item. ``speller`` is None without log-probabilities, which texts have, but no other items.
    """

    def __init__(self, speller: Speller | None = None) -> None:
        self._speller = speller
        self._tokens: list[SpelledToken] = []  # that had no text yet
        self._unspelled = ""  # text of the open message whose tokens are held back: they may begin a stop string
        self._has_tokens = False  # whether the tokens of all text are there
        self.items: list[Item] = []
        self._open: _Open | None = None
        self._blank = ""
        self._num_added = 0

    def of(self, delta: TextDelta) -> Iterator[StreamEvent]:
        if self._speller is not None:
            self._tokens += self._speller.spell(delta)
            self._has_tokens = bool(delta.tokens) or delta.cut is not None
        for event in merged(delta.events):
            if isinstance(event, ContentDelta):
                yield from self._text("message", event.text)
            elif isinstance(event, ReasoningDelta):
                yield from self._text("reasoning", event.text)
            elif isinstance(event, CallBegin):
                yield from self._begin("call", event.id, event.name)
            elif isinstance(event, ArgumentsDelta):
                yield self._grow(event.text)
            elif isinstance(event, (CallEnd, CallBroken)):
                yield from self.close("completed" if isinstance(event, CallEnd) else "incomplete")

    def end(self, status: str) -> Iterator[StreamEvent]:
        """Yield the last events of items: the open one is done, and an answer without any item is an empty text."""
        if self._open is None and not self.items:
            yield from self._begin("message")
            if self._blank:
                yield self._grow(self._blank)
        yield from self.close(status)

    def _text(self, kind: Kind, text: str) -> Iterator[StreamEvent]:
        if self._open is None or self._open.kind != kind:
            if not text.strip():
                self._blank += text
                return
            yield from self._begin(kind)
            text = self._blank + text
            self._blank = ""
        yield self._grow(text)

    def _begin(self, kind: Kind, call_id: str = "", name: str = "") -> Iterator[StreamEvent]:
        yield from self.close("completed")
        prefix = {"message": "msg", "reasoning": "rs", "call": "fc"}[kind]
        opened = _Open(kind, new_id(prefix), self._num_added, "", call_id, name)
        self._open = opened
        self._num_added += 1
        yield {"type": "response.output_item.added", "output_index": opened.index, "item": opened.empty()}
        if kind != "call":
            yield {"type": "response.content_part.added", **self._place(opened), "part": opened.part}

    def _grow(self, text: str) -> StreamEvent:
        opened = self._open
        assert opened is not None, "no item is open"
        opened.text += text
        event: StreamEvent = {"type": f"response.{_NAMES[opened.kind]}.delta", **self._place(opened), "delta": text}
        if opened.kind != "message":  # the tokens of a call that turns out to be none are those of a text
            return event
        self._unspelled += text if self._speller is not None else ""
        return {**event, "logprobs": self._taken_logprobs(opened) if self._has_tokens else []}

    def _taken_logprobs(self, opened: _Open) -> list[dict[str, Any]]:
        """Return the log-probabilities of the text that has none yet, as those of the open message."""
        first, end = _place_of(self._unspelled, self._tokens)
        logprobs = [token.entry() for token in self._tokens[first:end]]
        self._tokens = self._tokens[end:]
        self._unspelled = ""
        opened.logprobs += logprobs
        return logprobs

    def close(self, status: str) -> Iterator[StreamEvent]:
        """Yield the events that end the open item, if there is one."""
        opened = self._open
        if opened is not None and self._unspelled:  # its last tokens came after its text
            self._has_tokens = True
            yield self._grow("")
        self._open = None
        if opened is None:
            return
        done: StreamEvent = {"type": f"response.{_NAMES[opened.kind]}.done", **self._place(opened)}
        if opened.kind == "call":
            yield {**done, "name": opened.name, "arguments": opened.text}
        else:
            yield {**done, "text": opened.text, **({"logprobs": opened.logprobs} if opened.kind == "message" else {})}
            yield {"type": "response.content_part.done", **self._place(opened), "part": opened.part}
        item = opened.item(status)
        if (
            opened.kind != "call" or status == "completed"
        ):  # a call that turned out to be none is not part of the answer
            self.items.append(item)
        yield {"type": "response.output_item.done", "output_index": opened.index, "item": item}

    def _place(self, opened: _Open) -> StreamEvent:
        place: StreamEvent = {"item_id": opened.id, "output_index": opened.index}
        return place if opened.kind == "call" else {**place, "content_index": 0}


def _place_of(text: str, tokens: Sequence[SpelledToken]) -> tuple[int, int]:
    """Return the first of the tokens that make a text, and the place after the last; those around it are markers and layout.

    A text that stands there several times is the last one: what a call is written with may be in its arguments as well.
    """
    spelled = [token.bytes or b"" for token in tokens]
    wanted = text.encode()
    end = b"".join(spelled).rfind(wanted) + len(wanted)
    if end < len(wanted):  # a token has a part of it only, such as one with a space that begins the answer
        end = sum(map(len, spelled))
    begin = end - len(wanted)
    ends = [*accumulate(map(len, spelled))]
    first = bisect_right(ends, max(0, begin))
    return min(first, len(tokens)), min(bisect_left(ends, end) + 1, len(tokens))


_NAMES = {"message": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}
