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
from staticllm.pipelines.text.parsing.formats import ARGS, FUNCTION, MessageFormat

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


@dataclass(frozen=True)
class Text:
    """A text that must come as it is. It may contain special tokens."""

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
class OneText:
    """One of several texts."""

    texts: tuple[str, ...]


@dataclass(frozen=True)
class OptionalParts:
    """Parts that may be there or not."""

    parts: tuple[Text | Json | FreeText | OneText, ...]


Part: TypeAlias = Text | Json | FreeText | OneText | OptionalParts


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
        elif isinstance(part, OneText):
            texts = [{"type": "const_string", "value": text} for text in part.texts]
            elements.append(texts[0] if len(texts) == 1 else {"type": "or", "elements": texts})
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
    if tools.choice not in ("required", "function"):
        return options.grammar
    if format is None:
        raise GenerationConfigError(f"tool_choice={tools.choice!r} with parse_tools=False: leave one of them out")
    asked = [
        name
        for name, is_asked in (
            ("a grammar", options.grammar is not None),
            ("num_beams", options.beams is not None),
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
    "xml": re.compile(r"[!-=?-~]+"),
    "harmony": re.compile(r"[\w.-]+", re.ASCII),
}
"""The names of functions and parameters that can be written in a syntax; all in those that are not listed."""


def _check_names(syntax: str, name: str, schema: Mapping[str, Any]) -> None:
    known = _NAMES.get(syntax)
    parameters = schema.get("properties", {}) if syntax in ("python", "xml") else {}
    for each in (name, *(parameters if isinstance(parameters, Mapping) else ())):
        if known is not None and not known.fullmatch(str(each)):
            raise GenerationConfigError(
                f"a required call of {name!r}: the name {each!r} cannot be written in the model's format of calls; rename it, "
                "or use tool_choice='auto'"
            )


def _call(format: MessageFormat, name: str, parameters: object) -> tuple[Part, ...]:
    schema: Mapping[str, Any] = parameters if isinstance(parameters, Mapping) else ANY_OBJECT
    _check_names(format.syntax, name, schema)
    if format.syntax == "xml":
        return _xml_call(format.call, name, schema)
    if format.syntax == "python":
        return _python_call(format.call, name, schema)
    (begin, end), quoted = format.call, f'{{"name": {json.dumps(name)}, '
    wrappers = {
        "tagged": (f'{begin}\n{quoted}"arguments": ', f"}}\n{end}"),
        "bare_json": (f'{quoted}"parameters": ', "}"),
        "named": (f"{begin}{name}{ARGS}", "") if format.has_args_marker else (f'{begin}[{quoted}"arguments": ', "}]"),
        "harmony": (f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>", "<|call|>"),
    }
    before, after = wrappers[format.syntax]
    return (Text(before), Json(schema), Text(after)) if after else (Text(before), Json(schema))


def _xml_call(tags: tuple[str, str], name: str, schema: Mapping[str, Any]) -> tuple[Part, ...]:
    inner = [part for member in _members(schema) for part in _xml_parts(*member)]
    opening, closing = (f"{tags[0]}\n", f"\n{tags[1]}") if tags[0] else ("", "")
    return Text(f"{opening}{FUNCTION}{name}>\n"), *inner, Text(f"</function>{closing}")


def _python_call(markers: tuple[str, str], name: str, schema: Mapping[str, Any]) -> tuple[Part, ...]:
    arguments: list[Part] = []
    for key, value, is_required in _members(schema):
        comma = ", " if arguments else ""
        parts = (Text(f"{comma}{key}="), Json(value))
        if is_required:
            arguments += parts
        elif arguments:  # an optional first argument would leave the comma open
            arguments.append(OptionalParts(parts))
    return Text(f"{markers[0]}[{name}("), *arguments, Text(f")]{markers[1]}")


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


def _xml_parts(key: str, schema: Mapping[str, Any], is_required: bool) -> tuple[Part, ...]:
    parts = (Text(f"<parameter={key}>\n"), _xml_value(schema), Text("\n</parameter>\n"))
    return parts if is_required else (OptionalParts(parts),)


def _xml_value(schema: Mapping[str, Any]) -> Json | FreeText | OneText:
    """Return a value: strings are written without quotes, as ``take_xml_call`` reads them, and all else is JSON."""
    if schema.get("type") != "string":
        return Json(schema)
    texts = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        return FreeText("\n</parameter>")
    return OneText(tuple(texts))
