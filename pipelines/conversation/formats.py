"""Finds out from a chat template how a model writes reasoning and calls; the model's name plays no part in it."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from staticllm.errors import PromptError

from . import headed_messages as headed
from .chat_template import shape_of
from .learnt_calls import ID, LearntCalls, LearntParameters, learnt_calls
from .named_arguments import FENCE
from .template_shape import CallExamples, TemplateShape

log = logging.getLogger("staticllm")
Syntax = Literal[
    "", "tagged", "fenced", "bare_json", "python", "harmony", "recipients", "generic", "keyed", "braced", "learnt"
]
"""How calls are written: JSON between tags; a block of Python; JSON or a list of Python without tags; messages with channels or
with recipients; one JSON object with all calls; JSON whose keys are the functions; ``call:f{…}`` with markers around strings; or
what the text around the parts of a call was learnt to be (``learnt_calls.py``)."""
TAGS = (
    ("<tool_call>", "</tool_call>"), ("<|tool_call|>", "<|/tool_call|>"), ("<function_call>", "</function_call>"),
    ("<|START_ACTION|>", "<|END_ACTION|>"),
)  # fmt: skip
NAMED = "[TOOL_CALLS]"
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

_NAME, _KEY, _VALUE = "tool_name", "arg1", "some_value"
"""What the example calls (``CallExamples.one``)."""
MAX_EXAMPLE_CHARS = 2000
"""The longest example that is looked at: a call with one argument and all that stands around it."""
_TAG = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")
_TAGS_BEFORE = re.compile(rf"((?:(?:{_TAG.pattern})\s*)*)$")
_TAGS_AFTER = re.compile(rf"\s*((?:(?:{_TAG.pattern})\s*)*)")
_PYTHON = re.compile(rf"(\[?){_NAME}\({_KEY}=[\"']{_VALUE}[\"']\)(\]?)")
_BRACED = re.compile(rf"call:{_NAME}\{{{_KEY}:(\S*?){_VALUE}(\S*?)\}}")


_ARG = LearntParameters("<arg_key>", "</arg_key>\n<arg_value>", "</arg_key>\n<arg_value>", "</arg_value>\n")
_PARAMETER = LearntParameters("<parameter=", ">\n", ">\n", "\n</parameter>\n")
_CALL, _SEPARATOR, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_CALLS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DESCRIBED: tuple[tuple[tuple[str, ...], LearntCalls], ...] = (
    (("<arg_key>", "<arg_value>"), LearntCalls(("", ""), "<tool_call>", "\n", "</tool_call>", _ARG)),
    ((_CALL, FENCE), LearntCalls(_CALLS, f"{_CALL}function{_SEPARATOR}", f"\n{FENCE}json\n", f"\n{FENCE}{_CALL_END}")),
    ((_CALL,), LearntCalls(_CALLS, _CALL, _SEPARATOR, _CALL_END)),
    (
        ("<tool_call>", "<function=", "<parameter="),
        LearntCalls(("", ""), "<tool_call>\n<function=", ">\n", "</function>\n</tool_call>", _PARAMETER),
    ),
    (("<function=", "<parameter="), LearntCalls(("", ""), "<function=", ">\n", "</function>", _PARAMETER)),
    (("<function=",), LearntCalls(("", ""), "<function=", ">", "</function>")),
    ((NAMED, "[CALL_ID]", "[ARGS]"), LearntCalls(("", ""), NAMED, f"[CALL_ID]{ID}[ARGS]", "")),
    ((NAMED, "[ARGS]"), LearntCalls(("", ""), NAMED, "[ARGS]", "")),
)  # fmt: skip
"""Calls that a template may only describe, by what its text then has; the first that fits counts."""


@dataclass(frozen=True)
class MessageFormat:
    """How an answer is written. Markers are texts before and after something; "" where there is none."""

    syntax: Syntax = ""
    call: tuple[str, str] = ("", "")
    """The markers of a call; those of a recipient are around its name."""
    reasoning: tuple[str, str] = ("", "")
    """The markers of reasoning."""
    is_reasoning_open: bool = False
    """Whether the prompt ends with the first marker of reasoning, so the answer begins in it."""
    is_list: bool = False
    """Whether calls are shown as a JSON list."""
    is_fenced: bool = False
    """Whether Python stands in a block."""
    is_call_open: bool = False
    """Whether the prompt ends with the first marker of a call."""
    wrapper: tuple[str, str] = ("", "")
    """Around all calls together."""
    quote: str = ""
    """On both sides of strings in braces."""
    learnt: LearntCalls | None = None
    """All that is around calls of the syntax ``learnt``."""
    has_listed_calls: bool = False
    """Whether an answer may also be ``{"tool_calls": […]}``, as calls before it were written."""

    @property
    def opening(self) -> str:
        """The text that an answer in this format begins with if a grammar writes all that the user sees."""
        if self.syntax == "harmony":
            return headed.ANALYSIS
        if self.syntax == "recipients":
            begin, end = self.call
            return ("" if self.is_call_open else begin) + headed.EVERYBODY + end
        return ""

    @property
    def reasoning_end(self) -> str:
        """The text after the reasoning with which such an answer begins; "" if it begins with none."""
        if self.syntax == "harmony":
            return headed.FINAL
        return f"{self.reasoning[1]}\n\n" if self.is_reasoning_open else ""

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers: where they are special tokens, they must be part of the text."""
        if self.syntax == "harmony":
            return headed.HARMONY_MARKERS
        more: tuple[str, ...] = headed.RECIPIENT_MARKERS if self.syntax == "recipients" else ()
        more += () if self.learnt is None else self.learnt.markers
        return tuple(filter(None, (*self.call, *self.reasoning, *self.wrapper, self.quote, *more)))

    def after(self, prompt: str) -> MessageFormat:
        """Return the format of the answer to ``prompt``, a text that a chat template made."""
        begin = self.reasoning[0]
        is_call_open = self.syntax == "recipients" and prompt.endswith(self.call[0])
        is_reasoning_open = bool(begin) and prompt.rstrip().endswith(begin)
        return replace(self, is_reasoning_open=is_reasoning_open, is_call_open=is_call_open)


def find_format(template: str) -> MessageFormat:
    """Return the format of the answers that ``template``, the text of a chat template, reads."""
    return _format_of(template, _examples(template))


@lru_cache(maxsize=8)
def _format_of(template: str, examples: CallExamples | None) -> MessageFormat:
    if headed.CHANNEL in template and headed.MESSAGE in template:
        return MessageFormat("harmony")
    reasoning = next((tags for tags in REASONING_TAGS if tags[1] in template), ("", ""))
    mentioned = _mentioned(template)
    if examples is not None and mentioned.syntax not in ("fenced", "recipients"):
        mentioned = _shown(examples, mentioned)
    return replace(mentioned, reasoning=reasoning)


def _learnt_format(calls: LearntCalls) -> MessageFormat:
    return MessageFormat("learnt", (calls.openings[0], ""), learnt=calls)


def _examples(template: str) -> CallExamples | None:
    try:
        return shape_of(template).examples
    except PromptError:
        return None


def _shown(examples: CallExamples, mentioned: MessageFormat) -> MessageFormat:
    """Return the format of calls in prompts: what a template mentions is not always how it shows them."""
    seen = _seen(examples.one)
    if seen is not None:
        return seen if seen.call[0] or not mentioned.syntax else mentioned
    if (learnt := learnt_calls(examples)) is not None:
        return _learnt_format(learnt)
    begin = mentioned.call[0]
    return mentioned if begin and begin in examples.one else MessageFormat()


def _mentioned(template: str) -> MessageFormat:
    """Return the format whose markers are in the text of a template."""
    tags = next((tags for tags in TAGS if tags[0] in template), ("", ""))
    has_list = BLOCK[0] in template or TOOL_LIST in template
    is_fenced = f"{FENCE}python" in template
    python = (PYTHON_START, PYTHON_END) if PYTHON_START in template else ("", "")
    described = next((calls for marks, calls in _DESCRIBED if all(mark in template for mark in marks)), None)
    known: tuple[tuple[object, MessageFormat], ...] = (
        (has_list and is_fenced, MessageFormat("fenced", BLOCK, is_fenced=True)),
        (has_list, MessageFormat("python", BLOCK)),
        (described, MessageFormat() if described is None else _learnt_format(described)),
        (all(marker in template for marker in headed.RECIPIENT_MARKERS), MessageFormat("recipients", headed.TAGGED)),
        (_RECIPIENT_EXAMPLE.search(template), MessageFormat("recipients", headed.ARROWS)),
        (NAMED in template, MessageFormat("tagged", (NAMED, ""), is_list=True)),
        (tags[0], MessageFormat("tagged", tags)),
        (python[0] or _PYTHON_EXAMPLE.search(template), MessageFormat("python", python)),
        (PYTHON_TAG in template, MessageFormat("bare_json", (PYTHON_TAG, ""))),
        (_JSON_EXAMPLE.search(template), MessageFormat("bare_json")),
    )  # the first that is shown: later ones are parts of some of those before
    return next((format for is_shown, format in known if is_shown), MessageFormat())


def _seen(example: str) -> MessageFormat | None:
    """Return how the call in an example is written; None if that is not JSON, Python, or in braces."""
    if len(example) > MAX_EXAMPLE_CHARS:
        return None
    if found := _BRACED.search(example):
        call, wrapper = _around(example[: found.start()], example[found.end() :])
        return (
            MessageFormat("braced", call, wrapper=wrapper, quote=found[1]) if call[0] and found[1] == found[2] else None
        )
    if found := _PYTHON.search(example):
        call, wrapper = _around(example[: found.start()], example[found.end() :])
        is_list = bool(found[1]) and bool(found[2])
        return MessageFormat("python" if is_list else "fenced", call, wrapper=wrapper) if is_list or call[0] else None
    return _seen_json(example)


def _seen_json(example: str) -> MessageFormat | None:
    for start in (found.start() for found in re.finditer(r"[\[{]", example)):
        try:
            value, length = json.JSONDecoder().raw_decode(example[start:])
        except (ValueError, RecursionError):
            continue
        call, wrapper = _around(example[:start], example[start + length :])
        is_list = isinstance(value, list) and bool(value)
        first = value[0] if is_list else value
        if isinstance(first, Mapping) and _is_named(first):
            return MessageFormat("tagged" if call[0] else "bare_json", call, wrapper=wrapper, is_list=is_list)
        if isinstance(first, Mapping) and isinstance(first.get(_NAME), Mapping) and call[0]:
            return MessageFormat("keyed", call, wrapper=wrapper, is_list=is_list)
    return None


def _is_named(value: Mapping[str, Any]) -> bool:
    inner = value.get("function")
    named = inner if isinstance(inner, Mapping) else value
    return _NAME in (named.get("name"), named.get("tool_name"))


def _around(before: str, after: str) -> tuple[tuple[str, str], tuple[str, str]]:
    """Return the tags directly around a call, and those around these."""
    found_before = _TAGS_BEFORE.search(before)
    found_after = _TAGS_AFTER.match(after)
    assert found_before is not None and found_after is not None, "both match no tags as well"
    opening = _TAG.findall(found_before[1])
    closing = _TAG.findall(found_after[1])
    closers = [index for index, tag in enumerate(opening) if tag[1] == "/"]
    opening = opening[closers[-1] + 1 if closers else 0 :]  # what comes before is of reasoning
    if not opening:
        return ("", ""), ("", "")
    has_wrapper = len(opening) > 1 and closing[:2] == [f"</{tag[1:]}" for tag in (opening[-1], opening[-2])]
    if has_wrapper:
        return (opening[-1], closing[0]), (opening[-2], closing[1])
    joined = found_before[1].rstrip().split()[-1]  # tags without a space between them are one marker
    return (joined, closing[0] if closing else ""), ("", "")


def format_beside(template: str, has_tools: bool) -> MessageFormat:
    """Return the format of the answers to a prompt of this template, with or without tools.

    Where the template shows no tools, and no call of which an example could be made, tools come with the description of a format
    of their own (``adapted.py``).
    """
    return _beside_tools(template, shape_of(template)) if has_tools else find_format(template)


@lru_cache(maxsize=8)
def _beside_tools(template: str, shape: TemplateShape) -> MessageFormat:
    found = _format_of(template, shape.examples)
    if shape.tools is None and shape.examples is None:
        return replace(found, syntax="generic", call=("", ""), learnt=None)
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
