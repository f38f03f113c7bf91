"""Writes ``oneOf``, ``propertyNames`` and ``not`` of everything with keywords that llguidance knows.

What cannot be written so stays, and llguidance refuses it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

from staticllm.pipelines.grammars.schema_facts import (
    MAPS,
    AnySchema,
    Atoms,
    InexpressibleError,
    SchemaFacts,
    canonical,
    listed_values,
)

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
        known = rest.get("properties", {})
        others = rest.get("additionalProperties", True)
        allowed = {name: known.get(name, others) for name in listed[0] if isinstance(name, str)}
        return {**rest, "properties": allowed, "additionalProperties": False}


_OBJECT: Atoms = frozenset(["object"])


def told_apart(facts: SchemaFacts, options: Sequence[AnySchema], within: Atoms) -> list[AnySchema]:
    """Return schemas for the options of a ``oneOf``: a value of one satisfies that option and no other one.

    Options that differ in their types, in their listed values (``const`` and ``enum``) or in a property that must be there stay
    as they are. Two kinds of options get narrower. Objects with a property that has other listed values in each option must have
    it, also where it has a default. Objects that differ only in which properties they require must not have those that only the
    other ones require. ``within``: the types of values that the schema around them allows.

    Raises:
        InexpressibleError: two options may hold together, or there are too many of them to tell.
    """
    found = [_Option(facts, option, within) for option in options]
    listed = [option for option in found if option.values is not None]
    objects = [option for option in found if option.atoms == _OBJECT and option.values is None]
    groups = [
        listed if _are_disjoint([option.values for option in listed]) else [],
        objects if _discriminate(facts, objects) else [],
    ]
    grouped = {id(option) for group in groups for option in group}
    groups += [[option] for option in found if id(option) not in grouped]
    for pair in combinations(groups, 2):
        for one, other in product(*pair):
            facts.visit()
            _tell_apart(facts, one, other)
    return [option.narrowed() for option in found if option.atoms]


class _Option:
    """An option, as the parts that hold together in it, and what keeps it apart from others."""

    def __init__(self, facts: SchemaFacts, schema: AnySchema, within: Atoms) -> None:
        self._schema = schema
        self.parts = list(facts.conjuncts(schema))
        self.atoms = within & facts.atoms(schema)
        self.values = _keys(facts, schema)
        self.required = {name for part in self.parts for name in part.get("required", ()) if isinstance(name, str)}
        self.needed: list[str] = []  # properties that it must have, and that it must not have
        self.forbidden = set[str]()

    @property
    def names(self) -> Iterator[str]:
        """The properties that it lists."""
        return (name for part in self.parts for name in part.get("properties", {}))

    def property(self, name: str) -> AnySchema:
        """Return what a property must satisfy if it is there."""
        found: list[AnySchema] = []
        for part in self.parts:
            properties = part.get("properties", {})
            if name in properties:
                found.append(properties[name])
            elif "patternProperties" not in part:
                found.append(part.get("additionalProperties", True))
        return {"allOf": found}

    def narrowed(self) -> AnySchema:
        """Return its schema with the properties that it needs and those that it must not have."""
        found = self._schema
        if self.needed:
            found = {**found, "required": list(dict.fromkeys([*found.get("required", ()), *self.needed]))}
        if self.forbidden:
            found = {
                **found,
                "properties": {**found.get("properties", {}), **dict.fromkeys(sorted(self.forbidden), False)},
            }
        return found


def _keys(facts: SchemaFacts, schema: AnySchema) -> frozenset[str] | None:
    """Return the values that a schema lists, in a form that equal ones share; None if it lists none."""
    values = facts.values(schema)
    return None if values is None else frozenset(map(canonical, values))


def _are_disjoint(sets: Sequence[frozenset[str] | None]) -> bool:
    known = [each for each in sets if each is not None]
    return len(known) == len(sets) and len(frozenset().union(*known)) == sum(map(len, known))


def _discriminate(facts: SchemaFacts, options: Sequence[_Option]) -> bool:
    """Let objects need a property that has other listed values in each of them; return whether there is one."""
    if len(options) < 2:
        return False
    shared = set(options[0].names).intersection(*(option.names for option in options[1:]))
    for name in dict.fromkeys(options[0].names):
        if name in shared and _are_disjoint([_keys(facts, option.property(name)) for option in options]):
            for option in options:
                option.needed.append(name)
            return True
    return False


def _tell_apart(facts: SchemaFacts, one: _Option, other: _Option) -> None:
    """Let two options forbid what the other one requires, unless they differ anyway.

    Raises:
        InexpressibleError: they may hold together all the same.
    """
    shared = one.atoms & other.atoms
    if not shared or _are_disjoint([one.values, other.values]):
        return
    if shared != _OBJECT:
        raise InexpressibleError
    names = sorted(one.required | other.required)
    if any(_differ(facts, one.property(name), other.property(name)) for name in names):
        return
    only_one = one.required - other.required
    only_other = other.required - one.required
    if not only_one or not only_other:
        raise InexpressibleError
    one.forbidden |= only_other
    other.forbidden |= only_one


def _differ(facts: SchemaFacts, one: AnySchema, other: AnySchema) -> bool:
    """Return whether two schemas have different types or list different values."""
    return not facts.atoms(one) & facts.atoms(other) or _are_disjoint([_keys(facts, one), _keys(facts, other)])
