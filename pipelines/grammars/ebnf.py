"""Parses grammars in the EBNF of xgrammar and GBNF: ``root ::= "a" | [0-9]+ other``."""

from __future__ import annotations

import re
from typing import NoReturn

from staticllm.errors import GenerationConfigError

from .nodes import (
    FixedText,
    Node,
    Pattern,
    Reference,
    Repeat,
    in_order,
    one_of,
    walk,
)

ROOT = "root"
MAX_DEPTH = 200
MAX_TIMES = 1 << 20
"""The most repetitions of a part; an answer cannot have more."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]*")
_SPACE = re.compile(r"(?:\s|#[^\n]*)*")
_RULE = re.compile(r"([A-Za-z_][A-Za-z0-9_.\-]*)\s*::=")
_TIMES = re.compile(r"\{\s*(\d+)\s*(,?)\s*(\d*)\s*\}")
_HEX = re.compile(r"x([0-9A-Fa-f]+)|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "e": "\x1b"}


def parse_ebnf(text: str, prefix: str = "") -> dict[str, Node]:
    """Return the rules of a grammar by name, with ``prefix`` before every name; the first one to use is ``root``.

    Raises:
        GenerationConfigError: the grammar is malformed, or a rule is missing or defined twice; the message names the line.
    """
    rules = _Parser(text, prefix).rules()
    if prefix + ROOT not in rules:
        raise GenerationConfigError(f"the grammar has no rule {ROOT!r}, with which an answer begins: add {ROOT} ::= …")
    for name, body in rules.items():
        for node in walk(body):
            if isinstance(node, Reference) and node.name not in rules:
                user = name.removeprefix(prefix)
                missing = node.name.removeprefix(prefix)
                raise GenerationConfigError(
                    f"the grammar's rule {user!r} needs {missing!r}, which it does not define: add it"
                )
    return rules


class _Parser:
    """A recursive-descent parser over one text."""

    def __init__(self, text: str, prefix: str) -> None:
        self._text = text
        self._prefix = prefix
        self._place = 0
        self._depth = 0

    def rules(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        self._skip()
        while self._place < len(self._text):
            found = _RULE.match(self._text, self._place)
            if not found:
                self._fail("expected a rule like name ::= …")
            if self._prefix + found[1] in rules:
                self._fail(f"the rule {found[1]!r} is defined twice")
            self._place = found.end()
            rules[self._prefix + found[1]] = self._choice()
            if self._place < len(self._text) and not _RULE.match(self._text, self._place):
                self._fail(f"unexpected {self._text[self._place]!r}")
        if not rules:
            self._fail("no rule")
        return rules

    def _choice(self) -> Node:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self._fail(f"more than {MAX_DEPTH} nested groups")
        options = [self._sequence()]
        while self._take("|"):
            options.append(self._sequence())
        self._depth -= 1
        return one_of(options)

    def _sequence(self) -> Node:
        parts: list[Node] = []
        self._skip()
        while self._place < len(self._text) and self._text[self._place] not in "|)":
            if _RULE.match(self._text, self._place):
                break
            parts.append(self._repeated(self._atom()))
        return in_order(parts) if parts else FixedText("")

    def _atom(self) -> Node:
        char = self._text[self._place]
        if char == '"':
            return FixedText(self._string())
        if char == "[":
            return Pattern(self._class())
        if char == ".":
            self._place += 1
            return Pattern("(?s:.)")
        if char == "(":
            self._place += 1
            body = self._choice()
            if not self._take(")"):
                self._fail("a group is not closed: ')' is missing")
            return body
        name = _NAME.match(self._text, self._place)
        if not name:
            self._fail(f"unexpected {char!r}")
        self._place = name.end()
        if self._text[self._place : self._place + 1] == "(":
            self._fail(f"the macro {name[0]!r} is not supported")
        return Reference(self._prefix + name[0])

    def _repeated(self, node: Node) -> Node:
        self._skip_in_line()
        char = self._text[self._place : self._place + 1]
        if char and char in "*+?":
            self._place += 1
            node = Repeat(node, int(char == "+"), 1 if char == "?" else None)
        elif char == "{":
            found = _TIMES.match(self._text, self._place)
            if not found:
                self._fail("expected a repetition like {2}, {2,} or {2,4}")
            least = int(found[1])
            most = least if not found[2] else int(found[3]) if found[3] else None
            if most is not None and most < least:
                self._fail(f"the repetition {found[0]} has a maximum below its minimum")
            if max(least, most or 0) > MAX_TIMES:
                self._fail(f"the repetition {found[0]} has more than {MAX_TIMES} times")
            self._place = found.end()
            node = Repeat(node, least, most)
        self._skip()
        return node

    def _string(self) -> str:
        self._place += 1
        chars: list[str] = []
        while True:
            char = self._text[self._place : self._place + 1]
            if not char or char == "\n":
                self._fail("a string is not closed: '\"' is missing")
            if char == '"':
                self._place += 1
                return "".join(chars)
            chars.append(self._char())

    def _class(self) -> str:
        """Return a class like ``[^a-z]`` as a regular expression."""
        self._place += 1
        is_negated = self._text.startswith("^", self._place)
        self._place += is_negated
        ranges: list[str] = []
        while not self._text.startswith("]", self._place):
            first = self._char_of_class()
            last = first
            if self._text.startswith("-", self._place) and not self._text.startswith("-]", self._place):
                self._place += 1
                last = self._char_of_class()
            if last < first:
                self._fail(f"the range from {first!r} to {last!r} is empty")
            ranges.append(f"\\u{{{ord(first):x}}}-\\u{{{ord(last):x}}}")
        self._place += 1
        if not ranges:
            if is_negated:
                return "(?s:.)"
            self._fail("the class [] matches nothing")
        return f"[{'^' if is_negated else ''}{''.join(ranges)}]"

    def _char_of_class(self) -> str:
        if self._text[self._place : self._place + 1] in ("", "\n"):
            self._fail("a class is not closed: ']' is missing")
        return self._char()

    def _char(self) -> str:
        """Return the character at this place, which may be an escape."""
        char = self._text[self._place]
        self._place += 1
        if char != "\\":
            return char
        code = _HEX.match(self._text, self._place)
        if code:
            self._place = code.end()
            number = int(code[code.lastindex or 0], 16)
            if number > 0x10FFFF or 0xD800 <= number < 0xE000:
                self._fail(f"\\{code[0]} is no character")
            return chr(number)
        escape = self._text[self._place : self._place + 1]
        if not escape or (escape.isalnum() and escape not in _ESCAPES):
            self._fail(f"unknown escape \\{escape}")
        self._place += 1
        return _ESCAPES.get(escape, escape)

    def _take(self, char: str) -> bool:
        self._skip()
        is_there = self._text.startswith(char, self._place)
        self._place += is_there
        return is_there

    def _skip(self) -> None:
        found = _SPACE.match(self._text, self._place)
        assert found is not None, "it matches the empty text"
        self._place = found.end()

    def _skip_in_line(self) -> None:
        while self._text[self._place : self._place + 1] in (" ", "\t") and self._text[self._place : self._place + 1]:
            self._place += 1

    def _fail(self, reason: str) -> NoReturn:
        line = self._text.count("\n", 0, self._place) + 1
        column = self._place - (self._text.rfind("\n", 0, self._place) + 1) + 1
        raise GenerationConfigError(f"the grammar is malformed at line {line}, column {column}: {reason}")
