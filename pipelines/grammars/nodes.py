"""The syntax tree that EBNF grammars, choices, regular expressions and structural tags have in common, and its text in Lark.

llguidance reads a variant of Lark. In it, terminals (upper case) are regular expressions that a lexer matches greedily, and
rules are context-free. A greedy lexer decides too early where a terminal ends: after ``[a-z]*`` no ``"b"`` can follow. So each
part of a grammar that needs no recursion becomes one terminal, together with its neighbours. A grammar without recursion is
one terminal as a whole, and so is exact.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias


class Node:
    """A part of a grammar."""

    is_regular: ClassVar[bool] = True
    """Whether a regular expression can say it, if it can say its parts."""

    @property
    def children(self) -> tuple[Node, ...]:
        return ()

    def terminal(self, writer: LarkWriter) -> str:
        """Return the node, which is regular as a whole, in the syntax of terminals."""
        raise NotImplementedError

    def rule(self, writer: LarkWriter) -> str:
        """Return what stands for the node, which is not regular as a whole, in a rule."""
        raise NotImplementedError

    def with_special_tokens(self, special: Mapping[str, int]) -> Node:
        """Return a tree in which special tokens (ids by text) stand for their text: a model writes them as these tokens.

        Plain text has none. Free text ends with a special token only if its end begins with one; it cannot contain special tokens
        itself.
        """
        return self


Rules: TypeAlias = Mapping[str, Node]


@dataclass(frozen=True)
class FixedText(Node):
    """Exactly this text."""

    text: str
    is_plain: bool = False
    """Whether it is written with other tokens where it has the text of a special one."""

    def terminal(self, writer: LarkWriter) -> str:
        return json.dumps(self.text, ensure_ascii=False).replace("\x7f", "\\u007f")  # strings of Lark are those of JSON

    def with_special_tokens(self, special: Mapping[str, int]) -> Node:
        if self.is_plain or not self.text:
            return self
        pieces = split_at(self.text, special)
        return in_order([FixedText(piece) if isinstance(piece, str) else Token(piece) for piece in pieces])


@dataclass(frozen=True)
class Pattern(Node):
    """A match of a regular expression, in the syntax of Rust's ``regex`` crate."""

    regex: str

    def terminal(self, writer: LarkWriter) -> str:
        return f"/{self.regex}/" if self.regex else '""'


@dataclass(frozen=True)
class Shortest(Node):
    """Text up to and including the first occurrence of one of ``ends``, with ``least`` to ``most`` characters before it."""

    ends: tuple[str, ...]
    least: int = 0
    most: int | None = None
    is_regular = False

    def rule(self, writer: LarkWriter) -> str:
        regex = f"{self._before}({'|'.join(map(escaped, self.ends))})"
        return writer.named("s", self, lambda: regex, "s{}[lazy]: /{}/")

    def with_special_tokens(self, special: Mapping[str, int]) -> Node:
        ends: list[Node] = []
        for end in self.ends:
            pieces = split_at(end, special)
            if pieces and isinstance(pieces[0], int):
                ends.append(Sequence((Pattern(self._before), FixedText(end).with_special_tokens(special))))
            else:
                ends.append(Shortest((end,), self.least, self.most))
        return self if all(isinstance(each, Shortest) for each in ends) else one_of(ends)

    @property
    def _before(self) -> str:
        """The regular expression of the characters before an end."""
        if not self.least and self.most is None:
            return "(?s:.)*"
        return f"(?s:.){{{self.least},{'' if self.most is None else self.most}}}"


@dataclass(frozen=True)
class AllOf(Node):
    """Text that matches each of these regular expressions as a whole, and does not contain ``excluded``."""

    regexes: tuple[str, ...]
    excluded: str

    def terminal(self, writer: LarkWriter) -> str:
        return f"({' & '.join([*(f'/{regex}/' for regex in self.regexes), without(self.excluded)])})"


@dataclass(frozen=True)
class Schema(Node):
    """JSON that is valid under a schema, which is a JSON value."""

    schema: Any
    is_regular = False

    def __hash__(self) -> int:
        return hash(json.dumps(self.schema))

    def rule(self, writer: LarkWriter) -> str:
        return writer.named("j", self, lambda: f"%json {json.dumps(self.schema)}", "j{}: {}")


@dataclass(frozen=True)
class Token(Node):
    """One token, which stands for no text of its own."""

    id: int
    is_regular = False

    def rule(self, writer: LarkWriter) -> str:
        return f"<[{self.id}]>"


@dataclass(frozen=True)
class Reference(Node):
    """The rule of this name."""

    name: str

    def terminal(self, writer: LarkWriter) -> str:
        return writer.named("T", self, lambda: writer.rules[self.name].terminal(writer), "T{}: {}")

    def rule(self, writer: LarkWriter) -> str:
        return writer.named("r", self, lambda: writer.rule_text(writer.rules[self.name]), "r{}: {}")


@dataclass(frozen=True)
class Sequence(Node):
    """The parts, one after the other."""

    parts: tuple[Node, ...]

    @property
    def children(self) -> tuple[Node, ...]:
        return self.parts

    def terminal(self, writer: LarkWriter) -> str:
        return " ".join([part.terminal(writer) for part in self.parts]) or '""'

    def rule(self, writer: LarkWriter) -> str:
        """Return the parts with regular neighbours as one part."""
        merged: list[Node] = []
        run: list[Node] = []
        for part in self.parts:
            if writer.is_regular(part):
                run.append(part)
                continue
            merged += [in_order(run), part] if run else [part]
            run = []
        merged += [in_order(run)] if run else []
        return " ".join(map(writer.rule_text, merged))

    def with_special_tokens(self, special: Mapping[str, int]) -> Node:
        return Sequence(tuple(part.with_special_tokens(special) for part in self.parts))


@dataclass(frozen=True)
class Alternatives(Node):
    """One of the parts."""

    parts: tuple[Node, ...]

    @property
    def children(self) -> tuple[Node, ...]:
        return self.parts

    def terminal(self, writer: LarkWriter) -> str:
        return f"({' | '.join([part.terminal(writer) for part in self.parts])})" if self.parts else '""'

    def rule(self, writer: LarkWriter) -> str:
        """Return the parts with all regular ones as one part."""
        regular = [part for part in self.parts if writer.is_regular(part)]
        others = [part for part in self.parts if not writer.is_regular(part)]
        return f"({' | '.join(map(writer.rule_text, [*([one_of(regular)] if regular else []), *others]))})"

    def with_special_tokens(self, special: Mapping[str, int]) -> Node:
        return Alternatives(tuple(part.with_special_tokens(special) for part in self.parts))


@dataclass(frozen=True)
class Repeat(Node):
    """The part ``least`` to ``most`` times; without end if ``most`` is None."""

    part: Node
    least: int
    most: int | None

    @property
    def children(self) -> tuple[Node, ...]:
        return (self.part,)

    def terminal(self, writer: LarkWriter) -> str:
        return f"({self.part.terminal(writer)}){self._times}"

    def rule(self, writer: LarkWriter) -> str:
        return f"({writer.rule_text(self.part)}){self._times}"

    def with_special_tokens(self, special: Mapping[str, int]) -> Node:
        return Repeat(self.part.with_special_tokens(special), self.least, self.most)

    @property
    def _times(self) -> str:
        if self.most is None and self.least < 2:
            return "*+"[self.least]
        if (self.least, self.most) == (0, 1):
            return "?"
        return f"{{{self.least},{'' if self.most is None else self.most}}}"


def walk(node: Node) -> Iterator[Node]:
    """Yield a node and all nodes below it."""
    yield node
    for child in node.children:
        yield from walk(child)


def one_of(parts: list[Node]) -> Node:
    """Return a choice; the part itself if there is one."""
    return parts[0] if len(parts) == 1 else Alternatives(tuple(parts))


def in_order(parts: list[Node]) -> Node:
    """Return a sequence; the part itself if there is one."""
    return parts[0] if len(parts) == 1 else Sequence(tuple(parts))


def split_at(text: str, special: Mapping[str, int]) -> list[str | int]:
    """Return the pieces of a text: texts without special tokens, and the ids of special tokens."""
    if not special or not text:
        return [text] if text else []
    pattern = "|".join(map(re.escape, sorted(special, key=len, reverse=True)))
    pieces = re.split(f"({pattern})", text)
    return [special.get(piece, piece) for piece in pieces if piece]


def escaped(text: str) -> str:
    """Return a regular expression that matches exactly this text."""
    return "".join(char if char.isalnum() or char == "_" else f"\\u{{{ord(char):x}}}" for char in text)


def without(text: str) -> str:
    """Return a terminal that matches all texts that do not contain ``text``, and perhaps bytes that are no text.

    If the first character of ``text`` is none of its others, the terminal needs no complement: beside a limit of the length,
    llguidance explores a complement place by place, and gives up (``</parameter>`` after up to 600 characters).
    """
    first = text[0]
    rest = text[1:]
    if first in rest:
        return f"~/(?s:.*){escaped(text)}(?s:.*)/"
    other = f"[^{escaped(first)}]"
    after = ""  # what may be between the first character and the next of its kind
    for index, char in enumerate(reversed(rest)):
        differs = f"[^{escaped(first)}{escaped(char)}]{other}*"
        after = f"({differs}|{escaped(char)}{after})?" if index else f"({differs})?"
    return f"/{other}*({escaped(first)}{after})*/" if rest else f"/{other}*/"


def regular_rules(rules: Rules) -> frozenset[str]:
    """Return the names of the rules that are regular expressions: neither they nor what they reach is recursive."""
    num_left: dict[str, int] = {}  # references of a rule to rules that are not known to be regular
    users: dict[str, list[str]] = {name: [] for name in rules}
    for name, body in rules.items():
        direct = {node.name for node in walk(body) if isinstance(node, Reference)} & rules.keys()
        num_left[name] = len(direct) + any(not node.is_regular for node in walk(body))  # then it never becomes 0
        for other in direct:
            users[other].append(name)
    found = set[str]()
    todo = [name for name, count in num_left.items() if not count]
    while todo:
        found.add(name := todo.pop())
        for user in users[name]:
            num_left[user] -= 1
            if not num_left[user]:
                todo.append(user)
    return frozenset(found)


def without_tail_calls(name: str, body: Node) -> Node:
    """Return the body of a rule with a repetition in place of calls of itself at an end of its alternatives."""
    options = body.parts if isinstance(body, Alternatives) else (body,)
    me = Reference(name)
    for place in (-1, 0):
        calls = [each for each in options if isinstance(each, Sequence) and each.parts and each.parts[place] == me]
        rest = [each for each in options if each not in calls]
        steps = [in_order(list(each.parts[:-1] if place else each.parts[1:])) for each in calls]
        if calls and rest and not any(me in walk(each) for each in (*steps, *rest)):
            loop = Repeat(one_of(steps), 0, None)
            last = one_of(list(rest))
            return Sequence((loop, last) if place else (last, loop))
    return body


class LarkWriter:
    """Writes a syntax tree as Lark for llguidance. ``rules`` are those that it refers to."""

    def __init__(self, rules: Rules) -> None:
        self.rules = {name: without_tail_calls(name, body) for name, body in rules.items()}
        self._regular = regular_rules(self.rules)
        self._lines: list[str] = []
        self._names: dict[tuple[str, Node], str] = {}

    def write(self, root: Node) -> str:
        """Return the text of a grammar that begins with ``root``."""
        start = self.rule_text(root)
        return "\n".join(["%llguidance {}", f"start: {start}", *self._lines, ""])

    def is_regular(self, node: Node) -> bool:
        """Return whether a regular expression can say a node."""
        if isinstance(node, Reference):
            return node.name in self._regular
        return node.is_regular and all(map(self.is_regular, node.children))

    def rule_text(self, node: Node) -> str:
        """Return what stands for a node in a rule: of a regular one, the name of its terminal; the empty text has none."""
        if not self.is_regular(node):
            return node.rule(self)
        if isinstance(node, Reference) or (isinstance(node, FixedText) and not node.text):
            return node.terminal(self)
        return self.named("T", node, lambda: node.terminal(self), "T{}: {}")

    def named(self, letter: str, node: Node, make: Callable[[], str], line: str) -> str:
        """Return the name of a rule or terminal, after writing it if it is new."""
        if (letter, node) not in self._names:
            number = len(self._names)
            self._names[letter, node] = f"{letter}{number}"
            text = make()
            self._lines.append(line.format(number, text))
        return self._names[letter, node]
