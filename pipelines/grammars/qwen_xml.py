"""The parameters of a function in the XML-like format of Qwen's coder models: ``<parameter=name>value</parameter>``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from staticllm.errors import GenerationConfigError
from staticllm.pipelines.grammars.json_schema import prepared
from staticllm.pipelines.grammars.nodes import (
    AllOf,
    Node,
    Pattern,
    Repeat,
    Schema,
    Sequence,
    Shortest,
    Text,
)
from staticllm.pipelines.grammars.plain_text import is_plain, limited_text
from staticllm.pipelines.grammars.regex import rust_regex
from staticllm.pipelines.grammars.schemas.parameters import Owner, listed_parameters

SPACE = Pattern(r"[ \t\n]{0,8}")
END = "</parameter>"
_OWNER = Owner("parameters in XML", "leave it out, or use JSON")


def xml_parameters(schema: Any) -> Node:
    """Return the parameters of an object's schema, in its order; those that are not required may be left out.

    Strings are written as they are, and with an ``enum`` or ``const`` in quotes, as GenAI does. All else is JSON.

    Raises:
        GenerationConfigError: the schema is malformed, lists no properties, or says more than the format can enforce.
    """
    if not isinstance(schema, Mapping) or not schema.keys() & {"properties", "required", "$ref", "allOf"}:
        raise GenerationConfigError("parameters in XML need the schema of an object with properties: add them")
    parts: list[Node] = []
    for parameter in listed_parameters(schema, _OWNER):
        name = Text(parameter.name, is_plain=True)
        body = Sequence((SPACE, Text("<parameter="), name, Text(">"), *_value(parameter.schema)))
        parts.append(body if parameter.is_required else Repeat(body, 0, 1))
    return Sequence((*parts, SPACE))


def _value(schema: Mapping[str, Any]) -> tuple[Node, ...]:
    """Return a value and the end of its parameter."""
    if not is_plain(schema) or "enum" in schema or "const" in schema:
        return SPACE, Schema(prepared(dict(schema))), SPACE, Text(END)
    if "pattern" in schema:
        limits = limited_text({name: value for name, value in schema.items() if name != "pattern"}, END)
        return AllOf((*limits.regexes, rust_regex(str(schema["pattern"]))), END), Text(END)
    if "format" in schema:
        return limited_text(schema, END), Text(END)
    return (Shortest((END,), int(schema.get("minLength", 0)), schema.get("maxLength")),)
