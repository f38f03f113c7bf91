"""Parameters of functions that are written each on its own, without a JSON object around them.

Such a format can enforce the schema of each parameter, and which of them are required. What else a schema says of the object is
refused, unless it holds for all objects that are possible then. Strings have no quotes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from staticllm.errors import GenerationConfigError, shown

from .json_schema import prepared
from .nodes import (
    AllOf,
    FixedText,
    Node,
    Pattern,
    Repeat,
    Schema,
    Sequence,
    Shortest,
    escaped,
    one_of,
)
from .regex import rust_regex, search_regex
from .schema_facts import (
    AnySchema,
    InexpressibleError,
    SchemaFacts,
    listed_values,
    with_parts,
)

ROOT = "root"
"""The definition that holds the schema of all parameters, in the schema of one that refers to it."""
_REFERENCES = ("$ref", "$dynamicRef")
Object = Mapping[str, Any]


@dataclass(frozen=True)
class Owner:
    """Whose parameters they are, for errors: their name, and what to do if the format cannot enforce their schema."""

    name: str
    remedy: str


@dataclass(frozen=True)
class Parameter:
    """A parameter, and the schema of its values, which is complete: its references lead to parts of itself."""

    name: str
    schema: Object
    is_required: bool


def object_schema(schema: Object, owner: Owner) -> dict[str, Any]:
    """Return the schema of the objects among the values of ``schema``.

    Raises:
        GenerationConfigError: its type excludes objects.
    """
    types = schema.get("type", "object")
    if types != "object" and not (isinstance(types, list) and "object" in types):
        raise GenerationConfigError(f"{owner.name} have type={shown(types)}: must be 'object'")
    return {**schema, "type": "object"}


def listed_parameters(schema: Object, owner: Owner) -> list[Parameter]:
    """Return the parameters of a schema in their order.

    Those of references and ``allOf`` at the top are found too. A required one that is not listed may have any value.

    Raises:
        GenerationConfigError: the schema is malformed, nothing satisfies it, or a list of parameters cannot say all that it says.
    """
    parts = _parts(schema, owner)
    found: dict[str, AnySchema] = {}
    for part in parts:
        for name, value in part.get("properties", {}).items():
            found[str(name)] = {"allOf": [found[name], value]} if found.get(name, value) != value else value
    required = {name for part in parts for name in part.get("required", ())}
    missing = sorted(required - found.keys())
    is_open = all(part.get("additionalProperties") is not False for part in parts)
    if missing and not is_open:
        raise GenerationConfigError(
            f"{owner.name} require {shown(missing[0])}, which properties lacks and additionalProperties=False forbids: "
            "add it to properties"
        )
    _check_keywords(parts, len(required), len(found.keys() | required), owner)
    if not is_open and sum(bool(part.get("properties")) for part in parts) > 1:
        raise _refusal("additionalProperties", False, owner)
    values = {**found, **dict.fromkeys(missing, True)}
    return [
        Parameter(name, _complete(name, value, schema, owner), name in required)
        for name, value in values.items()
        if value is not False or name in required
    ]


def _parts(schema: Object, owner: Owner) -> list[Object]:
    """Return the schemas of which each must hold: the schema itself, what it refers to, and the parts of ``allOf``."""
    try:
        parts = list(SchemaFacts(schema).conjuncts(schema))
    except (InexpressibleError, TypeError):
        name = "$ref" if "$ref" in schema else "allOf"
        raise GenerationConfigError(
            f"{owner.name} have {name}={shown(schema.get(name))}: must lead to other parts of them; {owner.remedy}"
        ) from None
    for part in parts:
        object_schema(part, owner)
        properties = part.get("properties", {})
        required = part.get("required", [])
        is_list = isinstance(required, (list, tuple)) and all(isinstance(name, str) for name in required)
        if not isinstance(properties, Mapping) or not is_list:
            raise GenerationConfigError(
                f"{owner.name} have properties or required of a wrong type: must be an object and a list of names"
            )
    return parts


_SAYS_NOTHING: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(
        ("anyOf", "oneOf", "not", "if", "const", "enum", "dependencies", "$dynamicRef", "$recursiveRef"),
        lambda value: False,
    ),
    **dict.fromkeys(
        ("dependentRequired", "dependentSchemas", "patternProperties", "propertyNames"),
        lambda value: value in ({}, True),
    ),
    **dict.fromkeys(("additionalProperties", "unevaluatedProperties"), lambda value: value in (True, False, {})),
}
"""Keywords that speak of the object, and whether a value of them has no effect on the listed properties."""


def _check_keywords(parts: list[Object], num_required: int, num_names: int, owner: Owner) -> None:
    """Check that the parts say nothing but ``properties`` and ``required``.

    Raises:
        GenerationConfigError: one does.
    """
    for part in parts:
        for name, value in part.items():
            if name in _SAYS_NOTHING and not _SAYS_NOTHING[name](value):
                raise _refusal(name, value, owner)
        least = part.get("minProperties", 0)
        most = part.get("maxProperties", num_names)
        for name, value, is_implied in (
            ("minProperties", least, isinstance(least, (int, float)) and least <= num_required),
            ("maxProperties", most, isinstance(most, (int, float)) and most >= num_names),
        ):
            if not is_implied:
                raise _refusal(name, value, owner)


def _refusal(name: str, value: object, owner: Owner) -> GenerationConfigError:
    return GenerationConfigError(
        f"{owner.name} have {name}={shown(value)}: the format of calls can only enforce properties and required; {owner.remedy}"
    )


def _complete(name: str, value: AnySchema, root: Object, owner: Owner) -> Object:
    """Return the schema of the parameter ``name`` with all that it refers to."""
    if value is True:
        return {}
    if value is False:
        raise GenerationConfigError(f"{owner.name} require {shown(name)}, whose schema is false: nothing satisfies it")
    if not isinstance(value, Mapping):
        raise GenerationConfigError(
            f"{owner.name} have {shown(name)} with the schema {shown(value)}: must be an object or a boolean"
        )
    try:
        moved = _moved(value)
        if moved == value:  # without references
            return value
        whole = _moved({key: each for key, each in root.items() if key not in ("$id", "$schema")})
    except RecursionError:
        raise GenerationConfigError(f"{owner.name} are nested too deeply: use at most 100 levels") from None
    return {**moved, "$defs": {ROOT: whole}}


def _moved(schema: AnySchema) -> AnySchema:
    """Return a schema whose references lead to the same places when the root of the document is the definition ``ROOT``."""
    if not isinstance(schema, Mapping):
        return schema
    found = with_parts(schema, _moved)
    for name in _REFERENCES:
        value = found.get(name)
        if isinstance(value, str) and (value == "#" or value.startswith("#/")):
            found[name] = f"#/$defs/{ROOT}{value[1:]}"
    return found


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
        return one_of([FixedText(text, is_plain=True) for text in texts])
    limits = limited_text(schema, excluded)
    return limits if texts is None else AllOf(("|".join(map(escaped, texts)) or "()", *limits.regexes), excluded)


def limited_text(schema: Mapping[str, Any], excluded: str) -> AllOf:
    """Return what ``plain_text`` does of a schema without ``const`` and ``enum``.

    Raises:
        GenerationConfigError: as for ``plain_text``.
    """
    least = _length(schema, "minLength", 0)
    most = _length(schema, "maxLength", None)
    assert least is not None
    if most is not None and most < least:
        raise GenerationConfigError(f"minLength={least} is larger than maxLength={most}: no string satisfies both")
    regexes = ["(?s:.*)" if not least and most is None else f"(?s:.){{{least},{'' if most is None else most}}}"]
    pattern = schema.get("pattern")
    format = schema.get("format")
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
        name = FixedText(parameter.name, is_plain=True)
        body = Sequence((SPACE, FixedText("<parameter="), name, FixedText(">"), *_value(parameter.schema)))
        parts.append(body if parameter.is_required else Repeat(body, 0, 1))
    return Sequence((*parts, SPACE))


def _value(schema: Mapping[str, Any]) -> tuple[Node, ...]:
    """Return a value and the end of its parameter."""
    if not is_plain(schema) or "enum" in schema or "const" in schema:
        return SPACE, Schema(prepared(dict(schema))), SPACE, FixedText(END)
    if "pattern" in schema:
        limits = limited_text({name: value for name, value in schema.items() if name != "pattern"}, END)
        return AllOf((*limits.regexes, rust_regex(str(schema["pattern"]))), END), FixedText(END)
    if "format" in schema:
        return limited_text(schema, END), FixedText(END)
    return (Shortest((END,), int(schema.get("minLength", 0)), schema.get("maxLength")),)
