"""Writes the complement of a JSON schema: what satisfies it are exactly the values that do not satisfy the schema."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from staticllm.pipelines.generation.structured.schemas.facts import (
    NUMBERS,
    AnySchema,
    Atoms,
    InexpressibleError,
    SchemaFacts,
    atom_of,
    atoms_of_type,
    canonical,
    pattern_of_others,
    type_of,
)


class Exact(dict[str, Any]):
    """An object whose properties are not all: others may be there, whatever is assumed of schemas elsewhere."""


@dataclass(frozen=True)
class Not:
    """Stands for the complement of a schema in another one, among the values that satisfy all schemas in ``given``.

    ``followed`` are the references on the way: one that is met again never ends.
    """

    schema: AnySchema
    given: tuple[AnySchema, ...] = ()
    followed: frozenset[str] = frozenset()


_SILENT = frozenset(
    [
        "title", "description", "default", "examples", "$comment", "$defs", "definitions", "$schema", "$anchor", "readOnly",
        "writeOnly", "deprecated", "then", "else", "minContains", "maxContains",
    ]
)  # fmt: skip
"""Keywords that say nothing of a value, or only together with another one."""
_OPPOSITES: dict[str, tuple[Atoms, str, int]] = {
    "minimum": (NUMBERS, "exclusiveMaximum", 0),
    "maximum": (NUMBERS, "exclusiveMinimum", 0),
    "exclusiveMinimum": (NUMBERS, "maximum", 0),
    "exclusiveMaximum": (NUMBERS, "minimum", 0),
    "minLength": (frozenset(["string"]), "maxLength", -1),
    "maxLength": (frozenset(["string"]), "minLength", 1),
    "minItems": (frozenset(["array"]), "maxItems", -1),
    "maxItems": (frozenset(["array"]), "minItems", 1),
    "minProperties": (frozenset(["object"]), "maxProperties", -1),
    "maxProperties": (frozenset(["object"]), "minProperties", 1),
}
"""The types that a bound is for, the keyword that says the opposite, and what is added to the number."""
_ONLY_FOR: dict[str, Atoms] = {
    **dict.fromkeys(["multipleOf"], NUMBERS),
    **dict.fromkeys(["pattern", "format", "contentEncoding", "contentMediaType"], frozenset(["string"])),
    **dict.fromkeys(["items", "contains", "uniqueItems", "unevaluatedItems"], frozenset(["array"])),
    **dict.fromkeys(
        ["patternProperties", "additionalProperties", "propertyNames", "dependentRequired", "dependentSchemas"],
        frozenset(["object"]),
    ),
}
"""Keywords that have no opposite, and the types that they are for: for others they say nothing."""


def complement(facts: SchemaFacts, wanted: Not) -> AnySchema:
    """Return the schema that ``wanted`` stands for; in it, complements of parts are objects of the class ``Not``.

    Raises:
        InexpressibleError: there is none.
    """
    return _Complement(facts, wanted).schema()


class _Complement:
    """Collects ways in which a value may fail to satisfy one schema."""

    def __init__(self, facts: SchemaFacts, wanted: Not) -> None:
        facts.visit()
        self._facts, self._wanted = facts, wanted
        self._within = facts.atoms({"allOf": list(wanted.given)})
        self._ways: list[AnySchema] = []
        self._writers: dict[str, Callable[[Any], None]] = {
            "type": self._type, "$ref": self._reference, "not": self._not, "if": self._if, "allOf": self._all_of,
            "anyOf": self._any_of, "oneOf": self._one_of, "properties": self._properties, "required": self._required,
            "prefixItems": self._prefix_items, "contains": self._contains,
        }  # fmt: skip

    def schema(self) -> AnySchema:
        schema = self._wanted.schema
        if isinstance(schema, bool):
            return not schema
        if not isinstance(schema, Mapping):
            raise InexpressibleError
        if (values := self._facts.listed(schema)) is not None:
            self._other_values(values)
        for name, value in schema.items():
            if name in _SILENT or name == "const" or (name == "enum" and isinstance(value, list)):
                continue
            if name in _OPPOSITES:
                self._bound(name, value)
            elif name in self._writers:
                self._writers[name](value)
            elif name not in _ONLY_FOR or (self._within & _ONLY_FOR[name] and not _says_nothing(name, value)):
                raise InexpressibleError
        return one_of(self._ways)

    def _inner(self, schema: AnySchema) -> Not:
        return replace(self._wanted, schema=schema)

    def _of_property(self, name: str, schema: AnySchema) -> Not:
        """Return the complement of what a property must be, among what it can be."""
        parts = [part for given in self._wanted.given for part in self._facts.conjuncts(given)]
        known = [part["properties"][name] for part in parts if name in part.get("properties", {})]
        return replace(self._wanted, schema=schema, given=tuple(known))

    def _of_any(self, schema: AnySchema) -> Not:
        return replace(self._wanted, schema=schema, given=())

    def _type(self, value: Any) -> None:
        others = self._within - atoms_of_type(value)
        if others:
            self._ways.append(Exact(type=type_of(others)))

    def _bound(self, name: str, value: Any) -> None:
        atoms, opposite, step = _OPPOSITES[name]
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise InexpressibleError
        if atoms & self._within and (atoms == NUMBERS or value + step >= 0):
            self._ways.append(Exact({"type": _kind(atoms & self._within), opposite: value + step}))

    def _other_values(self, values: list[Any]) -> None:
        """Add the types of none of the values, and the other values of their types."""
        by_atom: dict[str, list[Any]] = {}
        for value in values:
            atom = atom_of(value)
            by_atom.setdefault("number" if atom in NUMBERS else atom, []).append(value)
        numbers = by_atom.pop("number", [])
        free = self._within - by_atom.keys() - (NUMBERS if numbers else frozenset())
        if free:
            self._ways.append(Exact(type=type_of(free)))
        if numbers and self._within & NUMBERS:
            self._other_numbers(sorted(set(numbers)))
        for atom in by_atom.keys() & self._within:
            self._others_of_type(atom, by_atom[atom])

    def _others_of_type(self, atom: str, values: list[Any]) -> None:
        if atom == "string":
            self._ways.append(Exact(type="string", pattern=pattern_of_others(values)))
        elif atom == "boolean":
            self._ways += [Exact(const=value) for value in (False, True) if value not in values]
        elif atom != "null":
            if any(values):  # only what is empty has a simple complement
                raise InexpressibleError
            self._ways.append(Exact({"type": atom, "minItems" if atom == "array" else "minProperties": 1}))

    def _other_numbers(self, numbers: list[float]) -> None:
        """Add the intervals between numbers."""
        kind = _kind(self._within & NUMBERS)
        self._ways.append(Exact(type=kind, exclusiveMaximum=numbers[0]))
        self._ways.append(Exact(type=kind, exclusiveMinimum=numbers[-1]))
        for low, high in pairwise(numbers):
            if kind == "number" or int(low // 1) + 1 < high:
                self._ways.append(Exact(type=kind, exclusiveMinimum=low, exclusiveMaximum=high))

    def _reference(self, name: Any) -> None:
        if name in self._wanted.followed:
            raise InexpressibleError
        target, followed = self._facts.target(name), self._wanted.followed | {name}
        self._ways.append(replace(self._wanted, schema=target, followed=followed))

    def _not(self, value: Any) -> None:
        self._ways.append(value)

    def _if(self, condition: Any) -> None:
        schema = self._wanted.schema
        if "then" in schema:
            self._ways.append(Exact(allOf=[condition, self._inner(schema["then"])]))
        if "else" in schema:
            parts = [self._inner(condition), self._inner(schema["else"])]
            self._ways.append(Exact(allOf=parts))

    def _all_of(self, parts: Any) -> None:
        self._ways += [self._inner(part) for part in parts]

    def _any_of(self, parts: Any) -> None:
        self._ways.append(Exact(allOf=[self._inner(part) for part in parts]))

    def _one_of(self, parts: Any) -> None:
        self._any_of(parts)
        self._facts.visit(len(parts) ** 2 // 2)
        self._ways += [Exact(allOf=[one, other]) for index, one in enumerate(parts) for other in parts[:index]]

    def _properties(self, properties: Any) -> None:
        if "object" not in self._within:
            return
        for name, schema in properties.items():
            self._ways.append(Exact(type="object", properties={name: self._of_property(name, schema)}, required=[name]))

    def _required(self, names: Any) -> None:
        if "object" in self._within:
            self._ways += [Exact(type="object", properties={name: False}) for name in names]

    def _prefix_items(self, items: Any) -> None:
        if "array" not in self._within:
            return
        for index, schema in enumerate(items):
            self._facts.visit(index)
            first = [*[True] * index, self._of_any(schema)]
            self._ways.append(Exact(type="array", prefixItems=first, minItems=index + 1))

    def _contains(self, schema: Any) -> None:
        if "array" in self._within:
            if {"minContains", "maxContains"} & self._wanted.schema.keys():
                raise InexpressibleError
            self._ways.append(Exact(type="array", items=self._of_any(schema)))


def one_of(ways: list[AnySchema]) -> AnySchema:
    """Return a schema of the values that satisfy one of some schemas."""
    if True in ways:
        return True
    left = [way for way in ways if way is not False]
    return left[0] if len(left) == 1 else Exact(anyOf=left) if left else False


def _kind(atoms: Atoms) -> str:
    """Return the type of numbers, or of another kind of value."""
    if not atoms & NUMBERS:
        return next(iter(atoms))
    return "number" if "fraction" in atoms else "integer"


def _says_nothing(name: str, value: Any) -> bool:
    if name in ("uniqueItems", "dependentRequired", "dependentSchemas", "patternProperties"):
        return value in (False, {})
    return name != "multipleOf" and canonical(value) in ("true", "{}")
