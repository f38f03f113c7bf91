"""Takes JSON character by character, and calls as JSON: objects with markers around them, or bare at an answer's beginning."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from staticllm.events import message_of
from staticllm.results import ToolCall

from ..grammars.schema_facts import fits
from .parser_output import Output
from .text_stream import WHITESPACE, MalformedError, Steps, TextStream

MAX_DEPTH = 64
MAX_WORD_CHARS = 64
"""The most characters of a number or a literal that is no part of a container."""
_ESCAPES = '"\\/bfnrtu'
_HEX = "0123456789abcdefABCDEF"


def take_json(stream: TextStream, write: Callable[[str], object]) -> Steps[None]:
    """Take one JSON value, which may follow whitespace, and pass its text to ``write`` as it comes.

    Raises:
        MalformedError: it is none; so with all functions that take something.
    """
    yield from stream.skip_space()
    yield from _take_any(stream, write, 0)


def _take_any(stream: TextStream, write: Callable[[str], object], level: int) -> Steps[None]:
    """Take a value within ``level`` others."""
    first = yield from stream.peek()
    if first and first in "{[":
        if level == MAX_DEPTH:
            raise MalformedError(f"more than {MAX_DEPTH} levels")
        yield from _take_container(stream, write, level)
    elif first == '"':
        yield from _take_string(stream, write)
    else:
        yield from _take_word(stream, write, sys.maxsize if level else MAX_WORD_CHARS)


def _take_container(stream: TextStream, write: Callable[[str], object], level: int) -> Steps[None]:
    is_object = (yield from _take_one(stream, write, "{[")) == "{"
    end = "}" if is_object else "]"
    after = yield from _take_space(stream, write)
    while after != end:
        if is_object:
            yield from _take_string(stream, write)
            yield from _take_space(stream, write)
            yield from _take_one(stream, write, ":")
            yield from _take_space(stream, write)
        yield from _take_any(stream, write, level + 1)
        if (after := (yield from _take_space(stream, write))) != end:
            yield from _take_one(stream, write, ",")
            yield from _take_space(stream, write)
    yield from _take_one(stream, write, end)


def _take_string(stream: TextStream, write: Callable[[str], object]) -> Steps[None]:
    yield from _take_one(stream, write, '"')
    while (char := (yield from stream.peek())) != '"':
        if not char or char < " ":
            raise MalformedError("a control character in a string, or no end of it")
        stream.take()
        write(char)
        if char == "\\" and (yield from _take_one(stream, write, _ESCAPES)) == "u":
            for _ in range(4):
                yield from _take_one(stream, write, _HEX)
    yield from _take_one(stream, write, '"')


def _take_one(stream: TextStream, write: Callable[[str], object], possible: str) -> Steps[str]:
    """Take and return the next character.

    Raises:
        MalformedError: it is none of those that are possible.
    """
    char = yield from stream.peek()
    if not char or char not in possible:
        raise MalformedError(f"{char!r} here")
    stream.take()
    write(char)
    return char


def _take_space(stream: TextStream, write: Callable[[str], object]) -> Steps[str]:
    """Take whitespace, and return the next character without taking it; "" at the end."""
    while (char := (yield from stream.peek())) and char in WHITESPACE:
        stream.take()
        write(char)
    return char


def take_object(stream: TextStream, write: Callable[[str], object]) -> Steps[None]:
    """Take a JSON object like ``take_json``."""
    if (yield from stream.skip_space()) != "{":
        raise MalformedError("arguments that are no object")
    yield from take_json(stream, write)


def take_value(stream: TextStream) -> Steps[Any]:
    chars: list[str] = []
    yield from take_json(stream, chars.append)
    return json.loads("".join(chars))


def take_key(stream: TextStream) -> Steps[str]:
    """Take the key of a member and the colon behind it, and return the key."""
    if (yield from stream.skip_space()) != '"':
        raise MalformedError("a key is missing")
    key = yield from take_value(stream)
    yield from stream.skip_space()
    yield from stream.expect(":")
    return str(key)


def _take_word(stream: TextStream, write: Callable[[str], object], most: int) -> Steps[None]:
    """Take a number or a literal, which ends before a comma, a bracket, whitespace or the end of the text."""
    chars: list[str] = []
    while (char := (yield from stream.peek())) and char not in ",]}" + WHITESPACE and len(chars) < most:
        chars.append(char)
        stream.take()
        write(char)
    check_word("".join(chars))


def check_word(word: str) -> None:
    """Check a number or a literal.

    Raises:
        MalformedError: it is no JSON.
    """
    try:
        strict_json(word)
    except ValueError as error:
        raise MalformedError(f"{word!r} is no JSON") from error


def strict_json(text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is none; NaN and Infinity are none.
    """
    return json.loads(text, parse_constant=_refuse)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


ARGUMENT_KEYS = ("arguments", "parameters")
NAME_KEYS = ("name", "tool_name")
CALL_KEYS = (*ARGUMENT_KEYS, *NAME_KEYS, "function", "type", "id")


class CallObject:
    """One call object, whose keys may come in any order. Arguments are written as they come once the name is known.

    ``is_bare``: the text may also be an ordinary JSON object, so the call begins only with arguments for a known function.
    """

    def __init__(self, stream: TextStream, output: Output, is_bare: bool = False) -> None:
        self._stream = stream
        self._output = output
        self._is_bare = is_bare
        self._name: str | None = None
        self._waiting: list[str] | None = None  # arguments that came before the name
        self._has_begun = False

    def take(self) -> Steps[None]:
        """Take the object, and write the call."""
        yield from self._object(is_inner=False)
        if not self._has_begun:
            if self._name is None or (self._waiting is None and self._is_bare):
                raise MalformedError("an object without a name or arguments")
            self._begin()
            self._output.arguments("{}" if self._waiting is None else "".join(self._waiting))
        self._output.end_call()
        self._stream.mark()

    def _object(self, is_inner: bool) -> Steps[None]:
        yield from self._stream.expect("{")
        yield from self._stream.items("}", lambda: self._member(is_inner))

    def _member(self, is_inner: bool) -> Steps[None]:
        stream = self._stream
        key = yield from take_key(stream)
        if self._is_bare and key not in CALL_KEYS:
            raise MalformedError("an ordinary object")
        first = yield from stream.skip_space()
        if key in NAME_KEYS or (key == "function" and first == '"'):
            if first != '"' or self._name is not None:
                raise MalformedError("the name is no string, or comes twice")
            self._name = yield from take_value(stream)
        elif key == "function" and first == "{" and not is_inner:
            yield from self._object(is_inner=True)
        elif key in ARGUMENT_KEYS:
            yield from self._arguments(first)
        else:
            yield from take_value(stream)

    def _arguments(self, first: str) -> Steps[None]:
        if self._waiting is not None or self._has_begun:
            raise MalformedError("arguments come twice")
        if first == "{":
            write: Callable[[str], object] = self._output.arguments
            if self._name is None:
                self._waiting = []
                write = self._waiting.append
            else:
                self._begin()
            yield from take_json(self._stream, write)
            return
        value = yield from take_value(self._stream)
        text = "{}" if value is None else value
        if not isinstance(text, str) or not isinstance(_loaded(text), dict):
            raise MalformedError("arguments that are no object")
        self._waiting = [text]

    def _begin(self) -> None:
        name = self._name or ""
        if not name:
            raise MalformedError("an empty name")
        if self._is_bare:
            self._output.begin_bare_call(name)
        else:
            self._output.begin_call(name)
        self._has_begun = True


def _loaded(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def take_call_objects(stream: TextStream, output: Output, is_bare: bool = False) -> Steps[None]:
    """Take one call object, or a list of them; ``is_bare`` as for ``CallObject``."""
    if (yield from stream.skip_space()) != "[":
        yield from CallObject(stream, output, is_bare).take()
        return
    stream.take()
    yield from stream.items("]", lambda: CallObject(stream, output, is_bare).take())


class SoleCalls:
    """Reads a text that may be nothing but call objects for known functions, one or a list, with arguments that fit them.

    Small models write such a text in place of the format that their template shows.
    """

    def __init__(self, functions: Mapping[str, Mapping[str, Any]], new_id: Callable[[], str]) -> None:
        """``functions``: the JSON schemas of their parameters, by name."""
        self._functions = functions
        self._stream = TextStream()
        self._output = Output(functions, new_id)
        self._steps = self._all()
        self._is_over = False
        self.is_possible = True

    def push(self, text: str) -> None:
        """Add a piece. Once the text can be no calls any more, ``is_possible`` is false."""
        self._stream.feed(text)
        self._advance()

    def finish(self) -> tuple[ToolCall, ...]:
        """End the text, and return the calls that it is; none if it is something else."""
        self._stream.close()
        self._advance()
        calls = message_of(self._output.take_events()).tool_calls if self.is_possible else ()
        try:
            are_fitting = all(fits(strict_json(call.arguments), self._functions[call.name]) for call in calls)
        except (ValueError, RecursionError):  # nested too deeply
            return ()
        return calls if are_fitting else ()

    def _advance(self) -> None:
        try:
            self._is_over = self._is_over or next(self._steps, self) is self
        except MalformedError:
            self._is_over = True
            self.is_possible = False

    def _all(self) -> Steps[None]:
        yield from take_call_objects(self._stream, self._output, is_bare=True)
        if (yield from self._stream.skip_space()):
            raise MalformedError("something follows the calls")


def take_bare_objects(stream: TextStream, output: Output) -> Steps[None]:
    """Take a list of call objects, or objects that are separated by semicolons."""
    if (yield from stream.skip_space()) == "[":
        yield from take_call_objects(stream, output, is_bare=True)
        return
    yield from CallObject(stream, output, is_bare=True).take()
    while (yield from stream.skip_space()) == ";":
        stream.take()
        yield from stream.skip_space()
        yield from CallObject(stream, output, is_bare=True).take()


def take_listed_calls(stream: TextStream, output: Output) -> Steps[None]:
    """Take ``{"tool_calls": [...]}``, as tools are described to models whose template shows none. It may have a ``content``."""
    yield from stream.skip_space()
    yield from stream.expect("{")
    content: str | None = None
    has_calls = False

    def take_member() -> Steps[None]:
        nonlocal content, has_calls
        key = yield from take_key(stream)
        if key == "tool_calls" and not has_calls and (yield from stream.skip_space()) == "[":
            yield from take_call_objects(stream, output, is_bare=True)
            has_calls = True
        elif key == "content":
            content = yield from take_value(stream)
        else:
            raise MalformedError("an ordinary object")

    yield from stream.items("}", take_member)
    if not has_calls:
        raise MalformedError("an object without calls")
    output.content(str(content or ""))


def take_keyed_calls(stream: TextStream, output: Output) -> Steps[None]:
    """Take a list of objects ``{"name": {…}}``, whose keys are the functions and whose values are the arguments."""
    yield from stream.skip_space()
    if (yield from stream.skip("[")):
        yield from stream.items("]", lambda: _take_keyed_call(stream, output))
    else:
        yield from _take_keyed_call(stream, output)


def _take_keyed_call(stream: TextStream, output: Output) -> Steps[None]:
    yield from stream.expect("{")
    name = yield from take_key(stream)
    if not name:
        raise MalformedError("a call without a name")
    output.begin_bare_call(name)
    yield from take_object(stream, output.arguments)
    yield from stream.skip_space()
    yield from stream.expect("}")
    output.end_call()
    stream.mark()
