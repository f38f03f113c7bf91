"""Finds out from a chat template how a model writes reasoning and calls; the model's name plays no part in it."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, replace
from functools import lru_cache

from staticllm.errors import PromptError
from staticllm.pipelines.conversation.parsing import harmony, recipients
from staticllm.pipelines.conversation.parsing.key_value_calls import ARG_KEY, ARG_VALUE
from staticllm.pipelines.conversation.parsing.learnt_calls import LearntCalls, learnt_calls
from staticllm.pipelines.conversation.parsing.seen_calls import Syntax, seen_calls
from staticllm.pipelines.conversation.parsing.wrapped_calls import CALL, CALLS, FENCE, SEPARATOR
from staticllm.pipelines.conversation.templates.chat_template import shape_of
from staticllm.pipelines.conversation.templates.template_shape import CallExamples

log = logging.getLogger("staticllm")
TAGS = (
    ("<tool_call>", "</tool_call>"), ("<|tool_call|>", "<|/tool_call|>"), ("<function_call>", "</function_call>"),
    ("<|START_ACTION|>", "<|END_ACTION|>"),
)  # fmt: skip
NAMED, ARGS = "[TOOL_CALLS]", "[ARGS]"
FUNCTION = "<function="
BLOCK = ("<|tool_call_start|>", "<|tool_call_end|>")
TOOL_LIST = "<|tool_list_start|>"
"""Shows tools to models that write calls between the markers ``BLOCK``, which need not be in their templates."""
PYTHON_TAG, PYTHON_START, PYTHON_END = "<|python_tag|>", "<|python_start|>", "<|python_end|>"
REASONING_TAGS = (
    ("<think>", "</think>"), ("<thinking>", "</thinking>"), ("<thought>", "</thought>"), ("<reasoning>", "</reasoning>"),
    ("<seed:think>", "</seed:think>"), ("[THINK]", "[/THINK]"), ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|thought_start|>", "<|thought_end|>"),
)  # fmt: skip
_PYTHON_EXAMPLE = re.compile(r"\[\w+\(\w+\s*=")
_RECIPIENT_EXAMPLE = re.compile(r">>>(all\b|\$\{recipient\})")
_JSON_EXAMPLE = re.compile(r"""\{\s*\\?["']name\\?["']\s*:[^{}]*\\?["']parameters\\?["']\s*:""")


@dataclass(frozen=True)
class MessageFormat:
    """How an answer is written.

    ``call`` and ``reasoning`` are the markers around them; "" where there is none. Those of a recipient are around its name.
    ``is_reasoning_open``: the prompt ends with the first marker of reasoning, so the answer begins in it; ``is_call_open`` says
    the same of a call. ``has_args_marker``: a call is ``name[ARGS]{…}``, not JSON. ``is_fenced``: JSON or Python stands in a
    block. ``wrapper`` is around all calls together, and ``quote`` is on both sides of strings in braces. ``learnt`` has all that
    is around calls of the syntax ``learnt``. ``has_listed_calls``: an answer may also be ``{"tool_calls": […]}``, as calls before
    it were written.
    """

    syntax: Syntax = ""
    call: tuple[str, str] = ("", "")
    reasoning: tuple[str, str] = ("", "")
    is_reasoning_open: bool = False
    has_args_marker: bool = False
    is_fenced: bool = False
    is_call_open: bool = False
    wrapper: tuple[str, str] = ("", "")
    quote: str = ""
    learnt: LearntCalls | None = None
    has_listed_calls: bool = False

    @property
    def opening(self) -> str:
        """The text that an answer in this format begins with if a grammar writes all that the user sees."""
        if self.syntax == "harmony":
            return harmony.ANALYSIS
        if self.syntax == "recipients":
            begin, end = self.call
            return ("" if self.is_call_open else begin) + recipients.EVERYBODY + end
        return ""

    @property
    def reasoning_end(self) -> str:
        """The text after the reasoning with which such an answer begins; "" if it begins with none."""
        if self.syntax == "harmony":
            return harmony.FINAL
        return f"{self.reasoning[1]}\n\n" if self.is_reasoning_open else ""

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers: where they are special tokens, they must be part of the text."""
        if self.syntax == "harmony":
            return harmony.MARKERS
        more = (*self.wrapper, self.quote, *_MORE_MARKERS.get(self.syntax, ()))
        more += () if self.learnt is None else self.learnt.markers
        return tuple(filter(None, (*self.call, *self.reasoning, *more)))

    def after(self, prompt: str) -> MessageFormat:
        """Return the format of the answer to ``prompt``, a text that a chat template made."""
        begin = self.reasoning[0]
        is_call_open = self.syntax == "recipients" and prompt.endswith(self.call[0])
        is_reasoning_open = bool(begin) and prompt.rstrip().endswith(begin)
        return replace(self, is_reasoning_open=is_reasoning_open, is_call_open=is_call_open)


_MORE_MARKERS = {
    "named": (ARGS, "[CALL_ID]"), "key_value": (*ARG_KEY, *ARG_VALUE), "separated": (*CALL, SEPARATOR),
    "recipients": recipients.MARKERS,
}  # fmt: skip
"""Markers within calls, by syntax."""


@lru_cache(maxsize=8)
def find_format(template: str) -> MessageFormat:
    """Return the format of the answers that ``template``, the source of a chat template, reads."""
    if harmony.CHANNEL in template and harmony.MESSAGE in template:
        return MessageFormat("harmony")
    reasoning = next((tags for tags in REASONING_TAGS if tags[1] in template), ("", ""))
    syntax, call = _call_syntax(template)
    examples = _examples(template) if syntax in _GUESSES else None
    if examples is not None:
        seen = seen_calls(examples.one)
        if seen is not None and (seen.call[0] or not syntax):
            return MessageFormat(seen.syntax, seen.call, reasoning, wrapper=seen.wrapper, quote=seen.quote)
        if seen is None and (learnt := learnt_calls(examples)) is not None:
            return MessageFormat("learnt", (learnt.openings[0], ""), reasoning, learnt=learnt)
        if seen is None and not (call[0] and call[0] in examples.one):
            return MessageFormat(reasoning=reasoning)  # what a template mentions is not how it shows calls
    return MessageFormat(
        syntax, call, reasoning, has_args_marker=syntax == "named" and ARGS in template,
        is_fenced=syntax in ("separated", "fenced") and FENCE in template,
    )  # fmt: skip


_GUESSES = ("", "tagged", "xml", "bare_json", "python")
"""Syntaxes that a template may mention without using them: what its prompts show of a call decides."""


def _examples(template: str) -> CallExamples | None:
    try:
        return shape_of(template).examples
    except PromptError:
        return None


def _call_syntax(template: str) -> tuple[Syntax, tuple[str, str]]:
    tags = next((tags for tags in TAGS if tags[0] in template), ("", ""))
    has_list = BLOCK[0] in template or TOOL_LIST in template
    python = (PYTHON_START, PYTHON_END) if PYTHON_START in template else ("", "")
    known: tuple[tuple[object, Syntax, tuple[str, str]], ...] = (
        (ARG_KEY[0] in template and ARG_VALUE[0] in template, "key_value", tags if tags[0] else TAGS[0]),
        (CALL[0] in template, "separated", CALLS),
        (has_list and f"{FENCE}python" in template, "fenced", BLOCK),
        (has_list, "python", BLOCK),
        (FUNCTION in template and "<parameter=" in template, "xml", tags),
        (FUNCTION in template, "json_function", (FUNCTION, "")),
        (all(marker in template for marker in recipients.MARKERS), "recipients", recipients.TAGGED),
        (_RECIPIENT_EXAMPLE.search(template), "recipients", recipients.ARROWS),
        (NAMED in template, "named", (NAMED, "")),
        (tags[0], "tagged", tags),
        (python[0] or _PYTHON_EXAMPLE.search(template), "python", python),
        (PYTHON_TAG in template, "bare_json", (PYTHON_TAG, "")),
        (_JSON_EXAMPLE.search(template), "bare_json", ("", "")),
    )  # the first that is shown: later ones are parts of some of those before
    for is_shown, syntax, markers in known:
        if is_shown:
            return syntax, markers
    return "", ("", "")


@lru_cache(maxsize=8)
def format_beside(template: str, has_tools: bool) -> MessageFormat:
    """Return the format of the answers to a prompt of this template, with or without tools.

    Where the template shows no tools, and no call of which an example could be made, tools come with the description of a format
    of their own (``conversation.py``).
    """
    found = find_format(template)
    if not has_tools:
        return found
    shape = shape_of(template)
    if shape.tools is None and shape.examples is None:
        return replace(found, syntax="generic", call=("", ""))
    if not found.syntax:
        log.warning(
            "the chat template shows tools, but not how the model writes calls in a known format: they stay text"
        )
    return replace(found, has_listed_calls=shape.calls is None)


def shows_tools(template: str) -> bool:
    """Return whether a chat template itself shows tools to the model."""
    try:
        return bool(template) and shape_of(template).tools is not None
    except PromptError:
        return False
