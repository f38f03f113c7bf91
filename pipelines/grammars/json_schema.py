"""Prepares JSON schemas for llguidance: what GenAI's backend (xgrammar) assumes of a schema becomes explicit."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from staticllm.errors import GenerationConfigError
from staticllm.pipelines.grammars.schema_facts import LITERAL, MAPS, check_depth
from staticllm.pipelines.grammars.schema_rewriting import rewritten

WHITESPACE = r" |\r?\n(?: {0,20}|\t{0,5})"
"""What may stand between two parts of a JSON text: a space, or a line break and an indentation.

With any whitespace, as JSON allows it, greedy answers of small models are line breaks until ``max_new_tokens``.
"""
FORMATS = frozenset(["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"])
"""The formats that llguidance enforces; JSON Schema lets all others be mere annotations."""
ANNOTATIONS = frozenset(["deprecated", "contentSchema"])
"""Keywords that say nothing about what is valid, and that llguidance does not know."""
_COMBINERS = ("allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "dependentRequired")
_OPEN = ("additionalProperties", "patternProperties")
_NEGATED_CLASS = re.compile(r"\\.|\[\^(?!\])|\[", re.DOTALL)
_CONTROLS = r"\x00-\x08\x0b\x0c\x0e-\x1f"
Schema = dict[str, Any]
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")


def json_value(text: str, what: str) -> Any:
    """Return the value of a text in JSON; ``what`` names it in errors.

    Raises:
        GenerationConfigError: it is no JSON, or has numbers or characters that JSON in UTF-8 cannot have.
    """
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise GenerationConfigError(f"{what} has half of a surrogate pair, {half!r}: leave it out") from None
    except (ValueError, RecursionError) as error:
        raise GenerationConfigError(f"{what} is no JSON: {error}") from None
    return value


def read_schema(text: str) -> Any:
    """Return the JSON value of a schema's text. Raises GenerationConfigError: it is no JSON, or no object and no boolean."""
    schema = json_value(text, "the JSON schema")
    if not isinstance(schema, (dict, bool)):
        raise GenerationConfigError(f"the JSON schema is a {type(schema).__name__}: must be an object")
    return schema


def prepared(schema: Any) -> Any:
    """Return an equal or narrower schema with the assumptions of xgrammar's strict mode.

    Objects that list their properties have no others, unless the schema says so; where parts of a schema are combined
    (``allOf`` and the like), they stay as they are, since each part would forbid the properties of the others. Formats that
    nobody enforces are left out. Whitespace is limited.

    Raises:
        GenerationConfigError: nothing satisfies it, or it is nested too deeply.
    """
    if schema is True:
        schema = {}
    if schema is False:
        raise GenerationConfigError("the JSON schema is false, which nothing satisfies: use another one")
    if not isinstance(schema, dict):
        raise GenerationConfigError(f"the JSON schema is a {type(schema).__name__}: must be an object")
    schema = rewritten(schema)
    if schema is False:
        raise GenerationConfigError("nothing satisfies the JSON schema: its parts contradict each other")
    if schema is True:
        schema = {}
    check_depth(schema)
    return {**_prepared(schema, closes="allOf" not in _names(schema)), "x-guidance": {"whitespace_pattern": WHITESPACE}}


def _names(schema: object) -> set[str]:
    """Return every key in a schema."""
    if isinstance(schema, Mapping):
        return {*schema, *(name for value in schema.values() for name in _names(value))}
    return {name for value in schema for name in _names(value)} if isinstance(schema, list) else set()


def _prepared(schema: Any, closes: bool) -> Any:
    """``closes``: objects that list their properties have no others."""
    if isinstance(schema, list):
        return [_prepared(value, closes) for value in schema]
    if not isinstance(schema, dict):
        return schema
    is_combined = "properties" in schema and any(name in schema for name in _COMBINERS)
    closes = closes and not is_combined
    found: dict[str, Any] = {}
    for name, value in schema.items():
        if name in ANNOTATIONS or (name == "format" and isinstance(value, str) and value not in FORMATS):
            continue
        if name == "pattern" and isinstance(value, str):
            found[name] = _with_text_classes(value)
        elif name in MAPS and isinstance(value, dict):
            parts = {key: _prepared(each, closes) for key, each in value.items()}
            is_patterns = name == "patternProperties"
            found[name] = {_with_text_classes(key): each for key, each in parts.items()} if is_patterns else parts
        else:
            found[name] = value if name in LITERAL else _prepared(value, closes)
    found = with_exact_bounds(_without_dependents(_whole_counts(found)))
    if closes and _lists_its_properties(schema):
        found["additionalProperties"] = False
    return found


def _with_text_classes(pattern: str) -> str:
    """Return a regular expression whose negated classes have no control characters except tab and line breaks.

    llguidance takes a class that has all control characters, but not the quotation mark or the backslash, for one that has both.
    """
    return _NEGATED_CLASS.sub(lambda found: f"[^{_CONTROLS}" if found[0] == "[^" else found[0], pattern)


def _lists_its_properties(schema: Mapping[str, Any]) -> bool:
    """Return whether an object's properties are listed and all required ones are among them."""
    properties = schema.get("properties")
    if not isinstance(properties, dict) or not properties or any(name in schema for name in _OPEN):
        return False
    required = schema.get("required", [])
    least = schema.get("minProperties", 0)
    return isinstance(required, list) and set(map(str, required)) <= set(properties) and least <= len(properties)


def _whole_counts(schema: Schema) -> Schema:
    """Write 2.0 as 2."""
    found = {name: schema[name] for name in _COUNTS if isinstance(schema.get(name), float)}
    return schema | {name: int(value) for name, value in found.items() if value.is_integer()}


def _without_dependents(schema: Schema) -> Schema:
    """Say that either a property is missing, or those that depend on it are there."""
    required = schema.get("dependentRequired")
    if not isinstance(required, dict):
        return schema
    rest = {name: value for name, value in schema.items() if name != "dependentRequired"}
    choices = [
        {"anyOf": [{"properties": {name: False}}, {"required": names}]} for name, names in required.items() if names
    ]
    return {**rest, "allOf": [*rest.get("allOf", []), *choices]} if choices else rest


BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
MAX_WHOLE = 1 << 63
STEP_DIGITS = 3
"""An excluded whole bound becomes an included one that is further in by 10 to the power of minus so many digits more than the
other bound has, and by a millionth at most."""


def with_exact_bounds(schema: Schema) -> Schema:
    """Return a schema object whose bounds llguidance keeps; it lacks numbers within a millionth of an excluded whole bound.

    llguidance 1.9 allows an excluded whole bound if the other bound, which another part of the schema may have, is a fraction of
    the same unit: 0 for ``{"exclusiveMinimum": 0, "maximum": 0.5}``. It clips whole bounds to 64-bit integers.

    Raises:
        GenerationConfigError: a bound, or a whole number that is a value, is not exact as a 64-bit float, or too large.
    """
    bounds = {name: schema[name] for name in BOUNDS if name in schema and _is_number(schema[name])}
    for name, bound in bounds.items():
        if isinstance(bound, int) and (abs(bound) >= MAX_WHOLE or int(float(bound)) != bound):
            raise _inexact(name, bound)
    for number in _whole_numbers([schema.get("const"), schema.get("enum")]):
        if _written(number) != number:
            raise _inexact("the value", number)
    if schema.get("type") == "integer":
        return schema
    for excluded, included, others, sign in (
        ("exclusiveMinimum", "minimum", ("maximum", "exclusiveMaximum"), 1),
        ("exclusiveMaximum", "maximum", ("minimum", "exclusiveMinimum"), -1),
    ):
        end = next((bounds[name] for name in others if name in bounds), None)
        if excluded in bounds and bounds[excluded] == int(bounds[excluded]):
            bound = float(Decimal(bounds[excluded]) + sign * _step(end))
            further = max if sign > 0 else min
            schema = {name: value for name, value in schema.items() if name != excluded}
            schema[included] = further(bound, bounds.get(included, bound))
    return schema


def _inexact(what: str, number: int) -> GenerationConfigError:
    return GenerationConfigError(
        f"the JSON schema has {what} {str(number)[:40]}: a number must be below 2^63 and exact as a 64-bit float, as all whole "
        "ones up to 2^53 are; use a string instead, another number, or leave it out"
    )


def _whole_numbers(value: object) -> Iterator[int]:
    """Yield the whole numbers in a JSON value."""
    left = [value]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            left += part.values()
        elif isinstance(part, list):
            left += part
        elif isinstance(part, int) and not isinstance(part, bool):
            yield part


def _written(number: int) -> int | None:
    """Return the number that llguidance writes for this one; None if it has none."""
    if abs(number) < MAX_WHOLE:
        return int(float(number))
    try:
        return int(Decimal(repr(float(number))))
    except OverflowError:
        return None


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _step(end: float | None) -> Decimal:
    exponent = 0 if end is None else Decimal(repr(end)).normalize().as_tuple().exponent
    digits = -exponent if isinstance(exponent, int) else 0
    return Decimal(1).scaleb(-max(6, digits + STEP_DIGITS))
