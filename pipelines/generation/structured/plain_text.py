"""Strings without quotes, as calls in XML have them, that satisfy a JSON schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from staticllm.errors import GenerationConfigError
from staticllm.pipelines.generation.structured.nodes import AllOf
from staticllm.pipelines.generation.structured.regex import search_regex

STRING_KEYWORDS = ("pattern", "minLength", "maxLength", "format")
MAX_LENGTH = 1 << 20
_DATE = r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_FORMATS = {
    "date": _DATE, "time": _TIME, "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": r"((25[0-5]|(2[0-4]|1?[0-9])?[0-9])\.){3}(25[0-5]|(2[0-4]|1?[0-9])?[0-9])",
}  # fmt: skip
"""The formats that are enforced; JSON Schema lets the others be mere annotations."""


def plain_text(schema: Mapping[str, Any], excluded: str) -> AllOf:
    """Return the strings of a schema that do not contain ``excluded``, the tag that ends them.

    Raises:
        GenerationConfigError: a keyword has a value of a wrong type, or no string satisfies it.
    """
    least, most = _length(schema, "minLength", 0), _length(schema, "maxLength", None)
    assert least is not None
    if most is not None and most < least:
        raise GenerationConfigError(f"minLength={least} is larger than maxLength={most}: no string satisfies both")
    regexes = ["(?s:.*)" if not least and most is None else f"(?s:.){{{least},{'' if most is None else most}}}"]
    pattern, format = schema.get("pattern"), schema.get("format")
    if pattern is not None:
        if not isinstance(pattern, str):
            raise GenerationConfigError(f"pattern={pattern!r}: must be a str")
        regexes.append(search_regex(pattern))
    if isinstance(format, str) and format in _FORMATS:
        regexes.append(_FORMATS[format])
    return AllOf(tuple(regexes), excluded)


def _length(schema: Mapping[str, Any], name: str, default: int | None) -> int | None:
    value = schema.get(name, default)
    if value is not None and (type(value) is not int or not 0 <= value <= MAX_LENGTH):
        raise GenerationConfigError(f"{name}={value!r}: must be a whole number from 0 to {MAX_LENGTH}")
    return value
