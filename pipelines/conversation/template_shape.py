"""Finds out what a chat template shows of a conversation, by rendering probes: its text may say anything.

A template that was written for one model reads tools, calls and results in that model's way, and leaves out what it does not
know. What it shows in no way is written into the messages (``adapted.py``), as GenAI does.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from typing import Any, Literal, NamedTuple, get_args

from .sandbox import (
    TemplateLimitError,
    compiled,
    limited,
    limited_apart,
    outside_cause,
    run,
)

CallIds = Literal["any", "short", "named"]
"""The ids of calls that a template takes: any; nine letters and digits; or ``functions.f:0``, where it shows the function only
there."""
ToolPlace = Literal[
    "variable", "functions of the variable", "variable after a system message", "list of the system message",
    "text of the system message",
]  # fmt: skip
"""Where a template reads tools: in the variable ``tools``, perhaps only where there is a system message, or as functions without
the object around them; or in the key ``tools`` of the system message, as a list or as JSON text of functions."""
Arguments = Literal["object", "text", "either"]
TextPlace = Literal["beside", "before", "nowhere"]
"""In the message with the calls, in a message before it, or in none: then the calls count more."""
Message = Mapping[str, Any]

_PROBE, _SAID = "<probe-of-the-template>", "§"
_NAME, _TOOL, _KEY, _VALUE, _RESULT = "probe_call", "probe_tool", "probe_key", "probe_value", "probe_result"
_LONG_ID = "call_0123456789abcdef0123456"
_SHORT_ID = "Probe012"
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""The names under which a message may have its reasoning."""
MAX_OPENING = 64
"""The most characters before a text of the assistant that a prompt has not before a call."""
PROBE_SECONDS = 0.5
ALL_PROBES_SECONDS = 3.0
"""The longest computing time of one probe and of all: what takes longer counts as not shown."""
RETRY_SECONDS = 30.0
"""How long what a template shows is kept if a probe ran out of time."""
MAX_KEPT = 16
"""The number of templates of which it is kept."""
USER = {"role": "user", "content": "Hey"}
TOOL = {
    "type": "function",
    "function": {
        "name": _TOOL, "description": "A probe.",
        "parameters": {"type": "object", "properties": {_KEY: {"type": "string", "description": "A probe."}}, "required": [_KEY]},
    },
}  # fmt: skip


@dataclass(frozen=True)
class CallForm:
    """How a message with calls must be given to a template so that it shows them."""

    has_null_content: bool
    """Whether ``content`` is None beside calls, else ""."""
    arguments: Arguments
    """What a template takes, a dict or JSON text."""
    ids: CallIds
    has_results: bool
    """Whether the messages with the results are shown as well."""
    text: TextPlace = "beside"
    """Where a text of the same message must stand so that both are shown."""
    has_several: bool = True
    """Whether a message may have several calls."""


class CallExamples(NamedTuple):
    """Calls as a prompt shows them, without what is around every message of the assistant; "" for one that cannot be told.

    The id of the first call is ``call1call``.
    """

    one: str
    """Calls ``tool_name`` with ``{"arg1": "some_value"}``."""
    number: str = ""
    """Has 7 as that value."""
    two_arguments: str = ""
    """Has ``"arg2": "other_value"`` as well."""
    two_calls: str = ""
    """Has a second call, of ``other_tool``."""


@dataclass(frozen=True)
class TemplateShape:
    """What a template shows. ``tools``, the calls and the key of the reasoning beside a call are None where it shows none."""

    wants_parts: bool
    """Whether it shows a text only as a list of parts."""
    takes_parts: bool
    """Whether it shows such a list as text."""
    has_system: bool
    """Whether it shows a system message, without tools or beside them."""
    has_system_beside_tools: bool
    tools: ToolPlace | None
    calls: CallForm | None
    """The form of calls in a conversation with tools."""
    lone_calls: CallForm | None
    """The form of calls in a conversation that has no tools now."""
    examples: CallExamples | None
    """None if they cannot be told."""
    reasoning: str | None
    has_reasoning_beside_text: bool
    """Whether it takes a text in the same message as well."""
    is_complete: bool
    """Whether no probe ran out of time."""


class _IncompleteError(Exception):
    """A probe ran out of time."""

    def __init__(self, shape: TemplateShape) -> None:
        super().__init__()
        self.shape = shape


_incomplete: dict[str, tuple[float, TemplateShape]] = {}
"""What templates show of which a probe ran out of time, each with the moment until which it is kept."""


def probed_shape(template: str) -> TemplateShape:
    """Return what a template shows. A probe that exceeds a bound counts as refused: not every conversation has tools.

    It is kept; where a probe ran out of time, which the next one may not, only for ``RETRY_SECONDS``: all that is asked for one
    conversation is then answered alike, and a template that always takes too long does not delay every conversation.

    Raises:
        Exception: what compiling a template raises, and what is not the template's fault (``outside_cause``).
        TemplateLimitError: a text of the user alone exceeds a bound.
    """
    until, shape = _incomplete.get(template, (0.0, None))
    if shape is not None and time.monotonic() < until:
        return shape
    try:
        return _complete_shape(template)
    except _IncompleteError as found:
        if len(_incomplete) >= MAX_KEPT:
            _incomplete.clear()
        _incomplete[template] = (time.monotonic() + RETRY_SECONDS, found.shape)
        return found.shape


@lru_cache(maxsize=MAX_KEPT)
def _complete_shape(template: str) -> TemplateShape:
    with limited():
        compiled(template)
        try:
            run(template, _context([USER]))
        except (TemplateLimitError, RecursionError):
            raise
        except Exception as error:  # the template refuses this shape
            if outside_cause(error) is not None:
                raise
    shape = _Prober(template).shape()
    if not shape.is_complete:
        raise _IncompleteError(shape)  # what is raised is not kept
    return shape


def in_parts(message: Message) -> Message:
    """Return a message whose text is a list with one part."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def with_tools(messages: Sequence[Message], tools: Sequence[Any], place: ToolPlace) -> tuple[list[Message], list[Any]]:
    """Return the messages and the variable ``tools`` that show tools where a template reads them."""
    functions = [tool.get("function", tool) if isinstance(tool, Mapping) else tool for tool in tools]
    if place in ("variable", "functions of the variable"):
        return [*messages], [*tools] if place == "variable" else functions
    system = next((message for message in messages if message.get("role") == "system"), None)
    others = [message for message in messages if message is not system]
    if place == "variable after a system message":
        return [system or {"role": "system", "content": ""}, *others], [*tools]
    shown: Any = [*tools] if place == "list of the system message" else json.dumps(functions, ensure_ascii=False)
    return [{"content": "", **(system or {}), "role": "system", "tools": shown}, *others], []


class _Shown(NamedTuple):
    """What a prompt has of a call and its result; the more the better."""

    has_call: bool
    has_result: bool
    is_json: bool
    """Whether the arguments are not those of Python."""


_NOTHING = _Shown(False, False, False)
_ALL = _Shown(True, True, True)


def _context(messages: Sequence[Message], tools: Sequence[Any] = (), has_prompt: bool = False) -> dict[str, Any]:
    context = {"messages": [*messages], "tools": [*tools] or None, "documents": None}
    tokens = dict.fromkeys(("bos_token", "eos_token", "pad_token"), "")
    return {**context, **tokens, "add_generation_prompt": has_prompt}


class _Prober:
    """Renders probes with one template."""

    def __init__(self, template: str) -> None:
        self._template = template
        self._seconds_left = ALL_PROBES_SECONDS
        self._is_complete = True

    def shape(self) -> TemplateShape:
        place = self._tool_place()
        lone = self._call_form(None)
        calls = lone if place is None else self._call_form(place)
        form = calls or lone
        examples = None if form is None else self._examples(form, place if calls is form else None)
        shape = TemplateShape(
            wants_parts=self._wants_parts,
            takes_parts=self._takes_parts(),
            has_system=self._has_system([]),
            has_system_beside_tools=self._has_system([TOOL]),
            tools=place,
            calls=calls,
            lone_calls=lone,
            examples=examples,
            **self._reasoning(form, place if calls is form else None),
            is_complete=True,
        )
        return replace(shape, is_complete=self._is_complete)

    def text(self, messages: Sequence[Message], tools: Sequence[Any] = (), has_prompt: bool = False) -> str:
        """Return what the template makes of a conversation, whose texts have the shape it wants; "" if it refuses that."""
        shaped = [in_parts(message) if self._wants_parts else message for message in messages]
        return self._raw_text(shaped, tools, has_prompt)

    def _raw_text(self, messages: Sequence[Message], tools: Sequence[Any] = (), has_prompt: bool = False) -> str:
        seconds = min(PROBE_SECONDS, self._seconds_left)
        with limited_apart(seconds) as budget:
            try:
                return run(self._template, _context(messages, tools, has_prompt))
            except Exception as error:  # the template refuses this shape
                if outside_cause(error) is not None:
                    raise
                return ""
            finally:
                self._seconds_left -= seconds - budget.seconds_left
                self._is_complete &= budget.seconds_left >= 0

    @cached_property
    def _wants_parts(self) -> bool:
        plain = {"role": "user", "content": _PROBE}
        return _PROBE not in self._raw_text([plain]) and _PROBE in self._raw_text([in_parts(plain)])

    def _takes_parts(self) -> bool:
        text = self._raw_text([in_parts({"role": "user", "content": _PROBE})])
        return _PROBE in text and "'text'" not in text and '"text"' not in text

    def _has_system(self, tools: Sequence[Any]) -> bool:
        return _PROBE in self.text([{"role": "system", "content": _PROBE}, USER], tools)

    def _tool_place(self) -> ToolPlace | None:
        places: tuple[ToolPlace, ...] = get_args(ToolPlace)
        for place in places:
            text = self.text(*with_tools([USER], [TOOL], place))
            if _TOOL in text:
                return place
        return None

    def _call_form(self, place: ToolPlace | None) -> CallForm | None:
        """Return the form in which the most is shown, of equal ones the first: any ids, with null, as a dict."""
        best = _NOTHING
        form = None
        kinds: tuple[CallIds, ...] = get_args(CallIds)
        for ids, is_null, is_text in product(kinds, (True, False), (False, True)):
            shown = self._shown(place, is_null, is_text, ids)
            if shown > best:
                takes_both = not is_text and self._shown(place, is_null, True, ids) >= shown
                arguments: Arguments = "either" if takes_both else "text" if is_text else "object"
                best = shown
                form = CallForm(is_null, arguments, ids, shown.has_result)
            if best == _ALL:
                break
        if form is None:
            return None
        return replace(form, text=self._text_place(place, form), has_several=self._has_several(place, form))

    def _text_place(self, place: ToolPlace | None, form: CallForm) -> TextPlace:
        text = {"role": "assistant", "content": _PROBE}
        asked = _asking(form, _call(form))
        if _VALUE in self._conversation(place, [{**asked, **text}]):
            return "beside"
        shown = self._conversation(place, [text, asked])
        return "before" if _VALUE in shown and _PROBE in shown else "nowhere"

    def _reasoning(self, form: CallForm | None, place: ToolPlace | None) -> dict[str, Any]:
        """Return the key in which reasoning before a call is shown, and whether a text may be beside it."""
        if form is None:
            return {"reasoning": None, "has_reasoning_beside_text": False}
        call = _call(form)
        for key in REASONING_KEYS:
            asked = {**_asking(form, call), key: _PROBE}
            if _PROBE in self._conversation(place, [asked, _result_of(call)]):
                both = self._conversation(place, [{**asked, "content": _SAID}, _result_of(call)])
                return {"reasoning": key, "has_reasoning_beside_text": _PROBE in both}
        return {"reasoning": None, "has_reasoning_beside_text": False}

    def _has_several(self, place: ToolPlace | None, form: CallForm) -> bool:
        calls = [_call(form), _call(form, "probe_other", number=1)]
        results = [_result_of(call, f"{_RESULT}{index}") for index, call in enumerate(calls)]
        shown = self._conversation(place, [_asking(form, *calls), *results])
        wanted = [_NAME, "probe_other", *([f"{_RESULT}0", f"{_RESULT}1"] if form.has_results else [])]
        return shown.count(_VALUE) > 1 and all(each in shown for each in wanted)

    def _shown(self, place: ToolPlace | None, is_null: bool, is_text: bool, ids: CallIds) -> _Shown:
        """Return what is shown of a call and of its result in this form."""
        form = CallForm(is_null, "text" if is_text else "object", ids, has_results=True)
        call = _call(form)
        asked = _asking(form, call)
        result = _result_of(call)
        both = self._conversation(place, [asked, result])
        alone = self._conversation(place, [asked])
        has_result = _RESULT in both
        text = both or alone
        has_call = _VALUE in text and _NAME in (alone or both)  # the name of a result is none of the call
        if has_call and is_null and "None" in text:  # is it the content?
            filled = [{**asked, "content": ""}, *([result] if has_result else [])]
            has_call = text.count("None") <= self._conversation(place, filled).count("None")
        num_others = self._num_quoted(self._conversation(place, []))
        return _Shown(has_call, has_call and has_result, has_call and self._num_quoted(text) <= num_others)

    @staticmethod
    def _num_quoted(text: str) -> int:
        """Return how often the argument of the call stands in a text as Python writes it; tools may have it as well."""
        return text.count(f"'{_KEY}'")

    def _conversation(self, place: ToolPlace | None, rest: Sequence[Message], has_prompt: bool = False) -> str:
        messages, tools = ([USER, *rest], []) if place is None else with_tools([USER, *rest], [TOOL], place)
        return self.text(messages, tools, has_prompt)

    def _examples(self, form: CallForm, place: ToolPlace | None) -> CallExamples | None:
        value = {"arg1": "some_value"}
        first = _example_call(form, "tool_name", value)
        one = self._example(form, place, [first])
        if not ("tool_name" in one and "some_value" in one):
            return None
        number = {"arg1": 7}
        two = {**value, "arg2": "other_value"}
        return CallExamples(
            one,
            self._example(form, place, [_example_call(form, "tool_name", number)]),
            self._example(form, place, [_example_call(form, "tool_name", two)]),
            self._example(form, place, [first, _example_call(form, "other_tool", value, 1)])
            if form.has_several
            else "",
        )

    def _example(self, form: CallForm, place: ToolPlace | None, calls: Sequence[Any]) -> str:
        """Return what a prompt has of calls, without what ends each message of the assistant; "" if that cannot be told."""
        asked = self._conversation(place, [_asking(form, *calls)])
        said = self._conversation(place, [{"role": "assistant", "content": _SAID}])
        place_said = said.find(_SAID)
        if place_said < 0 or "tool_name" not in asked:
            return ""
        before = num_equal(asked, said)
        after = num_equal(asked[before:][::-1], said[before:][::-1])
        begin = _whole_tags(asked, before)
        if place_said - begin > MAX_OPENING:
            return ""  # it is not where a text would be
        end = len(asked) - after
        if _whole_tags(asked, end) < end:  # the end of a tag is like that of another
            end = asked.find(">", end) + 1 or len(asked)
        return asked[begin:end].strip()


def named_id(name: str, number: int) -> str:
    """Return the id of a call where templates show the function only in it; calls are numbered from 0."""
    return f"functions.{name}:{number}"


def _call(form: CallForm, name: str = _NAME, number: int = 0) -> dict[str, Any]:
    """Return a probe call in a form; ``number`` tells it from others."""
    id = {"any": f"{_LONG_ID}{number}", "short": f"{_SHORT_ID}{number}", "named": named_id(name, number)}[form.ids]
    return _call_of(form, id, name, {_KEY: _VALUE})


def _example_call(form: CallForm, name: str, arguments: Mapping[str, Any], number: int = 0) -> dict[str, Any]:
    id = named_id(name, number) if form.ids == "named" else f"call{number + 1}call"
    return _call_of(form, id, name, arguments)


def _call_of(form: CallForm, id: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    written = json.dumps(arguments) if form.arguments == "text" else arguments
    return {"id": id, "type": "function", "function": {"name": name, "arguments": written}}


def _asking(form: CallForm, *calls: dict[str, Any]) -> Message:
    """Return a message of the assistant with calls alone."""
    return {"role": "assistant", "content": None if form.has_null_content else "", "tool_calls": [*calls]}


def _result_of(call: Mapping[str, Any], text: str = _RESULT) -> Message:
    return {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": text}


def num_equal(one: str, other: str) -> int:
    """Return how many characters at the beginning of two texts are equal."""
    differing = (place for place, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1])
    return next(differing, min(len(one), len(other)))


def _whole_tags(text: str, end: int) -> int:
    """Return the place of the tag in which ``end`` stands; ``end`` itself outside of tags."""
    for opening, closing in ("<>", "[]"):
        begin = text.rfind(opening, 0, end)
        if begin > text.rfind(closing, 0, end):
            end = begin
    return end
