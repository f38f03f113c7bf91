"""Translates regular expressions as Python and JSON schemas have them into the syntax of Rust's ``regex`` crate.

The expression matches the whole answer, so that ``^`` at its beginning and ``$`` at its end change nothing. As in GenAI, ``\\d``,
``\\w`` and ``\\s`` stand for ASCII characters.
"""

from __future__ import annotations

import re

from staticllm.errors import GenerationConfigError

CLASSES = {"d": "0-9", "w": "0-9A-Za-z_", "s": " \\t\\n\\r\\f\\v"}
_COUNT = re.compile(r"\{(\d*)(,?)(\d*)\}")
ANYTHING = "(?s:.*)"
_ENDS = {"A": "^", "Z": "$", "z": "$"}


def rust_regex(pattern: str) -> str:
    """Return the expression for llguidance, without the slashes around it.

    Raises:
        GenerationConfigError: an anchor or a word boundary within the expression.
    """
    return "|".join(_branch(branch, pattern) for branch in _branches(pattern))


def search_regex(pattern: str) -> str:
    """Return the expression of all texts that contain a match, as JSON Schema means ``pattern``.

    Raises:
        GenerationConfigError: an anchor or a word boundary within the expression.
    """
    found = []
    for branch in _branches(pattern):
        body, is_at_begin, is_at_end = _without_anchors(branch)
        inner = _translated(body, pattern)
        found.append(f"{'' if is_at_begin else ANYTHING}({inner}){'' if is_at_end else ANYTHING}")
    return "|".join(found)


def _branches(pattern: str) -> list[str]:
    """Return the alternatives at the top level."""
    branches, depth, start, index = [], 0, 0, 0
    while index < len(pattern):
        char = pattern[index]
        if char == "\\":
            index += 1
        elif char == "[":
            index = _end_of_class(pattern, index)
        elif char in "()":
            depth += 1 if char == "(" else -1
        elif char == "|" and not depth:
            branches.append(pattern[start:index])
            start = index + 1
        index += 1
    return [*branches, pattern[start:]]


def _end_of_class(pattern: str, start: int) -> int:
    """Return the index of the bracket that closes the class that begins at ``start``; the last index if none does."""
    index = start + 1
    index += pattern[index : index + 1] == "^"
    index += pattern[index : index + 1] == "]"
    while index < len(pattern) and pattern[index] != "]":
        index += 2 if pattern[index] == "\\" else 1
    return min(index, len(pattern) - 1)


def _branch(branch: str, pattern: str) -> str:
    """Return one alternative, without the anchors at its ends."""
    return _translated(_without_anchors(branch)[0], pattern)


def _without_anchors(branch: str) -> tuple[str, bool, bool]:
    """Return an alternative without the anchors at its ends, and whether it had one at its beginning and at its end."""
    body = branch.removeprefix("^").removeprefix("\\A")
    is_at_begin = body != branch
    for end in ("$", "\\Z", "\\z"):
        stem = body.removesuffix(end)
        slashes = len(stem) - len(stem.rstrip("\\"))
        if stem != body and slashes % 2 == 0:
            return stem, is_at_begin, True
    return body, is_at_begin, False


def _translated(body: str, pattern: str) -> str:
    parts, index = [], 0
    while index < len(body):
        text, index = _piece(body, index, pattern)
        parts.append(text)
    return "".join(parts)


def _piece(body: str, index: int, pattern: str) -> tuple[str, int]:
    """Return the translation of what begins at ``index``, and the index after it."""
    char = body[index]
    if char == "\\":
        return _escape(body, index, pattern, False), index + 2
    if char == "[":
        end = _end_of_class(body, index)
        return _class(body[index : end + 1], pattern), end + 1
    if char in "^$":
        raise GenerationConfigError(
            f"the regex {pattern!r} has {char!r} within it: the whole answer is matched, so leave anchors out"
        )
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


def _escape(body: str, index: int, pattern: str, is_in_class: bool) -> str:
    """Return the translation of the escape at ``index``."""
    char = body[index + 1 : index + 2]
    if not char:
        raise GenerationConfigError(f"the regex {pattern!r} ends with a single backslash: write it twice")
    if char.lower() in CLASSES:
        return f"[{'^' if char.isupper() else ''}{CLASSES[char.lower()]}]"
    if not is_in_class and (char in _ENDS or char in "bB"):
        raise GenerationConfigError(
            f"the regex {pattern!r} has \\{char}, which matches a place and not a character: leave it out"
        )
    if char == "b":
        return "\\x08"
    return "\\" + char if char.isalnum() else f"\\u{{{ord(char):x}}}"


def _class(text: str, pattern: str) -> str:
    """Return a class like ``[^a-z\\d]``."""
    if not text.endswith("]") or len(text) < 3:
        raise GenerationConfigError(f"the regex {pattern!r} has the class {text!r}, which is not closed: add a bracket")
    parts, index, inner = [], 0, text[1:-1]
    if inner.startswith("^"):
        parts, index = ["^"], 1
    while index < len(inner):
        if inner[index] == "\\":
            parts.append(_escape(inner, index, pattern, True))
            index += 2
        else:
            char = inner[index]
            parts.append(f"\\u{{{ord(char):x}}}" if char in "[]&~^/" or not char.isprintable() else char)
            index += 1
    return f"[{''.join(parts)}]"
