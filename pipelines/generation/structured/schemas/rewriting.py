"""Writes ``not``, ``if``, ``oneOf``, ``contains``, ``uniqueItems``, ``propertyNames`` with keywords that llguidance knows.

Each is replaced by a schema of exactly the same values, or stays, so that llguidance refuses it. There is one exception, which
is narrower: objects of a ``oneOf`` must have the property that tells the options apart. What remains, except
``unevaluatedProperties`` and ``unevaluatedItems``, only gets narrower when a part of it does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import permutations
from math import perm
from typing import Any

from staticllm.pipelines.generation.structured.schemas.disjoint import are_disjoint, are_told_apart
from staticllm.pipelines.generation.structured.schemas.facts import (
    AnySchema,
    Atoms,
    InexpressibleError,
    SchemaFacts,
    canonical,
    type_of,
)
from staticllm.pipelines.generation.structured.schemas.negation import Exact, Not, complement, one_of
from staticllm.pipelines.generation.structured.schemas.property_names import with_names

OVERLAPPING = {"$comment": "oneOf with options that may hold together"}
"""Stays as the value of ``not``, which llguidance refuses, in place of a ``oneOf`` that cannot be written in another way.

llguidance does not see that options closed against other properties may hold together with them.
"""
MAX_ORDERS = 500
"""The most arrays of different values that are listed in place of ``uniqueItems``."""
MAX_PLACES = 16
"""The longest arrays in which ``contains`` is said for each place."""
LISTS = ("allOf", "anyOf", "prefixItems")
SINGLE = ("items", "additionalProperties", "propertyNames", "unevaluatedItems", "unevaluatedProperties")
NAMED = ("properties", "$defs", "definitions", "patternProperties", "dependentSchemas")
UNEVALUATED = ("unevaluatedItems", "unevaluatedProperties")
_PROPERTIES = ("properties", "patternProperties", "additionalProperties")
_ITEMS = ("prefixItems", "items")
Schema = dict[str, Any]


def rewritten(schema: AnySchema) -> AnySchema:
    """Return a schema of the same values without the keywords above, as far as they can be said in another way."""
    return _Rewriter(schema).of(schema)


class _Rewriter:
    """Rewrites the parts of one schema."""

    def __init__(self, root: AnySchema) -> None:
        self._facts = SchemaFacts(root)
        self._steps: tuple[tuple[str, Callable[[Schema, AnySchema], AnySchema]], ...] = (
            ("if", self._without_if), ("not", self._without_not), ("oneOf", self._without_one_of),
            ("contains", self._without_contains), ("uniqueItems", self._without_unique_items),
            ("propertyNames", self._without_property_names),
        )  # fmt: skip

    def of(self, schema: AnySchema) -> AnySchema:
        """Return the schema in other words."""
        if isinstance(schema, Not):
            return self.of(complement(self._facts, schema))
        if not isinstance(schema, dict):
            return schema
        found: Any = type(schema)({name: self._of_value(name, value) for name, value in schema.items()})
        for name, step in self._steps:
            if not isinstance(found, dict) or name not in found:
                continue
            rest = type(found)({key: value for key, value in found.items() if key != name})
            try:
                if any(key in found for key in UNEVALUATED):
                    raise InexpressibleError  # the keyword also says which properties and items are evaluated
                found = step(rest, found[name])
            except (
                InexpressibleError,
                TypeError,
                AttributeError,
            ):  # also of malformed schemas, which llguidance refuses
                found = {**rest, "not": OVERLAPPING} if name == "oneOf" else {**rest, name: found[name]}
        return found

    def _of_value(self, name: str, value: Any) -> Any:
        if name in LISTS and isinstance(value, list):
            return [self.of(each) for each in value]
        if name in NAMED and isinstance(value, Mapping):
            return {key: self.of(each) for key, each in value.items()}
        return self.of(value) if name in SINGLE else value

    def _without_if(self, rest: Schema, condition: AnySchema) -> AnySchema:
        if not {"then", "else"} & rest.keys():
            return rest
        outside = type(rest)({key: value for key, value in rest.items() if key not in ("then", "else")})
        fails = Not(condition, (outside,))
        yes = both(self.of(condition), self.of(rest.get("then", True)))
        no = both(self.of(fails), self.of(rest.get("else", True)))
        return both(outside, one_of([yes, no]), is_kept=True)

    def _without_not(self, rest: Schema, schema: AnySchema) -> AnySchema:
        return both(rest, self.of(Not(schema, (rest,))), is_kept=True)

    def _without_one_of(self, rest: Schema, options: list[AnySchema]) -> AnySchema:
        within = self._facts.atoms(rest)
        clashing = self._clashing(options, within)
        try:
            ways = [self._alone(*each, rest) for each in zip(options, clashing, strict=True)]
        except InexpressibleError:
            options = self._told_apart(options)
            if any(self._clashing(options, within)):
                raise
            ways = [self.of(option) for option in options]
        left = [way for way in ways if way is not False]
        return both(rest, {"anyOf": left} if left else False, is_kept=True)

    def _clashing(self, options: list[AnySchema], within: Atoms) -> list[list[AnySchema]]:
        """Return for each option the others that may hold together with it."""
        found: list[list[AnySchema]] = [[] for _ in options]
        if are_told_apart(self._facts, options, within):
            return found
        for index, option in enumerate(options):
            for place in range(index):
                if not are_disjoint(self._facts, option, options[place], within):
                    found[index].append(options[place])
                    found[place].append(option)
        return found

    def _told_apart(self, options: list[AnySchema]) -> list[AnySchema]:
        """Return options that must have the first property that all of them have, which is narrower."""
        known = [
            dict.fromkeys(name for part in self._facts.conjuncts(option) for name in part.get("properties", {}))
            for option in options
        ]
        name = next((name for name in known[0] if all(name in each for each in known)), None)
        if name is None:
            raise InexpressibleError
        return [both(option, {"required": [name]}) for option in options]

    def _alone(self, option: AnySchema, others: list[AnySchema], rest: Schema) -> AnySchema:
        """Return a schema of the values that satisfy an option and none of the others."""
        found = self.of(option)
        for other in others:
            found = both(found, self.of(Not(other, (option, rest))))
        return found

    def _without_contains(self, rest: Schema, schema: AnySchema) -> AnySchema:
        least, most = rest.get("minContains", 1), rest.get("maxContains")
        rest = type(rest)({key: value for key, value in rest.items() if key not in ("minContains", "maxContains")})
        if least == 0 and most is None:
            return rest
        if least == 0 and most == 0:
            return both(rest, Exact(items=self.of(Not(schema))), is_kept=True)
        items, text = [*rest.get("prefixItems", []), rest.get("items", True)], canonical(schema)
        if all(self._implies(item, schema, text) for item in items):
            bounds = {"minItems": least} if most is None else {"minItems": least, "maxItems": most}
            return both(rest, Exact(bounds), is_kept=True)
        no_array = self._other_types(rest)
        if all(are_disjoint(self._facts, item, schema) for item in items):
            return rest if least == 0 else both(rest, no_array, is_kept=True)
        longest = rest.get("maxItems", len(items) - 1 if items[-1] is False else MAX_PLACES + 1)
        if least != 1 or most is not None or longest > MAX_PLACES:
            raise InexpressibleError
        wanted = self.of(schema)
        ways = [
            Exact(type="array", prefixItems=[*[True] * place, wanted], minItems=place + 1)
            for place in range(int(longest))
        ]
        return both(rest, one_of([*ways, no_array]), is_kept=True)

    def _implies(self, schema: AnySchema, other: AnySchema, text: str) -> bool:
        """Return whether it is certain that what satisfies one schema satisfies the other, whose canonical form is ``text``."""
        try:
            return canonical(schema) == text or are_disjoint(self._facts, schema, self.of(Not(other, (schema,))))
        except InexpressibleError:
            return False

    def _other_types(self, rest: Schema) -> AnySchema:
        """Return a schema of the values that are no arrays."""
        others = self._facts.atoms(rest) - {"array"}
        return Exact(type=type_of(others)) if others else False

    def _without_unique_items(self, rest: Schema, is_unique: object) -> AnySchema:
        first, items = rest.get("prefixItems", []), rest.get("items", True)
        most = len(first) if items is False else rest.get("maxItems")
        if is_unique is False or (most is not None and most <= 1):
            return rest
        if is_unique is not True:
            raise InexpressibleError
        if first and most is not None and most <= len(first):
            pairs = [(one, other) for index, one in enumerate(first) for other in first[:index]]
            if all(are_disjoint(self._facts, *pair) for pair in pairs):
                return rest
        values = None if first else self._facts.values(items)
        if values is None:
            raise InexpressibleError
        return both(rest, one_of([self._orders(values, rest), self._other_types(rest)]), is_kept=True)

    def _without_property_names(self, rest: Schema, schema: AnySchema) -> AnySchema:
        others = type(rest)({key: value for key, value in rest.items() if key not in _PROPERTIES})
        return both(others, Exact(with_names(self._facts, rest, schema)), is_kept=True)

    def _orders(self, values: list[Any], rest: Schema) -> AnySchema:
        """Return a schema of all arrays of different values."""
        least, most = int(rest.get("minItems", 0)), min(len(values), int(rest.get("maxItems", len(values))))
        lengths = range(least, most + 1)
        if sum(perm(len(values), length) for length in lengths) > MAX_ORDERS:
            raise InexpressibleError
        arrays = [list(order) for length in lengths for order in permutations(values, length)]
        return Exact(type="array", enum=arrays) if arrays else False


def both(one: AnySchema, other: AnySchema, is_kept: bool = False) -> AnySchema:
    """Return a schema of the values that satisfy two schemas. ``is_kept``: all parts of the first one stay at their places."""
    if one is False or other is False:
        return False
    if one is True or one == {}:
        return other
    if other is True or other == {}:
        return one
    merged = _merged(one, other, is_kept)
    if merged is not None:
        return merged
    if is_kept:
        return type(one)({**one, "allOf": [*one.get("allOf", []), other]})
    return Exact(allOf=[one, other])


def _merged(one: Schema, other: Schema, is_kept: bool) -> Schema | None:
    """Return one object with the keywords of both; None if they would mean something else together."""
    found: Schema = dict(one)
    for group in (_PROPERTIES, _ITEMS):
        names = [{name for name in group if name in each} for each in (one, other)]
        if all(names) and (is_kept or names != [{group[0]}, {group[0]}] or group is _ITEMS):
            return None
    for name, value in other.items():
        if name not in one or canonical(one[name]) == canonical(value):
            found[name] = value
        elif name == "required":
            found[name] = list(dict.fromkeys([*one[name], *value]))
        elif name == "properties":
            parts = {**one[name], **value}
            found[name] = {
                key: both(one[name][key], value[key]) if key in one[name] and key in value else part
                for key, part in parts.items()
            }
        else:
            return None
    is_exact = isinstance(one, Exact) or isinstance(other, Exact) or not is_kept
    return Exact(found) if is_exact and not is_kept else type(one)(found)
