"""Describes the text that an answer must be where a call is required, for a grammar, as plain values."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from staticllm.errors import GenerationConfigError, shown
from staticllm.pipelines.conversation.parsing.formats import ARGS, FUNCTION, MessageFormat
from staticllm.pipelines.conversation.parsing.key_value_calls import ARG_KEY, ARG_VALUE
from staticllm.pipelines.conversation.parsing.learnt_calls import LearntCalls
from staticllm.pipelines.conversation.parsing.wrapped_calls import CALL, FENCE, SEPARATOR
from staticllm.pipelines.generation.options.resolve import GenerationOptions
from staticllm.pipelines.generation.options.tools import ToolOptions, function_of
from staticllm.pipelines.grammars.grammar import Grammar
from staticllm.pipelines.grammars.plain_text import STRING_KEYWORDS, is_plain
from staticllm.pipelines.grammars.schemas.parameters import (
    Owner,
    Parameter,
    listed_parameters,
    object_schema,
)
from staticllm.pipelines.grammars.structural_tags import has_free_text


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
class LimitedText:
    """Text that satisfies the keywords of a JSON schema for strings, and does not contain ``excluded``."""

    schema: Mapping[str, Any]
    excluded: str


@dataclass(frozen=True)
class OptionalParts:
    """Parts that may be there or not."""

    parts: tuple[Part, ...]


@dataclass(frozen=True)
class OneOf:
    """One of several sequences of parts."""

    choices: tuple[tuple[Part, ...], ...]


Part: TypeAlias = Text | PlainText | Json | LimitedText | OptionalParts | OneOf


@dataclass(frozen=True)
class RequiredCalls:
    """The answers with a required call: one of ``calls``, each a sequence of parts."""

    calls: tuple[tuple[Part, ...], ...]

    def to_structural_tag(self) -> dict[str, Any]:
        """Return these answers as the JSON of a structural tag, with the formats of xgrammar and GenAI."""
        return {"type": "structural_tag", "format": _choice(self.calls)}


def _sequence(parts: Sequence[Part]) -> dict[str, Any]:
    return {"type": "sequence", "elements": _elements(parts)}


def _choice(choices: Sequence[Sequence[Part]]) -> dict[str, Any]:
    elements = [_sequence(each) for each in choices]
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": elements}


def _elements(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """Return the formats of these parts."""
    elements: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, Json):
            elements.append({"type": "json_schema", "json_schema": dict(part.schema)})
        elif isinstance(part, LimitedText):
            limits = {name: part.schema[name] for name in STRING_KEYWORDS if name in part.schema}
            elements.append({"type": "string", "json_schema": limits, "excluded": part.excluded})
        elif isinstance(part, PlainText):
            elements.append({"type": "plain_string", "value": part.text})
        elif isinstance(part, OptionalParts):
            elements.append({"type": "optional", "content": _sequence(part.parts)})
        elif isinstance(part, OneOf):
            elements.append(_choice(part.choices))
        elif part.text:
            elements.append({"type": "const_string", "value": part.text})
    return elements


def required_calls(format: MessageFormat, tools: ToolOptions) -> RequiredCalls:
    """Return the answers that ``tool_choice`` allows: a call of the named function, or of any function for ``required``.

    Raises:
        GenerationConfigError: the chat template shows no format of calls.
    """
    if not format.syntax or format.syntax == "braced":
        raise GenerationConfigError(
            f"tool_choice={tools.choice!r}: the chat template shows no known format of calls; use tool_choice='auto'"
        )
    functions = [function_of(tool) for tool in tools.tools]
    chosen = [function for function in functions if tools.choice != "function" or function["name"] == tools.name]
    return RequiredCalls(tuple(_call(format, str(each["name"]), each.get("parameters")) for each in chosen))


def answer_grammar(format: MessageFormat | None, options: GenerationOptions) -> Grammar | None:
    """Return the grammar of the answers that ``tool_choice`` and the options allow; None if they allow all.

    It comes after what the model's format has before a constrained answer, such as the reasoning that the prompt began.
    ``format`` is None if the answer is not parsed; then the grammar governs all of it.

    Raises:
        GenerationConfigError: the chat template shows no format of calls, or another option contradicts a required call.
    """
    tools = options.extra.tool_options
    if not tools.is_call_required:
        if format is None or not is_content(options):
            return options.grammar
        assert options.grammar is not None
        return replace(options.grammar, opening=format.opening, reasoning_end=format.reasoning_end)
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
    end = format.reasoning_end if format.is_reasoning_open else ""
    return Grammar("structural_tag", json.dumps(tag, ensure_ascii=False), reasoning_end=end)


def is_content(options: GenerationOptions) -> bool:
    """Return whether the grammar of the options writes the text for the user, as it stands; False without one.

    A structural tag may describe the model's own format instead: calls if there are tools, or parts of an answer that is free
    elsewhere.
    """
    grammar = options.grammar
    if grammar is None or options.extra.tool_options.is_call_required:
        return False
    if grammar.kind != "structural_tag":
        return True
    return not options.extra.tool_options.tools and not has_free_text(grammar.text)


_NAMES = {
    "python": re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII),
    "fenced": re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII),
    "xml": re.compile(r"[!-=?-~]+"),
    "json_function": re.compile(r"[!-=?-~]+"),
    "key_value": re.compile(r"[!-;=?-z|~]+"),
    "separated": re.compile(r"[!-;=-~]+"),
    "recipients": re.compile(r"[!-~]+"),
    "harmony": re.compile(r"[\w.-]+", re.ASCII),
    "learnt": re.compile(r"[!#-;=?-Z\\^-~]+"),
}
"""The names of functions and parameters that can be written in a syntax; all in those that are not listed."""
_WITH_PARAMETERS = ("python", "fenced", "xml", "key_value", "learnt")
"""Syntaxes in which parameters are no part of a JSON object."""


def _owner_of(name: str) -> Owner:
    """Return what errors say of the parameters of the function ``name``."""
    return Owner(f"the parameters of the tool {shown(name)}", "leave it out, or use tool_choice='auto'")


def _check_names(syntax: str, name: str, parameters: Sequence[Parameter]) -> None:
    known = _NAMES.get(syntax)
    for each in (name, *(parameter.name for parameter in parameters)):
        if known is not None and not known.fullmatch(each):
            raise GenerationConfigError(
                f"a required call of {name!r}: the name {each!r} cannot be written in the model's format of calls; rename it, "
                "or use tool_choice='auto'"
            )


def _call(format: MessageFormat, name: str, parameters: object) -> tuple[Part, ...]:
    schema = object_schema(parameters if isinstance(parameters, Mapping) else {}, _owner_of(name))
    listed = listed_parameters(schema, _owner_of(name)) if format.syntax in _WITH_PARAMETERS else []
    listed.sort(key=lambda parameter: not parameter.is_required)
    _check_names(format.syntax, name, listed)
    if format.syntax == "xml":
        return _xml_call(format.call, name, listed)
    if format.syntax == "key_value":
        return _key_value_call(format.call, name, listed)
    if format.syntax in ("python", "fenced"):
        return _python_call(format, name, listed)
    if format.learnt is not None:
        return _learnt_call(format.learnt, name, schema, listed)
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
        "keyed": _Around(f'{begin}[{{"', '": ', f"}}]{end}"),
        "separated": _Around(f"{begin}{CALL[0]}", SEPARATOR, f"{CALL[1]}{end}"),
        "tagged": _Around(f"{begin}\n{quoted}", '", "arguments": ', f"}}\n{end}"),
        "generic": _Around('{"tool_calls": [' + quoted, '", "arguments": ', "}]}"),
        "bare_json": _Around(quoted, '", "parameters": ', "}"),
        "named": _Around(f"{begin}[{quoted}", '", "arguments": ', "}]"),
        "json_function": _Around(FUNCTION, ">", "</function>"),
        "recipients": _Around("" if format.is_call_open else begin, end, ""),
        "harmony": _Around("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "<|call|>"),
    }
    return wrappers[format.syntax]


def _xml_call(tags: tuple[str, str], name: str, parameters: Sequence[Parameter]) -> tuple[Part, ...]:
    inner = _tagged(parameters, _Tags("<parameter=", ">\n", "\n", "</parameter>", "\n"))
    opening, closing = (f"{tags[0]}\n", f"\n{tags[1]}") if tags[0] else ("", "")
    return Text(f"{opening}{FUNCTION}"), PlainText(name), Text(">\n"), *inner, Text(f"</function>{closing}")


def _key_value_call(tags: tuple[str, str], name: str, parameters: Sequence[Parameter]) -> tuple[Part, ...]:
    inner = _tagged(parameters, _Tags(ARG_KEY[0], f"{ARG_KEY[1]}\n{ARG_VALUE[0]}", "", ARG_VALUE[1], "\n"))
    return Text(tags[0]), PlainText(name), Text("\n"), *inner, Text(tags[1])


def _learnt_call(
    learnt: LearntCalls, name: str, schema: Mapping[str, Any], parameters: Sequence[Parameter]
) -> tuple[Part, ...]:
    inner, arguments = learnt.parameters, list[Part]([Json(schema)])
    if inner is not None:
        end = inner.after_value.strip()
        layout, _, after = inner.after_value.partition(end)
        tags = _Tags(inner.before_name, inner.after_name, layout, end, after, inner.after_name_of_other)
        arguments = _tagged(parameters, tags)
    before, after = learnt.wrapper[0] + learnt.before, learnt.after + learnt.wrapper[1]
    return Text(before), PlainText(name), Text(learnt.after_name), *arguments, Text(after)


@dataclass(frozen=True)
class _Tags:
    """What stands around a parameter's name and value: the tag ``end`` has layout on both sides.

    ``after_name_of_other`` is in the place of ``after_name`` before a value that is JSON, if it is another text.
    """

    before_name: str
    after_name: str
    layout: str
    end: str
    after: str
    after_name_of_other: str = ""


def _tagged(parameters: Sequence[Parameter], tags: _Tags) -> list[Part]:
    """Return the parameters with tags around their names and values: strings have no quotes, and all else is JSON."""
    found: list[Part] = []
    for each in parameters:
        is_text = is_plain(each.schema)
        value = LimitedText(each.schema, tags.end) if is_text else Json(each.schema)
        end = Text(tags.layout + tags.end + tags.after)
        after_name = tags.after_name if is_text else tags.after_name_of_other or tags.after_name
        parts = (Text(tags.before_name), PlainText(each.name), Text(after_name), value, end)
        found += parts if each.is_required else (OptionalParts(parts),)
    return found


def _python_call(format: MessageFormat, name: str, parameters: Sequence[Parameter]) -> tuple[Part, ...]:
    begin, end = (f"{format.call[0]}[", f"]{format.call[1]}")
    if format.syntax == "fenced":
        fences = (f"\n{FENCE}python\n", f"\n{FENCE}\n") if format.is_fenced else ("", "")
        begin, end = format.call[0] + fences[0], fences[1] + format.call[1]
    arguments = [(each.is_required, (PlainText(each.name), Text("="), Json(each.schema))) for each in parameters]
    required = [parts for is_required, parts in arguments if is_required]
    optional = [parts for is_required, parts in arguments if not is_required]
    return Text(begin), PlainText(name), Text("("), *_with_commas(required, optional), Text(f"){end}")


def _with_commas(required: Sequence[tuple[Part, ...]], optional: Sequence[tuple[Part, ...]]) -> tuple[Part, ...]:
    """Return arguments with commas between them. Without a required one, any of the optional ones may be the first."""
    comma = Text(", ")
    if not required and optional:
        firsts = [_with_commas([parts], optional[place + 1 :]) for place, parts in enumerate(optional)]
        return (OptionalParts((OneOf(tuple(firsts)),)),)
    between = [part for parts in required for part in (comma, *parts)][1:]
    return *between, *(OptionalParts((comma, *parts)) for parts in optional)
