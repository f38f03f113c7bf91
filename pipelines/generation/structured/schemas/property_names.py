"""Says by the properties themselves which names they may have, in place of ``propertyNames``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from staticllm.pipelines.generation.structured.schemas.facts import (
    AnySchema,
    InexpressibleError,
    SchemaFacts,
    atoms_of_type,
    listed_values,
)

MAX_NAMES = 500
"""The most names that are listed as properties."""
SAYS_NOTHING = frozenset(["$ref", "allOf", "title", "description", "$comment", "default", "examples", "deprecated"])
"""Keywords that are looked at elsewhere, or do not restrict a name."""


@dataclass
class _Names:
    """The names that a schema allows: ``listed`` or any, those that all ``patterns`` are found in."""

    listed: list[str] | None = None
    patterns: list[str] = field(default_factory=list)

    def __contains__(self, name: str) -> bool:
        is_listed = self.listed is None or name in self.listed
        return is_listed and all(_search(pattern, name) for pattern in self.patterns)


def with_names(facts: SchemaFacts, rest: Mapping[str, Any], schema: AnySchema) -> dict[str, Any]:
    """Return the keywords of properties that stand for those of ``rest`` and ``propertyNames`` with the value ``schema``.

    Raises:
        InexpressibleError: they cannot be said so.
    """
    names = _names(facts, schema)
    known, others = rest.get("properties", {}), rest.get("additionalProperties", True)
    if rest.get("patternProperties"):
        raise InexpressibleError  # a name would need both patterns
    properties = {name: part for name, part in known.items() if name in names}
    if names.listed is not None:
        allowed = [name for name in names.listed if name in names]
        if others is not False:
            properties |= {name: others for name in allowed if name not in known}
        if len(properties) > MAX_NAMES:
            raise InexpressibleError
        return {"properties": properties, "additionalProperties": False}
    if not names.patterns or others is False:
        return {"properties": properties, "additionalProperties": others}
    if len(names.patterns) > 1 or (properties and others is not True):
        raise InexpressibleError  # the schema of other properties would hold for the known ones too
    return {"properties": properties, "patternProperties": {names.patterns[0]: others}, "additionalProperties": False}


def _names(facts: SchemaFacts, schema: AnySchema) -> _Names:
    """Return the names that a schema allows.

    Raises:
        InexpressibleError: it says something else than values, a pattern or a length.
    """
    found = _Names()
    for part in facts.conjuncts(schema):
        if not part.keys() <= SAYS_NOTHING | {"type", "enum", "const", "pattern", "minLength", "maxLength"}:
            raise InexpressibleError
        values = listed_values(part)
        if "type" in part and "string" not in atoms_of_type(part["type"]):
            values = []
        if values is not None:
            texts = list(dict.fromkeys(value for value in values if isinstance(value, str)))
            found.listed = [name for name in texts if found.listed is None or name in found.listed]
        if "pattern" in part:
            found.patterns.append(part["pattern"])
        if "minLength" in part or "maxLength" in part:
            least, most = part.get("minLength", 0), part.get("maxLength", "")
            found.patterns.append(rf"^[\s\S]{{{int(least)},{most if most == '' else int(most)}}}$")
    return found


def _search(pattern: str, name: str) -> bool:
    """Return whether a pattern is found in a name, for patterns that mean the same in Python as in JSON Schema.

    Raises:
        InexpressibleError: it may mean something else.
    """
    if not name.isascii() or "\n" in name:
        raise InexpressibleError  # classes of characters and the end of a text differ
    try:
        return re.search(pattern, name, re.ASCII) is not None
    except re.error:
        raise InexpressibleError from None
