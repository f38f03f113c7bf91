"""Says in words of JSON Schema and of the caller's grammar why llguidance does not compile a grammar, where, and what helps."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ..generation.grammar import Grammar
from .json_schema import OVERLAPPING
from .matcher import first_line
from .nodes import Alternatives, Node, Reference, Repeat, Rules, Schema
from .regex import python_reason, with_place
from .schema_facts import LITERAL, MAPS
from .translation import SyntaxTree

NOTHING = "NoExtensionBias"
"""What llguidance says of a grammar without a single text."""
MAX_PARTS = 20_000
"""The most parts of a schema in which a keyword is looked for."""
_PREFIXES = ("failed to compile JSON schema: ", "Unsatisfiable schema: ")
_LARK_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
_UNKNOWN = re.compile(r'Unimplemented keys: \["([^"]*)"')
_REMEDIES = {
    "not": "say what is allowed instead, with enum, bounds or anyOf",
    **dict.fromkeys(["if", "then", "else", "dependentSchemas"], "write the cases as the options of an anyOf"),
    "dependencies": "use dependentRequired",
    **dict.fromkeys(["contains", "minContains", "maxContains"], "use minItems and maxItems, or leave it out"),
    "uniqueItems": "leave it out (in pydantic, use list in place of set), and remove what comes twice from the answer",
    "propertyNames": "list the names in properties, or use patternProperties",
    "unevaluatedProperties": "use additionalProperties",
    "unevaluatedItems": "use items",
}
_WORDS = (
    (r"Invalid type: (.*)", r"the type '\1' is unknown: use string, number, integer, boolean, null, array or object"),
    (r"anyOf is empty", "an empty choice (enum, anyOf or type), which nothing satisfies: add something"),
    (r"schema is false", "nothing satisfies it: each of its choices is false"),
    (r"incompatible types", "nothing satisfies it: its parts demand different types"),
    (r"Expected f64 for '(\w+)', got (.*)", r"\1 is \2: must be a number"),
    (r"Expected positive integer for '(\w+)', got (.*)", r"\1 is \2: must be a whole number from 0 on"),
    (r"Expected (\w+) for '(\w+)'( item)?, got (.*)", r"\2\3 is \4: must be of the type \1"),
    (r"invalid multiple of", "multipleOf must be a number above 0"),
    (r"oneOf constraints are not supported.*", "oneOf with options that may hold together is not supported: use anyOf"),
    (r"circular references with sibling keys.*", "a $ref that leads back to itself beside other keywords: leave one of them out"),
    (r"Schema intersection stack level exceeded", "its references lead back to themselves, or are nested too deeply"),
    (r"Resource '(?:json-schema:///)?(.*?)' is not present.*", r"'\1' is another document: put what it has into $defs"),
    (r"Pointer '(.*)' does not exist", r"the $ref '#\1' leads nowhere: add it to $defs"),
    (r"Anchor '(.*)' does not exist", r"the $ref '#\1' leads nowhere: add the $anchor, or use '#/$defs/…'"),
    (r"Failed to generate regex for (?:float|integer) range.*",
     "the bounds of a number are too large: leave them out, or use smaller ones"),
    (r"Value for 'multipleOf' has too many digits.*", "multipleOf has too many digits: use a simpler number"),
    (r"(.*)lookarounds not supported yet; \w+ in regex (.*)", r"the regex \2 has a place such as \\b: leave it out"),
    (r"unrecognized flag: '(.)'(.*)", r"a group that begins with (?\1 is not supported\2"),
    (r"decimal literal invalid: '(\d+)'", r"the number \1 is too large: use a smaller one"),
    (r".*Current row has (\d+) items; max is (\d+).*",
     r"\1 choices at one place, \2 are the most: use fewer optional properties or choices, or require some of them"),
    (r".*too many expressions constructed.*", "it is too large: repeat less often, and nest fewer repetitions"),
)  # fmt: skip
"""What llguidance says of a grammar → what we say."""


def reason_of(message: str, grammar: Grammar, tree: SyntaxTree | None) -> str:
    """Return why a grammar with this error of llguidance cannot be compiled, in one line.

    Args:
        tree: The parsed grammar; None for one in Lark.
    """
    reason = first_line(message)
    if reason == NOTHING:
        return _nothing(grammar, tree)
    if grammar.kind == "regex":
        return python_reason(grammar.text) or with_place(_in_words(reason), grammar.text)
    place = ""
    if found := _LARK_PLACE.match(reason):
        reason = reason[found.end() :]
        if grammar.kind == "lark":  # in Lark that we wrote, the place says nothing
            place = f"line {found[1]}, column {found[2]}: "
    for prefix in _PREFIXES:
        reason = reason.removeprefix(prefix)
    if unknown := _UNKNOWN.match(reason):
        for place, part in (each for schema in _schemas(tree) for each in _parts(schema)):
            if part.get("not") == OVERLAPPING:
                return f"oneOf at {place!r} with options that may hold together is not supported: use anyOf"
        places = [f" at {place!r}" for schema in _schemas(tree) for place, part in _parts(schema) if unknown[1] in part]
        return (
            f"the keyword {unknown[1]!r}{(places or [''])[0]} is not supported here: "
            f"{_REMEDIES.get(unknown[1], 'leave it out, or say it in another way')}"
        )
    return place + _in_words(reason)


def _in_words(reason: str) -> str:
    for pattern, words in _WORDS:
        if re.fullmatch(pattern, reason):
            return re.sub(pattern, words, reason, count=1)
    return reason


def _nothing(grammar: Grammar, tree: SyntaxTree | None) -> str:
    """Return why no text matches."""
    for schema in _schemas(tree):
        if place := _circle(schema):
            return (
                f"the $ref at {place!r} leads back to itself without saying anything: leave it out, or give it a type"
            )
    if names := _endless_rules(tree.rules) if tree else []:
        name = names[0].rpartition("/")[2]
        return f"the rule {name!r} needs itself to end: give it a choice without it"
    if grammar.kind == "regex":
        return "no text matches it: widen its classes"
    return "no text matches it: a rule needs itself to end, or nothing is left of its choices"


def _schemas(tree: SyntaxTree | None) -> Iterator[Any]:
    """Yield the JSON schemas in a syntax tree."""
    left: list[Node] = [] if tree is None else [tree.root, *tree.rules.values()]
    while left:
        node = left.pop()
        left += node.children
        if isinstance(node, Schema):
            yield node.schema


def _parts(schema: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the places of a schema's parts, as JSON pointers, and the parts."""
    left = [("#", schema, False)]
    num_left = MAX_PARTS
    while left and num_left:
        place, part, is_map = left.pop(0)
        num_left -= 1
        if isinstance(part, list):
            left += [(f"{place}/{index}", each, False) for index, each in enumerate(part)]
        if not isinstance(part, Mapping):
            continue
        if not is_map:
            yield place, part
        for name, value in part.items():
            if is_map or name not in LITERAL:
                left.append((f"{place}/{_escaped(name)}", value, name in MAPS and not is_map))


def _circle(schema: Any) -> str:
    """Return the place of a reference that leads back to itself through references alone; "" without one."""
    parts = dict(_parts(schema))
    anchors = {f"#{part['$anchor']}": place for place, part in parts.items() if isinstance(part.get("$anchor"), str)}
    for start in parts:
        seen = set[str]()
        place = start
        while (target := _target(parts.get(place, {}))) is not None:
            seen.add(place)
            place = anchors.get(target, target or "#")
            if place == start:
                return start
            if place in seen:
                break
    return ""


def _target(part: Mapping[str, Any]) -> str | None:
    """Return the reference that a part of a schema consists of, also if it is in an ``allOf``."""
    all_of = part.get("allOf")
    for each in (part, *(all_of if isinstance(all_of, list) else ())):
        name = each.get("$ref") if isinstance(each, Mapping) else None
        if isinstance(name, str):
            return name
    return None


def _endless_rules(rules: Rules) -> list[str]:
    """Return the names of the rules that no text can end."""
    ending = set[str]()
    while found := {name for name, node in rules.items() if name not in ending and _can_end(node, ending)}:
        ending |= found
    return [name for name in rules if name not in ending]


def _can_end(node: Node, ending: set[str]) -> bool:
    ways = [_can_end(child, ending) for child in node.children]
    match node:
        case Reference(name):
            return name in ending
        case Repeat(least=0):
            return True
        case Alternatives():
            return any(ways)
    return all(ways)


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
