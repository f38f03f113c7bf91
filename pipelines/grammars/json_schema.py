"""Prepares JSON schemas for llguidance: keywords are written with those that it knows, and what xgrammar assumes is said."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from itertools import combinations, product
from typing import Any

from staticllm.errors import GenerationConfigError

from .schema_facts import (
    MAPS,
    AnySchema,
    Atoms,
    InexpressibleError,
    SchemaFacts,
    canonical,
    check_depth,
    listed_values,
    with_parts,
)

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
    """Return the JSON value of a schema's text.

    Raises:
        GenerationConfigError: it is no JSON, or no object and no boolean.
    """
    schema = json_value(text, "the JSON schema")
    if not isinstance(schema, (dict, bool)):
        raise GenerationConfigError(f"the JSON schema is a {type(schema).__name__}: must be an object")
    return schema


def prepared(schema: Any) -> Any:
    """Return an equal or narrower schema with the assumptions of xgrammar's strict mode.

    Objects that list their properties have no others, unless the schema says so; where parts of a schema are combined
    (``allOf`` and the like), they stay as they are, since each part would forbid the properties of the others. Formats that
    are not enforced are left out. Whitespace is limited.

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
    return {**_prepared(schema, closes=not _uses("allOf", schema)), "x-guidance": {"whitespace_pattern": WHITESPACE}}


def _uses(keyword: str, schema: object) -> bool:
    """Return whether a schema or a part of it has a keyword; names of properties do not count."""
    if not isinstance(schema, Mapping):
        return False
    found = [keyword in schema]

    def look(part: object) -> object:
        found.append(_uses(keyword, part))
        return part

    with_parts(schema, look)
    return any(found)


def _prepared(schema: Any, closes: bool) -> Any:
    """``closes``: objects that list their properties have no others."""
    if not isinstance(schema, dict):
        return schema
    is_combined = "properties" in schema and any(name in schema for name in _COMBINERS)
    closes = closes and not is_combined
    format = schema.get("format")
    left_out = {*ANNOTATIONS, *(["format"] if isinstance(format, str) and format not in FORMATS else [])}
    kept = {name: value for name, value in schema.items() if name not in left_out}
    found = with_parts(kept, lambda each: _prepared(each, closes))
    if isinstance(pattern := found.get("pattern"), str):
        found["pattern"] = _with_text_classes(pattern)
    if isinstance(patterns := found.get("patternProperties"), dict):
        found["patternProperties"] = {_with_text_classes(key): each for key, each in patterns.items()}
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
"""An excluded whole bound becomes an included one that is further in by 10 to the power of minus this many digits more than the
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


OVERLAPPING = {"$comment": "oneOf with options that may hold together"}
"""Stays as the value of ``not``, which llguidance refuses, in place of a ``oneOf`` whose options cannot be told apart.

llguidance does not see that options closed against other properties may hold together with them.
"""
_LISTS = ("allOf", "anyOf", "prefixItems")
_SINGLE = ("items", "additionalProperties")
_OF_NAMES = frozenset(["$ref", "allOf", "type", "enum", "const", "title", "description", "default", "examples"])
"""Keywords of the schema of names that list them, or say nothing of them."""


def rewritten(schema: AnySchema) -> AnySchema:
    """Return a schema of the same values without ``oneOf``, ``propertyNames`` and ``not`` of everything, where that is possible.

    What cannot be written so stays, and llguidance refuses it. Options of a ``oneOf`` may get narrower (``told_apart``).
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
    other ones require.

    Args:
        within: The types of values that the schema around them allows.

    Raises:
        InexpressibleError: two options may hold together, or there are too many of them to tell.
    """
    found = [_SchemaOption(facts, option, within) for option in options]
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


class _SchemaOption:
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


def _discriminate(facts: SchemaFacts, options: Sequence[_SchemaOption]) -> bool:
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


def _tell_apart(facts: SchemaFacts, one: _SchemaOption, other: _SchemaOption) -> None:
    """Let two options forbid what the other one requires, unless they differ.

    Raises:
        InexpressibleError: that is not enough.
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
