"""Translates regular expressions as Python and JSON schemas have them into the syntax of Rust's ``regex`` crate.

The expression matches the whole answer, so that ``^`` at its beginning and ``$`` at its end change nothing. As in GenAI, ``\\d``,
``\\w`` and ``\\s`` stand for ASCII characters.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass

from staticllm.errors import GenerationConfigError

CLASSES = {"d": "0-9", "w": "0-9A-Za-z_", "s": " \\t\\n\\r\\f\\v"}
MAX_SHOWN = 200
"""The most characters of an expression in a message."""
_PROPERTY = re.compile(r"\{[\w= -]+\}|[A-Z]")
_COUNT = re.compile(r"\{(\d*)(,?)(\d*)\}")
ANYTHING = "(?s:.*)"
_ENDS = {"A": "^", "Z": "$", "z": "$"}


def rust_regex(pattern: str) -> str:
    """Return the expression for llguidance, without the slashes around it.

    Raises:
        GenerationConfigError: an anchor or a word boundary within the expression.
    """
    return "|".join(_translated(branch, pattern) for branch in _branches(pattern))


def search_regex(pattern: str) -> str:
    """Return the expression of all texts that contain a match, as JSON Schema means ``pattern``.

    Raises:
        GenerationConfigError: an anchor or a word boundary within the expression.
    """
    found = []
    for branch in _branches(pattern):
        before, after = ("" if is_there else ANYTHING for is_there in (branch.is_at_begin, branch.is_at_end))
        found.append(f"{before}({_translated(branch, pattern)}){after}")
    return "|".join(found)


def python_reason(pattern: str) -> str:
    """Return what Python finds wrong in an expression, and where; "" if nothing."""
    try:
        with warnings.catch_warnings():  # of what Python may read in another way one day
            warnings.simplefilter("ignore")
            re.compile(pattern)
    except re.error as error:
        place = "" if error.pos is None else f" at position {error.pos}"
        reason = "".join(char if char.isprintable() else repr(char)[1:-1] for char in error.msg)
        return f"{reason}{place} of {_shown(pattern)}"
    except (RecursionError, OverflowError):
        return ""
    return ""


def with_place(reason: str, pattern: str) -> str:
    """Return a reason that ends with a quoted part of the expression, with the position of this part if it is there once."""
    piece = reason.rpartition(": ")[2][1:-1].replace("\\\\", "\\")
    is_clear = bool(piece) and reason.endswith("'") and pattern.count(piece) == 1
    return f"{reason} at position {pattern.find(piece)} of {_shown(pattern)}" if is_clear else reason


def _shown(pattern: str) -> str:
    return repr(pattern if len(pattern) <= MAX_SHOWN else f"{pattern[:MAX_SHOWN]}…")


def _refused(pattern: str, place: int, what: str, remedy: str) -> GenerationConfigError:
    return GenerationConfigError(f"the regex {_shown(pattern)} has {what} within it, at position {place}: {remedy}")


@dataclass(frozen=True)
class _Branch:
    """An alternative: its text without anchors at its ends, its place in the expression, and whether it had the anchors."""

    text: str
    place: int
    is_at_begin: bool
    is_at_end: bool


def _branches(pattern: str) -> list[_Branch]:
    """Return the alternatives at the top level."""
    branches = list[_Branch]()
    depth = 0
    start = 0
    index = 0
    while index < len(pattern):
        char = pattern[index]
        if char == "\\":
            index += 1
        elif char == "[":
            index = _end_of_class(pattern, index)
        elif char in "()":
            depth += 1 if char == "(" else -1
        elif char == "|" and not depth:
            branches.append(_branch(pattern[start:index], start))
            start = index + 1
        index += 1
    return [*branches, _branch(pattern[start:], start)]


def _end_of_class(pattern: str, start: int) -> int:
    """Return the index of the bracket that closes the class that begins at ``start``; the last index if none does."""
    index = start + 1
    index += pattern[index : index + 1] == "^"
    index += pattern[index : index + 1] == "]"
    while index < len(pattern) and pattern[index] != "]":
        index += 2 if pattern[index] == "\\" else 1
    return min(index, len(pattern) - 1)


def _branch(text: str, place: int) -> _Branch:
    body = text.removeprefix("^").removeprefix("\\A")
    is_at_begin = body != text
    place = place + len(text) - len(body)
    for end in ("$", "\\Z", "\\z"):
        stem = body.removesuffix(end)
        slashes = len(stem) - len(stem.rstrip("\\"))
        if stem != body and slashes % 2 == 0:
            return _Branch(stem, place, is_at_begin, True)
    return _Branch(body, place, is_at_begin, False)


def _translated(branch: _Branch, pattern: str) -> str:
    parts = []
    index = branch.place
    end = branch.place + len(branch.text)
    while index < end:
        text, index = _piece(pattern[:end], index, pattern)
        parts.append(text)
    return "".join(parts)


def _piece(body: str, index: int, pattern: str) -> tuple[str, int]:
    """Return the translation of what begins at ``index``, and the index after it. ``body`` ends where the alternative does."""
    char = body[index]
    if char == "\\":
        return _escape(body, index, pattern)
    if char == "[":
        end = _end_of_class(body, index)
        return _class(body[: end + 1], index, pattern), end + 1
    if char in "^$":
        raise _refused(pattern, index, repr(char), "the whole answer is matched, so leave anchors out")
    if char in "*+?":
        is_lazy = body[index + 1 : index + 2] == "?"  # the language is the same
        return char, index + 1 + is_lazy
    if char == "{":
        return _count(body, index)
    if char == "}":
        return "\\}", index + 1
    return _plain(char), index + 1


def _count(body: str, index: int) -> tuple[str, int]:
    """Return a repetition like ``{2,3}``; a brace that is none matches itself, as in Python."""
    found = _COUNT.match(body, index)
    if not found or not (found[1] or found[3]):
        return "\\{", index + 1
    end = found.end() + (body[found.end() : found.end() + 1] == "?")
    return f"{{{found[1] or 0}{found[2]}{found[3]}}}", end


def _plain(char: str) -> str:
    if char == "/":
        return "\\/"
    return char if char.isprintable() else f"\\u{{{ord(char):x}}}"


def _escape(body: str, index: int, pattern: str, is_in_class: bool = False) -> tuple[str, int]:
    """Return the translation of the escape at ``index``, and the index after it."""
    char = body[index + 1 : index + 2]
    if not char:
        raise _refused(pattern, index, "a single backslash", "write it twice")
    if char in "pP" and (property := _PROPERTY.match(body, index + 2)):
        return f"\\{char}{property[0]}", property.end()
    if char.lower() in CLASSES:
        return f"[{'^' if char.isupper() else ''}{CLASSES[char.lower()]}]", index + 2
    if not is_in_class and (char in _ENDS or char in "bB"):
        raise _refused(pattern, index, f"\\{char}", "it matches a place and not a character, so leave it out")
    if char == "b":
        return "\\x08", index + 2
    return "\\" + char if char.isalnum() else f"\\u{{{ord(char):x}}}", index + 2


def _class(body: str, start: int, pattern: str) -> str:
    """Return the class like ``[^a-z\\d]`` from ``start`` to the end of ``body``."""
    end = len(body) - 1
    if body[end] != "]" or end - start < 2:
        raise _refused(pattern, start, f"the class {body[start:][:MAX_SHOWN]!r}", "it is not closed, so add a bracket")
    parts = []
    index = start + 1
    if body[index] == "^":
        parts = ["^"]
        index = index + 1
    while index < end:
        if body[index] == "\\":
            text, index = _escape(body[:end], index, pattern, is_in_class=True)
            parts.append(text)
        else:
            char = body[index]
            parts.append(f"\\u{{{ord(char):x}}}" if char in "[]&~^/" or not char.isprintable() else char)
            index += 1
    return f"[{''.join(parts)}]"
