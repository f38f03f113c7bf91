"""The syntax tree that EBNF grammars, choices, regular expressions and structural tags have in common, and its text in Lark.

llguidance reads a variant of Lark. In it, terminals (upper case) are regular expressions that a lexer matches greedily, and
rules are context-free. A greedy lexer decides too early where a terminal ends: after ``[a-z]*`` no ``"b"`` can follow. So each
part of a grammar that needs no recursion becomes one terminal, together with its neighbours. A grammar without recursion is
one terminal as a whole, and so is exact.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True)
class Text:
    """Exactly this text. ``is_plain``: also where it has the text of a special token, it is written with other tokens."""

    text: str
    is_plain: bool = False


@dataclass(frozen=True)
class Pattern:
    """A match of a regular expression, in the syntax of Rust's ``regex`` crate."""

    regex: str


@dataclass(frozen=True)
class Shortest:
    """Text up to and including the first occurrence of one of ``ends``, with ``least`` to ``most`` characters before it."""

    ends: tuple[str, ...]
    least: int = 0
    most: int | None = None


@dataclass(frozen=True)
class AllOf:
    """Text that matches each of these regular expressions as a whole, and does not contain ``excluded``."""

    regexes: tuple[str, ...]
    excluded: str


@dataclass(frozen=True)
class Schema:
    """JSON that is valid under a schema, which is a JSON value."""

    schema: Any

    def __hash__(self) -> int:
        return hash(json.dumps(self.schema))


@dataclass(frozen=True)
class Reference:
    """The rule of this name."""

    name: str


@dataclass(frozen=True)
class Sequence:
    """The parts, one after the other."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Choice:
    """One of the parts."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Repeat:
    """The part ``least`` to ``most`` times; without end if ``most`` is None."""

    part: Node
    least: int
    most: int | None


@dataclass(frozen=True)
class Token:
    """One token, which stands for no text of its own."""

    id: int


Node: TypeAlias = Text | Pattern | AllOf | Shortest | Schema | Reference | Sequence | Choice | Repeat | Token
Rules: TypeAlias = Mapping[str, Node]
_IRREGULAR = (Schema, Shortest, Token)


def children(node: Node) -> tuple[Node, ...]:
    """Return the parts of a node."""
    if isinstance(node, Repeat):
        return (node.part,)
    return node.parts if isinstance(node, (Sequence, Choice)) else ()


def walk(node: Node) -> Iterator[Node]:
    """Yield a node and all nodes below it."""
    yield node
    for child in children(node):
        yield from walk(child)


def one_of(parts: list[Node]) -> Node:
    """Return a choice; the part itself if there is one."""
    return parts[0] if len(parts) == 1 else Choice(tuple(parts))


def in_order(parts: list[Node]) -> Node:
    """Return a sequence; the part itself if there is one."""
    return parts[0] if len(parts) == 1 else Sequence(tuple(parts))


def with_special_tokens(node: Node, special: Mapping[str, int]) -> Node:
    """Return a tree in which special tokens, by their text, stand for their text: a model writes them as these tokens.

    Plain text has none. Free text ends with a special token only if its end begins with one; it cannot contain special tokens
    itself.
    """
    if isinstance(node, Text) and not node.is_plain:
        pieces = [Text(piece) if isinstance(piece, str) else Token(piece) for piece in split_at(node.text, special)]
        return in_order(list(pieces)) if pieces else node
    if isinstance(node, Shortest):
        ends: list[Node] = []
        for end in node.ends:
            pieces_of_end = split_at(end, special)
            begins_special = bool(pieces_of_end) and isinstance(pieces_of_end[0], int)
            ends.append(
                Sequence((Pattern(f"(?s:.){_count(node)}"), with_special_tokens(Text(end), special)))
                if begins_special
                else Shortest((end,), node.least, node.most)
            )
        return node if all(isinstance(each, Shortest) for each in ends) else one_of(ends)
    if isinstance(node, Repeat):
        return Repeat(with_special_tokens(node.part, special), node.least, node.most)
    if isinstance(node, (Sequence, Choice)):
        return type(node)(tuple(with_special_tokens(part, special) for part in node.parts))
    return node


def split_at(text: str, special: Mapping[str, int]) -> list[str | int]:
    """Return the pieces of a text: texts without special tokens, and the ids of special tokens."""
    if not special or not text:
        return [text] if text else []
    pattern = "|".join(map(re.escape, sorted(special, key=len, reverse=True)))
    pieces = re.split(f"({pattern})", text)
    return [special.get(piece, piece) for piece in pieces if piece]


def regular_rules(rules: Rules) -> frozenset[str]:
    """Return the names of the rules that are regular expressions: neither they nor what they reach is recursive."""
    left, users = (
        dict[str, int](),
        {name: list[str]() for name in rules},
    )  # by rule: references to rules, and who refers to it
    for name, body in rules.items():
        direct = {node.name for node in walk(body) if isinstance(node, Reference)} & rules.keys()
        left[name] = len(direct) + any(isinstance(node, _IRREGULAR) for node in walk(body))  # then it never becomes 0
        for other in direct:
            users[other].append(name)
    found, todo = set[str](), [name for name, count in left.items() if not count]
    while todo:
        found.add(name := todo.pop())
        for user in users[name]:
            left[user] -= 1
            if not left[user]:
                todo.append(user)
    return frozenset(found)


class LarkWriter:
    """Writes a syntax tree as Lark for llguidance."""

    def __init__(self, rules: Rules) -> None:
        self._rules = {name: without_tail_calls(name, body) for name, body in rules.items()}
        self._regular = regular_rules(self._rules)
        self._lines: list[str] = []
        self._names: dict[tuple[str, object], str] = {}

    def write(self, root: Node) -> str:
        """Return the text of a grammar that begins with ``root``."""
        start = self._rule_text(root)
        return "\n".join(["%llguidance {}", f"start: {start}", *self._lines, ""])

    def _is_regular(self, node: Node) -> bool:
        if isinstance(node, Reference):
            return node.name in self._regular
        return not isinstance(node, _IRREGULAR) and all(map(self._is_regular, children(node)))

    def _rule_text(self, node: Node) -> str:
        """Return what stands for a node in a rule."""
        if self._is_regular(node):
            return self._regular_text(node)
        if isinstance(node, Token):
            return f"<[{node.id}]>"
        if isinstance(node, Schema):
            return self._named("j", node, lambda: f"%json {json.dumps(node.schema)}", "j{}: {}")
        if isinstance(node, Shortest):
            return self._named("s", node, lambda: _shortest_regex(node), "s{}[lazy]: /{}/")
        if isinstance(node, Reference):
            return self._named("r", node.name, lambda: self._rule_text(self._rules[node.name]), "r{}: {}")
        return self._combined_text(node)

    def _combined_text(self, node: Node) -> str:
        if isinstance(node, Repeat):
            return f"({self._rule_text(node.part)}){_times(node)}"
        assert isinstance(node, (Sequence, Choice))
        texts = [self._rule_text(part) for part in self._merged(node)]
        return " ".join(texts) if isinstance(node, Sequence) else f"({' | '.join(texts)})"

    def _regular_text(self, node: Node) -> str:
        """Return the name of the terminal of a node; the empty text has none."""
        if isinstance(node, Reference) or (isinstance(node, Text) and not node.text):
            return self._terminal_text(node)
        return self._named("T", node, lambda: self._terminal_text(node), "T{}: {}")

    def _merged(self, node: Sequence | Choice) -> list[Node]:
        """Return the parts of a node, with regular neighbours (of a choice: all regular parts) as one part."""
        merged: list[Node] = []
        if isinstance(node, Choice):
            regular = [part for part in node.parts if self._is_regular(part)]
            return [*([one_of(regular)] if regular else []), *(p for p in node.parts if not self._is_regular(p))]
        run: list[Node] = []
        for part in node.parts:
            if self._is_regular(part):
                run.append(part)
                continue
            merged += [in_order(run), part] if run else [part]
            run = []
        return [*merged, in_order(run)] if run else merged

    def _terminal_text(self, node: Node) -> str:
        """Return a regular node in the syntax of terminals."""
        if isinstance(node, Text):
            return _quoted(node.text)
        if isinstance(node, (Pattern, AllOf)):
            return _regex_text(node)
        if isinstance(node, Reference):
            body = self._rules[node.name]
            return self._named("T", node, lambda: self._terminal_text(body), "T{}: {}")
        if isinstance(node, Repeat):
            return f"({self._terminal_text(node.part)}){_times(node)}"
        assert isinstance(node, (Sequence, Choice))
        texts = [self._terminal_text(part) for part in node.parts]
        if not texts:
            return '""'
        return " ".join(texts) if isinstance(node, Sequence) else f"({' | '.join(texts)})"

    def _named(self, letter: str, key: object, make: Any, line: str) -> str:
        """Return the name of a rule or terminal, after writing it if it is new."""
        if (letter, key) not in self._names:
            number = len(self._names)
            self._names[letter, key] = f"{letter}{number}"
            text = make()
            self._lines.append(line.format(number, text))
        return self._names[letter, key]


def without_tail_calls(name: str, body: Node) -> Node:
    """Return the body of a rule with a repetition in place of calls of itself at an end of its alternatives."""
    options = body.parts if isinstance(body, Choice) else (body,)
    me = Reference(name)
    for place in (-1, 0):
        calls = [each for each in options if isinstance(each, Sequence) and each.parts and each.parts[place] == me]
        rest = [each for each in options if each not in calls]
        steps = [in_order(list(each.parts[:-1] if place else each.parts[1:])) for each in calls]
        if calls and rest and not any(me in walk(each) for each in (*steps, *rest)):
            loop, last = Repeat(one_of(steps), 0, None), one_of(list(rest))
            return Sequence((loop, last) if place else (last, loop))
    return body


def _regex_text(node: Pattern | AllOf) -> str:
    if isinstance(node, Pattern):
        return f"/{node.regex}/" if node.regex else '""'
    without = f"~/(?s:.*){escaped(node.excluded)}(?s:.*)/"
    return f"({' & '.join([*(f'/{regex}/' for regex in node.regexes), without])})"


def _shortest_regex(node: Shortest) -> str:
    ends = "|".join(map(escaped, node.ends))
    return f"(?s:.){_count(node)}({ends})"


def _count(node: Shortest) -> str:
    """Return how often the characters before an end may be repeated, as a regular expression has it."""
    most = "" if node.most is None else str(node.most)
    return "*" if not node.least and node.most is None else f"{{{node.least},{most}}}"


def _times(node: Repeat) -> str:
    if node.most is None and node.least < 2:
        return "*+"[node.least]
    if (node.least, node.most) == (0, 1):
        return "?"
    return f"{{{node.least},{'' if node.most is None else node.most}}}"


def _quoted(text: str) -> str:
    """Return a string of Lark, which has the syntax of JSON."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def escaped(text: str) -> str:
    """Return a regular expression that matches exactly this text."""
    return "".join(char if char.isalnum() or char == "_" else f"\\u{{{ord(char):x}}}" for char in text)
