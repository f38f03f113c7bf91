"""Values of OpenVINO's properties as JSON: element types and enumerations by name, all other objects as text."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def encode_value(value: Any) -> Any:
    """Return a property's value as JSON types, from which ``decode_value`` makes an equal one."""
    if isinstance(value, (str, int, float, bool)) or value is None:
        return value
    if isinstance(value, (list, tuple)):
        return [encode_value(each) for each in value]
    if isinstance(value, (set, frozenset)):
        return {"$set": [encode_value(each) for each in value]}
    if isinstance(value, dict):
        return {"$dict": [[str(key), encode_value(each)] for key, each in value.items()]}
    return _encode_object(value)


def _encode_object(value: Any) -> Any:
    kind = type(value)
    if kind.__module__.split(".")[0] == "openvino":
        if hasattr(value, "get_type_name"):
            return {"$type": value.get_type_name()}
        if isinstance(getattr(value, "name", None), str):
            return {"$enum": [kind.__module__, kind.__qualname__, value.name]}
    return str(value)


def decode_value(value: Any) -> Any:
    """Return the value that ``encode_value`` was given; names that this OpenVINO does not have stay text."""
    if isinstance(value, list):
        return [decode_value(each) for each in value]
    if not isinstance(value, dict) or len(value) != 1:
        return value
    ((kind, given),) = value.items()
    decode = _DECODERS.get(kind)
    return value if decode is None else decode(given)


def _set(given: list[Any]) -> set[Any]:
    return {decode_value(each) for each in given}


def _dict(given: list[list[Any]]) -> dict[str, Any]:
    return {key: decode_value(each) for key, each in given}


def _type(given: str) -> Any:
    from openvino._pyopenvino import Type

    return getattr(Type, given, given)


def _member(given: list[str]) -> Any:
    """Return a member of an enumeration of OpenVINO; its name if there is none."""
    module, path, name = given
    found: Any = sys.modules.get(module) if module.split(".")[0] == "openvino" else None
    for part in path.split("."):
        found = getattr(found, part, None)
    members = getattr(found, "__members__", {})
    return members.get(name, name)


_DECODERS: dict[str, Callable[[Any], Any]] = {"$set": _set, "$dict": _dict, "$type": _type, "$enum": _member}
