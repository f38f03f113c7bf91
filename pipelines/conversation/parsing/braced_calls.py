"""Calls in braces without quotes, with a marker on both sides of each string: ``call:weather{city:<|"|>Rome<|"|>,days:2}``."""

from __future__ import annotations

import json

from staticllm.pipelines.conversation.parsing.output import Output
from staticllm.pipelines.conversation.parsing.source import MalformedError, Source, Steps

MAX_DEPTH = 64


def take_braced_calls(source: Source, output: Output, quote: str) -> Steps[None]:
    """Take ``call:name{…}``, or several of them. ``quote`` is on both sides of strings. Values are written as JSON.

    Raises:
        MalformedError: it is none. The calls before the one that is malformed are written.
    """
    while True:
        yield from source.skip_space()
        yield from source.expect("call:")
        name = (yield from source.word("{")).strip()
        if not name:
            raise MalformedError("a call without a name")
        output.begin_call(name)
        yield from _take_object(source, output, quote, 0)
        output.end_call()
        source.mark()
        yield from source.skip_space()
        if not (yield from source.starts_with("call:")):
            return


def _take_object(source: Source, output: Output, quote: str, depth: int) -> Steps[None]:
    yield from source.expect("{")
    output.arguments("{")
    is_first = True
    while (yield from source.skip_space()) != "}":
        if not is_first:
            yield from source.expect(",")
            output.arguments(", ")
            yield from source.skip_space()
        is_first = False
        key = (yield from _take_string(source, quote)) if (yield from source.starts_with(quote)) else (
            yield from source.word(":,{}[]")
        )  # fmt: skip
        yield from source.expect(":")
        output.arguments(f"{json.dumps(key.strip(), ensure_ascii=False)}: ")
        yield from _take_value(source, output, quote, depth + 1)
    source.take()
    output.arguments("}")


def _take_value(source: Source, output: Output, quote: str, depth: int) -> Steps[None]:
    if depth > MAX_DEPTH:
        raise MalformedError(f"more than {MAX_DEPTH} levels")
    first = yield from source.skip_space()
    if (yield from source.starts_with(quote)):
        output.arguments(json.dumps((yield from _take_string(source, quote)), ensure_ascii=False))
    elif first == "{":
        yield from _take_object(source, output, quote, depth)
    elif first == "[":
        source.take()
        output.arguments("[")
        is_first = True
        while (yield from source.skip_space()) != "]":
            if not is_first:
                yield from source.expect(",")
                output.arguments(", ")
            is_first = False
            yield from _take_value(source, output, quote, depth + 1)
        source.take()
        output.arguments("]")
    else:
        word = (yield from source.word(",}]")).strip()
        try:
            json.loads(word, parse_constant=_refuse)
        except ValueError as error:
            raise MalformedError(f"{word!r} is no value") from error
        output.arguments(word)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _take_string(source: Source, quote: str) -> Steps[str]:
    yield from source.expect(quote)
    pieces: list[str] = []
    if not (yield from source.text_until([quote], pieces.append)):
        raise MalformedError("a string without an end")
    return "".join(pieces)
