"""Calls with named arguments: Python's ``[weather(city="Rome"), now()]`` and ``call:weather{city:<|"|>Rome<|"|>,days:2}``."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from typing import Any

from .json_calls import check_word
from .parser_output import Output
from .text_stream import MalformedError, Steps, TextStream

FENCE = "```"
MAX_DEPTH = 64
MAX_VALUE_CHARS = 1 << 16
_PAIRS = {"(": ")", "[": "]", "{": "}"}


def take_python_calls(stream: TextStream, output: Output) -> Steps[None]:
    """Take a list of calls. Their arguments are written one by one, as JSON."""
    yield from stream.skip_space()
    yield from stream.expect("[")
    yield from stream.items("]", lambda: take_python_call(stream, output))


def take_fenced_calls(stream: TextStream, output: Output) -> Steps[None]:
    """Take a block of Python with one call after the other: ```` ```python ````, calls, ```` ``` ````."""
    yield from stream.skip_space()
    is_fenced = yield from stream.skip(FENCE)
    if is_fenced:
        yield from stream.skip("python")
    while True:
        yield from stream.skip_space()
        yield from take_python_call(stream, output)
        after = yield from stream.skip_space()
        if is_fenced and (yield from stream.skip_end(FENCE)):
            return
        if after in ("", "<") and not is_fenced:
            return
        if not after:
            raise MalformedError("a block without an end")


def take_python_call(stream: TextStream, output: Output) -> Steps[None]:
    """Take one call: a name, and keyword arguments in parentheses."""
    name = yield from _take_name(stream, "(")
    output.begin_bare_call(name)
    before = "{"
    seen = set[str]()
    while (yield from stream.skip_space()) != ")":
        key = yield from _take_name(stream, "=")
        if key in seen:
            raise MalformedError(f"the argument {key!r} comes twice")
        seen.add(key)
        value = as_json((yield from _take_value(stream)))
        output.arguments(f"{before}{json.dumps(key)}: {value}")
        before = ", "
        if (yield from stream.peek()) == ",":
            stream.take()
    stream.take()
    output.arguments("}" if seen else "{}")
    output.end_call()
    stream.mark()


def _take_name(stream: TextStream, end: str) -> Steps[str]:
    """Take a name and the character ``end`` behind it."""
    name = (yield from stream.word(end + "\"'[]{}),")).strip()
    if not all(part.isidentifier() for part in name.split(".")):
        raise MalformedError(f"{name!r} is no name")
    yield from stream.expect(end)
    return name


def _take_value(stream: TextStream) -> Steps[str]:
    """Take the text of a value; the comma or bracket after it is not taken."""
    chars: list[str] = []
    closing: list[str] = []
    quote = ""
    while True:
        char = yield from stream.peek()
        if not char or len(chars) == MAX_VALUE_CHARS:
            raise MalformedError("a value without an end")
        if quote:
            if char == "\\":
                chars.append(char)
                stream.take()
                if not (char := (yield from stream.peek())):
                    raise MalformedError("a value without an end")
            elif char == quote:
                quote = ""
        elif char in "\"'":
            quote = char
        elif char in _PAIRS:
            closing.append(_PAIRS[char])
        elif not closing and char in ",)":
            return "".join(chars)
        elif char in ")]}" and (not closing or closing.pop() != char):
            raise MalformedError(f"{char!r} here")
        chars.append(char)
        stream.take()


def as_json(text: str) -> str:
    """Return the JSON text of a literal of Python or JSON.

    Raises:
        MalformedError: it is neither, or has no JSON form.
    """
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        try:
            value = ast.literal_eval(text.strip())
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
            raise MalformedError("a value that is no literal") from error
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise MalformedError("a value without a JSON form") from error


def take_braced_calls(stream: TextStream, output: Output, quote: str) -> Steps[None]:
    """Take ``call:name{…}``, or several of them. ``quote`` is on both sides of strings. Values are written as JSON."""
    while True:
        yield from stream.skip_space()
        yield from stream.expect("call:")
        name = (yield from stream.word("{")).strip()
        if not name:
            raise MalformedError("a call without a name")
        output.begin_call(name)
        yield from _take_object(stream, output, quote, 0)
        output.end_call()
        stream.mark()
        yield from stream.skip_space()
        if not (yield from stream.starts_with("call:")):
            return


def _take_object(stream: TextStream, output: Output, quote: str, depth: int) -> Steps[None]:
    def take_member() -> Steps[None]:
        is_quoted = yield from stream.starts_with(quote)
        key = (yield from _take_string(stream, quote)) if is_quoted else (yield from stream.word(":,{}[]"))
        yield from stream.expect(":")
        output.arguments(f"{json.dumps(key.strip(), ensure_ascii=False)}: ")
        yield from _take_braced_value(stream, output, quote, depth + 1)

    yield from _take_items(stream, output, "{}", take_member)


def _take_items(stream: TextStream, output: Output, brackets: str, take: Callable[[], Steps[None]]) -> Steps[None]:
    """Take items between brackets with commas between them; there may be none. ``take`` takes one."""
    yield from stream.expect(brackets[0])
    output.arguments(brackets[0])
    before = ""
    while (yield from stream.skip_space()) != brackets[1]:
        if before:
            yield from stream.expect(",")
            output.arguments(before)
            yield from stream.skip_space()
        before = ", "
        yield from take()
    stream.take()
    output.arguments(brackets[1])


def _take_braced_value(stream: TextStream, output: Output, quote: str, depth: int) -> Steps[None]:
    if depth > MAX_DEPTH:
        raise MalformedError(f"more than {MAX_DEPTH} levels")
    first = yield from stream.skip_space()
    if (yield from stream.starts_with(quote)):
        output.arguments(json.dumps((yield from _take_string(stream, quote)), ensure_ascii=False))
    elif first == "{":
        yield from _take_object(stream, output, quote, depth)
    elif first == "[":
        yield from _take_items(stream, output, "[]", lambda: _take_braced_value(stream, output, quote, depth + 1))
    else:
        word = (yield from stream.word(",}]")).strip()
        check_word(word)
        output.arguments(word)


def _take_string(stream: TextStream, quote: str) -> Steps[str]:
    yield from stream.expect(quote)
    pieces: list[str] = []
    if not (yield from stream.text_until([quote], pieces.append)):
        raise MalformedError("a string without an end")
    return "".join(pieces)
