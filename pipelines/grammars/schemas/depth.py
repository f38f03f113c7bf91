"""Bounds how deep a JSON schema is nested, through its references too: llguidance follows them on the stack of its thread."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

from staticllm.errors import GenerationConfigError
from staticllm.pipelines.grammars.schemas.facts import (
    LITERAL,
    MAPS,
    AnySchema,
    InexpressibleError,
    SchemaFacts,
)

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
    levels = _longest(_Reader(schema).parts())
    if levels > MAX_LEVELS:
        raise GenerationConfigError(
            f"the JSON schema has {levels} or more levels, with those of its references, the most are {MAX_LEVELS}: nest it less"
        )


@dataclass(frozen=True)
class _Part:
    """A schema that is referred to: how many levels it has, and the references in it."""

    levels: int
    references: frozenset[str]


class _Reader:
    """Reads the parts of one schema."""

    def __init__(self, root: AnySchema) -> None:
        self._root, self._facts, self._num_left = root, SchemaFacts(root), MAX_STEPS
        self._whole: _Part | None = None

    def parts(self) -> dict[str, _Part]:
        """Return the schema, as "#", and all parts that it refers to, by their references."""
        found = {"#": self._part(self._root, _NO_SCHEMAS | _DEFINITIONS)}
        waiting = ["#"]
        while waiting:
            for name in found[waiting.pop()].references - found.keys():
                found[name] = self._target(name)
                waiting.append(name)
        return found

    def _target(self, name: str) -> _Part:
        """Return the part that a reference leads to. One that is no path, such as an anchor, may lead anywhere, and back."""
        try:
            return self._part(self._facts.target(name), _NO_SCHEMAS | _DEFINITIONS)
        except InexpressibleError:
            if self._whole is None:
                self._whole = self._part(self._root, _NO_SCHEMAS)
            return _Part(self._whole.levels, self._whole.references | {name})

    def _part(self, schema: AnySchema, skipped: Set[str]) -> _Part:
        levels, references = 0, set[str]()
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
        return _Part(levels, frozenset(references))


def _longest(parts: Mapping[str, _Part]) -> int:
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
