"""Strings without quotes, as calls in XML have them, that satisfy a JSON schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from staticllm.errors import GenerationConfigError, shown
from staticllm.pipelines.grammars.nodes import AllOf, Node, Text, escaped, one_of
from staticllm.pipelines.grammars.regex import search_regex
from staticllm.pipelines.grammars.schemas.facts import listed_values

LIMITS = ("pattern", "minLength", "maxLength", "format")
STRING_KEYWORDS = ("const", "enum", *LIMITS)
MAX_LENGTH = 1 << 20
_COMBINERS = ("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if")
_DATE = r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_FORMATS = {
    "date": _DATE, "time": _TIME, "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": r"((25[0-5]|(2[0-4]|1?[0-9])?[0-9])\.){3}(25[0-5]|(2[0-4]|1?[0-9])?[0-9])",
}  # fmt: skip
"""The formats that are enforced; JSON Schema lets the others be mere annotations."""


def is_plain(schema: Mapping[str, Any]) -> bool:
    """Return whether the values of a schema are strings of which these keywords say all."""
    return schema.get("type") == "string" and not any(name in schema for name in _COMBINERS)


def plain_text(schema: Mapping[str, Any], excluded: str) -> Node:
    """Return the strings of a schema that do not contain ``excluded``, the tag that ends them.

    Raises:
        GenerationConfigError: a keyword has a value of a wrong type or contains ``excluded``, or no string satisfies it.
    """
    texts = _listed_texts(schema, excluded)
    if texts is not None and not any(name in schema for name in LIMITS):
        return one_of([Text(text, is_plain=True) for text in texts])
    limits = limited_text(schema, excluded)
    return limits if texts is None else AllOf(("|".join(map(escaped, texts)) or "()", *limits.regexes), excluded)


def limited_text(schema: Mapping[str, Any], excluded: str) -> AllOf:
    """Return what ``plain_text`` does of a schema without ``const`` and ``enum``.

    Raises:
        GenerationConfigError: as for ``plain_text``.
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
        _check_without(pattern, "pattern", excluded)
        regexes.append(search_regex(pattern))
    if isinstance(format, str) and format in _FORMATS:
        regexes.append(_FORMATS[format])
    return AllOf(tuple(regexes), excluded)


def _listed_texts(schema: Mapping[str, Any], excluded: str) -> list[str] | None:
    """Return the strings of ``const`` or ``enum``; None without them."""
    if "const" not in schema and "enum" not in schema:
        return None
    name = "const" if "const" in schema else "enum"
    texts = [text for text in listed_values(schema) or () if isinstance(text, str)]
    if not texts:
        raise GenerationConfigError(f"{name}={shown(schema[name])}: no string satisfies it; list at least one")
    for text in texts:
        _check_without(text, name, excluded)
    return texts


def _check_without(text: str, name: str, excluded: str) -> None:
    if excluded in text:
        raise GenerationConfigError(
            f"{name} has {shown(text)}: the model's format of calls ends a value at {excluded!r}; leave that out of the schema, "
            "or use tool_choice='auto'"
        )


def _length(schema: Mapping[str, Any], name: str, default: int | None) -> int | None:
    value = schema.get(name, default)
    if value is not None and (type(value) is not int or not 0 <= value <= MAX_LENGTH):
        raise GenerationConfigError(f"{name}={value!r}: must be a whole number from 0 to {MAX_LENGTH}")
    return value
