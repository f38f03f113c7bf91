"""Writes ``oneOf``, ``propertyNames`` and ``not`` of everything with keywords that llguidance knows.

What cannot be written so stays, and llguidance refuses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from staticllm.pipelines.grammars.schemas.facts import (
    MAPS,
    AnySchema,
    InexpressibleError,
    SchemaFacts,
    listed_values,
)
from staticllm.pipelines.grammars.schemas.one_of import told_apart

OVERLAPPING = {"$comment": "oneOf with options that may hold together"}
"""Stays as the value of ``not``, which llguidance refuses, in place of a ``oneOf`` whose options cannot be told apart.

llguidance does not see that options closed against other properties may hold together with them.
"""
_LISTS = ("allOf", "anyOf", "prefixItems")
_SINGLE = ("items", "additionalProperties")
_OF_NAMES = frozenset(["$ref", "allOf", "type", "enum", "const", "title", "description", "default", "examples"])
"""Keywords of the schema of names that list them, or say nothing of them."""
Schema = dict[str, Any]


def rewritten(schema: AnySchema) -> AnySchema:
    """Return a schema of the same values without the keywords above, as far as they can be said in another way.

    Options of a ``oneOf`` may get narrower (``told_apart``).
    """
    return _Rewriter(schema).of(schema)


class _Rewriter:
    """Rewrites the parts of one schema."""

    def __init__(self, root: AnySchema) -> None:
        self._facts = SchemaFacts(root)

    def of(self, schema: AnySchema) -> AnySchema:
        """Return the schema in other words."""
        if not isinstance(schema, dict):
            return schema
        if schema.get("not") == {} or schema.get("not") is True:
            return False
        found = {name: self._of_value(name, value) for name, value in schema.items()}
        if found.get("uniqueItems") is False:
            del found["uniqueItems"]
        for name, step in (("oneOf", self._without_one_of), ("propertyNames", self._without_property_names)):
            if name not in found:
                continue
            rest = {key: value for key, value in found.items() if key != name}
            try:
                found = step(rest, found[name])
            except (InexpressibleError, TypeError, AttributeError):  # also of malformed schemas
                found = {**rest, "not": OVERLAPPING} if name == "oneOf" else found
        return found

    def _of_value(self, name: str, value: Any) -> Any:
        if name in _LISTS and isinstance(value, list):
            return [self.of(each) for each in value]
        if name in MAPS and isinstance(value, Mapping):
            return {key: self.of(each) for key, each in value.items()}
        return self.of(value) if name in _SINGLE else value

    def _without_one_of(self, rest: Schema, options: list[AnySchema]) -> Schema:
        ways = {"anyOf": [self.of(option) for option in told_apart(self._facts, options, self._facts.atoms(rest))]}
        return {**rest, **ways} if "anyOf" not in rest else {**rest, "allOf": [*rest.get("allOf", []), ways]}

    def _without_property_names(self, rest: Schema, names: AnySchema) -> Schema:
        """Say with ``properties`` which names there may be."""
        if not isinstance(names, (dict, bool)):
            raise InexpressibleError
        parts = list(self._facts.conjuncts(names))
        listed = [values for part in parts if (values := listed_values(part)) is not None]
        if any(part.keys() - _OF_NAMES for part in parts) or "string" not in self._facts.atoms(names):
            raise InexpressibleError
        if not listed:
            return rest
        if len(listed) > 1 or "patternProperties" in rest:
            raise InexpressibleError  # a name would have to satisfy both
        known, others = rest.get("properties", {}), rest.get("additionalProperties", True)
        allowed = {name: known.get(name, others) for name in listed[0] if isinstance(name, str)}
        return {**rest, "properties": allowed, "additionalProperties": False}
