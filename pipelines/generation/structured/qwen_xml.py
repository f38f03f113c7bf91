"""The parameters of a function in the XML-like format of Qwen's coder models: ``<parameter=name>value</parameter>``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from staticllm.errors import GenerationConfigError
from staticllm.pipelines.generation.structured.json_schema import prepared
from staticllm.pipelines.generation.structured.nodes import (
    AllOf,
    Node,
    Pattern,
    Repeat,
    Schema,
    Sequence,
    Shortest,
    Text,
)
from staticllm.pipelines.generation.structured.plain_text import limited_text
from staticllm.pipelines.generation.structured.regex import rust_regex

SPACE = Pattern(r"[ \t\n]{0,8}")
END = "</parameter>"


def xml_parameters(schema: Any) -> Node:
    """Return the parameters of an object's schema, in its order; those that are not required may be left out.

    Strings are written as they are, and with an ``enum`` or ``const`` in quotes, as GenAI does. All else is JSON.

    Raises:
        GenerationConfigError: the schema is not that of an object with properties.
    """
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    if not isinstance(properties, Mapping):
        raise GenerationConfigError("parameters in XML need the schema of an object with properties: add them")
    required = schema.get("required", [])
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    parts: list[Node] = []
    for name, value in properties.items():
        body = Sequence(
            (SPACE, Text("<parameter="), Text(name, is_plain=True), Text(">"), *_value({**shared, **value}, schema))
        )
        parts.append(body if name in required else Repeat(body, 0, 1))
    return Sequence((*parts, SPACE))


def _value(schema: Mapping[str, Any], root: Mapping[str, Any]) -> tuple[Node, ...]:
    """Return a value and the end of its parameter."""
    if schema.get("type") != "string" or "enum" in schema or "const" in schema:
        return SPACE, Schema(prepared(dict(schema))), SPACE, Text(END)
    if "pattern" in schema:
        limits = limited_text({name: value for name, value in schema.items() if name != "pattern"}, END)
        return AllOf((*limits.regexes, rust_regex(str(schema["pattern"]))), END), Text(END)
    if "format" in schema:
        return limited_text(schema, END), Text(END)
    return (Shortest((END,), int(schema.get("minLength", 0)), schema.get("maxLength")),)
