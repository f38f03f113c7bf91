"""Prepares JSON schemas for llguidance: what GenAI's backend (xgrammar) assumes of a schema becomes explicit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from staticllm.errors import GenerationConfigError
from staticllm.pipelines.generation.structured.schema_rewrites import rewritten

WHITESPACE = r" |\r?\n(?: {0,20}|\t{0,5})"
"""What may stand between two parts of a JSON text: a space, or a line break and an indentation.

With any whitespace, as JSON allows it, greedy answers of small models are line breaks until ``max_new_tokens``.
"""
FORMATS = frozenset(["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"])
"""The formats that llguidance enforces; JSON Schema lets all others be mere annotations."""
ANNOTATIONS = frozenset(["deprecated", "contentSchema"])
"""Keywords that say nothing about what is valid, and that llguidance does not know."""
_COMBINERS = ("allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "not", "if", "dependentSchemas", "dependentRequired")
_OPEN = ("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames")
_LITERAL = ("const", "enum", "default", "examples")
_MAPS = ("properties", "$defs", "definitions", "patternProperties", "dependentSchemas")


def read_schema(text: str) -> Any:
    """Return the JSON value of a schema's text.

    Raises:
        GenerationConfigError: it is no JSON, or no object and no boolean.
    """
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GenerationConfigError(f"the JSON schema is no JSON: {error}") from None
    if not isinstance(schema, (dict, bool)):
        raise GenerationConfigError(f"the JSON schema is a {type(schema).__name__}: must be an object")
    return schema


def prepared(schema: Any) -> Any:
    """Return an equal or narrower schema with the assumptions of xgrammar's strict mode.

    Objects that list their properties have no others, unless the schema says so; where parts of a schema are combined
    (``allOf`` and the like), they stay as they are, since each part would forbid the properties of the others. Formats that
    nobody enforces are left out. Whitespace is limited.
    """
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise GenerationConfigError("the JSON schema is false, which nothing satisfies: use another one")
    closes = "allOf" not in _names(schema)
    return {**_prepared(schema, closes), "x-guidance": {"whitespace_pattern": WHITESPACE}}


def _names(schema: object) -> set[str]:
    """Return every key in a schema."""
    if isinstance(schema, Mapping):
        return {*schema, *(name for value in schema.values() for name in _names(value))}
    return {name for value in schema for name in _names(value)} if isinstance(schema, list) else set()


def _prepared(schema: Any, closes: bool) -> Any:
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
        if name in _MAPS and isinstance(value, dict):
            found[name] = {key: _prepared(each, closes) for key, each in value.items()}
        else:
            found[name] = value if name in _LITERAL else _prepared(value, closes)
    found = rewritten(found)
    if closes and _lists_its_properties(schema):
        found["additionalProperties"] = False
    return found


def _lists_its_properties(schema: Mapping[str, Any]) -> bool:
    """Return whether an object's properties are listed and all required ones are among them."""
    properties = schema.get("properties")
    if not isinstance(properties, dict) or not properties or any(name in schema for name in _OPEN):
        return False
    required = schema.get("required", [])
    least = schema.get("minProperties", 0)
    return isinstance(required, list) and set(map(str, required)) <= set(properties) and least <= len(properties)
