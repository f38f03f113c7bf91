"""Finds out from a chat template how a model writes reasoning and calls; the model's name plays no part in it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from staticllm.pipelines.text.parsing import harmony

Syntax = Literal["", "tagged", "xml", "named", "bare_json", "python", "harmony"]
"""How calls are written: JSON between tags, a tag per parameter, ``[TOOL_CALLS]``, JSON or Python without tags, channels."""

TAGS = (
    ("<tool_call>", "</tool_call>"), ("<|tool_call|>", "<|/tool_call|>"), ("<function_call>", "</function_call>"),
    ("<|START_ACTION|>", "<|END_ACTION|>"),
)  # fmt: skip
NAMED, ARGS = "[TOOL_CALLS]", "[ARGS]"
FUNCTION = "<function="
PYTHON_TAG, PYTHON_START, PYTHON_END = "<|python_tag|>", "<|python_start|>", "<|python_end|>"
REASONING_TAGS = (
    ("<think>", "</think>"), ("<thinking>", "</thinking>"), ("<thought>", "</thought>"), ("<reasoning>", "</reasoning>"),
    ("<seed:think>", "</seed:think>"), ("[THINK]", "[/THINK]"), ("<|START_THINKING|>", "<|END_THINKING|>"),
)  # fmt: skip
_PYTHON_EXAMPLE = re.compile(r"\[\w+\(\w+\s*=")
_JSON_EXAMPLE = re.compile(r"""\{\s*\\?["']name\\?["']\s*:[^{}]*\\?["']parameters\\?["']\s*:""")


@dataclass(frozen=True)
class MessageFormat:
    """How an answer is written.

    ``call`` and ``reasoning`` are the markers around them; "" where there is none. ``is_reasoning_open``: the prompt ends with
    the first marker of reasoning, so the answer begins in it. ``has_args_marker``: a call is ``name[ARGS]{…}``, not JSON.
    """

    syntax: Syntax = ""
    call: tuple[str, str] = ("", "")
    reasoning: tuple[str, str] = ("", "")
    is_reasoning_open: bool = False
    has_args_marker: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers: where they are special tokens, they must be part of the text."""
        if self.syntax == "harmony":
            return harmony.MARKERS
        named = ("[ARGS]", "[CALL_ID]") if self.syntax == "named" else ()
        return tuple(filter(None, (*self.call, *self.reasoning, *named)))

    def after(self, prompt: str) -> MessageFormat:
        """Return the format of the answer to ``prompt``, a text that a chat template made."""
        begin = self.reasoning[0]
        return replace(self, is_reasoning_open=bool(begin) and prompt.rstrip().endswith(begin))


@lru_cache(maxsize=8)
def find_format(template: str) -> MessageFormat:
    """Return the format of the answers that ``template``, the source of a chat template, reads."""
    if harmony.CHANNEL in template and harmony.MESSAGE in template:
        return MessageFormat("harmony")
    reasoning = next((tags for tags in REASONING_TAGS if tags[1] in template), ("", ""))
    syntax, call = _call_syntax(template)
    return MessageFormat(syntax, call, reasoning, has_args_marker=syntax == "named" and ARGS in template)


def _call_syntax(template: str) -> tuple[Syntax, tuple[str, str]]:
    tags = next((tags for tags in TAGS if tags[0] in template), ("", ""))
    if FUNCTION in template and "<parameter=" in template:
        return "xml", tags
    if NAMED in template:
        return "named", (NAMED, "")
    if tags[0]:
        return "tagged", tags
    if PYTHON_START in template or _PYTHON_EXAMPLE.search(template):
        return "python", (PYTHON_START, PYTHON_END) if PYTHON_START in template else ("", "")
    if PYTHON_TAG in template or _JSON_EXAMPLE.search(template):
        return "bare_json", (PYTHON_TAG if PYTHON_TAG in template else "", "")
    return "", ("", "")


def takes_tools(template: str) -> bool:
    """Return whether a chat template shows tools to the model."""
    return re.search(r"\btools\b", template) is not None
