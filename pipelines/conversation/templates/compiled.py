"""Runs a chat template, which is foreign code, in Jinja's sandbox with the settings that transformers uses."""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.debug  # which Jinja would import with the first exception of a template
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser

from staticllm.errors import PromptError
from staticllm.pipelines.conversation.templates.bounds import TemplateLimitError, concat, tick
from staticllm.pipelines.conversation.templates.sandbox import BoundedEnvironment

MAX_TEMPLATE_CHARS = 1 << 16
MAX_DATE_CHARS = 256
NAME = "<chat template>"
codecs.lookup("unicode-escape")  # read now, and not with the first template, when files may be scarce
_FILTERED: type[Any] = type(iter([]))
"""What filters give: the sandbox has made lists of their generators."""


class _Generation(jinja2.ext.Extension):
    """The block ``{% generation %}``, which marks the assistant's text for training; its body is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012  (Jinja declares it as an instance attribute)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class TemplateError(jinja2.TemplateError):
    """A template called its function ``raise_exception``."""


def run(template: str, context: Mapping[str, Any]) -> str:
    """Return what a template makes of these variables, within the bounds of the enclosing ``limited`` block.

    Raises:
        TemplateError: the template called ``raise_exception``.
        PromptError: it is too long.
        Exception: whatever else a template, which is foreign code, raises.
    """
    compiled = _compiled(template)
    return compiled.environment.concat(compiled.generate(**context))


def outside_cause(error: BaseException | None) -> BaseException | None:
    """Return the exception behind this one that is not the template's fault, which Jinja may have wrapped; None without one.

    No ordinary template raises it: it reads no file, and its texts are bounded. Nothing that fails so is remembered.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, (OSError, ImportError, MemoryError)):
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None


def check_syntax(template: str) -> None:
    """Compile a template, within the bounds of the enclosing ``limited`` block.

    Raises:
        PromptError: it is too long.
        jinja2.TemplateSyntaxError: it has an error.
    """
    _compiled(template)


@lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    if len(template) > MAX_TEMPLATE_CHARS:
        raise PromptError(f"the chat template has {len(template)} characters: at most {MAX_TEMPLATE_CHARS}")
    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = environment.bounded_filter("tojson", _to_json)
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    source = environment.compile(template, filename=NAME)
    tick()
    return environment.template_class.from_code(environment, source, environment.globals)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    layout: dict[str, Any] = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, default=_listed, **layout)
    return encoder.encode(value) if indent is None else concat(encoder.iterencode(value))


def _listed(value: Any) -> list[Any]:
    """Return what a filter such as ``map`` gives as a list, as llamacpp's templates have it."""
    if isinstance(value, _FILTERED):
        return list(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _raise_exception(message: object) -> None:
    raise TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    if len(pattern) > MAX_DATE_CHARS:  # the C library fills fields up to any width, to 256 times the pattern
        raise TemplateLimitError(f"it formats a date to {len(pattern)} characters, at most {MAX_DATE_CHARS}")
    return datetime.now().strftime(pattern)
