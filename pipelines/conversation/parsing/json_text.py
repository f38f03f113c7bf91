"""Takes a JSON value from a source, character by character, and checks it on the way."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from staticllm.pipelines.conversation.parsing.source import WHITESPACE, MalformedError, Source, Steps

MAX_DEPTH = 64
_ESCAPES = '"\\/bfnrtu'
_HEX = "0123456789abcdefABCDEF"


class _Container:
    """A checker of the characters of an object, an array or a string, one ``push`` per character.

    ``_expected`` says what may come next: a ``value``, a ``first`` value or closing bracket, a ``key``, a ``first_key`` or
    closing brace, a ``colon``, or what comes ``after`` a value.
    """

    def __init__(self) -> None:
        self._stack: list[str] = []
        self._expected = "value"
        self._string: str | None = None  # of a string that is not complete: "", a backslash, or the digits of \u
        self._word = ""  # a number or a literal that is not complete
        self.is_done = False

    def push(self, char: str) -> None:
        """Check the next character.

        Raises:
            MalformedError: it cannot come here.
        """
        if self._string is not None:
            self._push_string(char)
        elif self._word and char not in ",]}" + WHITESPACE:
            self._word += char
        else:
            if self._word:
                self._end_word()
            if char not in WHITESPACE:
                self._push_token(char)

    def _push_string(self, char: str) -> None:
        state = self._string or ""
        if state == "\\":
            if char not in _ESCAPES:
                raise MalformedError(f"the escape \\{char}")
            self._string = "\\u" if char == "u" else ""
        elif state.startswith("\\u"):
            if char not in _HEX:
                raise MalformedError("a \\u without four digits")
            self._string = "" if len(state) == len("\\u000") else state + char
        elif char == "\\":
            self._string = "\\"
        elif char == '"':
            self._string = None
            self._end_value()
        elif char < " ":
            raise MalformedError("a control character in a string")

    def _end_word(self) -> None:
        try:
            json.loads(self._word, parse_constant=_refuse)
        except ValueError as error:
            raise MalformedError(f"{self._word!r} is no JSON") from error
        self._word = ""
        self._end_value()

    def _push_token(self, char: str) -> None:
        expected = self._expected
        if char in "}]":
            is_closing = expected in ("after", "first_key" if char == "}" else "first")
            if not is_closing or not self._stack or self._stack.pop() != char:
                raise MalformedError(f"{char!r} here")
            self._end_value()
        elif expected == "colon" and char == ":":
            self._expected = "value"
        elif expected == "after" and char == "," and self._stack:
            self._expected = "key" if self._stack[-1] == "}" else "value"
        elif expected in ("key", "first_key") and char == '"':
            self._expected, self._string = "key", ""
        elif expected in ("value", "first"):
            self._begin_value(char)
        else:
            raise MalformedError(f"{char!r} here")

    def _begin_value(self, char: str) -> None:
        self._expected = "value"
        if char == '"':
            self._string = ""
        elif char in "{[":
            if len(self._stack) == MAX_DEPTH:
                raise MalformedError(f"more than {MAX_DEPTH} levels")
            self._stack.append("}" if char == "{" else "]")
            self._expected = "first_key" if char == "{" else "first"
        else:
            self._word = char

    def _end_value(self) -> None:
        self._expected = "colon" if self._expected == "key" else "after"
        self.is_done = not self._stack and self._expected == "after"


def take_json(source: Source, write: Callable[[str], object]) -> Steps[None]:
    """Take one JSON value, which may follow whitespace, and pass its text to ``write`` as it comes.

    Raises:
        MalformedError: it is none, or the text ends before it does.
    """
    first = yield from source.skip_space()
    if not first or first not in '{["':
        write((yield from _take_word(source)))
        return
    container = _Container()
    while not container.is_done:
        char = yield from source.peek()
        if not char:
            raise MalformedError("the text ends in a JSON value")
        container.push(char)
        source.take()
        write(char)


def take_value(source: Source) -> Steps[Any]:
    """Take one JSON value and return it.

    Raises:
        MalformedError: it is none, or the text ends before it does.
    """
    chars: list[str] = []
    yield from take_json(source, chars.append)
    return json.loads("".join(chars))


def _take_word(source: Source) -> Steps[str]:
    """Take a number or a literal, which ends before a comma, a bracket, whitespace or the end of the text."""
    chars: list[str] = []
    while (char := (yield from source.peek())) and char not in ",]}" + WHITESPACE and len(chars) < 64:
        chars.append(char)
        source.take()
    word = "".join(chars)
    try:
        json.loads(word, parse_constant=_refuse)
    except ValueError as error:
        raise MalformedError(f"{word!r} is no JSON") from error
    return word


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
