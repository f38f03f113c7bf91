"""Takes JSON character by character, and calls as JSON: objects with markers around them, or bare at an answer's beginning."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from staticllm.pipelines.conversation.events import Output
from staticllm.pipelines.conversation.source import WHITESPACE, MalformedError, Source, Steps

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
        """Check the next character."""
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
        check_word(self._word)
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
            self._expected = "key"
            self._string = ""
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
    """Take one JSON value, which may follow whitespace, and pass its text to ``write`` as it comes."""
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


def take_object(source: Source, write: Callable[[str], object]) -> Steps[None]:
    """Take a JSON object like ``take_json``."""
    if (yield from source.skip_space()) != "{":
        raise MalformedError("arguments that are no object")
    yield from take_json(source, write)


def take_value(source: Source) -> Steps[Any]:
    """Take one JSON value and return it."""
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
    check_word(word)
    return word


def check_word(word: str) -> None:
    """Check a number or a literal. Raises MalformedError: it is no JSON."""
    try:
        strict_json(word)
    except ValueError as error:
        raise MalformedError(f"{word!r} is no JSON") from error


def strict_json(text: str) -> Any:
    """Return the value of a JSON text. Raises ValueError: it is none; NaN and Infinity are none."""
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

    def __init__(self, source: Source, output: Output, is_bare: bool = False) -> None:
        self._source = source
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
        self._source.mark()

    def _object(self, is_inner: bool) -> Steps[None]:
        source = self._source
        yield from source.expect("{")
        if (yield from source.skip_space()) != '"':
            raise MalformedError("an object without keys")
        while True:
            yield from self._member(is_inner)
            after = yield from source.skip_space()
            if after == "}":
                source.take()
                return
            yield from source.expect(",")
            if (yield from source.skip_space()) != '"':
                raise MalformedError("a key is missing")

    def _member(self, is_inner: bool) -> Steps[None]:
        source = self._source
        key = yield from take_value(source)
        if self._is_bare and key not in CALL_KEYS:
            raise MalformedError("an ordinary object")
        yield from source.skip_space()
        yield from source.expect(":")
        first = yield from source.skip_space()
        if key in NAME_KEYS or (key == "function" and first == '"'):
            if first != '"' or self._name is not None:
                raise MalformedError("the name is no string, or comes twice")
            self._name = yield from take_value(source)
        elif key == "function" and first == "{" and not is_inner:
            yield from self._object(is_inner=True)
        elif key in ARGUMENT_KEYS:
            yield from self._arguments(first)
        else:
            yield from take_value(source)

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
            yield from take_json(self._source, write)
            return
        value = yield from take_value(self._source)
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


def take_call_objects(source: Source, output: Output, is_bare: bool = False) -> Steps[None]:
    """Take one call object, or a list of them; ``is_bare`` as for ``CallObject``."""
    if (yield from source.skip_space()) != "[":
        yield from CallObject(source, output, is_bare).take()
        return
    source.take()
    yield from source.items("]", lambda: CallObject(source, output, is_bare).take())


def take_bare_objects(source: Source, output: Output) -> Steps[None]:
    """Take a list of call objects, or objects that are separated by semicolons."""
    if (yield from source.skip_space()) == "[":
        yield from take_call_objects(source, output, is_bare=True)
        return
    yield from CallObject(source, output, is_bare=True).take()
    while (yield from source.skip_space()) == ";":
        source.take()
        yield from source.skip_space()
        yield from CallObject(source, output, is_bare=True).take()


def take_listed_calls(source: Source, output: Output) -> Steps[None]:
    """Take ``{"tool_calls": [...]}``, as tools are described to models whose template shows none. It may have a ``content``."""
    yield from source.skip_space()
    yield from source.expect("{")
    content = ""
    has_calls = False
    while True:
        yield from source.skip_space()
        key = yield from take_value(source)
        yield from source.skip_space()
        yield from source.expect(":")
        if key == "tool_calls" and not has_calls and (yield from source.skip_space()) == "[":
            yield from take_call_objects(source, output, is_bare=True)
            has_calls = True
        elif key == "content":
            content = str((yield from take_value(source)) or "")
        else:
            raise MalformedError("an ordinary object")
        if (yield from source.skip_space()) == "}":
            break
        yield from source.expect(",")
    if not has_calls:
        raise MalformedError("an object without calls")
    source.take()
    output.content(content)


def take_keyed_calls(source: Source, output: Output) -> Steps[None]:
    """Take a list of objects ``{"name": {…}}``, whose keys are the functions and whose values are the arguments."""
    yield from source.skip_space()
    if (yield from source.skip("[")):
        yield from source.items("]", lambda: _take_keyed_call(source, output))
    else:
        yield from _take_keyed_call(source, output)


def _take_keyed_call(source: Source, output: Output) -> Steps[None]:
    yield from source.expect("{")
    yield from source.skip_space()
    name = yield from take_value(source)
    if not isinstance(name, str) or not name:
        raise MalformedError("a call without a name")
    yield from source.skip_space()
    yield from source.expect(":")
    output.begin_bare_call(name)
    yield from take_object(source, output.arguments)
    yield from source.skip_space()
    yield from source.expect("}")
    output.end_call()
    source.mark()
