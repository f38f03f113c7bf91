"""Calls in the syntax of Python: ``[get_weather(city="Berlin", days=2), get_time()]``."""

from __future__ import annotations

import ast
import json
from typing import Any

from staticllm.pipelines.conversation.parsing.output import Output
from staticllm.pipelines.conversation.parsing.source import MalformedError, Source, Steps

MAX_VALUE_CHARS = 1 << 16
_PAIRS = {"(": ")", "[": "]", "{": "}"}


def take_python_calls(source: Source, output: Output) -> Steps[None]:
    """Take a list of calls. Their arguments are written one by one, as JSON.

    Raises:
        MalformedError: it is none. The calls before the one that is malformed are written.
    """
    yield from source.skip_space()
    yield from source.expect("[")
    while True:
        yield from source.skip_space()
        yield from take_python_call(source, output)
        if (yield from source.skip_space()) == "]":
            source.take()
            return
        yield from source.expect(",")


def take_python_call(source: Source, output: Output) -> Steps[None]:
    """Take one call: a name, and keyword arguments in parentheses.

    Raises:
        MalformedError: it is none.
    """
    name = yield from _take_name(source, "(")
    output.begin_bare_call(name)
    before, seen = "{", set[str]()
    while (yield from source.skip_space()) != ")":
        key = yield from _take_name(source, "=")
        if key in seen:
            raise MalformedError(f"the argument {key!r} comes twice")
        seen.add(key)
        value = as_json((yield from _take_value(source)))
        output.arguments(f"{before}{json.dumps(key)}: {value}")
        before = ", "
        if (yield from source.peek()) == ",":
            source.take()
    source.take()
    output.arguments("}" if seen else "{}")
    output.end_call()
    source.mark()


def _take_name(source: Source, end: str) -> Steps[str]:
    """Take a name and the character ``end`` behind it."""
    name = (yield from source.word(end + "\"'[]{}),")).strip()
    if not all(part.isidentifier() for part in name.split(".")):
        raise MalformedError(f"{name!r} is no name")
    yield from source.expect(end)
    return name


def _take_value(source: Source) -> Steps[str]:
    """Take the text of a value; the comma or bracket after it is not taken."""
    chars: list[str] = []
    closing: list[str] = []
    quote = ""
    while True:
        char = yield from source.peek()
        if not char or len(chars) == MAX_VALUE_CHARS:
            raise MalformedError("a value without an end")
        if quote:
            if char == "\\":
                chars.append(char)
                source.take()
                if not (char := (yield from source.peek())):
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
        source.take()


def as_json(text: str) -> str:
    """Return the JSON text of a Python literal; JSON's own literals are understood as well.

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
