"""Writes short texts of grammars and of their parts, from which endings of answers are put together.

They are guesses: llguidance checks each of them before it is used. So a keyword that is not looked at here costs nothing but a
guess.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

try:  # Python 3.11 and later
    from re import _constants as regex_constants  # type: ignore[attr-defined]
    from re import _parser as regex_parser  # type: ignore[attr-defined]
except ImportError:
    import sre_constants as regex_constants
    import sre_parse as regex_parser

from .nodes import (
    AllOf,
    Alternatives,
    FixedText,
    Node,
    Pattern,
    Reference,
    Repeat,
    Schema,
    Shortest,
    Token,
    walk,
)
from .nodes import Sequence as InOrder
from .schema_facts import InexpressibleError, SchemaFacts
from .translation import SyntaxTree

Symbols = tuple[int, ...]
"""A text: its bytes, and special tokens as the numbers that the syntax tree has for them, which are 256 and more."""
MAX_TEXT = 4096
"""The most symbols of a text; longer ones are no guesses."""
MAX_PIECES = 400
"""The most texts of parts that are kept."""
MAX_VISITS = 4000
MAX_ROUNDS = 40
MAX_OPTIONS = 32
PLAIN = "a0 -_.AZz1/:,x"
"""The characters that are tried for a class, in this order."""
FILLERS = ("a", " ", "-", "=", "0")
"""The characters that make a string as long as it must be."""
OF_FORMAT = {
    "date-time": "2000-01-01T00:00:00Z", "time": "00:00:00Z", "date": "2000-01-01", "duration": "P1D", "email": "a@a.aa",
    "hostname": "a", "ipv4": "0.0.0.0", "ipv6": "::", "uuid": "00000000-0000-0000-0000-000000000000", "uri": "a:a",
}  # fmt: skip
"""A short string of each format."""


@dataclass(frozen=True)
class Style:
    """What is between the parts of a JSON text, and the character that fills strings."""

    comma: str = ","
    colon: str = ":"
    filler: str = "a"


STYLES = (Style(), Style(", ", ": "), *(Style(filler=filler) for filler in FILLERS[1:]))


def text_symbols(text: str) -> Symbols:
    return tuple(text.encode())


class ShortTexts:
    """The short texts of one syntax tree in one style.

    ``whole`` is one of the root, None if none is known. ``pieces`` are those of parts: what begins in the middle of a text may be
    ended by the rest of one.
    """

    def __init__(self, tree: SyntaxTree, style: Style) -> None:
        self._style = style
        self._of_rule: dict[str, Symbols] = {}
        self._is_collecting = False
        self._found: dict[Symbols, None] = {}
        for _ in range(MAX_ROUNDS):
            before = dict(self._of_rule)
            for name, body in tree.rules.items():
                if (text := self._of(body)) is not None:
                    self._of_rule[name] = text
            if before == self._of_rule:
                break
        self._is_collecting = True
        self.whole = self._of(tree.root)
        for body in (tree.root, *tree.rules.values()):
            for node in walk(body):
                self._keep(self._of(node))
        self.pieces = tuple(sorted(self._found, key=len))[:MAX_PIECES]

    def _keep(self, text: Symbols | None) -> None:
        if text and self._is_collecting:
            self._found[text] = None

    def _of(self, node: Node) -> Symbols | None:
        """Return a short text of a node; None if none is known."""
        match node:
            case FixedText(text):
                found: Symbols | None = text_symbols(text)
            case Token(id):
                found = (id,)
            case Pattern(regex):
                found = self._of_regex(regex)
            case AllOf(regexes, _):
                found = self._of_regex(max(regexes, key=len))
            case Shortest(ends, least):
                found = text_symbols(self._style.filler * least + min(ends, key=len))
            case Schema(schema):
                values = SchemaTexts(schema, self._style)
                found = None if (value := values.of(schema)) is None else text_symbols(value)
                for piece in values.pieces if self._is_collecting else ():
                    self._keep(text_symbols(piece))
            case Reference(name):
                found = self._of_rule.get(name)
            case Alternatives(parts):
                found = _shortest(map(self._of, parts))
            case Repeat(part, least):
                one = self._of(part) if least else ()
                found = None if one is None else one * least
            case InOrder(parts):
                found = self._in_order([self._of(part) for part in parts])
            case _:
                found = None
        return found if found is None or len(found) <= MAX_TEXT else None

    def _in_order(self, texts: Sequence[Symbols | None]) -> Symbols | None:
        """Return the texts one after the other, and keep what follows each of them."""
        rest: Symbols | None = ()
        for text in reversed(texts):
            rest = None if text is None or rest is None else text + rest
            self._keep(rest)
        return rest

    def _of_regex(self, regex: str) -> Symbols | None:
        found = RegexTexts(regex, self._style.filler)
        for piece in found.pieces if self._is_collecting else ():
            self._keep(text_symbols(piece))
        return None if found.whole is None else text_symbols(found.whole)


def _shortest(texts: Iterable[Symbols | None]) -> Symbols | None:
    return min((text for text in texts if text is not None), key=len, default=None)


class RegexTexts:
    """A short match of a regular expression, ``whole`` (None if none is known), and those of its parts, ``pieces``."""

    def __init__(self, regex: str, filler: str) -> None:
        self.whole: str | None = None
        self.pieces: list[str] = []
        self._plain = filler + PLAIN
        escaped = re.sub(r"\\[ux]\{([0-9A-Fa-f]{1,8})\}", lambda found: f"\\U{int(found[1], 16):08x}", regex)
        try:
            with warnings.catch_warnings():  # of what Python may read in another way one day
                warnings.simplefilter("ignore")
                parsed: Any = regex_parser.parse(escaped.replace("\\z", "\\Z"))
            self.whole = self._of(parsed)
        except (re.error, RecursionError, OverflowError, ValueError):
            return  # Rust's syntax has more than Python's

    def _of(self, parsed: Iterable[tuple[Any, Any]]) -> str | None:
        """Return a short match of what Python's parser returns: operations one after the other."""
        rest: str | None = ""
        for operation, value in reversed(list(parsed)):
            text = self._of_one(str(operation), value)
            rest = None if text is None or rest is None or len(text) + len(rest) > MAX_TEXT else text + rest
            if rest:
                self.pieces.append(rest)
        return rest

    def _of_one(self, operation: str, value: Any) -> str | None:
        found: str | None = None
        match operation:
            case "LITERAL":
                found = chr(value)
            case "NOT_LITERAL":
                found = next(char for char in self._plain if ord(char) != value)
            case "ANY":
                found = self._plain[0]
            case "IN":
                found = self._of_class(value)
            case "BRANCH":
                options = [text for part in value[1] if (text := self._of(part)) is not None]
                found = min(options, key=len, default=None)
            case "SUBPATTERN":
                found = self._of(value[-1])
            case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
                text = self._of(value[2])
                found = None if text is None or int(value[0]) * len(text) > MAX_TEXT else text * int(value[0])
            case "AT":
                found = ""
        return found

    def _of_class(self, items: Sequence[tuple[Any, Any]]) -> str | None:
        firsts = [chr(value if str(name) == "LITERAL" else value[0]) for name, value in items if str(name) in _STARTS]
        return next((char for char in (*self._plain, *firsts) if _is_in(ord(char), items)), None)


_STARTS = ("LITERAL", "RANGE")
_CATEGORIES = {
    regex_constants.CATEGORY_DIGIT: r"\d", regex_constants.CATEGORY_NOT_DIGIT: r"\D", regex_constants.CATEGORY_SPACE: r"\s",
    regex_constants.CATEGORY_NOT_SPACE: r"\S", regex_constants.CATEGORY_WORD: r"\w", regex_constants.CATEGORY_NOT_WORD: r"\W",
}  # fmt: skip


def _is_in(char: int, items: Sequence[tuple[Any, Any]]) -> bool:
    """Return whether a class, as Python's parser returns it, has a character."""
    is_negated = False
    is_found = False
    for name, value in items:
        match str(name):
            case "NEGATE":
                is_negated = True
            case "LITERAL":
                is_found = is_found or value == char
            case "RANGE":
                is_found = is_found or value[0] <= char <= value[1]
            case "CATEGORY":
                is_found = is_found or bool(re.match(_CATEGORIES[value], chr(char), re.ASCII))
    return is_found != is_negated


class SchemaTexts:
    """Short JSON texts of the parts of one schema ``root`` in one style; ``pieces`` has those of all that were asked for."""

    def __init__(self, root: Any, style: Style) -> None:
        self._facts = SchemaFacts(root)
        self._style = style
        self._open = set[str]()  # references that are being followed
        self._num_left = MAX_VISITS
        self._kept: dict[str, None] = {}

    @property
    def pieces(self) -> list[str]:
        """The texts of all parts that were asked for."""
        return sorted(self._kept, key=len)[:MAX_PIECES]

    def of(self, schema: Any) -> str | None:
        """Return a short text of a schema; None if none is known."""
        self._num_left -= 1
        if schema is True or schema == {}:
            self._kept.update(dict.fromkeys(_ANY_JSON))
            return "0"
        if not isinstance(schema, Mapping) or self._num_left < 0:
            return None
        texts = list(self._options(schema))
        found = min((text for text in texts if len(text) <= MAX_TEXT), key=len, default=None)
        self._kept.update(dict.fromkeys(texts))
        return found

    def _options(self, schema: Mapping[str, Any]) -> Iterator[str]:
        """Yield a text for each way to satisfy a schema that is tried."""
        if isinstance(schema.get("$ref"), str):
            yield from _known(self._of_reference(schema["$ref"]))
        elif "const" in schema:
            yield self._written(schema["const"])
        elif isinstance(schema.get("enum"), list):
            yield from map(self._written, schema["enum"])
        elif isinstance(schema.get("allOf"), list):
            rest = {name: value for name, value in schema.items() if name != "allOf"}
            yield from _known(self.of(self._merged([rest, *schema["allOf"]])))
        elif ways := next((schema[name] for name in ("anyOf", "oneOf") if isinstance(schema.get(name), list)), None):
            rest = {name: value for name, value in schema.items() if name not in ("anyOf", "oneOf")}
            for way in ways[:MAX_OPTIONS]:
                yield from _known(self.of(self._merged([rest, way]) if rest.keys() - {"x-guidance", "$defs"} else way))
        else:
            kinds = schema.get("type", _guessed_types(schema))
            for kind in [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else []:
                yield from _known(self._of_type(str(kind), schema))

    def _merged(self, parts: Sequence[Any]) -> Any:
        """Return a schema that satisfies the parts, if they are simple."""
        found: dict[str, Any] = {}
        for part in map(self._without_reference, parts):
            if part is False:
                return False
            for name, value in part.items() if isinstance(part, Mapping) else ():
                if name in ("properties", "$defs") and isinstance(found.get(name), dict):
                    found[name] = {**found[name], **value}
                elif name in ("required", "allOf") and isinstance(found.get(name), list):
                    found[name] = [*found[name], *value]
                elif name in ("minimum", "minLength", "minItems", "minProperties") and name in found:
                    found[name] = max(found[name], value)
                else:
                    found[name] = value
        return found

    def _without_reference(self, schema: Any) -> Any:
        """Return what a schema that is only a reference leads to; False if that is not known."""
        while isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str) and len(schema) == 1:
            try:
                self._facts.visit()
                schema = self._facts.target(schema["$ref"])
            except InexpressibleError:
                return False
        return schema

    def _of_reference(self, name: str) -> str | None:
        if name in self._open:
            return None
        try:
            target = self._facts.target(name)
        except InexpressibleError:
            return None
        self._open.add(name)
        found = self.of(target)
        self._open.discard(name)
        return found

    def _written(self, value: Any) -> str:
        return json.dumps(value, ensure_ascii=False, separators=(self._style.comma, self._style.colon))

    def _of_type(self, kind: str, schema: Mapping[str, Any]) -> str | None:
        match kind:
            case "null" | "boolean":
                return "null" if kind == "null" else "true"
            case "integer" | "number":
                return _number(schema, kind == "integer")
            case "string":
                return self._string(schema)
            case "array":
                return self._array(schema)
            case _:
                return self._object(schema) if kind == "object" else None

    def _string(self, schema: Mapping[str, Any]) -> str | None:
        text = OF_FORMAT.get(str(schema.get("format")), "")
        if isinstance(pattern := schema.get("pattern"), str):
            found = RegexTexts(pattern, self._style.filler)
            self._kept.update(dict.fromkeys(self._written(piece)[1:] for piece in found.pieces))
            if found.whole is None:
                return None
            text = found.whole
        least = schema.get("minLength", 0)
        if isinstance(least, int) and len(text) < least <= MAX_TEXT:
            text += self._style.filler * (least - len(text))
        return self._written(text)

    def _array(self, schema: Mapping[str, Any]) -> str | None:
        firsts = schema.get("prefixItems", [])
        items = schema.get("items", True)
        least = schema.get("minItems", 0)
        if not isinstance(firsts, list) or not isinstance(least, int) or least > MAX_TEXT:
            return None
        texts = [self.of(each) for each in firsts]
        item = self.of(items)
        texts = (texts + [item] * (least - len(texts)))[:least]
        return self._closed("[", texts, "]")

    def _object(self, schema: Mapping[str, Any]) -> str | None:
        properties = schema.get("properties", {})
        required = schema.get("required", [])
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            return None
        others = schema.get("additionalProperties", True)
        names = [*properties, *(name for name in required if name not in properties)]
        written = {str(name): self._property(str(name), properties.get(name, others)) for name in names}
        wanted = [name for name in written if name in set(required)]
        least = min(schema.get("minProperties", 0), MAX_OPTIONS)
        for name in _free_names(schema):
            self._closed("{", [self._property(name, others)], "}")
        if others is not False and len(written) < least:
            written |= {name: self._property(name, others) for name in _OTHER_NAMES[: least - len(written)]}
        free = [name for name, text in written.items() if text is not None and name not in wanted]
        kept = {*wanted, *free[: max(0, least - len(wanted))]}
        return self._closed("{", [text for name, text in written.items() if name in kept], "}")

    def _property(self, name: str, schema: Any) -> str | None:
        value = self.of(schema)
        if value is None:
            return None
        found = f"{self._written(name)}{self._style.colon}{value}"
        self._kept[found] = None
        return found

    def _closed(self, begin: str, texts: Sequence[str | None], end: str) -> str | None:
        """Return parts between ``begin`` and ``end``, and keep what follows each of them."""
        rest = end
        for index, text in reversed(list(enumerate(texts))):
            if text is None or len(rest) > MAX_TEXT:
                return None
            rest = f"{self._style.comma if index else begin}{text}{rest}"
            self._kept[rest] = None
        return rest if texts else begin + end


_ANY_JSON = ("0", '""', "[]", "{}", "null", "true", "false", '{"":0}', "[0]")
_OTHER_NAMES = [str(number) for number in range(MAX_OPTIONS)]
"""Names of properties that a schema does not list."""


def _free_names(schema: Mapping[str, Any]) -> list[str]:
    """Return names of properties that a schema does not list, if it allows any: the empty one, which begins like all."""
    return [] if schema.get("additionalProperties", True) is False else [""]


def _known(text: str | None) -> Iterator[str]:
    if text is not None:
        yield text


def _guessed_types(schema: Mapping[str, Any]) -> list[str]:
    """Return the types that a schema without ``type`` is about, and a number, which other keywords do not limit."""
    names = {
        "object": ("properties", "required", "additionalProperties", "minProperties"),
        "array": ("items", "prefixItems", "minItems"),
        "string": ("pattern", "minLength", "maxLength", "format"),
    }  # fmt: skip
    return ["number", *(kind for kind, words in names.items() if not schema.keys().isdisjoint(words))]


def _number(schema: Mapping[str, Any], is_whole: bool) -> str | None:
    """Return a short number within the bounds of a schema; None if none is found."""
    values = {name: schema[name] for name in _BOUNDS if isinstance(schema.get(name), (int, float))}
    least = max(values.get("minimum", -math.inf), values.get("exclusiveMinimum", -math.inf))
    most = min(values.get("maximum", math.inf), values.get("exclusiveMaximum", math.inf))
    step = values.get("multipleOf", 1)
    near = [0, 1]
    for bound in (least, most):
        if math.isfinite(bound):
            steps = math.floor(bound / step) if step else 0
            near += [steps * step, (steps + 1) * step, (steps - 1) * step]
            near += [] if is_whole else [bound, (least + most) / 2]
    fitting = [
        value for value in near if math.isfinite(value) and least <= value <= most and value not in _edges(values)
    ]
    texts = [_plain_number(value) for value in fitting if not is_whole or value == int(value)]
    return min(texts, key=len, default=None)


_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


def _edges(values: Mapping[str, float]) -> tuple[float, ...]:
    return tuple(values[name] for name in ("exclusiveMinimum", "exclusiveMaximum") if name in values)


def _plain_number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)
