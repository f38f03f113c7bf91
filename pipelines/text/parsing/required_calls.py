"""Describes the text that an answer must be where a call is required, for a grammar, as plain values."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from staticllm.errors import GenerationConfigError
from staticllm.pipelines.generation.extra_options import ToolOptions, function_of
from staticllm.pipelines.generation.options import GenerationOptions
from staticllm.pipelines.generation.structured.grammar import Grammar
from staticllm.pipelines.generation.structured.plain_text import STRING_KEYWORDS
from staticllm.pipelines.generation.structured.schemas.parameters import object_schema
from staticllm.pipelines.text.parsing.formats import ARGS, FUNCTION, MessageFormat
from staticllm.pipelines.text.parsing.key_value_calls import ARG_KEY, ARG_VALUE
from staticllm.pipelines.text.parsing.wrapped_calls import CALL, FENCE, SEPARATOR


@dataclass(frozen=True)
class Text:
    """A text of the model's format that must come as it is. It may contain special tokens."""

    text: str


@dataclass(frozen=True)
class PlainText:
    """A text of a tool, such as its name, that must come as it is. It contains no special tokens, whatever it says."""

    text: str


@dataclass(frozen=True)
class Json:
    """A JSON value that satisfies a schema."""

    schema: Mapping[str, Any]


@dataclass(frozen=True)
class FreeText:
    """Any text that does not contain ``end``. A ``Text`` that begins with ``end`` follows."""

    end: str


@dataclass(frozen=True)
class LimitedText:
    """Text that satisfies the keywords of a JSON schema for strings, and does not contain ``excluded``."""

    schema: Mapping[str, Any]
    excluded: str


@dataclass(frozen=True)
class OptionalParts:
    """Parts that may be there or not."""

    parts: tuple[Text | PlainText | Json | FreeText | LimitedText, ...]


Part: TypeAlias = Text | PlainText | Json | FreeText | LimitedText | OptionalParts


@dataclass(frozen=True)
class RequiredCalls:
    """The answers with a required call: ``lead`` and then one of ``calls``, each a sequence of parts.

    ``lead`` is the reasoning that the prompt began, if it did.
    """

    calls: tuple[tuple[Part, ...], ...]
    lead: tuple[Part, ...] = ()

    def to_structural_tag(self) -> dict[str, Any]:
        """Return these answers as the JSON of a structural tag, with the formats of xgrammar and GenAI."""
        choices = [_sequence(call) for call in self.calls]
        call = choices[0] if len(choices) == 1 else {"type": "or", "elements": choices}
        lead = _elements(self.lead)
        format = {"type": "sequence", "elements": [*lead, call]} if lead else call
        return {"type": "structural_tag", "format": format}


def _sequence(parts: Sequence[Part]) -> dict[str, Any]:
    return {"type": "sequence", "elements": _elements(parts)}


def _elements(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """Return the formats of these parts. Free text becomes a tag that ends with the beginning of the text after it."""
    elements: list[dict[str, Any]] = []
    end = ""
    for part in parts:
        if isinstance(part, FreeText):
            end = part.end
            elements.append({"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": end})
        elif isinstance(part, Json):
            elements.append({"type": "json_schema", "json_schema": dict(part.schema)})
        elif isinstance(part, LimitedText):
            limits = {name: part.schema[name] for name in STRING_KEYWORDS if name in part.schema}
            elements.append({"type": "string", "json_schema": limits, "excluded": part.excluded})
        elif isinstance(part, PlainText):
            elements.append({"type": "plain_string", "value": part.text})
        elif isinstance(part, OptionalParts):
            elements.append({"type": "optional", "content": _sequence(part.parts)})
        else:
            text, end = part.text.removeprefix(end), ""
            elements += [{"type": "const_string", "value": text}] if text else []
    return elements


def required_calls(format: MessageFormat, tools: ToolOptions) -> RequiredCalls:
    """Return the answers that ``tool_choice`` allows: a call of the named function, or of any function for ``required``.

    Raises:
        GenerationConfigError: the chat template shows no format of calls.
    """
    if not format.syntax:
        raise GenerationConfigError(
            f"tool_choice={tools.choice!r}: the chat template shows no known format of calls; use tool_choice='auto'"
        )
    functions = [function_of(tool) for tool in tools.tools]
    chosen = [function for function in functions if tools.choice != "function" or function["name"] == tools.name]
    lead: tuple[Part, ...] = ()
    if format.is_reasoning_open:
        end = format.reasoning[1]
        lead = (FreeText(end), Text(end + "\n\n"))
    return RequiredCalls(tuple(_call(format, str(each["name"]), each.get("parameters")) for each in chosen), lead)


def grammar_of_calls(format: MessageFormat | None, options: GenerationOptions) -> Grammar | None:
    """Return the grammar of the answers that ``tool_choice`` allows; that of the options if it requires no call.

    ``format`` is None if the answer is not parsed.

    Raises:
        GenerationConfigError: the chat template shows no format of calls, or another option contradicts a required call.
    """
    tools = options.extra.tool_options
    if not tools.is_call_required:
        return options.grammar
    if format is None:
        raise GenerationConfigError(f"tool_choice={tools.choice!r} with parse_tools=False: leave one of them out")
    asked = [
        name
        for name, is_asked in (
            ("a grammar", options.grammar is not None),
            ("ignore_eos", not options.stop_token_ids),
        )
        if is_asked
    ]
    if asked:
        raise GenerationConfigError(f"tool_choice={tools.choice!r} with {asked[0]}: leave one of them out")
    tag = required_calls(format, tools).to_structural_tag()
    return Grammar("structural_tag", json.dumps(tag, ensure_ascii=False))


_NAMES = {
    "python": re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII),
    "fenced": re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII),
    "xml": re.compile(r"[!-=?-~]+"),
    "json_function": re.compile(r"[!-=?-~]+"),
    "key_value": re.compile(r"[!-;=?-z|~]+"),
    "separated": re.compile(r"[!-;=-~]+"),
    "recipients": re.compile(r"[!-~]+"),
    "harmony": re.compile(r"[\w.-]+", re.ASCII),
}
"""The names of functions and parameters that can be written in a syntax; all in those that are not listed."""
_WITH_PARAMETERS = ("python", "fenced", "xml", "key_value")
"""Syntaxes in which parameters are no part of a JSON object."""


def _check_names(syntax: str, name: str, schema: Mapping[str, Any]) -> None:
    known = _NAMES.get(syntax)
    parameters = schema.get("properties", {}) if syntax in _WITH_PARAMETERS else {}
    for each in (name, *(parameters if isinstance(parameters, Mapping) else ())):
        if known is not None and not known.fullmatch(str(each)):
            raise GenerationConfigError(
                f"a required call of {name!r}: the name {each!r} cannot be written in the model's format of calls; rename it, "
                "or use tool_choice='auto'"
            )


def _call(format: MessageFormat, name: str, parameters: object) -> tuple[Part, ...]:
    schema = object_schema(parameters if isinstance(parameters, Mapping) else {}, f"the tool {name!r}")
    _check_names(format.syntax, name, schema)
    if format.syntax == "xml":
        return _xml_call(format.call, name, schema)
    if format.syntax == "key_value":
        return _key_value_call(format.call, name, schema)
    if format.syntax in ("python", "fenced"):
        return _python_call(format, name, schema)
    around = _around_json(format)
    written = json.dumps(name)[1:-1] if around.before_name.endswith('"') else name
    parts = (Text(around.before_name), PlainText(written), Text(around.after_name), Json(schema), Text(around.end))
    return tuple(part for part in parts if part not in (Text(""), PlainText("")))


@dataclass(frozen=True)
class _Around:
    """What stands around the name of a function and its arguments, where these are one JSON object."""

    before_name: str
    after_name: str
    end: str


def _around_json(format: MessageFormat) -> _Around:
    (begin, end), quoted = format.call, '{"name": "'
    if format.syntax == "separated" and format.is_fenced:
        before = f"{begin}{CALL[0]}function{SEPARATOR}"
        return _Around(before, f"\n{FENCE}json\n", f"\n{FENCE}{CALL[1]}{end}")
    if format.syntax == "named" and format.has_args_marker:
        return _Around(begin, ARGS, "")
    wrappers = {
        "separated": _Around(f"{begin}{CALL[0]}", SEPARATOR, f"{CALL[1]}{end}"),
        "tagged": _Around(f"{begin}\n{quoted}", '", "arguments": ', f"}}\n{end}"),
        "bare_json": _Around(quoted, '", "parameters": ', "}"),
        "named": _Around(f"{begin}[{quoted}", '", "arguments": ', "}]"),
        "json_function": _Around(FUNCTION, ">", "</function>"),
        "recipients": _Around("" if format.is_call_open else begin, end, ""),
        "harmony": _Around("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "<|call|>"),
    }
    return wrappers[format.syntax]


def _xml_call(tags: tuple[str, str], name: str, schema: Mapping[str, Any]) -> tuple[Part, ...]:
    inner = _tagged_members(schema, _Tags("<parameter=", ">\n", "\n", "</parameter>", "\n"))
    opening, closing = (f"{tags[0]}\n", f"\n{tags[1]}") if tags[0] else ("", "")
    return Text(f"{opening}{FUNCTION}"), PlainText(name), Text(">\n"), *inner, Text(f"</function>{closing}")


def _key_value_call(tags: tuple[str, str], name: str, schema: Mapping[str, Any]) -> tuple[Part, ...]:
    inner = _tagged_members(schema, _Tags(ARG_KEY[0], f"{ARG_KEY[1]}\n{ARG_VALUE[0]}", "", ARG_VALUE[1], "\n"))
    return Text(tags[0]), PlainText(name), Text("\n"), *inner, Text(tags[1])


@dataclass(frozen=True)
class _Tags:
    """What stands around a parameter's name and value: the tag ``end`` has layout on both sides."""

    before_name: str
    after_name: str
    layout: str
    end: str
    after: str


def _tagged_members(schema: Mapping[str, Any], tags: _Tags) -> list[Part]:
    """Return the parameters with tags around their names and values: strings have no quotes, and all else is JSON."""
    found: list[Part] = []
    for key, value, is_required in _members(schema):
        written = LimitedText(value, tags.end) if value.get("type") == "string" else Json(value)
        end = Text(tags.layout + tags.end + tags.after)
        parts = (Text(tags.before_name), PlainText(key), Text(tags.after_name), written, end)
        found += parts if is_required else (OptionalParts(parts),)
    return found


def _python_call(format: MessageFormat, name: str, schema: Mapping[str, Any]) -> tuple[Part, ...]:
    begin, end = (f"{format.call[0]}[", f"]{format.call[1]}")
    if format.syntax == "fenced":
        begin, end = f"{format.call[0]}\n{FENCE}python\n", f"\n{FENCE}\n{format.call[1]}"
    arguments: list[Part] = []
    for key, value, is_required in _members(schema):
        comma = ", " if arguments else ""
        parts = (*([Text(comma)] if comma else []), PlainText(key), Text("="), Json(value))
        if is_required:
            arguments += parts
        elif arguments:  # an optional first argument would leave the comma open
            arguments.append(OptionalParts(parts))
    return Text(begin), PlainText(name), Text("("), *arguments, Text(f"){end}")


def _members(schema: Mapping[str, Any]) -> Iterable[tuple[str, Mapping[str, Any], bool]]:
    """Yield name, schema and whether it is required of each parameter; the required ones come first."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, (list, tuple)):
        raise GenerationConfigError(
            "the parameters of a tool have properties or required of a wrong type: must be an object and a list"
        )
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}  # references go to these
    for key, value in sorted(properties.items(), key=lambda item: item[0] not in required):
        yield key, {**shared, **value} if isinstance(value, Mapping) else {}, key in required
