"""Makes values of dataclasses of JSON that anybody may have written: types and bounds are those of their annotations."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


def stored(kind: type[T], content: object) -> T:
    """Return the value of a dataclass, or of another annotated type, that JSON holds.

    Raises:
        ValueError: a field is unknown, missing, of another type, or out of its bounds; the text says where.
    """
    names = {item.name for item in fields(kind)} if is_dataclass(kind) else set()
    if names and isinstance(content, dict) and (different := sorted(names ^ set(content))):
        raise ValueError(f"the field {different[0][:80]!r} is unknown or missing")
    value = converted(kind, content)
    try:
        is_whole = msgspec.json.encode(value, order="sorted") == msgspec.json.encode(content, order="sorted")
    except (msgspec.MsgspecError, RecursionError, OverflowError) as error:
        raise ValueError(str(error) or "it is nested too deeply") from None
    if not is_whole:
        raise ValueError("a field within another is unknown or missing")
    return value


def converted(kind: type[T], content: object) -> T:
    """Return the value of an annotated type that JSON holds; fields that are unknown are left out.

    Raises:
        ValueError: a field is missing, of another type, or out of its bounds; the text says where.
    """
    try:
        return msgspec.convert(content, kind)
    except (msgspec.MsgspecError, RecursionError, OverflowError) as error:
        raise ValueError(str(error) or "it is nested too deeply") from None


def to_json(value: Any) -> Any:
    """Return a value in the form that JSON holds."""
    return msgspec.to_builtins(value)
