"""Values of annotated types out of unchecked JSON; an error names the place, its value, and what it must be."""

from __future__ import annotations

import json
import re
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from staticllm.errors import shown

T = TypeVar("T")
_STEP = re.compile(r"\.?([^.\[\]]+)|\[(\d+)\]")


class _NotFinite:
    """A number of a JSON text that is no finite f64; no annotated type takes it."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def typed(value: object, kind: type[T]) -> T:
    """Return what JSON types hold as a value of an annotated type, such as a dataclass; unknown fields are left out.

    Raises:
        ValueError: a field is missing, of another type, or out of its bounds.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ValueError(_told(str(error), value, kind)) from None
    except (msgspec.MsgspecError, RecursionError, OverflowError) as error:
        raise ValueError(str(error) or "it is nested too deeply") from None


def json_of(text: bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is no JSON in UTF-8, or nested too deeply.
    """
    try:
        return json.loads(text, parse_constant=_NotFinite, parse_float=_float)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _float(text: str) -> object:
    number = float(text)
    return number if abs(number) < float("inf") else _NotFinite(text)


def _told(text: str, value: object, kind: type) -> str:
    """Return an error of msgspec with the value that it is about."""
    what, _, path = text.rpartition(" - at `") if " - at `" in text else (text, "", "")
    place = path.rstrip("`").removeprefix("$").lstrip(".")
    if missing := re.fullmatch(r"Object missing required field `(.*)`", what):
        return f"{place}.{missing[1]} is missing".lstrip(".")
    if what == "Number out of range":
        what = "Expected a number of at most 64 bits"
    if not what.startswith(("Expected ", "Invalid enum value")):
        return text
    limit = what.removeprefix("Expected ").split(", got ")[0].replace("`", "")
    if "[...]" in place:  # msgspec does not name the key of a mapping
        return f"a value of {place.partition('[...]')[0] or 'it'}: must be {limit}"
    steps = [name or int(index) for name, index in _STEP.findall(place)]
    try:
        for step in steps:
            value = value[step]  # type: ignore[index]
    except (KeyError, IndexError, TypeError):
        return text
    if what.startswith("Invalid enum value"):
        limit = f"one of {', '.join(map(str, _allowed(inspect.type_info(kind), steps)))}"
    return f"{place or 'all of it'} is {shown(value)}: must be {limit}"


def _allowed(kind: inspect.Type, steps: list[str | int]) -> list[object]:
    """Return the values of the literal type at a place in a type."""
    if isinstance(kind, inspect.Metadata):
        return _allowed(kind.type, steps)
    if isinstance(kind, inspect.UnionType):
        return [value for each in kind.types for value in _allowed(each, steps)]
    if not steps:
        return list(kind.values) if isinstance(kind, inspect.LiteralType) else []
    if isinstance(kind, (inspect.StructType, inspect.DataclassType)):
        return [value for field in kind.fields if field.name == steps[0] for value in _allowed(field.type, steps[1:])]
    inner = getattr(kind, "item_type", None) or getattr(kind, "value_type", None)
    return [] if inner is None else _allowed(inner, steps[1:])
