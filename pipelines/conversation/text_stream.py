"""Text that arrives in pieces. Parsers are generators that wait for the next piece wherever they need it.

A parser decides by characters, never by pieces, so that its events do not depend on how the text was split.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A computation that yields where it needs more text, and returns a ``T``."""
WHITESPACE = " \t\r\n"


class MalformedError(Exception):
    """The text is not what a parser expects here. The character that shows it is not taken.

    Every ``take_…`` raises it; the calls before the one that is malformed are written.
    """


class TextStream:
    """The text so far, and a place in it up to which it was taken."""

    def __init__(self) -> None:
        self._text = ""
        self._place = 0
        self._since_mark: list[str] | None = None  # pieces that were taken since the mark; None without one
        self._mark = 0  # the place up to which these pieces are in ``_since_mark``
        self._is_over = False

    def feed(self, text: str) -> None:
        if self._since_mark is not None:
            self._since_mark.append(self._text[self._mark : self._place])
        self._text = self._text[self._place :] + text
        self._place = 0
        self._mark = 0

    def close(self) -> None:
        self._is_over = True

    @property
    def is_over(self) -> bool:
        return self._is_over

    def take_all(self) -> str:
        """Take and return the text that is there."""
        text = self._text[self._place :]
        self._place = len(self._text)
        return text

    def put_back(self, text: str) -> None:
        """Put text that was taken before what comes next."""
        self._text = text + self._text[self._place :]
        self._place = 0
        self._mark = 0

    def mark(self, num_before: int = 0) -> None:
        """Remember the place ``num_before`` characters before this one, for ``since_mark``."""
        self._mark = self._place - num_before
        self._since_mark = []

    def since_mark(self) -> str:
        """Return the text that was taken since ``mark``, and forget the mark."""
        pieces = self._since_mark or []
        self._since_mark = None
        return "".join([*pieces, self._text[self._mark : self._place]])

    def peek(self) -> Steps[str]:
        """Return the next character without taking it; "" at the end."""
        while self._place == len(self._text):
            if self._is_over:
                return ""
            yield
        return self._text[self._place]

    def take(self, count: int = 1) -> None:
        """Take characters that were peeked at; a negative ``count`` puts the last ones back."""
        self._place += count

    def skip_space(self) -> Steps[str]:
        """Take whitespace, and return the next character without taking it; "" at the end."""
        while (char := (yield from self.peek())) and char in WHITESPACE:
            self._place += 1
        return char

    def starts_with(self, literal: str) -> Steps[bool]:
        """Return whether ``literal`` comes next, without taking it."""
        while True:
            rest = self._text[self._place : self._place + len(literal)]
            if rest == literal:
                return True
            if self._is_over or not literal.startswith(rest):
                return False
            yield

    def skip(self, literal: str) -> Steps[bool]:
        """Take ``literal`` if it comes next, and return whether it does."""
        if not (yield from self.starts_with(literal)):
            return False
        self._place += len(literal)
        return True

    def skip_end(self, literal: str) -> Steps[bool]:
        """Take ``literal``, which closes something, if it comes next, or the part of it with which the text is cut off.

        Return whether either does: a limit of tokens or a stop string may fall into it, and what it closes is complete.
        """
        if (yield from self.skip(literal)):
            return True
        rest = self._text[self._place :]
        is_cut = self._is_over and bool(rest) and literal.startswith(rest)
        self._place += len(rest) if is_cut else 0
        return is_cut

    def expect(self, literal: str) -> Steps[None]:
        """Take ``literal``.

        Raises:
            MalformedError: something else comes next.
        """
        if not (yield from self.skip(literal)):
            raise MalformedError(f"{literal!r} is missing")

    def items(self, end: str, take: Callable[[], Steps[None]]) -> Steps[None]:
        """Take items with commas between them, and ``end``. ``take`` takes one.

        Raises:
            MalformedError: something else comes.
        """
        while True:
            yield from self.skip_space()
            yield from take()
            if (yield from self.skip_space()) == end:
                self._place += 1
                return
            yield from self.expect(",")

    def word(self, ends: str, most: int = 256) -> Steps[str]:
        """Take and return the characters before one of ``ends``, which is not taken.

        Raises:
            MalformedError: the text ends before, or the word has a line break (unless that is an end) or more than ``most``
                characters.
        """
        chars: list[str] = []
        while (char := (yield from self.peek())) not in ends or not char:
            if not char or char in "\r\n" or len(chars) == most:
                raise MalformedError("a name without an end")
            chars.append(char)
            self._place += 1
        return "".join(chars)

    def text_until(
        self, markers: Sequence[str], write: Callable[[str], object], takes_cut_marker: bool = True
    ) -> Steps[str]:
        """Pass the text before the first of ``markers`` to ``write``. Take that marker and return it; "" at the end.

        No marker may contain another one. What may be the beginning of a marker at the end of the text is text too, or it is left
        there without ``takes_cut_marker``.
        """
        while True:
            rest = self._text[self._place :]
            found = [(place, marker) for marker in markers if (place := rest.find(marker)) >= 0]
            if found:
                place, marker = min(found)
                self._place += place + len(marker)
                write(rest[:place])
                return marker
            count = len(rest) - (0 if self._is_over and takes_cut_marker else num_held(rest, markers))
            self._place += count
            write(rest[:count])
            if self._is_over:
                return ""
            yield


def num_held(text: str, markers: Sequence[str]) -> int:
    """Return how many characters at the end of ``text`` may begin one of ``markers``."""
    for count in range(min(len(text), max(map(len, markers), default=1) - 1), 0, -1):
        if any(len(marker) > count and marker.startswith(text[-count:]) for marker in markers):
            return count
    return 0
