"""Proves of two JSON schemas that no value satisfies both."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any, TypeAlias

from staticllm.pipelines.generation.structured.schemas.facts import (
    ANY,
    NUMBERS,
    AnySchema,
    Atoms,
    ExhaustedError,
    InexpressibleError,
    SchemaFacts,
    atom_of,
    canonical,
)

MAX_NESTED = 6
"""The most levels of properties and items in which two schemas are compared."""
Parts: TypeAlias = Sequence[Mapping[str, Any]]
_LENGTHS = {
    "string": ("minLength", "maxLength"),
    "array": ("minItems", "maxItems"),
    "object": ("minProperties", "maxProperties"),
}


def are_disjoint(facts: SchemaFacts, one: AnySchema, other: AnySchema, within: Atoms = ANY, depth: int = 0) -> bool:
    """Return whether it is certain that no value of the types ``within`` satisfies both schemas.

    Raises:
        ExhaustedError: too many parts were looked at.
    """
    try:
        return _Pair(facts, one, other, depth).is_disjoint(within)
    except ExhaustedError:
        raise
    except InexpressibleError:
        return False


def are_told_apart(facts: SchemaFacts, options: Sequence[AnySchema], within: Atoms = ANY) -> bool:
    """Return whether it is certain, without comparing pairs, that no value satisfies two options.

    Their values are listed, or they are objects that must have a property whose values are listed.
    """
    try:
        if _have_other_values(facts, options):
            return True
        sides = [list(facts.conjuncts(option)) for option in options]
        if not all(within & facts.atoms(option) <= {"object"} for option in options):
            return False
        names = frozenset.intersection(*map(_required, sides))
        return any(_have_other_values(facts, (_said_of(parts, name) for parts in sides)) for name in sorted(names))
    except InexpressibleError:
        return False


def _have_other_values(facts: SchemaFacts, options: Iterable[AnySchema]) -> bool:
    seen = set[str]()
    for option in options:
        values = facts.values(option)
        if values is None or not seen.isdisjoint(keys := set(map(canonical, values))):
            return False
        seen |= keys
    return True


def _required(parts: Parts) -> frozenset[str]:
    """Return the names of the properties that must be there."""
    return frozenset(name for part in parts for name in _list(part, "required") if isinstance(name, str))


def _said_of(parts: Parts, name: str) -> AnySchema:
    """Return the schema of a property that must be there."""
    return {"allOf": [part["properties"][name] for part in parts if name in part.get("properties", {})]}


class _Pair:
    """Two schemas, as the parts that hold together in each."""

    def __init__(self, facts: SchemaFacts, one: AnySchema, other: AnySchema, depth: int) -> None:
        self._facts, self._depth = facts, depth
        self._one, self._other = one, other
        self._sides: tuple[Parts, Parts] = (list(facts.conjuncts(one)), list(facts.conjuncts(other)))
        self._all: Parts = [*self._sides[0], *self._sides[1]]

    def is_disjoint(self, within: Atoms) -> bool:
        if self._depth > MAX_NESTED:
            return False
        shared = within & self._facts.atoms(self._one) & self._facts.atoms(self._other)
        if all(self._is_disjoint_in(atom) for atom in shared):
            return True
        return any(
            self._are_all_disjoint(part[name], other, shared)
            for parts, other in zip(self._sides, (self._other, self._one), strict=True)
            for part in parts
            for name in ("anyOf", "oneOf")
            if isinstance(part.get(name), list)
        )

    def _are_all_disjoint(self, options: Sequence[AnySchema], other: AnySchema, within: Atoms) -> bool:
        return all(are_disjoint(self._facts, option, other, within, self._depth + 1) for option in options)

    def _is_disjoint_in(self, atom: str) -> bool:
        """Return whether no value of this type satisfies both."""
        values = self._common_values(atom)
        if values is not None:
            return not any(self._may_hold(value) for value in values)
        if atom in NUMBERS:
            return _is_empty(*_range(self._all))
        least, most = _LENGTHS[atom]
        if max(_numbers(self._all, least), default=0) > min(_numbers(self._all, most), default=math.inf):
            return True
        return {"object": self._has_other_property, "array": self._has_other_item}.get(atom, lambda: False)()

    def _common_values(self, atom: str) -> list[Any] | None:
        """Return values of this type that include all that satisfy both; None if they are not few."""
        if atom in ("null", "boolean"):
            found: dict[str, Any] | None = {canonical(v): v for v in (None, False, True) if atom_of(v) == atom}
        else:
            found = None
        for part in self._all:
            listed = self._facts.listed(part)
            if listed is not None:
                values = {canonical(value): value for value in listed if atom_of(value) == atom}
                found = values if found is None else {key: found[key] for key in found.keys() & values.keys()}
        return None if found is None else list(found.values())

    def _may_hold(self, value: Any) -> bool:
        """Return whether bounds leave room for a value."""
        if atom_of(value) in NUMBERS:
            low, low_open, high, high_open = _range(self._all)
            return (value > low or (value == low and not low_open)) and (
                value < high or (value == high and not high_open)
            )
        if isinstance(value, str):
            least, most = _LENGTHS["string"]
            return all(len(value) >= n for n in _numbers(self._all, least)) and all(
                len(value) <= n for n in _numbers(self._all, most)
            )
        return True

    def _has_other_property(self) -> bool:
        """Return whether both say different things of a property that must be there."""
        for name in _required(self._all):
            for one, other in product(*(list(_of_property(parts, name)) for parts in self._sides)):
                if are_disjoint(self._facts, one, other, ANY, self._depth + 1):
                    return True
        return False

    def _has_other_item(self) -> bool:
        least = max(_numbers(self._all, "minItems"), default=0)
        for index in range(min(int(least), MAX_NESTED)):
            for one, other in product(*(list(_of_item(parts, index)) for parts in self._sides)):
                if are_disjoint(self._facts, one, other, ANY, self._depth + 1):
                    return True
        return False


def _of_property(parts: Parts, name: str) -> list[AnySchema]:
    """Return schemas that the property has to satisfy if it is there; ``true`` is always among them."""
    found: list[AnySchema] = [True]
    for part in parts:
        properties = part.get("properties", {})
        if isinstance(properties, Mapping) and name in properties:
            found.append(properties[name])
        elif "additionalProperties" in part and "patternProperties" not in part:
            found.append(part["additionalProperties"])
    return found


def _of_item(parts: Parts, index: int) -> list[AnySchema]:
    found: list[AnySchema] = [True]
    for part in parts:
        first = _list(part, "prefixItems")
        found.append(first[index] if index < len(first) else part.get("items", True))
    return found


def _list(part: Mapping[str, Any], name: str) -> list[Any]:
    value = part.get(name)
    return value if isinstance(value, list) else []


def _numbers(parts: Parts, name: str) -> list[float]:
    values = [part.get(name) for part in parts]
    return [value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]


def _range(parts: Parts) -> tuple[float, bool, float, bool]:
    """Return the least number and whether it is excluded, and the largest number and whether it is excluded."""
    low = max([(n, False) for n in _numbers(parts, "minimum")] + [(n, True) for n in _numbers(parts, "exclusiveMinimum")],
              default=(-math.inf, False))  # fmt: skip
    high = min([(n, True) for n in _numbers(parts, "maximum")] + [(n, False) for n in _numbers(parts, "exclusiveMaximum")],
               default=(math.inf, True))  # fmt: skip
    return low[0], low[1], high[0], not high[1]


def _is_empty(low: float, low_open: bool, high: float, high_open: bool) -> bool:
    return low > high or (low == high and (low_open or high_open))
