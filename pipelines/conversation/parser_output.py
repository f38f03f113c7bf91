"""What the readers of an answer's parts write to: the events that are certain, with layout left out."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Collection
from typing import Literal

from staticllm.events import ArgumentsDelta, CallBegin, CallBroken, CallEnd, ContentDelta, Event, ReasoningDelta, merged

from .text_stream import MalformedError

ExpectedCalls = Literal["auto", "none", "required"]
"""Whether an answer may have calls, is read as if it had none, or must be a call, to which a grammar constrains it."""


_ID_CHARS = string.ascii_letters + string.digits


def new_call_id() -> str:
    """Return an id for a call, which no other call has: nine letters and digits, as some chat templates demand."""
    return "".join(secrets.choice(_ID_CHARS) for _ in range(9))


class _HeldSpace:
    """Whitespace at the end of a text, in pieces: a model may write much of it."""

    def __init__(self) -> None:
        self._pieces: list[str] = []

    def push(self, text: str) -> str:
        """Add a text, and return all up to its last character that is no whitespace; "" if it has none."""
        kept = text.rstrip()
        found = "".join([*self._pieces, kept]) if kept else ""
        if kept:
            self._pieces = []
        if len(kept) < len(text):
            self._pieces.append(text[len(kept) :])
        return found

    def take(self) -> str:
        """Return the whitespace, and hold none."""
        pieces = self._pieces
        self._pieces = []
        return "".join(pieces)


class Output:
    """The events since the last ``take_events``.

    A block is a call or reasoning with its markers. Whitespace directly before and after blocks is layout and left out; so is
    that at the ends of reasoning. ``names`` are the functions that may be called by a text without markers; ``has_content`` says
    whether any text for the user, except whitespace, was found, and ``is_constrained`` whether a grammar keeps the answer
    well-formed. With ``calls`` as ``none``, all calls are content. While ``keeps_cut_calls`` is set, a call that ends too early
    stays one, and nothing follows it.
    """

    def __init__(
        self, names: Collection[str], new_id: Callable[[], str] = new_call_id, calls: ExpectedCalls = "auto"
    ) -> None:
        self.names = frozenset(names)
        self.is_constrained = calls == "required"
        self._has_calls = calls != "none"
        self.keeps_cut_calls = False
        self._new_id = new_id
        self._events: list[Event] = []
        self._num_calls = 0
        self.has_content = False
        self._is_in_call = False
        self._space = _HeldSpace()  # at the end of the content, which is left out if a block follows
        self._drops_space = False  # whether the next content follows a block
        self._before_block = ("", False)
        self._reasoning_space = _HeldSpace()
        self._has_reasoning = False

    def take_events(self) -> list[Event]:
        events = self._events
        self._events = []
        return merged(events)

    def content(self, text: str) -> None:
        """Add text for the user."""
        if self.keeps_cut_calls and self._num_calls:
            return  # nothing but a part of the call's end
        if self._drops_space:
            text = text.lstrip()
        if not text:
            return
        self._drops_space = False
        if kept := self._space.push(text):
            self._events.append(ContentDelta(kept))
            self.has_content = True

    def verbatim(self, text: str) -> None:
        """Add text for the user as it stands, with the whitespace at its ends."""
        if text:
            self._events.append(ContentDelta(text))
            self.has_content = True

    def reasoning(self, text: str) -> None:
        text = text if self._has_reasoning else text.lstrip()
        if kept := self._reasoning_space.push(text):
            self._events.append(ReasoningDelta(kept))
            self._has_reasoning = True

    def open_block(self) -> None:
        self._before_block = (self._space.take(), self._drops_space)
        self._reasoning_space = _HeldSpace()
        self._has_reasoning = False

    def close_block(self) -> None:
        self._space.take()
        self._drops_space = True

    def begin_call(self, name: str) -> None:
        """Begin a call whose name is known.

        Raises:
            MalformedError: no calls are looked for.
        """
        if not self._has_calls:
            raise MalformedError("calls are content")
        self._events.append(CallBegin(self._num_calls, self._new_id(), name))
        self._is_in_call = True

    def begin_bare_call(self, name: str) -> None:
        """Begin a call that no marker announced.

        Raises:
            MalformedError: there is no such function, or no calls are looked for.
        """
        if self.names and name not in self.names:
            raise MalformedError(f"no function is called {name!r}")
        self.begin_call(name)

    def arguments(self, text: str) -> None:
        if text:
            self._events.append(ArgumentsDelta(self._num_calls, text))

    def end_call(self) -> None:
        """End the call, and begin a block for what follows."""
        self._events.append(CallEnd(self._num_calls))
        self._num_calls += 1
        self._is_in_call = False
        self._before_block = ("", True)

    def break_block(self, text: str) -> None:
        """End a block that is none: its ``text`` is content."""
        if self._is_in_call and self.keeps_cut_calls:
            self.end_call()
            self.close_block()
            return
        if self._is_in_call:
            self._events.append(CallBroken(self._num_calls))
            self._num_calls += 1
            self._is_in_call = False
        space, self._drops_space = self._before_block
        self._space.take()
        self._space.push(space)
        self.content(text)

    def finish(self) -> None:
        """End the message: whitespace at its end is part of it."""
        if space := self._space.take():
            self._events.append(ContentDelta(space))
