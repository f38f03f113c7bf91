"""Reads from a call in a prompt how the model writes calls: the format of each published model need not be known."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Syntax = Literal[
    "", "tagged", "xml", "json_function", "key_value", "separated", "fenced", "named", "bare_json", "python", "harmony",
    "recipients", "generic", "keyed", "braced", "learnt",
]  # fmt: skip
"""How calls are written: JSON between tags; a tag per parameter; ``<function=f>`` and JSON; a pair of tags per parameter; a name,
a separator and JSON; a block of Python; ``[TOOL_CALLS]``; JSON or Python without tags; messages with channels or recipients; one
JSON object with all calls; JSON whose keys are the functions; ``call:f{…}`` with markers around strings;
or what the text around the parts of a call was learnt to be (``learnt_calls.py``)."""

_NAME, _KEY, _VALUE = "tool_name", "arg1", "some_value"
"""What the example calls (``CallExamples.one``)."""
MAX_EXAMPLE_CHARS = 2000
"""The longest example that is looked at: a call with one argument and all that stands around it."""
_TAG = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")
_TAGS_BEFORE = re.compile(rf"((?:(?:{_TAG.pattern})\s*)*)$")
_TAGS_AFTER = re.compile(rf"\s*((?:(?:{_TAG.pattern})\s*)*)")
_PYTHON = re.compile(rf"(\[?){_NAME}\({_KEY}=[\"']{_VALUE}[\"']\)(\]?)")
_BRACED = re.compile(rf"call:{_NAME}\{{{_KEY}:(\S*?){_VALUE}(\S*?)\}}")
_XML = re.compile(rf"<function={_NAME}>.*?</function>", re.DOTALL)


@dataclass(frozen=True)
class SeenCalls:
    """How a call is written: a syntax of ``MessageFormat``, and what stands around it.

    ``call`` is directly around each call, ``wrapper`` around all of them; "" where there is nothing. ``quote`` is around strings
    in braces.
    """

    syntax: Syntax
    call: tuple[str, str] = ("", "")
    wrapper: tuple[str, str] = ("", "")
    quote: str = ""


def seen_calls(example: str | None) -> SeenCalls | None:
    """Return how the call in an example is written; None if that is not one of the known ways."""
    if not example or len(example) > MAX_EXAMPLE_CHARS:
        return None
    for pattern, syntax in ((_XML, "xml"), (_BRACED, "braced"), (_PYTHON, "")):
        found = pattern.search(example)
        if found is None:
            continue
        call, wrapper = _around(example[: found.start()], example[found.end() :])
        if syntax == "braced":
            return SeenCalls("braced", call, wrapper, found[1]) if call[0] and found[1] == found[2] else None
        if not syntax:
            is_list = bool(found[1]) and bool(found[2])
            if not is_list and not call[0]:
                return None
            return SeenCalls("python" if is_list else "fenced", call, wrapper)
        return SeenCalls("xml", call, wrapper)
    return _json_calls(example)


def _json_calls(example: str) -> SeenCalls | None:
    for start in (found.start() for found in re.finditer(r"[\[{]", example)):
        try:
            value, length = json.JSONDecoder().raw_decode(example[start:])
        except (ValueError, RecursionError):
            continue
        call, wrapper = _around(example[:start], example[start + length :])
        first = value[0] if isinstance(value, list) and value else value
        if isinstance(first, Mapping) and _is_named(first):
            return SeenCalls("tagged" if call[0] else "bare_json", call, wrapper)
        if isinstance(first, Mapping) and isinstance(first.get(_NAME), Mapping) and call[0]:
            return SeenCalls("keyed", call, wrapper)
    return None


def _is_named(value: Mapping[str, Any]) -> bool:
    inner = value.get("function")
    named = inner if isinstance(inner, Mapping) else value
    return _NAME in (named.get("name"), named.get("tool_name"))


def _around(before: str, after: str) -> tuple[tuple[str, str], tuple[str, str]]:
    """Return the tags directly around a call, and those around these."""
    found_before, found_after = _TAGS_BEFORE.search(before), _TAGS_AFTER.match(after)
    assert found_before is not None and found_after is not None, "both match no tags as well"
    opening, closing = _TAG.findall(found_before[1]), _TAG.findall(found_after[1])
    closers = [index for index, tag in enumerate(opening) if tag[1] == "/"]
    opening = opening[closers[-1] + 1 if closers else 0 :]  # what comes before is of reasoning
    if not opening:
        return ("", ""), ("", "")
    has_wrapper = len(opening) > 1 and closing[:2] == [f"</{tag[1:]}" for tag in (opening[-1], opening[-2])]
    if has_wrapper:
        return (opening[-1], closing[0]), (opening[-2], closing[1])
    joined = found_before[1].rstrip().split()[-1]  # tags without a space between them are one marker
    return (joined, closing[0] if closing else ""), ("", "")
