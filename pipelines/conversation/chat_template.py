"""Renders a conversation into one prompt with the model's chat template, within bounds of time, size and depth.

A template comes with a model directory, so it is foreign code. It runs in Jinja's sandbox, with the settings that
transformers uses: recursion, endless loops and huge strings end in a ``PromptError``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jinja2

from staticllm.errors import PromptError, StaticLLMError

from .adapted import adapted
from .sandbox import NAME, TemplateError, copied, limited, outside_cause, run
from .template_shape import TemplateShape, probed_shape

MAX_SAID_CHARS = 1000


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
        template: The text in Jinja.
        messages: One ``{"role": …, "content": …}`` per message.
        tokens: ``bos_token``, ``eos_token`` and ``pad_token``, as text.
        tools: Definitions of functions, for templates that take them.
        extra_context: More variables; they override all others except ``messages``.
        add_generation_prompt: Whether the prompt ends with the header of the assistant's next message.

    Raises:
        PromptError: the template has an error, refuses the conversation or exceeds a bound; the message names the line.
        StaticLLMError: this process lacks memory or files, which is not the template's fault.
    """
    shape = shape_of(template)
    with _errors_of_prompts(), limited():
        conversation = adapted(shape, messages, tools)
        context = {**tokens, "tools": conversation.tools or None, "documents": None, **(extra_context or {})}
        context["add_generation_prompt"] = add_generation_prompt
        turns = [copied(message) for message in conversation.messages]
        text = run(template, {**copied(context), "messages": turns})
        conversation.check_shown(text)
        return text


def shape_of(template: str) -> TemplateShape:
    """Return what a template shows.

    Raises:
        PromptError: the template has an error.
    """
    with _errors_of_prompts():
        return probed_shape(template)


@contextmanager
def _errors_of_prompts() -> Iterator[None]:
    """Raise every exception in the block as a ``PromptError``: a template is foreign code, so it is an error of the prompt."""
    try:
        yield
    except RecursionError as error:
        raise PromptError(
            "the chat template recurses without end: correct it, or set another on the tokenizer"
        ) from error
    except PromptError:
        raise
    except Exception as error:
        if (cause := outside_cause(error)) is not None:
            reason = getattr(cause, "strerror", None) or str(cause) or "there is not enough memory"
            raise StaticLLMError(
                f"the chat template cannot be rendered now: {reason}: close files or end other requests, or raise the limits of "
                "this process (ulimit), and try again"
            ) from error
        raise PromptError(_said(error)) from error


def _said(error: Exception) -> str:
    """Return the whole message as one line, up to a limit, with the line of the template where it is known."""
    what = " ".join(str(error)[:MAX_SAID_CHARS].split()) or type(error).__name__
    if isinstance(error, TemplateError):
        return f"the chat template refuses the conversation: {what}"
    line = error.lineno if isinstance(error, jinja2.TemplateSyntaxError) else _line_of(error)
    return f"the chat template fails{f' in line {line}' if line else ''}: {what}"


def _line_of(error: Exception) -> int | None:
    """Return the line of the template that was running; Jinja puts it into the traceback."""
    line = None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == NAME:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line
