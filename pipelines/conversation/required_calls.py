"""Describes the text that an answer must be where a call is required, as a structural tag."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from staticllm.errors import GenerationConfigError, shown

from ..generation.grammar import Grammar
from ..generation.options.extra import ToolOptions, function_of
from ..generation.options.resolve import GenerationOptions
from ..grammars.parameters import (
    STRING_KEYWORDS,
    Owner,
    Parameter,
    is_plain,
    listed_parameters,
    object_schema,
)
from ..grammars.translation import has_free_text
from .formats import MessageFormat
from .learnt_calls import LearntCalls, LearntParameters
from .named_arguments import FENCE

Part = dict[str, Any]
"""A format of a structural tag."""
_NAMES = {
    "python": re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII),
    "fenced": re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII),
    "recipients": re.compile(r"[!-~]+"),
    "harmony": re.compile(r"[\w.-]+", re.ASCII),
    "learnt": re.compile(r"[!-~]+"),
}
"""The names of functions and parameters that can be written in a syntax; all in those that are not listed. What was learnt may
allow fewer (``LearntCalls``)."""


def required_calls(format: MessageFormat, tools: ToolOptions) -> Part:
    """Return the answers that ``tool_choice`` allows: a call of the named function, or calls of any functions for ``required``.

    As in OpenAI's API, ``required`` allows several calls, unless ``parallel_tool_calls`` is false or the model's format has no
    way to write them: after the first one the model chooses whether it ends. A named function is called once. It is a structural
    tag in the form of xgrammar and GenAI.

    Raises:
        GenerationConfigError: the chat template shows no format of calls.
    """
    if not format.syntax or format.syntax == "braced":
        raise GenerationConfigError(
            f"tool_choice={tools.choice!r}: the chat template shows no known format of calls; use tool_choice='auto'"
        )
    functions = [function_of(tool) for tool in tools.tools]
    chosen = [function for function in functions if tools.choice != "function" or function["name"] == tools.name]
    around = _around(format)
    has_several = tools.choice == "required" and tools.is_parallel and around.separator is not None
    around = around if has_several else around.of_one_call()
    call = _choice([_call(format, around, str(each["name"]), each.get("parameters")) for each in chosen])
    if has_several:
        more: Part = {"type": "star", "content": _sequence([*_text(around.separator or ""), call])}
        call = _sequence([*_text(around.opening), call, more, *_text(around.closing)])
    return {"type": "structural_tag", "format": call}


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
    tag = required_calls(format, tools)
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


def _text(text: str) -> list[Part]:
    """Return a text of the model's format, which may contain special tokens; nothing for an empty one."""
    return [{"type": "const_string", "value": text}] if text else []


def _name(text: str) -> Part:
    """Return a text of a tool, such as its name: it contains no special tokens, whatever it says."""
    return {"type": "plain_string", "value": text}


def _json(schema: Mapping[str, Any]) -> Part:
    return {"type": "json_schema", "json_schema": dict(schema)}


def _unquoted(schema: Mapping[str, Any], end: str) -> Part:
    """Return text that satisfies the keywords of a schema for strings, and does not contain ``end``."""
    limits = {name: schema[name] for name in STRING_KEYWORDS if name in schema}
    return {"type": "string", "json_schema": limits, "excluded": end}


def _sequence(parts: Sequence[Part]) -> Part:
    return {"type": "sequence", "elements": [*parts]}


def _optional(parts: Sequence[Part]) -> Part:
    return {"type": "optional", "content": _sequence(parts)}


def _choice(choices: Sequence[Sequence[Part]]) -> Part:
    elements = [_sequence(each) for each in choices]
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": elements}


def _owner_of(name: str) -> Owner:
    """Return what errors say of the parameters of the function ``name``."""
    return Owner(f"the parameters of the tool {shown(name)}", "leave it out, or use tool_choice='auto'")


def _check_names(format: MessageFormat, name: str, parameters: Sequence[Parameter]) -> None:
    known = _NAMES.get(format.syntax)
    learnt = format.learnt
    keys = [parameter.name for parameter in parameters]
    refused = [each for each in (name, *keys) if known is not None and not known.fullmatch(each)]
    if learnt is not None:
        refused += [] if learnt.can_call(name) else [name]
        refused += [key for key in keys if not learnt.can_pass(key)]
    if refused:
        raise GenerationConfigError(
            f"a required call of {name!r}: the name {refused[0]!r} cannot be written in the model's format of calls; rename it, "
            "or use tool_choice='auto'"
        )


def _has_parameters(format: MessageFormat) -> bool:
    """Return whether each parameter is written on its own."""
    learnt = format.learnt
    return format.syntax in ("python", "fenced") or (learnt is not None and learnt.parameters is not None)


def _call(format: MessageFormat, around: _Around, name: str, parameters: object) -> list[Part]:
    schema = object_schema(parameters if isinstance(parameters, Mapping) else {}, _owner_of(name))
    learnt = format.learnt
    has_parameters = _has_parameters(format)
    listed = listed_parameters(schema, _owner_of(name)) if has_parameters else []
    listed.sort(key=lambda parameter: not parameter.is_required)
    _check_names(format, name, listed)
    if learnt is not None and learnt.parameters is not None:
        arguments = _tagged(listed, learnt.parameters)
    elif has_parameters:
        arguments = _named(listed)
    else:
        arguments = [_json(schema)]
    written = json.dumps(name)[1:-1] if learnt is None and around.before_name.endswith('"') else name
    return [*_text(around.before_name), _name(written), *_text(around.after_name), *arguments, *_text(around.end)]


@dataclass(frozen=True)
class _Around:
    """What stands around the name of a function and its arguments, between two calls, and around all of them."""

    before_name: str
    after_name: str
    end: str
    separator: str | None = None
    """None where an answer has one call."""
    opening: str = ""
    closing: str = ""

    def of_one_call(self) -> _Around:
        """Return the same around a single call."""
        return _Around(self.opening + self.before_name, self.after_name, self.end + self.closing)


def _around(format: MessageFormat) -> _Around:
    if format.learnt is not None:
        return _around_learnt(format.learnt)
    return _around_python(format) if _has_parameters(format) else _around_json(format)


def _around_json(format: MessageFormat) -> _Around:
    begin, end = format.call
    quoted = '{"name": "'
    arguments = '", "arguments": '
    if format.syntax == "tagged" and format.is_list:
        return _Around(quoted, arguments, "}", ", ", f"{begin}[", f"]{end}")
    wrappers = {
        "keyed": _Around('{"', '": ', "}", ", ", f"{begin}[", f"]{end}"),
        "tagged": _Around(f"{begin}\n{quoted}", arguments, f"}}\n{end}", "\n" if end else None),
        "generic": _Around(quoted, arguments, "}", ", ", '{"tool_calls": [', "]}"),
        "bare_json": _Around(quoted, '", "parameters": ', "}"),
        "recipients": _Around("" if format.is_call_open else begin, end, ""),
        "harmony": _Around("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "<|call|>"),
    }
    return wrappers[format.syntax]


def _around_learnt(learnt: LearntCalls) -> _Around:
    opening, closing = learnt.wrapper
    return _Around(learnt.before, learnt.after_name, learnt.after, "\n" if learnt.after else "", opening, closing)


def _around_python(format: MessageFormat) -> _Around:
    begin, end = format.call
    if format.syntax == "python":
        return _Around("", "(", ")", ", ", f"{begin}[", f"]{end}")
    fences = (f"\n{FENCE}python\n", f"\n{FENCE}\n") if format.is_fenced else ("", "")
    return _Around("", "(", ")", "\n", begin + fences[0], fences[1] + end)


def _tagged(parameters: Sequence[Parameter], tags: LearntParameters) -> list[Part]:
    """Return the parameters with tags around their names and values: strings have no quotes, and all else is JSON."""
    found: list[Part] = []
    for each in parameters:
        is_text = is_plain(each.schema)
        value = _unquoted(each.schema, tags.after_value.strip()) if is_text else _json(each.schema)
        after_name = tags.after_name if is_text else tags.after_name_of_other
        parts = [*_text(tags.before_name), _name(each.name), *_text(after_name), value, *_text(tags.after_value)]
        found += parts if each.is_required else [_optional(parts)]
    return found


def _named(parameters: Sequence[Parameter]) -> list[Part]:
    """Return the parameters as named arguments of Python."""
    required = list[list[Part]]()
    optional = list[list[Part]]()
    for each in parameters:
        parts = [_name(each.name), *_text("="), _json(each.schema)]
        (required if each.is_required else optional).append(parts)
    return _with_commas(required, optional)


def _with_commas(required: Sequence[list[Part]], optional: Sequence[list[Part]]) -> list[Part]:
    """Return arguments with commas between them. Without a required one, any of the optional ones may be the first."""
    comma = _text(", ")
    if not required and optional:
        firsts = [_with_commas([parts], optional[place + 1 :]) for place, parts in enumerate(optional)]
        return [_optional([_choice(firsts)])]
    between = [part for parts in required for part in (*comma, *parts)][1:]
    return [*between, *(_optional([*comma, *parts]) for parts in optional)]
