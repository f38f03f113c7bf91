"""Rewrites JSON schemas without keywords that llguidance does not know, where others say the same.

Each rewrite works on one schema object whose parts were rewritten before. What has no equal form stays, and llguidance refuses
it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]
_COUNTS = (
    "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains", "maxContains",
)  # fmt: skip
_APPLIERS = (
    "allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "not", "if", "then", "else", "dependentSchemas", "contains",
)  # fmt: skip
"""Keywords by which other schemas evaluate properties and items, too."""


def rewritten(schema: Schema) -> Schema:
    """Return an equal schema object, without the keywords that others can say."""
    for rewrite in _REWRITES:
        schema = rewrite(schema)
    return schema


def _whole_counts(schema: Schema) -> Schema:
    """Write 2.0 as 2."""
    found = {name: schema[name] for name in _COUNTS if isinstance(schema.get(name), float)}
    return schema | {name: int(value) for name, value in found.items() if value.is_integer()}


def _without_inert(schema: Schema) -> Schema:
    """Leave out what has no effect without another keyword, and anchors that only dynamic references find."""
    inert = set[str]()
    if "if" not in schema:
        inert |= {"then", "else"}
    elif not {"then", "else"} & set(schema):
        inert.add("if")
    if "contains" not in schema:
        inert |= {"minContains", "maxContains"}
    return {name: value for name, value in schema.items() if name not in inert}


def _without_unevaluated(schema: Schema) -> Schema:
    """Say ``additionalProperties`` and ``items`` in place of the properties and items that no other schema evaluates."""
    has_others = any(name in schema for name in _APPLIERS)
    for name, plain in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
        if name not in schema:
            continue
        rest = {key: value for key, value in schema.items() if key != name}
        if schema[name] is True or plain in schema:
            schema = rest
        elif not has_others:
            schema = {**rest, plain: schema[name]}
    return schema


def _without_dependents(schema: Schema) -> Schema:
    """Say that either a property is missing, or what depends on it holds."""
    required, schemas = schema.get("dependentRequired", {}), schema.get("dependentSchemas", {})
    if not (required or schemas) or not isinstance(required, dict) or not isinstance(schemas, dict):
        is_empty = required == {} and schemas == {}
        return {name: value for name, value in schema.items() if not (is_empty and name.startswith("dependent"))}
    rest = {name: value for name, value in schema.items() if name not in ("dependentRequired", "dependentSchemas")}
    parts: list[Any] = [{"required": names} for names in required.values()] + list(schemas.values())
    choices = [
        {"anyOf": [{"properties": {name: False}}, part]}
        for name, part in zip((*required, *schemas), parts, strict=True)
        if part != {"required": []}
    ]
    return {**rest, "allOf": [*rest.get("allOf", []), *choices]} if choices else rest


_REWRITES: tuple[Callable[[Schema], Schema], ...] = (
    _whole_counts,
    _without_inert,
    _without_unevaluated,
    _without_dependents,
)
