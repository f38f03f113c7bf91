"""Values of parameters that are written without quotes, and the JSON that a schema makes of them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from ..grammars.parameters import is_plain
from ..grammars.schema_facts import (
    ANY,
    Atoms,
    InexpressibleError,
    SchemaFacts,
    atom_of,
    canonical,
)
from .json_calls import strict_json, take_json
from .named_arguments import as_json
from .parser_output import Output
from .text_stream import MalformedError, Steps, TextStream

Types = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each parameter, by its name."""
_LITERALS = {"true": "true", "false": "false", "none": "null", "null": "null"}
"""What models write for values that have no quotes, in lower case."""
_STRING = frozenset(["string"])


def take_parameter_value(
    stream: TextStream, output: Output, name: str, schema: Mapping[str, Any], end: str, *, has_line_breaks: bool = False
) -> Steps[bool]:
    """Take a value and the tag ``end`` behind it, write it as JSON behind ``name``, and return whether there is a value.

    Values that can only be strings are written as they come; others when they are complete (``typed_json``). An empty value is
    none where the schema has no strings. In a constrained answer, the strings in a JSON value may contain ``end``.

    Args:
        has_line_breaks: Whether one line break at each end is layout.
    """
    push = _Trimmed().push if has_line_breaks else str
    types = _types_of(schema)
    value: str | None
    if is_plain(schema) if output.is_constrained else (types == _STRING and _listed(schema) is None):
        output.arguments(f'{name}"')
        found = yield from stream.text_until((end,), lambda text: output.arguments(_escaped(push(text))), False)
        value = '"'
    elif output.is_constrained and (yield from stream.skip_space()) in ("{", "[", '"'):
        output.arguments(name)
        chars: list[str] = []
        yield from take_json(stream, chars.append)
        value = value_as_json("".join(chars))
        yield from stream.skip_space()
        found = end if (yield from stream.skip(end)) else ""
    else:
        text = _Collected(output, name)
        found = yield from stream.text_until((end,), lambda piece: text.add(push(piece)))
        value = typed_json(text.whole, types, schema)
        if value is not None and not text.has_begun:
            output.arguments(name)
    if not found:
        raise MalformedError("a parameter without an end")
    output.arguments(value or "")
    return value is not None


class _Collected:
    """The text of a value. The ``name`` before it is written as soon as there is a value."""

    def __init__(self, output: Output, name: str) -> None:
        self._output = output
        self._name = name
        self.whole = ""
        self.has_begun = False

    def add(self, piece: str) -> None:
        self.whole += piece
        if not self.has_begun and piece.strip():
            self._output.arguments(self._name)
            self.has_begun = True


def _types_of(schema: Mapping[str, Any]) -> Atoms:
    try:
        return SchemaFacts(schema).atoms(schema)
    except (InexpressibleError, TypeError):  # a malformed schema
        return ANY


class _Trimmed:
    """Leaves out the line breaks that stand between a value and its tags."""

    def __init__(self) -> None:
        self._is_first = True
        self._held = ""

    def push(self, text: str) -> str:
        """Return the text that is certainly part of the value."""
        text = self._held + text
        if self._is_first and text:
            text = text.removeprefix("\n")
            self._is_first = False
        kept = text.removesuffix("\n")
        self._held = text[len(kept) :]
        return kept


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def typed_json(text: str, types: Atoms, schema: Mapping[str, Any]) -> str | None:
    """Return the JSON text of a value that was written without quotes, as the schema wants it; None for an empty one.

    The first of these counts that has one of the schema's ``types`` and is one of its listed values: the text as JSON, as a
    string, and as a literal of Python. If none does, it is JSON if it can be, else a string.
    """
    for value in _readings(text):
        if atom_of(value) in types and _is_listed(value, schema):
            with contextlib.suppress(ValueError):  # 1e400 is read as infinite
                return json.dumps(value, ensure_ascii=False, allow_nan=False)
    return value_as_json(text) if text.strip() else None


def _readings(text: str) -> Iterator[Any]:
    parsed: Any = text
    with contextlib.suppress(ValueError, RecursionError):
        parsed = strict_json(text)
    if not isinstance(parsed, str):
        yield parsed
    yield text
    yield parsed
    if not text.strip():
        yield None
    with contextlib.suppress(MalformedError):
        yield json.loads(as_json(_LITERALS.get(text.strip().lower(), text)))


def _is_listed(value: Any, schema: Mapping[str, Any]) -> bool:
    """Return whether a value is one of those that a schema lists, if it lists any."""
    values = _listed(schema)
    return values is None or canonical(value) in map(canonical, values)


def _listed(schema: Mapping[str, Any]) -> list[Any] | None:
    try:
        return SchemaFacts(schema).values(schema)
    except (InexpressibleError, TypeError):  # a malformed schema
        return None


def value_as_json(text: str) -> str:
    """Return the JSON text of a value whose type is not a string: itself if it is JSON, else a string of it."""
    try:
        return json.dumps(json.loads(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
