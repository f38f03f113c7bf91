"""What a JSON schema says at first sight: the types of its values, its few values, and where its references lead."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

AnySchema: TypeAlias = Any
"""A JSON schema: an object, or a boolean."""
Atoms: TypeAlias = frozenset[str]
ANY: Atoms = frozenset(["null", "boolean", "integer", "fraction", "string", "array", "object"])
"""The types of JSON values, with numbers in two parts, as schemas distinguish them."""
NUMBERS: Atoms = frozenset(["integer", "fraction"])
LITERAL = ("const", "enum", "default", "examples")
"""Keywords whose values are JSON values, not schemas."""
MAPS = ("properties", "$defs", "definitions", "patternProperties", "dependentSchemas")
"""Keywords whose values are schemas by name."""
MAX_DEPTH = 40
MAX_VISITS = 60_000
"""The most parts of schemas that are looked at, over all; two options are compared in pairs."""
VALUES_PER_PART = 16
"""Listed values that take as long as one part."""


class InexpressibleError(Exception):
    """What a schema says cannot be said with the keywords that llguidance knows, or not in bounded time."""


class SchemaFacts:
    """Answers questions about the parts of one schema ``root``."""

    def __init__(self, root: AnySchema) -> None:
        self._root = root
        self._num_left = MAX_VISITS

    def visit(self, num_parts: int = 1) -> None:
        """Count parts that are looked at.

        Raises:
            InexpressibleError: there were too many; then no further question about this schema is answered.
        """
        self._num_left -= num_parts
        if self._num_left < 0:
            raise InexpressibleError

    def listed(self, part: Mapping[str, Any]) -> list[Any] | None:
        """Return the values of ``const`` or ``enum``, and count them; None without them.

        Raises:
            InexpressibleError: there were too many.
        """
        values = listed_values(part)
        self.visit(len(values or ()) // VALUES_PER_PART)
        return values

    def target(self, name: object) -> AnySchema:
        """Return the part that a reference within the document leads to.

        Raises:
            InexpressibleError: it leads elsewhere, or nowhere.
        """
        if not isinstance(name, str) or not (name == "#" or name.startswith("#/")):
            raise InexpressibleError
        found = self._root
        for part in name[1:].split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping) and key in found:
                found = found[key]
            elif isinstance(found, Sequence) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            else:
                raise InexpressibleError
            if isinstance(found, Mapping) and "$id" in found:
                raise InexpressibleError  # the references in it begin at another place
        return found

    def conjuncts(self, schema: AnySchema, depth: int = 0) -> Iterator[Mapping[str, Any]]:
        """Yield objects that hold together for every value of the schema: itself, its references, and parts of ``allOf``."""
        self.visit()
        if schema is False:
            yield {"enum": []}
        if not isinstance(schema, Mapping):
            return
        yield schema
        if depth > MAX_DEPTH:
            raise InexpressibleError
        if "$ref" in schema:
            yield from self.conjuncts(self.target(schema["$ref"]), depth + 1)
        for part in schema.get("allOf", ()):
            yield from self.conjuncts(part, depth + 1)

    def atoms(self, schema: AnySchema, depth: int = 0) -> Atoms:
        """Return types that include those of all values of a schema."""
        found = ANY
        for part in self.conjuncts(schema, depth):
            if "type" in part:
                found &= atoms_of_type(part["type"])
            if (values := self.listed(part)) is not None:
                found &= frozenset(map(atom_of, values))
            for name in ("anyOf", "oneOf"):
                if isinstance(part.get(name), list):
                    options = [self.atoms(option, depth + 1) for option in part[name]]
                    found &= frozenset[str]().union(*options)
        return found

    def values(self, schema: AnySchema) -> list[Any] | None:
        """Return values that include all of a schema, each once, if there are few; else None."""
        for part in self.conjuncts(schema):
            if (values := self.listed(part)) is not None:
                return list({canonical(value): value for value in values}.values())
        atoms = self.atoms(schema)
        if atoms <= {"null", "boolean"}:
            return [None] * ("null" in atoms) + [False, True] * ("boolean" in atoms)
        return None


def listed_values(part: Mapping[str, Any]) -> list[Any] | None:
    """Return the values that ``const`` and ``enum`` both allow; None without them."""
    values = part.get("enum")
    if "const" not in part:
        return values if isinstance(values, list) else None
    only = part["const"]
    is_allowed = not isinstance(values, list) or canonical(only) in map(canonical, values)
    return [only] if is_allowed else []


def atoms_of_type(value: object) -> Atoms:
    """Return the types that the value of the keyword ``type`` names."""
    names = [value] if isinstance(value, str) else value if isinstance(value, list) else []
    if len(names) > len(ANY) + 1 or not all(
        isinstance(name, str) and (name in ANY or name == "number") for name in names
    ):
        raise InexpressibleError
    return frozenset(atom for name in names for atom in (NUMBERS if name == "number" else {name}))


def atom_of(value: object) -> str:
    """Return the type of a JSON value; 1.0 is an integer, as JSON Schema says."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, (int, float)):
        return "integer" if isinstance(value, int) or value.is_integer() else "fraction"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def canonical(value: object) -> str:
    """Return a text that equal JSON values, and no others, have in common."""
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: object) -> object:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list) else value
