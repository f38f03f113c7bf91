"""Estimates the result of an operator, filter or method of a template, and refuses too large ones before they run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from staticllm.pipelines.text.templates.bounds import (
    MAX_BITS,
    MAX_ITEMS,
    VIEWS,
    TemplateLimitError,
    as_text,
    budget,
    check_items,
    expect_chars,
    expect_items,
    text_size,
)

MAX_WIDTH = 9999
"""The largest indent, count or padding."""
MAX_WORK = 1 << 26
"""The most comparisons of an operation that compares each character of one text with those of another."""
MAX_DIGITS = 4096
_NUMBER_CHARS = 400
"""The most characters of a formatted number; ``'%f' % 1e308`` has 316."""
_DIGITS = re.compile(r"\d+")
_TAKES_WIDTH = re.compile(r"%[^a-zA-Z]*\*|:[^{}]*\{")
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_NAMED = frozenset(["sep", "maxsplit", "keepends", "count"])


def _names(listed: str) -> frozenset[str]:
    return frozenset(listed.split())


FILTERS = _names(
    "abs batch capitalize center count d default dictsort e escape first float format groupby indent int items join "
    "last length list lower map max min reject rejectattr replace reverse round safe select selectattr slice sort "
    "string sum title tojson trim truncate unique upper wordcount"
)
"""The permitted filters. The time of others (``wordwrap``, ``urlize``, ``pprint`` …) grows faster than their text."""
ITERATING = _names(
    "batch groupby join list map max min reject rejectattr reverse select selectattr slice sort sum unique"
)
_STR_METHODS = _names(
    "capitalize casefold center count endswith find format index isalnum isalpha isascii isdecimal isdigit "
    "isidentifier islower isnumeric isprintable isspace istitle isupper join ljust lower lstrip partition "
    "removeprefix removesuffix replace rfind rindex rjust rpartition rsplit rstrip split splitlines startswith "
    "strip swapcase title upper zfill"
)
METHODS: dict[type, frozenset[str]] = {
    str: _STR_METHODS,
    dict: frozenset(["copy", "get", "items", "keys", "values"]),
    list: frozenset(["copy", "count", "index"]),
    tuple: frozenset(["count", "index", "grouper", "list"]),  # groupby makes tuples with names
    **{kind: frozenset[str]() for kind in (bytes, int, float, complex, range, *VIEWS)},
}
"""The attributes of plain values that a template may use."""


def check_operands(operator: str, left: Any, right: Any) -> None:
    """Check the result of ``left operator right`` before it is computed.

    Raises:
        TemplateLimitError: the result may be too large.
    """
    if operator == "**" and isinstance(left, int) and isinstance(right, int):
        if abs(left) > 1 and abs(left).bit_length() * right > MAX_BITS:
            raise TemplateLimitError(f"it raises a number to the power of {right:.3g}")
    elif operator == "*":
        for items, times in ((left, right), (right, left)):
            if isinstance(items, (str, bytes)) and isinstance(times, int):
                expect_chars(len(items) * times)
            elif isinstance(items, (list, tuple)) and isinstance(times, int):
                expect_items(len(items) * times)
    elif operator == "+" and isinstance(left, str) and isinstance(right, str):
        expect_chars(len(left) + len(right))
    elif operator == "+" and isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        expect_items(len(left) + len(right))
    elif operator == "%" and isinstance(left, str):
        values = [*right, *right.values()] if isinstance(right, dict) else [right]
        check_format(left, right if isinstance(right, tuple) else values)


def check_format(pattern: str, arguments: Iterable[Any]) -> None:
    """Check a pattern of ``%`` or ``format``: its fields, its widths, and the widths that it takes from its arguments.

    Raises:
        TemplateLimitError: a width or the text may be too large.
    """
    widths = [int(found[:6]) for found in _DIGITS.findall(pattern)]
    given = list(arguments)
    if max(widths, default=0) > MAX_WIDTH:
        raise TemplateLimitError(
            f"it formats to a width of {max(_DIGITS.findall(pattern), key=len)[:12]}, at most {MAX_WIDTH}"
        )
    if _TAKES_WIDTH.search(pattern):
        _check_widths(given)
        widths += [abs(width) for width in given if isinstance(width, int)]
    num_fields = pattern.count("%") + pattern.count("{")
    field = max(widths, default=0) + max((_field_size(value) for value in given), default=0)
    expect_chars(len(pattern) + num_fields * field)


def _field_size(value: Any) -> int:
    if isinstance(value, int):
        return _NUMBER_CHARS + 2 * value.bit_length()  # in binary, with separators
    return text_size(value) + (_NUMBER_CHARS if not isinstance(value, str) else 32)


def _check_widths(values: Iterable[Any]) -> None:
    for value in values:
        _width(value)


def _width(value: Any) -> int:
    """Return the characters of a width, a count or an indent, which may be given as text."""
    if isinstance(value, (int, float)):
        if abs(value) > MAX_WIDTH:
            raise TemplateLimitError(f"it asks for a width of {value:.3g}, at most {MAX_WIDTH}")
        return int(value)
    return len(value) if isinstance(value, str) else 0


def _check_work(content: str, each: Any) -> None:
    if isinstance(each, str) and len(content) * len(each) > MAX_WORK:
        raise TemplateLimitError(f"it looks for {len(each)} characters in a text of {len(content)}")


def _check_replacement(content: str, old: Any, new: Any, count: Any = None) -> None:
    found = content.count(old) if old else len(content) + 1
    if isinstance(count, int) and count >= 0:
        found = min(found, count)
    expect_chars(len(content) + found * len(new))


def _check_join(items: Any, between: str) -> None:
    if isinstance(items, (list, tuple, str, dict)):
        sizes = (text_size(item) for item in items) if not isinstance(items, str) else [len(items)]
        expect_chars(sum(sizes) + len(items) * len(between))


def _check_lines(content: str, width: int) -> None:
    expect_chars(len(content) + (_count_lines(content) + 1) * width)


def _count_lines(content: str) -> int:
    return sum(content.count(end) for end in _LINE_ENDS)


def _check_json(given: Mapping[str, Any]) -> None:
    weight = budget().weigh(given["value"])
    each = _width(given.get("indent")) * (weight.depth + 1)
    each += sum(len(item) for item in given.get("separators") or () if isinstance(item, str))
    expect_chars(weight.chars + weight.items * (4 + each))


def _check_digits(given: Mapping[str, Any]) -> None:
    if isinstance(given["value"], str) and len(given["value"]) > MAX_DIGITS:
        raise TemplateLimitError(f"it reads a number of {len(given['value'])} digits, at most {MAX_DIGITS}")


def _check_format_filter(given: Mapping[str, Any]) -> None:
    check_format(as_text(given["value"]), [*given.get("args", ()), *given.get("kwargs", {}).values()])


def _check_widths_of(*names: str) -> Callable[[Mapping[str, Any]], None]:
    return lambda given: expect_chars(sum(_width(given.get(name)) for name in names))


FILTER_CHECKS: dict[str, Callable[[Mapping[str, Any]], None]] = {
    "batch": _check_widths_of("linecount"),
    "center": _check_widths_of("width"),
    "float": _check_digits,
    "format": _check_format_filter,
    "indent": lambda given: _check_lines(as_text(given["s"]), _width(given.get("width", 4))),
    "int": _check_digits,
    "join": lambda given: _check_join(given["value"], as_text(given.get("d", ""))),
    "replace": lambda given: _check_replacement(
        as_text(given["s"]), as_text(given["old"]), as_text(given["new"]), given.get("count")
    ),
    "round": _check_widths_of("precision"),
    "slice": _check_widths_of("slices"),
    "title": lambda given: _check_matches(r"[-\s({\[<]+", as_text(given["s"])),
    "tojson": _check_json,
    "trim": lambda given: _check_work(as_text(given["value"]), given.get("chars")),
    "truncate": _check_widths_of("length", "leeway", "end"),
    "wordcount": lambda given: _check_matches(r"\w+", as_text(given["s"])),
}
"""The check that runs before each filter; it receives the filter's arguments by parameter name."""


def check_method(content: str, name: str, args: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Check a call ``content.name(*args, **named)`` of a method of a text before it runs.

    Raises:
        TemplateLimitError: it takes no such argument, or its result or its work may be too large.
    """
    if name == "format":
        check_format(content, [*args, *named.values()])
    elif not named.keys() <= _NAMED:
        raise TemplateLimitError(f"{name}() takes no {sorted(named.keys() - _NAMED)[0][:40]!r}")
    first = args[0] if args else None
    if name in ("center", "ljust", "rjust", "zfill"):
        _check_widths(args)
    elif name == "replace" and len(args) > 1 and isinstance(first, str) and isinstance(args[1], str):
        _check_replacement(content, first, args[1], args[2] if len(args) > 2 else named.get("count"))
    elif name == "join":
        _check_join(first, content)
    elif name in ("strip", "lstrip", "rstrip", "rfind", "rindex", "rpartition"):
        _check_work(content, first)
    elif name == "splitlines":
        check_items(_count_lines(content) + 1)
    elif name in ("split", "rsplit"):
        separator = named.get("sep", first)
        if name == "rsplit":
            _check_work(content, separator)
        _check_split(content, separator)


def _check_split(content: str, separator: Any) -> None:
    if isinstance(separator, str) and separator:
        check_items(content.count(separator) + 1)
    else:
        _check_matches(r"\S+", content)


def _check_matches(pattern: str, content: str) -> None:
    """Check the number of pieces into which a text is split."""
    if len(content) > MAX_ITEMS:
        check_items(sum(1 for _ in re.finditer(pattern, content)))
