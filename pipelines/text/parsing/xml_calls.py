"""Calls with a tag per parameter: ``<function=get_weather><parameter=city>Berlin</parameter></function>``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from staticllm.pipelines.generation.structured.plain_text import is_plain
from staticllm.pipelines.generation.structured.schemas.facts import ANY, InexpressibleError, SchemaFacts
from staticllm.pipelines.text.parsing.json_text import take_json
from staticllm.pipelines.text.parsing.output import Output
from staticllm.pipelines.text.parsing.source import MalformedError, Source, Steps

_LITERALS = {"True": "true", "False": "false", "None": "null"}
Types = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each parameter, by its name."""


def take_xml_call(source: Source, output: Output, functions: Mapping[str, Types]) -> Steps[None]:
    """Take what follows ``<function=``: a name, parameters and ``</function>``.

    ``functions`` holds the schemas of the parameters. Values of type string are written as they come; others when they are
    complete: as they are if they are JSON, else as a string.

    Raises:
        MalformedError: it is no call.
    """
    name = (yield from source.word(">")).strip()
    if not name:
        raise MalformedError("a call without a name")
    source.take()
    output.begin_call(name)
    types, seen, before = functions.get(name, {}), set[str](), "{"
    while True:
        yield from source.skip_space()
        if (yield from source.skip("</function>")):
            break
        yield from source.expect("<parameter=")
        key = (yield from source.word(">")).strip()
        source.take()
        if not key or key in seen:
            raise MalformedError(f"the parameter {key!r} is empty or comes twice")
        seen.add(key)
        output.arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
        before = ", "
        yield from take_parameter_value(source, output, types.get(key, {}), "</parameter>", has_line_breaks=True)
    output.arguments("}" if seen else "{}")
    output.end_call()
    source.mark()


def take_parameter_value(
    source: Source, output: Output, schema: Mapping[str, Any], end: str, *, has_line_breaks: bool = False
) -> Steps[None]:
    """Take a value and the tag ``end`` behind it, and write it as JSON.

    Values of type string are written as they come; others when they are complete: as they are if they are JSON, else as a
    string, except Python's literals where the schema has booleans or null, and no strings. ``has_line_breaks``: one line break
    at each end is layout. In a constrained answer, the strings in a JSON value may contain ``end``.

    Raises:
        MalformedError: the end is missing.
    """
    push = _Trimmed().push if has_line_breaks else str
    if schema.get("type") == "string" and not (output.is_constrained and not is_plain(schema)):
        output.arguments('"')
        found = yield from source.text_until((end,), lambda text: output.arguments(_escaped(push(text))), False)
        output.arguments('"' if found else "")
    elif output.is_constrained and (yield from source.skip_space()) in ("{", "[", '"'):
        chars: list[str] = []
        yield from take_json(source, chars.append)
        output.arguments(value_as_json("".join(chars)))
        yield from source.skip_space()
        found = end if (yield from source.skip(end)) else ""
    else:
        pieces: list[str] = []
        found = yield from source.text_until((end,), lambda text: pieces.append(push(text)))
        output.arguments(_typed_json("".join(pieces), schema) if found else "")
    if not found:
        raise MalformedError("a parameter without an end")


class _Trimmed:
    """Leaves out the line breaks that stand between a value and its tags."""

    def __init__(self) -> None:
        self._is_first, self._held = True, ""

    def push(self, text: str) -> str:
        """Return the text that is certainly part of the value."""
        text = self._held + text
        if self._is_first and text:
            text, self._is_first = text.removeprefix("\n"), False
        kept = text.removesuffix("\n")
        self._held = text[len(kept) :]
        return kept


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _typed_json(text: str, schema: Mapping[str, Any]) -> str:
    """Return the JSON text of a value, whose type is not a string, where the schema says how to read Python's literals."""
    literal = _LITERALS.get(text.strip())
    if literal is not None:
        try:
            types = SchemaFacts(schema).atoms(schema)
        except (InexpressibleError, TypeError):  # a malformed schema
            types = ANY
        if "string" not in types and ("null" if literal == "null" else "boolean") in types:
            return literal
    return value_as_json(text)


def value_as_json(text: str) -> str:
    """Return the JSON text of a value whose type is not a string: itself if it is JSON, else a string of it."""
    try:
        return json.dumps(json.loads(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)


def take_json_function(source: Source, output: Output) -> Steps[None]:
    """Take what follows ``<function=`` where the arguments are JSON: ``name>{…}</function>``.

    Raises:
        MalformedError: it is no call.
    """
    name = (yield from source.word(">")).strip()
    if not name:
        raise MalformedError("a call without a name")
    source.take()
    output.begin_call(name)
    if (yield from source.skip_space()) != "{":
        raise MalformedError("arguments that are no object")
    yield from take_json(source, output.arguments)
    yield from source.skip_space()
    yield from source.expect("</function>")
    output.end_call()
    source.mark()
