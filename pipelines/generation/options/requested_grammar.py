"""Makes a grammar of what a caller asked for: the keywords of ``generate``, or GenAI's ``StructuredOutputConfig``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import openvino_genai as genai

from staticllm.errors import GenerationConfigError, shown

from ..grammar import Grammar

CONFIG = "structured_output_config"
Config = genai.StructuredOutputConfig


def requested_grammar(overrides: Mapping[str, Any], options: Mapping[str, Any]) -> Grammar | None:
    """Return the grammar that a call asks for; None without one. A keyword (``KEYWORDS``) replaces that of the config.

    ``options`` are the fields of GenAI's config, merged with ``overrides``.

    Raises:
        GenerationConfigError: two grammars, a value of a wrong type, or an option that no grammar goes with.
    """
    given = {name: overrides[name] for name in (*KEYWORDS, CONFIG) if overrides.get(name) is not None}
    if len(given) > 1:
        raise GenerationConfigError(
            f"{' and '.join(sorted(given))} in one call: an answer has one grammar, so give one of them"
        )
    name, value = next(iter(given.items()), (CONFIG, options[CONFIG]))
    if value is None:
        return None
    if options["ignore_eos"]:
        raise GenerationConfigError("ignore_eos=True with a grammar: its answers end, so leave ignore_eos at False")
    return KEYWORDS[name](value) if name in KEYWORDS else _of_config(value)


def _of_config(config: object) -> Grammar:
    if not isinstance(config, Config):
        raise GenerationConfigError(
            f"{CONFIG} is a {type(config).__name__}: must be an openvino_genai.StructuredOutputConfig"
        )
    fields = ("json_schema", "regex", "grammar", "structural_tags_config", "compound_grammar")
    given = {name: value for name in fields if (value := getattr(config, name)) is not None}
    if len(given) != 1:
        raise GenerationConfigError(
            f"{CONFIG} has {' and '.join(given) or 'no grammar'}: set one of {', '.join(fields)}"
        )
    ((name, value),) = given.items()
    return KEYWORDS[name](value) if name in KEYWORDS else _of_tag(value)


def _of_schema(value: Any) -> Grammar:
    """Return the grammar of a JSON schema: its text, a mapping, or a model of pydantic."""
    for method in ("model_json_schema", "json_schema"):  # a model's class, and a TypeAdapter
        if callable(getattr(value, method, None)):
            try:
                value = getattr(value, method)()
            except Exception as error:  # of pydantic, or of the user's own class
                reason = (str(error).strip().splitlines() or [""])[0]
                raise GenerationConfigError(
                    f"json_schema={shown(value)} makes no JSON schema: {type(error).__name__}: {reason}"
                ) from error
            break
    if isinstance(value, Mapping):
        try:
            value = json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise GenerationConfigError(f"the JSON schema is no JSON: {error}") from None
    return _with_text("json_schema", value, "a str, a dict or a pydantic model")


def _of_regex(value: Any) -> Grammar:
    return _with_text("regex", value.pattern if isinstance(value, re.Pattern) else value, "a str")


def _of_choice(value: Any) -> Grammar:
    is_list = isinstance(value, (list, tuple, set, frozenset))
    texts = [text for text in value if isinstance(text, str)] if is_list else []
    if not texts or len(texts) != len(value):
        raise GenerationConfigError(f"choice={shown(value)}: must be a list of str that is not empty")
    return Grammar(
        "choice", json.dumps(sorted(texts) if isinstance(value, (set, frozenset)) else texts, ensure_ascii=False)
    )


def _of_grammar(value: Any) -> Grammar:
    """Return the grammar of a text in EBNF or Lark, or of GenAI's structural tags, which ``+`` and ``|`` combine."""
    if isinstance(value, Grammar):
        value.check()
        return value
    if type(value) in _WRITERS and not isinstance(value, str):
        return _of_tag(value)
    grammar = _with_text("ebnf", value, "a str in EBNF or Lark, or a structural tag of openvino_genai")
    is_lark = "::=" not in value and re.search(r"^\s*(start\s*:|%llguidance\b)", value, re.MULTILINE)
    return Grammar("lark", value) if is_lark else grammar


def _with_text(kind: Any, value: Any, expected: str) -> Grammar:
    if not isinstance(value, str) or not value.strip():
        said = expected.replace("a str", "a str that is not empty", 1)
        raise GenerationConfigError(f"{'grammar' if kind == 'ebnf' else kind}={shown(value)}: must be {said}")
    grammar = Grammar(kind, value)
    grammar.check()
    return grammar


KEYWORDS: dict[str, Callable[[Any], Grammar]] = {
    "json_schema": _of_schema,
    "regex": _of_regex,
    "choice": _of_choice,
    "grammar": _of_grammar,
}
"""The keywords of ``generate`` and ``submit`` that ask for a grammar."""


def _of_tag(value: Any) -> Grammar:
    try:
        text = json.dumps(format_of(value), ensure_ascii=False)
    except RecursionError:
        raise GenerationConfigError(f"a {type(value).__name__} is nested too deeply: use at most 100 levels") from None
    return Grammar("structural_tag", text)


def format_of(value: Any) -> Any:
    """Return a structural tag of GenAI as xgrammar's JSON value.

    Raises:
        GenerationConfigError: it is none.
    """
    write = _WRITERS.get(type(value))
    if write is None:
        raise GenerationConfigError(
            f"a structural tag is a {type(value).__name__}: must be one of openvino_genai, or JSON"
        )
    return write(value)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GenerationConfigError(f"a structural tag has text that is no JSON: {error}") from None


def _plain_text(text: str) -> Any:
    """Return the format that a text in JSON describes."""
    value = _json(text)
    return value["format"] if isinstance(value, dict) and "format" in value else value


def _triggered(triggers: list[str], tags: list[Any], tag: Any = None) -> dict[str, Any]:
    return {
        "type": "triggered_tags", "triggers": list(triggers), "tags": tags,
        "at_least_one": bool(tag and tag.at_least_one), "stop_after_first": bool(tag and tag.stop_after_first),
    }  # fmt: skip


def _of_item(item: Any) -> dict[str, Any]:
    content = {"type": "json_schema", "json_schema": _json(item.schema)}
    return {"type": "tag", "begin": item.begin, "content": content, "end": item.end}


_WRITERS: dict[type, Callable[[Any], Any]] = {
    str: _plain_text,
    Config.Regex: lambda tag: {"type": "regex", "pattern": tag.value},
    Config.JSONSchema: lambda tag: {"type": "json_schema", "json_schema": _json(tag.value)},
    Config.EBNF: lambda tag: {"type": "grammar", "grammar": tag.value},
    Config.ConstString: lambda tag: {"type": "const_string", "value": tag.value},
    Config.AnyText: lambda tag: {"type": "any_text"},
    Config.QwenXMLParametersFormat: lambda tag: {"type": "qwen_xml_parameter", "json_schema": _json(tag.json_schema)},
    Config.Concat: lambda tag: {"type": "sequence", "elements": [format_of(each) for each in tag.elements]},
    Config.Union: lambda tag: {"type": "or", "elements": [format_of(each) for each in tag.elements]},
    Config.Tag: lambda tag: {"type": "tag", "begin": tag.begin, "content": format_of(tag.content), "end": tag.end},
    Config.TriggeredTags: lambda tag: _triggered(tag.triggers, [format_of(each) for each in tag.tags], tag),
    Config.TagsWithSeparator: lambda tag: {
        "type": "tags_with_separator", "tags": [format_of(each) for each in tag.tags], "separator": tag.separator,
        "at_least_one": bool(tag.at_least_one), "stop_after_first": bool(tag.stop_after_first),
    },
    genai.StructuralTagsConfig: lambda tag: _triggered(tag.triggers, [_of_item(item) for item in tag.structural_tags]),
}  # fmt: skip
