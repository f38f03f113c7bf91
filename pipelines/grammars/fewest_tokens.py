"""Finds how many tokens an answer of a grammar has at least, so that a request that can never end is refused."""

from __future__ import annotations

import json
import math
import re
import warnings
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

try:  # Python 3.11 and later
    from re import _parser as regex_parser  # type: ignore[attr-defined]
except ImportError:
    import sre_parse as regex_parser

from ..generation.grammar import Grammar
from .nodes import (
    Alternatives,
    FixedText,
    Node,
    Reference,
    Repeat,
    Rules,
    Schema,
    Shortest,
    Token,
)
from .schema_facts import InexpressibleError, SchemaFacts
from .translation import choices_of, tree_of
from .vocabulary import Vocabulary

MAX_BYTES = 1 << 16
"""Most bytes of a fixed text that count; longer ones do not fit into an answer."""
MAX_VISITS = 20_000
"""The most rules and parts of schemas that are looked at. References to references can make exponentially many."""


class TokenBounds:
    """Lower bounds for a vocabulary. They are exact for choices; otherwise an answer may need more tokens.

    A bound counts the tokens that have at least one byte of a part. Two neighbours may share one token, so a sequence of n parts
    has at least the sum of their bounds less n - 1.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._texts = [text for id, text in enumerate(vocabulary.tokens) if text and id not in vocabulary.special]
        self._known = frozenset(self._texts)
        self._special = vocabulary.special_by_text
        self._longest = max(map(len, self._texts), default=1)

    @cached_property
    def _joined(self) -> bytes:
        return b"\xff".join(self._texts)  # this byte is in no text

    @cached_property
    def _sorted(self) -> list[bytes]:
        return sorted(self._texts)

    @cached_property
    def _reversed(self) -> list[bytes]:
        return sorted(text[::-1] for text in self._texts)

    def fewest_tokens(self, grammar: Grammar) -> float:
        """Return how many tokens every answer of the grammar has at least: 0 if nothing is known, infinity if no answer ends.

        Raises:
            GenerationConfigError: the grammar is malformed.
        """
        if grammar.kind == "choice":
            return min(self._segments(text.encode()) for text in choices_of(grammar))
        if grammar.kind == "regex":
            return self._of_regex(grammar.text)
        tree = tree_of(grammar, self._special)
        return 0 if tree is None else _Bounds(self, tree.rules).of(tree.root)

    def covering(self, text: bytes) -> float:
        """Return how many tokens at least share a byte with ``text`` within a longer text."""
        if not text:
            return 0
        if text in self._joined:
            return 1
        text = text[:MAX_BYTES]
        costs = [math.inf] * (len(text) + 1)
        costs[0] = 0
        best = math.inf
        for start in range(len(text)):
            if 0 < start < self._longest and _has_prefix(self._reversed, text[:start][::-1]):
                costs[start] = min(costs[start], 1)
            if math.isinf(costs[start]):
                continue
            if len(text) - start <= self._longest and _has_prefix(self._sorted, text[start:]):
                best = min(best, costs[start] + 1)
            self._extend(text, start, costs)
        return min(best, costs[len(text)])

    def _segments(self, text: bytes) -> float:
        """Return the fewest tokens whose bytes are exactly ``text``; infinite if there are none."""
        costs = [math.inf] * (len(text) + 1)
        costs[0] = 0
        for start in range(len(text)):
            if not math.isinf(costs[start]):
                self._extend(text, start, costs)
        return costs[len(text)]

    def _extend(self, text: bytes, start: int, costs: list[float]) -> None:
        for end in range(start + 1, min(start + self._longest, len(text)) + 1):
            if text[start:end] in self._known and costs[start] + 1 < costs[end]:
                costs[end] = costs[start] + 1

    def _of_regex(self, pattern: str) -> int:
        """Return the fewest characters of a match, divided by the length of the longest token."""
        try:
            with warnings.catch_warnings():  # of what Python may read in another way one day
                warnings.simplefilter("ignore")
                parsed = regex_parser.parse(pattern)
        except (re.error, RecursionError, OverflowError):
            return 0  # Rust's syntax has more than Python's
        return math.ceil(int(parsed.getwidth()[0]) / self._longest)


class _Bounds:
    """The bounds of the rules of one grammar."""

    def __init__(self, bounds: TokenBounds, rules: Rules) -> None:
        self._bounds = bounds
        self._of_rule = dict.fromkeys(rules, math.inf)  # without a way to end, as far as known
        for _ in range(max(2, MAX_VISITS // (2 * max(len(rules), 1)))):
            before = dict(self._of_rule)
            for name in (*reversed(tuple(rules)), *rules):  # rules mostly refer to those after them
                self._of_rule[name] = self.of(rules[name])
            if before == self._of_rule:
                break
        else:
            self._of_rule = dict.fromkeys(rules, 0.0)

    def of(self, node: Node) -> float:
        match node:
            case FixedText(text):
                bound = self._bounds.covering(text.encode())
            case Shortest(ends):
                bound = min(self._bounds.covering(end.encode()) for end in ends)
            case Schema(schema):
                bound = SchemaBounds(self._bounds, schema).of(schema)
            case Reference(name):
                bound = self._of_rule[name]
            case Token():
                bound = 1
            case Alternatives(parts):
                bound = min(map(self.of, parts))
            case Repeat(part, least):
                bound = repeated(self.of(part), least)
            case _:
                bound = joined(map(self.of, node.children))
        return bound


class SchemaBounds:
    """The bounds of the parts of one JSON schema ``root``."""

    def __init__(self, bounds: TokenBounds, root: Any) -> None:
        self._bounds = bounds
        self._facts = SchemaFacts(root)
        self._open: set[str] = set()  # references that are being followed
        self._num_left = MAX_VISITS

    def of(self, schema: Any) -> float:
        """Return the bound of a schema; every JSON value has at least one token."""
        self._num_left -= 1
        if not isinstance(schema, Mapping) or self._num_left < 0:
            return 1
        found = [1.0]
        if isinstance(schema.get("$ref"), str):
            found.append(self._of_reference(schema["$ref"]))
        found += [min(map(self.of, schema[name])) for name in ("anyOf", "oneOf") if schema.get(name)]
        found += map(self.of, schema.get("allOf", ()))
        if isinstance(schema.get("const"), str):
            found.append(self._of_string(schema["const"]))
        elif isinstance(schema.get("enum"), list) and all(isinstance(value, str) for value in schema["enum"]):
            found.append(min(map(self._of_string, schema["enum"]), default=1))
        if schema.get("type") == "object":
            found.append(self._of_object(schema))
        elif schema.get("type") == "array" and isinstance(schema.get("minItems"), int):
            items = schema.get("items", True)
            found.append(repeated(self.of(items) if "prefixItems" not in schema else 1, schema["minItems"]))
        return max(found)

    def _of_object(self, schema: Mapping[str, Any]) -> float:
        required = schema.get("required", [])
        properties = schema.get("properties", {})
        if not isinstance(required, list) or not isinstance(properties, Mapping):
            return 1
        parts = [joined((self._of_string(str(name)), self.of(properties.get(name, True)))) for name in required]
        return joined(parts) if parts else 1

    def _of_reference(self, name: str) -> float:
        if name in self._open:
            return math.inf
        try:
            target = self._facts.target(name)
        except InexpressibleError:
            return 1
        self._open.add(name)
        bound = self.of(target)
        self._open.discard(name)
        return bound

    def _of_string(self, text: str) -> float:
        plain = json.dumps(text, ensure_ascii=False)
        return self._bounds.covering(plain.encode()) if "\\" not in plain else 1


def joined(parts: Iterable[float]) -> float:
    """Return the bound of parts one after the other."""
    positive = [part for part in parts if part > 0]
    return sum(positive) - (len(positive) - 1) if positive else 0


def repeated(part: float, times: int) -> float:
    """Return the bound of a part ``times`` times."""
    return times * part - (times - 1) if part > 0 and times > 0 else 0


def _has_prefix(ordered: list[bytes], prefix: bytes) -> bool:
    """Return whether one of the ``ordered`` texts begins with ``prefix``."""
    place = bisect_left(ordered, prefix)
    return place < len(ordered) and ordered[place].startswith(prefix)
