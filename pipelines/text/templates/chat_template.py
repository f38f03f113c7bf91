"""Renders a conversation into one prompt with the model's chat template, within bounds of time, size and depth.

A template comes with a model directory, so it is foreign code. It runs in Jinja's sandbox, with the settings that
transformers uses, and it cannot crash the process: recursion, endless loops and huge strings end in a ``PromptError``.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.debug  # which Jinja would import with the first exception of a template
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser

from staticllm.errors import PromptError, StaticLLMError
from staticllm.pipelines.text.templates.bounds import TemplateLimitError, copied, limited, tick
from staticllm.pipelines.text.templates.sandbox import BoundedEnvironment

MAX_TEMPLATE_CHARS = 1 << 16
MAX_SAID_CHARS, MAX_DATE_CHARS = 1000, 256
codecs.lookup("unicode-escape")  # read now, and not with the first template, when files may be scarce
_PROBE = "<probe-of-the-template>"
_NAME = "<chat template>"


class _Generation(jinja2.ext.Extension):
    """The block ``{% generation %}``, which marks the assistant's text for training; its body is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012  (Jinja declares it as an instance attribute)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class TemplateError(jinja2.TemplateError):
    """A template called its function ``raise_exception``."""


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    tokens: Mapping[str, str],
    tools: Sequence[Mapping[str, Any]] = (),
    extra_context: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
) -> str:
    """Return the prompt of a conversation.

    Args:
        template: The Jinja source.
        messages: One ``{"role": …, "content": …}`` per message.
        tokens: ``bos_token``, ``eos_token`` and ``pad_token``, as text.
        tools: Definitions of functions, for templates that take them.
        extra_context: More variables; they override all others except ``messages``.
        add_generation_prompt: Whether the prompt ends with the header of the assistant's next message.

    Raises:
        PromptError: the template has an error, refuses the conversation or exceeds a bound; the message names the line.
        StaticLLMError: this process lacks memory or files, which is not the template's fault.
    """
    context = {**tokens, "tools": list(tools) or None, "documents": None, **(extra_context or {})}
    context["add_generation_prompt"] = add_generation_prompt
    try:
        with limited():
            adapted = _adapted(template, [copied(message) for message in messages])
            return _run(template, {**copied(context), "messages": adapted})
    except RecursionError as error:
        raise PromptError(
            "the chat template recurses without end: correct it, or set another on the tokenizer"
        ) from error
    except PromptError:
        raise
    except Exception as error:  # a template is foreign code: every exception in it is an error of the prompt
        if (cause := _outside(error)) is not None:
            reason = getattr(cause, "strerror", None) or str(cause) or "there is not enough memory"
            raise StaticLLMError(
                f"the chat template cannot be rendered now: {reason}: close files or end other requests, or raise the limits of "
                "this process (ulimit), and try again"
            ) from error
        raise PromptError(_said(error)) from error


def _run(template: str, context: Mapping[str, Any]) -> str:
    compiled = _compiled(template)
    return compiled.environment.concat(compiled.generate(**context))


@lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    if len(template) > MAX_TEMPLATE_CHARS:
        raise PromptError(f"the chat template has {len(template)} characters: at most {MAX_TEMPLATE_CHARS}")
    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = environment.bounded_filter("tojson", _to_json)
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    source = environment.compile(template, filename=_NAME)
    tick()
    return environment.template_class.from_code(environment, source, environment.globals)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> None:
    raise TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    if len(pattern) > MAX_DATE_CHARS:  # the C library fills fields up to any width, to 256 times the pattern
        raise TemplateLimitError(f"it formats a date to {len(pattern)} characters, at most {MAX_DATE_CHARS}")
    return datetime.now().strftime(pattern)


def _said(error: Exception) -> str:
    """Return the whole message as one line, up to a limit, with the line of the template where it is known."""
    what = " ".join(str(error)[:MAX_SAID_CHARS].split()) or type(error).__name__
    if isinstance(error, TemplateError):
        return f"the chat template refuses the conversation: {what}"
    line = error.lineno if isinstance(error, jinja2.TemplateSyntaxError) else _line_of(error)
    return f"the chat template fails{f' in line {line}' if line else ''}: {what}"


def _line_of(error: Exception) -> int | None:
    """Return the line of the template that was running; Jinja puts it into the traceback."""
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == _NAME:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def _adapted(template: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages in the shape that the template takes, adapted as GenAI does it.

    If the template shows no system message, its text moves to the head of the user's next message. If the template shows
    text only as a list of parts, each text becomes a list with one part.
    """
    if any(message.get("role") == "system" for message in messages) and not _takes_system(template):
        messages = _system_to_user(messages)
    if any(isinstance(message.get("content"), str) for message in messages) and _wants_parts(template):
        return [_in_parts(message) for message in messages]
    return messages


def _system_to_user(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    adapted: list[dict[str, Any]] = []
    pending: list[str] = []
    for message in messages:
        content = message.get("content")
        if message.get("role") == "system" and isinstance(content, str):
            pending.append(content)
            continue
        if pending and message.get("role") == "user" and isinstance(content, str):
            adapted.append({**message, "content": "\n".join([*pending, *([content] if content else [])])})
        else:
            if pending:
                adapted.append({"role": "user", "content": "\n".join(pending)})
            adapted.append(message)
        pending = []
    return [*adapted, {"role": "user", "content": "\n".join(pending)}] if pending else adapted


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


@lru_cache(maxsize=8)
def _wants_parts(template: str) -> bool:
    plain, parts = {"role": "user", "content": _PROBE}, _in_parts({"role": "user", "content": _PROBE})
    return not _shows(template, [plain]) and _shows(template, [parts])


@lru_cache(maxsize=8)
def _takes_system(template: str) -> bool:
    shape: Callable[[dict[str, Any]], dict[str, Any]] = _in_parts if _wants_parts(template) else dict
    system, user = {"role": "system", "content": _PROBE}, {"role": "user", "content": "Hey"}
    return _shows(template, [shape(system), shape(user)])


def _shows(template: str, messages: list[dict[str, Any]]) -> bool:
    """Return whether the probe text in these messages appears in the rendered prompt."""
    context = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": False}
    try:
        return _PROBE in _run(template, {**context, "bos_token": "", "eos_token": "", "pad_token": ""})
    except (TemplateLimitError, RecursionError, PromptError):
        raise
    except Exception as error:  # the template refuses this shape
        if _outside(error) is not None:
            raise
        return False


def _outside(error: BaseException | None) -> BaseException | None:
    """Return the exception behind this one that is not the template's fault, which Jinja may have wrapped; None without one.

    No template raises it: it reads no file, and its texts are bounded. Nothing that fails so is remembered.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, (OSError, ImportError, MemoryError)):
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None
