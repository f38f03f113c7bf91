"""What a JSON schema says at first sight (types, listed values, references), and how deep it is nested."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeAlias

from staticllm.errors import GenerationConfigError

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


def with_parts(schema: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a schema object with changed parts: all schemas in the values of its keywords, also in lists and by name."""
    found: dict[str, Any] = {}
    for name, value in schema.items():
        if name in LITERAL:
            found[name] = value
        elif name in MAPS and isinstance(value, Mapping):
            found[name] = {key: change(each) for key, each in value.items()}
        else:
            found[name] = [change(each) for each in value] if isinstance(value, list) else change(value)
    return found


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
    """Return the types that the value of the keyword ``type`` names.

    Raises:
        InexpressibleError: it names others.
    """
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


def fits(value: object, schema: AnySchema) -> bool:
    """Return whether a JSON value has the types, the listed values and the properties that a schema asks for.

    As in a grammar, an object that lists its properties has no others, unless it says ``additionalProperties``. Other keywords
    are not looked at.
    """
    facts = SchemaFacts(schema)
    try:
        return _fits(value, schema, facts, 0)
    except (
        InexpressibleError,
        TypeError,
    ):  # a schema that is malformed, or refers elsewhere: it excludes nothing for certain
        return True


def _fits(value: object, schema: AnySchema, facts: SchemaFacts, depth: int) -> bool:
    if depth > MAX_DEPTH or atom_of(value) not in facts.atoms(schema):
        return False
    parts = [*facts.conjuncts(schema)]
    for part in parts:
        values = facts.listed(part)
        if values is not None and canonical(value) not in map(canonical, values):
            return False
        for name in ("anyOf", "oneOf"):
            options = part.get(name)
            if isinstance(options, list) and not any(_fits(value, option, facts, depth + 1) for option in options):
                return False
    if isinstance(value, list):
        items = [part["items"] for part in parts if "items" in part and "prefixItems" not in part]
        return all(_fits(each, item, facts, depth + 1) for item in items for each in value)
    return not isinstance(value, Mapping) or _has_properties(value, parts, facts, depth)


def _has_properties(
    value: Mapping[str, Any], parts: Sequence[Mapping[str, Any]], facts: SchemaFacts, depth: int
) -> bool:
    known: dict[str, list[AnySchema]] = {}
    for part in parts:
        if not value.keys() >= set(part.get("required", ())):
            return False
        for name, each in part.get("properties", {}).items():
            known.setdefault(name, []).append(each)
    open_parts = ("additionalProperties", "patternProperties", "anyOf", "oneOf")
    is_closed = any(part.get("additionalProperties") is False for part in parts)
    is_listed = bool(known) and not any(name in part for part in parts for name in open_parts)
    if (is_closed or is_listed) and not value.keys() <= known.keys():
        return False
    return all(
        _fits(value[name], each, facts, depth + 1) for name in known.keys() & value.keys() for each in known[name]
    )


def canonical(value: object) -> str:
    """Return a text that equal JSON values, and no others, have in common."""
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: object) -> object:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list) else value


MAX_LEVELS = 300
"""llguidance ends the process from about 900 levels on, on a stack of 8 MiB."""
MAX_STEPS = 1_000_000
"""The most values that are looked at: parts that are referred to may lie within each other."""
_DEFINITIONS = frozenset(["$defs", "definitions"])
_REFERENCES = ("$ref", "$dynamicRef")
_NO_SCHEMAS = frozenset([*LITERAL, *_REFERENCES])


def check_depth(schema: AnySchema) -> None:
    """Check that no chain of parts and references of a schema is too long.

    A part is followed once, so that parts that refer to each other in a circle have at most the levels of all of them.

    Raises:
        GenerationConfigError: one is, or the schema is too large to tell.
    """
    levels = _longest(_PartsReader(schema).parts())
    if levels > MAX_LEVELS:
        raise GenerationConfigError(
            f"the JSON schema has {levels} or more levels, with those of its references, the most are {MAX_LEVELS}: nest it less"
        )


@dataclass(frozen=True)
class _ReferredSchema:
    """A schema that is referred to: how many levels it has, and the references in it."""

    levels: int
    references: frozenset[str]


class _PartsReader:
    """Reads the parts of one schema."""

    def __init__(self, root: AnySchema) -> None:
        self._root = root
        self._facts = SchemaFacts(root)
        self._num_left = MAX_STEPS
        self._whole: _ReferredSchema | None = None

    def parts(self) -> dict[str, _ReferredSchema]:
        """Return the schema, as "#", and all parts that it refers to, by their references."""
        found = {"#": self._part(self._root, _NO_SCHEMAS | _DEFINITIONS)}
        waiting = ["#"]
        while waiting:
            for name in found[waiting.pop()].references - found.keys():
                found[name] = self._target(name)
                waiting.append(name)
        return found

    def _target(self, name: str) -> _ReferredSchema:
        """Return the part that a reference leads to. One that is no path, such as an anchor, may lead anywhere, and back."""
        try:
            return self._part(self._facts.target(name), _NO_SCHEMAS | _DEFINITIONS)
        except InexpressibleError:
            if self._whole is None:
                self._whole = self._part(self._root, _NO_SCHEMAS)
            return _ReferredSchema(self._whole.levels, self._whole.references | {name})

    def _part(self, schema: AnySchema, skipped: Set[str]) -> _ReferredSchema:
        levels = 0
        references = set[str]()
        waiting: list[tuple[Any, int]] = [(schema, 1)]
        while waiting:
            value, level = waiting.pop()
            levels = max(levels, level)
            self._num_left -= 1
            if self._num_left < 0:
                raise GenerationConfigError("the JSON schema refers to too many parts within each other: use fewer")
            if isinstance(value, list):
                waiting += [(each, level) for each in value]
            elif isinstance(value, Mapping):
                references |= {value[key] for key in _REFERENCES if isinstance(value.get(key), str)}
                for key in value.keys() - skipped:
                    inner = value[key]
                    is_map = key in MAPS and isinstance(inner, Mapping)
                    waiting.append(([*inner.values()] if is_map else inner, level + 1))
        return _ReferredSchema(levels, frozenset(references))


def _longest(parts: Mapping[str, _ReferredSchema]) -> int:
    """Return the levels of the longest chain, or more if references form circles; of one that is too long, those of an end."""
    left = dict(parts)
    known: dict[str, int] = {}
    longest = 0
    while left and longest <= MAX_LEVELS:
        ends = [name for name, part in left.items() if part.references <= known.keys()]
        if not ends:
            return longest + sum(part.levels for part in left.values())
        for name in ends:
            part = left.pop(name)
            known[name] = part.levels + max((known[each] for each in part.references), default=0)
            longest = max(longest, known[name])
    return longest
